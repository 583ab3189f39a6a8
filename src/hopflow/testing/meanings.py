"""The ways to run a program that must all agree, and what it takes to compare them.

A test that is parametrised by `MEANINGS` states a fact of each of them:

    @pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
    def test_both_branches_are_right(run):
        agree(run(lambda x: hf.cond(True, hf.sin, hf.cos, (x,)), x), np.sin(x))
"""

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

import hopflow
from hopflow import pytree
from hopflow.compiler.kernel_passes import branches
from hopflow.compiler.kernel_program.interpreter import KernelTrap
from hopflow.compiler.kernel_program.interpreter import run as run_kernel_program
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.verifier import verify_memory
from hopflow.compiler.pipeline import kernels_of, lower
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
from hopflow.testing.bindings import rebound
from hopflow.testing.libraries import names_of_jax
from hopflow.testing.program import Program
from hopflow.testing.requires import load, missing
from hopflow.trace.capture import trace
from hopflow.trace.functionalize import functionalize

__all__ = [
    "MEANINGS",
    "NAMES",
    "REGISTRY",
    "RUNNERS",
    "SYMBOLIC",
    "Meaning",
    "ProgramMeaning",
    "agree",
    "fails",
    "in_turn",
    "interpreted",
    "register_meaning",
]

Run = Callable[..., Any]
"""(f, *args) -> what `f(*args)` returns."""


class Meaning(NamedTuple):
    name: str
    run: Run


def run_debug(f: Run, *args: Any) -> Any:
    """Operators as plain Python."""
    with debug():
        return f(*args)


def run_eager(f: Run, *args: Any) -> Any:
    """Operators traced where they are called, and interpreted."""
    with interpreted():
        return f(*args)


def run_traced(f: Run, *args: Any) -> Any:
    """The whole function traced, verified, and interpreted."""
    module = trace(f, *args, captures=True)
    verify(module.graph)
    with interpreted():
        return module(*args)


def run_native(f: Run, *args: Any) -> Any:
    """Operators traced where they are called, compiled, and run as native code."""
    return f(*args)


def run_jit(f: Run, *args: Any) -> Any:
    """The whole function compiled."""
    return jit(f)(*args)


def run_symbolic(f: Run, *args: Any) -> Any:
    """The whole function traced for all sizes and numbers, and interpreted."""
    with interpreted():
        return run_symbolic_native(f, *args)


def run_symbolic_native(f: Run, *args: Any) -> Any:
    """The same, with operators as native code."""
    module = trace(f, *args, mode="symbolic", captures=True)
    verify(module.graph)
    return module(*args)


def run_dynamic(f: Run, *args: Any) -> Any:
    """The whole function compiled for all sizes and numbers."""
    return jit(f, dynamic=True)(*args)


MEANINGS: Final = [
    Meaning("debug", run_debug),
    Meaning("eager", run_eager),
    Meaning("traced", run_traced),
    Meaning("native", run_native),
    Meaning("jit", run_jit),
]
RUNNERS: Final = [meaning.run for meaning in MEANINGS]
NAMES: Final = [meaning.name for meaning in MEANINGS]

SYMBOLIC: Final = [run_symbolic, run_symbolic_native, run_dynamic]
"""Those in which sizes and numbers are symbols."""


def in_turn(*axes: Sequence[Any], of: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of `axes`, each with one of `of`: they take turns.

    For tests whose whole product would try little more: where what may go wrong is in a
    combination, or between one of its members and one of `of`.
    """
    return [
        (*(x for _, x in places), of[sum(k for k, _ in places) % len(of)])
        for places in product(*map(list, map(enumerate, axes)))
    ]


def fails(error: type[Exception], text: str, f: Run, *args: Any, **kwargs: Any) -> None:
    """Check that `f(*args)` raises `error` with exactly this text.

    Line numbers are written `#`: "`step` (test_model.py:#) must return ...".

    Raises:
        AssertionError: it does not, or with another text.
    """
    message = None
    try:
        f(*args, **kwargs)
    except error as found:
        message = str(found)
    assert message is not None, f"no {error.__name__} was raised"
    assert re.sub(r"\.py:\d+", ".py:#", message) == text


def agree(got: Any, expected: Any, *, rtol: float = 1e-5) -> None:
    """Check that two trees have one structure and, nearly, one value in each leaf.

    Raises:
        AssertionError: they differ; by the leaf's path.
    """
    found, spec = pytree.flatten(got)
    wanted, wanted_spec = pytree.flatten(expected)
    assert spec == wanted_spec, f"{spec} is not {wanted_spec}"
    paths = pytree.leaf_paths(spec, "result")
    for path, a, b in zip(paths, found, wanted, strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert x.shape == y.shape, f"{path}: shape {x.shape} is not {y.shape}"
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=path)


# --- meanings of typed programs -------------------------------------------------------


@dataclass(frozen=True)
class ProgramMeaning:
    """A way to run a program.

    run     (make, arguments) -> results, where `make(library)` is what to run, as a
            function in `library`
    when    which programs it can have
    has     what it has beside values: "vmap", "grad"
    cheap   whether it takes no compilation
    stops   whether an index out of range stops it; if not, it says nothing of those
    lacks   errors by which it says that it cannot have a program
    """

    name: str
    run: Callable[[Callable[[Any], Run], Sequence[Any]], Any]
    when: Callable[[Program], bool] = lambda _: True
    has: frozenset[str] = frozenset({"vmap", "grad"})
    cheap: bool = False
    stops: bool = True
    lacks: tuple[type[Exception], ...] = ()


REGISTRY: Final[dict[str, ProgramMeaning]] = {}
"""By name; `check` compares all of them."""


def register_meaning(meaning: ProgramMeaning) -> ProgramMeaning:
    """Have `check` compare one more meaning.

    Raises:
        ArgumentTypeError: it is no `ProgramMeaning`.
        ArgumentValueError: there is one of that name.
    """
    if not isinstance(meaning, ProgramMeaning):
        raise ArgumentTypeError(
            "register_meaning: `meaning` must be a ProgramMeaning, and is "
            f"{type(meaning).__name__}. Give one its name and what runs a program."
        )
    if meaning.name in REGISTRY:
        raise ArgumentValueError(
            f"register_meaning: there is a meaning called {meaning.name!r} already."
        )
    REGISTRY[meaning.name] = meaning
    return meaning


def in_ours(run: Callable[..., Any]) -> Callable[..., Any]:
    """A meaning of functions as one of programs in our library."""

    def of_program(make: Callable[[Any], Run], arguments: Sequence[Any]) -> Any:
        return run(make(hopflow), *map(hopflow.asarray, arguments))

    return of_program


def with_threads(count: int) -> Run:
    """Compiled, for so many threads."""

    def run(f: Run, *args: Any) -> Any:
        before, config.num_threads = config.num_threads, count
        try:
            return run_jit(f, *args)
        finally:
            config.num_threads = before

    return run


def run_functionalized(f: Run, *args: Any) -> Any:
    """Without writes, operators interpreted."""
    with interpreted():
        return functionalize(f)(*args)


def run_checked(f: Run, *args: Any) -> Any:
    """Compiled, with all that it reads and writes checked to lie within its memory."""
    before, config.check_bounds = config.check_bounds, True
    try:
        return run_jit(f, *args)
    finally:
        config.check_bounds = before


def run_donated(f: Run, *args: Any) -> Any:
    """Compiled with all arguments given up, so that results may take their memory."""
    own = [hopflow.copy(x) for x in args]
    return jit(f, donate=tuple(range(len(own))))(*own)


def run_resized(f: Run, *args: Any) -> Any:
    """Compiled for all sizes when it is called at others, and then called: all of its
    memory lies between closed pages, and what goes beside it ends the process."""
    before, config.guard_pages = config.guard_pages, True
    try:
        jitted = jit(f, dynamic=True)
        with suppress(HopflowError, ArithmeticError):  # there may be no others
            jitted(*map(_resized, args))
        return jitted(*args)
    finally:
        config.guard_pages = before


def run_rebound_reads(f: Run, *args: Any) -> Any:
    """Compiled as a function of nothing, which reads the arguments of `f` from outside:
    called when other tensors are there, and again when those are."""
    first = sum(np.asarray(x).size for x in args) % len(PLACES)
    outside = _reader(len(args), first)(f)
    jitted = jit(outside.call)
    for others in (map(_resized, args), map(_changed, args)):
        outside.rebind(*others)
        with suppress(HopflowError, ArithmeticError):  # they may be too large for it
            jitted()
    outside.rebind(*args)
    return jitted()


class Place(NamedTuple):
    """A place outside of a function, `{}` standing for its number.

    first   the statement that makes it
    read    the expression that reads it
    write   the statement that binds it to another value
    cell, module   the name that this binds in the enclosing function, in the module
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
    # Another key each time: what the other one leads to is what was read before.
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
    """A function that makes an object of two: `call()`, which hands `f` what it reads
    from `PLACES` in turn, beginning with one of them; and `rebind`."""
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
    """A tensor of the same type, with other elements."""
    return hopflow.asarray(np.asarray(x) != 1, dtype=x.dtype)


def _resized(x: Any) -> Any:
    """A tensor that is longer along each axis, but those of one element or none."""
    shape = [n + 1 if n > 1 else n for n in x.shape]
    return hopflow.asarray(np.resize(np.asarray(x), shape))


def captured(f: Run, *args: Any, may_stop: bool = False) -> tuple[Graph, list[Any]]:
    """A function as a graph, and the arrays that it reads; the graph `may_stop` where
    an index is out of range, as native code does."""
    jitted = jit(f)
    try:
        jitted(*args)
    except IndexingError:
        if not may_stop or jitted._last is None:
            raise
    found = jitted._present.find_captured(args)
    assert found is not None
    return jitted.graph, [np.asarray(a) for a in (*args, *found)]


def run_kernels(f: Run, *args: Any) -> Any:
    """The kernel program, by its interpreter."""
    return _interpreted(f, args, run_kernel_program)


def run_memory(f: Run, *args: Any) -> Any:
    """The kernel program after all passes, with a tag on each cell of memory."""

    def run(program: KernelProgram, arrays: Any) -> Any:
        plans = {plan.program: plan for plan, _ in memory_plans(program)}
        for plan in plans.values():
            verify_kernels(plan.program)
            verify_memory(plan)
        return run_planned(program, plans, arrays)

    return _interpreted(f, args, run)


def run_branches(f: Run, *args: Any) -> Any:
    """The same, with a branch for each test that chooses for all elements at once, and
    be it for what costs nothing."""
    limits = {"DEAR": 0, "LEAST": 0, "SHARE": 1 << 60}
    before = {name: getattr(branches, name) for name in limits}
    try:
        for name, limit in limits.items():
            setattr(branches, name, limit)
        return run_memory(f, *args)
    finally:
        for name, limit in before.items():
            setattr(branches, name, limit)


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
    """A function as a program of the Loop IR, and the arrays that it reads."""
    graph, arrays = captured(f, *args)
    _, program = lower(graph)
    return program, arrays


def run_loop_ir(f: Run, *args: Any) -> Any:
    """The scheduled program, by the interpreter of the Loop IR."""
    program, arrays = scheduled(f, *args)
    return tuple(interpreter.run(program, (), arrays))


def run_rebound(f: Run, *args: Any) -> Any:
    """The same, with loops bound to gangs and GPU axes where they may be."""
    program, arrays = scheduled(f, *args)
    rebound(program)
    return tuple(interpreter.run(program, (), arrays))


def run_jax(make: Callable[[Any], Run], arguments: Sequence[Any]) -> Any:
    jax = load("jax")
    with jax.enable_x64(True):
        result = jax.jit(make(names_of_jax()))(*arguments)
        return jax.tree.map(np.asarray, result)


def in_jax(program: Program) -> bool:
    """Whether JAX defines the answer."""
    is_ours = program.writes or program.sizes_of_data or program.operators
    return not (is_ours or missing("jax"))


for _meaning in (
    ProgramMeaning("debug", in_ours(run_debug), cheap=True),
    ProgramMeaning("eager", in_ours(run_eager), cheap=True),
    ProgramMeaning(
        "traced",
        in_ours(run_traced),
        # A trace for one example has no symbols for sizes that only the run knows.
        when=lambda program: not program.sizes_of_data,
        has=frozenset(["vmap"]),
        cheap=True,
    ),
    ProgramMeaning("symbolic", in_ours(run_symbolic), cheap=True),
    ProgramMeaning("functionalized", in_ours(run_functionalized), cheap=True),
    ProgramMeaning("kernels", in_ours(run_kernels)),
    ProgramMeaning("kernels, memory planned", in_ours(run_memory)),
    ProgramMeaning("kernels, all branches", in_ours(run_branches)),
    ProgramMeaning("loop ir", in_ours(run_loop_ir)),
    ProgramMeaning("loop ir, gangs and gpu", in_ours(run_rebound)),
    ProgramMeaning("native", in_ours(run_native)),
    ProgramMeaning("jit", in_ours(with_threads(1))),
    ProgramMeaning("jit, 2 threads", in_ours(with_threads(2))),
    ProgramMeaning("jit, bounds checked", in_ours(run_checked)),
    ProgramMeaning("jit, rebound reads", in_ours(run_rebound_reads)),
    ProgramMeaning("jit, donated arguments", in_ours(run_donated)),
    ProgramMeaning("dynamic", in_ours(run_dynamic)),
    ProgramMeaning("dynamic, other sizes first", in_ours(run_resized)),
    # It has no transpose of some of its own primitives.
    ProgramMeaning(
        "jax", run_jax, when=in_jax, stops=False, lacks=(NotImplementedError,)
    ),
):
    register_meaning(_meaning)
