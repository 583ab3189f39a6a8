"""Expressions as registers, each computed once where that is safe.

A register is remembered with its expression until the scope ends in which it was
computed. If it depends on memory or on a mutable variable, it is forgotten already at
the next write.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from hopflow.compiler.llvm import operations
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import OPAQUE, RARE, Function, Module
from hopflow.compiler.llvm.types import (
    NARROW_FLOATS,
    constant,
    lanes,
    register_type,
)
from hopflow.dtypes import DType, float32
from hopflow.loop_ir import math
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

Leaf: TypeAlias = Callable[[Expr], str]


class Evaluator:
    """Expressions as registers of `width` lanes. Subclasses say what the leaves are."""

    def __init__(self, f: Function, width: int) -> None:
        self.f, self.width = f, width
        self.memo: dict[Expr, str] = {}
        self.volatile: set[Expr] = set()

    def value(self, expr: Expr) -> str:
        """The register, or the constant, that holds `expr`."""
        memo = self.memo
        known = memo.get(expr)
        if known is not None:
            return known
        pending = [expr]
        while pending:  # not by recursion: a chain may be thousands of nodes deep
            node = pending[-1]
            if node in memo:
                pending.pop()
                continue
            below = [a for a in self.inputs(node) if a not in memo]
            if below:
                pending += reversed(below)
            else:
                pending.pop()
                self.remember(node, self.compute(node))
        return memo[expr]

    def inputs(self, node: Expr) -> tuple[Expr, ...]:
        """What must be in `memo` before `compute(node)`."""
        return node.args[len(index_of(node)) :] if node.op == "load" else node.args

    def remember(self, node: Expr, register: str) -> None:
        self.memo[node] = register
        volatile = self.volatile
        if (node.op in ("var", "load") and self.may_change(node)) or (
            volatile and not volatile.isdisjoint(node.args)
        ):
            volatile.add(node)

    def forget_loads(self) -> None:
        """Forget what a write, or another iteration, may have changed."""
        for node in self.volatile:
            self.memo.pop(node, None)
        self.volatile.clear()

    def may_change(self, leaf: Expr) -> bool:
        """Whether a write can change what this "var" or "load" gives."""
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
        return apply(self.f, node, args, self.width)

    def variable(self, var: Var) -> str:
        raise NotImplementedError

    def load(self, buffer: Buffer, at: Index, condition: Expr | None) -> str:
        """Emit a read; its condition is in `memo`."""
        raise NotImplementedError


def apply(f: Function, node: Expr, args: list[str], width: int) -> str:
    """Emit the operation of `node` on registers."""
    op = node.op
    if op in MATH:
        return call_math(f, op, node.dtype, width, args)
    if op == "cast":
        return operations.cast(f, args[0], node.args[0].dtype, node.dtype, width)
    if op == "bitcast":
        return operations.bitcast(f, args[0], node.args[0].dtype, node.dtype, width)
    compares = op in COMPARE or op == "isnan"
    dtype = node.args[0].dtype if compares else node.dtype
    return operations.operation(f, op, dtype, width, args)


class ScalarEvaluator(Evaluator):
    """Expressions as scalar registers."""

    def __init__(self, f: Function, memory: Memory) -> None:
        super().__init__(f, 1)
        self.memory = memory
        self.constants: dict[Var, str] = {}  # variables that never change: registers
        self.slots: dict[Var, str] = {}  # the others: stack slots
        self._log: list[Expr] = []

    def variable(self, var: Var) -> str:
        register = self.constants.get(var)
        if register is not None:
            return register
        slot = self.slots[var]
        return self.f.emit(f"load {register_type(var.dtype)}, ptr {slot}")

    def load(self, buffer: Buffer, at: Index, condition: Expr | None) -> str:
        distance = self.value(self.memory.linear(buffer, at))
        address = self.memory.address(buffer, distance)
        if condition is not None:
            address = self.memory.readable(address, self.value(condition))
        return self.memory.load(buffer, address)

    def may_change(self, leaf: Expr) -> bool:
        if leaf.op == "var":
            return leaf.attr in self.slots
        return not self.memory.is_invariant(leaf.attr)

    def remember(self, node: Expr, register: str) -> None:
        super().remember(node, register)
        self._log.append(node)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget at the end what was computed within."""
        start = len(self._log)
        yield
        for node in self._log[start:]:
            self.memo.pop(node, None)
            self.volatile.discard(node)
        del self._log[start:]


# --- mathematical functions -----------------------------------------------------------


MATH_WORK: Final = 50
"""How many operations a mathematical function counts for."""


class _Parameters(Evaluator):
    """The body of a mathematical function: its only leaves are its parameters."""

    def __init__(self, f: Function, width: int, parameters: dict[Var, str]) -> None:
        super().__init__(f, width)
        self._parameters = parameters

    def variable(self, var: Var) -> str:
        return self._parameters[var]

    def may_change(self, _: Expr) -> bool:
        return False


def call_math(f: Function, name: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit a function in MATH; narrow floats compute in float32 and round."""
    f.work += MATH_WORK
    if name == "fmod":
        wide = float32 if dtype in NARROW_FLOATS else dtype
        f.module.symbols.add("fmodf" if wide is float32 else "fmod")
        return operations.operation(f, "rem", dtype, width, args)
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
    """The expansion of a function, in place."""
    variables = {Var(f"x{i}", dtype): a for i, a in enumerate(args)}
    expansion = math.expand(name, *map(read, variables))
    return _Parameters(f, width, variables).value(expansion)


def _define_math(
    module: Module, function: str, name: str, dtype: DType, width: int, arity: int
) -> None:
    """Define a function in MATH for `width` lanes."""
    module.define(function, "")  # the place of the name; it may be used by itself
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
    """A function of `%x0` whose arguments are seldom so large that it needs its full
    expansion: a short one, unless some lane does; then all go through memory to a
    function that is compiled once in a process."""
    x = Var("x", dtype)
    near = math.near(name, read(x))
    assert near is not None
    short, limit = near
    t = register_type(dtype, width)
    size = operations.operation(f, "abs", dtype, width, ["%x0"])
    far = f.emit(f"fcmp ugt {t} {size}, {constant(limit, dtype, width)}")
    if width > 1:
        mask = lanes("i1", width)
        any_ = f"i1 @llvm.vector.reduce.or.v{width}i1"
        f.module.declare(f"{any_}({mask})")
        far = f.emit(f"call {any_}({mask} {far})")
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
    """Define what `_near_or_far` calls: the function of each element of an array."""
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
