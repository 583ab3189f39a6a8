"""`OpDef`: one record an operation, with all its rules; and the driver they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand, Value, bind, current, slots
from hopflow.dtypes import DType
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import FLOAT_TYPE, TensorType
from hopflow.loop_ir.kernels import Lowered
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt

__all__ = [
    "OPERATIONS",
    "Infer",
    "OpDef",
    "Promotion",
    "Sample",
    "convert_to",
    "promoted_as",
]

Infer: TypeAlias = Callable[..., "TensorType | tuple[TensorType, ...]"]
Promotion: TypeAlias = Callable[[str, Sequence[tuple[DType, bool]]], tuple[DType, bool]]
"""From an operation's name and its operands' (dtype, weak) to the dtype that all
operands are converted to."""


Rules: TypeAlias = (
    tuple[Callable[..., Any] | None, ...] | Callable[..., Any] | Literal["linear"]
)
"""One rule for each operand, or one for all; or the operation is its own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One way to call an operation, for the suites that test all of them.

    operands   types as text, with dtype letter T for every dtype that `dtypes` names:
               ("T[3, 4]", "T[4]")
    params     the static parameters
    dtypes     which dtypes T stands for
    low, high  the range that values are drawn from
    """

    operands: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[DType, ...] = dtypes.FLOATS
    low: float = -3.0
    high: float = 3.0


OPERATIONS: Final[dict[str, "OpDef"]] = {}
"""Every operation by name: what `parse` is given, and what the suites run over."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OpDef:
    """An operation on tensors, declared once.

    name      unique
    promote   None: operands keep their dtypes; else the dtype they are converted to
    infer     (*types, **params) -> the result's type, or a tuple of types; raises a
              `HopflowError` if they do not fit
    run       (*arrays, **params) -> NumPy's meaning: an array, or a tuple of arrays, of
              exactly the inferred dtype and shape
    lower     (types, *operands, **params) -> kernels, one for each result; `types` are
              the results' (see `loop_ir.kernels`)
    unview    None, or: the result is a view of the first operand, and this gives that
              operand with a new value of the view written into it:
              (base, new, *other_operands, **params) -> base, in terms of operations
    effects   "trap" (may stop the program), "random", "callback" (calls Python, each
              time and in order): what keeps it in its branch
    node_effects   None, or: more of them that depend on the params
    jvp       the derivative: for each operand (t, out, *operands, **params) -> what its
              tangent `t` adds to the result's, broadcast as the result is; None where
              it is zero. Or, for several results or any number of operands, a function
              (tangents, results, *operands, **params) -> tangents of the results.
              A tangent may be a `Zero`, which is no `Value`. Or "linear": in all of
              its float operands together, so that it makes tangents of theirs. None:
              there is no derivative
    transpose   of an operation that is linear, for each operand (ct, *operands,
              **params) -> its cotangent, from the result's, summed over broadcast axes
              by the caller; the operand itself is then an `Unknown`. Or a function
              (cotangents of the results, *operands, **params) -> one for each operand;
              None: it is zero

    To both kinds of rules constants are Python numbers if the operation promotes; else
    they are given as they are, with their types.

    is_cheap  whether a derivative may compute the result again rather than keep it
    batch     what it does for many examples at once, see `ops.batching`. None: it has
              no operands, or it is `item`, see `batching.numbers`
    samples   calls for the suites that test all operations
    """

    name: str
    promote: Promotion | None
    infer: Infer
    run: Callable[..., Any]
    lower: Callable[..., Lowered]
    samples: tuple[Sample, ...]
    unview: Callable[..., Value] | None = None
    jvp: Rules | None = None
    transpose: Rules | None = None
    is_cheap: bool = False
    batch: Callable[..., Sequence[Any]] | None = None
    effects: frozenset[str] = frozenset()
    node_effects: Callable[[dict[str, Any]], frozenset[str]] | None = None

    def __post_init__(self) -> None:
        if self.name in OPERATIONS:
            raise ValueError(f"operation `{self.name}` is declared twice")
        OPERATIONS[self.name] = self
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__doc__", self.run.__doc__)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)

    def __call__(self, *args: Any, **params: Any) -> Any:
        """Apply the operation to tensors and Python scalars.

        Raises:
            ArgumentTypeError: an operand is not a tensor, an array or a number.
            DTypeError: the operands' dtypes are not for this operation.
            ShapeError: their shapes do not fit.
        """
        if slots.record is not None:
            found = slots.record(self, args, params)
            if found is not None:
                return found
        operands = self.operands(args)
        results = bind(self, operands, params)
        return results[0] if len(results) == 1 else results

    def operands(self, args: Sequence[Any]) -> list[Operand]:
        """`args` as operands of one promoted dtype (if the operation promotes)."""
        values = [as_operand(self.name, i, a) for i, a in enumerate(args)]
        if self.promote is None:
            return [strong_constant(v) for v in values]
        if not values:
            raise ArgumentTypeError(f"{self.name}: takes an operand, and has none.")
        types = [v.type for v in values]
        key = (self.name, *map(id, types))
        known = _promoted.get(key)
        if known is None:
            dtype, weak = self.promote(self.name, [promoted_as(t) for t in types])
            alike = all(t.dtype is dtype and not t.weak for t in types)
            known = dtype, weak, alike, types
            _remember(_promoted, key, known)
        dtype, weak, alike, _ = known
        if alike:
            return values
        return [convert_to(v, dtype, weak=weak) for v in values]

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        """`infer`, always as a tuple.

        Raises:
            HopflowError: from `infer`; or a result is too large for any memory.
        """
        key = () if params else (self.name, *map(id, types))
        known = _inferred.get(key)
        if known is not None:
            return known[0]
        result = self.infer(*types, **params)
        if not isinstance(result, tuple):
            result = (result,)
        for type_ in result:
            check_addressable(self.name, type_)
        # What is asked of symbols may be noted where they belong, each time anew.
        if key and all(t.is_static for t in types):
            _remember(_inferred, key, (result, tuple(types)))
        return result


# What was found before, by the operation and the identity of the operands' types, which
# the entry keeps alive: tracing meets the same few types again and again.
_promoted: Final[dict[tuple[Any, ...], tuple[DType, bool, bool, Any]]] = {}
_inferred: Final[dict[tuple[Any, ...], tuple[tuple[TensorType, ...], Any]]] = {}
_MOST_KNOWN: Final = 1 << 13


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value


_MOST_AXES: Final = 64  # NumPy's limit
_MOST_BYTES: Final = 2**62  # offsets are computed in int64


def check_addressable(name: str, type_: TensorType) -> None:
    """Check that there can be a tensor of `type_`.

    Raises:
        ShapeError: it has too many axes, or is too large for any memory.
    """
    if type_.ndim > _MOST_AXES:
        raise ShapeError(
            f"{name}: the result would have {type_.ndim} axes. A tensor has at most "
            f"{_MOST_AXES}; merge some with `hf.reshape`."
        )
    total = type_.dtype.itemsize
    for n in type_.shape:
        if isinstance(n, int) and n:  # a size of 0 does not save the others' strides
            total *= n
    if total > _MOST_BYTES:
        raise ShapeError(f"{name}: the result, {type_}, is larger than any memory.")


def _by_name(name: str) -> OpDef:
    return OPERATIONS[name]


_PYTHON_TYPES: Final = {
    bool: TensorType(dtypes.bool_, (), weak=False),
    int: TensorType(dtypes.DEFAULT_INT, (), weak=True),
    float: TensorType(dtypes.DEFAULT_FLOAT, (), weak=True),
}


def as_operand(name: str, argument: int | str, arg: Any) -> Operand:
    """A user's argument as an operand: a value, or a scalar of a weak type.

    Args:
        name: The public function, for messages.
        argument: Which of its arguments: by position, or by name.
        arg: What was given.

    Raises:
        ArgumentTypeError: it is neither a tensor, nor an array, nor a number.
    """
    if isinstance(arg, Value):
        return arg
    type_ = _PYTHON_TYPES.get(type(arg))
    if type_ is not None:
        return Constant(arg, type_)
    if isinstance(arg, SymInt | SymFloat | SymBool):
        return current().value_of(arg)
    if isinstance(arg, np.ndarray | np.generic):
        return slots.from_array(arg)
    which = f"`{argument}`" if isinstance(argument, str) else f"argument {argument}"
    if isinstance(arg, complex):
        raise DTypeError(
            f"{name}: {which} is complex. Complex types are not supported: "
            "keep real and imaginary parts apart."
        )
    raise ArgumentTypeError(
        f"{name}: {which} must be a tensor or a number, and is "
        f"`{type(arg).__name__}`. Convert it with `hf.asarray`."
    )


def promoted_as(type_: TensorType) -> tuple[DType, bool]:
    """The dtype and weakness by which an operand promotes: a Python float that is a
    symbol is exact, and yet counts as one of the default dtype."""
    return (dtypes.DEFAULT_FLOAT if type_ is FLOAT_TYPE else type_.dtype), type_.weak


def strong_constant(value: Operand) -> Operand:
    """A Python number with its default dtype; anything else as it is.

    Raises:
        ArgumentRangeError: a Python integer does not fit the default dtype.
    """
    if isinstance(value, Constant) and value.type.weak:
        return convert_to(value, value.type.dtype)
    return as_default(value) if value.type is FLOAT_TYPE else value


def as_default(value: Operand, *, weak: bool = False) -> Operand:
    """A Python float that is a symbol, in the dtype of tensors made of such."""
    if value.type is not FLOAT_TYPE:
        return value
    return convert_to(value, dtypes.DEFAULT_FLOAT, weak=weak)


def in_range(value: Operand) -> Operand:
    """A number in the dtype that it has by default.

    Raises:
        ArgumentRangeError: a Python integer does not fit its dtype.
    """
    if not isinstance(value, Constant):
        return as_default(value, weak=True)
    return convert_to(value, value.type.dtype, weak=value.type.weak)


def convert_to(value: Operand, dtype: DType, *, weak: bool = False) -> Operand:
    """`value` converted to `dtype` by promotion. A constant is converted in place.

    What is converted is weak where the promoted dtype is: an integer beside a Python
    float becomes a weak float, as in JAX.

    Raises:
        ArgumentRangeError: a Python integer does not fit `dtype`.
    """
    if isinstance(value, Constant):
        return Constant(_converted(value.value, dtype), _scalar_type(dtype, weak))
    if value.type.dtype is dtype:
        return value
    params: dict[str, Any] = {"dtype": dtype}
    if weak is not value.type.weak:  # only said where the operand's type does not
        params["weak"] = weak
    [result] = bind(OPERATIONS["convert"], [value], params)
    return result


@cache
def _scalar_type(dtype: DType, weak: bool) -> TensorType:
    return TensorType(dtype, (), weak)


def _converted(value: bool | int | float, dtype: DType) -> bool | int | float:
    if dtype.is_float:
        return float(value)
    if dtype.kind == "b":
        return bool(value)
    number = int(value)
    info = dtypes.iinfo(dtype)
    if not info.min <= number <= info.max:
        raise ArgumentRangeError(
            f"the Python integer {number} does not fit {dtype.name}. "
            "Give the tensor a wider dtype, or the number as a tensor of its own."
        )
    return number
