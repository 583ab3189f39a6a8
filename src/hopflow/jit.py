"""`jit`: trace a function once for each signature, and run it as native code."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from types import MethodType
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.backends import Backed, Backend, as_backend
from hopflow.bind import Operand, Value, current, is_watched, recorded
from hopflow.compiler.pipeline import Executable
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.module import Source
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import settle_sizes, unify_symbols
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging
from hopflow.hops.bodies import Function, flatten_results
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.logs import log, span
from hopflow.ops.rules import as_integer
from hopflow.pytree import Spec
from hopflow.stats import counts
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.tensor import EagerTensor
from hopflow.tensor.rows import row_of
from hopflow.tensor.sharing import first_of, overlap, rows_of, sharing
from hopflow.trace.captures import is_written
from hopflow.trace.dims import Choice, Dynamic, choice_of
from hopflow.trace.functional import TracedTensor
from hopflow.trace.inputs import Inputs, check_dims
from hopflow.trace.ranks import AllGather, calls_of_all
from hopflow.trace.signature import Arguments, Given, is_data, kinds_of, weak_tensor
from hopflow.trace.source import name_of, user_line
from hopflow.trace.state import name_captures
from hopflow.trace.tracer import Tracer, trace_into
from hopflow.trace.variants import Family, Place, Variant

__all__ = ["Jitted", "jit"]


@dataclass(slots=True)
class _Compiled:
    """What one signature was compiled to.

    captured    tensors from outside the function, passed after the arguments
    rows        by position of a captured tensor: it is the row of all the elements that
                this argument is a part of, and so another one in each call
    written     which inputs get new values: positions among arguments and captured
    spec        of the result
    constants   by position of a leaf of the result: the Python number that it is
    numbers     by position of a leaf: the Python type of a number that is computed
    sizes       where a call finds what the graph's symbols are, in their order
    variants    the same for calls in which tensors share memory, by how they do; only
                where something is written
    """

    executable: Executable | Backed
    captured: list[EagerTensor]
    written: list[int]
    spec: Spec
    constants: dict[int, Any]
    numbers: dict[int, type]
    sizes: list[Source]
    rows: dict[int, int] = field(default_factory=dict)
    variants: dict[Any, "_Compiled"] = field(default_factory=dict)
    is_single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_single = pytree.is_leaf(self.spec)

    def check(self, tensors: Sequence[EagerTensor]) -> None:
        """Check that a run can begin.

        Raises:
            InvalidTensorError: a tensor must not be used any more.
            ReadOnlyError: one that is written must not be.
        """
        given = self.inputs(tensors)
        for tensor in given:
            tensor.check_valid()
        for k in self.written:
            given[k].check_writable()

    def inputs(self, tensors: Sequence[EagerTensor]) -> list[EagerTensor]:
        """What the program takes for these arguments."""
        found = [*tensors, *self.captured]
        for at, argument in self.rows.items():
            row = row_of([tensors[argument]])
            assert row is not None
            found[len(tensors) + at] = row
        return found

    def __call__(
        self,
        tensors: list[EagerTensor],
        leaves: Sequence[Any],
        donated: Sequence[EagerTensor] = (),
    ) -> Any:
        if self.captured:
            tensors = self.inputs(tensors)
        for k in self.written:
            tensors[k].check_writable()
        sizes = [source.find(leaves) for source in self.sizes] if self.sizes else ()
        results: list[Any] = self.executable(tensors, sizes)
        if self.written:
            first = len(results) - len(self.written)
            pairs = zip(
                [tensors[k] for k in self.written], results[first:], strict=True
            )
            # What is given up is asked for no more, and may be where a result is.
            left = [p for p in pairs if not any(p[0] is x for x in donated)]
            _write([target for target, _ in left], [value for _, value in left])
            del results[first:]
        for k, number in self.constants.items():
            results.insert(k, number)
        for k, kind in self.numbers.items():
            results[k] = kind(results[k].item())
        return results[0] if self.is_single else pytree.unflatten(self.spec, results)


def _write(targets: Sequence[EagerTensor], values: Sequence[Value]) -> None:
    """Write all `values`; what an interrupt leaves half-written becomes invalid."""
    try:
        for target, value in zip(targets, values, strict=True):
            current().write(target, value)
    except BaseException:
        for target in targets:
            target.storage.invalid = "left half-written by a call that was interrupted"
        raise


class _Results(NamedTuple):
    """What a traced function returned; see `_Compiled`."""

    operands: list[Operand]
    spec: Spec
    constants: dict[int, Any]
    numbers: dict[int, type]


class _Traced(NamedTuple):
    """One trace; `captured` and `written` as in `_Compiled`."""

    graph: Graph
    inputs: Inputs
    results: _Results
    captured: list[EagerTensor]
    written: list[int]


class _Known(NamedTuple):
    """What calls run whose arguments are of some kinds; see `Given.kinds`.

    types     of the tensors: alive, so that no other gets their ids
    integers  which leaves are Python integers
    floats    which are floats
    is_sure   whether it serves all of them: there are no numbers that could matter
    """

    variant: Variant[_Compiled]
    types: list[TensorType]
    integers: list[int]
    floats: list[int]
    is_sure: bool

    @staticmethod
    def of(variant: Variant[_Compiled], call: Arguments) -> "_Known":
        """What calls like this one run."""
        kinds = {k: type(call.given.leaves[k]) for k in call.numbers}
        return _Known(
            variant,
            [t.type for t in call.tensors],
            [k for k, kind in kinds.items() if kind is int],
            [k for k, kind in kinds.items() if kind is float],
            is_sure=not kinds and not variant.asks_values,
        )

    def serves(self, leaves: Sequence[Any]) -> bool:
        """Whether the numbers of a call are such that it may run this."""
        for k in self.integers:
            if leaves[k] not in INT64:
                return False
        return not self.variant.asks_values or self.variant.holds(leaves)

    def tensors(self, leaves: Sequence[Any]) -> list[EagerTensor]:
        """The operands of a call."""
        tensors = list(leaves)
        for k in self.floats:
            tensors[k] = weak_tensor(leaves[k])
        for k in reversed(self.integers):
            del tensors[k]
        return tensors


class Jitted:
    """A function that is traced and compiled for the kinds of calls it gets.

    A trace serves all calls of one structure of arguments (with the order of keys), of
    the same dtypes and ranks, and the same values of what is no number or tensor, that
    fulfil its guards. Sizes that are seen to change become symbols; numbers are symbols
    from the first call. Tensors that the function reads from outside are passed on each
    call, so that later writes to them are seen.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        donate: tuple[int, ...],
        dynamic: Dynamic,
        ranks: AllGather | None,
        backend: Backend | None,
    ) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._donate = donate
        self._dynamic = dynamic
        self._ranks = ranks
        self._backend = backend
        self._lock = RLock()
        self._families: dict[Any, Family[_Compiled]] = {}
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._last: Variant[_Compiled] | None = None

    def __repr__(self) -> str:
        return f"<jitted {name_of(self._f)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # A bound method hands on attributes: `model.step.graph`.
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (found := recorded(self, args, kwargs)) is not None:
            return found
        if not current().is_eager or is_watched():
            return self._inline(args, kwargs)
        if debugging():
            found = self._f(*args, **kwargs)  # whose tensors are new, as otherwise
            return pytree.tree_map(
                lambda x: x.copy() if isinstance(x, EagerTensor) else x, found
            )
        if not kwargs:  # the common case
            known = self._known.get(kinds_of(args))
            if known is not None and (known.is_sure or known.serves(args)):
                return self._run_known(known, args)
        given = Given.of(args, kwargs)
        known = self._known.get(given.kinds)
        if known is not None and known.serves(given.leaves):
            return self._run_known(known, given.leaves)
        call = Arguments.of(self._f, self._dynamic, given)
        variant = self._variant(call)
        compiled = variant.compiled
        if compiled.written:
            compiled = self._told_apart(compiled, call)
        if self._donate:
            return self._run_donating(compiled, call)
        if call.is_told and not compiled.written and not variant.dims:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[given.kinds] = _Known.of(variant, call)
        return compiled(call.tensors, given.leaves)

    def _run_known(self, known: "_Known", leaves: Sequence[Any]) -> Any:
        self._last = known.variant
        tensors = list(leaves) if known.is_sure else known.tensors(leaves)
        return known.variant.compiled(tensors, leaves)

    def _variant(self, call: Arguments) -> Variant[_Compiled]:
        """The trace that serves a call, made if there is none."""
        leaves = call.given.leaves
        family = self._families.get(call.key)
        variant = None if family is None else family.find(call.values, leaves)
        if variant is None:
            with self._lock:  # what several threads ask for at once is compiled once
                family = self._families.setdefault(call.key, Family(call.places))
                variant = family.find(call.values, leaves)
                if variant is None:
                    variant = self._specialize(family, call)
        assert family is not None
        self._last = variant
        if variant.dims:
            check_dims("jit", variant.dims, leaves, call.texts(self._f))
        return variant

    def _specialize(
        self, family: Family[_Compiled], call: Arguments
    ) -> Variant[_Compiled]:
        """A new trace of a family, for this call and such like it.

        Where several processes agree, it is for what all of them call, and each traces
        what is missing for any: so all come to have the same programs.
        """
        calls = [call]
        if self._ranks is not None:

            def preflight() -> list[TensorType]:
                """Of what is read from outside; no dimension is dynamic."""
                traced = self._trace(call, lambda _, axis: axis is None)
                return [x.type for x in traced.captured]

            calls = calls_of_all(self._ranks, self._f, self._dynamic, call, preflight)
        for each in calls:
            family.note(each.values)

        def choose(leaf: int, axis: int | None) -> Choice:
            return family.choice(Place(leaf, axis), choice_of(call.plans[leaf], axis))

        if family.all():
            name = name_of(self._f)
            log("recompiles", lambda: f"{name}: {self._reasons(family, call)}")
        for each in calls:
            if family.find(each.values, each.given.leaves) is None:
                family.add(each.values, self._compile(each, choose))
        variant = family.find(call.values, call.given.leaves)
        assert variant is not None
        return variant

    def _run_donating(self, compiled: _Compiled, call: Arguments) -> Any:
        given_up = self._donated(call.given.args)
        donated = [x for x in given_up if isinstance(x, EagerTensor)]
        compiled.check(call.tensors)
        try:
            return compiled(call.tensors, call.given.leaves, donated)
        finally:  # an error, too, may come when they have been written over
            for tensor in donated:
                tensor.storage.invalid = "donated"
                tensor.array = _GONE

    def _told_apart(self, compiled: _Compiled, call: Arguments) -> _Compiled:
        """What to call where a tensor that is written may share memory with another.

        Raises:
            MutationError: it does, and they cannot be views of one tensor.
        """
        given = [*call.tensors, *compiled.captured]
        if not overlap(given, compiled.written):
            return compiled
        kind = sharing(given), call.values
        variant = compiled.variants.get(kind)
        if variant is None:
            with self._lock:
                made = self._compile(call, lambda _, axis: axis is None, exact=True)
                variant = compiled.variants[kind] = made.compiled
        return variant

    def _compile(
        self,
        call: Arguments,
        choose: Callable[[int, int | None], Choice],
        *,
        exact: bool = False,
    ) -> Variant[_Compiled]:
        """Trace the function for these arguments, and compile its graph.

        Args:
            choose: What each number of the arguments is to be.
            exact: Whether it matters what memory the tensors share.
        """
        traced = self._trace(call, choose, exact=exact)
        graph, results, inputs = traced.graph, traced.results, traced.inputs
        log("graph", lambda: format_graph(graph))
        sources = inputs.find_sources()
        found = [sources[v.node.symbol] for v in graph.symbols if v.node.symbol]
        given = [*call.tensors, *traced.captured]
        sizes = [source.find(call.given.leaves) for source in found]
        compiled = _Compiled(
            Backed(self._backend, graph, given, sizes)
            if self._backend is not None
            else Executable(graph, self._donated_inputs(call)),
            traced.captured,
            traced.written,
            results.spec,
            results.constants,
            results.numbers,
            found,
            rows_of(traced.captured, call.tensors if exact else ()),
        )
        numbers = enumerate(zip(call.places, call.values, strict=True))
        fixed = [
            (k, value)
            for k, (place, value) in numbers
            if place.axis is not None and choose(*place) is False
        ]
        env = inputs.tracer.env
        assert env is not None
        guards = env.guards.simplified()
        return Variant(compiled, fixed, sources, env, guards, inputs.dims)

    def _trace(
        self,
        call: Arguments,
        choose: Callable[[int, int | None], Choice],
        *,
        exact: bool = False,
    ) -> _Traced:
        """Trace the function; see `_compile`."""
        counts.traces += 1
        env = ShapeEnv(user_line)
        tracer = Tracer(None, name_of(self._f).strip("<>") or "f", env=env)
        inputs = Inputs("jit", tracer, call.given.leaves, call.texts(self._f), choose)
        given = _given(call, inputs, exact=exact)

        def run(*flat: Any) -> Any:
            args, kwargs = pytree.unflatten(call.given.spec, flat)
            return self._f(*args, **kwargs)

        # What a run is to check is no fact for the check itself.
        with env.body():
            with span("trace", function=name_of(self._f)):
                results = trace_into(
                    tracer, lambda *flat: self._results(run(*flat)), given
                )
            own = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
            written = _written(tracer, own)
            present = [TracedTensor(tracer, tracer.read(own[k])) for k in written]
            graph = tracer.close([*results.operands, *present])
            name_captures(self._f, tracer)
            if env.facts:
                settle_sizes(graph, env.simplify)
        unify_symbols(graph, env.simplify)
        origins = [c.origin for c in tracer.captures.values()]
        captured = [o for o in origins if isinstance(o, EagerTensor)]
        return _Traced(graph, inputs, results, captured, written)

    def _results(self, tree: Any) -> _Results:
        """What the function returned, as outputs of a graph."""
        function = Function("f", self._f, (), self._f)
        operands, spec = flatten_results("jit", function, tree, exact=True)
        leaves = pytree.flatten(tree)[0]
        constants = {
            k: leaves[k] for k, o in enumerate(operands) if isinstance(o, Constant)
        }
        numbers = {
            k: _PYTHON_KINDS[type(leaf)]
            for k, leaf in enumerate(leaves)
            if type(leaf) in _PYTHON_KINDS
        }
        tensors: list[Operand] = [o for o in operands if not isinstance(o, Constant)]
        return _Results(tensors, spec, constants, numbers)

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a trace: a node of it, of which only tensors are operands."""
        leaves, spec = pytree.flatten((args, kwargs))
        found: list[_Results] = []

        @functools.wraps(self._f)
        def body(*tensors: Any) -> Any:
            rest = iter(tensors)
            flat = [next(rest) if is_data(x) else x for x in leaves]
            own_args, own_kwargs = pytree.unflatten(spec, flat)
            found.append(self._results(self._f(*own_args, **own_kwargs)))
            return tuple(found[-1].operands)

        results = list(INVOKE_SUBGRAPH(body, tuple(filter(is_data, leaves))))
        [inner] = found
        for k, number in inner.constants.items():
            results.insert(k, number)
        for k in inner.numbers:
            results[k] = results[k].item()
        return pytree.unflatten(inner.spec, results)

    def _donated_inputs(self, call: Arguments) -> list[int]:
        """Which of the graph's operands a call gives up."""
        args, _ = pytree.unflatten(call.given.spec, range(len(call.given.leaves)))
        donated = self._donated(args)
        return [k for k, i in enumerate(call.operands) if i in donated]

    def _donated(self, args: tuple[Any, ...]) -> list[Any]:
        """The leaves of the arguments that a call gives up.

        Raises:
            ArgumentValueError: there is no such argument.
        """
        donated: list[Any] = []
        for position in self._donate:
            if position >= len(args):
                raise ArgumentValueError(
                    f"jit: `donate` names argument {position} of `{name_of(self._f)}`, "
                    f"and {len(args)} were given by position. Count from 0, and pass "
                    "by position what is to be given up."
                )
            donated += pytree.flatten(args[position])[0]
        return donated

    # --- to look at: of the signature that was called last ---

    @property
    def _latest(self) -> Executable:
        latest = self._present.compiled.executable
        if isinstance(latest, Executable):
            return latest
        raise ArgumentValueError(f"{self!r} has no native code: a backend runs it.")

    @property
    def _present(self) -> Variant[_Compiled]:
        if self._last is None:
            raise ArgumentValueError(
                f"{self!r} has not been compiled yet: call it once with arguments."
            )
        return self._last

    @property
    def guards(self) -> tuple[str, ...]:
        """What a call must fulfil to run what ran last: conditions, and who asked."""
        return tuple(self._present.conditions())

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Whether a call with these arguments would be compiled anew, and why.

        One line for each trace that might have served it: "recompiled because
        `x.shape[0] % 8 == 0` at model.py:12 no longer holds".
        """
        call = Arguments.of(self._f, self._dynamic, Given.of(args, kwargs))
        family = self._families.get(call.key)
        if family is None or not family.all():
            return (
                "compiled, as no call had this structure, these dtypes and ranks, and "
                "these values of what is no number or tensor"
            )
        if family.find(call.values, call.given.leaves) is not None:
            return "runs what has been compiled"
        return self._reasons(family, call)

    def _reasons(self, family: Family[_Compiled], call: Arguments) -> str:
        texts = call.texts(self._f)
        reasons = [
            variant.reasons(family.places, texts, call.values, call.given.leaves)
            for variant in family.all()
        ]
        return "\n".join(f"recompiled because {' and '.join(r)}" for r in reasons)

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self._present.compiled.executable.graph

    @property
    def graph_text(self) -> str:
        return format_graph(self.graph)

    @property
    def loop_ir(self) -> str:
        """The scheduled program, as text."""
        return self._latest.loop_ir

    @property
    def llvm_ir(self) -> str:
        """The LLVM IR, before LLVM's own passes."""
        return self._latest.kernel.llvm_ir

    @property
    def asm(self) -> str:
        """The machine code, as assembly."""
        return self._latest.kernel.asm


_GONE: Final = np.empty(0)
"""What a donated tensor holds: its own memory is the result's, or free."""
_MOST_KNOWN: Final = 1 << 12
_WORDS: Final = re.compile(r"[^\W_]+")
_PYTHON_KINDS: Final = {SymInt: int, SymFloat: float, SymBool: bool}


def _given(call: Arguments, inputs: Inputs, *, exact: bool) -> list[Any]:
    """What the function gets for each leaf of its arguments in a trace."""
    given: list[Any] = []
    tensors = iter(call.tensors)
    for i, leaf in enumerate(call.given.leaves):
        name = _name(inputs.texts[i])
        if not is_data(leaf):
            given.append(inputs.number(i, name))
            if isinstance(given[-1], SymFloat):
                next(tensors)  # a float is an operand too
        elif exact:
            given.append(inputs.tracer.reference(next(tensors), name))
        else:
            given.append(inputs.tensor(i, next(tensors).type, name))
    return given


def _written(tracer: Tracer, own: Sequence[TracedTensor]) -> list[int]:
    """Which inputs of a function, operands and captures, it has written."""
    # What the function itself made of numbers is as new in each call.
    captures = tracer.captures.values()
    lasting = tracer.written_captures().values()
    private = {id(c.tensor) for c in captures if not any(c is w for w in lasting)}
    return [
        k
        for k, t in enumerate(own)
        if is_written(t) and id(t) not in private and first_of(own, t) == k
    ]


def _name(text: str) -> str:
    """The name of an input, from how a user writes it."""
    return "_".join(_WORDS.findall(text))


def _positions(donate: Any) -> tuple[int, ...]:
    if not isinstance(donate, tuple | list):
        raise ArgumentTypeError(
            "jit: `donate` must be a tuple of positions, and is "
            f"`{type(donate).__name__}`."
        )
    positions = tuple(as_integer("jit", "donate", n) for n in donate)
    if len(set(positions)) != len(positions) or any(n < 0 for n in positions):
        raise ArgumentValueError(
            "jit: `donate` must have different positions, counted from 0, and is "
            f"{donate}."
        )
    return positions


def jit(
    f: Callable[..., Any] | None = None,
    *,
    donate: Sequence[int] = (),
    dynamic: Dynamic = None,
    ranks: AllGather | None = None,
    backend: Backend | str | None = None,
) -> Any:
    """`f`, traced and compiled to native code for the kinds of calls it gets.

    Args:
        f: A function of pytrees of tensors, numbers and hashable values.
        dynamic: Which sizes and numbers of the arguments are symbols, so that one trace
            serves them all. None: numbers, and sizes once they are seen to change.
            True: all from the first call; False: none. Or for each argument (a
            sequence, or a mapping by name) one of these, an `hf.Dim`, or a mapping or
            sequence of them by axis; in containers of the argument's structure.
        donate: Positions of arguments whose tensors are given up by a call: they must
            not be used after it, even if it fails. A result of the same type that can
            be an update in place is written into the memory of such a tensor, if no
            one else sees it (an array, a buffer, a view).
        ranks: For a function that several processes run together: an all-gather of
            Python objects, from a record to the records of all, in the order of their
            ranks. It is called before a trace, and so by all processes or by none;
            sizes that differ between them are symbols, and all compile one program.
        backend: Makes a function of each graph: called with a module as of `hf.trace`
            and its inputs, ints for symbols and then tensors, it returns a function of
            such inputs to the list of the outputs. "interpreter": NumPy runs node after
            node. None, "native": our compiler.

    Raises:
        ArgumentTypeError: `f`, `ranks` or `backend` cannot be called, or `donate` has
            what is no int.
        ArgumentValueError: `donate` has a negative number, or one twice, or `backend`
            is no such name.
        BackendError: at a call: the backend fails, or gives something else.
    """
    positions = _positions(donate)
    if f is None:
        options = {"donate": donate, "dynamic": dynamic, "ranks": ranks}
        return functools.partial(jit, **options, backend=backend)
    if not callable(f):
        raise ArgumentTypeError(
            f"jit: `f` must be a function, and is `{type(f).__name__}`."
        )
    if ranks is not None and not callable(ranks):
        raise ArgumentTypeError(
            "jit: `ranks` must be a function that gathers the records of all "
            f"processes, and is `{type(ranks).__name__}`."
        )
    return Jitted(f, positions, dynamic, ranks, as_backend(backend))
