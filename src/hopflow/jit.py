"""`jit`: trace a function once for each signature, and run it as native code."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.backends import Backed, Backend, as_backend
from hopflow.bind import Operand, current, is_watched, recorded
from hopflow.calls import Compiled, Known
from hopflow.compiler.pipeline import Executable
from hopflow.entries import entry, is_entry, surface
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ImpurityError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import settle_sizes, unify_symbols
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.subgraphs import Function, flatten_results
from hopflow.logs import log, span
from hopflow.ops.rules import as_integer
from hopflow.pickling import Transformed
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.stats import counts
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.tensor import EagerTensor
from hopflow.tensor.sharing import first_of, overlap, rows_of, sharing
from hopflow.trace.captures import is_written
from hopflow.trace.containers import (
    Containers,
    Replaced,
    check_apart,
    containers_of,
    passed_and_read,
    replace_contents,
)
from hopflow.trace.dims import Choice, Dynamic, choice_of
from hopflow.trace.functional import TracedTensor
from hopflow.trace.inputs import Inputs, check_dims
from hopflow.trace.outside.guard import Guard
from hopflow.trace.outside.paths import Path
from hopflow.trace.outside.recorder import Recorder
from hopflow.trace.outside.watch import watching
from hopflow.trace.ranks import AllGather, calls_of_all
from hopflow.trace.recompiles import (
    Recompiles,
    Signature,
    alias_reasons,
    nearest_reasons,
)
from hopflow.trace.signature import Arguments, Given, is_data, kinds_of
from hopflow.trace.source import name_of, user_env
from hopflow.trace.state import name_captures
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into
from hopflow.trace.variants import Family, Match, Place, Variant


class _Results(NamedTuple):
    """What a traced function returned; see `Compiled`."""

    operands: list[Operand]
    spec: Spec
    constants: dict[int, Any]
    numbers: dict[int, type]


class _Traced(NamedTuple):
    """One trace; for `written` see `Compiled`, for what is outside `Variant`.

    undo   gives what the trace has changed of it what it held before
    """

    graph: Graph
    inputs: Inputs
    results: _Results
    captured: list[EagerTensor]
    outside: Guard | None
    written: list[int]
    changes: list[Replaced]
    undo: Callable[[], None]


class Jitted(Transformed):
    """A function that is traced and compiled for the kinds of calls it gets.

    A trace serves all calls of one structure of arguments (with the order of keys), of
    the same dtypes and ranks, and the same values of what is no number or tensor, that
    fulfil its guards. Sizes that are seen to change become symbols; numbers are symbols
    from the first call. What the function reads from outside is recorded with its
    access path: tensors are found there again and passed on each call, and another
    value of anything else needs another trace.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        donate: tuple[int, ...],
        dynamic: Dynamic,
        ranks: AllGather | None,
        backend: Backend | None,
    ) -> None:
        super().__init__(f)
        self._f = f
        self._donate = donate
        self._dynamic = dynamic
        self._ranks = ranks
        self._backend = backend
        self._lock = RLock()
        self._families: dict[Any, Family[Compiled]] = {}
        self._known: dict[tuple[Any, ...], Known] = {}
        self._last: Variant[Compiled] | None = None
        self._signatures: dict[Any, Signature] = {}  # of the families
        self._recompiles = Recompiles(f)

    def __repr__(self) -> str:
        return f"<jitted {name_of(self._f)}>"

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        options = self._donate, self._dynamic, self._ranks, self._backend
        return Jitted, (self._f, *options)

    @is_entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
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
                if known is not None:
                    if known.is_sure:
                        find = known.find
                        captured = known.captured if find is None else find(args)
                        if captured is not None:
                            self._last = known.variant
                            return known.variant.compiled(list(args), args, captured)
                    elif (captured := known.find_captured(args)) is not None:
                        return self._run_known(known, args, captured)
            given = Given.of(args, kwargs)
            known = self._known.get(given.kinds)
            captured = None if known is None else known.find_captured(given.leaves)
            if known is not None and captured is not None:
                return self._run_known(known, given.leaves, captured)
            call = Arguments.of(self._f, self._dynamic, given)
            match = self._match(call)
            if match.variant.compiled.written:
                match = self._told_apart(match, call)
            variant, captured, _ = match
            compiled = variant.compiled
            if compiled.changes:
                outside = variant.outside
                read = [] if outside is None else outside.values(given.leaves)
                check_apart(compiled.changes, (args, kwargs), read)
            if self._donate:
                found = self._run_donating(compiled, call, captured)
                return _changed(compiled.changes, found, (args, kwargs), given.leaves)
            if compiled.changes:
                found = compiled(call.tensors, given.leaves, captured)
                return _changed(compiled.changes, found, (args, kwargs), given.leaves)
            # The guard of what is read from outside is compiled when it is asked first.
            is_again = variant.outside is None or variant.outside.is_compiled
            if is_again and call.is_told and not compiled.written and not variant.dims:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[given.kinds] = Known.of(variant, call)
            return compiled(call.tensors, given.leaves, captured)
        except Exception as error:
            surface(error, self, args, kwargs)
            raise

    def _run_known(
        self, known: Known, leaves: Sequence[Any], captured: list[EagerTensor]
    ) -> Any:
        self._last = known.variant
        return known.variant.compiled(known.tensors(leaves), leaves, captured)

    def _match(self, call: Arguments) -> Match[Compiled]:
        """The trace that serves a call, made if there is none."""
        leaves = call.given.leaves
        family = self._families.get(call.key)
        match = None
        if family is not None:
            match = family.find(call.values, leaves, call.marks)
        if match is None:
            with self._lock:  # what several threads ask for at once is compiled once
                family = self._families.setdefault(call.key, Family(call.places))
                if call.key not in self._signatures:
                    names = call.names(self._f)
                    self._signatures[call.key] = Signature.of(call, names)
                match = family.find(call.values, leaves, call.marks)
                if match is None:
                    match = self._specialize(family, call)
        assert family is not None
        self._last = match.variant
        if match.variant.dims:
            check_dims("jit", match.variant.dims, leaves, call.texts(self._f))
        return match

    @deep_recursion()
    def _specialize(self, family: Family[Compiled], call: Arguments) -> Match[Compiled]:
        """A new trace of a family, for this call and such like it.

        Where several processes agree, it is for what all of them call, and each traces
        what is missing for any: so all come to have the same programs.
        """
        calls = [call]
        if self._ranks is not None:

            def preflight() -> list[TensorType]:
                """Of what is read from outside; no dimension is dynamic."""
                traced = self._trace(call, lambda _, axis: axis is None)
                traced.undo()
                return [x.type for x in traced.captured]

            calls = calls_of_all(self._ranks, self._f, self._dynamic, call, preflight)
        for each in calls:
            family.note(each.values)

        def choose(leaf: int, axis: int | None) -> Choice:
            chosen = choice_of(call.plans[leaf], axis)
            if axis is not None:
                chosen = call.marks.get((leaf, axis)) or chosen
            return family.choice(Place(leaf, axis), chosen)

        if self._last is not None:
            self._recompiles.note(lambda: self._reasons(family, call))
        found: Match[Compiled] | None = None
        own: Match[Compiled] | None = None  # of a trace that serves this call alone
        for each in calls:
            match = family.find(each.values, each.given.leaves, call.marks)
            if match is None:
                # It need not be found again: the function may change what it reads.
                match = self._compile(each, choose)
                family.add(each.values, match.variant)
                if own is None and each.values == call.values:
                    own = match
                elif match.undo is not None:
                    match.undo()
            found = match if each is call else found
        found = found or family.find(call.values, call.given.leaves, call.marks) or own
        assert found is not None
        return found

    def _run_donating(
        self, compiled: Compiled, call: Arguments, captured: list[EagerTensor]
    ) -> Any:
        leaves = pytree.flatten(call.given.args)[0]
        given_up = [leaves[i] for i in self._donated(call)]
        donated = [x for x in given_up if isinstance(x, EagerTensor)]
        compiled.check(call.tensors, captured)
        try:
            return compiled(call.tensors, call.given.leaves, captured, donated)
        finally:  # an error, too, may come when they have been written over
            for tensor in donated:
                tensor.storage.invalidate("donated")
                tensor.array = _GONE

    def _told_apart(self, match: Match[Compiled], call: Arguments) -> Match[Compiled]:
        """What to call where a tensor that is written may share memory with another.

        Raises:
            MutationError: it does, and they cannot be views of one tensor.
        """
        found = self._sharing_match(match, call)
        if found is None:
            if match.undo is not None:
                match.undo()
            with self._lock:
                self._recompiles.note(lambda: self._alias_reasons(match, call))
                found = self._compile(call, lambda _, axis: axis is None, exact=True)
                match.variant.compiled.variants[_sharing(match, call)] = found.variant
        return found

    def _sharing_match(
        self, match: Match[Compiled], call: Arguments
    ) -> Match[Compiled] | None:
        """What runs a call whose tensors may share memory; None: it has to be compiled.

        Args:
            match: What runs such a call if its tensors share none that is written.
        """
        compiled = match.variant.compiled
        if not overlap([*call.tensors, *match.captured], compiled.written):
            return match
        apart = compiled.variants.get(_sharing(match, call))
        if apart is None:
            return None
        captured = apart.find_captured(call.given.leaves)
        return None if captured is None else Match(apart, captured)

    def _compile(
        self,
        call: Arguments,
        choose: Callable[[int, int | None], Choice],
        *,
        exact: bool = False,
    ) -> Match[Compiled]:
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
        compiled = Compiled(
            Backed(self._backend, graph, given, sizes)
            if self._backend is not None
            else Executable(graph, self._donated_inputs(call)),
            traced.written,
            results.spec,
            results.constants,
            results.numbers,
            found,
            rows_of(traced.captured, call.tensors if exact else ()),
            traced.changes,
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
        is_fixed = traced.outside is None
        variant = Variant(
            *(compiled, fixed, sources, env, guards, inputs.dims, inputs.marks),
            *(traced.captured if is_fixed else [], traced.outside),
        )
        special = variant.specialised(call.places, inputs.texts)
        if special:
            texts = " and ".join(special)
            log("sizes", lambda: f"{texts}: other sizes need another program")
        return Match(variant, traced.captured, traced.undo)

    def _trace(
        self,
        call: Arguments,
        choose: Callable[[int, int | None], Choice],
        *,
        exact: bool = False,
    ) -> _Traced:
        """Trace the function; see `_compile`."""
        counts.traces += 1
        env = user_env()
        tracer = Tracer(None, name_of(self._f).strip("<>") or "f", env=env)
        tracer.asks_types = True
        inputs = Inputs("jit", tracer, call.given.leaves, call.texts(self._f), choose)
        given = _given(call, inputs, exact=exact)
        recorder = self._recorder(call)

        changes: list[Replaced] = []

        def run(*flat: Any) -> Any:
            return self._run_watched(call.given.spec, flat, changes)

        # What a run is to check is no fact for the check itself.
        with env.body():
            with (
                span("trace", function=name_of(self._f)),
                recorder.effects.checked(self._f, inputs.texts),
                watching(recorder),
            ):
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
        parts = [c.origin for c in tracer.parts.values()]
        self._check_arguments(call, recorder, changes)
        outside = recorder.guard(captured, parts, call.given.leaves, inputs.texts)
        undo = recorder.effects.undo
        return _Traced(
            graph, inputs, results, captured, outside, written, changes, undo
        )

    def _run_watched(
        self, spec: Spec, leaves: Sequence[Any], changes: list[Replaced]
    ) -> Any:
        """What the function returns in a trace; with what it puts into containers of
        its arguments, if it changes any. These changes are added."""
        args, kwargs = pytree.unflatten(spec, leaves)
        containers = Containers((args, kwargs), leaves)
        found = self._f(*args, **kwargs)
        replaced, results = containers.replaced()
        changes += replaced
        return (found, results) if replaced else found

    def _check_arguments(
        self, call: Arguments, recorder: Recorder, changes: Sequence[Replaced]
    ) -> None:
        """
        Raises:
            ImpurityError: the function was passed a container that it has read from
                outside as well, and has changed it.
        """
        tree = call.given.passed
        read = recorder.read_among(containers_of(tree))
        try:
            check_apart(changes, tree, read)
            for container in filter(recorder.effects.has_changed, read):
                raise passed_and_read(container)
        except ImpurityError:
            recorder.effects.undo()
            raise

    def _recorder(self, call: Arguments) -> Recorder:
        """A recorder that knows the function and the arguments that are no data."""
        recorder = Recorder()
        recorder.add_root(self._f, Path(None, "constant", self._f))
        for k, leaf in enumerate(call.given.leaves):
            if not is_data(leaf):
                recorder.add_root(leaf, Path(None, "argument", k))
        return recorder

    def _results(self, tree: Any) -> _Results:
        """What the function returned, as outputs of a graph."""
        function = Function("f", self._f, (), self._f)
        operands, spec = flatten_results("jit", function, tree, exact=True)
        leaves = pytree.flatten(opened(tree))[0]
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
        leaves, spec = pytree.flatten(opened((args, kwargs)))
        found: list[_Results] = []
        changes: list[Replaced] = []

        @functools.wraps(self._f)
        def body(*tensors: Any) -> Any:
            rest = iter(tensors)
            flat = [next(rest) if is_data(x) else x for x in leaves]
            changes.clear()
            found.append(self._results(self._run_watched(spec, flat, changes)))
            return tuple(found[-1].operands)

        results = list(INVOKE_SUBGRAPH(body, tuple(filter(is_data, leaves))))
        [inner] = found
        for k, number in inner.constants.items():
            results.insert(k, number)
        for k in inner.numbers:
            results[k] = results[k].item()
        tree = pytree.unflatten(inner.spec, results)
        check_apart(changes, (args, kwargs))
        return _changed(changes, tree, (args, kwargs), leaves)

    def _donated_inputs(self, call: Arguments) -> list[int]:
        """Which of the graph's operands a call gives up."""
        donated = self._donated(call)
        return [k for k, i in enumerate(call.operands) if i in donated]

    def _donated(self, call: Arguments) -> list[int]:
        """Which leaves of the arguments a call gives up.

        Raises:
            ArgumentValueError: there is no such argument.
        """
        args = call.given.spec.child(0).children()
        donated: list[int] = []
        ends = [0, *itertools.accumulate(arg.num_leaves for arg in args)]
        for position in self._donate:
            if position >= len(args):
                raise ArgumentValueError(
                    f"jit: `donate` names argument {position} of `{name_of(self._f)}`, "
                    f"and {len(args)} were given by position. Count from 0, and pass "
                    "by position what is to be given up."
                )
            donated += range(ends[position], ends[position + 1])
        return donated

    # --- to look at: of the signature that was called last ---

    @property
    def _latest(self) -> Executable:
        latest = self._present.compiled.executable
        if isinstance(latest, Executable):
            return latest
        raise ArgumentValueError(f"{self!r} has no native code: a backend runs it.")

    @property
    def _present(self) -> Variant[Compiled]:
        if self._last is None:
            raise ArgumentValueError(
                f"{self!r} has not been compiled yet: call it once with arguments."
            )
        return self._last

    @property
    def guards(self) -> tuple[str, ...]:
        """What a call must fulfil to run what ran last: conditions, and who asked."""
        return tuple(self._present.conditions())

    @entry
    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Whether a call with these arguments would be compiled anew, and why.

        One line for each trace that might have served it: "recompiled because
        `x.shape[0] % 8 == 0` at model.py:12 no longer holds".
        """
        call = Arguments.of(self._f, self._dynamic, Given.of(args, kwargs))
        family = self._families.get(call.key, Family[Compiled](call.places))
        if not any(known.all() for known in self._families.values()):
            return (
                "compiled, as no call had this structure, these dtypes and ranks, and "
                "these values of what is no number or tensor"
            )
        match = family.find(call.values, call.given.leaves, call.marks)
        if match is not None and self._sharing_match(match, call) is None:
            return self._alias_reasons(match, call)
        if match is not None:
            special = match.variant.specialised(family.places, call.texts(self._f))
            only = f", which is for {' and '.join(special)} only" if special else ""
            return f"runs what has been compiled{only}"
        return self._reasons(family, call)

    def _reasons(self, family: Family[Compiled], call: Arguments) -> str:
        """Why no trace serves a call: for each that might, or for the kind of calls
        that this one is most like."""
        texts, places = call.texts(self._f), family.places
        given = call.values, call.given.leaves, call.marks
        reasons = [v.reasons(places, texts, *given) for v in family.all()]
        if not reasons:
            known = [
                self._signatures[key] for key, f in self._families.items() if f.all()
            ]
            signature = Signature.of(call, call.names(self._f))
            reasons = [nearest_reasons(signature, known)]
        return "\n".join(f"recompiled because {' and '.join(r)}" for r in reasons)

    def _alias_reasons(self, match: Match[Compiled], call: Arguments) -> str:
        """Why what serves a call does not serve tensors that share memory."""
        texts, outside = call.texts(self._f), match.variant.outside
        apart = match.variant.compiled.variants.get(_sharing(match, call))
        if apart is not None and apart.outside is not None:
            reasons = apart.outside.reasons(call.given.leaves, texts)
            return f"recompiled because {' and '.join(reasons)}"
        names = [texts[k] for k in call.operands]
        for k in range(len(match.captured)):
            path = None if outside is None else outside.wanted[k].path
            names.append("a tensor from outside" if path is None else path.text(texts))
        tensors = [*call.tensors, *match.captured]
        reasons = alias_reasons(tensors, names, match.variant.compiled.written)
        return f"recompiled because {' and '.join(reasons)}"

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self._present.compiled.executable.graph

    @property
    def graph_text(self) -> str:
        return format_graph(self.graph)

    @property
    def kernels(self) -> str:
        """What is computed for each element, as text, before any memory is planned."""
        return self._latest.kernels

    @property
    def memory(self) -> str:
        """Which values share memory, and what is copied and why, as text."""
        return self._latest.memory

    @property
    def loop_ir(self) -> str:
        """The scheduled program, as text."""
        return self._latest.loop_ir

    @property
    def llvm_ir(self) -> str:
        """The LLVM IR, before LLVM's own passes."""
        return self._latest.llvm_ir

    @property
    def asm(self) -> str:
        """The machine code, as assembly."""
        return self._latest.asm


_GONE: Final = np.empty(0)
"""What a donated tensor holds: its own memory is the result's, or free."""
_MOST_KNOWN: Final = 1 << 12
_WORDS: Final = re.compile(r"[^\W_]+")
_PYTHON_KINDS: Final = {SymInt: int, SymFloat: float, SymBool: bool}


def _sharing(match: Match[Compiled], call: Arguments) -> Any:
    """How the tensors of a call share memory, and its numbers."""
    return sharing([*call.tensors, *match.captured]), call.values


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


def _changed(
    changes: Sequence[Replaced], found: Any, arguments: Any, leaves: Sequence[Any]
) -> Any:
    """What a function returned, after the containers of its arguments have changed."""
    if not changes:
        return found
    result, results = found
    replace_contents(changes, arguments, leaves, results)
    return result


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
        return functools.partial(entry(jit), **options, backend=backend)
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
