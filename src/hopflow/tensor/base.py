"""`Tensor`, the users' array: the array API's methods and operators, for any value.

Every method is composed of public operations, so it works under every interpreter. What
needs the elements (`int(x)`, `np.asarray(x)`) calls `_concrete`, which a traced tensor
refuses.
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
from hopflow.entries import blames_user, entries, mark_entry, process_error
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

# The types that operators pass to the operation. Lists and tuples are no operands, but
# Python would evaluate `[1] * x` by repeating the list: the operation reports what to
# do instead.
_SYMBOLIC: Final = (SymInt, SymFloat, SymBool)
_NUMBERS: Final = (Value, bool, int, float, complex, np.ndarray, np.generic, *_SYMBOLIC)
_OPERANDS: Final = (*_NUMBERS, list, tuple)


_Binary: TypeAlias = Callable[[Any, Any], Any]
_Operator: TypeAlias = Callable[["Tensor", Any], "Tensor"]


def _operators(operation: _Binary) -> tuple[_Operator, _Operator, _Operator]:
    """Return the operator of `operation`, its reflection and its in-place form."""

    @mark_entry
    def binary(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            return operation(x, other)
        except Exception as error:
            process_error(error, operation, (x, other), {})
            raise

    @mark_entry
    def reflected(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            return operation(other, x)
        except Exception as error:
            process_error(error, operation, (other, x), {})
            raise

    @mark_entry
    def in_place(x: Any, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            x._assign(_fitted(x, operation(x, _operand_of(x, other))))
        except Exception as error:
            process_error(error, operation, (x, other), {})
            raise
        return x

    return binary, reflected, in_place


def _operand_of(x: "Tensor", other: Any) -> Any:
    """Return the other operand of an in-place operation, broadcast to the shape of `x`
    by the run if sizes are symbolic."""
    if isinstance(other, Value) and not (x.type.is_static and other.type.is_static):
        return fitted("in-place operation", other, x.shape)
    return other


def _fitted(x: "Tensor", new: "Tensor") -> "Tensor":
    """Return the result of an in-place operation on `x`, in the dtype of `x`.

    Raises:
        ShapeError: broadcasting changes the shape.
        DTypeError: promotion changes the kind: an int cannot hold a float.
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
    """Return the arguments of `f(1, 2)` or `f((1, 2))`, which mean the same."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        return tuple(args[0])
    return tuple(args)


class Tensor(Value):
    """An array with a dtype and a shape: the type of operands and results.

    The methods and operators are those of the Python array API standard (2024.12).
    Basic indexing, `reshape`, transposes and broadcasts return views; `x[i] = v` and `x
    += v` write to the tensor and to everything that shares its memory.

    Subclasses define `type` and `_concrete`, and `_device` if they have memory.

    >>> x = hf.asarray([[1.0, 2.0], [3.0, 4.0]])
    >>> x[0] = 5.0
    >>> x.T
    Tensor([[5., 3.],
            [5., 4.]], f32[2, 2])
    """

    __slots__ = ()

    __array_priority__: ClassVar[float] = 1000.0

    # --- what a subclass defines ---

    def _concrete(self, what: str) -> Array:
        """Return the elements, for a use that messages call `what` ("int").

        Raises:
            ConversionError: the class does not define its elements.
        """
        name = type(self).__name__
        raise ConversionError(
            f"{what}() of a `{name}` {self.type}: the class does not say what its "
            "elements are. Ask a tensor that it holds."
        )

    def _exported(self, what: str) -> Array:
        """Return the elements, as constants for another library.

        Raises:
            TraceError: the tensor is traced, or differentiated.
        """
        check_constant(what, (self,))
        return self._concrete(what)

    def _device(self) -> Device:
        """Return the device of the elements."""
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
        """Overwrite the elements, as every view sees them, with those of `new`."""
        current().write(self, new)

    # --- attributes ---

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def size(self) -> Size:
        """The number of elements."""
        return self.type.size

    @property
    def device(self) -> str:
        """The name of the device: "cpu"."""
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
            ShapeError: the tensor does not have two axes.
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
        """Return this tensor on `device`; only "cpu" exists so far."""
        check_device("to_device", device)
        if stream is not None:
            raise ArgumentValueError("to_device: the CPU has no streams; leave it out.")
        return self

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        """Return the `hopflow` module."""
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
        """Return the only element, as a Python number.

        Raises:
            ConversionError: the tensor does not have exactly one element.
            TraceError: the tensor is traced.

        >>> hf.asarray([2.5]).item()
        2.5
        """
        value: bool | int | float = self._scalar("item")
        return value if isinstance(value, bool | int) else float(value)

    def tolist(self) -> Any:
        """Return nested lists of Python numbers; a number if there is no axis.

        Raises:
            TraceError: the tensor is traced.

        >>> hf.ones((2, 1)).tolist()
        [[1.0], [1.0]]
        """
        array = self._concrete("tolist")
        if self.dtype is dtypes.bfloat16:  # NumPy cannot convert it to float
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

    @blames_user
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
        # JAX arrays are immutable, so this copies; `jnp.from_dlpack` shares memory.
        from jax.numpy import array

        return array(self._exported("__jax_array__"))

    @blames_user
    def __format__(self, spec: str) -> str:
        if self.ndim == 0 and spec:
            return format(self.item(), spec)
        return format(str(self), spec)

    # --- container ---

    def __len__(self) -> int:
        if not self.ndim:
            raise ConversionError(f"len() of a tensor without axes ({self.type}).")
        return self.shape[0]  # type: ignore[return-value]  # len() of a symbol raises

    def __iter__(self) -> Iterator["Tensor"]:
        if not self.ndim:
            raise ConversionError(f"a tensor without axes ({self.type}) has no items.")
        return (self[i] for i in range(len(self)))

    def __contains__(self, item: Any) -> bool:
        return bool(reduce.any(elementwise.equal(self, item)))

    @mark_entry
    def __getitem__(self, key: Any) -> "Tensor":
        try:
            node = recorded(operator.getitem, (self, key), {})
            return cast(Tensor, indexing.getitem(self, key) if node is None else node)
        except Exception as error:
            process_error(error, operator.getitem, (self, key), {})
            raise

    @mark_entry
    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            if recorded(operator.setitem, (self, key, value), {}) is None:
                self._assign(cast(Tensor, indexing.set_at(self, key, value)))
        except Exception as error:
            process_error(error, operator.setitem, (self, key, value), {})
            raise

    @property
    def at(self) -> indexing.Updater:
        """`x.at[key].set(value)`, `.add(value)`, …: updated copies of this tensor."""
        return indexing.Updater(self)

    # --- methods that the standard has as functions ---

    def astype(
        self, dtype: DTypeLike, /, *, copy: bool = True, device: str | None = None
    ) -> "Tensor":
        """Return this tensor converted to `dtype`; see `hf.astype`."""
        return cast(Tensor, astype(self, dtype, copy=copy, device=device))

    def copy(self) -> "Tensor":
        """Return an equal tensor that shares no memory with this one."""
        return cast(Tensor, astype(self, self.dtype, copy=True))

    def conj(self) -> "Tensor":
        """Return the complex conjugate: a copy, as no dtype is complex."""
        return cast(Tensor, elementwise.conj(self))

    def reshape(self, *shape: Any) -> "Tensor":
        """Return this tensor in another shape: `reshape(2, -1)`, `reshape((2, -1))`."""
        return cast(Tensor, manipulation.reshape(self, _spread(shape)))

    def flatten(self) -> "Tensor":
        """Return the elements in a single axis, in row-major order."""
        return cast(Tensor, manipulation.reshape(self, (-1,)))

    def squeeze(self, axis: Any = None) -> "Tensor":
        """Remove the axes of size 1 that `axis` names; None: all of them.

        Raises:
            DataDependentError: `axis` is None, and only a run knows a size.
        """
        if axis is None:
            axis = tuple([i for i, n in enumerate(self.shape) if n == 1])
        return cast(Tensor, manipulation.squeeze(self, axis))

    def transpose(self, *axes: Any) -> "Tensor":
        """Permute the axes; without arguments, reverse them."""
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
        """Round each element, halves to even, in the same dtype."""
        digits = 0 if ndigits is None else as_integer("round", "ndigits", ndigits)
        return cast(Tensor, elementwise.round_to(self, digits))

    @blames_user
    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    @blames_user
    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    @mark_entry
    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        """Return `self ** other`; with a modulus, of integers, without overflow."""
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        try:
            if modulus is None:
                return elementwise.pow(self, other)
            return modular_power(self, other, modulus)
        except Exception as error:
            process_error(error, elementwise.pow, (self, other), {})
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
    # `==` is elementwise, so hashing is by identity.
    __hash__ = object.__hash__


# Operators and indexing are called most often, and are entries themselves.
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
