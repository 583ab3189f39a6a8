"""The errors that a user can cause, each with a class of its own.

A message says what was expected and what was found, the line of the user's code, and
how to resolve the error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class HopflowError(Exception):
    """The base of all errors that hopflow raises on purpose.

    stack   for an error of a compiled program: the lines of the user's code where the
            failed operation was traced, the innermost last
    """

    stack: Sequence[Any] = ()


class InternalError(HopflowError, RuntimeError):
    """A defect of hopflow: an unexpected error, which is the `__cause__`.

    what      the type and the message of the cause
    where     the text for where it was raised, and for the user's line
    name      the public function that failed
    program   a script that reproduces the error, or a description of the call
    """

    def __init__(self, error: Exception, where: str, name: str) -> None:
        super().__init__(error, where, name)
        self.what = f"{type(error).__name__}: {error}"
        self.where = where
        self.name = name
        self.program = ""

    def __str__(self) -> str:
        text = (
            f"`{self.name}` has failed with {self.what}{self.where}\n"
            "This is a defect of hopflow, and not of your program. Please report it"
        )
        if not self.program:
            return f"{text}."
        return f"{text}, with what follows.\n\n{self.program}"


# --- arguments of operations ----------------------------------------------------------


class DTypeError(HopflowError, TypeError):
    """A dtype that does not exist, or that an operation does not take."""


class ArgumentTypeError(HopflowError, TypeError):
    """An argument of the wrong kind: not a tensor, not callable, not an int."""


class ArgumentValueError(HopflowError, ValueError):
    """An argument of the right kind whose value makes no sense."""


class PowerError(ArgumentValueError):
    """An integer raised to a negative power, whose result is no integer."""

    def __init__(self, where: str, exponent: int) -> None:
        super().__init__(
            f"{where}: an integer cannot be raised to the negative power {exponent}. "
            "Convert the base to a float first."
        )


class ArgumentRangeError(HopflowError, OverflowError):
    """A Python integer that is out of the range of the dtype it is converted to."""


class RecompileLimitError(HopflowError, RuntimeError):
    """A jitted function would exceed `hf.config.recompile_limit`."""


class RecompileWarning(UserWarning):
    """A jitted function was compiled many times; the message says why."""


class UnknownNameError(HopflowError, AttributeError):
    """A name that hopflow does not have, as `hf.cumsum`; it may have another name."""

    def __init__(self, name: str, synonyms: Sequence[str]) -> None:
        options = " or ".join(f"`hf.{word}`" for word in synonyms)
        super().__init__(
            f"hopflow has no `{name}`. "
            + (f"Use {options}." if synonyms else "What it has is in `hf.__all__`."),
            name=name,
        )


class ShapeError(HopflowError, ValueError):
    """Shapes that do not fit an operation or each other."""


class AxisError(HopflowError, IndexError, ValueError):
    """An axis that the tensor does not have, or one named twice."""


class IndexingError(HopflowError, IndexError):
    """An index of the wrong kind or out of range."""


class DeviceError(HopflowError, ValueError):
    """A device that does not exist, or a transfer that cannot be made."""


class ReadOnlyError(HopflowError, ValueError):
    """A write to memory that may not be written: imported read-only, or a broadcast."""


class InvalidTensorError(HopflowError, RuntimeError):
    """Use of a tensor that was donated, or left half-written by an interrupt."""


class ConversionError(HopflowError, TypeError):
    """`int()`, `float()`, `bool()` or `item()` of a tensor whose size is not 1."""


# --- control-flow operators -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A leaf whose type differs; `path` is the expression a user would write for it."""

    path: str  # "carry.hidden[0]"
    expected: str  # "f32[b, 8]"
    got: str  # "f32[b, 16]"
    reason: str  # "axis 1: 8 != 16"


def _rows(leaves: Sequence[Mismatch], expected: str, got: str) -> str:
    width = max((len(leaf.path) for leaf in leaves), default=0)
    return "\n".join(
        f"  {leaf.path:<{width}}  {expected} {leaf.expected}, {got} {leaf.got}"
        f"  ({leaf.reason})"
        for leaf in leaves
    )


class OperatorError(HopflowError, TypeError):
    """The base of errors in the use of a higher-order operator."""


class RuleReadError(OperatorError):
    """A rule reads a tensor from outside that is no argument of its node."""

    def __init__(self, rule: str, type_: object) -> None:
        super().__init__(
            f"a rule `{rule}` reads a tensor {type_} of outside, but a node has what "
            "it needs among its args. Have `debug` read the tensor: it is one of them "
            "then, behind the operands."
        )


class UnsupportedRuleError(OperatorError):
    """An operator is used in a way for which it declares that it has no rule."""


class ConformanceError(HopflowError, AssertionError):
    """Rules of an operator disagree with its reference implementation `debug`.

    failures   name of a check -> what is wrong
    """

    def __init__(self, op: str, failures: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        rows = "\n".join(
            f"  {name}: " + text.strip().replace("\n", "\n    ")
            for name, text in failures.items()
        )
        super().__init__(
            f"{op}: {len(failures)} of its rules do not do what `debug` does.\n{rows}"
        )


class SchemaError(OperatorError):
    """Arguments that do not match a schema."""

    def __init__(self, op: str, leaves: Sequence[Mismatch]) -> None:
        self.leaves = tuple(leaves)
        super().__init__(
            f"{op}: the arguments are not those of the schema.\n"
            f"{_rows(leaves, 'expected', 'got')}\n"
            "Convert them, or take the schema of a call with these."
        )


class CarryTypeError(OperatorError):
    """A loop body returned a carry of another type than it received."""

    must = "return its carry with the types it came in with"
    remedy = "Cast or reshape in the body, or start from an `init` of that type."

    def __init__(
        self, op: str, fn: str, where: str, leaves: Sequence[Mismatch]
    ) -> None:
        self.leaves = tuple(leaves)  # so that tools need not parse the text
        super().__init__(
            f"{op}: `{fn}` ({where}) must {self.must}.\n"
            f"{_rows(leaves, 'in', 'out')}\n{self.remedy}"
        )


class ElementTypeError(CarryTypeError):
    """A function that combines two elements returned an element of another type."""

    must = "combine two elements into one of the same types"
    remedy = "Cast or reshape in the function, or give elements of that type."


class BranchTypeError(OperatorError):
    """Two branches returned results of different types."""

    def __init__(
        self, op: str, first: str, second: str, leaves: Sequence[Mismatch]
    ) -> None:
        self.leaves = tuple(leaves)
        super().__init__(
            f"{op}: {first} and {second} must return results of the same types.\n"
            f"{_rows(leaves, 'first', 'second')}\n"
            "Cast, reshape or broadcast in one branch so that both agree."
        )


class RuleTypeError(OperatorError):
    """A rule returned results of other types than its operator."""

    def __init__(self, op: str, rule: str, of: str, leaves: Sequence[Mismatch]) -> None:
        self.leaves = tuple(leaves)
        super().__init__(
            f"{op}: {rule} must return results of the types that {of} returns.\n"
            f"{_rows(leaves, 'expected', 'got')}\n"
            f"Cast or reshape in the rule, or return what {of} returns."
        )


class StructureError(OperatorError):
    """Results or carries whose pytree structure is not the expected one."""


class PredicateError(OperatorError):
    """A predicate that is not a bool scalar, or an index that is not an int scalar."""


class UnhashableCaptureError(HopflowError, TypeError):
    """A subgraph closes over an unhashable value, which cannot key its trace."""


class ResultTypeError(OperatorError):
    """A function of an operator returned something that is not a tensor."""


class ScoreTypeError(OperatorError):
    """An attention score function that returned something else than a score."""


class LengthError(HopflowError, ValueError):
    """Leading sizes that differ, or a length that is missing or contradicted."""


class LoopLimitError(HopflowError, RuntimeError):
    """A loop reached `max_steps` while its condition still held."""


class MutationError(HopflowError, RuntimeError):
    """A write to a tensor that is not allowed where it occurs."""


# --- tracing --------------------------------------------------------------------------


class TraceError(HopflowError, TypeError):
    """A traced tensor was asked for a value that only a run can give."""


class EndlessTraceError(TraceError):
    """A function recurses without end while it is traced: its arguments repeat."""


class ControlFlowError(TraceError):
    """Plain Python control flow that depends on a tensor and cannot be rewritten."""


class ImpurityError(HopflowError, RuntimeError):
    """A function has a side effect that happens only in its trace, not in later calls;
    see `hf.trace(strict=True)`."""


class EscapedValueError(HopflowError, RuntimeError):
    """A traced value was used outside the trace that made it."""


class CapturedTensorError(HopflowError, ValueError):
    """A traced function read a tensor from outside, and captures were not allowed."""


class DataDependentError(HopflowError, RuntimeError):
    """A decision that depends on a size or value which is unknown until run time."""

    def __init__(
        self,
        expression: str,
        where: str = "",
        *,
        origins: str = "",
        promises: Sequence[str] = (),
        is_number: bool = False,
    ) -> None:
        """
        Args:
            expression: The condition that cannot be decided, or the unknown number.
            where: The line of the user's code.
            origins: The operations that made the numbers in `expression`.
            promises: Conditions for `hf.check`, each of which would decide it.
            is_number: Whether `expression` is a number whose value Python needs.
        """
        self.expression = expression
        at = f" ({where})" if where else ""
        why = (
            f"{origins}, and only known at run time."
            if origins
            else "it depends on a number that is only known at run time."
        )
        checks = " or ".join(f'`hf.check({text}, "...")`' for text in promises)
        decision = (
            f"take `{expression}` as a Python number"
            if is_number
            else f"decide `{expression}`"
        )
        super().__init__(
            f"cannot {decision}{at} while tracing: {why} Promise the answer "
            f"before with {checks or '`hf.check`'}, or with `hf.check_is_size` that a "
            "number is a size, and its range; or use `hf.cond` to choose at run time, "
            "`hf.fori_loop` to repeat."
        )


class DimError(HopflowError, ValueError):
    """A function specialises on a size that was declared dynamic."""


class GuardError(HopflowError, ValueError):
    """A call of a captured graph that violates a guard of its trace."""


class RanksError(HopflowError, RuntimeError):
    """Processes that compile together make different calls."""


# --- transforms -----------------------------------------------------------------------


class DerivativeError(HopflowError, TypeError):
    """A derivative that does not exist: of an integer, or of an operation without a
    derivative rule."""


# --- graphs and programs --------------------------------------------------------------


class GraphError(HopflowError, ValueError):
    """A graph that breaks a rule of the graph level (found by its verifier)."""


class KernelProgramError(HopflowError, ValueError):
    """A kernel program that breaks a rule of its level (found by its verifier or its
    interpreter)."""


class PassError(KernelProgramError):
    """A pass of the compiler changes the results of a program; a defect of hopflow,
    found by `hf.config.verify`."""

    def __init__(self, name: str, program: str, mismatch: str, texts: str) -> None:
        super().__init__(
            f"config.verify: after the pass `{name}`, `{program}` computes something "
            f"else: {mismatch}\n\n{texts}\n\n"
            "That is a defect of hopflow: please report it with this program."
        )


class LoopIRError(HopflowError, ValueError):
    """A program that breaks a rule of the Loop IR (found by its verifier)."""


class ProgramFormatError(HopflowError, ValueError):
    """Text or a file that is not a well-formed program."""


class ExportError(HopflowError, TypeError):
    """A function does or takes what a program cannot have that leaves Python.

    operation   the name of the operation that a target lacks, if it is one
    """

    def __init__(self, message: str, operation: str = "") -> None:
        super().__init__(message)
        self.operation = operation


class CompileError(HopflowError, RuntimeError):
    """The compiler could not generate native code; a defect of hopflow."""


class InPlaceError(HopflowError, RuntimeError):
    """Each step of a loop copies an array, and `hf.config.require_in_place` is set."""

    def __init__(self, name: str, copies: Sequence[str]) -> None:
        lines = "".join([f"\n  {copy}" for copy in copies])
        super().__init__(
            f"`{name}`: a loop copies arrays in its steps, and "
            f"`hf.config.require_in_place` is set:{lines}\n"
            "A step that reads an array after it has written to it, or keeps it beside "
            "the new one, needs the copy: read first, or return the old elements that "
            "are needed. `jitted.memory` has the whole plan."
        )


class PicklingError(HopflowError, TypeError):
    """A function that cannot be pickled: it has no name in a module, and cloudpickle is
    not installed or cannot write it."""


class BackendError(HopflowError, RuntimeError):
    """A backend of `hf.jit` failed, or returned something of the wrong type."""


class BoundsError(HopflowError, RuntimeError):
    """Compiled code would access a buffer out of bounds; a defect of hopflow, found
    before the code runs, or by `hf.config.check_bounds`."""


class ForkError(HopflowError, RuntimeError):
    """A signal handler has forked the process while compiled code shared a loop among
    threads: raised in the child, which lacks the other threads and what they computed.
    Fork where no compiled code runs."""


class KernelDisagreementError(HopflowError, RuntimeError):
    """Compiled code and the graph interpreter disagree; a defect of hopflow, found by
    `hf.config.verify`."""

    def __init__(self, name: str, wrong: str, graph: str) -> None:
        super().__init__(
            f"config.verify: the native code of graph `{name}` is not what the graph "
            f"interpreter makes of it: {wrong}\n\n{graph}\n"
            "That is a defect of hopflow: please report it with this graph."
        )


# --- run time -------------------------------------------------------------------------


class CheckError(HopflowError, RuntimeError):
    """A condition given to `hf.check`, or one that an operation needs, did not hold."""


class ShapeCheckError(CheckError, ShapeError):
    """Unbacked sizes do not fit an operation or each other at run time."""


class DivisionError(HopflowError, ZeroDivisionError):
    """Division of an integer by zero."""


class LinalgError(HopflowError, ArithmeticError):
    """A matrix without the requested factorisation: singular, or not definite."""
