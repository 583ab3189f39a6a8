"""Passes compared: after each, a program computes what it did before, in every bit.

The interpreter runs a kernel program before and after each pass on a few drawn inputs;
the tagged one runs it with its memory planned, and stops where an element is read that
another value has written over. Inputs depend on their types alone.

    sizes      static ones as they are; symbols are what the program was traced with, if
               that is small, and 0, 1 and other small numbers that may be
    integers   small, so that most indices are in range, and loops take few steps; and
               0 and below, beside such as are out of range, so that loops take none
    Python     is not called: a callback gives numbers that depend on what it is given

A pass has to keep results, the check or routine that stops the program, and what
callbacks are given, in their order: `docs/notes/effects_and_order.md` and
`docs/notes/numerics_and_bits.md`. What is not compared:

- A run that takes more than `STEPS` steps of the interpreter, or a program of larger
  inputs: many elements or trips, a `while` that does not end on what was drawn.
- A run in which the program that was lowered reads out of range: what was drawn then
  breaks a promise that was made when it was traced, such as a guard of sizes.
- Progress of loops: nobody is told.
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
from hopflow.compiler.memory.interpreter import run_planned
from hopflow.compiler.memory.plan import MemoryPlan, format_memory
from hopflow.dtypes import DType, as_dtype
from hopflow.errors import KernelProgramError, PassError
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Symbol, substitute

STEPS: Final = 3_000
"""Of the interpreter, for one run of a program as it was lowered; after passes it may
take `MORE` times as many."""
ALL: Final = 6_000
"""The steps of all runs of a program as it was lowered: small ones run more often."""
MORE: Final = 4
RUNS: Final = 10
LARGEST: Final = 4_000
"""Elements of all inputs of a program that is compared."""
SIZES: Final = ((3, 4, 2, 5), (0,), (1,), (4,), (2, 8, 6, 1))
"""What the symbols of a program are, by turns, beside their hints."""
INTEGERS: Final = (
    ((0, 4), (0, 4)),
    ((-1, 1), (7, 13)),
    ((-2, 6), (-2, 6)),
    ((7, 13), (-1, 1)),
    ((-1, 1), (-1, 1)),
)
"""Where integers are from, in one run and the next: those of some inputs, and of the
others. At the edges some make loops take no step while others miss or are 0, and then
it is the other way."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Plans: TypeAlias = Mapping[KernelProgram, MemoryPlan]
Execute: TypeAlias = Callable[[Sequence[Array], Host], list[Array]]


class _OutOfSteps(Exception):
    """A run takes too long."""


@dataclass
class _Drawn(Host):
    """A process in which nothing happens: it counts the steps of a run, and notes what
    Python is given."""

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
    """What a program gives for some inputs."""

    inputs: Sequence[Array]
    steps: int
    results: Sequence[Array]
    trap: KernelTrap | None
    calls: Sequence[tuple[Node, list[Array]]]


class _State:
    """The blocks of a program, as they are at one time."""

    def __init__(self, program: KernelProgram) -> None:
        self.blocks = [
            (
                *(block, tuple(block.parameters), tuple(block.results)),
                [(q, q.results, q.definition, q.symbol) for q in block.equations],
            )
            for block in all_blocks(program.block)
        ]

    def restore(self) -> None:
        """Have the program be what it was."""
        for block, parameters, results, equations in self.blocks:
            block.parameters, block.results = list(parameters), list(results)
            block.equations = [equation for equation, *_ in equations]
            for equation, values, definition, symbol in equations:
                equation.results, equation.definition = values, definition
                equation.symbol = symbol


class ComparedPasses:
    """What a program computes, as it was lowered."""

    def __init__(self, program: KernelProgram) -> None:
        self.program = program
        self._state = _State(program)
        self._runs = list(_runs(program))

    def after(self, name: str) -> None:
        """Compare the program after a pass of this name.

        Raises:
            PassError: It computes something else than it did before.
        """
        state = _State(self.program)
        if state.blocks == self._state.blocks:
            return
        for before in self._runs:
            wrong = _wrong(before, partial(run, self.program))
            if wrong is not None:
                after = format_kernels(self.program)
                self._state.restore()
                texts = f"before:\n{format_kernels(self.program)}\n\nafter:\n{after}"
                state.restore()
                raise PassError(name, self.program.name, wrong, texts)
        self._state = state

    def planned(self, plans: Plans) -> None:
        """Compare the program with its memory planned, and that of what it calls.

        Raises:
            PassError: An element is read where another value is, or what is computed is
                something else.
        """
        for before in self._runs:
            wrong = _wrong(before, partial(run_planned, self.program, plans))
            if wrong is not None:
                plan = format_memory(plans[self.program])
                texts = f"{format_kernels(self.program)}\n\n{plan}"
                raise PassError("memory", self.program.name, wrong, texts)


def _run(execute: Execute, inputs: Sequence[Array], steps: int) -> _Run | None:
    """What a program gives, or None if it takes more steps.

    Raises:
        KernelProgramError: It reads out of range, or where another value is.
    """
    host, results, trap = _Drawn(steps), list[Array](), None
    try:
        results = execute(inputs, host)
    except KernelTrap as found:
        trap = found
    except _OutOfSteps:
        return None
    return _Run(inputs, steps - host.steps, results, trap, host.calls)


# --- comparing ------------------------------------------------------------------------


def _wrong(before: _Run, execute: Execute) -> str | None:
    """How what a program gives differs from what it gave; None if it does not, or if it
    takes too long."""
    try:
        after = _run(execute, before.inputs, MORE * before.steps + STEPS)
    except KernelProgramError as error:
        # A run that stopped may not have come to what a pass computes earlier.
        is_promise = isinstance(error, NegativeSizeError) and before.trap is not None
        return None if is_promise else f"{error}{_for(before)}"
    found = None if after is None else _difference(before, after)
    return None if found is None else f"{found}{_for(before)}"


def _for(before: _Run) -> str:
    texts = [f"{a.dtype}{list(a.shape)} {a.tolist()}"[:200] for a in before.inputs]
    return "\nfor " + ",\n    ".join(texts)


def _difference(before: _Run, after: _Run) -> str | None:
    was, now = _stop(before.trap), _stop(after.trap)
    if was != now:
        return f"it {_told(after.trap)}, and {_told(before.trap)} before it"
    if [node for node, _ in before.calls] != [node for node, _ in after.calls]:
        return "other callbacks are called, or in another order"
    pairs = zip(before.calls, after.calls, strict=True)
    for (node, old), (_, new) in pairs:
        found = _of_arrays(old, new, f"operand of the callback {node.line}")
        if found is not None:
            return found
    return _of_arrays(before.results, after.results, "result")


def _stop(trap: KernelTrap | None) -> Any:
    return None if trap is None else (trap.kind, trap.values, trap.node)


def _told(trap: KernelTrap | None) -> str:
    if trap is None:
        return "ends"
    at = f" ({trap.node.line})" if trap.node is not None else ""
    return f"stops with {trap}{at}"


def _of_arrays(old: Sequence[Array], new: Sequence[Array], what: str) -> str | None:
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
    """What a program gives for some drawn inputs."""
    left = ALL
    types = ", ".join([str(value.type) for value in program.block.parameters])
    for inputs in _inputs(program, np.random.default_rng(crc32(types.encode()))):
        try:
            found = _run(partial(run, program), inputs, min(left, STEPS))
        except KernelProgramError:  # what was drawn breaks a promise
            continue
        left -= STEPS if found is None else found.steps
        if found is not None:
            yield found
        if left <= 0:
            return


def _inputs(
    program: KernelProgram, random: np.random.Generator
) -> Iterator[list[Array]]:
    """Inputs of a program: ordinary ones first, and then such as are at an edge."""
    symbols, types = program.symbols, [v.type for v in program.block.parameters]
    choices, count = list(_sizes(symbols)), len(INTEGERS)
    for number in range(RUNS if choices else 0):
        sizes = choices[number % len(choices)]
        shapes = [_shape(type_, sizes) for type_ in types]
        if sum(LARGEST + 1 if s is None else prod(s) for s in shapes) > LARGEST:
            continue
        # No choice of sizes is always that of the same integers.
        ranges = INTEGERS[(number + number // lcm(count, len(choices))) % count]
        inputs: list[Array] = []
        for k, (type_, shape) in enumerate(zip(types, shapes, strict=True)):
            if k < len(symbols):
                inputs.append(np.asarray(sizes[symbols[k]], type_.dtype.dtype))
            else:
                which = k >> number // count & 1
                inputs.append(_array(random, type_.dtype, shape or (), *ranges[which]))
        yield inputs


def _sizes(symbols: Sequence[Symbol]) -> Iterator[dict[Symbol, Any]]:
    """Values of symbols that are in their declared ranges and fulfil what was learned
    of them, different ones. Those of functions have hints alone: what callers promise
    is not known."""
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
    """The shape of a type where symbols have these values, if it is one."""
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
    """Elements of a type; integers from `low` on and below `high`."""
    if dtype.is_float:
        return np.asarray(random.normal(0.0, 2.0, shape)).astype(dtype.dtype)
    if dtype.kind == "b":
        return np.asarray(random.random(shape) < 0.5)
    low = max(low, 0) if dtype.kind == "u" else low
    return np.asarray(random.integers(low, high, shape)).astype(dtype.dtype)
