"""`OpDef`: the record of an operation with all its rules, and their common driver."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand, Value, bind, current, slots
from hopflow.dtypes import DType
from hopflow.entries import mark_entry, process_error
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import FLOAT_TYPE, SYMBOL_TYPE, TensorType
from hopflow.loop_ir.kernels import Lowered
from hopflow.ops.sizes import less
from hopflow.symbolic.asking import guarded_truth
from hopflow.symbolic.boolean import SymBool, all_of
from hopflow.symbolic.size import Size, SymFloat, SymInt, free_symbols

Infer: TypeAlias = Callable[..., "TensorType | tuple[TensorType, ...]"]
Promotion: TypeAlias = Callable[[str, Sequence[tuple[DType, bool]]], tuple[DType, bool]]
"""(the operation's name, the operands' (dtype, weak)) -> (dtype, weak) to which all
operands are converted."""


Rules: TypeAlias = (
    tuple[Callable[..., Any] | None, ...] | Callable[..., Any] | Literal["linear"]
)
"""A rule for each operand, or one for all; "linear": the operation is its own rule."""


Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Operands and params to test an operation with.

    operands   types as text, where the dtype letter T stands for each of `dtypes`:
               ("T[3, 4]", "T[4]")
    params     the static parameters
    dtypes     the dtypes that T stands for
    low, high  the range from which values are drawn
    """

    operands: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[DType, ...] = dtypes.FLOATS
    low: float = -3.0
    high: float = 3.0


HALVES: Final = (dtypes.float16, dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Reference:
    """The functions of other libraries that compute the same as an operation.

    Tests compare an operation with them, and NumPy's ufunc on a tensor calls the
    operation. A function is named in full, such as "scipy.special.ndtri", and its user
    imports it.

    numpy       the function of NumPy or of `scipy.special`; None: there is none
    jax         the function of JAX; None: there is none
    jax_ulps    the tolerated difference to JAX's values and derivatives, in units in
                the last place: some are less exact than their dtype allows
    not_in_jax  the dtypes for which JAX has no such function, or a less exact one
    """

    numpy: str | None
    jax: str | None
    jax_ulps: int = 4
    not_in_jax: tuple[DType, ...] = ()


OPERATIONS: Final[dict[str, "OpDef"]] = {}
"""All operations by name, for `parse` and for tests of all operations."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OpDef:
    """An operation on tensors, declared once.

    name      unique
    promote   returns the dtype to which operands are converted; None: they keep theirs
    infer     (*types, **params) -> the result's type, or a tuple of types; raises a
              `HopflowError` if the operands do not fit
    run       (*arrays, **params) -> the result computed by NumPy: an array, or a tuple
              of arrays, of exactly the inferred dtype and shape
    lower     (types, *operands, **params) -> kernels, one for each result; `types` are
              the results' (see `loop_ir.kernels`)
    unview    None, or: the result is a view of the first operand, and this returns that
              operand with a new value of the view written into it:
              (base, new, *other_operands, **params) -> base, in terms of operations
    effects   "trap" (may stop the program), "random", "callback" (calls Python, each
              time and in order): they keep an operation in its branch
    node_effects   None, or: (params) -> further effects
    jvp       for each operand (t, out, *operands, **params) -> the contribution of its
              tangent `t` to the result's, broadcast as the result is; None if it is
              zero. Or, for several results or any number of operands, a function
              (tangents, results, *operands, **params) -> tangents of the results.
              A tangent may be a `Zero`, which is no `Value`. Or "linear": the operation
              is linear in all its float operands together, so it is its own JVP. None:
              there is no derivative
    transpose   of a linear operation, for each operand (ct, *operands, **params) -> the
              operand's cotangent, from the result's; the caller sums it over broadcast
              axes. The operand itself is then an `Unknown`. Or a function (cotangents
              of the results, *operands, **params) -> one for each operand; None: zero

    To both kinds of rules constants are Python numbers if the operation promotes;
    otherwise they are passed unchanged, with their types.

    compares  whether it compares numbers: integers of any size are then allowed next to
              any integer dtype
    keeps_sizes   whether sizes in params stay expressions where facts determine them:
              the check of such a fact must compute what it checks
    align     None, or: (name, operands) -> operands of shapes that broadcast, checked
              by the run where only it can compare sizes
    is_cheap  whether a derivative may recompute the result instead of storing it
    compose   None, or: (insert, op, *operands, **params) -> the result in terms of
              other operations, which `insert(op, *operands, **params)` adds to the
              graph that is compiled; or None, to lower it as it is
    is_internal   only the compiler makes it, in `compose`: no program outside of the
              compiler has it, so it has no other rules and no samples
    batch     its batch rule, see `ops.batching`. None: it has no operands, or it is
              `item`, see `batching.numbers`
    samples   operands and params for the tests of all operations
    ulps      the tolerated difference between compiled results and those of `run`, in
              units in the last place
    reference   None, or the same function in other libraries
    version   the version of its schema: it grows with each change that a saved program
              would notice
    upgrades  an earlier version -> (params of its nodes) -> those of the next version
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
    compares: bool = False
    keeps_sizes: bool = False
    align: Callable[[str, Sequence[Operand]], list[Operand]] | None = None
    is_cheap: bool = False
    compose: Callable[..., Value | None] | None = None
    batch: Callable[..., Sequence[Any]] | None = None
    is_internal: bool = False
    effects: frozenset[str] = frozenset()
    node_effects: Callable[[dict[str, Any]], frozenset[str]] | None = None
    ulps: int = 0
    reference: Reference | None = None
    version: int = 1
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPERATIONS:
            raise ValueError(f"operation `{self.name}` is declared twice")
        if not self.is_internal:
            OPERATIONS[self.name] = self
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__doc__", self.run.__doc__)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)

    @mark_entry
    def __call__(self, *args: Any, **params: Any) -> Any:
        """Apply the operation to tensors and Python scalars.

        Raises:
            ArgumentTypeError: an operand is not a tensor, an array or a number.
            DTypeError: the operands' dtypes are not for this operation.
            ShapeError: their shapes do not fit.
        """
        try:
            if slots.record is not None:
                node = slots.record(self, args, params)
                if node is not None:
                    return node
            operands = self.operands(args)
            results = bind(self, operands, params)
            return results[0] if len(results) == 1 else results
        except Exception as error:
            process_error(error, self, args, params)
            raise

    def operands(self, args: Sequence[Any]) -> list[Operand]:
        """Return `args` as operands, of one promoted dtype if `promote` is not None."""
        values = [as_operand(self.name, i, a) for i, a in enumerate(args)]
        if self.promote is None:
            return [strong_constant(v) for v in values]
        if not values:
            raise ArgumentTypeError(f"{self.name}: takes an operand, and has none.")
        types = [v.type for v in values]
        key = (self.name, *map(id, types))
        entry = _promoted.get(key)
        if entry is None:
            dtype, weak = self.promote(self.name, [promoted_as(t) for t in types])
            alike = all(t.dtype is dtype and not t.weak for t in types)
            is_static = all(t.is_static for t in types)
            entry = dtype, weak, alike, is_static, types
            _remember(_promoted, key, entry)
        dtype, weak, alike, is_static, _ = entry
        if not alike:
            if self.compares and dtype.is_integer:
                values, dtype = _comparable(values, dtype)
            values = [convert_to(v, dtype, weak=weak) for v in values]
        if not is_static and self.align is not None:
            values = self.align(self.name, values)
        return values

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        """Return the results of `infer`, always as a tuple.

        Raises:
            HopflowError: `infer` raises it, or a result is too large for any memory.
        """
        key = () if params else (self.name, *map(id, types))
        entry = _inferred.get(key)
        if entry is not None:
            return entry[0]
        result = self.infer(*types, **params)
        if not isinstance(result, tuple):
            result = (result,)
        for type_ in result:
            check_addressable(self.name, type_)
        # Questions about symbols may be recorded, so they must be asked each time.
        if key and all(t.is_static for t in types):
            _remember(_inferred, key, (result, tuple(types)))
        return result


# Memo tables by the operation and the ids of the operands' types, which entries keep
# alive: tracing meets the same few types repeatedly.
_promoted: Final[dict[tuple[Any, ...], tuple[DType, bool, bool, bool, Any]]] = {}
_inferred: Final[dict[tuple[Any, ...], tuple[tuple[TensorType, ...], Any]]] = {}
_MAX_MEMO: Final = 1 << 13


def _remember(memo: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memo) >= _MAX_MEMO:
        memo.clear()
    memo[key] = value


_MOST_AXES: Final = 64  # NumPy's limit
MOST_BYTES: Final = 2**62  # offsets are computed in int64


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
        if isinstance(n, int) and n:  # strides must fit even if another size is 0
            total *= n
    if total > MOST_BYTES:
        raise ShapeError(f"{name}: the result, {type_}, is larger than any memory.")


def _by_name(name: str) -> OpDef:
    return OPERATIONS[name]


_PYTHON_TYPES: Final = {
    bool: TensorType(dtypes.bool_, (), weak=False),
    int: TensorType(dtypes.DEFAULT_INT, (), weak=True),
    float: TensorType(dtypes.DEFAULT_FLOAT, (), weak=True),
}
_WHOLE: Final = {
    d.dtype: TensorType(d, (), weak=False) for d in (dtypes.bool_, *dtypes.INTEGERS)
}
"""The types of NumPy's scalars that are constants of a program: masks, shifts and
divisors, of which code for one value is far better. Floats, as rates and time steps,
change from call to call, and are operands: another value needs no other kernel."""


def as_operand(name: str, argument: int | str, arg: Any) -> Operand:
    """Return a user's argument as an operand: a value, or a weakly typed scalar.

    Args:
        name: The public function, for messages.
        argument: The position or name of the argument, for messages.
        arg: The argument.

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
    if isinstance(arg, np.generic) and arg.dtype in _WHOLE:
        return Constant(arg.item(), _WHOLE[arg.dtype])
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
    """Return the dtype and weakness with which an operand promotes: an exact symbolic
    Python float promotes as the default dtype."""
    return (dtypes.DEFAULT_FLOAT if type_ is FLOAT_TYPE else type_.dtype), type_.weak


def strong_constant(value: Operand) -> Operand:
    """Return a Python number in its default dtype; other operands unchanged.

    Raises:
        ArgumentRangeError: a Python integer does not fit the default dtype.
    """
    if isinstance(value, Constant) and value.type.weak:
        return convert_to(value, value.type.dtype)
    return as_default(value) if value.type is FLOAT_TYPE else value


def as_default(value: Operand, *, weak: bool = False) -> Operand:
    """Return a symbolic Python float in the default dtype; other operands unchanged."""
    if value.type is not FLOAT_TYPE:
        return value
    return convert_to(value, dtypes.DEFAULT_FLOAT, weak=weak)


def in_range(value: Operand) -> Operand:
    """Return a number in its default dtype.

    Raises:
        ArgumentRangeError: a Python integer does not fit its dtype.
    """
    if not isinstance(value, Constant):
        return as_default(value, weak=True)
    return convert_to(value, value.type.dtype, weak=value.type.weak)


def convert_to(value: Operand, dtype: DType, *, weak: bool = False) -> Operand:
    """Return `value` converted to `dtype` by promotion; a constant stays a constant.

    The result is weak if the promoted dtype is: an integer next to a Python float
    becomes a weak float, as in JAX.

    Raises:
        ArgumentRangeError: a Python integer does not fit `dtype`. A symbolic one is
            guarded; if it is unbacked, the run checks it and raises a CheckError.
    """
    if isinstance(value, Constant):
        return Constant(_converted(value.value, dtype), _scalar_type(dtype, weak))
    # A symbolic Python float is weak and exact, and stays exact as a strong float.
    if value.type.dtype is dtype and (weak or value.type is not FLOAT_TYPE):
        return value
    if dtype.is_integer and (number := _number_in(value)) is not None:
        _check_fits(number, dtype)
    params: dict[str, Any] = {"dtype": dtype}
    if weak is not value.type.weak:  # the default is the operand's weakness
        params["weak"] = weak
    [result] = bind(OPERATIONS["convert"], [value], params)
    return result


def _check_fits(number: Size, dtype: DType) -> None:
    """Check that an integer dtype holds a symbolic number.

    Raises:
        ArgumentRangeError: the number of this call does not fit.
        CheckError: it never does.
    """
    info = dtypes.iinfo(dtype)
    inside: bool | SymBool
    if all(s.env is None for s in free_symbols(number)):
        # Without an environment only ranges decide; the graph's creator guarantees the
        # rest.
        inside = not (less(number, info.min) or less(info.max, number))
    else:
        inside = all_of(number >= info.min, number <= info.max)
    if isinstance(inside, SymBool) and not _is_backed(number):
        current().expect(inside, f"the Python integer {number} must fit {dtype.name}")
    elif not inside:
        hint = number.hint if isinstance(number, SymInt) else number
        raise _out_of_range(number if hint is None else hint, dtype)


def check_float_fits(number: SymFloat, dtype: DType) -> None:
    """Check that an integer dtype holds a symbolic float, truncated, with a guard. An
    unbacked one is converted as an element of a tensor is.

    Raises:
        ArgumentRangeError: the truncated float does not fit, or it is NaN.
    """
    if not dtype.is_integer:
        return
    info = dtypes.iinfo(dtype)
    low, high = float(info.min) - 1, float(info.max) + 1
    # Floats beyond 2**53 are integers, and `info.min` is a float exactly.
    above = number >= info.min if low == info.min else number > low
    if guarded_truth(all_of(above, number < high)) is False:
        raise _out_of_range(number.hint, dtype)


def _is_backed(number: Size) -> bool:
    """Return True if all symbols have hints and an environment that can guard them."""
    symbols = free_symbols(number)
    return all(s.hint is not None and s.env is not None for s in symbols)


def _comparable(values: Sequence[Operand], dtype: DType) -> tuple[list[Operand], DType]:
    """Return operands to compare, in a dtype that also holds Python's integers.

    An integer out of the range of `dtype` is replaced by an infinity.
    """
    beyond = [_beyond(value, dtype) for value in values]
    if sum(map(bool, beyond)) == 1:
        pairs = zip(values, beyond, strict=True)
        return (
            [_infinity(sign) if sign else value for value, sign in pairs],
            dtypes.DEFAULT_FLOAT,
        )
    numbers = [_number_in(value) for value in values]
    if any(n is not None and not _is_backed(n) for n in numbers) and dtype.bits < 64:
        return list(values), dtypes.int64
    return list(values), dtype


def _number_in(value: Operand) -> Size | None:
    """Return the symbolic integer that an operand is; None if it is none."""
    if isinstance(value, Constant) or value.type is not SYMBOL_TYPE:
        return None
    return current().number_held(value)


def _infinity(sign: int) -> Operand:
    return Constant(sign * inf, _scalar_type(dtypes.DEFAULT_FLOAT, True))


def _beyond(value: Operand, dtype: DType) -> int:
    """Return 1 or -1 for a Python integer above or below a dtype's range, else 0."""
    number: Size | float | None = None
    if isinstance(value, Constant):
        number = value.value
    if value.type.dtype is not dtype:  # a symbolic operand is an int64
        held = _number_in(value)
        number = held if held is not None and _is_backed(held) else number
    if number is None:
        return 0
    info = dtypes.iinfo(dtype)
    return int(bool(number > info.max)) - int(bool(number < info.min))


@cache
def _scalar_type(dtype: DType, weak: bool) -> TensorType:
    return TensorType(dtype, (), weak)


def _converted(value: bool | int | float, dtype: DType) -> bool | int | float:
    if dtype.is_float:
        try:
            return float(value)
        except OverflowError:
            raise _out_of_range(value, dtype) from None
    if dtype.kind == "b":
        return bool(value)
    try:
        number = int(value)
    except (ValueError, OverflowError):  # NaN and the infinities
        raise _out_of_range(value, dtype) from None
    info = dtypes.iinfo(dtype)
    if not info.min <= number <= info.max:
        raise _out_of_range(number, dtype)
    return number


def _out_of_range(number: object, dtype: DType) -> ArgumentRangeError:
    kind = "float" if isinstance(number, float) else "integer"
    return ArgumentRangeError(
        f"the Python {kind} {number} does not fit {dtype.name}. "
        "Give the tensor a wider dtype, or the number as a tensor of its own."
    )
