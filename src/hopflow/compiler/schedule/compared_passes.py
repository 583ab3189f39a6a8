"""Check of each pass: a program computes after it what it did before, in every bit.

The interpreter of kernel programs runs the program as it was lowered, and again after
each pass that changed it, on a few random inputs. At last the interpreter of planned
memory (`compiler.memory.interpreter`) runs it, and stops where an element is read that
another value has overwritten. The inputs are a function of the parameters' types alone,
so that a failure repeats.

    sizes      static ones as they are; for symbols the values that the program was
               traced with, then 0, 1 and other small numbers that facts allow
    integers   small, so that most indices are in range and loops take few steps; also
               negative ones and 0 beside indices out of range, so that loops take none
    callbacks  Python is not called: results are random, seeded by the operands

A pass has to keep results, the check or routine that stops the program, and what
callbacks are given, in their order: `docs/notes/effects_and_order.md` and
`docs/notes/numerics_and_bits.md`. What is not compared:

- Runs of more than `STEPS` steps of the interpreter, and programs of inputs with more
  than `MOST_ELEMENTS` elements.
- Runs in which the program as it was lowered reads out of range: such inputs violate a
  condition that holds for each real call, such as a guard on sizes.
- The progress that loops report.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import lcm, prod
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np

from hopflow.compiler.kernel_program.interpreter import (
    Host,
    KernelTrap,
    NegativeSizeError,
    run,
)
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.plan import MemoryPlan, format_memory
from hopflow.dtypes import DType, as_dtype
from hopflow.errors import KernelProgramError, PassError
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Symbol, substitute

STEPS: Final = 3_000
"""The most steps of the interpreter in one run of a program as it was lowered."""
STEPS_OF_ALL_RUNS: Final = 6_000
"""The most steps of all runs of a program together: small programs run more often."""
SLOWDOWN: Final = 4
"""How many times the steps of the run before passes one after them may take."""
RUNS: Final = 10
"""The most runs of a program."""
MOST_ELEMENTS: Final = 4_000
"""The most elements of all inputs of one run."""
SIZES: Final = ((3, 4, 2, 5), (0,), (1,), (4,), (2, 8, 6, 1))
"""Sizes for the symbols of a program, in runs without hints: the first symbol has the
first number of a row, and so on around."""
INTEGERS: Final = (
    ((0, 4), (0, 4)),
    ((-1, 1), (7, 13)),
    ((-2, 6), (-2, 6)),
    ((7, 13), (-1, 1)),
    ((-1, 1), (-1, 1)),
)
"""Ranges of integers, a row for each run: one for some inputs, one for the others. The
first row is ordinary. In the others are 0, negative numbers and indices out of range,
also for some inputs alone: a loop takes no step while an index is out of range."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Plans: TypeAlias = Mapping[KernelProgram, MemoryPlan]
Execute: TypeAlias = Callable[[Sequence[Array], Host], list[Array]]


class _OutOfSteps(Exception):
    """A run has taken the steps that it may take."""


@dataclass
class _RecordingHost(Host):
    """The process around a run: it counts steps, and records the calls of Python
    instead of making them.

    steps   how many are left
    calls   the nodes of the callbacks, with copies of their operands
    """

    steps: int
    calls: list[tuple[Node, list[Array]]] = field(default_factory=list)

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise _OutOfSteps

    def call(self, node: Node, given: Sequence[Array], empty: Any) -> list[Array]:
        self.calls.append((node, [a.copy() for a in given]))
        random = np.random.default_rng(crc32(b"".join(a.tobytes() for a in given)))
        return [_array(random, as_dtype(a.dtype), a.shape) for a in empty()]


@dataclass(frozen=True)
class _Run:
    """What one run of a program has given.

    steps   how many it took
    trap    what stopped it; None if it ended
    """

    inputs: Sequence[Array]
    steps: int
    results: Sequence[Array]
    trap: KernelTrap | None
    calls: Sequence[tuple[Node, list[Array]]]


class _Snapshot:
    """The blocks of a program at one time, to compare and to restore."""

    def __init__(self, program: KernelProgram) -> None:
        self.blocks = [
            (
                *(block, tuple(block.parameters), tuple(block.results)),
                [(q, q.results, q.definition, q.symbol) for q in block.equations],
            )
            for block in all_blocks(program.block)
        ]

    def restore(self) -> None:
        """Make the program what it was when the snapshot was taken."""
        for block, parameters, results, equations in self.blocks:
            block.parameters, block.results = list(parameters), list(results)
            block.equations = [equation for equation, *_ in equations]
            for equation, values, definition, symbol in equations:
                equation.results, equation.definition = values, definition
                equation.symbol = symbol


class ComparedPasses:
    """The runs of a program as it was lowered, which later runs are compared with."""

    def __init__(self, program: KernelProgram) -> None:
        self.program = program
        self._state = _Snapshot(program)
        self._runs = list(_runs(program))

    def after(self, name: str) -> None:
        """Verify the program after the pass `name`, and compare it with the program as
        it was lowered, if the pass has changed it.

        Raises:
            KernelProgramError: It breaks a rule.
            PassError: It computes something else; with the program before and after the
                pass.
        """
        state = _Snapshot(self.program)
        if state.blocks == self._state.blocks:
            return
        verify_kernels(self.program)
        for before in self._runs:
            wrong = _disagreement(before, partial(run, self.program))
            if wrong is not None:
                after = format_kernels(self.program)
                self._state.restore()
                texts = f"before:\n{format_kernels(self.program)}\n\nafter:\n{after}"
                state.restore()
                raise PassError(name, self.program.name, wrong, texts)
        self._state = state

    def planned(self, plans: Plans) -> None:
        """Compare a run in planned memory.

        Args:
            plans: The plan of the program, and those of the functions that it calls.

        Raises:
            PassError: An element is read that another value has overwritten, or
                something else is computed.
        """
        for before in self._runs:
            wrong = _disagreement(before, partial(run_planned, self.program, plans))
            if wrong is not None:
                plan = format_memory(plans[self.program])
                texts = f"{format_kernels(self.program)}\n\n{plan}"
                raise PassError("memory", self.program.name, wrong, texts)


def _run(execute: Execute, inputs: Sequence[Array], steps: int) -> _Run | None:
    """Run a program for at most `steps` steps; None if it takes more.

    Raises:
        KernelProgramError: It reads out of range, or an element that another value has
            overwritten.
    """
    host, results, trap = _RecordingHost(steps), list[Array](), None
    try:
        results = execute(inputs, host)
    except KernelTrap as found:
        trap = found
    except _OutOfSteps:
        return None
    return _Run(inputs, steps - host.steps, results, trap, host.calls)


# --- comparing ------------------------------------------------------------------------


def _disagreement(before: _Run, execute: Execute) -> str | None:
    """Run a program again, and describe how it differs from the run `before`; None if
    it does not, or if it takes too long."""
    try:
        after = _run(execute, before.inputs, SLOWDOWN * before.steps + STEPS)
    except KernelProgramError as error:
        # A check has stopped the run before. A pass may have moved what comes after the
        # check in front of it, and with it a size that is negative.
        is_beyond_check = (
            isinstance(error, NegativeSizeError) and before.trap is not None
        )
        return None if is_beyond_check else f"{error}{_inputs_text(before)}"
    found = None if after is None else _difference(before, after)
    return None if found is None else f"{found}{_inputs_text(before)}"


def _inputs_text(before: _Run) -> str:
    texts = [f"{a.dtype}{list(a.shape)} {a.tolist()}"[:200] for a in before.inputs]
    return "\nfor " + ",\n    ".join(texts)


def _difference(before: _Run, after: _Run) -> str | None:
    was, now = _ending(before.trap), _ending(after.trap)
    if was != now:
        return (
            f"it {_ending_text(after.trap)}, and {_ending_text(before.trap)} before it"
        )
    if [node for node, _ in before.calls] != [node for node, _ in after.calls]:
        return "other callbacks are called, or in another order"
    pairs = zip(before.calls, after.calls, strict=True)
    for (node, old), (_, new) in pairs:
        found = _array_difference(old, new, f"operand of the callback {node.line}")
        if found is not None:
            return found
    return _array_difference(before.results, after.results, "result")


def _ending(trap: KernelTrap | None) -> Any:
    return None if trap is None else (trap.kind, trap.values, trap.node)


def _ending_text(trap: KernelTrap | None) -> str:
    if trap is None:
        return "ends"
    at = f" ({trap.node.line})" if trap.node is not None else ""
    return f"stops with {trap}{at}"


def _array_difference(
    old: Sequence[Array], new: Sequence[Array], what: str
) -> str | None:
    for number, (a, b) in enumerate(zip(old, new, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            types = [f"{x.dtype}{list(x.shape)}" for x in (b, a)]
            return f"{what} {number} is {types[0]}, and was {types[1]}"
        differs = np.argwhere(~_same_bits(a, b))
        if len(differs):
            at = tuple(map(int, differs[0]))
            where = f" at {list(at)}" if at else ""
            return f"{what} {number}{where} is {b[at]!r}, and was {a[at]!r}"
    return None


def _same_bits(a: Array, b: Array) -> Array:
    """Where elements have the same bits, or both are NaN."""
    own = f"u{a.dtype.itemsize}"
    same = np.ascontiguousarray(a).view(own) == np.ascontiguousarray(b).view(own)
    found: Array = same | ((a != a) & (b != b))
    return found.reshape(a.shape)


# --- drawing --------------------------------------------------------------------------


def _runs(program: KernelProgram) -> Iterator[_Run]:
    """The runs of a program on random inputs, until they have taken all steps."""
    left = STEPS_OF_ALL_RUNS
    types = ", ".join([str(value.type) for value in program.block.parameters])
    for inputs in _inputs(program, np.random.default_rng(crc32(types.encode()))):
        try:
            found = _run(partial(run, program), inputs, min(left, STEPS))
        except KernelProgramError:  # no real call has such inputs
            continue
        left -= STEPS if found is None else found.steps
        if found is not None:
            yield found
        if left <= 0:
            return


def _inputs(
    program: KernelProgram, random: np.random.Generator
) -> Iterator[list[Array]]:
    """Inputs for `RUNS` runs of a program: symbols' values, then arrays."""
    symbols, types = program.symbols, [v.type for v in program.block.parameters]
    choices, count = list(_sizes(symbols)), len(INTEGERS)
    for number in range(RUNS if choices else 0):
        sizes = choices[number % len(choices)]
        shapes = [_shape(type_, sizes) for type_ in types]
        if (
            sum(MOST_ELEMENTS + 1 if s is None else prod(s) for s in shapes)
            > MOST_ELEMENTS
        ):
            continue
        # A shift after each round, so that sizes and ranges meet in all combinations.
        ranges = INTEGERS[(number + number // lcm(count, len(choices))) % count]
        inputs: list[Array] = []
        for k, (type_, shape) in enumerate(zip(types, shapes, strict=True)):
            if k < len(symbols):  # a parameter that is a size
                inputs.append(np.asarray(sizes[symbols[k]], type_.dtype.dtype))
            else:
                # Which range of the row an input has changes from round to round.
                which = k >> number // count & 1
                inputs.append(_array(random, type_.dtype, shape or (), *ranges[which]))
        yield inputs


def _sizes(symbols: Sequence[Symbol]) -> Iterator[dict[Symbol, Any]]:
    """Values of symbols, within their declared ranges and the facts that are known.

    Symbols without an environment, as those of functions, have their hints alone: what
    holds for them where the function is called is not known.
    """
    hints = tuple(s.hint for s in symbols if s.hint is not None)
    chosen: list[tuple[float, ...]] = [hints] if len(hints) == len(symbols) else []
    for first in SIZES if all(s.env is not None for s in symbols) else ():
        chosen.append(tuple([first[k % len(first)] for k in range(len(symbols))]))
    facts = {fact: None for s in symbols if s.env is not None for fact in s.env.facts}
    known = [fact for fact in facts if set(fact.symbols) <= set(symbols)]
    for values in dict.fromkeys(chosen):
        found: dict[Symbol, Any] = dict(zip(symbols, values, strict=True))
        in_range = all(n in s.range for s, n in found.items())
        if in_range and all(f.evaluate(found.__getitem__) for f in known):
            yield found


def _shape(type_: TensorType, sizes: Mapping[Symbol, Any]) -> tuple[int, ...] | None:
    """The shape of a type where symbols have these values; None if a size is negative,
    unknown, or a division by zero."""
    try:
        shape = [substitute(n, sizes) for n in type_.shape]
    except ArithmeticError:
        return None
    known = [n for n in shape if isinstance(n, int) and n >= 0]
    return tuple(known) if len(known) == len(shape) else None


def _array(
    random: np.random.Generator,
    dtype: DType,
    shape: Sequence[int],
    low: int = 0,
    high: int = 4,
) -> Array:
    """A random array; integers are at least `low` and below `high`."""
    if dtype.is_float:
        return np.asarray(random.normal(0.0, 2.0, shape)).astype(dtype.dtype)
    if dtype.kind == "b":
        return np.asarray(random.random(shape) < 0.5)
    low = max(low, 0) if dtype.kind == "u" else low
    return np.asarray(random.integers(low, high, shape)).astype(dtype.dtype)
