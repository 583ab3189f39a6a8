"""What `flex_attention` refuses, and says why."""

from typing import Any

import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DTypeError,
    MutationError,
    PredicateError,
    ScoreTypeError,
    ShapeError,
)
from hopflow.testing.executions import run_debug

hf: Any = hopflow


def attend(**changed: Any) -> Any:
    given = {name: hf.zeros((1, 2, 3, 4)) for name in "qkv"} | changed
    return hf.flex_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def block_mask(*sizes: int) -> Any:
    return hf.create_block_mask(lambda b, h, i, j: i >= j, *sizes, BLOCK_SIZE=2)


def wide_score(s: Any, *_: Any) -> Any:
    return hf.astype(s, hf.float64)


def row_score(s: Any, *_: Any) -> Any:
    return hf.stack([s, s])


def two_scores(s: Any, *_: Any) -> Any:
    return s, s


def no_bool(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i - j


def printing(s: Any, *_: Any) -> Any:
    hf.print("{}", s)
    return s


Z = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": (2, 3, 4)}, ShapeError, "must have four axes .* `q` f32\\[2, 3, 4\\]"),
        ({"k": (1, 2, 3, 5)}, ShapeError, "`q` and `k` must have as many features"),
        ({"k": (1, 2, 4, 4)}, ShapeError, "`k` and `v` must have as many positions"),
        ({"k": (1, 1, 3, 4)}, ShapeError, "`k` and `v` must have as many heads"),
        ({"k": (3, 2, 3, 4)}, ShapeError, "`k` and `v` must have as many examples"),
        ({"k": (3, *Z[1:]), "v": (3, *Z[1:])}, ShapeError, "examples as `q`, or one"),
        ({"k": (1, 1, 3, 4), "v": (1, 1, 3, 4)}, ShapeError, "`enable_gqa=True`"),
        ({"q": (1, 3, 3, 4), "enable_gqa": True}, ShapeError, "or a multiple"),
        ({"q": 1.0}, ShapeError, "four axes"),
        ({"q": "x"}, ArgumentTypeError, "`q` must be"),
        ({"scale": "x"}, ArgumentTypeError, "`scale` must be"),
        ({"scale": True}, ArgumentTypeError, "`scale` must be a number"),
        ({"scale": (2,)}, ArgumentTypeError, "`scale` must be a number"),
        ({"enable_gqa": 1}, ArgumentTypeError, "`enable_gqa` must be a bool"),
        ({"return_lse": 1}, ArgumentTypeError, "`return_lse` must be a bool"),
        ({"score_mod": 1}, ArgumentTypeError, "`score_mod` must be a function"),
        ({"score_mod": lambda s: s}, ArgumentTypeError, "does not take the arguments"),
        ({"score_mod": wide_score}, ScoreTypeError, r"one score, f32\[\], .* f64\[\]"),
        ({"score_mod": row_score}, ScoreTypeError, r"returns f32\[2\]"),
        ({"score_mod": two_scores}, ScoreTypeError, r"returns f32\[\], f32\[\]"),
        ({"score_mod": lambda *_: None}, ScoreTypeError, "returns nothing"),
        ({"mask_mod": no_bool}, PredicateError, r"must be a bool scalar"),
        ({"mask_mod": two_scores}, PredicateError, "must return one bool scalar"),
        ({"mask_mod": 1}, ArgumentTypeError, "`mask_mod` must be a function"),
        ({"block_mask": 1}, ArgumentTypeError, "`block_mask` must be a `BlockMask`"),
    ],
)
def test_what_is_wrong_is_said(changed: Any, error: Any, text: str) -> None:
    given = {k: hf.zeros(v) if isinstance(v, tuple) else v for k, v in changed.items()}
    for run in (lambda f: f(), lambda f: hf.jit(f)(), run_debug):
        with pytest.raises(error, match=text):
            run(lambda: attend(**given))


def test_dtypes_must_be_floats_and_one() -> None:
    other = hf.zeros((1, 2, 3, 4), dtype=hf.float64)
    with pytest.raises(DTypeError, match="must be floats of one dtype"):
        attend(k=other)
    whole = hf.zeros((1, 2, 3, 4), dtype=hf.int32)
    with pytest.raises(DTypeError, match="must be floats of one dtype"):
        attend(q=whole, k=whole, v=whole)


def test_functions_call_python_in_debug_mode_alone(capsys: Any) -> None:
    with pytest.raises(MutationError, match=r"`printing` .* calls Python"):
        attend(score_mod=printing)
    run_debug(lambda: attend(score_mod=printing))
    assert capsys.readouterr().out == "0.0\n" * 18


def test_functions_must_not_write() -> None:
    seen = hf.zeros(3)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        seen[i] = s
        return s

    for run in (lambda f: f(), run_debug):
        with pytest.raises(MutationError, match="writes to a captured tensor"):
            run(lambda: attend(score_mod=score))


@pytest.mark.parametrize("sizes", [(2, 2, 3, 3), (1, 3, 3, 3), (1, 2, 4, 3)])
def test_a_block_mask_is_for_its_sizes(sizes: Any) -> None:
    with pytest.raises(ShapeError, match="`block_mask` is for"):
        attend(block_mask=block_mask(*sizes))


def test_one_mask_is_enough() -> None:
    with pytest.raises(ArgumentValueError, match="one of the two"):
        attend(block_mask=block_mask(1, 2, 3, 3), mask_mod=lambda b, h, i, j: i >= j)


@pytest.mark.parametrize("size", [0, -1, (1, 2, 3), (2, 0)])
def test_blocks_have_a_size(size: Any) -> None:
    with pytest.raises(ArgumentValueError, match="BLOCK_SIZE"):
        hf.create_block_mask(lambda *_: True, 1, 1, 3, 3, BLOCK_SIZE=size)
