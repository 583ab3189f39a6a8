"""`Tensor`, what users hold: the array API's methods and operators, for any value.

Every method is composed of public operations, so that it means the same whoever gives
them meaning. What needs numbers (`int(x)`, `np.asarray(x)`) asks `_concrete`, which a
traced tensor refuses.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final, TypeAlias, cast

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, current, recorded
from hopflow.devices import CPU, Device
from hopflow.dtypes import DType, DTypeLike
from hopflow.entries import entries, is_entry, speaks_for_user, surface
from hopflow.errors import (
    ArgumentValueError,
    ConversionError,
    ShapeError,
)
from hopflow.ops import elementwise, indexing, manipulation, reduce
from hopflow.ops.convert import astype
from hopflow.ops.deferred import fitted
from hopflow.ops.matmul import matmul, matrix_transpose
from hopflow.ops.modular import modular_power
from hopflow.ops.rules import Array, as_integer, check_device
from hopflow.ops.sizes import equals
from hopflow.ops.views import stored
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.tensor.dlpack import export_dlpack
from hopflow.tensor.exported import check_constant
from hopflow.tensor.numpy_protocol import call_function, call_ufunc

API_VERSIONS: Final = ("2021.12", "2022.12", "2023.12", "2024.12")

# What operators hand on. Lists and tuples are no operands, but left to Python `[1] * x`
# would repeat the list: the operation says what to do instead.
_SYMBOLIC: Final = (SymInt, SymFloat, SymBool)
_NUMBERS: Final = (Value, bool, int, float, complex, np.ndarray, np.generic, *_SYMBOLIC)
_OPERANDS: Final = (*_NUMBERS, list, tuple)


_Binary: TypeAlias = Callable[[Any, Any], Any]
_Operator: TypeAlias = Callable[["Tensor", Any], "Tensor"]


def _operators(operation: _Binary) -> tuple[_Operator, _Operator, _Operator]:
    """The operator of `operation`, the reflected and the in-place one."""

    @is_entry
    def binary(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            return operation(x, other)
        except Exception as error:
            surface(error, operation, (x, other), {})
            raise

    @is_entry
    def reflected(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            return operation(other, x)
        except Exception as error:
            surface(error, operation, (other, x), {})
            raise

    @is_entry
    def in_place(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            x._assign(_fitted(x, operation(x, _operand_of(x, other))))
        except Exception as error:
            surface(error, operation, (x, other), {})
            raise
        return x

    return binary, reflected, in_place


def _operand_of(x: "Tensor", other: Any) -> Any:
    """The other operand of an in-place operation, broadcast to the shape of `x` where
    only the run can tell whether it does."""
    if isinstance(other, Value) and not (x.type.is_static and other.type.is_static):
        return fitted("in-place operation", other, x.shape)
    return other


def _fitted(x: "Tensor", new: "Tensor") -> "Tensor":
    """The result of an in-place operation on `x`, in the dtype of `x`.

    Raises:
        ShapeError: broadcasting has changed the shape.
        DTypeError: promotion has changed the kind: an int cannot hold a float.
    """
    if len(new.shape) != len(x.shape) or not all(map(equals, new.shape, x.shape)):
        raise ShapeError(
            f"an in-place operation keeps the shape: {x.type} would become {new.type}. "
            "Write `x = x + y` to make a new tensor."
        )
    if new.dtype is x.dtype:
        return new
    return cast("Tensor", stored("in-place operation", new, x.dtype))


def _spread(args: Sequence[Any]) -> Any:
    """`f(1, 2)` and `f((1, 2))` mean the same."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        return tuple(args[0])
    return tuple(args)


class Tensor(Value):
    """An array with a dtype and a shape: what every operation takes and gives.

    The methods and operators are those of the Python array API standard (2024.12).
    Basic indexing, `reshape`, transposes and broadcasts give views; `x[i] = v` and
    `x += v` write into the tensor and everything that shares its memory.

    Subclasses define `type` and `_concrete`, and `_device` if they have memory.
    """

    __slots__ = ()

    __array_priority__: ClassVar[float] = 1000.0

    # --- what a subclass defines ---

    def _concrete(self, what: str) -> Array:
        """The elements, for the use that `what` names in messages ("int").

        Raises:
            ConversionError: the class does not say.
        """
        name = type(self).__name__
        raise ConversionError(
            f"{what}() of a `{name}` {self.type}: the class does not say what its "
            "elements are. Ask a tensor that it holds."
        )

    def _exported(self, what: str) -> Array:
        """The elements, as constants of another library.

        Raises:
            TraceError: the tensor is traced, or differentiated.
        """
        check_constant(what, (self,))
        return self._concrete(what)

    def _device(self) -> Device:
        """Where the elements are, or will be."""
        return CPU

    # --- NumPy's functions, and its operators with an array on the left ---

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> Any:
        return call_ufunc(ufunc, method, inputs, options)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, named: Any
    ) -> Any:
        if not all(issubclass(t, Value | np.ndarray) for t in types):
            return NotImplemented  # a proxy records the call
        return call_function(function, args, named)

    # --- writes ---

    def _assign(self, new: "Tensor") -> None:
        """Overwrite the whole value, as seen through every view, with `new` (of this
        tensor's type)."""
        current().write(self, new)

    # --- attributes ---

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def size(self) -> Size:
        """The number of elements."""
        return self.type.size

    @property
    def device(self) -> str:
        return self._device().name

    @property
    def real(self) -> "Tensor":
        """The real part: a copy, as no dtype is complex."""
        return cast(Tensor, elementwise.real(self))

    @property
    def imag(self) -> "Tensor":
        """The imaginary part: zeros, as no dtype is complex."""
        return cast(Tensor, elementwise.imag(self))

    @property
    def T(self) -> "Tensor":
        """The transpose of a matrix.

        Raises:
            ShapeError: the tensor has not two axes.
        """
        if self.ndim != 2:
            raise ShapeError(
                f"T: expected a tensor with 2 axes, and found {self.type}. Use `mT` "
                "for stacks of matrices, or `permute_dims`."
            )
        return cast(Tensor, matrix_transpose(self))

    @property
    def mT(self) -> "Tensor":
        """The tensor with its last two axes exchanged."""
        return cast(Tensor, matrix_transpose(self))

    def to_device(self, device: str, /, *, stream: Any = None) -> "Tensor":
        """This tensor on `device`; there is only "cpu" so far."""
        check_device("to_device", device)
        if stream is not None:
            raise ArgumentValueError("to_device: the CPU has no streams; leave it out.")
        return self

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """The `hopflow` module."""
        if api_version is not None and api_version not in API_VERSIONS:
            raise ArgumentValueError(
                f"__array_namespace__: there is no version `{api_version}`; supported "
                f"are {', '.join(API_VERSIONS)}."
            )
        return sys.modules["hopflow"]

    # --- conversion to Python and NumPy ---

    def _scalar(self, what: str) -> Any:
        array = self._concrete(what)
        if array.size != 1:
            raise ConversionError(
                f"{what}(): expected a tensor with one element, and found {self.type}. "
                "Choose one element, or reduce the tensor."
            )
        return array.item()

    def item(self) -> bool | int | float:
        """The one element, as a Python number."""
        value: bool | int | float = self._scalar("item")
        return value if isinstance(value, bool | int) else float(value)

    def tolist(self) -> Any:
        """Nested lists of Python numbers; one number if there is no axis."""
        array = self._concrete("tolist")
        if self.dtype is dtypes.bfloat16:  # NumPy knows not how to make it a float
            array = array.astype(np.float32)
        return array.tolist()

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise ConversionError(
                f"an index must be an integer, and is {self.type}. Convert with `int`."
            )
        return int(self._scalar("operator.index"))

    @speaks_for_user
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self._exported("numpy.asarray"), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        options = {
            "stream": stream,
            "max_version": max_version,
            "dl_device": dl_device,
            "copy": copy,
        }
        return export_dlpack(self._exported("__dlpack__"), options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device().dlpack

    def __jax_array__(self) -> Any:
        # JAX arrays never change, so this is a copy; `jnp.from_dlpack` shares memory.
        from jax.numpy import array

        return array(self._exported("__jax_array__"))

    @speaks_for_user
    def __format__(self, spec: str) -> str:
        if self.ndim == 0 and spec:
            return format(self.item(), spec)
        return format(str(self), spec)

    # --- container ---

    def __len__(self) -> int:
        if not self.ndim:
            raise ConversionError(f"len() of a tensor without axes ({self.type}).")
        return self.shape[0]  # type: ignore[return-value]  # a symbol raises by itself

    def __iter__(self) -> Iterator["Tensor"]:
        if not self.ndim:
            raise ConversionError(f"a tensor without axes ({self.type}) has no items.")
        return (self[i] for i in range(len(self)))

    def __contains__(self, item: Any) -> bool:
        return bool(reduce.any(elementwise.equal(self, item)))

    @is_entry
    def __getitem__(self, key: Any) -> "Tensor":
        try:
            node = recorded(operator.getitem, (self, key), {})
            return cast(Tensor, indexing.getitem(self, key) if node is None else node)
        except Exception as error:
            surface(error, operator.getitem, (self, key), {})
            raise

    @is_entry
    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            if recorded(operator.setitem, (self, key, value), {}) is None:
                self._assign(cast(Tensor, indexing.set_at(self, key, value)))
        except Exception as error:
            surface(error, operator.setitem, (self, key, value), {})
            raise

    @property
    def at(self) -> indexing.Updater:
        """`x.at[key].set(value)`, `.add(value)`, ...: new tensors; `x` stays."""
        return indexing.Updater(self)

    # --- methods that the standard has as functions ---

    def astype(
        self, dtype: DTypeLike, /, *, copy: bool = True, device: str | None = None
    ) -> "Tensor":
        """This tensor converted to `dtype`; see `hf.astype`."""
        return cast(Tensor, astype(self, dtype, copy=copy, device=device))

    def copy(self) -> "Tensor":
        """An equal tensor with memory of its own."""
        return cast(Tensor, astype(self, self.dtype, copy=True))

    def conj(self) -> "Tensor":
        """The complex conjugate: a copy, as no dtype is complex."""
        return cast(Tensor, elementwise.conj(self))

    def reshape(self, *shape: Any) -> "Tensor":
        """This tensor in another shape: `reshape(2, -1)` or `reshape((2, -1))`."""
        return cast(Tensor, manipulation.reshape(self, _spread(shape)))

    def flatten(self) -> "Tensor":
        """The elements in one axis, row-major."""
        return cast(Tensor, manipulation.reshape(self, (-1,)))

    def squeeze(self, axis: Any = None) -> "Tensor":
        """Without the axes of size 1 that `axis` names; None: all of them.

        Raises:
            DataDependentError: `axis` is None, and only a run knows a size.
        """
        if axis is None:
            axis = tuple([i for i, n in enumerate(self.shape) if n == 1])
        return cast(Tensor, manipulation.squeeze(self, axis))

    def transpose(self, *axes: Any) -> "Tensor":
        """The axes in another order; none given: reversed."""
        order = _spread(axes) if axes else tuple(reversed(range(self.ndim)))
        return cast(Tensor, manipulation.permute_dims(self, order))

    def sum(
        self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False
    ) -> "Tensor":
        return cast(Tensor, reduce.sum(self, axis=axis, dtype=dtype, keepdims=keepdims))

    def prod(
        self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False
    ) -> "Tensor":
        return cast(
            Tensor, reduce.prod(self, axis=axis, dtype=dtype, keepdims=keepdims)
        )

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.mean(self, axis=axis, keepdims=keepdims))

    def std(
        self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False
    ) -> "Tensor":
        return cast(
            Tensor,
            reduce.std(self, axis=axis, correction=correction, keepdims=keepdims),
        )

    def var(
        self, axis: Any = None, *, correction: float = 0.0, keepdims: bool = False
    ) -> "Tensor":
        return cast(
            Tensor,
            reduce.var(self, axis=axis, correction=correction, keepdims=keepdims),
        )

    def max(self, axis: Any = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.max(self, axis=axis, keepdims=keepdims))

    def min(self, axis: Any = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.min(self, axis=axis, keepdims=keepdims))

    def any(self, axis: Any = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.any(self, axis=axis, keepdims=keepdims))

    def all(self, axis: Any = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.all(self, axis=axis, keepdims=keepdims))

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.argmax(self, axis=axis, keepdims=keepdims))

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> "Tensor":
        return cast(Tensor, reduce.argmin(self, axis=axis, keepdims=keepdims))

    # --- operators ---

    def __neg__(self) -> "Tensor":
        return cast(Tensor, elementwise.negative(self))

    def __pos__(self) -> "Tensor":
        return cast(Tensor, elementwise.positive(self))

    def __abs__(self) -> "Tensor":
        return cast(Tensor, elementwise.abs(self))

    def __invert__(self) -> "Tensor":
        return cast(Tensor, elementwise.bitwise_invert(self))

    def __round__(self, ndigits: int | None = None) -> "Tensor":
        """Each element rounded, halves to even; the dtype stays."""
        digits = 0 if ndigits is None else as_integer("round", "ndigits", ndigits)
        return cast(Tensor, elementwise.round_to(self, digits))

    @speaks_for_user
    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    @speaks_for_user
    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    @is_entry
    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        """`self ** other`; with a modulus, of integers, without overflow."""
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            if modulus is None:
                return elementwise.pow(self, other)
            return modular_power(self, other, modulus)
        except Exception as error:
            surface(error, elementwise.pow, (self, other), {})
            raise

    __add__, __radd__, __iadd__ = _operators(elementwise.add)
    __sub__, __rsub__, __isub__ = _operators(elementwise.subtract)
    __mul__, __rmul__, __imul__ = _operators(elementwise.multiply)
    __truediv__, __rtruediv__, __itruediv__ = _operators(elementwise.divide)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators(elementwise.floor_divide)
    __mod__, __rmod__, __imod__ = _operators(elementwise.remainder)
    _, __rpow__, __ipow__ = _operators(elementwise.pow)
    __and__, __rand__, __iand__ = _operators(elementwise.bitwise_and)
    __or__, __ror__, __ior__ = _operators(elementwise.bitwise_or)
    __xor__, __rxor__, __ixor__ = _operators(elementwise.bitwise_xor)
    __lshift__, __rlshift__, __ilshift__ = _operators(elementwise.bitwise_left_shift)
    __rshift__, __rrshift__, __irshift__ = _operators(elementwise.bitwise_right_shift)
    __matmul__, __rmatmul__, __imatmul__ = _operators(matmul)
    __lt__, _, _ = _operators(elementwise.less)
    __le__, _, _ = _operators(elementwise.less_equal)
    __gt__, _, _ = _operators(elementwise.greater)
    __ge__, _, _ = _operators(elementwise.greater_equal)
    __eq__, _, _ = _operators(elementwise.equal)  # type: ignore[assignment]
    __ne__, _, _ = _operators(elementwise.not_equal)  # type: ignore[assignment]
    # Comparison is elementwise, so that dictionaries go by identity.
    __hash__ = object.__hash__


# Operators and indexing, which are called the most, are entries by themselves.
entries(
    Tensor,
    *("to_device", "__array_namespace__", "item", "tolist", "__bool__", "__int__"),
    *("__array_ufunc__", "__array_function__"),
    *("__float__", "__complex__", "__index__", "__array__", "__dlpack__", "__format__"),
    *("__jax_array__", "__len__", "__iter__", "__contains__", "astype", "copy"),
    *("reshape", "flatten", "squeeze", "transpose", "T", "mT"),
    *("sum", "prod", "mean", "std", "var", "max", "min", "any", "all"),
    *("argmax", "argmin", "__neg__", "__pos__", "__abs__", "__invert__", "__round__"),
    *("__divmod__", "__rdivmod__"),
)
