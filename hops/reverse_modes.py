"""Reverse mode of `while_loop` from a few checkpoints, which recomputes other carries.

The forward pass is the loop itself, which counts its steps. The backward pass is a
program of loops: it runs from the last checkpoint towards the last step, saves
checkpoints on its way, and takes that step backwards; then the one before it. The
schedule of checkpoints is that of Griewank and Walther ("Algorithm 799: revolve", ACM
TOMS 26, 2000), which recomputes the fewest steps: with `s` checkpoints no step is
computed more than `r` times in the backward pass if there are at most
`binomial(s + r, s)` steps.
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
from hopflow.autograd.preaccumulation import has_custom_rules
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
    """A `reverse_mode`: the backward pass keeps `count` carries and recomputes the
    others.

    >>> def power(x):
    ...     step = lambda i, y: (i + 1, y * x)
    ...     mode = hf.Checkpoint(2)
    ...     return hf.while_loop(lambda i, y: i < 5, step, (0, x), reverse_mode=mode)[1]
    >>> hf.grad(power)(2.0)
    Tensor(192., f32[])
    """

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
    """A loop of `steps` steps, and the tangents or cotangents of its derivative.

    body       Graph, (*symbols, *primals) -> carry
    carried    the number of leaves of the carry
    active     the primals that are differentiated
    levels     the number of leading batch dimensions of `seeds`
    primals    the first carry, and captures
    seeds      tangents of the active primals, or cotangents of the active carry
    progress   the progress report that the backward steps update
    """

    body: Graph
    carried: int
    active: tuple[bool, ...]
    levels: int
    symbols: Sequence[Any]
    primals: Sequence[Any]
    steps: Any
    seeds: Sequence[Any]
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
        """Return the args of a node, with some fields changed."""
        loop = self._replace(**changed)
        carry, captures = loop.primals[: self.carried], loop.primals[self.carried :]
        return [*loop.symbols, *carry, loop.steps, *loop.seeds, *captures]

    @property
    def carry(self) -> Sequence[Any]:
        return self.primals[: self.carried]

    def at(self, carry: Sequence[Any]) -> "_Loop":
        """Return the loop from another carry on."""
        return self._replace(primals=[*carry, *self.primals[self.carried :]])

    def in_levels(self, types: Sequence[TensorType]) -> list[TensorType]:
        """Return these types with the leading batch dimensions of `seeds`."""
        lead = self.seeds[0].type.shape[: self.levels]
        return [t.with_shape((*lead, *t.shape)) for t in types]

    def active_primals(self) -> list[Any]:
        """Return the active primals."""
        return _active(self.primals, self.active)

    def active_carry(self) -> list[Any]:
        """Return the active leaves of the carry."""
        return _active(self.carry, self.active)

    def with_active(self, primals: Sequence[Any]) -> "_Loop":
        """Return the loop with other active primals."""
        replacements = iter(primals)
        pairs = zip(self.primals, self.active, strict=True)
        return self._replace(primals=[next(replacements) if a else x for x, a in pairs])

    def reached_from(self, tangents: Sequence[Tangent]) -> "_Loop":
        """Return the loop in which each primal is active too that a nonzero tangent
        reaches."""
        pairs = list(zip(self.primals, self.active, tangents, strict=True))
        marks = [x if was or not is_zero(t) else Zero(x.type) for x, was, t in pairs]
        symbols = [Zero(x.type) for x in self.symbols]
        params = {**_as_scan(self), "length": 2}
        operands = [*self.symbols, *self.primals]
        reach, _ = reached(SCAN, operands, [*symbols, *marks], params)
        active = tuple(reach[len(symbols) :])
        lead = self.seeds[0].type.shape[: self.levels]
        nonzero = iter(self.seeds)
        seeds = [
            next(nonzero) if was else zeros((*lead, *x.type.shape), dtype=x.type.dtype)
            for x, was, becomes in zip(self.carry, self.active, active, strict=False)
            if becomes
        ]
        return self._replace(active=active, seeds=seeds)

    def step(self) -> list[Value]:
        """Return the next carry."""
        results = interpret(self.body, [*self.symbols, *self.primals], bind_again)
        return list(map(as_value, results))

    def step_of(self, *primals: Any) -> list[Value]:
        """Return the active leaves of the next carry, as a function of the active
        primals."""
        return _active(self.with_active(primals).step(), self.active)


def _as_scan(loop: _Loop) -> dict[str, Any]:
    return {
        "body": loop.body,
        "num_carry": loop.carried,
        "reverse": False,
        "unroll": 1,
    }


def _primal_types(body: Graph) -> list[TensorType]:
    """Return the types of the primals."""
    return [v.type.strong() for v in (*body.operands, *body.captures)]


def _active(leaves: Sequence[Any], active: Sequence[bool]) -> list[Any]:
    """Return the active leaves of the primals, or of the carry alone."""
    return [x for x, is_active in zip(leaves, active, strict=False) if is_active]


def _vmapped(f: Callable[..., Any], levels: int) -> Callable[..., Any]:
    """Return `f` mapped over this number of leading batch dimensions."""
    for _ in range(levels):
        f = vmap(f)
    return f


class _LoopDerivative(RegionOperator):
    """`name(symbols; carry, steps, seeds; captures; body, ...) -> results`

    carry      the first carry of a loop
    steps      i64[]: the number of its steps
    seeds      tangents or cotangents; see `_Loop`
    body       Graph, (*symbols, *carry, *captures) -> carry, one step
    num_carry  the number of leaves of the carry
    active     the leaves of the carry and the captures that are differentiated
    levels     the number of leading batch dimensions of `seeds` and the results
    kept       the number of carries that the backward pass keeps; None: about
               `sqrt(2 * steps)`

    The graph that defines a node is built when it is needed.

    Args:
        family: The three operators, whose derivatives and transposes are each other.
    """

    droppable = False
    transforms = True

    def __init__(self, family: "LoopDerivatives") -> None:
        self.family = family

    def expand(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """Return the results, in terms of other operators."""
        raise NotImplementedError

    def expand_in_reverse(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """Return the results, in terms of operators that support reverse mode."""
        return self.expand(loop, kept)

    # Each input in `seeds`, and each result, belongs to one of the primals.

    def primals_of_seeds(self, loop: _Loop) -> Sequence[Any]:
        """Return the primals of the inputs `seeds`."""
        raise NotImplementedError

    def primals_of_results(self, loop: _Loop) -> Sequence[Any]:
        """Return the primals of the results."""
        raise NotImplementedError

    def fixed(self, loop: _Loop) -> Sequence[Any]:
        """Return the leading inputs in `seeds` that the transpose leaves fixed."""
        return ()

    def transposed(self) -> "_LoopDerivative":
        raise NotImplementedError

    def infer(self, *types: TensorType, **params: Any) -> tuple[TensorType, ...]:
        loop = _Loop.of(list(map(Unknown, types)), params)
        results = self.primals_of_results(
            loop._replace(primals=_primal_types(loop.body))
        )
        return tuple(loop.in_levels(results))

    def graph(
        self,
        expand: Callable[[_Loop, int | None], Sequence[Value]],
        args: Sequence[Any],
        params: dict[str, Any],
    ) -> Graph:
        """Return the graph that defines a node: a function of its args, over the body's
        symbols."""
        body: Graph = params["body"]
        loop, leaves = _Loop.of(args, params), _primal_types(body)
        seeds = loop.in_levels(self.primals_of_seeds(loop._replace(primals=leaves)))
        types = loop.args(symbols=(), primals=leaves, steps=COUNTER, seeds=seeds)
        tracer = Tracer(None, body.name, env=user_env())
        inputs = list(map(tracer.input_like, body.symbols))
        inputs += [tracer.operand(t, f"x{i}") for i, t in enumerate(types)]
        with using(tracer):
            return tracer.close(expand(_Loop.of(inputs, params), params["kept"]))

    # --- rules ---

    def _never(self, *_args: Any, **_params: Any) -> Any:
        """Raise an error, since users cannot call the operator."""
        raise GraphError(f"{self.name}: derivatives alone make it.")

    debug: Any = _never
    functionalize: Any = _never
    export = derived

    def lower(self, types: Any, *args: Any, **params: Any) -> Inline:
        return Inline(self.graph(self.expand, args, params), args)

    def interpret(
        self,
        args: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        results = evaluate(self.graph(self.expand, args, params), args)
        return tuple(map(as_value, results))

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """If the primals are not batched, return the results of a loop with one more
        level, else those of a loop with batched steps."""
        loop, is_batched = _Loop.of(args, params), _Loop.of(batched, params)
        if is_batched.steps or isinstance(size, SymInt):
            return each_example(self, size, batched, args, params)
        seeds = [
            as_value(in_batch(size, b, x))
            for x, b in zip(loop.seeds, is_batched.seeds, strict=True)
        ]
        primals, place = loop.primals, loop.levels
        if any(is_batched.primals):
            masks = map(or_, is_batched.primals, loop.active)
            body, mask = _batched_step(loop.body, size, loop.carried, list(masks))
            params = {**params, "body": body}
            primals = [
                in_batch(size, was, x) if b else x
                for x, was, b in zip(primals, is_batched.primals, mask, strict=True)
            ]
            seeds = [moved(x, 0, place) for x in seeds]
        else:
            params, place = {**params, "levels": place + 1}, 0
        results = bind_again(self, loop.args(primals=primals, seeds=seeds), params)
        return [moved(r, place, 0) for r in results], [True] * len(results)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        graph = self.graph(self.expand, operands, params)
        return differentiate(graph, operands, tangents, None)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        graph = self.graph(self.expand_in_reverse, operands, params)
        values, result_dots = differentiate(
            graph, operands, tangents, linear_of(tangents)
        )
        return values, lambda _: result_dots

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        loop = _Loop.of(operands, params)
        fixed = self.fixed(loop)
        args = loop.args(seeds=[*fixed, *map(instantiate, cotangents)])
        results = bind_again(self.transposed(), args, params)
        first = len(loop.symbols) + loop.carried + 1 + len(fixed)
        by_place = dict(enumerate(results, first))
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
    """Return a batched step, and a mask of its batched primals: those requested, and
    the carries that depend on them."""
    symbols = [False] * len(body.symbols)
    while True:
        step = batched_graph(body, size, [*symbols, *primals], primals[:count])
        if list(step.outputs) == primals[:count]:
            return step.graph, primals
        primals[:count] = step.outputs


@final
class LoopTangents(_LoopDerivative):
    """The tangents of the last active carry, as a function of those of the active
    primals."""

    name = "loop_tangents"

    def primals_of_seeds(self, loop: _Loop) -> Sequence[Any]:
        return loop.active_primals()

    def primals_of_results(self, loop: _Loop) -> Sequence[Any]:
        return loop.active_carry()

    def transposed(self) -> _LoopDerivative:
        return self.family.cotangents

    def expand(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        """Run a loop that carries the tangents beside the carry."""
        count = len(loop.active_carry())
        fixed = loop.seeds[count:]

        def step(i: Any, carry: Any, tangents: Any) -> Any:
            at_carry = loop.at(carry)
            following, push = linearize(
                lambda *primals: at_carry.with_active(primals).step(),
                *at_carry.active_primals(),
            )
            pushed = _vmapped(push, loop.levels)(*tangents, *fixed)
            return i + 1, following, _active(pushed, loop.active)

        first = (0, list(loop.carry), list(loop.seeds[:count]))
        loop_over = self.family.while_loop
        result_dots: Sequence[Value] = loop_over(
            lambda i, *_: i < loop.steps, step, first
        )[2]
        return result_dots


@final
class LoopCotangents(_LoopDerivative):
    """The cotangents of the active primals, as a function of those of the last active
    carry."""

    name = "loop_cotangents"

    def primals_of_seeds(self, loop: _Loop) -> Sequence[Any]:
        return loop.active_carry()

    def primals_of_results(self, loop: _Loop) -> Sequence[Any]:
        return loop.active_primals()

    def transposed(self) -> _LoopDerivative:
        return self.family.tangents

    def expand(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return _revolve(self.family.while_loop, loop, kept)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        """Return the results and their derivative. They are linear in the cotangents,
        and a gradient with respect to the primals. A second derivative is symmetric, so
        both parts have a transpose that needs few carries."""
        if has_custom_rules(params["body"]):  # a rule may be no gradient
            graph = self.graph(lambda loop, _: self.by_scan(loop), operands, params)
            results, pushed = differentiate(
                graph, operands, tangents, linear_of(tangents)
            )
            return results, lambda _: pushed
        values = bind_again(self, operands, params)
        loop, dots = _Loop.of(operands, params), _Loop.of(tangents, params)
        wide = loop.reached_from(dots.primals)
        lead = wide.seeds[0].type.shape[: loop.levels]

        def derivative(input_dots: Sequence[Tangent]) -> Sequence[Tangent]:
            dots = _Loop.of(input_dots, params)
            result_dots: list[Tangent] = [Zero(v.type) for v in values]
            if not all(map(is_zero, dots.seeds)):
                args = loop.args(seeds=list(map(instantiate, dots.seeds)))
                result_dots = list(bind_again(self, args, params))
            if not all(map(is_zero, dots.primals)):
                active_dots = map(instantiate, _active(dots.primals, wide.active))
                directions = [broadcasted(x, (*lead, *x.shape)) for x in active_dots]
                args = wide.args(seeds=[*wide.seeds, *directions])
                curvature = bind_again(
                    self.family.curvature, args, {**params, "active": wide.active}
                )
                places = _active(loop.active, wide.active)
                result_dots = list(map(added, result_dots, _active(curvature, places)))
            return result_dots

        return values, derivative

    def by_scan(self, loop: _Loop) -> Sequence[Value]:
        """Return the same by reverse mode of a scan, which saves residuals of each
        step."""
        params = {**_as_scan(loop), "length": current().symbol_of(loop.steps, 0)}

        def last(*primals: Any) -> list[Any]:
            args = [*loop.symbols, *loop.with_active(primals).primals]
            return _active(bind_again(SCAN, args, params), loop.active)

        _, pull = vjp(last, *loop.active_primals())
        cotangents: Sequence[Value] = _vmapped(pull, loop.levels)(list(loop.seeds))
        return cotangents


@final
class LoopCurvature(_LoopDerivative):
    """The tangents of `LoopCotangents` for tangents of the active primals, which follow
    the cotangents in `seeds`."""

    name = "loop_curvature"

    def primals_of_seeds(self, loop: _Loop) -> Sequence[Any]:
        return [*loop.active_carry(), *loop.active_primals()]

    def primals_of_results(self, loop: _Loop) -> Sequence[Any]:
        return loop.active_primals()

    def fixed(self, loop: _Loop) -> Sequence[Any]:
        return loop.seeds[: len(loop.active_carry())]

    def transposed(self) -> _LoopDerivative:
        """Return the same operator, since a second derivative is symmetric."""
        return self

    def expand(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return self.along(
            loop, lambda loop: _revolve(self.family.while_loop, loop, kept)
        )

    def expand_in_reverse(self, loop: _Loop, kept: int | None) -> Sequence[Value]:
        return self.along(loop, self.family.cotangents.by_scan)

    def along(
        self, loop: _Loop, gradient: Callable[[_Loop], Sequence[Value]]
    ) -> Sequence[Value]:
        fixed = self.fixed(loop)

        def along_one(seeds: Sequence[Any], along: Sequence[Any]) -> Sequence[Value]:
            inner = loop._replace(seeds=seeds, levels=0)
            dots: Sequence[Value] = jvp(
                lambda *primals: gradient(inner.with_active(primals)),
                inner.active_primals(),
                along,
            )[1]
            return dots

        dots: Sequence[Value] = _vmapped(along_one, loop.levels)(
            list(fixed), list(loop.seeds[len(fixed) :])
        )
        return dots


# --- the backward pass ----------------------------------------------------------------


def _revolve(
    while_loop: Callable[..., Any], loop: _Loop, kept: int | None
) -> list[Value]:
    """Return the cotangents of the active primals, as a function of those of the last
    active carry.

    Checkpoints are kept in stacks, the numbers of their steps in `numbers`. The last of
    them, at `top`, is eventually the carry before the step that is taken backwards.
    """
    size: Size
    if kept is None:
        root = sqrt(astype(2 * loop.steps, dtypes.float64))
        size = current().symbol_of(astype(root, dtypes.int64) + 2, 2)
    else:
        size = max(kept, 2)  # the first carry, and the one before the last step
    types = [x.type for x in loop.carry]
    stacks = empty_stacks(stacked_types(types, size))
    stacks = [write_row(s, x, _FIRST) for s, x in zip(stacks, loop.carry, strict=True)]
    numbers = empty_stacks([COUNTER.with_shape((size,))])[0]

    def save_checkpoint(end: Any, top: Any, i: Any, numbers: Any, stacks: Any) -> Any:
        goal = i + stride(while_loop, end - i, size - 1 - top)
        _, carry = while_loop(
            lambda j, _: j < goal,
            lambda j, carry: (j + 1, loop.at(carry).step()),
            (i, [read_row(s, top) for s in stacks]),
        )
        numbers = write_row(numbers, goal, top + 1)
        pairs = zip(stacks, carry, strict=True)
        return end, top + 1, goal, numbers, [write_row(s, x, top + 1) for s, x in pairs]

    def take_back(
        end: Any, top: Any, numbers: Any, stacks: Any, cts: Any, sums: Any
    ) -> Any:
        _, top, _, numbers, stacks = while_loop(
            lambda end, _, i, *__: i < end - 1,
            save_checkpoint,
            (end, top, read_row(numbers, top), numbers, stacks),
        )
        at_top = loop.at([read_row(s, top) for s in stacks])
        _, pull = vjp(at_top.step_of, *at_top.active_primals())
        step_cts = _vmapped(pull, loop.levels)(cts)
        count = len(cts)
        totals = [add(s, ct) for s, ct in zip(sums, step_cts[count:], strict=True)]
        return end - 1, top - 1, numbers, stacks, list(step_cts[:count]), totals

    active_types = [x.type for x in loop.active_primals()]
    sums = empty_stacks(loop.in_levels(active_types[len(loop.seeds) :]))
    first = (loop.steps, 0, numbers, stacks, list(loop.seeds), sums)
    *_, cts, sums = while_loop(
        lambda end, *_: end > 0, take_back, first, progress=loop.progress
    )
    return [*cts, *sums]


def stride(while_loop: Callable[..., Any], steps: Any, free: Any) -> Any:
    """Return the number of steps after which to save the next checkpoint.

    There are `steps` > 1 steps left and room for `free` more checkpoints. The last of
    them is the carry before the last step.
    """

    # n = binomial(free + r, r) for the least r with n >= steps; `before` is the value
    # for r - 1.
    def more(r: Any, _: Any, n: Any) -> Any:
        return r + 1, n, n * (free + r + 1) // (r + 1)

    r, before, _ = while_loop(lambda r, _, n: n < steps, more, (0, 0, 1))
    return minimum(before, steps - before * free // (free + r - 1))


_FIRST: Final = Constant(0, COUNTER)


# --- the mode -------------------------------------------------------------------------


class LoopDerivatives:
    """The operators that make up derivatives of a `while_loop` with few checkpoints.

    Args:
        while_loop: The function that creates the loops they consist of.
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
        """Return the results of a `while_loop`, and its derivative, which keeps few
        carries."""
        body, mode = params["body"], params["reverse_mode"]
        first, count = len(body.symbols), params["num_carry"]
        steps, *values = op.counted(operands, params)
        args, results = reached(op, operands, tangents, params)
        loop_params = {
            "body": silent(body),
            "num_carry": count,
            "active": tuple(args[first:]),
            "levels": 0,
            "kept": mode.count if isinstance(mode, Checkpoint) else None,
            **in_reverse(progress_of(params)),
        }

        def derivative(input_dots: Sequence[Tangent]) -> list[Tangent]:
            result_dots: list[Tangent] = [Zero(v.type) for v in values]
            if any(results):
                active = [instantiate(t) for t in _active(input_dots, args)]
                last = first + count
                inputs = [*operands[:last], steps, *active, *operands[last:]]
                places = [i for i, nonzero in enumerate(results) if nonzero]
                pushed = bind_again(self.tangents, inputs, loop_params)
                for place, tangent in zip(places, pushed, strict=True):
                    result_dots[place] = tangent
            return result_dots

        return values, derivative
