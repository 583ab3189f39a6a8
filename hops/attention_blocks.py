"""Attention by blocks of queries and keys: the matrix of all scores is never allocated.

`attend` is the online softmax of Milakov and Gimelshein ("Online normalizer calculation
for softmax", 2018), by blocks as in FlashAttention (Dao et al., 2022). Its derivatives
are those of `sums`, which recomputes each block from the logarithm of the sum of
exponentials that `attend` returns.
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
"""The kinds of blocks: the mask keeps no cell, some cells, all cells."""


def blocks_in(size: Size, block: int) -> Size:
    """Return the number of blocks; the last one may be smaller."""
    return (size + block - 1) // block


def map_cells(
    f: Callable[..., Any], b: Any, h: Any, q: Any, kv: Any, *cells: Any
) -> Value:
    """Return `f(*cell, b, h, q, kv)` for each pair of positions in `q` and `kv`."""

    def cell(q: Any, kv: Any, *inputs: Any) -> Any:
        return f(*inputs, b, h, q, kv)

    axes = [0] * len(cells)
    rows = vmap(vmap(cell, (None, 0, *axes)), (0, None, *axes))
    values: Value = rows(q, kv, *cells)
    return values


class _Block(NamedTuple):
    """The position of a block of scores.

    b, h    the indices of the batch element and the head
    q, kv   positions i64[n] of queries and keys, also past the ends
    """

    b: Any
    h: Any
    q: Value
    kv: Value


class _Attention(NamedTuple):
    """The args and params of a node.

    group   the number of query heads that share one head of keys
    kinds   the kind of each block; None: only the mask tells
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
        """Return the numbers of queries and of keys, or None if a number is a multiple
        of the block."""
        pairs = zip(self.lengths, self.block, strict=True)
        return [None if equals(blocks_in(n, s) * s, n) else n for n, s in pairs]

    def map_cells(self, graph: Graph, at: _Block, *cells: Any) -> Value:
        """Apply a user's function to each cell of a block. Positions past the ends are
        replaced by the last one."""

        def f(*inputs: Any) -> Value:
            args = [*self.symbols, *inputs, *self.captures]
            [result] = interpret(graph, args, bind_again)
            return as_value(result)

        positions = zip((at.q, at.kv), self.ends, strict=True)
        q, kv = (x if end is None else minimum(x, end - 1) for x, end in positions)
        return map_cells(f, at.b, at.h, q, kv, *cells)

    def inside(self, at: _Block) -> Value | None:
        """Return a mask of the cells of a block that are not past an end; None: all of
        them."""
        q, kv = self.ends
        if q is None:
            return None if kv is None else broadcast_to(at.kv < kv, self.block)
        rows = expand_dims(at.q < q, axis=1)
        if kv is None:
            return broadcast_to(rows, self.block)
        return logical_and(rows, at.kv < kv)

    def kept(self, at: _Block) -> Value:
        """Return the cells of a block that the mask keeps."""
        assert self.mask is not None
        kept, inside = self.map_cells(self.mask, at), self.inside(at)
        return kept if inside is None else logical_and(kept, inside)

    def choose(
        self,
        kind: Any,
        at: _Block,
        run: Callable[[Value | None], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Call `run` on the cells of a block that are kept (None: all), or `skip` if
        none is."""
        if self.mask is None:
            return run(self.inside(at))
        if kind is None:
            kept = self.kept(at)
            return cond(any_of(kept), lambda: run(kept), skip)
        run_full, run_partial = (
            (lambda: run(self.inside(at))),
            (lambda: run(self.kept(at))),
        )
        return switch(kind, (skip, run_partial, run_full))

    def scores(self, q: Value, k: Value, at: _Block, kept: Value | None) -> Value:
        """Return the scores of a block, computed from scaled queries."""
        products = q @ matrix_transpose(astype(k, self.dtype))
        scores = self.map_cells(self.score, at, products)
        return scores if kept is None else where(kept, scores, -inf)


def score_dtype(dtype: DType) -> DType:
    """Return the dtype in which scores and sums are computed."""
    return dtype if dtype is dtypes.float64 else dtypes.float32


def _each_row(
    a: _Attention, f: Callable[..., Sequence[Value]], rows: Sequence[Value]
) -> list[Value]:
    """Return `f` of each block of queries, as `[b, h, l, ...]`.

    Args:
        f: Takes a function from the index of a block of keys to the position of its
            scores, the blocks of `rows`, and the stacks to scan: indices, keys, values,
            kinds.
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
    blocks = [stacked(x, n_q, size_q, a.group) for x in rows]
    k, v = (stacked(x, n_kv, size_kv, 1) for x in (a.k, a.v))
    results = map_(head, (arange(batch * heads), blocks, k, v, kinds))
    full_shape = (batch, heads * a.group, n_q * size_q)
    return [_cut(reshape(y, (*full_shape, *y.shape[3:])), length) for y in results]


def _padded(x: Value, length: Size) -> Value:
    """Return `[b, h, l, ...]`, padded with zeros along `l`."""
    shape = (*x.shape[:2], length, *x.shape[3:])
    if equals(x.shape[2], length):
        return x
    [zeros] = empty_stacks([x.type.with_shape(shape)])
    starts, steps = (0,) * len(shape), (1,) * len(shape)
    return as_value(update_slice(zeros, x, starts=starts, steps=steps))


def _cut(x: Value, length: Size) -> Value:
    """Return `[b, h, l, ...]` without the padding."""
    shape = (*x.shape[:2], length, *x.shape[3:])
    if equals(x.shape[2], length):
        return x
    return as_value(sliced(x, (0,) * len(shape), shape, (1,) * len(shape)))


def attend(a: _Attention) -> list[Value]:
    """Return the results, and the logarithm of each query's sum of exponentials."""

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
                decay = exp(highest - base)
                total = total * decay + sum_of(weights, axis=1)
                mean = mean * expand_dims(decay, axis=1) + weights @ astype(v, a.dtype)
                return new, total, mean

            return a.choose(kind, block, run, lambda: carry), None

        start = (full((a.block[0],), -inf, dtype=a.dtype), *_zeros(a))
        (highest, total, mean), _ = scan(step, start, stacks)
        divisor = where(equal(total, 0), 1, total)  # where nothing is kept
        mean = mean / expand_dims(divisor, axis=1)
        return [astype(mean, a.q.type.dtype), highest + log(total)]

    return _each_row(a, row, [a.q])


def sums(a: _Attention, lse: Any) -> list[Value]:
    """Return the sum of the weights of each query, which is 1 or 0, and the sum of
    weighted values.

    The derivatives of `attend` are expressed in these: with `lse` held constant, the
    tangent of the first sum is that of `lse`.
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
    """Return sums over no weights, and over no values, for a block of queries."""
    size = a.block[0]
    shapes = [(size,), (size, a.v.shape[3])]
    return tuple(empty_stacks([TensorType(a.dtype, s) for s in shapes]))


def _weights(scores: Value, base: Value) -> Value:
    """Return `exp(scores - base)`, with 0 for weights that are negligible beside the
    largest one, 1: products with subnormal numbers are slow."""
    exponents = scores - expand_dims(base, axis=1)
    limits = dtypes.finfo(scores.dtype)
    least = math.log(limits.smallest_normal / limits.eps)
    return where(exponents < least, 0, exp(exponents))


def _finite(lse: Value) -> Value:
    """Return `lse` with 0 for `-inf`, so that it can be subtracted from `-inf`."""
    return where(equal(lse, -inf), 0, lse)


# --- as graphs ------------------------------------------------------------------------


def as_graph(
    f: Callable[..., Sequence[Value]],
    args: Sequence[Operand],
    params: dict[str, Any],
    *more: Operand,
) -> tuple[Graph, list[SymInt]]:
    """Return a graph of `f`, applied to the args of a node and to more values.

    Returns:
        The graph, and the sizes that are its first inputs.
    """
    score: Graph = params["score"]
    tracer = Tracer(None, score.name, env=user_env())
    first, last = len(score.symbols), len(args) - len(score.captures)
    types = _named([a.type.strong() for a in (*args[first:last], *more)], params)
    # The caller's symbols differ from those of the functions' graphs.
    outer = free_symbols(*(n for t in types for n in t.shape))
    sizes = {s: symbol(s.name) for s in outer}
    tracer.bind_symbols(list(sizes.values()))

    def operand(type_: TensorType) -> TracedTensor:
        shape = [substitute(n, sizes) for n in type_.shape]
        return tracer.operand(type_.with_shape(shape), "x")

    symbols = list(map(tracer.input_like, score.symbols))
    q, k, v, scale, *kinds = map(operand, types[: last - first])
    captures = [tracer.operand(v.type.strong(), v.node.name) for v in score.captures]
    extra = list(map(operand, types[last - first :]))
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
        return tracer.close(f(attention, *extra)), list(map(size_of, outer))


def _named(types: Sequence[TensorType], params: dict[str, Any]) -> list[TensorType]:
    """Return the types of the operands, with one symbol for sizes that are equal."""
    q, k, v, *others = types
    batch, heads, length, width = params["shape"]
    kv_heads = heads if params["group"] == 1 else heads // params["group"]
    keys, features = k.shape[2], q.shape[3]
    return [
        q.with_shape((batch, heads, length, features)),
        k.with_shape((batch, kv_heads, keys, features)),
        v.with_shape((batch, kv_heads, keys, width)),
        *others,
    ]
