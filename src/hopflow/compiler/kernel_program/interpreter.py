"""A reference interpreter of kernel programs, which checks every element that it reads.

It evaluates one element at a time: slow, but simple enough to be the reference for the
schedule and for compiled code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
)
from hopflow.dtypes import DType
from hopflow.errors import HopflowError, KernelProgramError
from hopflow.graph.core import Node, plain_symbol
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import scalars, walk
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.program import Kind
from hopflow.loop_ir.routines import ROUTINES
from hopflow.symbolic.size import Size, Symbol, substitute

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Variables: TypeAlias = Mapping[Var, Any]


class NegativeSizeError(KernelProgramError):
    """The inputs of a run make a size negative, against what programs assume."""


class KernelTrap(HopflowError):
    """A check fails, a loop exceeds its limit of steps, or a routine fails.

    node   the node of the graph, if the definition belongs to a program
    """

    def __init__(self, kind: Kind, values: tuple[int, ...] = ()) -> None:
        self.kind, self.values = kind, values
        self.node: Node | None = None
        super().__init__(f"{kind}: {list(values)}")


class Host:
    """The services of the process that a running program uses."""

    def spend(self, steps: int) -> None:
        """Account for the nodes and elements that are computed next."""

    def call(
        self, node: Node, arrays: Sequence[Array], _empty: Callable[[], list[Array]]
    ) -> list[Array]:
        """Return the results of the Python function of a node.

        Args:
            arrays: The operands of the node.
            _empty: Returns uninitialized arrays of the types of the results.
        """
        assert node.op is not None
        return [np.asarray(a) for a in node.op.run(*arrays, **node.params)]


def run(
    program: KernelProgram, arrays: Sequence[Array], host: Host | None = None
) -> list[Array]:
    """Return the results of a program for arrays as its parameters.

    Args:
        host: The services of the process. By default callbacks are called, and the run
            may take any time.

    Raises:
        KernelTrap: A check, a loop or a routine of the program fails.
        KernelProgramError: The program reads out of bounds, or a value does not have
            its type, which is a defect of the compiler.
    """
    with np.errstate(all="ignore"):
        return Machine(host=host).program(program, arrays)


class Machine:
    """The state of a running program.

    symbols    the number of each symbol
    arrays     the elements of each value
    counters   the current step of each loop, by its variable
    """

    def __init__(
        self, symbols: Mapping[Symbol, int] | None = None, host: Host | None = None
    ) -> None:
        self.symbols = dict(symbols or {})
        self.host = Host() if host is None else host
        self.arrays: dict[Value, Array] = {}
        self.counters: dict[Var, Any] = {}
        self._code: dict[tuple[Expr, ...], _Code] = {}

    # --- values ---

    def bind(self, value: Value, array: Array) -> None:
        """Set the elements of a value, and the symbols that are sizes of it."""
        self.host.spend(1 + array.size // 8)
        type_ = value.type
        fits = array.dtype == type_.dtype.dtype and array.ndim == type_.ndim
        for size, n in zip(type_.shape, array.shape, strict=False):
            symbol = plain_symbol(size)
            if symbol is not None:
                self.symbols[symbol] = n
            else:
                fits = fits and self.size(size) == n
        if not fits:
            raise KernelProgramError(f"{value} is {array.dtype}{list(array.shape)}")
        self.arrays[value] = array

    def array(self, value: Value) -> Array:
        """Return the elements of a value that is read as a whole."""
        return self.held(value)

    def held(self, value: Value) -> Array:
        """Return the elements of a value."""
        if value.scalar is not None:
            return np.asarray(self.run([value.scalar])[0])
        return self.arrays[value]

    def size(self, size: Size) -> int:
        try:
            number = substitute(size, self.symbols)
        except ArithmeticError as error:
            raise KernelProgramError(f"the size {size} has no value: {error}") from None
        if not isinstance(number, int):
            raise KernelProgramError(f"a symbol of the size {size} has no value yet")
        return number

    def shape(self, shape: Sequence[Size]) -> tuple[int, ...]:
        sizes = tuple(map(self.size, shape))
        if any(n < 0 for n in sizes):
            raise NegativeSizeError(f"a size of {list(shape)} is negative: {sizes}")
        return sizes

    # --- expressions ---

    def run(
        self, roots: Sequence[Expr], variables: Variables | None = None
    ) -> list[Any]:
        """Return the values of scalar expressions for the values of variables."""
        key = tuple(roots)
        if key not in self._code:
            self._code[key] = _Code(key)
        code = self._code[key]
        self.host.spend(len(code.steps))
        return code.run(self, variables or {})

    def at(self, roots: Sequence[Expr], at: Sequence[int]) -> list[Any]:
        """Return the values of expressions at an index, which sets the first axes."""
        return self.run(roots, _axes_at(at))

    def call(
        self, function: d.Function, arguments: Sequence[Any], at: Sequence[int] = ()
    ) -> list[Any]:
        """Return the results of a function of accumulators and elements."""
        variables = _axes_at(at)
        variables |= zip([p.attr for p in function.parameters], arguments, strict=True)
        return self.run(function.results, variables)

    def read(self, node: Expr, args: Sequence[Any]) -> Any:
        """Return an element of a value."""
        if e.condition_of(node) is not None:
            *args, holds = args
            if not holds:
                return scalars.scalar(0, node.dtype)
        array = self.held(node.attr)
        for i, n in zip(args, array.shape, strict=True):
            if not 0 <= i < n:
                at = [int(i) for i in args]
                raise KernelProgramError(
                    f"{node.attr} of shape {array.shape} is read at {at}"
                )
        return array[tuple(args)]

    def written(self, results: Sequence[Array], at: tuple[int, ...]) -> None:
        """Observe that elements of results are written, in the order of the loop."""

    # --- programs and blocks ---

    def program(self, program: KernelProgram, arrays: Sequence[Array]) -> list[Array]:
        """Return the results of a program.

        The first parameters may be sizes, which the types of the others use.
        """
        sizes = [a.item() for a in arrays[: len(program.symbols)]]
        self.symbols |= zip(program.symbols, sizes, strict=True)
        return self.block(program.block, arrays)

    def function(self, _program: KernelProgram) -> "Machine":
        """Return a machine for a function that the program calls."""
        return Machine(host=self.host)

    def block(self, block: Block, arguments: Sequence[Array]) -> list[Array]:
        """Return the results of a block."""
        for value, array in zip(block.parameters, arguments, strict=True):
            self.bind(value, array)
        for equation in block.equations:
            self.equation(equation)
            if equation.symbol is not None:
                self.define(equation.symbol, equation.results[0], block.parameters)
        return [self.array(value) for value in block.results]

    def define(self, symbol: Symbol, value: Value, parameters: Sequence[Value]) -> None:
        """Set a symbol to the number in a value.

        A size of a parameter of the block that is this symbol must have that number.
        """
        n = int(self.held(value))
        for parameter in parameters:
            pairs = zip(parameter.shape, self.arrays[parameter].shape, strict=True)
            if any(plain_symbol(size) is symbol and n != m for size, m in pairs):
                raise KernelProgramError(f"{symbol} is {n}, and a size of {parameter}")
        self.symbols[symbol] = n

    def equation(self, equation: Equation) -> None:
        types = [value.type for value in equation.results]
        try:
            arrays = self.results(equation, types)
        except KernelTrap as trap:
            trap.node = trap.node or equation.node
            raise
        for value, array in zip(equation.results, arrays, strict=True):
            self.bind(value, array)

    def results(self, equation: Equation, types: Sequence[TensorType]) -> list[Array]:
        match equation.definition:
            case Branch(selector, blocks):
                number = int(self.array(selector))
                if not 0 <= number < len(blocks):
                    raise KernelProgramError(f"there is no block {number}")
                return self.block(blocks[number], [])
            case Loop():
                return self.loop(equation.definition, types)
            case While():
                return self.while_loop(equation.definition, types)
            case Call(function, operands):
                arguments = list(map(self.array, operands))
                return self.function(function).program(function, arguments)
            case Callback(operands):
                arguments = [self.array(_value(o)) for o in operands]
                empty = lambda: list(map(self.empty, types))  # noqa: E731
                return self.host.call(equation.node, arguments, empty)
            case definition:
                return self.definition(definition, types)

    def loop(self, loop: Loop, types: Sequence[TensorType]) -> list[Array]:
        carry = list(map(self.array, loop.carry))
        length, rows = self.size(loop.length), dict[int, list[Array]]()
        for t in reversed(range(length)) if loop.reverse else range(length):
            self.counters[loop.counter] = np.int64(t)
            results = self.block(loop.body, carry)
            carry, rows[t] = results[: len(carry)], results[len(carry) :]
        in_order = [rows[t] for t in range(length)]
        return carry + self.stacked(types[len(carry) :], in_order)

    def while_loop(self, loop: While, types: Sequence[TensorType]) -> list[Array]:
        carry, rows = list(map(self.array, loop.carry)), list[list[Array]]()
        while self.block(loop.test, carry)[0]:
            if len(rows) == loop.max_steps:
                raise KernelTrap("limit", (len(rows),))
            results = self.block(loop.body, carry)
            carry = results[: len(carry)]
            rows.append(results[len(carry) :])
        return carry + self.stacked(types[len(carry) :], rows)

    def stacked(
        self, types: Sequence[TensorType], rows: Sequence[Sequence[Array]]
    ) -> list[Array]:
        """Stack the rows of the steps of a loop along axis 0."""
        if rows:
            return [np.stack(column) for column in zip(*rows, strict=True)]
        return [np.empty((0, *self.shape(t.shape[1:])), t.dtype.dtype) for t in types]

    # --- definitions ---

    def definition(
        self, definition: d.Definition, types: Sequence[TensorType]
    ) -> list[Array]:
        """Return the results of a definition that is no region."""
        for check in getattr(definition, "checks", ()):
            self.check(check)
        match definition:
            case d.Pointwise() | d.Cut():
                results = list(map(self.empty, types))
                for at in _indices(results[0].shape):
                    values = self.at(self.piece(definition, at).elements, at)
                    for result, x, type_ in zip(results, values, types, strict=True):
                        [result[at]] = _typed([x], type_.dtype)
                    self.written(results, at)
                return results
            case d.Reduction():
                return self.reduction(definition, types)
            case d.Prefix():
                return [self.prefix(definition, types[0])]
            case d.Scatter():
                return [self.scatter(definition, types[0])]
            case d.Compact():
                return [self.compact(definition, types[0])]
            case Library():
                return self.library(definition, types)
        return []  # a definition of checks alone

    def piece(
        self, definition: d.Pointwise | d.Cut, at: tuple[int, ...]
    ) -> d.Pointwise:
        """Return the piece that contains an index."""
        while isinstance(definition, d.Cut):
            is_below = at[definition.axis] < self.run([definition.at])[0]
            definition = definition.below if is_below else definition.above
        return definition

    def empty(self, type_: TensorType) -> Array:
        shape = self.shape(type_.shape)
        self.host.spend(prod(shape) // 8)
        return np.empty(shape, type_.dtype.dtype)

    def check(self, check: d.Check) -> None:
        if check.passed is not None and self.at([check.passed], ())[0]:
            return
        for at in _indices(self.shape(check.shape)):
            holds, *values = self.at([check.holds, *check.values], at)
            if not holds:
                raise KernelTrap(check.kind, tuple(map(int, values)))

    def reduction(
        self, kernel: d.Reduction, types: Sequence[TensorType]
    ) -> list[Array]:
        results, space = list(map(self.empty, types)), self.shape(kernel.space)
        combine: Callable[[list[Any], list[Any]], list[Any]]
        if isinstance(kernel.combine, str):
            operation = scalars.combine(kernel.combine, kernel.init[0].dtype)
            combine = lambda old, new: [operation(old[0], new[0])]  # noqa: E731
        else:
            function = kernel.combine
            combine = lambda old, new: self.call(function, [*old, *new])  # noqa: E731
        for at in _indices(results[0].shape):
            totals = self.at(kernel.init, at)
            for r in _indices(space):
                totals = combine(totals, self.at(kernel.element, (*at, *r)))
            for result, finish, type_ in zip(
                results, kernel.finish, types, strict=True
            ):
                [result[at]] = _typed(self.call(finish, totals, at), type_.dtype)
        return results

    def prefix(self, kernel: d.Prefix, type_: TensorType) -> Array:
        result = self.empty(type_)
        ranges = [range(n) for n in result.shape]
        line = ranges.pop(kernel.axis)
        for rest in product(*ranges):
            [total] = self.run([kernel.init])
            for i in reversed(line) if kernel.reverse else line:
                at = (*rest[: kernel.axis], i, *rest[kernel.axis :])
                [total] = self.call(
                    kernel.combine, [total, *self.at([kernel.element], at)]
                )
                result[at] = total
        return result

    def scatter(self, kernel: d.Scatter, type_: TensorType) -> Array:
        result = self.array(_value(kernel.base)).copy()
        keep = e.all_of(()) if kernel.keep is None else kernel.keep
        for u in _indices(self.shape(kernel.space)):
            # Where `keep` is false, the position and the value may be undefined.
            if not self.at([keep], u)[0]:
                continue
            *position, value = self.at([*kernel.position, kernel.value], u)
            at = tuple(map(int, position))
            if not all(0 <= i < n for i, n in zip(at, result.shape, strict=True)):
                raise KernelProgramError(f"an element at {at} of {type_} is written")
            if kernel.combine is not None:
                [value] = self.call(kernel.combine, [result[at], value])
            [result[at]] = _typed([value], type_.dtype)
        return result

    def compact(self, kernel: d.Compact, type_: TensorType) -> Array:
        result = self.empty(type_)
        result[...] = 0
        length = self.size(kernel.length)
        kept = [i for i in range(length) if self.at([kernel.keep], (i,))[0]]
        first = kept[: len(result)]
        result[: len(first)] = first
        return result

    def library(self, kernel: Library, types: Sequence[TensorType]) -> list[Array]:
        routine = ROUTINES[kernel.routine]
        inputs = [self.array(_value(o)) for o in kernel.operands]
        results = list(map(self.empty, types))
        passed = [True] * len(inputs)
        for result, source in zip(results, kernel.overwrites, strict=False):
            if source is not None:
                result[...] = inputs[source]
                passed[source] = False
        numbers = list(map(int, self.run(kernel.scalars)))
        batch = self.shape(types[0].shape[: kernel.batch])
        for at in _indices(batch):
            scratch = list(map(self.empty, kernel.workspace))
            parts = [
                a[kernel.index_of(k, at)] for k, a in enumerate(inputs) if passed[k]
            ]
            arrays = [*parts, *(a[at] for a in results), *scratch]
            shapes = routine.shapes(numbers[: len(routine.scalars)])
            for a, s in zip(arrays, shapes, strict=True):
                if a.size != prod(s):
                    raise KernelProgramError(
                        f"{routine.name} takes {list(s)}, and is given {list(a.shape)}"
                    )
            arrays = [a.reshape(s) for a, s in zip(arrays, shapes, strict=True)]
            status = routine.reference(arrays, numbers)
            if status:
                raise KernelTrap("library", (status,))
        return results


class _Code:
    """Expressions in topological order: each step uses the results of earlier ones."""

    def __init__(self, roots: Sequence[Expr]) -> None:
        order = walk.nodes(*roots)
        slots = {node: slot for slot, node in enumerate(order)}
        self.steps = [(_step(node), [slots[a] for a in node.args]) for node in order]
        self.results = [slots[root] for root in roots]

    def run(self, machine: Machine, variables: Variables) -> list[Any]:
        values: list[Any] = []
        for step, args in self.steps:
            values.append(step(machine, variables, [values[a] for a in args]))
        return [values[slot] for slot in self.results]


def _step(node: Expr) -> Callable[[Machine, Variables, list[Any]], Any]:
    attr = node.attr
    match node.op:
        case "const":
            value = scalars.scalar(attr, node.dtype)
            return lambda _machine, _variables, _args: value
        case "var":
            return lambda machine, variables, _: (
                variables[attr] if attr in variables else machine.counters[attr]
            )
        case "size":
            return lambda machine, _variables, _args: np.int64(machine.size(attr))
        case "element":
            return lambda machine, _, args: machine.read(node, args)
    function = scalars.operation(node)
    return lambda _machine, _variables, args: function(*args)


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a shape, in row-major order."""
    return product(*map(range, shape))


def _axes_at(at: Sequence[int]) -> dict[Var, Any]:
    """Return the variables of the first axes, with their values at an index."""
    pairs = zip(d.axes(len(at)), at, strict=True)
    return {axis.attr: np.int64(i) for axis, i in pairs}


def _value(operand: Any) -> Value:
    assert isinstance(operand, Value)
    return operand


def _typed(values: Sequence[Any], dtype: DType) -> Sequence[Any]:
    """Return `values` after a check that they have `dtype`: lowering rules cast."""
    for value in values:
        actual = value.dtype if isinstance(value, np.generic) else None
        if actual != dtype.dtype:
            raise KernelProgramError(f"an element of {dtype} is computed as {actual}")
    return values
