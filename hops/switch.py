"""`switch`: run one of several subgraphs, chosen by an integer. All its rules."""

from collections.abc import Callable, Sequence
from typing import Any, final

from hopflow import dtypes
from hopflow.bind import Operand
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, check_scalar
from hopflow.hops.branches import Branching
from hopflow.loop_ir.kernels import Branch
from hopflow.ops.check import check
from hopflow.ops.elementwise import clip, greater_equal, less, logical_and, minimum
from hopflow.ops.opdef import as_operand, convert_to
from hopflow.ops.rules import as_flag
from hopflow.symbolic.asking import implied_truth
from hopflow.symbolic.size import Size, SymInt


@final
class Switch(Branching):
    """`switch(index; symbols; operands; captures; branches) -> results`

    index     i64[] in range
    branches Graphs, (*symbols, *operands, *captures) -> results, of equal types
    """

    name = "switch"
    selector_role = "index"

    def prepare(self, index: Any, branches: Any, operands: Any, checked: Any) -> Call:
        if not isinstance(branches, Sequence):
            raise ArgumentTypeError(
                f"{self.name}: `branches` must be a sequence of functions, and is "
                f"`{type(branches).__name__}`."
            )
        if not branches:
            raise ArgumentValueError(
                f"{self.name}: `branches` must have a function, and is empty."
            )
        is_checked, count = as_flag(self.name, "check", checked), len(branches)
        if isinstance(index, SymInt):
            if is_checked:
                _check_range(index, count)
            index = _known_branch(index, count)
        selector = as_operand(self.name, 0, index)
        check_scalar(self.name, "`index`", selector.type, "iu")
        if is_checked:
            _check_range(selector, count)
        roles = [f"branches[{i}]" for i in range(len(branches))]
        functions = {r: (r, b) for r, b in zip(roles, branches, strict=True)}
        return self.prepare_branches(_clamped(selector, count), functions, operands)

    def pack(self, functions: dict[str, Any]) -> dict[str, Any]:
        return {"branches": tuple(functions.values())}

    # --- rules ---

    def debug(self, index: Any, *operands: Any, branches: Any) -> Any:
        return branches[int(getattr(index, "value", index))](*operands)

    def infer(
        self, index: TensorType, *inputs: TensorType, branches: tuple[Graph, ...]
    ) -> tuple[TensorType, ...]:
        check_scalar(self.name, "`index`", index, "iu")
        return self.branch_types(branches)

    def lower(
        self,
        types: tuple[TensorType, ...],
        index: Any,
        *inputs: Any,
        branches: tuple[Graph, ...],
    ) -> Branch:
        return Branch(index, branches, inputs)


SWITCH = Switch()


def _clamped(index: Operand, count: int) -> Operand:
    """Return an index clamped to the range, as i64[]."""
    if isinstance(index, Constant):
        number = min(max(int(index.value), 0), count - 1)
        return Constant(number, TensorType(dtypes.int64))
    if index.type.dtype is dtypes.uint64:  # it may exceed int64
        index = minimum(index, count - 1)
    wide = convert_to(index, dtypes.int64)
    clamped: Operand = clip(wide, 0, count - 1)
    return clamped


def _check_range(index: Operand | SymInt, count: int) -> None:
    """Check that a branch of this number exists: now, or when the program runs.

    Raises:
        CheckError: it does not.
    """
    message = f"switch: `index` must be from 0 to {count - 1}, for so many branches"
    if isinstance(index, SymInt):
        check(index >= 0, message)
        check(index < count, message)
    elif isinstance(index, Constant):
        check(0 <= index.value < count, message)
    else:
        check(logical_and(greater_equal(index, 0), less(index, count)), message)


def _known_branch(index: SymInt, count: int) -> Size:
    """Return the number of the branch that runs if ranges determine it, else the
    index."""
    for k in range(count):
        below = k == 0 or implied_truth(index >= k)
        above = k == count - 1 or implied_truth(index <= k)
        if below and above:
            return k
    return index


def switch(
    index: Any,
    branches: Sequence[Callable[..., Any]],
    operands: Any = (),
    *,
    check: bool = False,
) -> Any:
    """Call `branches[index](*operands)`, with `index` clamped to the range.

    Args:
        index: An integer, or an integer scalar. An index below 0 selects the first
            branch, one past the last branch the last; with `check` it is an error.
        branches: One or more functions, called with the operands: spread if these are a
            tuple, else as one argument. They return any pytree, all of the same
            structure, shapes and dtypes.
        operands: A pytree of tensors and numbers.
        check: Whether a branch of this number must exist.

    Returns:
        The result of the branch.

    Raises:
        CheckError: with `check`: no branch has this number. If only a run can tell, the
            run raises it.
        ArgumentValueError: `branches` is empty.
        ArgumentTypeError: a branch is not a function, or an operand not a tensor or
            number.
        PredicateError: `index` is not an integer scalar.
        StructureError, BranchTypeError: the branches' results differ.
        ResultTypeError: a branch returns something other than tensors and numbers.

    >>> hf.switch(2, [lambda x: x, lambda x: x + 10, lambda x: x * x], (hf.asarray(3),))
    Tensor(9, i64[])
    """
    return SWITCH(index, branches, operands, check)
