"""`flex_attention`: attention with a user's score and mask functions; its rules."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any, Final, final

from hopflow import dtypes
from hopflow.autograd.jvp import differentiate
from hopflow.autograd.linearize import linear_of
from hopflow.batching.graphs import bind_again
from hopflow.batching.operators import each_example
from hopflow.bind import Interpreter, Operand, Value, bind, current
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentTypeError,
    DTypeError,
    MutationError,
    ScoreTypeError,
    ShapeError,
)
from hopflow.graph.core import Graph, Node
from hopflow.graph.regions import Port, Region, Role, Signature, roles
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.hops.attention_blocks import (
    EMPTY,
    PARTIAL,
    as_graph,
    attend,
    blocks_in,
    score_dtype,
    sums,
)
from hopflow.hops.base import (
    Call,
    RegionOperator,
    derived,
    numbered,
    split_args,
    truth,
)
from hopflow.hops.block_mask import BlockMask, cell_function, check_fits, check_mask
from hopflow.hops.loops import empty_stacks, fits
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Recorder,
    Written,
    cast_output,
    close_bodies,
    refuse_writes,
    trace_body,
)
from hopflow.loop_ir.kernels import Inline
from hopflow.ops.convert import as_value, astype
from hopflow.ops.creation import full, zeros
from hopflow.ops.elementwise import divide, equal, where
from hopflow.ops.joining import stack
from hopflow.ops.manipulation import broadcast_to, expand_dims, reshape
from hopflow.ops.math import exp, log, sqrt
from hopflow.ops.opdef import as_operand
from hopflow.ops.reduce import max as max_of
from hopflow.ops.reduce import sum as sum_of
from hopflow.ops.rules import as_flag
from hopflow.ops.sizes import equals, specialised
from hopflow.symbolic.size import Size
from hopflow.zeros import LinearMap, Tangent, Zero, instantiate, is_zero

_BLOCK: Final = 128
_INDEX: Final = TensorType(dtypes.int64)


@final
class FlexAttention(RegionOperator):
    """`flex_attention(symbols; q, k, v, scale, kinds; captures; score, ...) -> y, lse`

    q, k, v  T[b, h, l, e], T[b, h / group, s, e], T[b, h / group, s, w]
    scale    S[], where S is the dtype of scores: f64 if T is that, else f32
    kinds    i8[b, h, n, m]: whether the mask keeps none, some or all of a block;
             optional
    score    Graph, (*symbols, score, b, h, q_idx, kv_idx, *captures) -> S[]
    mask     Graph, (*symbols, b, h, q_idx, kv_idx, *captures) -> bool[]; None: all True
    block    the number of queries, and the number of keys, of a block
    group    the number of query heads that share one head of keys
    shape    of `y`: T[b, h, l, w]
    lse      S[b, h, l]: the logarithm of the sum of the exponentials of scores
    """

    name = "flex_attention"
    droppable = False  # regions compute single scores, and read none of the operands
    transforms = True

    def prepare(
        self,
        q: Any,
        k: Any,
        v: Any,
        score_mod: Any,
        mask_mod: Any,
        block_mask: Any,
        scale: Any,
        enable_gqa: Any,
    ) -> Call:
        grouped = as_flag(self.name, "enable_gqa", enable_gqa)
        (q, k, v), shape, group = _checked(q, k, v, grouped)
        lengths = (q.shape[2], k.shape[2])
        dtype = score_dtype(q.dtype)
        operands: list[Operand] = [q, k, v, _scale(scale, q.shape[3], dtype)]
        block = tuple(
            [max(1, min(n, _BLOCK)) if isinstance(n, int) else _BLOCK for n in lengths]
        )
        if block_mask is not None:
            check_fits(block_mask, mask_mod, shape, lengths)
            mask_mod, block = block_mask.mask_mod, block_mask.block_size
            blocks = tuple(map(blocks_in, lengths, block))
            operands.append(broadcast_to(block_mask.kinds, (*shape[:2], *blocks)))
        score_mod = _unchanged if score_mod is None else score_mod
        functions = {"score": cell_function("score_mod", score_mod, "score")}
        if mask_mod is not None:
            functions["mask"] = cell_function("mask_mod", mask_mod)
        params = {"block": block, "group": group, "shape": shape}
        return Call(self.name, [], operands, functions, params)

    def run_debug(self, call: Call) -> Any:
        dtype = call.operands[3].type.dtype

        def score(*inputs: Any) -> list[Value]:
            function = call.functions["score"]
            results = Recorder(self.name, function, True, _REFUSAL)(*inputs)
            _check_score(function, [x.type for x in results], dtype)
            return [astype(results[0], dtype)]

        def mask(*inputs: Any) -> Sequence[Value]:
            function = call.functions["mask"]
            results = Recorder(self.name, function, True, _REFUSAL)(*inputs)
            check_mask(self.name, function, [x.type for x in results])
            return results

        has_mask = "mask" in call.functions
        params = {**call.params, "score": score, "mask": mask if has_mask else None}
        return self.debug(*map(as_value, call.operands), **params)

    def trace(self, call: Call) -> Any:
        dtype = call.operands[3].type.dtype
        inputs = {"score": [TensorType(dtype)], "mask": []}
        bodies = {
            key: trace_body(
                self.name,
                f"{self.name}/{function.role}",
                function,
                [*inputs[key], *[_INDEX] * 4],
            )
            for key, function in call.functions.items()
        }
        _check_score(call.functions["score"], bodies["score"].types, dtype)
        cast_output(bodies["score"], 0, dtype)
        if "mask" in bodies:
            check_mask(self.name, call.functions["mask"], bodies["mask"].types)
        self.functionalize(list(bodies.values()))
        closed = close_bodies(list(bodies.values()))
        graphs = {"mask": None, **dict(zip(bodies, closed.graphs, strict=True))}
        args = [*closed.symbols, *call.operands, *closed.captures]
        return bind(self, args, {**graphs, **call.params})

    # --- rules ---

    def debug(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: Any,
        *kinds: Any,
        score: Any,
        mask: Any,
        block: tuple[int, int],
        group: int,
        shape: tuple[int, ...],
    ) -> tuple[Any, ...]:
        """Compute the softmax of each query's scores one after the other."""

        def is_kept(at: tuple[int, ...]) -> bool:
            b, h, i, j = at
            kind = PARTIAL
            if kinds:
                [block_kinds] = kinds
                kind = int(block_kinds[b, h, i // block[0], j // block[1]])
            if mask is None or kind != PARTIAL:
                return kind != EMPTY
            return truth(as_value(mask(*map(_position, at))[0]))

        def cell(*at: int) -> Any:
            b, h, i, j = at
            if not is_kept(at):
                return full((), -inf, dtype=scale.dtype)
            x, y = q[b, h, i], k[b, h // group, j]
            dot = astype(x, scale.dtype) @ astype(y, scale.dtype) * scale
            return score(dot, *map(_position, at))[0]

        rows = []
        for b, h, i in product(*map(range, shape[:3])):
            scores = [cell(b, h, i, j) for j in range(k.shape[2])]
            rows.append(_mean(scores, astype(v[b, h // group], scale.dtype)))
        if not rows:
            types = [TensorType(q.dtype, shape), TensorType(scale.dtype, shape[:3])]
            return tuple(empty_stacks(types))
        means, lse = (stack(column) for column in zip(*rows, strict=True))
        return astype(reshape(means, shape), q.dtype), reshape(lse, shape[:3])

    def infer(
        self,
        *types: TensorType,
        score: Graph,
        shape: tuple[Size, ...],
        **_: Any,
    ) -> tuple[TensorType, ...]:
        q, scale = types[len(score.symbols)], types[len(score.symbols) + 3]
        return TensorType(q.dtype, shape), TensorType(scale.dtype, shape[:3])

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        for body in bodies:
            if "callback" in effects(body.tracer.graph):
                raise MutationError(
                    f"{self.name}: {body.function.label} calls Python, but {_REFUSAL}"
                )
        return refuse_writes(bodies, _REFUSAL)

    def lower(self, types: Any, *args: Any, **params: Any) -> Inline:
        graph, sizes = as_graph(attend, args, params)
        return Inline(graph, (*sizes, *args))

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """Map over the batch, since the functions take the indices of one element."""
        return each_example(self, size, batched, args, params)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        values = bind_again(self, operands, params)
        sum_dots = _sum_tangents(values[1], operands, tangents, params, None)
        return values, _result_tangents(values, sum_dots)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        linear = linear_of(tangents)
        values = bind_again(self, operands, params)
        sum_dots = _sum_tangents(values[1], operands, tangents, params, linear)
        return values, lambda _: _result_tangents(values, sum_dots)

    transpose_rule = derived
    export = derived

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        symbols, count = len(parts.symbols), len(parts.operands)
        captures = numbered("invariant", symbols + count, len(parts.captures))
        regions = []
        for name in ("score", "mask"):
            graph = node.params[name]
            if graph is not None:
                cell = (Port("index"),) * len(graph.operands)
                inputs = (*numbered("symbol", 0, symbols), *cell, *captures)
                outputs = (Port("result"),)
                regions.append(Region(name, graph, inputs, outputs, "any times"))
        args = roles(
            ("symbol", symbols), ("operand", count), ("invariant", len(captures))
        )
        return Signature(args, roles(("result", 2)), tuple(regions))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params


FLEX_ATTENTION = FlexAttention()

_REFUSAL: Final = (
    "its calls are made in any order, and again for derivatives. Return what it "
    "computes instead."
)


def _sum_tangents(
    lse: Value,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> Sequence[Tangent]:
    """Return the tangents of `sums` with `lse` held constant."""
    graph, symbols = as_graph(sums, operands, params, lse)
    sizes = list(map(current().value_of, symbols))
    zeros = [Zero(n.type) for n in sizes]
    values, dots = [*sizes, *operands, lse], [*zeros, *tangents, Zero(lse.type)]
    return differentiate(graph, values, dots, linear)[1]


def _result_tangents(
    values: Sequence[Value], sum_dots: Sequence[Tangent]
) -> tuple[Tangent, Tangent]:
    """Return the tangents of the results from those of `sums`: a mean is a sum of
    weighted values over the sum of weights, which is 1."""
    mean, (total, weighted) = values[0], sum_dots
    dot = instantiate(weighted)
    if not is_zero(total):
        total_dot = expand_dims(instantiate(total), axis=3)
        dot = dot - total_dot * astype(mean, total.type.dtype)
    return astype(dot, mean.dtype), total


def _position(n: int) -> Value:
    return full((), n, dtype=dtypes.int64)


def _mean(scores: Sequence[Any], values: Any) -> tuple[Value, Value]:
    """Return the mean of values by the softmax of scores, and the logarithm of its
    divisor."""
    if not scores:
        return zeros(values.shape[1:], dtype=values.dtype), full(
            (), -inf, dtype=values.dtype
        )
    row = stack(scores)
    highest = max_of(row)
    weights = exp(row - where(equal(highest, -inf), 0, highest))
    total = sum_of(weights)
    mean = (weights @ values) / where(equal(total, 0), 1, total)
    return mean, highest + log(total)


# --- arguments ------------------------------------------------------------------------


def _unchanged(score: Any, *_: Any) -> Any:
    return score


def _check_score(function: Function, types: Sequence[TensorType], dtype: DType) -> None:
    """Check the result of a `score_mod`.

    Raises:
        ScoreTypeError: it is not one score.
    """
    expected = TensorType(dtype)
    is_one = len(types) == 1 and types[0].shape == ()
    if is_one and (types[0].dtype is dtype or fits(expected, types[0])):
        return
    raise ScoreTypeError(
        f"flex_attention: {function.label} must return one score, {expected}, and "
        f"returns {', '.join(map(str, types)) or 'nothing'}. It is called for each "
        "score by itself; convert what it returns with `hf.astype`."
    )


def _checked(q: Any, k: Any, v: Any, enable_gqa: bool) -> tuple[Any, ...]:
    """Return the tensors, of the same batch size; the shape of the result; and the
    number of query heads that share one head of keys.

    Raises:
        ArgumentTypeError, DTypeError, ShapeError: they do not fit each other.
    """
    name = FLEX_ATTENTION.name
    operands = {
        key: as_operand(name, key, x) for key, x in zip("qkv", (q, k, v), strict=True)
    }
    shown = ", ".join(f"`{key}` {x.type}" for key, x in operands.items())
    q, k, v = operands.values()
    if any(x.type.ndim != 4 for x in (q, k, v)):
        raise ShapeError(
            f"{name}: `q`, `k` and `v` must have four axes (examples, heads, positions "
            f"and features), and are {shown}. Add axes with `hf.expand_dims`."
        )
    dtype = q.type.dtype
    if not dtype.is_float or any(x.type.dtype is not dtype for x in (k, v)):
        raise DTypeError(
            f"{name}: `q`, `k` and `v` must be floats of one dtype, and are {shown}. "
            "Convert them with `hf.astype`."
        )

    def check_equal(a: Size, b: Size, requirement: str) -> None:
        if not equals(a, b):
            raise ShapeError(f"{name}: {requirement}, and the operands are {shown}.")

    check_equal(q.shape[3], k.shape[3], "`q` and `k` must have as many features")
    check_equal(k.shape[2], v.shape[2], "`k` and `v` must have as many positions")
    check_equal(k.shape[1], v.shape[1], "`k` and `v` must have as many heads")
    check_equal(k.shape[0], v.shape[0], "`k` and `v` must have as many examples")
    batch, heads, length, _ = q.shape
    kv_heads = k.shape[1]
    if not equals(batch, k.shape[0]):
        check_equal(
            k.shape[0], 1, "`k` and `v` must have as many examples as `q`, or one"
        )
        k, v = (broadcast_to(x, (batch, *x.shape[1:])) for x in (k, v))
    group = 1
    if not equals(heads, kv_heads):
        heads, kv_heads = specialised(heads), specialised(kv_heads)
        if not enable_gqa or not kv_heads or heads % kv_heads:
            raise ShapeError(
                f"{name}: `q` must have as many heads as `k` and `v`, or a multiple of "
                f"them with `enable_gqa=True`, and the operands are {shown}."
            )
        group = heads // kv_heads
    return (q, k, v), (batch, heads, length, v.shape[3]), group


def _scale(scale: Any, width: Size, dtype: DType) -> Value:
    """Return the factor of the products, by default `width ** -0.5`."""
    if scale is None:
        if isinstance(width, int):
            return full((), max(width, 1) ** -0.5, dtype=dtype)
        default: Value = divide(1, sqrt(astype(current().value_of(width), dtype)))
        return default
    factor = as_operand(FLEX_ATTENTION.name, "scale", scale)
    if factor.type.shape != () or factor.type.dtype is dtypes.bool_:
        raise ArgumentTypeError(
            f"{FLEX_ATTENTION.name}: `scale` must be a number, and is {factor.type}."
        )
    return astype(as_value(factor), dtype)


def flex_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute `softmax(score_mod(q @ k.T * scale)) @ v` of the scores that are kept.

    The matrix of all scores is never allocated, nor is it by derivatives: memory is
    linear in the lengths. Queries for which no score is kept get zeros.

    Shapes:
        q [b, h, l, e], k [b, h, s, e], v [b, h, s, w] -> [b, h, l, w]

    Args:
        q, k, v: Floats of one dtype. `k` and `v` may have batch size 1.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, all scalars. Scores are f32,
            or f64 if the operands are. It may read tensors of enclosing functions,
            which are differentiated too.
        mask_mod: (b, h, q_idx, kv_idx) -> bool[]: whether a score is kept.
        block_mask: A mask from `create_block_mask`, in place of `mask_mod`; blocks in
            which it keeps nothing are skipped.
        scale: The factor of the products; `e ** -0.5` by default.
        enable_gqa: Whether `k` and `v` may have fewer heads, each shared by several of
            `q`.
        return_lse: Whether to return also the logarithm of each query's sum of
            exponentials [b, h, l]; `-inf` where nothing is kept.

    Raises:
        ShapeError, DTypeError: the operands do not fit each other, or the block mask.
        ArgumentValueError: both `mask_mod` and `block_mask` are passed.
        ScoreTypeError: `score_mod` does not return one score.
        PredicateError: `mask_mod` does not return one bool.
        MutationError: one of them writes to a captured tensor, or calls Python.

    >>> q, k, v = hf.ones((1, 1, 3, 4)), hf.ones((1, 1, 3, 4)), hf.ones((1, 1, 3, 2))
    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> hf.flex_attention(q, k, v, mask_mod=causal).shape
    (1, 1, 3, 2)
    """
    with_lse = as_flag(FLEX_ATTENTION.name, "return_lse", return_lse)
    results = FLEX_ATTENTION(
        q, k, v, score_mod, mask_mod, block_mask, scale, enable_gqa
    )
    return tuple(results) if with_lse else results[0]
