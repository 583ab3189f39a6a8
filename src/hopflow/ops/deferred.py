"""Conditions on sizes that operations need and only a run can decide.

The trace assumes such a condition. A `require` node checks it when the program runs,
and returns the tensor that the condition is about, so that nothing that relies on the
condition runs before. `match_size` then gives the tensor the type that the condition
implies, so that a graph is well typed without the assumptions of its trace.

aligned    tensors to broadcast together
matched    axes of equal sizes
fitted     a tensor to broadcast to a shape
required   any other condition
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind
from hopflow.errors import ReadOnlyError, ShapeError
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType, common_shape, is_one, same_size
from hopflow.loop_ir.expr import Expr, Index, binary, extent, index, sub
from hopflow.loop_ir.kernels import Check, Operand, Pointwise
from hopflow.ops import batching
from hopflow.ops.messages import Message, check_error
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample, as_operand, strong_constant
from hopflow.ops.sizes import agreed, is_unbacked, less
from hopflow.symbolic.asking import implied_truth
from hopflow.symbolic.atoms import saturated
from hopflow.symbolic.boolean import SymBool, any_of, relation
from hopflow.symbolic.scalars import as_size, terms_of
from hopflow.symbolic.size import Size, free_symbols

Array = np.ndarray[Any, np.dtype[Any]]
Types = Sequence[TensorType]


# --- require --------------------------------------------------------------------------


def _require_infer(
    x: TensorType, _test: TensorType, *_sides: TensorType, **_: Any
) -> TensorType:
    return x


def _require_run(x: Array, test: Array, *sides: Array, **params: Any) -> Array:
    """`x`, if `test` holds; otherwise the program stops with an error."""
    if not np.all(test):
        raise check_error(params, values=[int(side) for side in sides])
    return x


def _require_lower(
    _types: Types, x: Operand, test: Operand, *sides: Operand, **_: Any
) -> Pointwise:
    check = Check(
        "check",
        test.type.shape,
        lambda at: test[at],
        lambda _: tuple([side[()] for side in sides]),
    )
    return Pointwise(lambda at: x[at], (check,), is_view=True)


def _require_unview(_base: Value, new: Value, *_: Argument, **__: Any) -> Value:
    return new


def _require_transpose(
    cotangents: Sequence[Any], _x: Any, *others: Any, **_: Any
) -> Sequence[Any]:
    return [cotangents[0], *[None for _ in others]]


def _require_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    test: Argument,
    *sides: Argument,
    **params: Any,
) -> Sequence[Value]:
    """Batch the check; sides that differ between elements are left out of its error."""
    kept = () if any(batched[2:]) else sides
    return bind(op, [batching.in_batch(size, batched[0], x), test, *kept], params)


require: Final = OpDef(
    name="require",
    promote=None,
    infer=_require_infer,  # T[*s], bool[*t], i64[], i64[] -> T[*s]
    run=_require_run,
    lower=_require_lower,
    unview=_require_unview,
    effects=frozenset({"trap"}),
    jvp=lambda tangents, *_, **__: [tangents[0]],
    transpose=_require_transpose,
    batch=_require_batch,
    samples=(
        Sample(("T[3]", "bool[]"), {"message": Message("not so")}, low=1.0, high=1.0),
    ),
)


def condition_operands(
    condition: bool | SymBool, message: str, *, shown: object = None, kind: str = ""
) -> tuple[list[Argument], dict[str, Any]]:
    """Return the operands and params of a node that checks a condition on sizes.

    Args:
        message: The beginning of the error.
        shown: The comparison that the error prints, if not the condition itself.
        kind: "shape", or "" for a promise of the user.
    """
    operands = [strong_constant(as_operand("check", "condition", condition))]
    params: dict[str, Any] = {"message": Message(message)}
    if kind:
        params["kind"] = kind
    shown = condition if shown is None else shown
    if isinstance(shown, SymBool) and shown.is_integral:
        left, _, right = shown.sides
        numbers = [as_size(saturated(side)) for side in (left, right)]
        sides = [as_operand("check", "side", side) for side in numbers]
        operands += map(strong_constant, sides)
        env = shown.env
        text = str(shown) if env is None else env.describe(shown)
        params["condition"] = Message(text)
        if env is not None and (origins := env.origins(shown)):
            params["where"] = Message(origins)
    return operands, params


# --- match_size -----------------------------------------------------------------------


def _match_infer(
    x: TensorType, *, axis: int, size: Size, repeats: bool = False
) -> TensorType:
    n = x.shape[axis]
    is_known = all(s.hint is not None for s in free_symbols(n, size))
    if is_known and not (n == size or (repeats and n == 1)):
        raise ShapeError(f"match_size: axis {axis} of {x} has not {size} elements.")
    return x.with_shape([*x.shape[:axis], size, *x.shape[axis + 1 :]])


def _match_run(x: Array, *, axis: int, size: int, repeats: bool = False) -> Array:
    """`x`, whose axis has `size` elements, or 1 that is repeated."""
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return np.broadcast_to(x, shape) if repeats else x.reshape(shape)


def _match_lower(
    _types: Types, x: Operand, *, axis: int, size: Size, repeats: bool = False
) -> Pointwise:
    n = x.type.shape[axis]

    def element(at: Index) -> Expr:
        i = at[axis]
        if is_one(n):
            i = index(0)
        elif repeats and not same_size(n, size):
            i = binary("max", binary("min", i, sub(extent(n), index(1))), index(0))
        return x[(*at[:axis], i, *at[axis + 1 :])]

    return Pointwise(element, is_view=True)


def _match_unview(
    base: Value, new: Value, *, axis: int, repeats: bool = False, **_: Any
) -> Value:
    if repeats:
        raise ReadOnlyError(
            f"cannot write into a tensor broadcast along axis {axis}: several of its "
            "elements may be one. Write into a copy of it: `x = x.copy()`."
        )
    return batching.op_of("match_size", new, axis=axis, size=base.shape[axis])


def _match_transpose(
    ct: Any, x: Any, *, axis: int, size: Size, repeats: bool = False
) -> Value:
    n = x.shape[axis]
    if not repeats:
        return batching.op_of("match_size", ct, axis=axis, size=n)
    # Cotangents of repeated elements are summed into one; others go to their own.
    along = batching.op_of("iota", shape=(size,), axis=0, dtype=dtypes.int64)
    at = OPERATIONS["minimum"](along, n - 1)
    zero = Constant(0.0, TensorType(x.dtype))
    rest = [m for a, m in enumerate(ct.shape) if a != axis]
    base = batching.op_of("full", zero, shape=(n, *rest))
    order = (axis, *(a for a in range(ct.ndim) if a != axis))
    summed = batching.op_of(
        "scatter_drop",
        base,
        batching.op_of("transpose", ct, axes=order),
        at,
        axes=(0,),
        batch=0,
        starts=(0,) * len(rest),
        steps=(1,) * len(rest),
        combine="add",
    )
    back = tuple(sorted(range(ct.ndim), key=order.__getitem__))
    return batching.op_of("transpose", summed, axes=back)


match_size: Final = OpDef(
    name="match_size",
    promote=None,
    infer=_match_infer,  # T[*s, n, *t] -> T[*s, size, *t]
    run=_match_run,
    lower=_match_lower,
    unview=_match_unview,
    jvp="linear",
    transpose=(_match_transpose,),
    is_cheap=True,
    batch=batching.per_example(axis=batching.of_axis),
    samples=(
        Sample(("T[2, 3]",), {"axis": 1, "size": 3}, dtypes.ALL),
        Sample(("T[2, 1]",), {"axis": 1, "size": 4, "repeats": True}),
        Sample(("T[2, 1]",), {"axis": 1, "size": 0, "repeats": True}),
    ),
)


# --- checks for operations ------------------------------------------------------------


def _match(
    name: str, x: Any, axis: int, size: Size, *, repeats: bool, remedy: str = ""
) -> Value:
    """Return `x` with `size` elements along an axis, which the run checks.

    Raises:
        ShapeError: facts imply that the sizes differ.
    """
    n = x.shape[axis]
    equal = relation("==", terms_of(n - size))
    repeatable: bool | SymBool = relation("==", terms_of(n - 1)) if repeats else False
    if implied_truth(repeatable) is False:
        repeatable, repeats = False, False
    if implied_truth(equal) is False:
        equal, shown = repeatable, repeatable
    else:
        shown = equal
    condition = any_of(equal, repeatable)
    must = "agree, or the one be 1" if repeats else "be equal"
    text = f"{name}: the sizes along axis {axis - x.ndim} must {must}{remedy}"
    if not isinstance(condition, SymBool):
        raise ShapeError(f"{text}, and are {n} and {size}.")
    checked = required(x, condition, text, shown=shown)
    repeated = {"repeats": True} if repeats else {}
    return batching.op_of("match_size", checked, axis=axis, size=size, **repeated)


def resized(name: str, x: Any, axis: int, size: Size) -> Any:
    """Return `x`, whose axis must have `size` elements; the run checks it if need be.

    Raises:
        ShapeError: facts imply that it has not.
    """
    if same_size(x.shape[axis], size):
        return x
    return _match(name, x, axis, size, repeats=False)


def with_elements(x: Any, n: Size, size: Size, message: str) -> Any:
    """Return `x`, whose axis of size `n` must have `size` elements or more. The run
    checks this if a size is unbacked; otherwise nothing is checked.

    Args:
        message: The beginning of the error.

    Raises:
        ShapeError: a size is unbacked, and facts imply that there are fewer.
    """
    if (is_unbacked(n) or is_unbacked(size)) and less(n, size) is not False:
        return required(x, size <= n, message)
    return x


def required(
    x: Any, condition: bool | SymBool, message: str, *, shown: object = None
) -> Any:
    """Return `x`, for uses that rely on a condition that the run checks.

    Args:
        message: The beginning of the error.
        shown: The comparison that the error prints, if not the condition itself.

    Raises:
        ShapeError: facts imply that it does not hold.
    """
    if not isinstance(condition, SymBool):
        if not condition:
            raise ShapeError(f"{message}, and it is known that this does not hold.")
        return x
    env = condition.env
    assert env is not None
    operands, params = condition_operands(condition, message, shown=shown, kind="shape")
    env.assume(condition)
    [checked] = bind(require, [x, *operands], params)
    return checked


def aligned(name: str, operands: Sequence[Any], core: int = 0) -> list[Any]:
    """Return tensors whose axes, except the last `core`, the run checks to broadcast.

    An unbacked size next to one that is not 1 may be 1 in the run: the tensor is then
    repeated. Two sizes that may both be 1 must be equal.

    Raises:
        ShapeError: facts imply that they do not broadcast.
    """
    tensors = list(operands)
    if common_shape([o.type.shape for o in tensors]) is not None:
        return tensors
    if all([o.type.is_static for o in tensors]):
        return tensors
    ndim = max([o.type.ndim for o in tensors]) - core
    for axis in range(1 + core, ndim + core + 1):  # counted from the last
        axes = [(i, o.type.ndim - axis) for i, o in enumerate(tensors)]
        places = [(i, a) for i, a in axes if a >= 0]
        sizes = [tensors[i].type.shape[a] for i, a in places]
        common = _common(sizes)
        if common is None:
            continue
        target, repeats = common
        for i, a in places:
            n = tensors[i].type.shape[a]
            if not (is_one(n) or same_size(n, target)):
                remedy = "" if repeats else _REMEDY
                tensors[i] = _match(
                    name, tensors[i], a, target, repeats=repeats, remedy=remedy
                )
    return tensors


_REMEDY: Final = (
    ", for neither of two sizes that only the run knows is taken to be 1 (where one "
    "may be, use `hf.broadcast_to(x, y.shape)`)"
)


def _common(sizes: Sequence[Size]) -> tuple[Size, bool] | None:
    """Return the size that sizes broadcast to, and whether unbacked ones may repeat.

    Return None if they are known to agree, or if guards on backed sizes decide.
    """
    distinct: list[Size] = []
    for n in sizes:
        if not is_one(n) and not any(same_size(n, m) for m in distinct):
            distinct.append(n)
    unbacked = [n for n in distinct if is_unbacked(n)]
    if not unbacked or len(distinct) == 1:
        return None
    backed: Size = 1
    for n in distinct:
        if not is_unbacked(n):
            both = agreed(backed, n)
            if both is None:
                return None
            backed = both
    if backed != 1:  # a guard, if it is symbolic
        return backed, True
    large = [
        n for n in unbacked if implied_truth(relation("!=", terms_of(n - 1))) is True
    ]
    if large:
        return large[0], True
    return (unbacked[0], False) if len(unbacked) > 1 else None


def matched(
    name: str, tensors: Sequence[Any], axes: Sequence[int], size: Size | None = None
) -> list[Any]:
    """Return tensors, each with the same size along its axis, as the run checks for
    unbacked sizes. Whether backed sizes agree is left to the caller.

    Args:
        size: The required size; None: any.

    Raises:
        ShapeError: facts imply that unbacked sizes differ.
    """
    sizes = [t.type.shape[a] for t, a in zip(tensors, axes, strict=True)]
    if not any(map(is_unbacked, sizes)) and (size is None or not is_unbacked(size)):
        return list(tensors)
    backed = [n for n in sizes if not is_unbacked(n)]
    target = size if size is not None else (*backed, *sizes)[0]
    return [
        t
        if same_size(n, target) or not (is_unbacked(n) or is_unbacked(target))
        else _match(name, t, a, target, repeats=False)
        for t, a, n in zip(tensors, axes, sizes, strict=True)
    ]


def fitted(name: str, x: Any, shape: Shape) -> Any:
    """Return `x` broadcast to unbacked sizes of `shape`: the run checks that sizes are
    equal, or repeats an axis of size 1.

    Raises:
        ShapeError: facts imply that they differ.
    """
    extra = len(shape) - x.ndim
    for axis, size in enumerate(shape[extra:] if extra >= 0 else ()):
        n = x.shape[axis]
        if (is_unbacked(n) or is_unbacked(size)) and not (
            is_one(n) or same_size(n, size)
        ):
            x = _match(name, x, axis, size, repeats=True)
    return x
