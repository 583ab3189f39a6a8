"""Calls of every operation and operator, which each target of exports must agree on."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import hopflow as hf
from hopflow import dtypes
from hopflow.dtypes import DType, as_dtype
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.testing.kernels import sample_arrays

Array = np.ndarray[Any, Any]


# --- operations -----------------------------------------------------------------------


class Case(NamedTuple):
    """Operands and params of an operation."""

    operands: list[Array]
    params: dict[str, Any]


def cases(op: OpDef, samples: Sequence[Sample], draws: int) -> list[Case]:
    """Samples of an operation, in all of their dtypes, each drawn a few times; of
    elementwise ones special values, too."""
    found = []
    for sample in samples:
        named = any(text.startswith("T") for text in sample.operands)
        for dtype in sample.dtypes if named else sample.dtypes[:1]:
            for draw in range(draws if sample.operands else 1):
                found.append(case(op, sample, dtype, draw))
    if op.batch is batching.pointwise:
        sample = op.samples[0]
        found += [
            Case(special_operands(op, sample.operands, dtype), sample.params)
            for dtype in sample.dtypes
        ]
    return found


def case(op: OpDef, sample: Sample, dtype: DType, draw: int = 0) -> Case:
    """Drawn operands of a sample."""
    operands = sample_arrays(sample, dtype, draw)
    if op.name in ("check", "require"):  # of a condition that holds
        operands[-1] = np.ones_like(operands[-1])
    if op.name == "solution":  # whose operands belong together
        a, b = operands[:2]
        lu, pivots = OPERATIONS["lu"].run(a)
        order = OPERATIONS["lu_permutation"].run(pivots, size=a.shape[-1])
        x = np.linalg.solve(a.mT if sample.params["transposed"] else a, b)
        operands = [a, b, x, lu, order]
    return Case(operands, sample.params)


def usual(op: OpDef, sample: Sample) -> Case:
    """A sample in the most usual dtype of the operation."""
    preferred = (dtypes.float32, dtypes.int64, dtypes.uint64, sample.dtypes[0])
    return case(op, sample, next(d for d in preferred if d in sample.dtypes))


def special_values(dtype: DType) -> Array:
    """Zeros, ends, infinities, NaN; and ordinary values of all sizes."""
    rng = np.random.default_rng(1)
    if dtype.kind == "b":
        return np.array([True, False])
    if dtype.is_integer:
        info = dtypes.iinfo(dtype)
        ends = [info.min, info.max, info.max - 1, info.max // 2]
        small = [0, 1, 2, 3, 7, *([-1, -2, -3, -7] if dtype.kind == "i" else [])]
        drawn = rng.integers(info.min, info.max, 6, dtype=dtype.dtype)
        return np.unique(np.array([*ends, *small, *drawn], dtype=dtype.dtype))
    tiny = float(dtypes.finfo(dtype).smallest_normal)
    floats = [0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny]
    floats += [1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3, 1e-3, 10, -10, 30, -30, 88, -88]
    drawn = [rng.normal(size=6), np.exp(rng.uniform(-8, 8, 8)), rng.uniform(-9, 0, 6)]
    with np.errstate(all="ignore"):
        return np.concatenate([floats, *drawn]).astype(dtype.dtype)


def special_operands(op: OpDef, texts: Sequence[str], dtype: DType) -> list[Array]:
    """Special values of each operand beside those of each other."""
    found = []
    for place, text in enumerate(reversed(texts)):
        chosen = dtype if text.startswith("T") else as_dtype(text.split("[")[0])
        values = special_values(chosen)
        if op.name in ("checked_floor_divide", "checked_remainder") and place == 0:
            values = values[values != 0]
        if op.name == "checked_pow" and place == 0:
            values = values[values >= 0]
        if op.name == "fma" and dtype.is_float:  # products must not overflow
            values = values[np.isfinite(values)]
        found.append(values.reshape(-1, *[1] * place))
    return found[::-1]


def function_of(op: OpDef, rows: Sequence[Case]) -> Callable[..., Any]:
    """The results of an operation for all cases, of their operands one by one."""

    def run(*flat: Any) -> Any:
        operands = iter(flat)
        found = []
        for row in rows:
            result = op(*[next(operands) for _ in row.operands], **row.params)
            results = result if isinstance(result, tuple) else (result,)
            found += [r for r in results if r is not None]
        return [hf.copy(hf.asarray(r)) for r in found]

    return run


def exported(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return hf.export(f, args, **options)


# --- operators ------------------------------------------------------------------------


def f64(*values: Any) -> Any:
    return hf.asarray(np.array(values, dtype=np.float64))


A: Final = f64(0.5, 1.5)
W: Final = f64(0.3, -0.7)
ROWS: Final = f64([0.2, 0.4], [0.6, 0.8], [1.0, 1.2])
QKV: Final = f64(*np.sin(np.arange(72.0)).reshape(3, 2, 2, 3, 2))


@hf.custom_vjp
def scaled(x: Any, y: Any) -> Any:
    return hf.sin(x) * y


scaled.defvjp(
    lambda x, y: (hf.sin(x) * y, (x, y)),
    lambda kept, ct: (ct * hf.cos(kept[0]) * kept[1], ct * hf.sin(kept[0])),
)


@hf.custom_jvp
def squashed(x: Any) -> Any:
    return hf.tanh(x) * x


@squashed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x], [dx] = primals, tangents
    return squashed(x), dx * x


class FixedPoint(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        def is_far(x: Any) -> Any:
            return hf.max(hf.abs(f(x) - x)) > 1e-14

        return hf.while_loop(is_far, lambda x: (f(x),), (x,))[0]


FIXED_POINT: Final = FixedPoint()


@hf.subgraph
def shared(x: Any) -> Any:
    return hf.sin(x) * x + 1


def grown(x: Any) -> Any:
    """A loop whose number of steps depends on data."""
    return hf.while_loop(
        lambda x, n: hf.sum(x * x) < 50, lambda x, n: (x * 1.5 + W, n + 1), (x, 0)
    )


def last_and_sums(x: Any, rows: Any) -> Any:
    return hf.scan(lambda c, r: (c * r + x, hf.sum(c)), x, rows)


class Call(NamedTuple):
    """A call of an operator."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


CALLS: Final = {
    "cond": Call(lambda x: hf.cond(hf.sum(x) > 1, lambda: x * 2, lambda: x - 1), (A,)),
    "switch": Call(
        lambda k, x: hf.switch(
            k, [lambda: x, lambda: x * 2, lambda: -x, lambda: x + 3]
        ),
        (2, A),
    ),
    "while_loop": Call(grown, (A,)),
    "while_loop, max_steps": Call(
        lambda x: hf.while_loop(
            lambda x: hf.sum(x) < 9, lambda x: (x + W * W,), (x,), max_steps=99
        ),
        (A,),
    ),
    "fori_loop": Call(
        lambda x, n: hf.fori_loop(0, n, lambda i, x: x * W + i, x), (A, 3)
    ),
    "scan": Call(
        lambda x, rows: hf.scan(lambda c, r: (c * r, hf.sum(c)), x, rows), (A, ROWS)
    ),
    "scan, which captures": Call(last_and_sums, (A, ROWS)),
    "scan, reverse": Call(
        lambda x, rows: hf.scan(lambda c, r: (c * r, hf.sum(c)), x, rows, reverse=True),
        (A, ROWS),
    ),
    "map": Call(lambda rows: hf.map(lambda r: hf.sort(r * W), rows), (ROWS,)),
    "associative_scan": Call(
        lambda rows: hf.associative_scan(lambda a, b: a * b + a + b, rows), (ROWS,)
    ),
    "invoke_subgraph": Call(lambda x: shared(shared(x)) * 2, (A,)),
    "checkpoint": Call(lambda x: hf.checkpoint(hf.sin)(x), (A,)),
    "custom_vjp": Call(lambda x: scaled(x, W), (A,)),
    "custom_jvp": Call(squashed, (A,)),
    "flex_attention": Call(lambda q, k, v: hf.flex_attention(q, k, v), tuple(QKV)),
    "a user's own": Call(lambda x: FIXED_POINT(lambda x: hf.cos(x) * 0.5, x), (A,)),
    "derivatives of loops": Call(
        hf.grad(lambda x, rows: hf.sum(last_and_sums(x, rows)[1])), (A, ROWS)
    ),
    "derivatives of while_loop": Call(hf.grad(lambda x: hf.sum(grown(x)[0])), (ROWS,)),
}
