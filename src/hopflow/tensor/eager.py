"""`EagerTensor`, which has memory, and `Eager`, the interpreter that computes."""

import operator
from collections.abc import Sequence
from contextvars import Context, copy_context
from functools import lru_cache
from math import inf
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.bind import (
    Interpreter,
    Operand,
    Value,
    check_memory,
    current,
    is_watched,
    slots,
)
from hopflow.config import config
from hopflow.devices import CPU, Device
from hopflow.dtypes import as_dtype
from hopflow.entries import mark_entry, process_error
from hopflow.errors import (
    EscapedValueError,
    ReadOnlyError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.ops.convert import copy
from hopflow.ops.index_plan import parse_index
from hopflow.ops.opdef import OpDef
from hopflow.ops.rules import Array
from hopflow.ops.views import stored
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.tensor.aligned import aligned_copy
from hopflow.tensor.base import Tensor
from hopflow.tensor.memory import Storage


@lru_cache(maxsize=1 << 14)
def _array_type(dtype: np.dtype[Any], shape: tuple[int, ...], weak: bool) -> TensorType:
    """Return the type of an array, cached, as `Eager` looks types up by identity."""
    return TensorType(as_dtype(dtype), shape, weak)


class EagerTensor(Tensor):
    """A tensor with memory.

    array    the elements; a view into the memory of `storage`, which the host may read
             only if `check_host` passes (`host_array` checks)
    storage  shared by all views of the same memory
    type     dtype, shape and weak flag of `array`
    """

    __slots__ = ("__weakref__", "_pointer", "_storage", "array", "type")

    array: Array
    type: TensorType  # a slot, because a property would be slower
    _pointer: int
    _storage: Storage | None  # None: `storage` has not been asked for yet

    def __init__(
        self, array: Array, *, weak: bool = False, storage: Storage | None = None
    ) -> None:
        self.array = array
        self.type = _array_type(array.dtype, array.shape, weak)
        self._storage = storage
        self._pointer = 0

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            self._storage = Storage()
        return self._storage

    @property
    def pointer(self) -> int:
        """The address of the first element."""
        if not self._pointer:
            self._pointer = self.array.ctypes.data
        return self._pointer

    def overlaps(self, other: "EagerTensor") -> bool:
        """Return True if a write to one may be visible in the other."""
        if share_elements(self.array, other.array):
            return True
        storage = self._storage
        if storage is None or storage is not other._storage:
            return False
        a, b = storage.copied(self.array), storage.copied(other.array)
        return (a and a[1]) is not (b and b[1])

    def check_host(self) -> None:
        """Check that the host may read the elements; see `Storage.check_host`."""
        if self._storage is not None:
            self._storage.check_host(self.type)

    @property
    def host_array(self) -> Array:
        """The elements, readable by the host.

        Raises:
            InvalidTensorError, DeviceError: see `Storage.check_host`.
        """
        self.check_host()
        return self.array

    def check_writable(self) -> None:
        """Check that the tensor may be written.

        Raises:
            InvalidTensorError, DeviceError: see `Storage.check_host`.
            ReadOnlyError: its memory was imported read-only, or is that of a broadcast.
            MutationError: in debug mode, a body runs that may not write to it.
        """
        self.check_host()
        current().check_write(self)
        if self.storage.readonly or not self.array.flags.writeable:
            why = (
                "its memory was imported read-only"
                if self.storage.readonly
                else "elements of a broadcast share memory"
            )
            raise ReadOnlyError(
                f"this tensor ({self.type}) cannot be written: {why}. Write into a "
                "copy of it: `x = x.copy()`."
            )

    def _concrete(self, what: str) -> Array:  # noqa: ARG002
        notify = slots.note_elements  # read once, as another thread may clear it
        if notify is not None:
            notify(self)
        return self.host_array

    def _device(self) -> Device:
        return CPU if self._storage is None else self._storage.device

    @mark_entry
    def __getitem__(self, key: Any) -> Tensor:
        try:
            if current().is_eager and _is_basic(key) and not is_watched():
                self.check_host()
                try:
                    # With `...` in the key NumPy returns a view, never a scalar.
                    whole = key if type(key) is tuple else (key,)
                    view = self.array[whole if Ellipsis in whole else (*whole, ...)]
                except (IndexError, ValueError):
                    return super().__getitem__(key)  # raises the user's error
                if not view.ndim and Ellipsis not in whole:  # an element is a copy
                    if type(current()) is Eager:
                        return EagerTensor(view.copy(), weak=self.type.weak)
                    return super().__getitem__(key)
                return EagerTensor(view, weak=self.type.weak, storage=self.storage)
            return super().__getitem__(key)
        except Exception as error:
            process_error(error, operator.getitem, (self, key), {})
            raise

    @mark_entry
    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            if not current().is_eager or is_watched() or slots.record is not None:
                super().__setitem__(key, value)
                return
            self.check_writable()
            if not _is_basic(key):
                parse_index(self.shape, key)
            operand = stored("setitem", value, self.dtype)
            try:
                self.array[_numpy_key(key)] = _numpy_operand(operand)
            except (IndexError, ValueError):
                # Nothing was written. The operation raises the error for the user, or
                # does it.
                super().__setitem__(key, value)
                return
            self.storage.wrote(self.array)
        except Exception as error:
            process_error(error, operator.setitem, (self, key, value), {})
            raise

    def __repr__(self) -> str:
        if self.storage.barred:
            why = self.storage.invalid or f"on {self.storage.device.name}"
            return f"Tensor(<{why}>, {self.type})"
        array = self._concrete("repr")
        if self.dtype is dtypes.bfloat16:
            array = array.astype(np.float32)
        text = np.array2string(array, separator=", ", prefix="Tensor(")
        return f"Tensor({text}, {self.type})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.host_array, self.type.weak)

    def __copy__(self) -> "EagerTensor":
        return EagerTensor(aligned_copy(self.host_array), weak=self.type.weak)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EagerTensor":
        memo[id(self)] = copied = self.__copy__()
        return copied


def share_elements(a: Array, b: Array) -> bool:
    """Return True if the arrays share elements, or if finding out is too costly."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


_MOST_WORK: Final = 10_000  # in NumPy's units; far below a millisecond


def _is_basic(key: Any) -> bool:
    """Return True if `key` has only ints, slices of ints, None and `...`."""
    for item in key if type(key) is tuple else (key,):
        kind = type(item)
        if kind is slice:
            for bound in (item.start, item.stop, item.step):
                if bound is not None and type(bound) is not int:
                    return False
        elif not (kind is int or item is None or item is Ellipsis):
            return False
    return True


def _numpy_key(key: Any) -> Any:
    """Return `key` with arrays in place of tensors."""
    if type(key) is tuple:
        return tuple(map(_numpy_key, key))
    if isinstance(key, EagerTensor):
        array = key.host_array
        if key.dtype is not dtypes.uint64:
            return array
        # NumPy casts u64 to i64, where values beyond i64 would count from the end.
        highest = np.iinfo(np.int64).max
        return np.minimum(array, np.uint64(highest)).astype(np.int64)
    return key


def _numpy_operand(operand: Operand) -> Any:
    """Return what NumPy takes for an operand: an array, or a scalar of its dtype.

    Raises:
        EscapedValueError: it is traced, and its trace is not running.
    """
    if type(operand) is EagerTensor:
        storage = operand._storage
        if storage is not None and storage.barred:
            operand.check_host()
        return operand.array
    if isinstance(operand, Constant):
        scalar = operand.type.dtype.dtype.type
        if -_SMALL < operand.value < _SMALL:
            return scalar(operand.value)
        with np.errstate(over="ignore"):  # out of a small float's range is infinity
            return scalar(operand.value)
    value = slots.stand_in(operand)
    if value is not operand:
        return _numpy_operand(value)
    raise _escaped(operand)


def _escaped(operand: Operand) -> EscapedValueError:
    return EscapedValueError(
        f"a traced value ({operand.type}) was used outside the trace that made it. "
        "Return it from the traced function."
    )


_SMALL: Final = 65504  # the largest finite float16


def _restored(array: Array, weak: bool) -> EagerTensor:
    return EagerTensor(array, weak=weak)


# --- the eager interpreter ------------------------------------------------------------


def _quiet() -> Context:
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context


# Entering `np.errstate` costs more than most operations; running in a context with its
# setting does not. Each run needs a copy, as a context cannot be entered twice.
_QUIET: Final = _quiet()


_Types: TypeAlias = tuple[TensorType | None, ...]


class Eager(Interpreter):
    """The interpreter at the bottom of every stack, which computes."""

    __slots__ = ("_memo",)

    is_eager = True

    def __init__(self) -> None:
        super().__init__(None)
        # (op, ids of the operands' types, params) -> (these types, result types). The
        # types are kept alive so that their ids stay unique.
        self._memo: dict[Any, tuple[list[TensorType], _Types]] = {}

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        raise EscapedValueError(
            f"the number `{number}` of a trace was used outside that trace, where "
            "nothing tells its value. Return it from the traced function."
        )

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Check the types, and run the operation's NumPy implementation."""
        if type(op) is not OpDef:
            operands = [slots.stand_in(a) if isinstance(a, Value) else a for a in args]
            results: tuple[Value, ...] = op.run_eager(operands, params)
            return results
        arrays: list[Any] = []
        key: list[Any] = [op]
        for arg in args:
            arrays.append(_numpy_operand(arg))
            type_ = arg.type
            # Constants are many, and their types are not shared.
            key.append(
                id(type_) if type(arg) is EagerTensor else (type_.dtype, type_.weak)
            )
        types = self._result_types(op, key, args, params)
        if "callback" in op.effects:  # callbacks run in the user's context
            outputs = op.run(*arrays, **params)
        else:
            outputs = _QUIET.copy().run(op.run, *arrays, **params)
        if type(outputs) is not tuple:
            return (_wrapped(op, args, arrays, outputs, types[0]),)
        return tuple(
            [
                _wrapped(op, args, arrays, result, type_)
                for result, type_ in zip(outputs, types, strict=True)
            ]
        )

    def dispatches(self, value: Value) -> bool:
        del value  # all values are concrete
        return True

    def write(self, target: Value, new: Value) -> None:
        """Copy the elements of `new` into `target`'s memory."""
        if not isinstance(target, EagerTensor):
            check_memory(target)
            self.check_write(target)
            raise _escaped(target)
        target.check_writable()
        np.copyto(target.array, _numpy_operand(new))
        target.storage.wrote(target.array)

    def detached(self, view: Value) -> Value:
        return copy(view) if isinstance(view, EagerTensor) else view

    def symbol_of(
        self,
        value: Value,
        min: float = -inf,  # noqa: ARG002
        max: Size | float = inf,  # noqa: ARG002
    ) -> Size:
        return int(value.item())

    def _result_types(
        self, op: OpDef, key: list[Any], args: Sequence[Operand], params: dict[str, Any]
    ) -> _Types:
        """Return the types of the results; None where only the values decide."""
        if params:
            # 1 == 1.0 == True, but these are different parameters.
            key += params.items()
            key += map(type, params.values())
        try:
            entry = self._memo.get(tuple(key))
        except TypeError:  # a parameter that cannot be hashed
            result_types = op.result_types([a.type for a in args], params)
            return tuple(map(_closed, result_types))
        if entry is not None:
            return entry[1]
        types = [a.type for a in args]
        results = tuple(map(_closed, op.result_types(types, params)))
        if len(self._memo) >= _MAX_MEMO:
            self._memo.clear()
        self._memo[tuple(key)] = types, results
        return results


_MAX_MEMO: Final = 1 << 14


def _closed(type_: TensorType) -> TensorType | None:
    """Return `type_`, or None if the values decide some of its sizes."""
    return type_ if type_.is_static else None


def _wrapped(
    op: OpDef,
    args: Sequence[Operand],
    arrays: Sequence[Any],
    output: Any,
    type_: TensorType | None,
) -> EagerTensor:
    """Return a result of `run` as a tensor: views share storage, others own memory."""
    array, storage = output, None
    if type(output) is not np.ndarray:
        array = np.asarray(output)
    elif op.unview is not None:
        array, storage = _placed(op, args, arrays, output)
    else:
        for operand in arrays:
            if output is operand or output.base is not None:
                array, storage = _placed(op, args, arrays, output)
                break
    if type_ is None:
        type_ = _array_type(array.dtype, array.shape, False)
    elif config.verify and (
        array.dtype != type_.dtype.dtype or array.shape != type_.shape
    ):
        raise AssertionError(
            f"{op.name}: `run` gave {array.dtype}{list(array.shape)} for {type_}"
        )
    result: EagerTensor = _new(EagerTensor)
    result.array, result.type = array, type_
    result._storage, result._pointer = storage, 0
    return result


_new: Final[Any] = object.__new__


def _placed(
    op: OpDef, args: Sequence[Operand], arrays: Sequence[Any], output: Array
) -> tuple[Array, Storage | None]:
    """Return a result that may share memory with an operand, and its storage if it is a
    view. Results that are no views are copied. A view whose elements cannot be in the
    same memory becomes a copy that is kept equal (see `memory._Copy`)."""
    for arg, array in zip(args, arrays, strict=True):
        if isinstance(arg, EagerTensor) and np.may_share_memory(output, array):
            if op.unview is None or arg is not args[0]:
                return output.copy(), None
            return output, arg.storage
    if op.unview is not None and output.size and isinstance(args[0], EagerTensor):
        return args[0].storage.kept_equal(arrays[0], output), args[0].storage
    return output, None


slots.eager = Eager()
