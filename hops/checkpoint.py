"""`checkpoint`: a function of which reverse mode keeps what a policy says."""

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
    """Whether a node is a product of matrices, or runs one."""
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

    policy   which nodes of the body have their results kept: a name, or a function
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
            found: tuple[Sequence[Value], LinearMap]
            found = super().linearize_rule(operands, tangents, params)
            return found
        policy = params["policy"]
        keeps = POLICIES[policy] if isinstance(policy, str) else policy
        return region_vjp.linearize(self, operands, tangents, params, keeps)


CHECKPOINT = CheckpointCall()


def checkpoint(
    f: Callable[..., Any], *, policy: str | Policy = "nothing"
) -> Callable[..., Any]:
    """`f`, of which reverse mode keeps little and computes the rest again.

    The results are those of `f`, which is traced, as the functions of operators are:
    its arguments that are no tensors or numbers are constants, and numbers are if `f`
    decides by them or has to know them (`if n == 0`, `range(n)`).

    Args:
        f: A function of pytrees. It may read tensors of enclosing functions, which are
            kept anyway, as the arguments are.
        policy: What is kept of what `f` computes. "nothing"; "dots": the products of
            matrices, and results of operators that compute such; "everything" that the
            derivative reads; or a function from a node of the graph (`node.op.name`,
            `node.results[0].type`) to whether its results are kept, which is asked of
            the nodes of operators too.

    Raises:
        ArgumentTypeError: `f` is no function, or `policy` is no policy.
        ArgumentValueError: no policy has this name.
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

    return recordable(call, made=("checkpoint", f, {"policy": policy}))
