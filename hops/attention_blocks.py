"""Attention by blocks of queries and keys: the matrix of all scores is never made.

`attend` is the online softmax of Milakov and Gimelshein ("Online normalizer calculation
for softmax", 2018), by blocks as in FlashAttention (Dao et al., 2022). Its derivatives
are those of `sums`, which makes each block again from the logarithm of the sum of
exponentials that `attend` has found.
"""

import math
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.batching.api import vmap
from hopflow.batching.graphs import bind_again
from hopflow.bind import Operand, Value, using
from hopflow.dtypes import DType
from hopflow.graph.core import Graph, size_of
from hopflow.graph.interpreter import interpret
from hopflow.graph.types import TensorType
from hopflow.hops.checkpoint import checkpoint
from hopflow.hops.cond import cond
from hopflow.hops.loops import empty_stacks
from hopflow.hops.map import map_
from hopflow.hops.scanning import scan
from hopflow.hops.switch import switch
from hopflow.ops.convert import as_value, astype
from hopflow.ops.creation import arange, full
from hopflow.ops.elementwise import equal, logical_and, maximum, minimum, where
from hopflow.ops.manipulation import broadcast_to, expand_dims, reshape
from hopflow.ops.math import exp, log
from hopflow.ops.matmul import matrix_transpose
from hopflow.ops.reduce import any as any_of
from hopflow.ops.reduce import max as max_of
from hopflow.ops.reduce import sum as sum_of
from hopflow.ops.sizes import equals
from hopflow.ops.views import sliced, update_slice
from hopflow.symbolic.size import Size, SymInt, free_symbols, substitute, symbol
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer

EMPTY, PARTIAL, FULL = range(3)
"""The kinds of blocks: no cell is kept, some are, all are."""


def blocks_in(size: Size, block: int) -> Size:
    """How many blocks there are; the last one may be smaller."""
    return (size + block - 1) // block


def over(f: Callable[..., Any], b: Any, h: Any, q: Any, kv: Any, *cells: Any) -> Value:
    """`f(*cell, b, h, q, kv)` for each of the positions `q` and `kv`."""

    def cell(q: Any, kv: Any, *own: Any) -> Any:
        return f(*own, b, h, q, kv)

    both = [0] * len(cells)
    rows = vmap(vmap(cell, (None, 0, *both)), (0, None, *both))
    found: Value = rows(q, kv, *cells)
    return found


class _Block(NamedTuple):
    """Where a block of scores is.

    b, h    the example and the head
    q, kv   positions i64[n] of queries and keys, also past the ends
    """

    b: Any
    h: Any
    q: Value
    kv: Value


class _Attention(NamedTuple):
    """The args and params of a node.

    group   how many heads of queries share one of keys
    kinds   for each block what of it is kept; None: the mask alone tells
    """

    score: Graph
    mask: Graph | None
    block: tuple[int, int]
    group: int
    symbols: Sequence[Any]
    q: Any
    k: Any
    v: Any
    scale: Any
    kinds: Any
    captures: Sequence[Any]

    @property
    def dtype(self) -> DType:
        return score_dtype(self.q.type.dtype)

    @property
    def lengths(self) -> tuple[Size, Size]:
        return self.q.shape[2], self.k.shape[2]

    @property
    def ends(self) -> list[Size | None]:
        """The lengths, of queries and of keys, that the last block may go beyond."""
        pairs = zip(self.lengths, self.block, strict=True)
        return [None if equals(blocks_in(n, s) * s, n) else n for n, s in pairs]

    def over(self, graph: Graph, at: _Block, *cells: Any) -> Value:
        """A function of the user's for each cell of a block. Past the ends it is asked
        about the last position."""

        def f(*inputs: Any) -> Value:
            args = [*self.symbols, *inputs, *self.captures]
            [found] = interpret(graph, args, bind_again)
            return as_value(found)

        positions = zip((at.q, at.kv), self.ends, strict=True)
        q, kv = (x if end is None else minimum(x, end - 1) for x, end in positions)
        return over(f, at.b, at.h, q, kv, *cells)

    def inside(self, at: _Block) -> Value | None:
        """Which cells of a block are not past an end; None: all of them."""
        q, kv = self.ends
        if q is None:
            return None if kv is None else broadcast_to(at.kv < kv, self.block)
        rows = expand_dims(at.q < q, axis=1)
        if kv is None:
            return broadcast_to(rows, self.block)
        return logical_and(rows, at.kv < kv)

    def kept(self, at: _Block) -> Value:
        """Which cells of a block the mask keeps."""
        assert self.mask is not None
        kept, inside = self.over(self.mask, at), self.inside(at)
        return kept if inside is None else logical_and(kept, inside)

    def choose(
        self,
        kind: Any,
        at: _Block,
        run: Callable[[Value | None], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """`run` on the cells of a block that are kept (None: all), or `skip` it."""
        if self.mask is None:
            return run(self.inside(at))
        if kind is None:
            kept = self.kept(at)
            return cond(any_of(kept), lambda: run(kept), skip)
        whole, part = (lambda: run(self.inside(at))), (lambda: run(self.kept(at)))
        return switch(kind, (skip, part, whole))

    def scores(self, q: Value, k: Value, at: _Block, kept: Value | None) -> Value:
        """The scores of a block, of scaled queries."""
        products = q @ matrix_transpose(astype(k, self.dtype))
        scores = self.over(self.score, at, products)
        return scores if kept is None else where(kept, scores, -inf)


def score_dtype(dtype: DType) -> DType:
    """What scores and sums are computed in."""
    return dtype if dtype is dtypes.float64 else dtypes.float32


def _each_row(
    a: _Attention, f: Callable[..., Sequence[Value]], rows: Sequence[Value]
) -> list[Value]:
    """`f` for each block of queries, as `[b, h, l, ...]`.

    Args:
        f: Gets a function from the number of a block of keys to where the scores are,
            the blocks of `rows`, and the stacks to scan: numbers, keys, values, kinds.
        rows: `[b, h, l, ...]` each.
    """
    (size_q, size_kv), (length, keys) = a.block, a.lengths
    batch, heads = a.k.shape[:2]
    n_q, n_kv = blocks_in(length, size_q), blocks_in(keys, size_kv)

    def stacked(x: Any, count: Size, size: int, group: int) -> Value:
        x = _padded(x, count * size)
        return reshape(x, (batch * heads, group * count, size, *x.shape[3:]))

    def head(x: Any) -> Any:
        n, rows, k, v, kinds = x

        def row(y: Any) -> Any:
            i, rows, kinds = y
            h = n % heads * a.group + i // n_q
            q = i % n_q * size_q + arange(size_q)

            def at(j: Any) -> _Block:
                return _Block(n // heads, h, q, j * size_kv + arange(size_kv))

            return f(at, rows, (arange(n_kv), k, v, kinds))

        return map_(row, (arange(a.group * n_q), rows, kinds))

    kinds = a.kinds
    if kinds is not None:
        kinds = reshape(kinds, (batch * heads, a.group * n_q, n_kv))
    own = [stacked(x, n_q, size_q, a.group) for x in rows]
    k, v = (stacked(x, n_kv, size_kv, 1) for x in (a.k, a.v))
    found = map_(head, (arange(batch * heads), own, k, v, kinds))
    full_shape = (batch, heads * a.group, n_q * size_q)
    return [_cut(reshape(y, (*full_shape, *y.shape[3:])), length) for y in found]


def _padded(x: Value, length: Size) -> Value:
    """`[b, h, l, ...]` with zeros behind it."""
    shape = (*x.shape[:2], length, *x.shape[3:])
    if equals(x.shape[2], length):
        return x
    [zeros] = empty_stacks([x.type.with_shape(shape)])
    starts, steps = (0,) * len(shape), (1,) * len(shape)
    return as_value(update_slice(zeros, x, starts=starts, steps=steps))


def _cut(x: Value, length: Size) -> Value:
    """What was padded."""
    shape = (*x.shape[:2], length, *x.shape[3:])
    if equals(x.shape[2], length):
        return x
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))


def attend(a: _Attention) -> list[Value]:
    """The results, and of each query the logarithm of the sum of exponentials."""

    def row(at: Any, rows: Any, stacks: Any) -> Any:
        q = astype(rows[0], a.dtype) * a.scale

        def step(carry: Any, x: Any) -> Any:
            j, k, v, kind = x
            block = at(j)

            def run(kept: Value | None) -> Any:
                highest, total, mean = carry
                scores = a.scores(q, k, block, kept)
                new = maximum(highest, max_of(scores, axis=1))
                base = _finite(new)
                weights = _weights(scores, base)
                rest = exp(highest - base)
                total = total * rest + sum_of(weights, axis=1)
                mean = mean * expand_dims(rest, axis=1) + weights @ astype(v, a.dtype)
                return new, total, mean

            return a.choose(kind, block, run, lambda: carry), None

        start = (full((a.block[0],), -inf, dtype=a.dtype), *_zeros(a))
        (highest, total, mean), _ = scan(step, start, stacks)
        divisor = where(equal(total, 0), 1, total)  # nothing is kept
        mean = mean / expand_dims(divisor, axis=1)
        return [astype(mean, a.q.type.dtype), highest + log(total)]

    return _each_row(a, row, [a.q])


def sums(a: _Attention, lse: Any) -> list[Value]:
    """The sum of the weights of each query, which is 1 or 0; and that of the weighted
    values.

    In terms of these are the derivatives of `attend`: of the first, where `lse` is
    fixed, it is that of `lse`.
    """

    def row(at: Any, rows: Any, stacks: Any) -> Any:
        q, base = astype(rows[0], a.dtype) * a.scale, _finite(rows[1])

        @checkpoint
        def part(j: Any, k: Any, v: Any, kind: Any) -> Any:
            block = at(j)

            def run(kept: Value | None) -> Any:
                scores = a.scores(q, k, block, kept)
                weights = _weights(scores, base)
                return sum_of(weights, axis=1), weights @ astype(v, a.dtype)

            return a.choose(kind, block, run, lambda: _zeros(a))

        def step(carry: Any, x: Any) -> Any:
            total, values = part(*x)
            return (carry[0] + total, carry[1] + values), None

        return list(scan(step, _zeros(a), stacks)[0])

    return _each_row(a, row, [a.q, lse])


def _zeros(a: _Attention) -> tuple[Value, ...]:
    """Sums of no weights, and of no values, for a block of queries."""
    size = a.block[0]
    shapes = [(size,), (size, a.v.shape[3])]
    return tuple(empty_stacks([TensorType(a.dtype, s) for s in shapes]))


def _weights(scores: Value, base: Value) -> Value:
    """`exp(scores - base)`, and 0 where that is nothing beside the largest weight, 1:
    products with numbers below the normal ones are slow."""
    exponents = scores - expand_dims(base, axis=1)
    limits = dtypes.finfo(scores.dtype)
    least = math.log(limits.smallest_normal / limits.eps)
    return where(exponents < least, 0, exp(exponents))


def _finite(lse: Value) -> Value:
    """What may be subtracted from `-inf`."""
    return where(equal(lse, -inf), 0, lse)


# --- as graphs ------------------------------------------------------------------------


def meaning(
    f: Callable[..., Sequence[Value]],
    args: Sequence[Operand],
    params: dict[str, Any],
    *more: Operand,
) -> tuple[Graph, list[SymInt]]:
    """`f` of the args of a node and of more values, as a graph.

    Returns:
        The graph, and the sizes that it takes first.
    """
    score: Graph = params["score"]
    tracer = Tracer(None, score.name, env=user_env())
    first, last = len(score.symbols), len(args) - len(score.captures)
    types = _named([a.type.strong() for a in (*args[first:last], *more)], params)
    # The caller's symbols are not those of the functions, of which it has no own.
    outer = free_symbols(*(n for t in types for n in t.shape))
    sizes = {s: symbol(s.name) for s in outer}
    tracer.bind_symbols(list(sizes.values()))

    def operand(type_: TensorType) -> TracedTensor:
        shape = [substitute(n, sizes) for n in type_.shape]
        return tracer.operand(type_.with_shape(shape), "x")

    own = [v.node.symbol for v in score.symbols if v.node.symbol is not None]
    symbols = [TracedTensor(tracer, tracer.define(s)) for s in own]
    q, k, v, scale, *kinds = map(operand, types[: last - first])
    captures = [tracer.operand(v.type.strong(), v.node.name) for v in score.captures]
    rest = list(map(operand, types[last - first :]))
    attention = _Attention(
        score=score,
        mask=params["mask"],
        block=params["block"],
        group=params["group"],
        symbols=symbols,
        q=q,
        k=k,
        v=v,
        scale=scale,
        kinds=kinds[0] if kinds else None,
        captures=captures,
    )
    with using(tracer):
        return tracer.close(f(attention, *rest)), list(map(size_of, outer))


def _named(types: Sequence[TensorType], params: dict[str, Any]) -> list[TensorType]:
    """The types of the operands, where equal sizes have one name."""
    q, k, v, *rest = types
    batch, heads, length, width = params["shape"]
    own = heads if params["group"] == 1 else heads // params["group"]
    keys, features = k.shape[2], q.shape[3]
    return [
        q.with_shape((batch, heads, length, features)),
        k.with_shape((batch, own, keys, features)),
        v.with_shape((batch, own, keys, width)),
        *rest,
    ]
