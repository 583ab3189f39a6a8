"""The executions of a function or program (debug, eager, jit, ...), which must agree.

A test that is parametrised by `RUNNERS` holds for each of them:

    @pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
    def test_both_branches_are_right(run):
        agree(run(lambda x: hf.cond(True, hf.sin, hf.cos, (x,)), x), np.sin(x))
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

import hopflow
from hopflow import pytree
from hopflow.compiler.cpu.target import host
from hopflow.compiler.kernel_passes import branches
from hopflow.compiler.kernel_program.interpreter import KernelTrap
from hopflow.compiler.kernel_program.interpreter import run as run_kernel_program
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of, lower
from hopflow.compiler.schedule import (
    blocked_sums,
    privatize,
    register_tiles,
    threads,
)
from hopflow.compiler.schedule.schedule import memory_plans
from hopflow.compiler.traps import trap_error
from hopflow.config import config
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    HopflowError,
    IndexingError,
)
from hopflow.graph.core import Graph
from hopflow.graph.verifier import verify
from hopflow.hops.base import debug, interpreted
from hopflow.jit import jit
from hopflow.loop_ir import interpreter
from hopflow.loop_ir.program import Program as LoopProgram
from hopflow.loop_ir.program import Site
from hopflow.testing.bindings import one_by_one, rebound
from hopflow.testing.libraries import names_of_jax
from hopflow.testing.program import Program
from hopflow.testing.requires import load, missing
from hopflow.trace.capture import trace
from hopflow.trace.functionalize import functionalize

__all__ = [
    "EXECUTIONS",
    "NAMES",
    "REGISTRY",
    "RUNNERS",
    "SYMBOLIC",
    "Execution",
    "ProgramExecution",
    "agree",
    "fails",
    "in_turn",
    "interpreted",
    "register_execution",
]

Run = Callable[..., Any]
"""(f, *args) -> the result of `f(*args)`."""


class Execution(NamedTuple):
    """A way to run a function."""

    name: str
    run: Run


def run_debug(f: Run, *args: Any) -> Any:
    """Run operators as plain Python."""
    with debug():
        return f(*args)


def run_eager(f: Run, *args: Any) -> Any:
    """Run eagerly: trace each operator where it is called, and interpret its graph."""
    with interpreted():
        return f(*args)


def run_traced(f: Run, *args: Any) -> Any:
    """Trace the whole function, verify the graph, and interpret it."""
    module = trace(f, *args, captures=True)
    verify(module.graph)
    with interpreted():
        return module(*args)


def run_native(f: Run, *args: Any) -> Any:
    """Run eagerly: trace and compile each operator where it is called."""
    return f(*args)


def run_jit(f: Run, *args: Any) -> Any:
    """Compile the whole function."""
    return jit(f)(*args)


def run_symbolic(f: Run, *args: Any) -> Any:
    """Trace the whole function with symbolic sizes and numbers, and interpret it."""
    with interpreted():
        return run_symbolic_native(f, *args)


def run_symbolic_native(f: Run, *args: Any) -> Any:
    """Trace the whole function with symbols, and compile its operators."""
    module = trace(f, *args, mode="symbolic", captures=True)
    verify(module.graph)
    return module(*args)


def run_dynamic(f: Run, *args: Any) -> Any:
    """Compile the whole function with symbolic sizes and numbers."""
    return jit(f, dynamic=True)(*args)


EXECUTIONS: Final = [
    Execution("debug", run_debug),
    Execution("eager", run_eager),
    Execution("traced", run_traced),
    Execution("native", run_native),
    Execution("jit", run_jit),
]
RUNNERS: Final = [execution.run for execution in EXECUTIONS]
NAMES: Final = [execution.name for execution in EXECUTIONS]

SYMBOLIC: Final = [run_symbolic, run_symbolic_native, run_dynamic]
"""The executions with symbolic sizes and numbers."""


def in_turn(*axes: Sequence[Any], of: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations of `axes`, each with one element of `of` in turn.

    It is for tests in which the full product would hardly find more: a fault shows in a
    combination, or in a pair of one of its members and one of `of`.
    """
    return [
        (*(x for _, x in places), of[sum(k for k, _ in places) % len(of)])
        for places in product(*map(list, map(enumerate, axes)))
    ]


def fails(error: type[Exception], text: str, f: Run, *args: Any, **kwargs: Any) -> None:
    """Check that `f(*args)` raises `error` with exactly this text.

    Line numbers are written `#`: "`step` (test_model.py:#) must return ...".

    Raises:
        AssertionError: it raises no such error, or one with another text.
    """
    message = None
    try:
        f(*args, **kwargs)
    except error as raised:
        message = str(raised)
    assert message is not None, f"no {error.__name__} was raised"
    assert re.sub(r"\.py:\d+", ".py:#", message) == text


def agree(got: Any, expected: Any, *, rtol: float = 1e-5) -> None:
    """Check that two trees have equal structures and, up to `rtol`, equal leaves.

    Raises:
        AssertionError: they differ; with the path of the leaf.
    """
    leaves, spec = pytree.flatten(got)
    expected_leaves, expected_spec = pytree.flatten(expected)
    assert spec == expected_spec, f"{spec} is not {expected_spec}"
    paths = pytree.leaf_paths(spec, "result")
    for path, a, b in zip(paths, leaves, expected_leaves, strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert x.shape == y.shape, f"{path}: shape {x.shape} is not {y.shape}"
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=path)


# --- executions of typed programs -----------------------------------------------------


@dataclass(frozen=True)
class ProgramExecution:
    """A way to run a drawn program.

    run     (make, arguments) -> results, where `make(library)` is the program as a
            function that uses `library`
    when    program -> whether this execution supports it
    has     the transforms that it supports: "vmap", "grad"
    cheap   whether it needs no compilation
    stops   whether an index out of range is an error; if not, such programs are skipped
    lacks   the errors for unsupported programs
    """

    name: str
    run: Callable[[Callable[[Any], Run], Sequence[Any]], Any]
    when: Callable[[Program], bool] = lambda _: True
    has: frozenset[str] = frozenset({"vmap", "grad"})
    cheap: bool = False
    stops: bool = True
    lacks: tuple[type[Exception], ...] = ()


REGISTRY: Final[dict[str, ProgramExecution]] = {}
"""The executions by name; `check` compares all of them."""


def register_execution(execution: ProgramExecution) -> ProgramExecution:
    """Add an execution that `check` compares, and return it.

    Raises:
        ArgumentTypeError: it is no `ProgramExecution`.
        ArgumentValueError: its name is in use.
    """
    if not isinstance(execution, ProgramExecution):
        raise ArgumentTypeError(
            "register_execution: `execution` must be a ProgramExecution, and is "
            f"{type(execution).__name__}. Give one its name and what runs a program."
        )
    if execution.name in REGISTRY:
        raise ArgumentValueError(
            f"register_execution: there is an execution called {execution.name!r} "
            "already."
        )
    REGISTRY[execution.name] = execution
    return execution


def in_hopflow(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the runner of a `ProgramExecution` that uses hopflow as the library."""

    def of_program(make: Callable[[Any], Run], arguments: Sequence[Any]) -> Any:
        return run(make(hopflow), *map(hopflow.asarray, arguments))

    return of_program


def with_threads(count: int) -> Run:
    """Return an execution of compiled code with a number of threads."""

    def run(f: Run, *args: Any) -> Any:
        previous, config.num_threads = config.num_threads, count
        try:
            return run_jit(f, *args)
        finally:
            config.num_threads = previous

    return run


def run_functionalized(f: Run, *args: Any) -> Any:
    """Functionalize, and interpret operators."""
    with interpreted():
        return functionalize(f)(*args)


def run_checked(f: Run, *args: Any) -> Any:
    """Compile with bounds checks of all memory accesses."""
    previous, config.check_bounds = config.check_bounds, True
    try:
        return run_jit(f, *args)
    finally:
        config.check_bounds = previous


def run_donated(f: Run, *args: Any) -> Any:
    """Compile with all arguments donated, so that results may reuse their memory."""
    copies = [hopflow.copy(x) for x in args]
    return jit(f, donate=tuple(range(len(copies))))(*copies)


def run_resized(f: Run, *args: Any) -> Any:
    """Compile with symbolic sizes by a call at other sizes, and then call it. Its
    memory is between guard pages: an access out of bounds ends the process."""
    previous, config.guard_pages = config.guard_pages, True
    try:
        jitted = jit(f, dynamic=True)
        with suppress(
            HopflowError, ArithmeticError
        ):  # the function may not support other sizes
            jitted(*map(_resized, args))
        return jitted(*args)
    finally:
        config.guard_pages = previous


def run_rebound_reads(f: Run, *args: Any) -> Any:
    """Compile as a function without arguments that reads those of `f` from outside;
    call it with other tensors there, and then with these."""
    first = sum(np.asarray(x).size for x in args) % len(PLACES)
    outside = _reader(len(args), first)(f)
    jitted = jit(outside.call)
    for others in (map(_resized, args), map(_changed, args)):
        outside.rebind(*others)
        with suppress(
            HopflowError, ArithmeticError
        ):  # it may not support these tensors
            jitted()
    outside.rebind(*args)
    return jitted()


def run_replayed(f: Run, *args: Any) -> Any:
    """Run eagerly an operator whose function has no arguments and reads those of `f`
    from outside: twice with other tensors there, so that it is recorded, and then with
    these."""
    first = sum(np.asarray(x).size for x in args) % len(PLACES)
    outside = _reader(len(args), first)(f)
    outside.rebind(*map(_changed, args))
    for _ in range(2):
        with suppress(
            HopflowError, ArithmeticError
        ):  # it may not support these tensors
            _branch(outside.call)
    outside.rebind(*args)
    return _branch(outside.call)


def _branch(f: Callable[[], Any]) -> Any:
    """Call a function as the branch that an operator takes."""
    return hopflow.cond(hopflow.asarray(True), f, f)


class Place(NamedTuple):
    """A place outside a function, as templates of its number `{}`.

    first   the statement that creates it
    read    the expression that reads it
    write   the statement that assigns another value to it
    cell    the variable of the enclosing function that this assigns
    module  the global that this assigns
    """

    first: str
    read: str
    write: str
    cell: str = ""
    module: str = ""


PLACES: Final = (
    Place("pass", "global{0}", "global{0} = {1}", module="global{0}"),
    Place("cell{0} = None", "cell{0}", "cell{0} = {1}", cell="cell{0}"),
    Place("pass", "holder.x{0}", "holder.x{0} = {1}"),
    Place("pass", "table[{0}]", "table[{0}] = {1}"),
    # The key alternates, so that the old key still leads to the old value.
    Place(
        "rows{0}, key{0} = [None, None], 0",
        "rows{0}[key{0}]",
        "key{0} = 1 - key{0}; rows{0}[key{0}] = {1}",
        cell="key{0}",
    ),
    Place("variable{0} = ContextVar('x')", "variable{0}.get()", "variable{0}.set({1})"),
    Place("pass", "globals()['name{0}']", "globals()['name{0}'] = {1}"),
    Place(
        "box{0} = Holder()", "weak[{0}]().x", "box{0}.x = {1}; weak[{0}] = ref(box{0})"
    ),
)

READERS: Final = """
from contextvars import ContextVar
from weakref import ref

class Holder: pass

def outside(f):
    holder, table, weak = Holder(), {{}}, {{}}
    {first}

    def call():
        return f({reads})

    def rebind({parameters}):
        {names}
        {writes}

    holder.call, holder.rebind = call, rebind
    return holder
"""


@functools.cache
def _reader(count: int, first: int) -> Callable[[Run], Any]:
    """Return a function of `f` that makes an object with two methods: `call()` calls
    `f` on the values in `PLACES`, from position `first` on; `rebind(*values)` assigns
    them."""
    places = [PLACES[(first + k) % len(PLACES)] for k in range(count)]
    cells = [p.cell.format(k) for k, p in enumerate(places) if p.cell]
    modules = [p.module.format(k) for k, p in enumerate(places) if p.module]
    names = [f"nonlocal {', '.join(cells)}"] * bool(cells)
    names += [f"global {', '.join(modules)}"] * bool(modules)
    text = READERS.format(
        first="; ".join(p.first.format(k) for k, p in enumerate(places)) or "pass",
        reads=", ".join(p.read.format(k) for k, p in enumerate(places)),
        parameters=", ".join(f"x{k}" for k in range(count)),
        names="; ".join(names) or "pass",
        writes="; ".join(p.write.format(k, f"x{k}") for k, p in enumerate(places))
        or "pass",
    )
    scope: dict[str, Any] = {}
    exec(compile(text, "<program>", "exec"), scope)
    return scope["outside"]  # type: ignore[no-any-return]


def _changed(x: Any) -> Any:
    """Return a tensor of the same type with other elements."""
    return hopflow.asarray(np.asarray(x) != 1, dtype=x.dtype)


def _resized(x: Any) -> Any:
    """Return a tensor that is longer along each axis of size 2 or more."""
    shape = [n + 1 if n > 1 else n for n in x.shape]
    return hopflow.asarray(np.resize(np.asarray(x), shape))


def captured(f: Run, *args: Any, may_stop: bool = False) -> tuple[Graph, list[Any]]:
    """Return a function as a graph, and the arrays that it reads.

    Args:
        may_stop: Whether an index may be out of range, so that native code fails.
    """
    jitted = jit(f)
    try:
        jitted(*args)
    except IndexingError:
        if not may_stop or jitted._last is None:
            raise
    tensors = jitted._present.find_captured(args)
    assert tensors is not None
    return jitted.graph, [np.asarray(a) for a in (*args, *tensors)]


def run_kernels(f: Run, *args: Any) -> Any:
    """Interpret the kernel program."""
    return _interpreted(f, args, run_kernel_program)


def run_memory(f: Run, *args: Any) -> Any:
    """Interpret the kernel program after all passes, with tagged memory cells."""

    def run(program: KernelProgram, arrays: Any) -> Any:
        plans = {plan.program: plan for plan, _ in memory_plans(program)}
        for plan in plans.values():
            verify_kernels(plan.program)
            verify_memory(plan)
        return run_planned(program, plans, arrays)

    return _interpreted(f, args, run)


def run_branches(f: Run, *args: Any) -> Any:
    """Interpret it with a branch for each test that is the same for all elements, even
    where that saves nothing."""
    with _limits(branches, DEAR=0, LEAST=0, SHARE=1 << 60):
        return run_memory(f, *args)


@contextmanager
def _limits(module: ModuleType, **limits: int) -> Iterator[None]:
    """Set constants of a pass for the block, so that it changes small programs, too."""
    previous = {name: getattr(module, name) for name in limits}
    try:
        for name, limit in limits.items():
            setattr(module, name, limit)
        yield
    finally:
        for name, limit in previous.items():
            setattr(module, name, limit)


def _interpreted(f: Run, args: Any, run: Callable[..., Any]) -> Any:
    graph, arrays = captured(f, *args, may_stop=True)
    program = kernels_of(graph)
    verify_kernels(program)
    try:
        return tuple(run(program, arrays))
    except KernelTrap as trap:
        site = Site(trap.kind, 0)
        raise (
            trap_error(site, trap.node, trap.values) if trap.node else trap
        ) from None


def scheduled(f: Run, *args: Any) -> tuple[LoopProgram, list[Any]]:
    """Return a function as a program of the Loop IR, and the arrays that it reads."""
    graph, arrays = captured(f, *args)
    _, program = lower(graph)
    return program, arrays


def run_loop_ir(f: Run, *args: Any) -> Any:
    """Interpret the scheduled program in Loop IR."""
    program, arrays = scheduled(f, *args)
    return tuple(interpreter.run(program, (), arrays))


def run_in_parts(f: Run, *args: Any) -> Any:
    """Interpret it with all loops that may be on several threads, however short; those
    that scatter have arrays of their own, and sums blocks of a few numbers. Tiles have
    two rows, so that rows are left."""
    few = 3
    with (
        _limits(threads, LARGE=0, LARGE_IN_STEP=0, LONG_ROW=1, OF_A_SUM=few),
        _limits(blocked_sums, BLOCK=few),
        _limits(privatize, ITERATIONS=0),
        _limits(register_tiles, MOST=2),
    ):
        return run_loop_ir(f, *args)


def run_rebound(f: Run, *args: Any) -> Any:
    """Interpret it with loops bound to gangs and GPU axes where possible."""
    graph, arrays = captured(f, *args)
    _, program = lower(graph, target=one_by_one(host()))
    rebound(program)
    return tuple(interpreter.run(program, (), arrays))


def run_jax(make: Callable[[Any], Run], arguments: Sequence[Any]) -> Any:
    """Compile the program in JAX, with 64-bit dtypes."""
    jax = load("jax")
    with jax.enable_x64(True):
        result = jax.jit(make(names_of_jax()))(*arguments)
        return jax.tree.map(np.asarray, result)


def in_jax(program: Program) -> bool:
    """Whether JAX supports a program."""
    needs_hopflow = program.writes or program.sizes_of_data or program.operators
    return not (needs_hopflow or missing("jax"))


for _execution in (
    ProgramExecution("debug", in_hopflow(run_debug), cheap=True),
    ProgramExecution("eager", in_hopflow(run_eager), cheap=True),
    ProgramExecution(
        "traced",
        in_hopflow(run_traced),
        # A trace for concrete sizes has no symbols for unbacked sizes.
        when=lambda program: not program.sizes_of_data,
        has=frozenset(["vmap"]),
        cheap=True,
    ),
    ProgramExecution("symbolic", in_hopflow(run_symbolic), cheap=True),
    ProgramExecution("functionalized", in_hopflow(run_functionalized), cheap=True),
    ProgramExecution("kernels", in_hopflow(run_kernels)),
    ProgramExecution("kernels, memory planned", in_hopflow(run_memory)),
    ProgramExecution("kernels, all branches", in_hopflow(run_branches)),
    ProgramExecution("loop ir", in_hopflow(run_loop_ir)),
    ProgramExecution("loop ir, all threads", in_hopflow(run_in_parts)),
    ProgramExecution("loop ir, gangs and gpu", in_hopflow(run_rebound)),
    ProgramExecution("native", in_hopflow(run_native)),
    ProgramExecution("native, rebound reads", in_hopflow(run_replayed)),
    ProgramExecution("jit", in_hopflow(with_threads(1))),
    ProgramExecution("jit, 2 threads", in_hopflow(with_threads(2))),
    ProgramExecution("jit, bounds checked", in_hopflow(run_checked)),
    ProgramExecution("jit, rebound reads", in_hopflow(run_rebound_reads)),
    ProgramExecution("jit, donated arguments", in_hopflow(run_donated)),
    ProgramExecution("dynamic", in_hopflow(run_dynamic)),
    ProgramExecution("dynamic, other sizes first", in_hopflow(run_resized)),
    # JAX lacks the transpose of some primitives.
    ProgramExecution(
        "jax", run_jax, when=in_jax, stops=False, lacks=(NotImplementedError,)
    ),
):
    register_execution(_execution)
