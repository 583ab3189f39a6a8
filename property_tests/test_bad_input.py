"""Any call of a public function works or raises an error of ours; nothing else."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow.errors import CompileError, GraphError, HopflowError, LoopIRError
from hopflow.ops.opdef import OpDef

pytestmark = pytest.mark.slow

OURS: Final = (CompileError, GraphError, LoopIRError)
"""Errors that say that hopflow has a defect."""

# Why a function is not called with whatever there is.
EXCLUDED: Final = {
    "Tensor": "made by functions",
    "ExportedProgram": "made by functions",
    "load": "reads a file, with the errors of the system",
    "debug": "takes nothing",
    "stats": "takes nothing",
    "__array_namespace_info__": "takes nothing",
}
DTYPES: Final = ("bool", "int8", "int64", "uint32", "float16", "bfloat16", "float64")


def functions() -> dict[str, Callable[..., Any]]:
    found = {n: getattr(hf, n) for n in hf.__all__ if callable(getattr(hf, n))}
    for space in (hf.linalg, hf.random):
        name = space.__name__.rpartition(".")[2]
        found |= {f"{name}.{n}": getattr(space, n) for n in space.__all__}
    methods = [n for n in vars(hf.Tensor) if not n.startswith("_")]
    found |= {f"Tensor.{n}": getattr(hf.Tensor, n) for n in methods}
    return {n: f for n, f in found.items() if callable(f) and n not in EXCLUDED}


FUNCTIONS: Final = functions()


# --- arguments ------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> hf.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 9))
    values = (np.arange(int(np.prod(shape))) * 3 + seed) % 7
    return hf.asarray(values.reshape(shape), dtype=dtype)


INTS: Final = st.one_of(
    st.integers(-3, 4), st.sampled_from([-(2**63), 2**63, 2**70, -(2**70)])
)
SMALL: Final = st.integers(-3, 4)
NUMBERS: Final = st.one_of(SMALL, st.booleans(), st.floats(width=32), st.just(1j), INTS)
JUNK: Final = st.one_of(
    st.none(),
    st.sampled_from(["", "text", "float32", "xy", "clip", "fro", "cpu", "complete"]),
    st.builds(object),
    st.just(...),
    st.builds(slice, SMALL, SMALL),
    st.sampled_from([int, complex, np.float32, hf.int8, np.dtype("m8[s]")]),
    st.binary(max_size=3),
    st.sampled_from([np.array(["a"]), np.zeros(2, "c8"), np.array([None])]),
)
BODIES: Final = st.sampled_from(
    [
        hf.negative,
        hf.add,
        hf.less,
        lambda *xs: xs,
        lambda *xs: xs[0],
        lambda *_: None,
        lambda *_: "text",
        lambda *_: 2**70,
        lambda x: {"x": x},
        lambda: 0.5,
        lambda c, x: (c, x),
    ]
)
LEAVES: Final = st.one_of(tensors(), NUMBERS, JUNK, BODIES)
ARGUMENTS: Final = st.one_of(
    tensors(),
    LEAVES,
    st.lists(SMALL, max_size=3).map(tuple),
    st.lists(tensors(), min_size=1, max_size=2),
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["a", "b", 1]), inner, max_size=2),
        ),
        max_leaves=4,
    ),
)


def draw_call(
    data: st.DataObject, name: str, f: Callable[..., Any]
) -> tuple[list[Any], dict[str, Any]]:
    """As many arguments as `f` takes, some options."""
    if isinstance(f, OpDef):
        return data.draw(st.lists(ARGUMENTS, min_size=1, max_size=3)), {}
    args: list[Any] = []
    options: dict[str, Any] = {}
    for key, parameter in inspect.signature(f).parameters.items():
        if key == "self":
            args.append(data.draw(tensors()))
        elif key == "max_steps":  # a loop must end
            options[key] = data.draw(st.integers(-1, 5))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            args += data.draw(st.lists(ARGUMENTS, max_size=2))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if data.draw(st.booleans()):
                options[key] = data.draw(ARGUMENTS)
        elif key.endswith(("fn", "branches")) or key == "f":
            args.append(data.draw(st.one_of(BODIES, ARGUMENTS)))
        else:
            args.append(data.draw(ARGUMENTS))
    return args, options


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_a_call_works_or_raises_an_error_of_ours(
    name: str, data: st.DataObject
) -> None:
    args, options = draw_call(data, name, FUNCTIONS[name])
    error = None
    try:
        FUNCTIONS[name](*args, **options)
    except HopflowError as raised:
        error = raised
    assert not isinstance(error, OURS)
    assert error is None or str(error)
