"""Memory shared with NumPy, JAX, PyTorch and whatever speaks DLPack or buffers."""

import array
import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DTypeError,
    ReadOnlyError,
)
from hopflow.tensor import EagerTensor
from hopflow.testing.requires import requires

# The functions' declared results are `Value`s; what users hold has more.
hf: Any = hopflow

NATIVE = [*(f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)), "bool"]
DTYPES = [*NATIVE, "float16", "bfloat16", "float32", "float64"]


def eager(obj: Any) -> EagerTensor:
    tensor = hf.asarray(obj)
    assert isinstance(tensor, EagerTensor)
    return tensor


def sample(dtype: str, shape: tuple[int, ...] = (2, 3)) -> Any:
    scalar: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return (np.arange(np.prod(shape)).reshape(shape) % 2).astype(scalar)


# --- NumPy ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_memory_is_shared_both_ways(dtype: str) -> None:
    a = sample(dtype)
    for x in (eager(a), hf.from_numpy(a)):
        assert x.dtype.name == dtype
        assert np.asarray(x) is a
        assert x.pointer == a.ctypes.data
        x[0, 0] = 1
        assert a[0, 0] == 1
        a[0, 0] = 0
        assert int(x[0, 0]) == 0


def test_strided_memory_is_shared() -> None:
    a = np.arange(12.0).reshape(3, 4)
    x = eager(a[::-1, ::2])
    x[0, 0] = -1.0
    assert a[2, 0] == -1.0
    assert x.pointer == a[2:].ctypes.data


def test_memory_that_kernels_cannot_read_is_copied() -> None:
    swapped = np.arange(3, dtype=">i4")
    packed = np.zeros(3, [("tag", "i1"), ("x", "f4")])["x"]  # unaligned
    for a in (swapped, packed):
        x = eager(a)
        assert x.array.flags.aligned
        assert x.array.dtype.isnative
        assert np.array_equal(x.array, a)
        assert not np.shares_memory(x.array, a)
        with pytest.raises(ArgumentValueError, match="`copy` is False"):
            hf.from_numpy(a)


def test_read_only_memory_raises_when_written() -> None:
    a = np.zeros(3)
    a.flags.writeable = False
    x = eager(a)
    with pytest.raises(ReadOnlyError, match="its memory was imported read-only"):
        x[0] = 1.0
    with pytest.raises(ReadOnlyError, match=r"x\.copy\(\)"):
        x[1:] += 1.0
    y = hf.asarray(a, copy=True)
    y[0] = 1.0
    assert a[0] == 0


def test_copy_says_whether_memory_is_shared() -> None:
    a = np.zeros(3)
    assert np.shares_memory(eager(a).array, a)
    assert not np.shares_memory(np.asarray(hf.asarray(a, copy=True)), a)
    with pytest.raises(ArgumentValueError, match="needed to make a float32 tensor"):
        hf.asarray(a, dtype="float32", copy=False)
    with pytest.raises(ArgumentValueError, match="of this `list`"):
        hf.asarray([1.0], copy=False)


def test_numpy_converts_tensors() -> None:
    x = hf.asarray([1.5, 2.5])
    assert np.asarray(x, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(x), np.asarray(x))
    with pytest.raises(ValueError, match="copy"):
        np.array(x, np.int32, copy=False)


def test_numpy_operators_defer_to_tensors() -> None:
    x: Any = np.ones(2) * hf.asarray([2.0, 3.0], dtype="float64")
    assert isinstance(x, EagerTensor)
    y: Any = np.float32(2) + hf.asarray([1], dtype="int8")
    assert y.dtype is hf.float32


def test_from_numpy_takes_arrays_only() -> None:
    with pytest.raises(ArgumentTypeError, match="found `list`"):
        hf.from_numpy([1])
    with pytest.raises(DTypeError, match="complex128"):
        hf.from_numpy(np.zeros(1, complex))
    with pytest.raises(DTypeError, match="is not a hopflow dtype"):
        hf.asarray(np.array(["a"]))


# --- buffers --------------------------------------------------------------------------


def test_buffers_are_shared() -> None:
    data = array.array("d", [1, 2, 3])
    x = eager(data)
    assert str(x.type) == "f64[3]"
    x[0] = 7.0
    assert data[0] == 7
    with pytest.raises(ReadOnlyError, match="read-only"):
        eager(b"abc")[0] = 1
    eager(bytearray(3))[0] = 1


def test_objects_with_an_array_method_are_taken() -> None:
    class Boxed:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3, dtype=np.int16)

    assert str(eager(Boxed()).type) == "i16[3]"


# --- DLPack ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_shares_memory_with_ourselves(dtype: str) -> None:
    x = eager(sample(dtype))
    y = hf.from_dlpack(x)
    assert y.type == x.type
    assert y.pointer == x.pointer
    y[0, 0] = 1
    assert int(x[0, 0]) == 1
    copied = hf.from_dlpack(x, copy=True)
    assert copied.pointer != x.pointer
    assert np.array_equal(copied.array, x.array)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bfloat16"])
def test_dlpack_shares_memory_with_numpy(dtype: str) -> None:
    x = eager(sample(dtype))
    a = np.from_dlpack(x)
    assert np.shares_memory(a, x.array)
    assert hf.from_dlpack(a).pointer == x.pointer


def test_dlpack_keeps_memory_alive() -> None:
    a = np.from_dlpack(hf.asarray(np.arange(1000.0) + 1))
    assert float(a.sum()) == 500500


def test_dlpack_refuses_what_it_cannot_share() -> None:
    class Elsewhere:
        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    for take in (hf.from_dlpack, hf.asarray):
        with pytest.raises(DeviceError, match=r"device \(2, 0\)"):
            take(Elsewhere())
    with pytest.raises(ArgumentTypeError, match="found `list`"):
        hf.from_dlpack([1])
    with pytest.raises(DeviceError, match="from_dlpack"):
        hf.from_dlpack(hf.asarray(1), device="gpu")
    with pytest.raises(DTypeError, match="complex64"):
        hf.from_dlpack(np.zeros(1, np.complex64))


def test_dlpack_takes_producers_from_before_version_1() -> None:
    class Old:
        def __dlpack__(self, stream: Any = None) -> Any:
            return np.arange(3).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    assert hf.from_dlpack(Old()).tolist() == [0, 1, 2]


def test_read_only_memory_is_exported_as_such() -> None:
    a = np.zeros(2)
    a.flags.writeable = False
    x = hf.asarray(a)
    with pytest.raises(BufferError, match="readonly"):
        x.__dlpack__()
    assert not np.from_dlpack(x).flags.writeable


def test_a_bfloat16_capsule_says_so() -> None:
    x = eager(sample("bfloat16", (3,)))
    capsule = x.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = (
        ctypes.c_void_p,
        (ctypes.py_object, ctypes.c_char_p),
    )
    address = pointer(capsule, b"dltensor")
    code, bits = (ctypes.c_uint8 * 2).from_address(address + 20)
    assert (code, bits) == (4, 16)  # kDLBfloat
    assert ctypes.c_void_p.from_address(address).value == x.pointer


# --- other libraries ------------------------------------------------------------------


@requires("jax")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "64" not in d])
def test_jax_arrays_are_shared_and_read_only(dtype: str) -> None:
    import jax.numpy as jnp

    theirs = jnp.asarray(sample(dtype))
    for x in (eager(theirs), hf.from_dlpack(theirs)):
        assert x.dtype.name == dtype
        assert x.pointer == theirs.unsafe_buffer_pointer()
        assert np.array_equal(x.array, np.asarray(theirs))
        with pytest.raises(ReadOnlyError, match="read-only"):
            x[0, 0] = 1


@requires("jax")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "64" not in d])
def test_jax_takes_tensors(dtype: str) -> None:
    import jax.numpy as jnp

    x = eager(sample(dtype))
    for theirs in (jnp.from_dlpack(x), jnp.asarray(x)):
        assert theirs.dtype.name == dtype
        assert np.array_equal(np.asarray(theirs), x.array)


@requires("torch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_memory_is_shared_both_ways(dtype: str) -> None:
    import torch

    x = eager(sample(dtype))
    theirs = torch.from_dlpack(x)
    assert str(theirs.dtype) == f"torch.{dtype}"
    theirs[0, 0] = 1
    assert int(x[0, 0]) == 1
    back = eager(theirs)
    assert back.type == x.type
    assert back.pointer == x.pointer
