"""Convolutions against JAX's, and transposed ones against sums in NumPy."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DTypeError,
    ExportError,
    HopflowError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.ops import conv_plan
from hopflow.ops.conv import conv_op
from hopflow.ops.conv_plan import Conv, Plan
from hopflow.ops.windows import matmul_windows, window_layout, window_offsets
from hopflow.testing.kernels import evaluate
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
lax = jax.lax

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def in_64_bits() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


RNG: Final = np.random.default_rng(0)


class Case:
    """A convolution: shapes, and options as `hf.conv` takes them."""

    def __init__(self, x: tuple[int, ...], w: tuple[int, ...], **options: Any) -> None:
        self.x, self.w, self.options = x, w, options

    def operands(self, dtype: str = "float64") -> tuple[Array, Array]:
        if dtype.startswith(("int", "uint")):
            low = -9 if dtype.startswith("int") else 0
            return (
                RNG.integers(low, 9, self.x).astype(dtype),
                RNG.integers(low, 9, self.w).astype(dtype),
            )
        kind = hf.dtypes.as_dtype(dtype).dtype
        return (
            RNG.standard_normal(self.x).astype(kind),
            RNG.standard_normal(self.w).astype(kind),
        )

    def ours(self, x: Any, w: Any) -> Any:
        return hf.conv(x, w, **self.options)

    def theirs(self, x: Any, w: Any) -> Any:
        rank = len(self.x) - 2
        options = dict(self.options)
        padding = options.pop("padding", 0)
        if isinstance(padding, str):
            padding = padding.upper()
        else:
            each = padding if isinstance(padding, tuple) else (padding,) * rank
            padding = [p if isinstance(p, tuple) else (p, p) for p in each]
        stride, dilation = (
            n if isinstance(n, tuple) else (n,) * rank
            for n in (options.get("stride", 1), options.get("dilation", 1))
        )
        return lax.conv_general_dilated(
            *(x, w, stride, padding),
            rhs_dilation=dilation,
            feature_group_count=options.get("groups", 1),
        )


CASES: Final = {
    "filter": Case((1, 1, 40), (1, 1, 5), padding=2),
    "long filter": Case((1, 1, 300), (1, 1, 200), padding=7),
    "channels": Case((2, 3, 11), (4, 3, 3)),
    "strided": Case((2, 3, 11), (4, 3, 4), stride=2, padding=(3,)),
    "image": Case((1, 1, 9, 8), (1, 1, 3, 3), padding=1),
    "layer": Case((2, 4, 9, 8), (8, 4, 3, 3), padding=1),
    "strided layer": Case((3, 4, 9, 8), (5, 4, 3, 3), stride=(2, 3), padding="same"),
    "dilated layer": Case((2, 4, 9, 12), (8, 4, 3, 2), dilation=(2, 3)),
    "strided and dilated": Case((2, 4, 15, 15), (8, 4, 3, 3), stride=2, dilation=4),
    "one by one": Case((2, 8, 7, 9), (8, 8, 1, 1)),
    "one by one, strided": Case((2, 8, 7, 9), (8, 8, 1, 1), stride=2),
    "groups": Case((2, 6, 9, 9), (8, 3, 3, 3), groups=2, padding=((1, 0), (2, -1))),
    "depthwise": Case((2, 5, 9, 9), (10, 1, 3, 3), groups=5, padding="same"),
    "volume": Case((2, 3, 5, 6, 7), (4, 3, 3, 2, 3), padding=((0, 1), 1, (2, 0))),
    "strided volume": Case((1, 4, 7, 6, 9), (8, 4, 3, 3, 3), stride=2, padding=1),
    "four axes": Case((1, 2, 4, 3, 4, 5), (3, 2, 2, 2, 1, 3)),
    "points": Case((3, 4), (5, 4)),
    "many examples of few places": Case((40, 4, 3, 3), (8, 4, 3, 3), padding=1),
    "cropped": Case((2, 2, 12), (3, 2, 3), padding=((-2, -3),)),
}
EMPTY: Final = {
    "no examples": Case((0, 3, 9), (4, 3, 3), padding=1),
    "no channels": Case((2, 0, 9), (4, 0, 3), padding=1),
    "no outputs": Case((2, 3, 9), (0, 3, 3)),
    "no places": Case((2, 3, 0), (4, 3, 3), padding=2),
    "a window larger than the input": Case((2, 3, 4), (4, 3, 7), padding=1),
}
ALL: Final = CASES | EMPTY
every_case = pytest.mark.parametrize("name", ALL)
some_cases = pytest.mark.parametrize(
    "name", ["strided layer", "groups", "volume", "filter", "dilated layer"]
)


def close(found: Any, expected: Any, ulps: float = 64) -> None:
    """Compare numbers, up to `ulps` units in the last place of the largest."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    dtype = dtypes.as_dtype(expected.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(found, expected)
    elif expected.size:
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        atol = ulps * float(dtypes.finfo(dtype).eps) * (np.abs(expected).max() + 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


# --- values ---------------------------------------------------------------------------


@every_case
def test_eager_compiled_and_debugged_calls_give_what_jax_does(name: str) -> None:
    case = ALL[name]
    x, w = case.operands()
    expected = case.theirs(x, w)
    close(case.ours(x, w), expected)
    close(hf.jit(case.ours)(x, w), expected)
    close(hf.jit(case.ours, dynamic=True)(x, w), expected)
    with hf.debug():
        close(case.ours(x, w), expected)


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.INTEGERS + dtypes.FLOATS])
def test_every_numeric_dtype_is_convolved_as_products_of_matrices_are(
    dtype: str,
) -> None:
    for name in ("layer", "filter", "long filter", "strided"):
        case = CASES[name]
        x, w = case.operands(dtype)
        kind = dtypes.as_dtype(dtype)
        wide = kind.is_float and kind.bits == 16
        args = (x.astype(np.float32), w.astype(np.float32)) if wide else (x, w)
        expected = np.asarray(case.theirs(*args)).astype(x.dtype)
        for found in (case.ours(x, w), hf.jit(case.ours)(x, w)):
            close(found, expected, ulps=2 if wide else 64)


def test_operands_are_promoted_and_weak_types_kept() -> None:
    x, w = np.ones((1, 1, 4), np.int32), np.ones((1, 1, 2), np.float32)
    found = hf.conv(x, w)
    assert found.dtype is hf.float32
    np.testing.assert_array_equal(np.asarray(found), np.full((1, 1, 3), 2.0))


# --- derivatives, batches -------------------------------------------------------------


def cotangent(case: Case, x: Array, w: Array) -> Array:
    ct: Array = RNG.standard_normal(case.theirs(x, w).shape)
    return ct


@every_case
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_gradients_are_those_of_jax(name: str, dynamic: bool | None) -> None:
    case = ALL[name]
    x, w = case.operands()
    ct = cotangent(case, x, w)

    def loss(x: Any, w: Any, ct: Any) -> Any:
        return hf.sum(case.ours(x, w) * ct)

    found = hf.jit(hf.grad(loss, argnums=(0, 1)), dynamic=dynamic)(x, w, ct)
    _, pullback = jax.vjp(case.theirs, x, w)
    for ours, theirs in zip(found, pullback(ct), strict=True):
        close(ours, theirs)


@some_cases
def test_tangents_and_second_derivatives_are_those_of_jax(name: str) -> None:
    case = CASES[name]
    x, w = case.operands()
    dx, dw = case.operands()

    def both(m: Any, f: Callable[..., Any]) -> tuple[Any, Any]:
        def loss(x: Any, w: Any) -> Any:
            return (f(x, w) ** 3).sum()

        def slope(x: Any, w: Any) -> Any:
            return m.jvp(m.grad(loss, argnums=(0, 1)), (x, w), (dx, dw))[1]

        return m.jvp(f, (x, w), (dx, dw))[1], m.jit(slope)(x, w)

    for ours, theirs in zip(
        jax.tree.leaves(
            both(hf, case.ours), is_leaf=lambda v: isinstance(v, hf.Tensor)
        ),
        jax.tree.leaves(both(jax, case.theirs)),
        strict=True,
    ):
        close(ours, theirs, ulps=1024)


@some_cases
@pytest.mark.parametrize("batched", ["x", "w", "both"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_a_batch_is_what_its_elements_are(
    name: str, batched: str, dynamic: bool | None
) -> None:
    case = CASES[name]
    xs, ws = (
        np.stack(vs) for vs in zip(*(case.operands() for _ in range(3)), strict=True)
    )
    dims = {"x": (0, None), "w": (None, 0), "both": (0, 0)}[batched]
    args = [v if d == 0 else v[0] for v, d in zip((xs, ws), dims, strict=True)]
    expected = jax.vmap(case.theirs, dims)(*args)
    close(hf.vmap(case.ours, dims)(*args), expected)
    close(hf.jit(hf.vmap(case.ours, dims), dynamic=dynamic)(*args), expected)


def test_gradients_of_a_batch_of_filters_are_those_of_jax() -> None:
    case = CASES["groups"]
    xs, ws = (
        np.stack(vs) for vs in zip(*(case.operands() for _ in range(3)), strict=True)
    )

    def slopes(m: Any, f: Callable[..., Any]) -> Any:
        loss = lambda x, w: (f(x, w) ** 2).sum()  # noqa: E731
        return m.jit(m.vmap(m.grad(loss, argnums=(0, 1))))(xs, ws)

    pairs = zip(slopes(hf, case.ours), slopes(jax, case.theirs), strict=True)
    for ours, theirs in pairs:
        close(ours, theirs, ulps=256)


def test_one_program_serves_all_sizes() -> None:
    case = CASES["layer"]
    jitted = hf.jit(case.ours, dynamic=True)
    for batch, height, width in ((2, 9, 8), (5, 12, 30), (7, 3, 4), (4, 40, 2)):
        x, w = RNG.standard_normal((batch, 4, height, width)), case.operands()[1]
        close(jitted(x, w), case.theirs(x, w))

    def smooth(x: Any, w: Any) -> Any:
        return hf.fori_loop(0, 2, lambda _, y: hf.conv(y, w, padding=1), x)

    looped = hf.jit(smooth, dynamic=True)
    for batch, length in ((2, 9), (5, 40)):
        x, w = RNG.standard_normal((batch, 4, length)), RNG.standard_normal((4, 4, 3))
        once = hf.conv(x, w, padding=1)
        close(looped(x, w), hf.conv(once, w, padding=1))


def test_code_that_programs_share_is_right_for_the_sizes_of_each() -> None:
    def f(x: Any, w: Any) -> Any:
        return hf.conv_transpose(x, w, dilation=(1, 3), padding=(0, 1))

    def shared(x: tuple[int, ...], w: tuple[int, ...]) -> tuple[str, ...]:
        jitted = hf.jit(lambda x, w: f(x, w), dynamic=True)
        args = RNG.standard_normal(x), RNG.standard_normal(w)
        close(jitted(*args), f(*args))
        guards: tuple[str, ...] = jitted.guards
        return guards

    # The graphs of both calls are equal; of one the window has a single column.
    for shapes in (((2, 4, 5, 4), (4, 5, 2, 1)), ((2, 4, 7, 7), (4, 5, 1, 2))):
        [channels] = shared(*shapes)
        assert channels.startswith("x.shape[1] == w.shape[0]")


def test_a_loop_may_convolve() -> None:
    def smooth(x: Any, w: Any, m: Any) -> Any:
        if m is hf:
            step = lambda _, y: hf.conv(y, w, padding="same")  # noqa: E731
            return hf.fori_loop(0, 3, step, x)
        for _ in range(3):
            x = lax.conv_general_dilated(x, w, (1,), "SAME")
        return x

    x, w = RNG.standard_normal((2, 1, 50)), RNG.standard_normal((1, 1, 5))
    close(hf.jit(lambda x, w: smooth(x, w, hf))(x, w), smooth(x, w, jax), ulps=512)


# --- transposed -----------------------------------------------------------------------


def scattered(
    x: Array,
    w: Array,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Array:
    """A transposed convolution, filter by filter."""
    n, channels, *sizes = x.shape
    per_group, window = w.shape[1], w.shape[2:]
    whole = [
        (s - 1) * stride + (k - 1) * dilation + 1
        for s, k in zip(sizes, window, strict=True)
    ]
    result = np.zeros((n, per_group * groups, *(t + output_padding for t in whole)))
    for b, c in product(range(n), range(channels)):
        group = c // (channels // groups)
        outputs = slice(group * per_group, (group + 1) * per_group)
        for at in np.ndindex(*sizes):
            places = tuple(
                slice(i * stride, i * stride + (k - 1) * dilation + 1, dilation)
                for i, k in zip(at, window, strict=True)
            )
            result[b, outputs][(slice(None), *places)] += x[b, c][at] * w[c]
    kept = tuple(slice(padding, size - padding) for size in result.shape[2:])
    return result[(slice(None), slice(None), *kept)]


TRANSPOSED: Final = {
    "plain": ((2, 3, 5), (3, 4, 3), {}),
    "strided": ((2, 3, 5), (3, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "image": ((2, 4, 5, 4), (4, 8, 3, 3), {"stride": 2, "padding": 1}),
    "groups": ((2, 4, 5, 4), (4, 3, 2, 3), {"groups": 2, "dilation": 2}),
    "far": ((1, 2, 3, 4), (2, 1, 2, 2), {"stride": 3}),
    "volume": ((1, 2, 3, 2, 4), (2, 3, 2, 2, 3), {"stride": 2, "dilation": 3}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_transposed_convolution_adds_filters_to_windows(name: str) -> None:
    of_x, of_w, options = TRANSPOSED[name]
    x, w = RNG.standard_normal(of_x), RNG.standard_normal(of_w)

    def f(x: Any, w: Any) -> Any:
        return hf.conv_transpose(x, w, **options)

    expected = scattered(x, w, **options)
    close(f(x, w), expected)
    close(hf.jit(f)(x, w), expected)
    close(hf.jit(f, dynamic=True)(x, w), expected)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_padding_by_name_is_that_of_jax(stride: int, window: int) -> None:
    x, w = RNG.standard_normal((2, 3, 6)), RNG.standard_normal((4, 3, window))
    for name in ("same", "valid"):
        expected = lax.conv_general_dilated(x, w, (stride,), name.upper())
        close(hf.conv(x, w, stride=stride, padding=name), expected)
    found = hf.conv_transpose(x, np.swapaxes(w, 0, 1), stride=stride, padding="same")
    layout = ("NCH", "IOH", "NCH")
    flipped = np.swapaxes(w, 0, 1)[:, :, ::-1]
    close(
        found,
        lax.conv_transpose(x, flipped, (stride,), "SAME", dimension_numbers=layout),
    )


def test_the_transposed_convolution_is_the_gradient_of_the_convolution() -> None:
    x, w = RNG.standard_normal((2, 4, 9, 8)), RNG.standard_normal((6, 2, 3, 3))
    options = {"stride": 2, "padding": 1, "groups": 2}
    y, pullback = hf.vjp(lambda x: hf.conv(x, w, **options), x)
    [expected] = pullback(y)
    extra = (0, 1)  # 9 and 8 columns give equally many windows as 9 and 7
    close(hf.conv_transpose(y, w, output_padding=extra, **options), expected)


# --- how it is computed ---------------------------------------------------------------


def planned(case: Case, dtype: Any = hf.float32, **changes: Any) -> Plan | None:
    return conv_plan.plan_of(converted(case, dtype, **changes))


def converted(case: Case, dtype: Any = hf.float32, **changes: Any) -> Conv:
    params = {
        "strides": (1,) * (len(case.x) - 2),
        "before": (1,) * (len(case.x) - 2),
        "sizes": case.x[2:],
        "dilation": (1,) * (len(case.x) - 2),
        "input_dilation": (1,) * (len(case.x) - 2),
        "groups": 1,
        **changes,
    }
    x, w = TensorType(dtype, case.x), TensorType(dtype, case.w)
    return Conv(x, w, **params)


def test_the_plan_follows_from_the_sizes() -> None:
    layer = Case((8, 16, 32, 32), (32, 16, 3, 3))
    assert planned(layer) == Plan(merged=2, batch_last=False)
    assert planned(layer, hf.int32) is None  # of no type that products are made of
    assert planned(layer, groups=16) is None or layer.w[0] // 16 < 4
    one_channel = Case((1, 1, 512, 512), (1, 1, 3, 3))
    assert planned(one_channel) is None  # written out: few products
    long_filter = Case((1, 1, 10000), (1, 1, 501))
    assert planned(long_filter) == Plan(merged=1, batch_last=False)
    small_images = Case((64, 256, 4, 4), (256, 256, 3, 3))
    assert planned(small_images) == Plan(merged=1, batch_last=True)
    # The gradient of the layer's filters: windows of the size of the images.
    of_filters = Case((16, 8, 32, 32), (32, 8, 32, 32))
    assert planned(of_filters, sizes=(3, 3)) == Plan(merged=1, batch_last=True)
    of_filter = Case((1, 1, 512, 512), (1, 1, 512, 512))
    assert planned(of_filter, sizes=(3, 3)) is None  # sums along the rows


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_an_input_with_zeros_between_its_elements_is_convolved_in_pieces(
    dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_plan, "SPLIT", 1)
    strides, windows = (1, 2, 3), (1, 2, 4)
    for stride, window, dilation in product(strides, windows, (1, 2, 3)):
        x, w = RNG.standard_normal((2, 4, 5, 6)), RNG.standard_normal((4, 3, window, 3))
        options = {"stride": (stride, 2), "dilation": (dilation, 1), "padding": (0, 1)}

        def f(x: Any, w: Any = w, options: Any = options) -> Any:
            return hf.conv_transpose(x, w, **options)

        close(hf.jit(f, dynamic=dynamic)(x), f(x))


def test_pieces_are_of_large_convolutions() -> None:
    layer = Case((8, 32, 16, 16), (16, 32, 3, 3))
    spread = {"sizes": (32, 32), "input_dilation": (2, 2)}
    assert conv_plan.axis_to_split(converted(layer, **spread)) == 0
    assert conv_plan.axis_to_split(converted(layer, hf.int32, **spread)) is None
    assert conv_plan.axis_to_split(converted(layer)) is None
    far = {"sizes": (96, 96), "input_dilation": (5, 5)}
    assert conv_plan.axis_to_split(converted(layer, **far)) is None
    small = Case((1, 2, 4, 4), (2, 2, 3, 3))
    assert conv_plan.axis_to_split(converted(small, **spread)) is None


def test_few_products_are_written_out_and_many_are_a_product_of_matrices() -> None:
    def code(case: Case) -> str:
        jitted = hf.jit(case.ours)
        jitted(*case.operands("float32"))
        return str(jitted.loop_ir)

    assert "gemm_windows" not in code(CASES["image"])
    assert "gemm_windows" in code(CASES["layer"])
    assert "gemm_windows" in code(CASES["one by one"])
    many = code(Case((8, 16, 32, 32), (32, 16, 3, 3), padding=1))
    assert "threads independent" in many  # examples


def test_a_long_filter_reads_the_signal_and_writes_the_result_where_they_are() -> None:
    x, w = np.ones((1, 1, 3063), "f"), np.linspace(0, 1, 64, dtype="f")[None, None]
    jitted = hf.jit(hf.conv)
    np.testing.assert_allclose(jitted(x, w), np.full((1, 1, 3000), w.sum()), 1e-5)
    [call] = [row for row in jitted.loop_ir.splitlines() if "call " in row]
    assert "gemm_windows(in1[0, 0], in0[0, 0], " in call
    assert ", out0[0], " in call
    for args in ((x.astype("int32"), w.astype("int32")), (x[..., :1063], w)):
        jitted(*args)
        assert "gemm_windows" not in jitted.loop_ir
    strided = hf.jit(lambda x, w: hf.conv(x, w, stride=2))
    strided(x, w)
    assert "gemm_windows" not in strided.loop_ir


@pytest.mark.parametrize("taps", [48, 49, 64])
@pytest.mark.parametrize("size", [64, 80, 300])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_filters_of_any_length(taps: int, size: int, groups: int, dtype: str) -> None:
    case = Case((2, 3, size), (3, 3 // groups, taps), groups=groups)
    x, w = case.operands(dtype)
    close(hf.jit(case.ours)(x, w), case.ours(x, w))


def test_results_have_the_same_bits_on_several_threads() -> None:
    before = hf.config.num_threads
    case = Case((2, 16, 40, 40), (64, 16, 3, 3), padding=1)
    x, w = case.operands("float32")
    slopes = hf.jit(hf.grad(lambda x, w: hf.sum(case.ours(x, w) ** 2), (0, 1)))
    found = []
    try:
        for count in (1, 2, 3):
            hf.config.num_threads = count
            found.append(b"".join(np.asarray(v).tobytes() for v in slopes(x, w)))
    finally:
        hf.config.num_threads = before
    assert len(set(found)) == 1


def test_what_is_inserted_means_what_numpy_does() -> None:
    x = RNG.standard_normal((2, 4, 5, 6))
    for batch_last, groups in product((False, True), (1, 2)):
        params: dict[str, Any] = {
            "before": (1, -1),
            "dilation": (2, 1),
            "groups": groups,
            "strides": (2, 3),
            "phases": (2, 1),
            "rows": (6, 3),
            "batch_last": batch_last,
        }
        [found] = evaluate(window_layout, [x], **params)
        np.testing.assert_array_equal(found, window_layout.run(x, **params))
    terms: dict[str, Any] = {
        "sizes": (3, 4, 1),
        "steps": (1, 2, 1),
        "strides": (1, 3, 1),
        "of_phases": (0, 100, 0),
        "of_rows": (30, 7, 5),
    }
    [offsets] = evaluate(window_offsets, [], **terms)
    np.testing.assert_array_equal(offsets, window_offsets.run(**terms))
    a, row = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((5, 30))
    starts = RNG.integers(0, 20, (4,))
    options: dict[str, Any] = {
        "batch": (5, 2),
        "batch_axes": ((1,), (0,), ()),
        "shape": (2, 5),
    }
    [found] = evaluate(matmul_windows, [a, row, starts], **options)
    np.testing.assert_allclose(found, matmul_windows.run(a, row, starts, **options))


# --- other targets --------------------------------------------------------------------


@some_cases
def test_programs_outside_give_the_same(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    x, w = case.operands("float32")
    program = hf.export(case.ours, (x, w))
    expected = case.theirs(x, w)
    program.save(tmp_path / "conv.hf")
    close(hf.load(tmp_path / "conv.hf")(x, w), expected)
    close(program.to_jax()(x, w), expected)


def test_a_symbolic_number_of_groups_is_not_for_jax(tmp_path: Any) -> None:
    xs, ws = np.ones((3, 2, 4, 9), np.float32), np.ones((3, 4, 4, 3), np.float32)
    batch = hf.Dim("batch")
    shapes = [{0: batch}, {0: batch}]
    program = hf.export(hf.vmap(hf.conv), (xs, ws), dynamic_shapes=shapes)
    close(program.to_jax()(xs, ws), program(xs, ws))
    with pytest.raises(ExportError, match=r"the number of groups, .*, is symbolic"):
        program.to_stablehlo(tmp_path / "conv.stablehlo")


@some_cases
def test_models_give_the_same(name: str) -> None:
    runtime, _ = load("onnxruntime"), load("onnx")
    case = CASES[name]
    for dtype in ("float32", "float64", "int32"):
        x, w = case.operands(dtype)
        model = hf.export(case.ours, (x, w)).to_onnx()
        session = runtime.InferenceSession(model.SerializeToString())
        names = [i.name for i in session.get_inputs()]
        found = session.run(None, dict(zip(names, (x, w), strict=True)))[0]
        close(found, case.ours(x, w))


# --- errors ---------------------------------------------------------------------------

X: Final = np.ones((2, 4, 6, 5), np.float32)
W: Final = np.ones((8, 4, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("x", "w", "options", "error", "match"),
    [
        (X[0], W, {}, ShapeError, "the input and the weights must have two axes"),
        (X[0, 0, 0], W[0, 0, 0], {}, ShapeError, "must have two axes"),
        (X, W[:, :3], {}, ShapeError, r"has 4 channels, .* are for 3\."),
        (X, W, {"groups": 2}, ShapeError, r"are for 8 \(in 2 groups\)"),
        (X, W[:7, :2], {"groups": 2}, ShapeError, "7 output channels .* 2 groups"),
        (X, W, {"groups": 0}, ArgumentValueError, "`groups` must be at least 1"),
        (X, W, {"groups": 1.0}, ArgumentTypeError, "`groups` must be an int"),
        (X, W, {"stride": 0}, ArgumentValueError, "`stride` must be at least 1"),
        (X, W, {"stride": (1, 2, 3)}, ArgumentValueError, "one for each of 2 axes"),
        (X, W, {"dilation": -1}, ArgumentValueError, "`dilation` must be at least 1"),
        (X, W, {"dilation": "2"}, ArgumentTypeError, "`dilation` must be an int"),
        (X, W, {"padding": "full"}, ArgumentValueError, "'same' or 'valid'"),
        (X, W, {"padding": (1, 2, 3)}, ArgumentValueError, "`padding` must be an int"),
        (X, W, {"padding": ((1, 2, 3), 1)}, ArgumentValueError, "a pair"),
        (X, W, {"padding": 1.5}, ArgumentTypeError, "`padding` must be an int"),
        (X > 0, W > 0, {}, DTypeError, "conv"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: Array, w: Array, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        hf.conv(x, w, **options)


@pytest.mark.parametrize(
    ("w", "options", "error", "match"),
    [
        (W, {}, ShapeError, r"has 4 channels, and the weights .* are for 8\."),
        (W[:4], {"groups": 3}, ShapeError, "cannot be shared among 3 groups"),
        (W[:4], {"output_padding": 1}, ArgumentValueError, "must be less than"),
        (W[:4], {"output_padding": -1}, ArgumentValueError, "must be at least 0"),
        (
            W[:4],
            {"output_padding": 1, "stride": 2, "padding": "same"},
            ArgumentValueError,
            "leaves nothing to it",
        ),
    ],
)
def test_what_cannot_be_transposed_is_refused(
    w: Array, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        hf.conv_transpose(X, w, **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"strides": (1,)}, "not all params are for 2 axes"),
        ({"strides": (1, 0)}, "a distance is less than 1"),
        ({"sizes": (4,)}, "of one dtype and of rank 3"),
    ],
)
def test_the_primitive_refuses_params_that_do_not_fit(
    changes: dict[str, Any], match: str
) -> None:
    params = {
        "strides": (1, 1),
        "before": (0, 0),
        "sizes": (4, 3),
        "dilation": (1, 1),
        "input_dilation": (1, 1),
        "groups": 1,
        **changes,
    }
    with pytest.raises(HopflowError, match=match):
        conv_op(hf.asarray(X), hf.asarray(W), **params)


def convolved(x: Any, w: Any) -> Any:
    return hf.conv(x, w)


def cotangents(x: Any, w: Any) -> Any:
    return hf.grad(lambda *a: hf.sum(hf.vmap(convolved)(*a) ** 2), argnums=(0, 1))(x, w)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (hf.vmap(convolved), [(0, 2, 6, 7)]),
        (hf.vmap(lambda x, w: hf.conv(x, w[:, :2], groups=2)), [(0, 2, 6, 7)]),
        (
            hf.vmap(lambda x, w: hf.conv_transpose(x, hf.moveaxis(w, 0, 1))),
            [(0, 2, 6, 11)],
        ),
        (
            lambda x, w: hf.map(lambda a: hf.conv(*a), (x, w), batch_size=2),
            [(0, 2, 6, 7)],
        ),
        (cotangents, [(0, 2, 4, 9), (0, 6, 4, 3)]),
    ],
)
def test_a_batch_of_no_examples_has_no_groups(
    f: Callable[..., Any], shapes: list[tuple[int, ...]], dynamic: bool
) -> None:
    found = hf.jit(f, dynamic=dynamic)(np.zeros((0, 2, 4, 9)), np.zeros((0, 6, 4, 3)))
    results = found if isinstance(found, tuple) else (found,)
    assert [x.shape for x in results] == shapes
