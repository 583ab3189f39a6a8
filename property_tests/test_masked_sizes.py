"""Programs over sizes that only a run knows mean what they mean in plain Python."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow
from hopflow import pytree
from hopflow.errors import HopflowError, ShapeCheckError

pytestmark = pytest.mark.slow

hf: Any = hopflow

SIZE: Final = 4
Tensors = tuple[Any, ...]
"""x, y: f64[4]; two masks bool[4]; and a matrix f64[4, 3]."""

LEAVES: Final[dict[str, Callable[..., Any]]] = {
    "x[m]": lambda x, y, m, k, z: x[m],
    "y[k]": lambda x, y, m, k, z: y[k],
    "x[~m]": lambda x, y, m, k, z: x[~m],
    "x[m & k]": lambda x, y, m, k, z: x[m & k],
    "x[m][:2]": lambda x, y, m, k, z: x[m][:2],
    "2": lambda x, y, m, k, z: hf.arange(2, dtype="float64"),
    "3": lambda x, y, m, k, z: z[0],
    "1": lambda x, y, m, k, z: y[:1],
    "0": lambda x, y, m, k, z: y[:0],
    "z[m][:, 1]": lambda x, y, m, k, z: z[m][:, 1],
    "repeat": lambda x, y, m, k, z: hf.repeat(x, m),
    "cond": lambda x, y, m, k, z: hf.cond(x[0] > 0, lambda: x[m], lambda: y[k]),
}


def assigned(a: Any, b: Any) -> Any:
    a = a.copy()
    a[:] = b
    return a


def added_to(a: Any, b: Any) -> Any:
    a = a.copy()
    a += b
    return a


def masked(a: Any, b: Any) -> Any:
    a = a.copy()
    a[a > 1] = b
    return a


BINARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: b * a,
    "where": lambda a, b: hf.where(a > 1, a, b),
    "where3": lambda a, b: hf.where(b > 1, 2.0, a),
    "maximum": hf.maximum,
    "clip": lambda a, b: hf.clip(a, 0.5, b),
    "logic": lambda a, b: hf.astype(hf.logical_and(a > 1, b > 1), "float64"),
    "concat": lambda a, b: hf.concat([a, b]),
    "stack": lambda a, b: hf.sum(hf.stack([a, b]), axis=0),
    "columns": lambda a, b: hf.stack([a, b], axis=1)[:, 1],
    "@": lambda a, b: hf.reshape(a @ b, (1,)),
    "outer": lambda a, b: hf.sum(hf.linalg.outer(a, b), axis=0),
    "vecdot": lambda a, b: hf.reshape(hf.vecdot(a, b), (-1,)),
    "broadcast_to": lambda a, b: hf.broadcast_to(a, b.shape),
    "broadcast_arrays": lambda a, b: hf.broadcast_arrays(a, b)[0],
    "assign": assigned,
    "+=": added_to,
    "mask": masked,
    "a[b]": lambda a, b: a[b > 1],
    "at": lambda a, b: a.at[:].add(b),
    "row": lambda a, b: (hf.expand_dims(a, axis=1) * b)[:, :1][:, 0],
    "segments": lambda a, b: hf.segment_sum(a, hf.astype(b, "int64") % 2, 2),
    "update": lambda a, b: hf.dynamic_update_slice(a, b, (1,)),
    "scan": lambda a, b: hf.scan(lambda c, v: (c + v[0], c * v[1]), a[0] * 0, (a, b))[
        1
    ],
    "map": lambda a, b: hf.map(lambda v: v[0] - v[1], (a, b)),
    "vmap": lambda a, b: hf.vmap(lambda u, v: u * v + hf.sum(u))(a, b),
    "carry": lambda a, b: hf.fori_loop(0, 2, lambda i, c: b + c, a),
    "searchsorted": lambda a, b: hf.astype(hf.searchsorted(hf.sort(a), b), "float64"),
}
UNARY: Final[dict[str, Callable[[Any], Any]]] = {
    "pairs": lambda a: hf.sum(hf.reshape(a, (-1, 2)), axis=1),
    "reshape(2)": lambda a: hf.reshape(a, (2,)),
    "reshape(2, -1)": lambda a: hf.reshape(a, (2, -1))[0],
    "squeeze": lambda a: hf.reshape(hf.squeeze(a, axis=0), (1,)),
    "item": lambda a: a * hf.sum(a[:1].reshape(())),
    "max": lambda a: a - hf.max(a),
    "argmax": lambda a: a + hf.argmax(a),
    "sort": lambda a: hf.sort(a),
    "window": lambda a: hf.dynamic_slice(a, (1,), (2,)),
    "tail": lambda a: a[1:],
    "last": lambda a: a * a[-1],
    "flip": lambda a: hf.flip(a),
    "cumsum": lambda a: hf.cumulative_sum(a),
    "square": lambda a: hf.linalg.trace(hf.linalg.outer(a, a)[:, :2] @ hf.eye(2)) + a,
    "inv": lambda a: hf.linalg.inv(hf.expand_dims(a, axis=1)[:, :2] + 3 * hf.eye(2))[0],
    "pad": lambda a: hf.pad(a, (1, 0)),
    "tile": lambda a: hf.tile(a, (2,)),
    "roll": lambda a: hf.roll(a, 1),
    "norm": lambda a: a / (1 + hf.linalg.vector_norm(a, ord=float("inf"))),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, Callable[..., Any]]:
    """A function of the tensors to a vector, and its text."""
    text = draw(st.sampled_from(sorted(LEAVES)))
    f: Callable[..., Any] = LEAVES[text]
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            name = draw(st.sampled_from(sorted(UNARY)))
            text, f = f"{name}({text})", _then(UNARY[name], f)
        else:
            name = draw(st.sampled_from(sorted(BINARY)))
            leaf = draw(st.sampled_from(sorted(LEAVES)))
            text, f = f"({text} {name} {leaf})", _joined(BINARY[name], f, LEAVES[leaf])
    return text, f


def _then(op: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: op(f(*args))


def _joined(
    op: Callable[..., Any], f: Callable[..., Any], g: Callable[..., Any]
) -> Callable[..., Any]:
    return lambda *args: op(f(*args), g(*args))


def total(f: Callable[..., Any], args: Tensors) -> Any:
    return hf.sum(f(*args))


PLACES: Final[dict[str, Callable[..., Callable[..., Any]]]] = {
    "plain": lambda f: f,
    "cond": lambda f: (
        lambda x, *rest: hf.cond(x[1] > 0, lambda: f(x, *rest), lambda: -f(x, *rest))
    ),
    "while": lambda f: (
        lambda x, *rest: hf.while_loop(
            lambda i, c: i < 2,
            lambda i, c: (i + 1, c * 0.5 + total(f, (x + i, *rest))),
            (0, hf.sum(x) * 0),
        )[1]
    ),
    "scan": lambda f: (
        lambda x, *rest: hf.scan(
            lambda c, v: (c + total(f, (x * v, *rest)), c), hf.sum(x) * 0, x[:2]
        )
    ),
    "map": lambda f: lambda x, *rest: hf.map(lambda v: total(f, (x - v, *rest)), x[:2]),
    "subgraph": lambda f: hf.subgraph(f),
    "grad": lambda f: lambda x, *rest: hf.grad(lambda v: total(f, (v, *rest)))(x),
    "grad of while": lambda f: hf.grad(
        lambda x, *rest: hf.fori_loop(
            0, 2, lambda i, c: c + total(f, (x * c, *rest)), hf.sum(x) * 0 + 1
        )
    ),
    "vmap": lambda f: (
        lambda x, *rest: hf.vmap(lambda v: total(f, (v, *rest)))(hf.stack([x, x + 1]))
    ),
    "vmap of masks": lambda f: (
        lambda x, y, m, k, z: hf.vmap(lambda a, b: total(f, (x, y, a, b, z)))(
            hf.stack([m, k]), hf.stack([k, k])
        )
    ),
}

NUMBERS = st.lists(st.integers(-3, 4).map(float), min_size=SIZE, max_size=SIZE)
MASKS = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)
PAIRS = st.one_of(  # of masks: mostly of as many true elements, so that sizes fit
    st.tuples(MASKS, MASKS),
    MASKS.flatmap(lambda m: st.tuples(st.just(m), st.permutations(m))),
    st.tuples(*[st.permutations([True, True, False, False])] * 2),
)


def run(f: Callable[..., Any], args: Tensors) -> list[Any] | HopflowError:
    try:
        found = f(*[hf.asarray(a) for a in args])
    except HopflowError as error:
        return error
    return [np.asarray(leaf) for leaf in pytree.flatten(found)[0]]


@given(programs(), st.sampled_from(sorted(PLACES)), NUMBERS, NUMBERS, PAIRS)
def test_programs_over_masked_tensors_agree(
    program: tuple[str, Callable[..., Any]],
    place: str,
    x: list[float],
    y: list[float],
    masks: tuple[list[bool], list[bool]],
) -> None:
    m, k = masks
    f = PLACES[place](program[1])
    z = np.arange(12.0).reshape(SIZE, 3) - 2
    args = (np.asarray(x), np.asarray(y), np.asarray(m), np.asarray(k), z)
    with hf.debug():
        plain = run(f, args)
    for name, g in (
        ("eager", f),
        ("jit", hf.jit(f)),
        ("dynamic", hf.jit(f, dynamic=True)),
    ):
        found = run(g, args)
        about = f"{place} of {program[0]}, {name}: {found} and not {plain}"
        if isinstance(found, HopflowError):
            # Of two unbacked sizes neither is taken to be 1.
            strict = isinstance(found, ShapeCheckError) and "neither of two" in str(
                found
            )
            assert strict or isinstance(plain, HopflowError), about
            continue
        assert not isinstance(plain, HopflowError), about
        for a, b in zip(found, plain, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), about
            np.testing.assert_allclose(a, b, 1e-9, 1e-9, err_msg=about)
