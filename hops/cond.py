"""`cond`: run one of two subgraphs, chosen by a boolean scalar.

`hops.branches.Branching` is shared with `switch`: tracing, types, writes and the
signature, from which derivatives and batching are derived as for every operator.
"""

from collections.abc import Callable
from typing import Any, final

from hopflow.graph.core import Graph
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, check_scalar, truth
from hopflow.hops.branches import Branching
from hopflow.loop_ir.kernels import Branch
from hopflow.ops.opdef import as_operand
from hopflow.symbolic.asking import implied_truth
from hopflow.symbolic.boolean import SymBool


@final
class Cond(Branching):
    """`cond(pred; symbols; operands; captures; then, else_) -> results`

    pred    bool[]
    then    Graph, (*symbols, *operands, *captures) -> results
    else_   Graph, with the same inputs, and results of the same types
    """

    name = "cond"
    selector_role = "predicate"

    def prepare(self, pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Call:
        if isinstance(pred, SymBool) and (value := implied_truth(pred)) is not None:
            pred = value
        selector = as_operand(self.name, 0, pred)
        check_scalar(self.name, "`pred`", selector.type, "b")
        branches = {"then": ("true_fn", true_fn), "else_": ("false_fn", false_fn)}
        return self.prepare_branches(selector, branches, operands)

    # --- rules ---

    def debug(self, pred: Any, *operands: Any, then: Any, else_: Any) -> Any:
        return then(*operands) if truth(pred) else else_(*operands)

    def infer(
        self, pred: TensorType, *inputs: TensorType, then: Graph, else_: Graph
    ) -> tuple[TensorType, ...]:
        check_scalar(self.name, "`pred`", pred, "b")
        return self.branch_types((then, else_))

    def lower(
        self,
        types: tuple[TensorType, ...],
        pred: Any,
        *inputs: Any,
        then: Graph,
        else_: Graph,
    ) -> Branch:
        return Branch(pred, (else_, then), inputs)  # False is index 0


COND = Cond()


def cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Any = (),
) -> Any:
    """Call `true_fn(*operands)` if `pred` is True, else `false_fn(*operands)`.

    Args:
        pred: bool[]. If it is a Python bool the other function is not called at all.
        true_fn, false_fn: Called with the operands: spread if they are a tuple, else as
            one argument. They may read and write tensors of enclosing functions, and
            return any pytree; both the same structure, ranks and dtypes (a Python
            number takes the dtype that the other branch returns). Where the shapes
            differ in a size, the result has a symbolic size that each run determines.
        operands: A pytree of tensors and numbers.

    Returns:
        The result of the function that runs.

    Raises:
        ArgumentTypeError: an operand is not a tensor or number, or a branch not a
            function.
        PredicateError: `pred` is not a bool scalar.
        StructureError, BranchTypeError: the branches' results differ.
        ResultTypeError: a branch returns something other than tensors and numbers.

    >>> x = hf.asarray(-2.0)
    >>> hf.cond(x > 0, lambda x: x, lambda x: -x, (x,))
    Tensor(2., f32[])
    """
    return COND(pred, true_fn, false_fn, operands)
