"""`checkpoint`: a function for which a policy chooses the residuals of reverse mode."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, final

from hopflow.autograd import region_vjp
from hopflow.autograd.partition import Policy
from hopflow.bind import Operand, Value, recordable
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Node
from hopflow.hops.base import Call
from hopflow.hops.branches import Calling
from hopflow.hops.invoke_subgraph import Numbers, call_of
from hopflow.hops.subgraphs import require_callable
from hopflow.ops.matmul import matmul_op
from hopflow.trace.rollback import unchanged_on_error
from hopflow.zeros import LinearMap, Tangent


def _has_dot(node: Node) -> bool:
    """Return True if a node is a matrix product, or its graphs contain one."""
    inner = (n for graph in node.graphs.values() for n in graph.nodes)
    return node.op is matmul_op or any(map(_has_dot, inner))


POLICIES: Final[dict[str, Policy]] = {
    "nothing": lambda node: False,
    "dots": _has_dot,
    "everything": lambda node: True,
}


@final
class CheckpointCall(Calling):
    """`checkpoint(symbols; operands; captures; body, policy) -> results`

    policy   the nodes of the body whose results are saved: a name, or a function
    """

    name = "checkpoint"

    def prepare(
        self,
        f: Callable[..., Any],
        policy: str | Policy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constants: bool,
    ) -> Call:
        call, _ = call_of(self.name, f, args, kwargs, constants=constants)
        call.params["policy"] = policy
        return call

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        if self.of_fixed_sizes(operands, params) is not None:
            linearized: tuple[Sequence[Value], LinearMap]
            linearized = super().linearize_rule(operands, tangents, params)
            return linearized
        policy = params["policy"]
        keeps = POLICIES[policy] if isinstance(policy, str) else policy
        return region_vjp.linearize(self, operands, tangents, params, keeps)


CHECKPOINT = CheckpointCall()


def checkpoint(
    f: Callable[..., Any], *, policy: str | Policy = "nothing"
) -> Callable[..., Any]:
    """Return `f`, for which reverse mode saves few residuals and recomputes the others.

    The results are those of `f`, which is traced like the functions of operators: its
    arguments other than tensors and numbers are constants, and so are numbers whose
    values `f` needs (`if n == 0`, `range(n)`).

    Args:
        f: A function of pytrees. It may read tensors of enclosing functions; these are
            saved in any case, as the arguments are.
        policy: The results to save. "nothing"; "dots": matrix products, and results of
            operators that compute them; "everything" that the derivative reads; or a
            function from a node of the graph (`node.op.name`, `node.results[0].type`)
            to whether its results are saved, which is called for the nodes inside
            operators too.

    Returns:
        A function that is called as `f` is.

    Raises:
        ArgumentTypeError: `f` is not a function, or `policy` is neither a str nor a
            function.
        ArgumentValueError: no policy has this name.

    >>> f = hf.checkpoint(lambda x: hf.sin(hf.sin(x)))
    >>> hf.grad(f)(0.0)
    Tensor(1., f32[])
    """
    require_callable("checkpoint", "f", f)
    if isinstance(policy, str) and policy not in POLICIES:
        raise ArgumentValueError(
            f"checkpoint: `policy` must be one of {', '.join(map(repr, POLICIES))} or "
            f"a function of a node, and is {policy!r}."
        )
    if not (isinstance(policy, str) or callable(policy)):
        raise ArgumentTypeError(
            f"checkpoint: `policy` must be a str or a function of a node, and is "
            f"`{type(policy).__name__}`."
        )

    numbers = Numbers()

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        def run(constants: bool) -> Any:
            with unchanged_on_error():
                return CHECKPOINT(f, policy, args, kwargs, constants)

        return numbers.call((args, kwargs), run)

    return recordable(call, transform=("checkpoint", f, {"policy": policy}))
