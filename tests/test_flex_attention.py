"""`flex_attention`: in every execution and under every transform, as NumPy has it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import hopflow
from hopflow.compiler.pipeline import lower
from hopflow.compiler.private import private_buffers
from hopflow.compiler.reuse import reuse, size_in_bytes
from hopflow.testing.executions import RUNNERS, SYMBOLIC, agree, in_turn, run_jit

pytestmark = pytest.mark.slow

hf: Any = hopflow
OTHERS = [run for run in RUNNERS if run is not run_jit]

B, H, L, S, E, W = 2, 2, 5, 6, 4, 3


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


class Case(NamedTuple):
    """A kind of attention.

    score     (score, captured, b, h, q_idx, kv_idx) -> score
    keep      (captured, b, h, q_idx, kv_idx) -> bool
    captured  what the functions read
    slope     (scores, captured) -> the derivative of `score`, in NumPy
    pull      (cotangents, scores, captured, *positions) -> the cotangent of `captured`
    """

    score: Callable[..., Any] | None = None
    keep: Callable[..., Any] | None = None
    captured: Any = 0.0
    slope: Callable[..., Any] = lambda s, c: 1
    pull: Callable[..., Any] = lambda g, *_: 0.0


def capped(s: Any, c: Any, *_: Any) -> Any:
    return c * (np if isinstance(s, np.ndarray) else hf).tanh(s / c)


def capped_pull(g: Any, s: Any, c: Any, *_: Any) -> Any:
    t = np.tanh(s / c)
    return (g * (t - s / c * (1 - t**2))).sum()


def causal(c: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


CASES = {
    "full": Case(),
    "causal": Case(keep=causal),
    "window": Case(keep=lambda c, b, h, i, j: (i >= j) & (i - j < 3)),
    "nothing of some": Case(keep=lambda c, b, h, i, j: (i > j + h) & (i != 4)),
    "documents": Case(
        keep=lambda c, b, h, i, j: c[i] == c[j], captured=np.array([0, 0, 1, 1, 1, 2])
    ),
    "soft cap": Case(
        score=capped,
        captured=np.array(1.5),
        slope=lambda s, c: 1 - np.tanh(s / c) ** 2,
        pull=capped_pull,
    ),
    "alibi": Case(
        score=lambda s, c, b, h, i, j: s + c[h] * (j - i),
        keep=causal,
        captured=normal(H, seed=1),
        pull=lambda g, s, c, b, h, i, j: (g * (j - i)).sum((0, 2, 3)),
    ),
    "table": Case(
        score=lambda s, c, b, h, i, j: s + c[h, i, j],
        captured=normal(H, L, S, seed=2),
        pull=lambda g, *_: g.sum(0),
    ),
}


def compiled_and_in_turn(runs: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each case compiled, and in one more of `runs`."""
    return [(name, run_jit) for name in CASES] + in_turn([*CASES], of=runs)


class Reference(NamedTuple):
    """What NumPy makes of a case: results, and the cotangents for those of `y`."""

    y: Any
    lse: Any
    pulled: tuple[Any, ...]


def reference(case: Case, *given: Any, scale: Any = None) -> Reference:
    q, k, v, ct = given
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    raw = q @ np.swapaxes(keys, 2, 3) * scale
    at = np.ogrid[tuple(slice(n) for n in raw.shape)]
    c = case.captured
    s = raw if case.score is None else case.score(raw, c, *at)
    if case.keep is not None:
        s = np.where(case.keep(c, *at), s, -np.inf)
    highest = s.max(3, keepdims=True, initial=-np.inf)
    weights = np.exp(s - np.where(highest == -np.inf, 0, highest))
    total = weights.sum(3, keepdims=True)
    p = weights / np.where(total == 0, 1, total)
    y = p @ values
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    g = p * (ct @ np.swapaxes(values, 2, 3) - (ct * y).sum(3, keepdims=True))
    pulled_c = case.pull(g, raw, c, *at)
    g = g * case.slope(raw, c) * scale

    def of_group(x: Any) -> Any:
        b, h, *rest = x.shape
        return x.reshape(b, h // group, group, *rest).sum(2)

    pulled_k, pulled_v = np.swapaxes(g, 2, 3) @ q, np.swapaxes(p, 2, 3) @ ct
    pulled = (g @ keys, of_group(pulled_k), of_group(pulled_v), pulled_c)
    return Reference(y, lse, pulled)


def attention(case: Case, *given: Any, **options: Any) -> Any:
    """`flex_attention` of a case; `blocks` in the place of its mask."""
    q, k, v, c = given
    score: Any = None
    keep: Any = None
    if case.score is not None:
        own_score = case.score

        def score(s: Any, *at: Any) -> Any:
            return own_score(s, c, *at)

    if case.keep is not None:
        own_keep = case.keep

        def keep(*at: Any) -> Any:
            return own_keep(c, *at)

    size = options.pop("blocks", None)
    if size is not None:
        mask = keep or (lambda *_: hf.asarray(True))
        sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        options["block_mask"] = hf.create_block_mask(mask, *sizes, BLOCK_SIZE=size)
        keep = None
    return hf.flex_attention(q, k, v, score_mod=score, mask_mod=keep, **options)


def pulled(case: Case, *args: Any, **options: Any) -> Any:
    """The cotangents of the operands, and of what is captured if that is a float."""
    *primals, ct = args
    count = 4 if hf.isdtype(primals[3].dtype, "real floating") else 3

    def f(*given: Any) -> Any:
        return hf.sum(attention(case, *given, **options) * ct)

    return hf.grad(f, argnums=tuple(range(count)))(*primals)


def operands(*, heads: int = H, dtype: str = "float64") -> list[Any]:
    shapes = [(B, H, L, E), (B, heads, S, E), (B, heads, S, W), (B, H, L, W)]
    return [normal(*s, seed=n).astype(dtype) for n, s in enumerate(shapes)]


def tensors(case: Case, given: Any) -> list[Any]:
    """`q, k, v, captured, cotangents`."""
    q, k, v, ct = map(hf.asarray, given)
    return [q, k, v, hf.asarray(np.asarray(case.captured)), ct]


# --- values and derivatives -----------------------------------------------------------


@pytest.mark.parametrize(("name", "run"), compiled_and_in_turn([*OTHERS, *SYMBOLIC]))
def test_the_results_are_those_of_numpy(run: Any, name: str) -> None:
    given, case = operands(), CASES[name]
    expected = reference(case, *given)

    def f(*args: Any) -> Any:
        return attention(case, *args, return_lse=True)

    found = run(f, *tensors(case, given)[:4])
    agree(found, (expected.y, expected.lse), rtol=1e-12)


@pytest.mark.parametrize(("name", "run"), compiled_and_in_turn(OTHERS))
def test_the_gradients_are_those_of_numpy(run: Any, name: str) -> None:
    given, case = operands(), CASES[name]
    expected = reference(case, *given).pulled

    def f(*args: Any) -> Any:
        return pulled(case, *args)

    found = run(f, *tensors(case, given))
    agree(found, expected[: len(found)], rtol=1e-12)


@pytest.mark.parametrize("name", ["alibi", "documents"])
@pytest.mark.parametrize("run", SYMBOLIC)
def test_gradients_where_sizes_are_symbols(run: Any, name: str) -> None:
    test_the_gradients_are_those_of_numpy(run, name)


@pytest.mark.parametrize(("name", "blocks"), in_turn([*CASES], of=[2, (3, 2), (8, 4)]))
def test_block_masks_keep_the_same(blocks: Any, name: str) -> None:
    given, case = operands(), CASES[name]
    expected = reference(case, *given)
    args = tensors(case, given)
    y = hf.jit(lambda *a: attention(case, *a, blocks=blocks))
    gradients = hf.jit(lambda *a: pulled(case, *a, blocks=blocks))
    agree(y(*args[:4]), expected.y, rtol=1e-12)
    found = gradients(*args)
    agree(found, expected.pulled[: len(found)], rtol=1e-12)


@pytest.mark.parametrize("length", [128, 130, 300])
@pytest.mark.parametrize("run", [hf.jit, lambda f: hf.jit(f, dynamic=True)])
def test_several_blocks_without_a_block_mask(run: Any, length: int) -> None:
    case = CASES["alibi"]
    given = [normal(1, H, n, 8, seed=n) for n in (length, 150, 150, length)]
    expected = reference(case, *given)
    args = tensors(case, given)
    agree(run(lambda *a: attention(case, *a))(*args[:4]), expected.y, rtol=1e-11)
    agree(run(lambda *a: pulled(case, *a))(*args), expected.pulled, rtol=1e-10)


@pytest.mark.parametrize("run", RUNNERS)
def test_several_heads_share_keys(run: Any) -> None:
    given = operands(heads=1)
    case = CASES["alibi"]
    expected = reference(case, *given)

    def f(*args: Any) -> Any:
        return attention(case, *args[:4], enable_gqa=True), pulled(
            case, *args, enable_gqa=True
        )

    y, gradients = run(f, *tensors(case, given))
    agree(y, expected.y, rtol=1e-12)
    agree(gradients, expected.pulled, rtol=1e-12)


def test_one_example_of_keys_is_for_all() -> None:
    q, k, v, ct = operands()
    wide = [np.broadcast_to(x[:1], x.shape) for x in (k, v)]
    found = hf.flex_attention(*map(hf.asarray, (q, k[:1], v[:1])))
    agree(found, reference(Case(), q, *wide, ct).y, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_every_float_has_sums_of_its_own(dtype: str, rtol: float) -> None:
    own = getattr(hf, dtype)
    case = CASES["causal"]
    given = [hf.astype(hf.asarray(x), own) for x in operands()]
    q, k, v, ct = (np.asarray(hf.astype(x, hf.float64)) for x in given)
    expected = reference(case, q, k, v, ct)
    captured = hf.asarray(0.0)
    y, lse = attention(case, *given[:3], captured, return_lse=True)
    assert y.dtype == own
    assert lse.dtype == (hf.float64 if dtype == "float64" else hf.float32)
    agree(hf.astype(y, hf.float64), expected.y, rtol=rtol)
    found = hf.vjp(lambda *a: attention(case, *a, captured), *given[:3])[1](given[3])
    assert all(x.dtype == own for x in found)
    found = [hf.astype(x, hf.float64) for x in found]
    agree(found, list(expected.pulled[:3]), rtol=3 * rtol)


def test_weights_below_the_normal_numbers_are_zero() -> None:
    q = hf.ones((1, 1, 2, 1))
    v = hf.asarray([[[[1.0], [1e30]]]])
    y = hf.flex_attention(q, q, v, score_mod=lambda s, b, h, i, j: s - 85 * j)
    assert y.tolist() == [[[[1.0], [1.0]]]]


EMPTY = [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5)]


@pytest.mark.parametrize(
    ("shape", "run", "width"), in_turn(EMPTY, [*RUNNERS, *SYMBOLIC], of=[0, 3])
)
def test_empty_operands(run: Any, width: int, shape: tuple[int, ...]) -> None:
    b, h, n, m, e = shape
    given = [normal(b, h, n, width), normal(b, h, m, width), normal(b, h, m, e)]
    ct = normal(b, h, n, e)
    case = CASES["causal"]
    expected = reference(case, *given, ct, scale=1.0)

    def f(*args: Any) -> Any:
        return attention(case, *args[:4], scale=1.0, return_lse=True), pulled(
            case, *args, scale=1.0
        )

    results, gradients = run(f, *tensors(case, [*given, ct]))
    agree(results, (expected.y, expected.lse))
    agree(gradients[:3], expected.pulled[:3])


def test_no_features_make_equal_weights() -> None:
    q, v = hf.zeros((1, 1, 2, 0)), hf.asarray([[[[1.0], [3.0]]]])
    assert hf.flex_attention(q, q, v).tolist() == [[[[2.0], [2.0]]]]


@pytest.mark.parametrize("run", RUNNERS)
def test_the_scale_is_a_number_or_a_tensor_with_a_derivative(run: Any) -> None:
    q, k, v, _ = map(hf.asarray, operands())
    expected = hf.flex_attention(q * 3.0, k, v, scale=1.0)

    def f(scale: Any) -> Any:
        return hf.flex_attention(q, k, v, scale=scale)

    agree(run(f, 3.0), expected, rtol=1e-12)
    agree(run(f, hf.asarray(3.0)), expected, rtol=1e-12)

    def slope(f: Any) -> Any:
        return hf.grad(lambda x: hf.sum(f(x) ** 2))(hf.asarray(3.0, dtype=hf.float64))

    found = run(lambda: slope(f))
    agree(found, slope(lambda x: plain(q, k, v, scale=x)), rtol=1e-10)


# --- transforms -----------------------------------------------------------------------


def plain(q: Any, k: Any, v: Any, bias: Any = 0.0, scale: Any = None) -> Any:
    """Attention with all scores at once, and a bias for all pairs of positions."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    s = q @ hf.matrix_transpose(k) * scale + bias
    p = hf.exp(s - hf.max(s, axis=3, keepdims=True))
    return p / hf.sum(p, axis=3, keepdims=True) @ v


def biased(q: Any, k: Any, v: Any, bias: Any, **options: Any) -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + bias[h, i, j]

    return hf.flex_attention(q, k, v, score_mod=score, **options)


def in_blocks(q: Any, k: Any, v: Any, bias: Any) -> Any:
    every = hf.create_block_mask(
        lambda *_: hf.asarray(True), None, None, L, S, BLOCK_SIZE=(2, 4)
    )
    return biased(q, k, v, bias, block_mask=every)


def with_bias() -> list[Any]:
    return [hf.asarray(x) for x in (*operands()[:3], normal(H, L, S, seed=5))]


@pytest.mark.parametrize(
    ("f", "run"), [*((biased, run) for run in RUNNERS), (in_blocks, run_jit)]
)
def test_forward_derivatives(run: Any, f: Any) -> None:
    primals = with_bias()
    tangents = [hf.asarray(normal(*x.shape, seed=9 + i)) for i, x in enumerate(primals)]

    def push(g: Any) -> Any:
        return lambda *p: hf.jvp(g, p, tuple(tangents))

    agree(run(push(f), *primals), push(plain)(*primals), rtol=1e-10)


@pytest.mark.parametrize(("f", "run"), [(biased, lambda f: f), (in_blocks, hf.jit)])
def test_second_derivatives(run: Any, f: Any) -> None:
    primals = with_bias()
    others = [hf.asarray(normal(*x.shape, seed=9 + i)) for i, x in enumerate(primals)]

    def second(g: Any) -> Any:
        first = hf.grad(lambda *p: hf.sum(g(*p) ** 3), argnums=(0, 1, 2, 3))

        def slope(*p: Any) -> Any:
            return sum(hf.sum(a * b) for a, b in zip(first(*p), others, strict=True))

        return hf.grad(slope, argnums=(0, 1, 2, 3))

    agree(run(second(f))(*primals), second(plain)(*primals), rtol=1e-9)


def test_third_derivatives() -> None:
    q, k, v, _ = (hf.asarray(x[:1, :1]) for x in operands())

    def third(f: Any) -> Any:
        slope = hf.grad(hf.grad(hf.grad(lambda x: hf.sum(f(q * x, k, v) ** 2))))
        return hf.jit(slope)(hf.asarray(0.7, dtype=hf.float64))

    agree(third(hf.flex_attention), third(plain), rtol=1e-8)


def test_the_logarithm_has_derivatives() -> None:
    q, k, v, _ = map(hf.asarray, operands())

    def slopes(f: Any) -> Any:
        return hf.grad(lambda q, k: hf.sum(f(q, k) ** 2), argnums=(0, 1))(q, k)

    def found(q: Any, k: Any) -> Any:
        return hf.flex_attention(q, k, v, return_lse=True)[1]

    def expected(q: Any, k: Any) -> Any:
        return hf.logsumexp(q @ hf.matrix_transpose(k) / E**0.5, axis=3)

    agree(slopes(found), slopes(expected), rtol=1e-10)


def test_forward_over_reverse() -> None:
    q, k, v, bias = (x[:1] for x in with_bias())

    def slopes(g: Any) -> Any:
        return hf.jit(hf.hessian(lambda q: hf.sum(g(q, k, v, bias) ** 2)))(q)

    one = hf.asarray(normal(1, 1, 2, 2))
    q, k, v, bias = one, one, one, bias[:1, :2, :2]
    agree(slopes(biased), slopes(plain), rtol=1e-9)


AXES = [(0, None, None, None), (0, 0, 0, 0), (None, None, 1, None), (2, 1, 0, 3)]


@pytest.mark.parametrize(("axes", "run"), in_turn(AXES, of=OTHERS))
def test_examples_may_have_tensors_and_captures_of_their_own(
    run: Any, axes: Any
) -> None:
    def several(x: Any, axis: int | None) -> Any:
        return x if axis is None else hf.stack([x, x * 2, x - 1], axis=axis)

    args = [several(x, a) for x, a in zip(with_bias(), axes, strict=True)]

    def rows(g: Any) -> Any:
        return lambda *a: hf.vmap(g, axes)(*a)

    agree(run(rows(biased), *args), rows(plain)(*args), rtol=1e-12)

    def slopes(g: Any) -> Any:
        return hf.grad(lambda *a: hf.sum(g(*a) ** 2), argnums=(0, 1, 2, 3))

    found = hf.jit(rows(slopes(biased)))(*args)
    agree(found, rows(slopes(plain))(*args), rtol=1e-10)


def test_linearize_pushes_tangents() -> None:
    primals = with_bias()
    y, push = hf.linearize(biased, *primals)
    expected, tangent = hf.jvp(plain, tuple(primals), tuple(primals))
    agree((y, push(*primals)), (expected, tangent), rtol=1e-10)


def test_it_stands_in_every_other_operator() -> None:
    q, k, v, bias = with_bias()
    rest = v[..., :L, :]

    def f(q: Any, attend: Any) -> Any:
        def step(q: Any, _: Any) -> Any:
            new = hf.cond(hf.sum(q) < 1e6, lambda: attend(q, k, v, bias), lambda: rest)
            return q + hf.sum(new, axis=3, keepdims=True), hf.sum(new)

        return hf.sum(hf.scan(step, q, length=2)[0] ** 2)

    def slopes(attend: Any) -> Any:
        return hf.value_and_grad(hf.checkpoint(lambda q: f(q, attend)))(q)

    agree(hf.jit(lambda: slopes(biased))(), slopes(plain), rtol=1e-9)


@pytest.mark.parametrize("run", [*RUNNERS, *SYMBOLIC])
def test_functions_of_functions_may_read_what_is_outside(run: Any) -> None:
    q, k, v, bias = with_bias()

    def f(q: Any, bias: Any) -> Any:
        n = q.shape[2]

        def body(_: Any, x: Any) -> Any:
            offset = bias * 2

            def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                def shifted() -> Any:
                    return s + offset[h, i, j] * n

                return hf.cond(i > j, shifted, lambda: s + x[b, h, i, 0] * 0)

            y = hf.flex_attention(q, k, v, score_mod=score)
            return x + hf.sum(y, axis=3, keepdims=True)

        return hf.fori_loop(0, 2, body, q)

    lower_part = np.tri(L, S, -1)
    given = np.asarray(bias) * 2 * L * lower_part
    y = np.asarray(plain(q, k, v, hf.asarray(given))).sum(3, keepdims=True)
    agree(run(f, q, bias), np.asarray(q) + 2 * y, rtol=1e-12)


# --- memory ---------------------------------------------------------------------------


def test_a_trace_shows_one_node() -> None:
    q = hf.zeros((1, 1, 4, 2))
    module = hf.trace(lambda q: hf.flex_attention(q, q, q), q)
    assert [n.op.name for n in module.graph.nodes if n.graphs] == ["flex_attention"]


def planned(f: Any, *args: Any) -> int:
    """The bytes of all temporaries together, those of one thread among them."""
    _, program = lower(hf.trace(f, *args, mode="fake").graph)
    own = [b for bs in private_buffers(program.body).values() for b in bs]
    sizes = [reuse(program).total, *(size_in_bytes(b.shape, b.dtype) for b in own)]
    assert all(size.is_const for size in sizes)
    return sum(int(size.attr) for size in sizes)


@pytest.mark.parametrize("name", ["full", "alibi", "window"])
def test_memory_is_linear_in_the_lengths(name: str) -> None:
    case = CASES[name]
    case = case._replace(captured=np.asarray(case.captured, np.float32))

    def forward(*args: Any) -> Any:
        return attention(case, *args[:4])

    def backward(*args: Any) -> Any:
        return pulled(case, *args)

    for f in (forward, backward):
        sizes = []
        for length in (2048, 4096, 8192):
            given = [np.zeros((1, H, length, 8), np.float32)] * 4
            sizes.append(planned(f, *tensors(case, given)))
        once, twice, more = sizes
        assert more - twice == pytest.approx(2 * (twice - once), rel=0.01)
        assert more < 2**20 + 10 * 4 * H * 8192 * 8  # ten tensors, and blocks


# --- block masks, and what functions return ------------------------------------------


def test_a_block_mask_knows_what_is_kept() -> None:
    mask = hf.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 5, 5, BLOCK_SIZE=2
    )
    assert mask.kinds.tolist() == [[[[1, 0, 0], [2, 1, 0], [2, 2, 2]]]]
    assert float(mask.sparsity()) == pytest.approx(100 / 3)


def test_whole_blocks_do_not_ask_the_mask() -> None:
    q = hf.asarray(normal(1, 1, 4, 2))
    mask = hf.create_block_mask(
        lambda b, h, i, j: i >= 0, None, None, 4, 4, BLOCK_SIZE=2
    )
    lying = hf.BlockMask(mask.kinds, lambda b, h, i, j: i < 0, (2, 2), (4, 4))
    for run in RUNNERS:
        found = run(lambda q: hf.flex_attention(q, q, q, block_mask=lying), q)
        agree(found, plain(q, q, q), rtol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_functions_may_return_numbers(kept: bool) -> None:
    q, k, v, _ = map(hf.asarray, operands())
    zero = hf.zeros_like(k)
    expected = plain(q, zero, v) if kept else hf.zeros((B, H, L, W))
    mask = hf.create_block_mask(lambda *_: kept, None, None, L, S, BLOCK_SIZE=2)
    for run in RUNNERS:
        for options in ({"mask_mod": lambda *_: kept}, {"block_mask": mask}):
            found = run(
                lambda q, o: hf.flex_attention(q, k, v, score_mod=lambda *_: 0, **o),
                *(q, options),
            )
            agree(found, expected, rtol=1e-12)


def test_a_block_mask_is_a_tree_that_jit_takes() -> None:
    q = hf.asarray(normal(1, 1, 4, 2))
    mask = hf.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 4, 4, BLOCK_SIZE=2)
    f = hf.jit(lambda q, mask: hf.flex_attention(q, q, q, block_mask=mask))
    agree(f(q, mask), hf.flex_attention(q, q, q, mask_mod=mask.mask_mod), rtol=1e-12)
