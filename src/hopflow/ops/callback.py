"""`callback`: a Python function of the user that the program calls when it runs."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hopflow.bind import Operand, Value, bind, slots, using
from hopflow.errors import DerivativeError, GraphError
from hopflow.graph.core import SourceLine
from hopflow.graph.origin import replaying
from hopflow.graph.types import TensorType
from hopflow.loop_ir import kernels
from hopflow.ops.opdef import OpDef
from hopflow.ops.rules import Array
from hopflow.symbolic.size import Size

Types: TypeAlias = tuple[TensorType, ...]
Run: TypeAlias = Callable[[Sequence[Array], Types], Sequence[Array]]


class Callback:
    """The function that a node calls. Graphs that differ only in it share a program.

    name   its name in the text of the graph
    line   the user's line that requested the call
    run    (arrays of the operands, types of the results) -> arrays of the results
    """

    __slots__ = ("line", "name", "run")
    __hash__ = None  # type: ignore[assignment]  # caches must not keep it alive
    has_portable_key = True

    def __init__(self, name: str, line: SourceLine | None, run: Run) -> None:
        self.name, self.line, self.run = name, line, run

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def structural_key(_: "Callback") -> str:
        return ""

    def __call__(self, operands: Sequence[Array], types: Types) -> tuple[Array, ...]:
        """Run it outside of all traces; a note on an error names the user's line."""
        try:
            with using(None), replaying():
                return tuple(self.run(operands, types))
        except Exception as error:
            error.add_note(f"raised in the callback `{self.name}` ({self.line})")
            raise


def _infer(*_: TensorType, types: Types, **__: Any) -> Types:
    return types


def _run(*operands: Array, fn: Callback, types: Types) -> tuple[Array, ...]:
    if not isinstance(fn, Callback):
        raise GraphError(
            f"callback: the graph was read from a text, which has only the name `{fn}` "
            "of the function. Trace it again to run it."
        )
    return fn(operands, types)


def _jvp(_: Any, __: Any, *___: Operand, fn: Callback, types: Types) -> Any:  # noqa: ARG001
    raise DerivativeError(
        f"callback: `{fn}` ({fn.line}) is called with what is differentiated, and has "
        "no derivative. Call it in a function with a rule of its own "
        "(`hf.custom_jvp`), or with `hf.stop_gradient` of its arguments."
    )


def _batch(
    op: OpDef, size: Size, batched: tuple[bool, ...], *operands: Operand, **params: Any
) -> Sequence[Value]:
    """Call once for each batch element, in order, even if the operands are the same."""
    return slots.each_example(
        lambda args: bind(op, args, params), size, operands, batched, None
    )


def _lower(_: Types, *operands: Any, **__: Any) -> kernels.Callback:
    return kernels.Callback(operands)


callback_op: Final = OpDef(
    name="callback",
    promote=None,
    infer=_infer,
    run=_run,
    lower=_lower,
    effects=frozenset({"callback"}),
    jvp=_jvp,
    batch=_batch,
    samples=(),
)
