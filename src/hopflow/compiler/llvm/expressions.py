"""Evaluators of expressions into registers, each expression once where that is safe.

A memo table keeps the register of an expression until the scope that computed it ends.
If the expression depends on memory or on a mutable variable, the next write removes it.
Expressions that apply one operation to the same registers share one register (value
numbering). Index arithmetic that is invariant in a loop goes into the loop's preheader,
so that LLVM's loop passes have nothing left to do.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import OPAQUE, RARE, Function, Module
from hopflow.compiler.llvm.types import (
    NARROW_FLOATS,
    constant,
    memory_type,
    register_type,
)
from hopflow.dtypes import DType, float32, int64, uint64
from hopflow.loop_ir import math, walk
from hopflow.loop_ir.expr import (
    COMPARE,
    MATH,
    Buffer,
    Expr,
    Index,
    Var,
    condition_of,
    index_of,
    read,
)
from hopflow.loop_ir.intervals import EVERYTHING, Interval, interval, limits

Leaf: TypeAlias = Callable[[Expr], str]

HOISTED: Final = frozenset(
    ("add", "sub", "mul", "neg", "and", "shl", "max", "min", "select", *COMPARE)
)
"""Operations of i64 that go into preheaders: they are cheap and never trap."""
MOST_HOISTED: Final = 24
"""The limit of lines in one preheader; more values would spill."""
MOST_TRIPS: Final = 1 << 62
"""A number of iterations that no loop can reach."""


class Evaluator:
    """An evaluator of expressions with `width` lanes; subclasses define the leaves.

    memo       the register of each expression
    volatile   the expressions in `memo` that a write may change
    numbers    the register of each operation on registers
    """

    def __init__(self, f: Function, width: int) -> None:
        self.f, self.width = f, width
        self.memo: dict[Expr, str] = {}
        self.volatile: set[Expr] = set()
        self.numbers: dict[Hashable, str] = {}  # value numbering

    def value(self, expr: Expr) -> str:
        """Return the register, or the constant, that holds `expr`."""
        memo = self.memo
        register = memo.get(expr)
        if register is not None:
            return register
        pending = [expr]
        while pending:  # a chain may be too deep for recursion
            node = pending[-1]
            if node in memo:
                pending.pop()
                continue
            inputs = self.inputs(node)
            missing = [a for a in inputs if a not in memo]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            if not inputs or node.op == "load":
                self.remember(node, self.compute(node))
                continue
            operands = (inputs[0].dtype, *[memo[a] for a in inputs])
            key = (node.op, node.dtype, operands)
            numbered = self.numbers.get(key)
            self.remember(node, self.compute(node) if numbered is None else numbered)
            if numbered is None:
                self.number(key, memo[node])
                self._bound(node)
        return memo[expr]

    def _bound(self, node: Expr) -> None:
        """Record the bound of an index that is never negative, or those of a float."""
        if node.dtype.is_float:
            ends = interval(node, self._ends)
            if ends != EVERYTHING:
                self.f.intervals[self.memo[node]] = ends
        elif node.dtype is int64 and node.op in _BOUNDS:
            bounds = [self.bound(a) for a in node.args]
            bound = _BOUNDS[node.op](*bounds) if all(bounds) else 0
            if 0 < bound <= 1 << 63:
                self.f.bounds[self.memo[node]] = bound

    def bound(self, node: Expr) -> int:
        """Return an exclusive upper bound of an i64 in `memo` that is never negative.

        It is 0 if the value may be negative, or has no known bound.
        """
        if node.is_const:
            value: int = node.attr
            return max(value + 1, 0)
        return self.f.bounds.get(self.memo[node], 0)

    def _ends(self, node: Expr) -> Interval:
        """Return the bounds of a number in `memo`."""
        if not node.dtype.is_float:
            return limits(node.dtype)
        if node.is_const:
            return interval(node, self._ends)
        return self.f.intervals.get(self.memo[node], EVERYTHING)

    def number(self, key: Hashable, register: str) -> None:
        """Record the register of an operation on registers."""
        self.numbers[key] = register

    def inputs(self, node: Expr) -> tuple[Expr, ...]:
        """Return the expressions that `compute(node)` needs in `memo`."""
        return node.args[len(index_of(node)) :] if node.op == "load" else node.args

    def remember(self, node: Expr, register: str) -> None:
        self.memo[node] = register
        volatile = self.volatile
        if (node.op in ("var", "load") and self.may_change(node)) or (
            volatile and not volatile.isdisjoint(node.args)
        ):
            volatile.add(node)

    def forget_loads(self) -> None:
        """Remove the registers that a write, or another iteration, may have changed."""
        for node in self.volatile:
            self.memo.pop(node, None)
        self.volatile.clear()

    def may_change(self, leaf: Expr) -> bool:
        """Return whether a write can change the value of a "var" or a "load"."""
        raise NotImplementedError

    def compute(self, node: Expr) -> str:
        """Emit `node`, whose inputs are in `memo`."""
        op, memo = node.op, self.memo
        if op == "const":
            return constant(node.attr, node.dtype, self.width)
        if op == "var":
            return self.variable(node.attr)
        if op == "load":
            return self.load(node.attr, index_of(node), condition_of(node))
        args = [memo[a] for a in node.args]
        is_index = node.dtype is int64 and op in ("div", "rem")
        if is_index and all(map(self.bound, node.args)):
            return operations.operation(self.f, op, uint64, self.width, args)
        return apply(self.f, node, args, self.width)

    def variable(self, var: Var) -> str:
        raise NotImplementedError

    def load(self, buffer: Buffer, at: Index, condition: Expr | None) -> str:
        """Emit a read whose condition, if any, is in `memo`."""
        raise NotImplementedError


_BOUNDS: Final[dict[str, Callable[[int, int], int]]] = {
    "add": lambda x, y: x + y - 1,
    "mul": lambda x, y: (x - 1) * (y - 1) + 1,
    "div": lambda x, _: x,
    "rem": lambda x, y: min(x, y - 1),
    "and": min,
    "min": min,
    "max": max,
    "lshr": lambda x, _: x,
    "ashr": lambda x, _: x,
}
"""Exclusive bounds of operations on integers from 0 to x - 1 and from 0 to y - 1."""


def apply(f: Function, node: Expr, args: list[str], width: int) -> str:
    """Emit the operation of `node` on registers."""
    op = node.op
    if op in MATH:
        return call_math(f, op, node.dtype, width, args)
    if op == "cast":
        [source], [register] = node.args, args
        from_, to = source.dtype, node.dtype
        fits = from_.is_float and to.is_integer and _fits(f, register, to)
        return operations.cast(f, register, from_, to, width, fits=fits)
    if op == "bitcast":
        return operations.bitcast(f, args[0], node.args[0].dtype, node.dtype, width)
    compares = op in COMPARE or op == "isnan"
    dtype = node.args[0].dtype if compares else node.dtype
    return operations.operation(f, op, dtype, width, args)


def _fits(f: Function, register: str, dtype: DType) -> bool:
    """Return whether a float is NaN, or within the range of an integer dtype."""
    low, high = f.intervals.get(register, EVERYTHING)
    least, most = limits(dtype)
    return least <= low and high <= most


@dataclass(slots=True)
class _Scope:
    """The expressions and operations whose registers end with a scope."""

    nodes: list[Expr] = field(default_factory=list)
    keys: list[Hashable] = field(default_factory=list)


class ScalarEvaluator(Evaluator):
    """An evaluator of expressions into scalar registers."""

    def __init__(self, f: Function, memory: Memory) -> None:
        super().__init__(f, 1)
        self.memory = memory
        self.constants: dict[Var, str] = {}  # registers of immutable variables
        self.slots: dict[Var, str] = {}  # stack slots of mutable variables
        self._loads: list[Hashable] = []  # keys of `numbers` that a write may change
        self._scopes = [_Scope()]
        self._enclosing: list[int] = []  # the number of scopes around each open loop

    def compute(self, node: Expr) -> str:
        if node.op in HOISTED and node.args[-1].dtype is int64:
            depth = self._outermost(*[self.memo[a] for a in node.args])
            if depth < self.f.depth:
                with self.f.preheader(depth):
                    return super().compute(node)
        return super().compute(node)

    def variable(self, var: Var) -> str:
        register = self.constants.get(var)
        if register is not None:
            return register
        slot = self.slots[var]
        return self.f.emit(f"load {register_type(var.dtype)}, ptr {slot}")

    def has(self, value: Expr) -> bool:
        """Return whether all variables of a value are there."""
        names = (n.attr for n in walk.nodes(value) if n.op == "var")
        return all(var in self.constants or var in self.slots for var in names)

    def load(self, buffer: Buffer, at: Index, condition: Expr | None) -> str:
        address = self.address(buffer, self.memory.linear(buffer, at))
        if condition is not None:
            address = self.memory.readable(address, self.value(condition))
        key = ("load", buffer.dtype, address)
        register = self.numbers.get(key)
        if register is None:
            register = self.memory.load(buffer, address)
            self.number(key, register)
            if not self.memory.is_invariant(buffer):
                self._loads.append(key)
        return register

    def forget_loads(self) -> None:
        super().forget_loads()
        for key in self._loads:
            self.numbers.pop(key, None)
        self._loads.clear()

    def may_change(self, leaf: Expr) -> bool:
        if leaf.op == "var":
            return leaf.attr in self.slots
        return not self.memory.is_invariant(leaf.attr)

    # --- addresses

    def address(self, buffer: Buffer, distance: Expr) -> str:
        """Return the address of an element at a linear distance from the start.

        The part that is invariant in the innermost loop is added first.
        """
        pointer = self.memory.pointer(buffer)
        if distance.op == "add":
            parts = sorted(map(self.value, distance.args), key=self.f.depth_of)
            if self.f.depth_of(parts[0]) < self.f.depth_of(parts[1]):
                # The intermediate address may lie outside of the buffer.
                row = self._behind(buffer, pointer, parts[0], "getelementptr")
                return self._behind(buffer, row, parts[1], "getelementptr")
        whole = self.value(distance)
        return self._behind(buffer, pointer, whole, "getelementptr inbounds")

    def _behind(
        self, buffer: Buffer, pointer: str, distance: str, operation: str
    ) -> str:
        """Return the address `distance` elements after `pointer`."""
        if distance == "0":
            return pointer
        instruction = (
            f"{operation} {memory_type(buffer.dtype)}, ptr {pointer}, i64 {distance}"
        )
        address = self.numbers.get(instruction)
        if address is None:
            depth = self._outermost(pointer, distance)
            if depth < self.f.depth:
                with self.f.preheader(depth):
                    address = self.f.emit(instruction)
            else:
                address = self.f.emit(instruction)
            self.number(instruction, address)
        return address

    # --- loops and scopes

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Drop at the end the registers that were computed inside."""
        self._scopes.append(_Scope())
        yield
        scope = self._scopes.pop()
        for node in scope.nodes:
            self.memo.pop(node, None)
            self.volatile.discard(node)
        for key in scope.keys:
            self.numbers.pop(key, None)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Emit the blocks of a loop in this context."""
        self._enclosing.append(len(self._scopes))
        with self.f.loop():
            yield
        self._enclosing.pop()

    @contextmanager
    def preheader(self, depth: int) -> Iterator[None]:
        """Emit in this context into the preheader of the open loop at `depth`."""
        scopes, enclosing = self._scopes, self._enclosing
        self._scopes, self._enclosing = scopes[: enclosing[depth]], enclosing[:depth]
        with self.f.preheader(depth):
            yield
        self._scopes, self._enclosing = scopes, enclosing

    def _outermost(self, *operands: str) -> int:
        """Return the depth of the outermost open loop in which operands are invariant.

        Its preheader must have room; without such a loop it is the current depth.
        """
        f, current = self.f, self.f.depth
        depth = max(map(f.depth_of, operands)) if current else 0
        while depth < current and f.preheader_size(depth) >= MOST_HOISTED:
            depth += 1
        return depth

    def remember(self, node: Expr, register: str) -> None:
        super().remember(node, register)
        scope = self._scope_of(register) if node.args else self._scopes[-1]
        scope.nodes.append(node)

    def number(self, key: Hashable, register: str) -> None:
        super().number(key, register)
        self._scope_of(register).keys.append(key)

    def _scope_of(self, register: str) -> _Scope:
        """Return the scope that a register belongs to.

        For a register in the preheader of a loop it is the scope that encloses the
        loop.
        """
        depth = self.f.depth_of(register)
        if depth < len(self._enclosing):
            return self._scopes[self._enclosing[depth] - 1]
        return self._scopes[-1]


# --- mathematical functions -----------------------------------------------------------


MATH_WORK: Final = 50
"""The number of operations that a mathematical function counts as."""


class _Parameters(Evaluator):
    """An evaluator of the body of a mathematical function over its parameters."""

    def __init__(self, f: Function, width: int, parameters: dict[Var, str]) -> None:
        super().__init__(f, width)
        self._parameters = parameters

    def variable(self, var: Var) -> str:
        return self._parameters[var]

    def may_change(self, _: Expr) -> bool:
        return False


def call_math(f: Function, name: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit a function of MATH; narrow floats are computed in float32 and rounded."""
    f.work += MATH_WORK
    if name == "fmod":
        wide = float32 if dtype in NARROW_FLOATS else dtype
        f.module.symbols.add("fmodf" if wide is float32 else "fmod")
        if f.module.has_fma and dtype is wide:
            return operations.float_remainder(f, dtype, width, args)
        return operations.operation(f, "rem", dtype, width, args)
    if name == "ipow":
        return operations.integer_power(f, dtype, width, args)
    if name == "nextafter" and dtype in NARROW_FLOATS:
        return _inline(f, name, dtype, width, args)
    if dtype in NARROW_FLOATS:
        result = call_math(f, name, float32, width, args)
        return operations.round_narrow(f, result, dtype, width)
    t = register_type(dtype, width)
    function = f"hf.{name}.{dtype.short}.{width}"
    if not f.module.has_function(function):
        _define_math(f.module, function, name, dtype, width, len(args))
    return f.emit(f"call {t} @{function}({', '.join(f'{t} {a}' for a in args)})")


def _inline(f: Function, name: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit the expansion of a mathematical function inline."""
    variables = {Var(f"x{i}", dtype): a for i, a in enumerate(args)}
    expansion = math.expand(name, *map(read, variables))
    return _Parameters(f, width, variables).value(expansion)


def _define_math(
    module: Module, function: str, name: str, dtype: DType, width: int, arity: int
) -> None:
    """Define a function of MATH for `width` lanes."""
    module.define(function, "")  # keep its place, before the functions that it uses
    t = register_type(dtype, width)
    args = [f"%x{i}" for i in range(arity)]
    signature = ", ".join(f"{t} {a}" for a in args)
    f = Function(
        module, f"internal {t} @{function}({signature})", module.inlined(function)
    )
    near = math.near(name, read(Var("x", dtype)))
    if near is None:
        result = _inline(f, name, dtype, width, args)
    else:
        result = _near_or_far(f, name, dtype, width)
    f.do(f"ret {t} {result}")
    module.define(function, f.text)


def _near_or_far(f: Function, name: str, dtype: DType, width: int) -> str:
    """Emit a function of `%x0` with a short expansion for all but large arguments.

    If some lane has a large argument, which is rare, all lanes go through memory to a
    function with the full expansion that is compiled once in a process.
    """
    x = Var("x", dtype)
    near = math.near(name, read(x))
    assert near is not None
    short, limit = near
    t = register_type(dtype, width)
    size = operations.operation(f, "abs", dtype, width, ["%x0"])
    far = f.emit(f"fcmp ugt {t} {size}, {constant(limit, dtype, width)}")
    far = operations.any_lane(f, far, width)
    slot = f.slot(t, "lanes")
    f.branch_if(far, "far", "near", RARE)
    f.start("far")
    f.do(f"store {t} %x0, ptr {slot}")
    library = f"hf_far_{name}_{dtype.short}"
    f.module.external(f"void @{library}(ptr, i64)", f"cold {OPAQUE}")
    f.do(f"call void @{library}(ptr {slot}, i64 {width})")
    full = f.emit(f"load {t}, ptr {slot}")
    f.branch("end")
    f.start("near")
    result = _Parameters(f, width, {x: "%x0"}).value(short)
    f.branch("end")
    f.start("end")
    return f.emit(f"phi {t} [ {full}, %far ], [ {result}, %near ]")


def define_far(module: Module, function: str, name: str, dtype: DType) -> None:
    """Define the function that `_near_or_far` calls on the elements of an array."""
    f = Function(module, f"void @{function}(ptr %values, i64 %count)", "nounwind")
    t = register_type(dtype)
    f.branch("each")
    f.start("each")
    f.do("%i = phi i64 [ 0, %entry ], [ %next, %each ]")
    address = f.emit(f"getelementptr {t}, ptr %values, i64 %i")
    x = f.emit(f"load {t}, ptr {address}")
    f.do(f"store {t} {_inline(f, name, dtype, 1, [x])}, ptr {address}")
    f.do("%next = add i64 %i, 1")
    f.branch_if(f.emit("icmp slt i64 %next, %count"), "each", "end")
    f.start("end")
    f.do("ret void")
    module.define(function, f.text)
