"""The array API standard, 2024.12: every name, every signature, and what they compute.

The signatures are the standard's, written down by hand; the answers are those of
`array_api_strict`, wherever the standard fixes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import hopflow as hf
from hopflow.dtypes import DType
from hopflow.errors import ArgumentValueError, DTypeError
from hopflow.ops.opdef import OpDef
from hopflow.tensor import Tensor
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

xp = load("array_api_strict")

# --- names and signatures -------------------------------------------------------------

CONSTANTS = "e inf nan newaxis pi".split()
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split()
)
UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_invert ceil cos cosh exp expm1 floor "
    "isfinite isinf isnan log log1p log2 log10 logical_not negative positive "
    "reciprocal round sign signbit sin sinh square sqrt tan tanh trunc"
).split()
BINARY = (
    "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift "
    "bitwise_xor copysign divide equal floor_divide greater greater_equal hypot "
    "less less_equal logaddexp logical_and logical_or logical_xor maximum minimum "
    "multiply nextafter not_equal pow remainder subtract"
).split()
# Complex numbers are out, so these have nothing to tell apart.
OMITTED = {"complex64", "complex128"}

SIGNATURES = {
    # creation
    "arange": "start, /, stop=None, step=1, *, dtype=None, device=None",
    "asarray": "obj, /, *, dtype=None, device=None, copy=None",
    "empty": "shape, *, dtype=None, device=None",
    "empty_like": "x, /, *, dtype=None, device=None",
    "eye": "n_rows, n_cols=None, /, *, k=0, dtype=None, device=None",
    "from_dlpack": "x, /, *, device=None, copy=None",
    "full": "shape, fill_value, *, dtype=None, device=None",
    "full_like": "x, /, fill_value, *, dtype=None, device=None",
    "linspace": "start, stop, /, num, *, dtype=None, device=None, endpoint=True",
    "meshgrid": "*arrays, indexing='xy'",
    "ones": "shape, *, dtype=None, device=None",
    "ones_like": "x, /, *, dtype=None, device=None",
    "tril": "x, /, *, k=0",
    "triu": "x, /, *, k=0",
    "zeros": "shape, *, dtype=None, device=None",
    "zeros_like": "x, /, *, dtype=None, device=None",
    # data types
    "astype": "x, dtype, /, *, copy=True, device=None",
    "broadcast_arrays": "*arrays",
    "broadcast_to": "x, /, shape",
    "can_cast": "from_, to, /",
    "finfo": "type, /",
    "iinfo": "type, /",
    "isdtype": "dtype, kind",
    "result_type": "*arrays_and_dtypes",
    # elementwise that are not of one or two tensors alone
    "clip": "x, /, min=None, max=None",
    # indexing, linear algebra
    "take": "x, indices, /, *, axis",
    "take_along_axis": "x, indices, /, *, axis=-1",
    "matmul": "x1, x2, /",
    "matrix_transpose": "x, /",
    "tensordot": "x1, x2, /, *, axes=2",
    "vecdot": "x1, x2, /, *, axis=-1",
    # manipulation
    "concat": "arrays, /, *, axis=0",
    "expand_dims": "x, /, *, axis=0",
    "flip": "x, /, *, axis=None",
    "moveaxis": "x, source, destination, /",
    "permute_dims": "x, /, axes",
    "repeat": "x, repeats, /, *, axis=None",
    "reshape": "x, /, shape, *, copy=None",
    "roll": "x, /, shift, *, axis=None",
    "squeeze": "x, /, axis",
    "stack": "arrays, /, *, axis=0",
    "tile": "x, repetitions, /",
    "unstack": "x, /, *, axis=0",
    # searching, sets, sorting
    "argmax": "x, /, *, axis=None, keepdims=False",
    "argmin": "x, /, *, axis=None, keepdims=False",
    "count_nonzero": "x, /, *, axis=None, keepdims=False",
    "nonzero": "x, /",
    "searchsorted": "x1, x2, /, *, side='left', sorter=None",
    "where": "condition, x1, x2, /",
    "unique_all": "x, /",
    "unique_counts": "x, /",
    "unique_inverse": "x, /",
    "unique_values": "x, /",
    "argsort": "x, /, *, axis=-1, descending=False, stable=True",
    "sort": "x, /, *, axis=-1, descending=False, stable=True",
    # statistics and the rest
    "cumulative_prod": "x, /, *, axis=None, dtype=None, include_initial=False",
    "cumulative_sum": "x, /, *, axis=None, dtype=None, include_initial=False",
    "max": "x, /, *, axis=None, keepdims=False",
    "mean": "x, /, *, axis=None, keepdims=False",
    "min": "x, /, *, axis=None, keepdims=False",
    "prod": "x, /, *, axis=None, dtype=None, keepdims=False",
    "std": "x, /, *, axis=None, correction=0.0, keepdims=False",
    "sum": "x, /, *, axis=None, dtype=None, keepdims=False",
    "var": "x, /, *, axis=None, correction=0.0, keepdims=False",
    "all": "x, /, *, axis=None, keepdims=False",
    "any": "x, /, *, axis=None, keepdims=False",
    "diff": "x, /, *, axis=-1, n=1, prepend=None, append=None",
}
LINALG = {
    "cholesky": "x, /, *, upper=False",
    "cross": "x1, x2, /, *, axis=-1",
    "det": "x, /",
    "diagonal": "x, /, *, offset=0",
    "eigh": "x, /",
    "eigvalsh": "x, /",
    "inv": "x, /",
    "matmul": "x1, x2, /",
    "matrix_norm": "x, /, *, keepdims=False, ord='fro'",
    "matrix_power": "x, n, /",
    "matrix_rank": "x, /, *, rtol=None",
    "matrix_transpose": "x, /",
    "outer": "x1, x2, /",
    "pinv": "x, /, *, rtol=None",
    "qr": "x, /, *, mode='reduced'",
    "slogdet": "x, /",
    "solve": "x1, x2, /",
    "svd": "x, /, *, full_matrices=True",
    "svdvals": "x, /",
    "tensordot": "x1, x2, /, *, axes=2",
    "trace": "x, /, *, offset=0, dtype=None",
    "vecdot": "x1, x2, /, *, axis=-1",
    "vector_norm": "x, /, *, axis=None, keepdims=False, ord=2",
}
METHODS = (
    "abs add and array_namespace bool complex dlpack dlpack_device eq float floordiv "
    "ge getitem gt index int invert le lshift lt matmul mod mul ne neg or pos pow "
    "rshift setitem sub truediv xor"
).split()
REFLECTED = (
    "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
)


def accepts(ours: Any, standard: str) -> None:
    """Check that every call that the standard allows binds to our signature."""
    theirs = inspect.signature(eval(f"lambda {standard}: 0"))
    found = inspect.signature(ours).parameters
    kinds = inspect.Parameter
    for name, wanted in theirs.parameters.items():
        if wanted.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL):
            continue
        assert name in found, f"has no `{name}`"
        given = found[name]
        assert given.kind in (wanted.kind, kinds.POSITIONAL_OR_KEYWORD), name
        if wanted.default is not kinds.empty:
            assert given.default == wanted.default, name
    count = sum(p.kind is kinds.POSITIONAL_ONLY for p in theirs.parameters.values())
    positional = [
        p
        for p in found.values()
        if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    assert len(positional) >= count or any(
        p.kind is kinds.VAR_POSITIONAL for p in found.values()
    )


def test_every_name_of_the_standard_is_there() -> None:
    names = {*CONSTANTS, *DTYPES, *UNARY, *BINARY, *SIGNATURES}
    assert sorted(n for n in names - {"bool"} if n not in hf.__all__) == []
    assert sorted(n for n in LINALG if n not in hf.linalg.__all__) == []
    assert not any(hasattr(hf, name) for name in OMITTED)


def test_the_strict_namespace_has_nothing_more() -> None:
    later = {"broadcast_shapes", "isin"}  # of 2025.12
    private = {"fft", "Device", "__version__"} | {
        n for n in xp.__all__ if "flags" in n.lower()
    }
    assert set(xp.__all__) - set(dir(hf)) - later - private == OMITTED


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_standards(name: str) -> None:
    function = getattr(hf, name)
    accepts(
        function.__call__ if isinstance(function, OpDef) else function, SIGNATURES[name]
    )


@pytest.mark.parametrize("name", LINALG)
def test_signatures_of_linalg_are_the_standards(name: str) -> None:
    accepts(getattr(hf.linalg, name), LINALG[name])


def test_every_method_of_the_standard_is_there() -> None:
    names = METHODS + [f"{p}{n}" for p in "ri" for n in REFLECTED]
    assert [n for n in names if not hasattr(Tensor, f"__{n}__")] == []
    for name in ("dtype", "device", "mT", "ndim", "shape", "size", "T", "to_device"):
        assert hasattr(Tensor, name)


def test_inspection() -> None:
    info = hf.__array_namespace_info__()
    assert hf.__array_api_version__ == "2024.12"
    assert info.default_device() == "cpu"
    assert info.devices() == ["cpu"]
    assert info.capabilities()["boolean indexing"]
    assert info.default_dtypes()["real floating"] is hf.float32
    assert set(info.dtypes()) == set(DTYPES)
    assert set(info.dtypes(kind="unsigned integer")) == {
        f"uint{8 << i}" for i in range(4)
    }
    assert info.dtypes(kind=("bool", "complex floating")) == {"bool": hf.bool}
    with pytest.raises(DTypeError, match="is not a hopflow dtype"):
        info.dtypes(kind="quaternion")
    with pytest.raises(ArgumentValueError, match="no version"):
        hf.asarray(1).__array_namespace__(api_version="2020.12")


# --- answers --------------------------------------------------------------------------

FEW = settings(max_examples=15)
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
FULL_SHAPES = npst.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


def elements(dtype: str, low: float | None, high: float | None) -> Any:
    if dtype == "bool":
        return st.booleans()
    if dtype.startswith("float"):
        width: Any = int(dtype[5:])
        if low is None:
            return st.floats(width=width, allow_subnormal=False)
        return st.floats(low, high, width=width, allow_subnormal=False)
    info = np.iinfo(dtype)
    least = info.min if low is None else max(int(low), info.min)
    most = info.max if high is None else min(int(high), info.max)
    return st.integers(least, most)


def arrays(
    dtype: str,
    shape: Any = SHAPES,
    low: float | None = -8,
    high: float | None = 8,
) -> st.SearchStrategy[Any]:
    return npst.arrays(dtype, shape, elements=elements(dtype, low, high))


def same(got: Any, want: Any) -> None:
    """Equal dtypes and shapes, and elements up to rounding."""
    if isinstance(want, tuple | list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
        return
    a, b = np.asarray(got), np.asarray(want._array if hasattr(want, "_array") else want)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    tolerance = {"float32": 2e-5, "float64": 1e-11}.get(str(a.dtype), 0)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def compare(call: Callable[..., Any], *operands: Any) -> None:
    """Check that `call(namespace, *operands)` is the same in both namespaces."""
    with np.errstate(all="ignore"):
        want = call(xp, *(xp.asarray(o) for o in operands))
    same(call(hf, *(hf.asarray(o) for o in operands)), want)


def dtypes_of(name: str) -> list[str]:
    """The dtypes that the standard has an elementwise function take."""
    one = np.ones(1)
    found = []
    for dtype in DTYPES:
        x = xp.asarray(one.astype(dtype))
        function = getattr(xp, name)
        try:
            with np.errstate(all="ignore"):
                function(x) if name in UNARY else function(x, x)
        except TypeError:
            continue
        found.append(dtype)
    return found


RANGES = {
    "bitwise_left_shift": (0, 7),
    "bitwise_right_shift": (0, 7),
    "pow": (1, 3),
    "floor_divide": (1, 9),
    "remainder": (1, 9),
}
POINTS = {  # where NumPy's answer is the standard's, and well conditioned
    "acosh": (1, 9),
    "atanh": (-0.875, 0.875),
    "log": (0, 9),
    "log1p": (-0.875, 9),
    "log2": (0, 9),
    "log10": (0, 9),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in UNARY for d in dtypes_of(n)]
)
@FEW
@given(data=st.data())
def test_functions_of_one_tensor(name: str, dtype: str, data: st.DataObject) -> None:
    low, high = POINTS.get(name, (-9, 9))
    exact = name in (
        "abs",
        "ceil",
        "floor",
        "isfinite",
        "isinf",
        "isnan",
        "sign",
        "trunc",
    )
    bounds = (None, None) if exact else (low, high)
    x = data.draw(arrays(dtype, SHAPES, *bounds))
    compare(lambda ns, a: getattr(ns, name)(a), x)


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in BINARY for d in dtypes_of(n)]
)
@FEW
@given(data=st.data())
def test_functions_of_two_tensors(name: str, dtype: str, data: st.DataObject) -> None:
    shapes = data.draw(
        npst.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=4)
    )
    low, high = RANGES.get(name, (-8, 8))
    x = data.draw(arrays(dtype, shapes.input_shapes[0], low, high))
    y = data.draw(arrays(dtype, shapes.input_shapes[1], low, high))
    compare(lambda ns, a, b: getattr(ns, name)(a, b), x, y)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64", "float32", "float64"])
@pytest.mark.parametrize(
    "name", "sum prod max min mean std var all any count_nonzero".split()
)
@FEW
@given(data=st.data())
def test_reductions(name: str, dtype: str, data: st.DataObject) -> None:
    if name in ("mean", "std", "var") and "int" in dtype:
        dtype = "float64"
    x = data.draw(arrays(dtype, FULL_SHAPES, -3, 3))
    axes = st.integers(-x.ndim, x.ndim - 1)
    axis = data.draw(st.none() | axes | npst.valid_tuple_axes(x.ndim, min_size=1))
    keepdims = data.draw(st.booleans())
    compare(lambda ns, a: getattr(ns, name)(a, axis=axis, keepdims=keepdims), x)


@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "float32"])
@FEW
@given(data=st.data())
def test_searching_and_sorting(dtype: str, data: st.DataObject) -> None:
    x = data.draw(arrays(dtype, FULL_SHAPES, -3, 3))
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    descending = data.draw(st.booleans())
    if dtype != "bool":
        compare(lambda ns, a: ns.argmax(a, axis=axis, keepdims=True), x)
        compare(lambda ns, a: ns.argmin(a, axis=axis, keepdims=True), x)
        compare(lambda ns, a: (ns.argmax(a), ns.argmin(a)), x)
        order = {"axis": axis, "descending": descending}
        compare(lambda ns, a: ns.sort(a, **order), x)
        compare(lambda ns, a: ns.argsort(a, **order, stable=True), x)
        line = np.sort(x.ravel())
        side: Any = data.draw(st.sampled_from(["left", "right"]))
        compare(lambda ns, a, b: ns.searchsorted(a, b, side=side), line, x)
    compare(lambda ns, a: ns.nonzero(a), x)
    compare(lambda ns, a, b: ns.where(a, b, ns.flip(b)), x.astype(bool), x)
    compare(lambda ns, a: ns.unique_values(a), x)
    compare(lambda ns, a: tuple(ns.unique_counts(a)), x)
    compare(lambda ns, a: tuple(ns.unique_inverse(a)), x)
    compare(lambda ns, a: tuple(ns.unique_all(a)), x)


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "float64"])
@FEW
@given(data=st.data())
def test_running_totals(name: str, dtype: str, data: st.DataObject) -> None:
    x = data.draw(arrays(dtype, FULL_SHAPES, -3, 3))
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    initial = data.draw(st.booleans())
    compare(lambda ns, a: getattr(ns, name)(a, axis=axis, include_initial=initial), x)
    compare(lambda ns, a: ns.diff(a, axis=axis), x.astype("int32"))


@pytest.mark.parametrize("dtype", ["bool", "int32", "float64"])
@FEW
@given(data=st.data())
def test_manipulation(dtype: str, data: st.DataObject) -> None:
    x = data.draw(arrays(dtype, FULL_SHAPES))
    n = x.ndim
    axis, other = (data.draw(st.integers(-n, n - 1)) for _ in range(2))
    shift, count = data.draw(st.integers(-5, 5)), data.draw(st.integers(0, 3))
    order = tuple(data.draw(st.permutations(range(n))))
    calls: list[Callable[[Any, Any], Any]] = [
        lambda ns, a: ns.reshape(a, (-1,)),
        lambda ns, a: ns.reshape(a, (*a.shape, 1)),
        lambda ns, a: ns.permute_dims(a, order),
        lambda ns, a: ns.moveaxis(a, axis, other),
        lambda ns, a: ns.flip(a, axis=axis),
        lambda ns, a: ns.flip(a),
        lambda ns, a: ns.roll(a, shift, axis=axis),
        lambda ns, a: ns.roll(a, shift),
        lambda ns, a: ns.expand_dims(a, axis=axis),
        lambda ns, a: ns.squeeze(ns.expand_dims(a, axis=axis), axis),
        lambda ns, a: ns.concat([a, a], axis=axis),
        lambda ns, a: ns.concat([a, a], axis=None),
        lambda ns, a: ns.stack([a, a], axis=axis),
        lambda ns, a: ns.unstack(a, axis=axis),
        lambda ns, a: ns.tile(a, (2, 1)),
        lambda ns, a: ns.repeat(a, count, axis=axis),
        lambda ns, a: ns.broadcast_to(a, (2, *a.shape)),
        lambda ns, a: ns.broadcast_arrays(a, ns.expand_dims(a, axis=0)),
        lambda ns, a: ns.meshgrid(ns.reshape(a, (-1,)), ns.reshape(a, (-1,))[:1]),
        lambda ns, a: ns.zeros_like(a),
        lambda ns, a: ns.ones_like(a),
        lambda ns, a: ns.full_like(a, True),
        lambda ns, a: ns.astype(a, ns.float32),
    ]
    for call in calls:
        compare(call, x)
    if n >= 2:
        compare(lambda ns, a: (ns.tril(a, k=shift), ns.triu(a, k=shift)), x)
        compare(lambda ns, a: ns.matrix_transpose(a), x)


@FEW
@given(data=st.data())
def test_taking(data: st.DataObject) -> None:
    x = data.draw(arrays("float64", FULL_SHAPES))
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    size = x.shape[axis]
    some = data.draw(arrays("int64", st.integers(0, 4), 0, size - 1))
    compare(lambda ns, a, i: ns.take(a, i, axis=axis), x, some)
    shape = tuple(2 if a == axis % x.ndim else m for a, m in enumerate(x.shape))
    along = data.draw(arrays("int64", shape, 0, size - 1))
    compare(lambda ns, a, i: ns.take_along_axis(a, i, axis=axis), x, along)


@pytest.mark.parametrize("name", ["int32", "uint8", "float32", "float64"])
def test_creation(name: str) -> None:
    calls: list[Callable[[Any, Any], Any]] = [
        lambda ns, d: ns.arange(5, dtype=d),
        lambda ns, d: ns.arange(1, 8, 2, dtype=d),
        lambda ns, d: ns.zeros((2, 3), dtype=d),
        lambda ns, d: ns.ones(3, dtype=d),
        lambda ns, d: ns.full((2,), 7, dtype=d),
        lambda ns, d: ns.eye(3, 4, k=-1, dtype=d),
        lambda ns, d: ns.asarray([[1, 2], [3, 4]], dtype=d),
    ]
    for call in calls:
        same(call(hf, getattr(hf, name)), call(xp, getattr(xp, name)))
    if name.startswith("float"):
        for endpoint in (True, False):
            got, want = (
                ns.linspace(-1, 2, 7, dtype=getattr(ns, name), endpoint=endpoint)
                for ns in (hf, xp)
            )
            same(got, want)


def test_promotion_of_equal_kinds_is_the_standards() -> None:
    for a in DTYPES:
        for b in DTYPES:
            try:
                want = xp.result_type(getattr(xp, a), getattr(xp, b))
            except TypeError:
                continue  # mixed kinds: the standard leaves them open
            got = hf.result_type(getattr(hf, a), getattr(hf, b))
            assert isinstance(got, DType)
            assert got.name == str(want).rpartition(".")[2]


@pytest.mark.parametrize("name", DTYPES)
def test_limits_and_kinds_are_the_standards(name: str) -> None:
    ours, theirs = getattr(hf, name), getattr(xp, name)
    kinds = ["bool", "signed integer", "unsigned integer", "integral", "numeric"]
    for kind in [*kinds, "real floating", "complex floating"]:
        assert hf.isdtype(ours, kind) == xp.isdtype(theirs, kind)
    if name == "bool":
        return
    limits: Any = "bits max min"
    if name.startswith("float"):
        limits += " eps smallest_normal"
    info = "finfo" if name.startswith("float") else "iinfo"
    for limit in limits.split():
        got = getattr(getattr(hf, info)(ours), limit)
        assert got == getattr(getattr(xp, info)(theirs), limit)
