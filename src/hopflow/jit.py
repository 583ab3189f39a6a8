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
from hopflow.calls import Compiled, FastPath
from hopflow.compiler.pipeline import Executable
from hopflow.entries import entry, mark_entry, process_error
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ImpurityError,
    TraceError,
)
from hopflow.graph.core import Constant, Graph
from hopflow.graph.printer import format_graph
from hopflow.graph.regions import settle_sizes
from hopflow.graph.rewriting import unify_symbols
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.subgraphs import Function, flatten_results
from hopflow.logs import log, span
from hopflow.ops.rules import as_integer
from hopflow.pickling import Transformed
from hopflow.profile import Profile
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
from hopflow.trace.signature import (
    Arguments,
    FlatArguments,
    is_data,
    kinds_of,
    order_of_plain,
    plain_leaves,
)
from hopflow.trace.source import name_of, user_env
from hopflow.trace.state import name_captures
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into
from hopflow.trace.variants import Family, Match, Place, Variant


class _Results(NamedTuple):
    """The results of a traced function; the fields are those of `Compiled`."""

    operands: list[Operand]
    spec: Spec
    constants: dict[int, Any]
    numbers: dict[int, type]


class _Traced(NamedTuple):
    """One trace of a function.

    captured   the tensors from outside that the graph reads
    outside    the guard on what the function read from outside; None: it read nothing
    written    the inputs that the function writes; see `Compiled`
    changes    what it does to containers among the arguments; see `Compiled`
    undo       restores the state from outside that the trace has changed
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
    """A function that is traced and compiled once for each signature it is called with.

    A trace serves all calls with the same pytree structure (and order of keys), dtypes,
    ranks and static values that satisfy its guards. Numbers are symbols from the first
    call, sizes once they change. Reads from outside the function are recorded with
    their access paths: each call looks tensors up there and passes them as operands; a
    different value of anything else needs another trace.
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
        self._fast_paths: dict[tuple[Any, ...], FastPath] = {}
        self._last: Variant[Compiled] | None = None
        self._signatures: dict[Any, Signature] = {}  # of the families
        self._recompiles = Recompiles(f)

    def __repr__(self) -> str:
        return f"<jitted {name_of(self._f)}>"

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        options = self._donate, self._dynamic, self._ranks, self._backend
        return Jitted, (self._f, *options)

    @mark_entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if (result := recorded(self, args, kwargs)) is not None:
                return result
            if not current().is_eager or is_watched():
                return self._inline(args, kwargs)
            if debugging():
                result = self._f(
                    *args, **kwargs
                )  # copied: results never alias arguments
                return pytree.tree_map(
                    lambda x: x.copy() if isinstance(x, EagerTensor) else x, result
                )
            if not kwargs:  # the common case
                path = self._fast_paths.get(kinds_of(args))
                if path is not None:
                    if path.is_unconditional:
                        find = path.find
                        captured = path.captured if find is None else find(args)
                        if captured is not None:
                            self._last = path.variant
                            return path.variant.compiled(list(args), args, captured)
                    elif (captured := path.find_captured(args)) is not None:
                        return self._run_fast(path, args, captured)
                elif (found := self._find_plain(args)) is not None:
                    return self._run_fast(*found)
            flat = FlatArguments.of(args, kwargs)
            path = self._fast_paths.get(flat.kinds)
            captured = None if path is None else path.find_captured(flat.leaves)
            if path is not None and captured is not None:
                return self._run_fast(path, flat.leaves, captured)
            call = Arguments.of(self._f, self._dynamic, flat)
            variant, captured, _ = self._match(call)
            compiled = variant.compiled
            if compiled.changes:
                outside = variant.outside
                read = [] if outside is None else outside.values(flat.leaves)
                check_apart(compiled.changes, (args, kwargs), read)
            if self._donate:
                result = self._run_donating(compiled, call, captured)
                return _with_changes(
                    compiled.changes, result, (args, kwargs), flat.leaves
                )
            if compiled.changes:
                result = compiled(call.tensors, flat.leaves, captured)
                return _with_changes(
                    compiled.changes, result, (args, kwargs), flat.leaves
                )
            # The guard on reads from outside is compiled when it is first evaluated.
            is_repeated = variant.outside is None or variant.outside.is_compiled
            if (
                is_repeated
                and call.is_keyed_by_kinds
                and not compiled.written
                and not variant.dims
            ):
                self._keep_fast_path(variant, call)
            return compiled(call.tensors, flat.leaves, captured)
        except Exception as error:
            process_error(error, self, args, kwargs)
            raise

    def _find_plain(
        self, args: tuple[Any, ...]
    ) -> tuple[FastPath, list[Any], list[EagerTensor]] | None:
        """Return the fast path for a call with arrays or plain containers, its leaves
        and the tensors from outside; None: there is none."""
        plain = plain_leaves(args) if self._fast_paths else None
        path = None if plain is None else self._fast_paths.get(plain[1])
        if plain is None or path is None:
            return None
        leaves = path.in_order(plain[0])
        captured = path.find_captured(leaves)
        return None if captured is None else (path, leaves, captured)

    def _keep_fast_path(self, variant: Variant[Compiled], call: Arguments) -> None:
        """Keep the variant of a call for others of its kind."""
        if len(self._fast_paths) >= _MOST_FAST_PATHS:
            self._fast_paths.clear()
        flat, path = call.flat, FastPath.of(variant, call)
        self._fast_paths[flat.kinds] = path
        args, kwargs = flat.passed
        plain = None if kwargs else plain_leaves(args)
        if plain is not None and plain[1] != flat.kinds:
            order = order_of_plain(args, flat.spec)
            self._fast_paths[plain[1]] = path._replace(order=order)

    def _run_fast(
        self, path: FastPath, leaves: Sequence[Any], captured: list[EagerTensor]
    ) -> Any:
        self._last = path.variant
        return path.variant.compiled(path.tensors(leaves), leaves, captured)

    def _match(self, call: Arguments) -> Match[Compiled]:
        """Return the trace that serves a call; make it if there is none.

        Raises:
            MutationError: see `_resolve_sharing`.
        """
        match = self._match_disjoint(call)
        if match.variant.compiled.written:
            match = self._resolve_sharing(match, call)
        return match

    def _match_disjoint(self, call: Arguments) -> Match[Compiled]:
        """Return the trace for a call whose tensors do not alias a written one."""
        leaves = call.flat.leaves
        family = self._families.get(call.key)
        match = None
        if family is not None:
            match = family.find(call.values, leaves, call.marks)
        if match is None:
            with self._lock:  # concurrent calls of one signature compile it once
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
        """Add a trace to a family that serves this call, and return it.

        With `ranks`, the calls of all processes are gathered, and each process traces
        all of them that no trace serves, so that all processes have the same programs.
        """
        calls = [call]
        if self._ranks is not None:

            def preflight() -> list[TensorType]:
                """Return the types of the tensors from outside, with static sizes."""
                traced = self._trace(call, lambda _, axis: axis is None)
                traced.undo()
                return [x.type for x in traced.captured]

            calls = calls_of_all(self._ranks, self._f, self._dynamic, call, preflight)
        for gathered in calls:
            family.note(gathered.values)

        def choose(leaf: int, axis: int | None) -> Choice:
            chosen = choice_of(call.plans[leaf], axis)
            if axis is not None:
                chosen = call.marks.get((leaf, axis)) or chosen
            return family.choice(Place(leaf, axis), chosen)

        if self._last is not None:
            self._recompiles.note(lambda: self._reasons(family, call))
        match: Match[Compiled] | None = None
        fallback: Match[Compiled] | None = None  # a trace that serves this call alone
        for gathered in calls:
            candidate = family.find(gathered.values, gathered.flat.leaves, call.marks)
            if candidate is None:
                # `find` may miss it later: the function may change what it reads.
                candidate = self._compile(gathered, choose)
                family.add(gathered.values, candidate.variant)
                if fallback is None and gathered.values == call.values:
                    fallback = candidate
                elif candidate.undo is not None:
                    candidate.undo()
            match = candidate if gathered is call else match
        match = (
            match or family.find(call.values, call.flat.leaves, call.marks) or fallback
        )
        assert match is not None
        return match

    def _run_donating(
        self, compiled: Compiled, call: Arguments, captured: list[EagerTensor]
    ) -> Any:
        leaves = pytree.flatten(call.flat.args)[0]
        arguments = [leaves[i] for i in self._donated(call)]
        donated = [x for x in arguments if isinstance(x, EagerTensor)]
        compiled.check(call.tensors, captured)
        try:
            return compiled(call.tensors, call.flat.leaves, captured, donated)
        finally:  # even after an error, their memory may be overwritten
            for tensor in donated:
                tensor.storage.invalidate("donated")
                tensor.array = _GONE

    def _resolve_sharing(
        self, match: Match[Compiled], call: Arguments
    ) -> Match[Compiled]:
        """Return the variant for the way in which the tensors of a call share memory.

        Args:
            match: The variant for tensors that do not alias a written one.

        Raises:
            MutationError: a written tensor aliases another one, and the two cannot be
                views of one tensor.
        """
        sharing_match = self._sharing_match(match, call)
        if sharing_match is None:
            if match.undo is not None:
                match.undo()
            with self._lock:
                self._recompiles.note(lambda: self._alias_reasons(match, call))
                sharing_match = self._compile(
                    call, lambda _, axis: axis is None, exact=True
                )
                match.variant.compiled.variants[_sharing(match, call)] = (
                    sharing_match.variant
                )
        return sharing_match

    def _sharing_match(
        self, match: Match[Compiled], call: Arguments
    ) -> Match[Compiled] | None:
        """Return the variant for a call whose tensors may alias; None: compile one.

        Args:
            match: The variant for tensors that do not alias a written one.
        """
        compiled = match.variant.compiled
        if not overlap([*call.tensors, *match.captured], compiled.written):
            return match
        variant = compiled.variants.get(_sharing(match, call))
        if variant is None:
            return None
        captured = variant.find_captured(call.flat.leaves)
        return None if captured is None else Match(variant, captured)

    def _compile(
        self,
        call: Arguments,
        choose: Callable[[int, int | None], Choice],
        *,
        exact: bool = False,
    ) -> Match[Compiled]:
        """Trace the function for these arguments, and compile its graph.

        Args:
            choose: (leaf, axis; None for a number) -> symbol, constant or `Dim`.
            exact: Whether the program is for this call's aliasing of tensors alone.
        """
        traced = self._trace(call, choose, exact=exact)
        graph, results, inputs = traced.graph, traced.results, traced.inputs
        log("graph", lambda: format_graph(graph))
        sources = inputs.find_sources()
        size_sources = [sources[v.node.symbol] for v in graph.symbols if v.node.symbol]
        tensors = [*call.tensors, *traced.captured]
        sizes = [source.find(call.flat.leaves) for source in size_sources]
        compiled = Compiled(
            Backed(self._backend, graph, tensors, sizes)
            if self._backend is not None
            else Executable(graph, self._donated_inputs(call)),
            traced.written,
            results.spec,
            results.constants,
            results.numbers,
            size_sources,
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
        tracer.dispatches_types = True
        inputs = Inputs("jit", tracer, call.flat.leaves, call.texts(self._f), choose)
        arguments = _traced_leaves(call, inputs, exact=exact)
        recorder = self._recorder(call)

        changes: list[Replaced] = []

        def run(*flat: Any) -> Any:
            return self._run_watched(call.flat.spec, flat, changes)

        # A condition that the run checks must not simplify its own check.
        with env.body():
            with (
                span("trace", function=name_of(self._f)),
                recorder.effects.checked(self._f, inputs.texts),
                watching(recorder),
            ):
                results = trace_into(
                    tracer, lambda *flat: self._results(run(*flat)), arguments
                )
            tensors = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
            written = _written(tracer, tensors)
            values = [TracedTensor(tracer, tracer.read(tensors[k])) for k in written]
            graph = tracer.close([*results.operands, *values])
            name_captures(self._f, tracer)
            if env.facts:
                settle_sizes(graph, env.simplify)
        unify_symbols(graph, env.simplify)
        origins = [c.origin for c in tracer.captures.values()]
        captured = [o for o in origins if isinstance(o, EagerTensor)]
        parts = [c.origin for c in tracer.parts.values()]
        self._check_arguments(call, recorder, changes)
        outside = recorder.guard(captured, parts, call.flat.leaves, inputs.texts)
        undo = recorder.effects.undo
        return _Traced(
            graph, inputs, results, captured, outside, written, changes, undo
        )

    def _run_watched(
        self, spec: Spec, leaves: Sequence[Any], changes: list[Replaced]
    ) -> Any:
        """Run the function on traced leaves, and add its changes of containers among
        the arguments to `changes`.

        Returns:
            Its result; if there are changes, the pair of that and of the tensors which
            it put into containers.
        """
        args, kwargs = pytree.unflatten(spec, leaves)
        containers = Containers((args, kwargs), leaves)
        result = self._f(*args, **kwargs)
        replaced, contents = containers.replaced()
        changes += replaced
        return (result, contents) if replaced else result

    def _check_arguments(
        self, call: Arguments, recorder: Recorder, changes: Sequence[Replaced]
    ) -> None:
        """Check that no changed container is both an argument and read from outside.

        Raises:
            ImpurityError: one is; all changes are undone.
        """
        tree = call.flat.passed
        read = recorder.read_among(containers_of(tree))
        try:
            check_apart(changes, tree, read)
            for container in filter(recorder.effects.has_changed, read):
                raise passed_and_read(container)
        except ImpurityError:
            recorder.effects.undo()
            raise

    def _recorder(self, call: Arguments) -> Recorder:
        """Return a recorder whose roots are the function and its static arguments."""
        recorder = Recorder()
        recorder.add_root(self._f, Path(None, "constant", self._f))
        for k, leaf in enumerate(call.flat.leaves):
            if not is_data(leaf):
                recorder.add_root(leaf, Path(None, "argument", k))
        return recorder

    def _results(self, tree: Any) -> _Results:
        """Return the function's result, flattened to outputs of a graph."""
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
        """Record a call within a trace as an `invoke_subgraph` node; only tensors are
        its operands."""
        leaves, spec = pytree.flatten(opened((args, kwargs)))
        traced: list[_Results] = []
        changes: list[Replaced] = []

        @functools.wraps(self._f)
        def body(*tensors: Any) -> Any:
            values = iter(tensors)
            flat = [next(values) if is_data(x) else x for x in leaves]
            changes.clear()
            traced.append(self._results(self._run_watched(spec, flat, changes)))
            return tuple(traced[-1].operands)

        results = list(INVOKE_SUBGRAPH(body, tuple(filter(is_data, leaves))))
        [inner] = traced
        for k, number in inner.constants.items():
            results.insert(k, number)
        for k in inner.numbers:
            results[k] = results[k].item()
        tree = pytree.unflatten(inner.spec, results)
        check_apart(changes, (args, kwargs))
        return _with_changes(changes, tree, (args, kwargs), leaves)

    def _donated_inputs(self, call: Arguments) -> list[int]:
        """Return the positions of the graph's operands that a call donates."""
        donated = self._donated(call)
        return [k for k, i in enumerate(call.operands) if i in donated]

    def _donated(self, call: Arguments) -> list[int]:
        """Return the positions of the argument leaves that a call donates.

        Raises:
            ArgumentValueError: there is no such argument.
        """
        args = call.flat.spec.child(0).children()
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

    # --- inspection of the variant that was called last ---

    @property
    def _latest(self) -> Executable:
        executable = self._present.compiled.executable
        if isinstance(executable, Executable):
            return executable
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
        """The guards of the last variant called: each condition, and the line that
        decided by it."""
        return tuple(self._present.conditions())

    @entry
    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Say whether a call with these arguments would compile again, and why.

        Returns:
            A line for each trace that does not serve it: "recompiled because
            `x.shape[0] % 8 == 0` at model.py:12 no longer holds".
        """
        call = Arguments.of(self._f, self._dynamic, FlatArguments.of(args, kwargs))
        family = self._families.get(call.key, Family[Compiled](call.places))
        if not any(other.all() for other in self._families.values()):
            return (
                "compiled, as no call had this structure, these dtypes and ranks, and "
                "these values of what is no number or tensor"
            )
        match = family.find(call.values, call.flat.leaves, call.marks)
        if match is not None and self._sharing_match(match, call) is None:
            return self._alias_reasons(match, call)
        if match is not None:
            special = match.variant.specialised(family.places, call.texts(self._f))
            only = f", which is for {' and '.join(special)} only" if special else ""
            return f"runs what has been compiled{only}"
        return self._reasons(family, call)

    @entry
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run the function on these arguments, and say where the time goes.

        The first call compiles the program once more, so that it counts and times its
        loops. It runs twice, and the second run is measured: callbacks are called in
        both. Arguments and tensors from outside stay as they are.

            >>> @hf.jit
            ... def collatz(n):
            ...     step = lambda n: hf.where(n % 2 == 0, n // 2, 3 * n + 1)
            ...     return hf.while_loop(lambda n: n > 1, step, n)
            >>> collatz.profile(27).loops[0].trips
            111

        Returns:
            The time, the steps, the bytes and the active lanes of each loop, with its
            line; `print` shows a table.

        Raises:
            BackendError: a backend runs the program.
            TraceError: it is called in a trace.
            Exception: what a call would raise.
        """
        if not current().is_eager:
            raise TraceError(
                f"profile: `{name_of(self._f)}` is profiled in a trace, where nothing "
                "runs. Profile the outermost function."
            )
        call = Arguments.of(self._f, self._dynamic, FlatArguments.of(args, kwargs))
        variant, captured, _ = self._match(call)
        leaves, name = call.flat.leaves, name_of(self._f)
        return variant.compiled.profile(name, call.tensors, leaves, captured)

    def _reasons(self, family: Family[Compiled], call: Arguments) -> str:
        """Explain why no trace serves a call: a line for each trace of its family; if
        there is none, one that compares it with the most similar signature."""
        texts, places = call.texts(self._f), family.places
        arguments = call.values, call.flat.leaves, call.marks
        reasons = [v.reasons(places, texts, *arguments) for v in family.all()]
        if not reasons:
            signatures = [
                self._signatures[key] for key, f in self._families.items() if f.all()
            ]
            signature = Signature.of(call, call.names(self._f))
            reasons = [nearest_reasons(signature, signatures)]
        return "\n".join(f"recompiled because {' and '.join(r)}" for r in reasons)

    def _alias_reasons(self, match: Match[Compiled], call: Arguments) -> str:
        """Explain why the variant for disjoint tensors does not serve this call."""
        texts, outside = call.texts(self._f), match.variant.outside
        variant = match.variant.compiled.variants.get(_sharing(match, call))
        if variant is not None and variant.outside is not None:
            reasons = variant.outside.reasons(call.flat.leaves, texts)
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
        """The captured graph, as text."""
        return format_graph(self.graph)

    @property
    def kernels(self) -> str:
        """The kernel program, as text: the computation of each element, before memory
        is planned."""
        return self._latest.kernels

    @property
    def memory(self) -> str:
        """The memory plan, as text: which values share memory, and why others are
        copied."""
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
"""The array of a donated tensor: its memory belongs to the results, or is free."""
_MOST_FAST_PATHS: Final = 1 << 12
_WORDS: Final = re.compile(r"[^\W_]+")
_PYTHON_KINDS: Final = {SymInt: int, SymFloat: float, SymBool: bool}


def _sharing(match: Match[Compiled], call: Arguments) -> Any:
    """A key for how the tensors of a call share memory, and for its numbers."""
    return sharing([*call.tensors, *match.captured]), call.values


def _traced_leaves(call: Arguments, inputs: Inputs, *, exact: bool) -> list[Any]:
    """Return what the function gets for each leaf of its arguments in a trace."""
    traced: list[Any] = []
    tensors = iter(call.tensors)
    for i, leaf in enumerate(call.flat.leaves):
        name = _name(inputs.texts[i])
        if not is_data(leaf):
            traced.append(inputs.number(i, name))
            if isinstance(traced[-1], SymFloat):
                next(tensors)  # a float is an operand too
        elif exact:
            traced.append(inputs.tracer.reference(next(tensors), name))
        else:
            traced.append(inputs.tensor(i, next(tensors).type, name))
    return traced


def _with_changes(
    changes: Sequence[Replaced], outputs: Any, arguments: Any, leaves: Sequence[Any]
) -> Any:
    """Apply changes to the containers among the arguments, and return the result."""
    if not changes:
        return outputs
    result, contents = outputs
    replace_contents(changes, arguments, leaves, contents)
    return result


def _written(tracer: Tracer, inputs: Sequence[TracedTensor]) -> list[int]:
    """Return the positions of the inputs, operands and captures, that were written."""
    # Tensors that the function makes from numbers are new in each call.
    captures = tracer.captures.values()
    written = tracer.written_captures().values()
    private = {id(c.tensor) for c in captures if not any(c is w for w in written)}
    return [
        k
        for k, t in enumerate(inputs)
        if is_written(t) and id(t) not in private and first_of(inputs, t) == k
    ]


def _name(text: str) -> str:
    """Return an identifier for an input, from the expression a user writes for it."""
    return "_".join(_WORDS.findall(text))


def _positions(donate: Any) -> tuple[int, ...]:
    """Return the positions in `donate`.

    Raises:
        ArgumentTypeError, ArgumentValueError: they are no positions, or not distinct.
    """
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
    """Compile a function to native code, once for each signature it is called with.

    The function runs as Python once for a signature, on traced tensors; later calls run
    the compiled program. Results have the shapes and dtypes that `f` gives them.

        >>> @hf.jit
        ... def norm(x):
        ...     return hf.sqrt(hf.sum(x * x))
        >>> float(norm(hf.asarray([3.0, 4.0])))
        5.0

    Args:
        f: A function of pytrees of tensors, numbers and hashable values.
        dynamic: Which sizes and numbers of the arguments are symbols, so that one trace
            serves all their values. None: numbers, and sizes once they change. True:
            all from the first call; False: none. Or for each argument (a sequence, or a
            mapping by name) one of these, an `hf.Dim`, or a mapping or sequence of them
            by axis; in containers of the argument's structure.
        donate: Positions of arguments whose tensors a call may overwrite: they must not
            be used after it, even if it fails. A result of the same type that can be
            computed in place is written into the memory of such a tensor, if nothing
            else shares that (an array, a buffer, a view).
        ranks: For a function that several processes run together: an all-gather of
            Python objects, from a record to the records of all, in the order of their
            ranks. It is called before a trace, and so by all processes or by none;
            sizes that differ between them are symbols, and all compile one program.
        backend: Makes a function of each graph: called with a module as of `hf.trace`
            and its inputs, ints for symbols and then tensors, it returns a function
            from such inputs to the list of outputs. "interpreter": NumPy runs node
            after node. None, "native": hopflow's compiler.

    Raises:
        ArgumentTypeError: `f`, `ranks` or `backend` is not callable, or `donate` has an
            element that is no int.
        ArgumentValueError: `donate` has a negative or a repeated number, or `backend`
            is an unknown name.
        BackendError: at a call: the backend fails, or its function returns something
            else than the outputs.
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
