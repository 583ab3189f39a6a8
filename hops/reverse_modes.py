"""Reverse derivatives of `while_loop` from a few carries; it makes the others again.

The forward pass is the loop itself, which counts its steps. The backward pass is a
program of loops: from the last carry that was kept it runs towards the last step, keeps
carries on its way, and takes that step backwards; then the one before it. Which carries
are kept is the schedule of Griewank and Walther ("Algorithm 799: revolve", ACM TOMS 26,
2000), by which the fewest steps are made: with `s` carries none is made more often than
`r` times in the backward pass if there are no more than `binomial(s + r, s)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any, ClassVar, Final, NamedTuple, final

from hopflow import dtypes
from hopflow.autograd.api import jvp, linearize, vjp
from hopflow.autograd.jvp import differentiate
from hopflow.autograd.linearize import linear_of
from hopflow.autograd.partition import silent
from hopflow.autograd.region_jvp import reached
from hopflow.batching.api import vmap
from hopflow.batching.graphs import batched_graph, bind_again
from hopflow.batching.operators import each_example
from hopflow.bind import Operand, Value, current, run_graph, using
from hopflow.entries import entry
from hopflow.errors import ArgumentValueError, GraphError
from hopflow.graph.core import Constant, Graph, Node
from hopflow.graph.interpreter import Evaluate, interpret
from hopflow.graph.regions import Port, Region, Role, Signature, roles
from hopflow.graph.types import TensorType
from hopflow.hops.base import (
    RegionOperator,
    derived,
    numbered,
    split_args,
)
from hopflow.hops.loops import empty_stacks, read_row, stacked_types, write_row
from hopflow.hops.scan import SCAN
from hopflow.loop_ir.kernels import Inline
from hopflow.ops.batching import in_batch
from hopflow.ops.convert import as_value, astype
from hopflow.ops.creation import zeros
from hopflow.ops.elementwise import add, minimum
from hopflow.ops.math import sqrt
from hopflow.ops.views import broadcasted, moved
from hopflow.progress import in_reverse, progress_of
from hopflow.symbolic.size import Size, SymInt
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer
from hopflow.zeros import (
    LinearMap,
    Tangent,
    Unknown,
    Zero,
    added,
    instantiate,
    is_zero,
)

COUNTER: Final = TensorType(dtypes.int64)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `reverse_mode`: the backward pass keeps `count` carries, recomputes others."""

    count: int

    @entry
    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ArgumentValueError(
                f"Checkpoint: `count` must be a positive int, and is {self.count!r}."
            )

    has_portable_key: ClassVar[bool] = True

    def structural_key(self) -> str:
        return f"checkpoint {self.count}"


class _Loop(NamedTuple):
    """A loop of `steps` steps, and what its derivative is given.

    body     Graph, (*symbols, *primals) -> carry
    carried  how many leaves the carry has
    active   which of the primals there is a derivative in
    levels   how many axes of examples `given` has before its own
    primals  the first carry, and captures
    given    tangents of the active primals, or cotangents of the active carry
    progress   whom the steps backwards tell how far they are
    """

    body: Graph
    carried: int
    active: tuple[bool, ...]
    levels: int
    symbols: Sequence[Any]
    primals: Sequence[Any]
    steps: Any
    given: Sequence[Any]
    progress: Any

    @classmethod
    def of(cls, args: Sequence[Any], params: dict[str, Any]) -> "_Loop":
        body, count = params["body"], params["num_carry"]
        first, last = len(body.symbols), len(args) - len(body.captures)
        operands = args[first:last]
        return cls(
            body,
            count,
            params["active"],
            params["levels"],
            args[:first],
            [*operands[:count], *args[last:]],
            operands[count],
            operands[count + 1 :],
            params.get("progress"),
        )

    def args(self, **changed: Any) -> list[Any]:
        """The args of a node, with others in places of some."""
        loop = self._replace(**changed)
        carry, captures = loop.primals[: self.carried], loop.primals[self.carried :]
        return [*loop.symbols, *carry, loop.steps, *loop.given, *captures]

    @property
    def carry(self) -> Sequence[Any]:
        return self.primals[: self.carried]

    def at(self, carry: Sequence[Any]) -> "_Loop":
        """The loop from another carry on."""
        return self._replace(primals=[*carry, *self.primals[self.carried :]])

    def in_levels(self, types: Sequence[TensorType]) -> list[TensorType]:
        """The types of what is given, for those of one example."""
        lead = self.given[0].type.shape[: self.levels]
        return [t.with_shape((*lead, *t.shape)) for t in types]

    def own(self) -> list[Any]:
        """The active primals."""
        return _chosen(self.primals, self.active)

    def own_carry(self) -> list[Any]:
        """The active carry."""
        return _chosen(self.carry, self.active)

    def with_own(self, own: Sequence[Any]) -> "_Loop":
        """The loop with other active primals."""
        rest = iter(own)
        pairs = zip(self.primals, self.active, strict=True)
        return self._replace(primals=[next(rest) if a else x for x, a in pairs])

    def reached_from(self, tangents: Sequence[Tangent]) -> "_Loop":
        """The loop with those primals active too that a tangent reaches, from any."""
        pairs = list(zip(self.primals, self.active, tangents, strict=True))
        marks = [x if own or not is_zero(t) else Zero(x.type) for x, own, t in pairs]
        symbols = [Zero(x.type) for x in self.symbols]
        params = {**_as_scan(self), "length": 2}
        operands = [*self.symbols, *self.primals]
        reach, _ = reached(SCAN, operands, [*symbols, *marks], params)
        active = tuple(reach[len(symbols) :])
        lead = self.given[0].type.shape[: self.levels]
        rest = iter(self.given)
        given = [
            next(rest) if own else zeros((*lead, *x.type.shape), dtype=x.type.dtype)
            for x, own, now in zip(self.carry, self.active, active, strict=False)
            if now
        ]
        return self._replace(active=active, given=given)

    def step(self) -> list[Value]:
        """The next carry."""
        results = interpret(self.body, [*self.symbols, *self.primals], bind_again)
        return list(map(as_value, results))

    def step_of(self, *own: Any) -> list[Value]:
        """The next active carry, from the active primals."""
        return _chosen(self.with_own(own).step(), self.active)


def _as_scan(loop: _Loop) -> dict[str, Any]:
    return {
        "body": loop.body,
        "num_carry": loop.carried,
        "reverse": False,
        "unroll": 1,
    }


def _has_rules(body: Graph) -> bool:
    """Whether a derivative is taken there by a user's rule."""
    return any(
        isinstance(node.op, RegionOperator)
        and node.op.has_custom_derivative(node.params)
        for node in body.walk()
    )


def _leaves(body: Graph) -> list[TensorType]:
    """The types of the primals."""
    return [v.type.strong() for v in (*body.operands, *body.captures)]


def _chosen(leaves: Sequence[Any], active: Sequence[bool]) -> list[Any]:
    """The active leaves of the primals, or of the carry alone."""
    return [x for x, own in zip(leaves, active, strict=False) if own]


def _each(f: Callable[..., Any], levels: int) -> Callable[..., Any]:
    """`f` for each example along so many axes."""
    for _ in range(levels):
        f = vmap(f)
    return f


class _LoopDerivative(RegionOperator):
    """`name(symbols; carry, steps, given; captures; body, ...) -> results`

    carry      the first one of a loop
    steps      i64[]: how many steps it makes
    given      tangents or cotangents; see `_Loop`
    body       Graph, (*symbols, *carry, *captures) -> carry, one step
    num_carry  how many leaves the carry has
    active     which of the carry and the captures there is a derivative in
    levels     how many axes of examples `given` and the results have before their own
    kept       how many carries the backward pass keeps; None: about `sqrt(2 * steps)`

    A node of it means a graph, which is made where it is needed.

    Args:
        family: The three operators, of which one transposes or differentiates another.
    """

    droppable = False
    transforms = True

    def __init__(self, family: "LoopDerivatives") -> None:
        self.family = family

    def meaning(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """The results."""
        raise NotImplementedError

    def in_reverse(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """The results, in the way that reverse derivatives are taken of."""
        return self.meaning(loop, kept)

    # What is given, and the results, belong each to one of the primals.

    def takes(self, loop: _Loop) -> Sequence[Any]:
        """The primals of what is given."""
        raise NotImplementedError

    def gives(self, loop: _Loop) -> Sequence[Any]:
        """The primals of the results."""
        raise NotImplementedError

    def fixed(self, loop: _Loop) -> Sequence[Any]:
        """The first of what is given, which the results are not linear in alone."""
        return ()

    def transposed(self) -> "_LoopDerivative":
        raise NotImplementedError

    def infer(self, *types: TensorType, **params: Any) -> tuple[TensorType, ...]:
        loop = _Loop.of(list(map(Unknown, types)), params)
        own = self.gives(loop._replace(primals=_leaves(loop.body)))
        return tuple(loop.in_levels(own))

    def graph(
        self,
        meaning: Callable[[_Loop, int | None], Sequence[Value]],
        args: Sequence[Any],
        params: dict[str, Any],
    ) -> Graph:
        """What a node means, as a graph of its args, over the body's symbols."""
        body: Graph = params["body"]
        loop, leaves = _Loop.of(args, params), _leaves(body)
        given = loop.in_levels(self.takes(loop._replace(primals=leaves)))
        types = loop.args(symbols=(), primals=leaves, steps=COUNTER, given=given)
        tracer = Tracer(None, body.name, env=user_env())
        symbols = [v.node.symbol for v in body.symbols if v.node.symbol is not None]
        inputs = [TracedTensor(tracer, tracer.define(s)) for s in symbols]
        inputs += [tracer.operand(t, f"x{i}") for i, t in enumerate(types)]
        with using(tracer):
            return tracer.close(meaning(_Loop.of(inputs, params), params["kept"]))

    # --- rules ---

    def _never(self, *_args: Any, **_params: Any) -> Any:
        """It is no function of the user's."""
        raise GraphError(f"{self.name}: derivatives alone make it.")

    debug: Any = _never
    functionalize: Any = _never
    export = derived

    def lower(self, types: Any, *args: Any, **params: Any) -> Inline:
        return Inline(self.graph(self.meaning, args, params), args)

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        found = evaluate(self.graph(self.meaning, args, params), args)
        return tuple(map(as_value, found))

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """A loop of one more level if the primals are the same for all examples; else
        one whose steps are batched."""
        loop, is_batched = _Loop.of(args, params), _Loop.of(batched, params)
        if is_batched.steps or isinstance(size, SymInt):
            return each_example(self, size, batched, args, params)
        given = [
            as_value(in_batch(size, b, x))
            for x, b in zip(loop.given, is_batched.given, strict=True)
        ]
        primals, place = loop.primals, loop.levels
        if any(is_batched.primals):
            wanted = map(or_, is_batched.primals, loop.active)
            body, now = _batched_step(loop.body, size, loop.carried, list(wanted))
            params = {**params, "body": body}
            primals = [
                in_batch(size, was, x) if b else x
                for x, was, b in zip(primals, is_batched.primals, now, strict=True)
            ]
            given = [moved(x, 0, place) for x in given]
        else:
            params, place = {**params, "levels": place + 1}, 0
        results = bind_again(self, loop.args(primals=primals, given=given), params)
        return [moved(r, place, 0) for r in results], [True] * len(results)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        graph = self.graph(self.meaning, operands, params)
        return differentiate(graph, operands, tangents, None)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        graph = self.graph(self.in_reverse, operands, params)
        values, found = differentiate(graph, operands, tangents, linear_of(tangents))
        return values, lambda _: found

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        loop = _Loop.of(operands, params)
        fixed = self.fixed(loop)
        args = loop.args(given=[*fixed, *map(instantiate, cotangents)])
        found = bind_again(self.transposed(), args, params)
        first = len(loop.symbols) + loop.carried + 1 + len(fixed)
        by_place = dict(enumerate(found, first))
        return [by_place.get(i) for i in range(len(operands))]

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        symbols, count = len(parts.symbols), node.params["num_carry"]
        operands, captures = len(parts.operands), len(parts.captures)
        args = roles(
            ("symbol", symbols), ("operand", operands), ("invariant", captures)
        )
        inputs = (
            *numbered("symbol", 0, symbols),
            *numbered("operand", symbols, count),
            *numbered("invariant", symbols + operands, captures),
        )
        body: Graph = node.params["body"]
        outputs = (Port("result"),) * len(body.outputs)
        region = Region("body", body, inputs, outputs, "any times")
        return Signature(args, roles(("result", len(node.results))), (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params


def _batched_step(
    body: Graph, size: int, count: int, primals: list[bool]
) -> tuple[Graph, list[bool]]:
    """A step for many examples, and which of its primals are batched: those that are to
    be, and the carries that then depend on the example."""
    symbols = [False] * len(body.symbols)
    while True:
        found = batched_graph(body, size, [*symbols, *primals], primals[:count])
        if list(found.outputs) == primals[:count]:
            return found.graph, primals
        primals[:count] = found.outputs


@final
class LoopTangents(_LoopDerivative):
    """The tangents of the last active carry, from those of the active primals."""

    name = "loop_tangents"

    def takes(self, loop: _Loop) -> Sequence[Any]:
        return loop.own()

    def gives(self, loop: _Loop) -> Sequence[Any]:
        return loop.own_carry()

    def transposed(self) -> _LoopDerivative:
        return self.family.cotangents

    def meaning(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """A loop that carries tangents beside the carry."""
        count = len(loop.own_carry())
        fixed = loop.given[count:]

        def step(i: Any, carry: Any, tangents: Any) -> Any:
            here = loop.at(carry)
            following, push = linearize(
                lambda *own: here.with_own(own).step(), *here.own()
            )
            pushed = _each(push, loop.levels)(*tangents, *fixed)
            return i + 1, following, _chosen(pushed, loop.active)

        first = (0, list(loop.carry), list(loop.given[:count]))
        loop_over = self.family.while_loop
        found: Sequence[Value] = loop_over(lambda i, *_: i < loop.steps, step, first)[2]
        return found


@final
class LoopCotangents(_LoopDerivative):
    """The cotangents of the active primals, from those of the last active carry."""

    name = "loop_cotangents"

    def takes(self, loop: _Loop) -> Sequence[Any]:
        return loop.own_carry()

    def gives(self, loop: _Loop) -> Sequence[Any]:
        return loop.own()

    def transposed(self) -> _LoopDerivative:
        return self.family.tangents

    def meaning(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return _revolve(self.family.while_loop, loop, kept)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        """They are linear in what is given, and a gradient in the primals: a second
        derivative is symmetric, so each of both parts has a transpose in few carries.
        """
        if _has_rules(params["body"]):  # which are perhaps no gradients
            graph = self.graph(lambda loop, _: self.by_scan(loop), operands, params)
            known, pushed = differentiate(
                graph, operands, tangents, linear_of(tangents)
            )
            return known, lambda _: pushed
        values = bind_again(self, operands, params)
        loop, dots = _Loop.of(operands, params), _Loop.of(tangents, params)
        wide = loop.reached_from(dots.primals)
        lead = wide.given[0].type.shape[: loop.levels]

        def derivative(given: Sequence[Tangent]) -> Sequence[Tangent]:
            dots = _Loop.of(given, params)
            found: list[Tangent] = [Zero(v.type) for v in values]
            if not all(map(is_zero, dots.given)):
                args = loop.args(given=list(map(instantiate, dots.given)))
                found = list(bind_again(self, args, params))
            if not all(map(is_zero, dots.primals)):
                own = map(instantiate, _chosen(dots.primals, wide.active))
                along = [broadcasted(x, (*lead, *x.shape)) for x in own]
                args = wide.args(given=[*wide.given, *along])
                bent = bind_again(
                    self.family.curvature, args, {**params, "active": wide.active}
                )
                places = _chosen(loop.active, wide.active)
                found = list(map(added, found, _chosen(bent, places)))
            return found

        return values, derivative

    def by_scan(self, loop: _Loop) -> Sequence[Value]:
        """The reverse of a scan, which keeps something of each step."""
        params = {**_as_scan(loop), "length": current().symbol_of(loop.steps, 0)}

        def last(*own: Any) -> list[Any]:
            args = [*loop.symbols, *loop.with_own(own).primals]
            return _chosen(bind_again(SCAN, args, params), loop.active)

        _, pull = vjp(last, *loop.own())
        found: Sequence[Value] = _each(pull, loop.levels)(list(loop.given))
        return found


@final
class LoopCurvature(_LoopDerivative):
    """The tangents of `LoopCotangents` in a direction of the active primals, which is
    given after the cotangents."""

    name = "loop_curvature"

    def takes(self, loop: _Loop) -> Sequence[Any]:
        return [*loop.own_carry(), *loop.own()]

    def gives(self, loop: _Loop) -> Sequence[Any]:
        return loop.own()

    def fixed(self, loop: _Loop) -> Sequence[Any]:
        return loop.given[: len(loop.own_carry())]

    def transposed(self) -> _LoopDerivative:
        """A second derivative is symmetric."""
        return self

    def meaning(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return self.along(
            loop, lambda loop: _revolve(self.family.while_loop, loop, kept)
        )

    def in_reverse(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return self.along(loop, self.family.cotangents.by_scan)

    def along(
        self, loop: _Loop, gradient: Callable[[_Loop], Sequence[Value]]
    ) -> Sequence[Value]:
        fixed = self.fixed(loop)

        def one(given: Sequence[Any], along: Sequence[Any]) -> Sequence[Value]:
            here = loop._replace(given=given, levels=0)
            found: Sequence[Value] = jvp(
                lambda *own: gradient(here.with_own(own)), here.own(), along
            )[1]
            return found

        found: Sequence[Value] = _each(one, loop.levels)(
            list(fixed), list(loop.given[len(fixed) :])
        )
        return found


# --- the backward pass ----------------------------------------------------------------


def _revolve(
    while_loop: Callable[..., Any], loop: _Loop, kept: int | None
) -> list[Value]:
    """The cotangents of the active primals, from those of the last active carry.

    Kept carries lie in stacks, the numbers of their steps in `made`. The last of them,
    at `top`, is in the end the one before the step that is taken backwards.
    """
    size: Size
    if kept is None:
        root = sqrt(astype(2 * loop.steps, dtypes.float64))
        size = current().symbol_of(astype(root, dtypes.int64) + 2, 2)
    else:
        size = max(kept, 2)  # the first carry, and that before the last step
    types = [x.type for x in loop.carry]
    stacks = empty_stacks(stacked_types(types, size))
    stacks = [write_row(s, x, _FIRST) for s, x in zip(stacks, loop.carry, strict=True)]
    made = empty_stacks([COUNTER.with_shape((size,))])[0]

    def keep_one_more(end: Any, top: Any, i: Any, made: Any, stacks: Any) -> Any:
        goal = i + stride(while_loop, end - i, size - 1 - top)
        _, carry = while_loop(
            lambda j, _: j < goal,
            lambda j, carry: (j + 1, loop.at(carry).step()),
            (i, [read_row(s, top) for s in stacks]),
        )
        made = write_row(made, goal, top + 1)
        pairs = zip(stacks, carry, strict=True)
        return end, top + 1, goal, made, [write_row(s, x, top + 1) for s, x in pairs]

    def take_back(
        end: Any, top: Any, made: Any, stacks: Any, cts: Any, sums: Any
    ) -> Any:
        _, top, _, made, stacks = while_loop(
            lambda end, _, i, *__: i < end - 1,
            keep_one_more,
            (end, top, read_row(made, top), made, stacks),
        )
        here = loop.at([read_row(s, top) for s in stacks])
        _, pull = vjp(here.step_of, *here.own())
        found = _each(pull, loop.levels)(cts)
        count = len(cts)
        totals = [add(s, ct) for s, ct in zip(sums, found[count:], strict=True)]
        return end - 1, top - 1, made, stacks, list(found[:count]), totals

    own = [x.type for x in loop.own()]
    sums = empty_stacks(loop.in_levels(own[len(loop.given) :]))
    first = (loop.steps, 0, made, stacks, list(loop.given), sums)
    *_, cts, sums = while_loop(
        lambda end, *_: end > 0, take_back, first, progress=loop.progress
    )
    return [*cts, *sums]


def stride(while_loop: Callable[..., Any], steps: Any, free: Any) -> Any:
    """After how many of `steps` > 1 steps to keep the next carry, where `free` more may
    be kept; the last of them is that before the last step."""

    # n = binomial(free + r, r) for the least r that it is enough for; `before` is that
    # of r - 1.
    def more(r: Any, _: Any, n: Any) -> Any:
        return r + 1, n, n * (free + r + 1) // (r + 1)

    r, before, _ = while_loop(lambda r, _, n: n < steps, more, (0, 0, 1))
    return minimum(before, steps - before * free // (free + r - 1))


_FIRST: Final = Constant(0, COUNTER)


# --- the mode -------------------------------------------------------------------------


class LoopDerivatives:
    """The operators that derivatives of a `while_loop` are made of, which keep few
    carries.

    Args:
        while_loop: What makes the loops that they consist of.
    """

    def __init__(self, while_loop: Callable[..., Any]) -> None:
        self.while_loop = while_loop
        self.tangents = LoopTangents(self)
        self.cotangents = LoopCotangents(self)
        self.curvature = LoopCurvature(self)

    @property
    def operators(self) -> "tuple[_LoopDerivative, ...]":
        """All of them."""
        return self.tangents, self.cotangents, self.curvature

    def linearize(
        self,
        op: Any,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        """The results of a `while_loop`, and its derivative: of one that keeps few
        carries."""
        body, mode = params["body"], params["reverse_mode"]
        first, count = len(body.symbols), params["num_carry"]
        steps, *values = op.counted(operands, params)
        args, results = reached(op, operands, tangents, params)
        own = {
            "body": silent(body),
            "num_carry": count,
            "active": tuple(args[first:]),
            "levels": 0,
            "kept": mode.count if isinstance(mode, Checkpoint) else None,
            **in_reverse(progress_of(params)),
        }

        def derivative(given: Sequence[Tangent]) -> list[Tangent]:
            found: list[Tangent] = [Zero(v.type) for v in values]
            if any(results):
                active = [instantiate(t) for t in _chosen(given, args)]
                last = first + count
                passed = [*operands[:last], steps, *active, *operands[last:]]
                places = [i for i, nonzero in enumerate(results) if nonzero]
                pushed = bind_again(self.tangents, passed, own)
                for place, tangent in zip(places, pushed, strict=True):
                    found[place] = tangent
            return found

        return values, derivative
