"""Inputs that are views: large ones are read where they are, by their strides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import host
from hopflow.compiler.layout import SMALL, given_strides, layout_of, strides_of
from hopflow.compiler.pipeline import Executable, lower
from hopflow.errors import IndexingError
from hopflow.graph.types import TensorType
from hopflow.loop_ir.interpreter import run
from hopflow.stats import counts
from hopflow.symbolic.size import symbol
from hopflow.tensor import EagerTensor

pytestmark = pytest.mark.slow

N, M = 90, 130
BASE = np.random.default_rng(0).normal(size=(2 * N, 2 * M)).astype("f")
VIEWS: dict[str, Any] = {
    "rows": BASE[:N, 7 : 7 + M],
    "steps": BASE[:N, ::2],
    "transposed": np.ascontiguousarray(BASE[:M, :N]).T,
    "flipped": np.ascontiguousarray(BASE[:N, :M])[::-1, ::-1],
    "broadcast": np.broadcast_to(BASE[:N, :1], (N, M)),
}


def loop(x: Any, y: Any) -> Any:
    return hf.scan(lambda c, r: (c + r @ x.T, hf.sum(r)), hf.sum(y, axis=1), x * 1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, y: hf.sin(x) * y,
    "reduced": lambda x, y: (hf.sum(x, axis=0), hf.max(x, axis=1), hf.sum(x * y)),
    "moved": lambda x, y: (x.T + 1, hf.roll(x, 3, axis=1), x[3:, ::-2] - y[3:, ::-2]),
    "product": lambda x, y: x @ y.T,
    "returned": lambda x, y: (x, y),
    "written": lambda x, y: hf.cumulative_sum(x, axis=1) + x.at[1, 2:].set(0.0) + y,
    "sorted": lambda x, _: hf.sort(x, axis=1),
    "looped": loop,
    "chosen": lambda x, y: hf.cond(hf.sum(x) > 0, lambda: x + y, lambda: x - y),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("symbolic", [False, True])
def test_results_are_those_of_a_dense_copy(
    name: str, view: str, symbolic: bool
) -> None:
    x, y = EagerTensor(VIEWS[view]), EagerTensor(BASE[:N, :M].copy())
    sizes: Any = (symbol("n"), symbol("m")) if symbolic else (N, M)
    type_ = TensorType(hf.float32, sizes)
    compiled = Executable(hf.trace(FUNCTIONS[name], type_, type_, mode="fake").graph)
    found = compiled([x, y])
    expected = compiled([EagerTensor(x.array.copy("C")), y])
    assert len(compiled._variants) == 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-4, atol=1e-4)


def test_the_loop_ir_says_the_same() -> None:
    x = VIEWS["steps"]
    graph = hf.trace(lambda x: hf.sum(x * 2, axis=1), EagerTensor(x)).graph
    _, program = lower(graph, layouts=("strided",))
    assert [v.name for v in program.sizes] == ["in0_stride0", "in0_stride1"]
    [found] = run(program, strides_of([x], ("strided",)), [x])
    np.testing.assert_allclose(found, np.sum(x * 2, axis=1), rtol=1e-4)


def test_a_layout_is_what_strides_say() -> None:
    layouts = [layout_of(view) for view in VIEWS.values()]
    assert layouts == ["rows", "strided", "strided", "strided", "strided"]
    assert layout_of(BASE) == layout_of(BASE[:4, :4]) == "dense"
    records = np.zeros((200, 200), [("a", "u1"), ("b", "<f4")])
    assert layout_of(records["b"]) == "dense"  # to be copied: no whole elements apart
    assert [given_strides(layout, 3) for layout in ("dense", "rows", "strided")] == [
        *(0, 2, 3)
    ]


def test_strides_are_no_reason_to_compile_again() -> None:
    compiled = Executable(hf.trace(lambda x: x + 1, EagerTensor(BASE[:N, :M])).graph)
    before = counts.compiles
    for base in (BASE, BASE[:, : M + 5].copy(), BASE[::-1]):
        for offset in range(5):
            view = base[offset : offset + N, offset : offset + M]
            [found] = compiled([EagerTensor(view)])
            np.testing.assert_array_equal(found.array, view + 1)
    assert counts.compiles - before == 1


def test_a_trap_of_a_strided_program_has_its_line() -> None:
    x, i = EagerTensor(VIEWS["rows"]), EagerTensor(np.asarray(N))
    compiled = Executable(hf.trace(lambda x, i: x[i] + hf.sum(x), x, i).graph)
    with pytest.raises(IndexingError, match=r"test_strided_inputs\.py"):
        compiled([x, i])


def test_rows_that_are_far_apart_are_gathered() -> None:
    """The distance of an element from the first one may need more than 32 bits."""
    apart, columns = 1 << 30, SMALL + 1
    memory = np.zeros(2 * apart + columns, np.uint8)  # nearly all is never touched
    x = np.lib.stride_tricks.as_strided(memory, (3, columns), (apart, 1))
    x[:, :16] = np.arange(48).reshape(3, 16)
    i, j = np.arange(1000) % 3, np.arange(1000) % 16
    found = hf.jit(lambda x, i, j: x[i, j] + 1)(x, i, j)
    np.testing.assert_array_equal(np.asarray(found), x[i, j] + 1)


def test_gathers_have_distances_of_32_bits_where_they_suffice() -> None:
    if not (host().has_masks and host().register_bits == 512):
        pytest.skip("this CPU gathers no 16 floats at a time")
    i = np.arange(1000) % 300
    dense = hf.jit(lambda x, i: x[i])
    dense(np.arange(300, dtype=np.float32), i)
    assert "trunc <16 x i64>" in dense.llvm_ir
    unknown = hf.jit(lambda x, i: x[i], dynamic=True)
    unknown(np.arange(300, dtype=np.float32), i)
    assert "trunc <16 x i64>" not in unknown.llvm_ir
