"""Evaluate what operations lower to, element by element and with every read checked.

Too simple to be wrong, and slow: the reference for lowering rules, before any schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from hopflow.dtypes import DType, as_dtype, int64
from hopflow.errors import HopflowError
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr, scalars, walk
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.kernels import (
    Check,
    Compact,
    Effect,
    Library,
    Operand,
    Pointwise,
    Prefix,
    Reduction,
    Scatter,
)
from hopflow.loop_ir.nest import Buffer, Var
from hopflow.loop_ir.routines import ROUTINES
from hopflow.ops.opdef import OpDef, Sample
from hopflow.symbolic.size import Size, Symbol, substitute

__all__ = ["ArrayOperand", "KernelTrap", "evaluate", "sample_arrays"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Symbols: TypeAlias = Mapping[Symbol, int]


def sample_arrays(sample: Sample, dtype: DType, seed: int = 0) -> list[Array]:
    """Operands for one of an operation's samples, with `dtype` in place of its T."""
    rng = np.random.default_rng(seed)
    arrays = []
    for text in sample.operands:
        name, sizes = text.rstrip("]").split("[")
        shape = tuple(int(n) for n in sizes.split(",") if n.strip())
        chosen = dtype if name == "T" else as_dtype(name)
        if chosen.kind == "b":
            arrays.append(rng.random(shape) < 0.5)
            continue
        low = max(sample.low, 0.0) if chosen.kind == "u" else sample.low
        found = np.asarray(rng.uniform(low, sample.high, shape))
        found = found if chosen.is_float else np.rint(found)
        arrays.append(found.astype(chosen.dtype))
    return [np.asarray(a) for a in arrays]


class KernelTrap(HopflowError):
    """A check did not hold, or a routine failed."""

    def __init__(self, kind: str, values: tuple[int, ...] = ()) -> None:
        self.kind, self.values = kind, values
        super().__init__(f"{kind}: {list(values)}")


class ArrayOperand:
    """An array as lowering rules see it. Its type may have symbolic sizes."""

    def __init__(self, array: Array, type_: TensorType | None = None) -> None:
        self.array = array
        self.type = type_ or TensorType(as_dtype(array.dtype), array.shape)
        self.buffer = Buffer("x", self.type.dtype, (), "input", data=array)

    def __getitem__(self, at: Index, /) -> Expr:
        assert len(at) == self.array.ndim, f"{len(at)} indices into {self.type}"
        return expr.load(self.buffer, at)

    def where(self, condition: Expr, at: Index, otherwise: Expr) -> Expr:
        assert len(at) == self.array.ndim, f"{len(at)} indices into {self.type}"
        element = expr.load(self.buffer, at, condition)
        return expr.select(condition, element, otherwise)


def evaluate(
    op: OpDef,
    operands: Sequence[Array | ArrayOperand],
    symbols: Symbols | None = None,
    **params: Any,
) -> list[Array]:
    """The results of `op`, by its lowering rule.

    Args:
        op: The operation.
        operands: Arrays; or `ArrayOperand`s, whose types may have symbolic sizes.
        symbols: The value of each symbol.
        params: The operation's static parameters.

    Raises:
        KernelTrap: a check of the lowered program does not hold.
    """
    given: list[Operand] = [
        o if isinstance(o, ArrayOperand) else ArrayOperand(o) for o in operands
    ]
    types = op.result_types([o.type for o in given], params)
    lowered = op.lower(types, *given, **params)
    kernels = lowered if isinstance(lowered, tuple) else (lowered,)
    machine = _Machine(symbols or {})
    with np.errstate(all="ignore"):
        return machine.results(kernels, types)


class _Machine:
    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols

    def shape(self, shape: Sequence[Size]) -> tuple[int, ...]:
        sizes = [substitute(n, self.symbols) for n in shape]
        assert all(isinstance(n, int) for n in sizes), f"a symbol of {shape} is unknown"
        return tuple(int(n) for n in sizes)

    def results(
        self, kernels: Sequence[Any], types: Sequence[TensorType]
    ) -> list[Array]:
        for kernel in kernels:
            self.check(getattr(kernel, "checks", ()))
        [first, *_] = kernels
        if isinstance(first, Effect):
            return []
        if isinstance(first, Library):
            return self.library(first, types)
        if isinstance(first, Reduction):
            parts = [k for k in kernels if isinstance(k, Reduction)]
            found = [a for k in parts for a in self.reduction(k, types)]
            return found[: len(types)]
        one: dict[type, Callable[..., Array]] = {
            Pointwise: self.pointwise,
            Prefix: self.prefix,
            Compact: self.compact,
            Scatter: self.scatter,
        }
        pairs = zip(kernels, types, strict=True)
        return [one[type(kernel)](kernel, type_) for kernel, type_ in pairs]

    def function(
        self, rank: int, make: Callable[[Index], Sequence[Expr]]
    ) -> Callable[[Sequence[int]], list[Any]]:
        """What `make` gives, as a function from an index of this rank to scalars."""
        variables = [Var(f"i{axis}", int64) for axis in range(rank)]
        run = self.compile(make(tuple(expr.read(v) for v in variables)))
        return lambda at: run(dict(zip(variables, map(np.int64, at), strict=True)))

    def compile(self, exprs: Sequence[Expr]) -> Callable[[dict[Var, Any]], list[Any]]:
        orders = [walk.nodes(e) for e in exprs]

        def run(variables: dict[Var, Any]) -> list[Any]:
            values: dict[Expr, Any] = {}
            for order in orders:
                for node in order:
                    if node not in values:
                        args = [values[a] for a in node.args]
                        values[node] = self.step(node, args, variables)
            return [values[e] for e in exprs]

        return run

    def step(self, node: Expr, args: list[Any], variables: dict[Var, Any]) -> Any:
        if node.op == "const":
            return scalars.scalar(node.attr, node.dtype)
        if node.op == "var":
            return variables[node.attr]
        if node.op == "size":
            return np.int64(self.shape((node.attr,))[0])
        if node.op == "load":
            array = node.attr.data
            if expr.condition_of(node) is not None:
                *args, condition = args
                if not condition:
                    return scalars.scalar(0, node.dtype)
            inside = all(0 <= i < n for i, n in zip(args, array.shape, strict=True))
            assert inside, f"reads {[int(i) for i in args]} of shape {array.shape}"
            return array[tuple(args)]
        return scalars.operation(node)(*args)

    def check(self, checks: Sequence[Check]) -> None:
        for check in checks:
            shape = self.shape(check.shape)
            holds = self.function(len(shape), partial(_test, check))
            for at in np.ndindex(shape):
                ok, *values = holds(at)
                if not ok:
                    raise KernelTrap(check.kind, tuple(map(int, values)))

    def pointwise(self, kernel: Pointwise, type_: TensorType) -> Array:
        result = np.empty(self.shape(type_.shape), type_.dtype.dtype)
        if result.size:
            element = self.function(type_.ndim, lambda i: [kernel.element(i)])
            for at in np.ndindex(result.shape):
                [result[at]] = _typed(element(at), type_.dtype)
        return result

    def scatter(self, kernel: Scatter, type_: TensorType) -> Array:
        assert isinstance(kernel.base, ArrayOperand)
        result = kernel.base.array.copy()
        space = self.shape(kernel.space)
        if 0 in space:
            return result
        rank = result.ndim
        keep = kernel.keep or (lambda _: expr.const(True, as_dtype("bool")))
        update = self.function(
            len(space), lambda u: [*kernel.position(u), kernel.value(u), keep(u)]
        )
        old, new = (Var(name, type_.dtype) for name in ("old", "new"))
        combine = kernel.combine or (lambda _old, new: new)
        combined = self.compile([combine(expr.read(old), expr.read(new))])
        for u in np.ndindex(space):
            *position, value, kept = update(u)
            if not kept:
                continue
            at = tuple(int(i) for i in position)
            assert all(0 <= i < n for i, n in zip(at, result.shape, strict=True)), at
            assert len(at) == rank
            [result[at]] = _typed(combined({old: result[at], new: value}), type_.dtype)
        return result

    def reduction(self, kernel: Reduction, types: Sequence[TensorType]) -> list[Array]:
        shape, space = self.shape(types[0].shape), self.shape(kernel.space)
        count = len(kernel.init)
        accumulators = [Var(f"a{i}", e.dtype) for i, e in enumerate(kernel.init)]
        elements = [Var(f"e{i}", e.dtype) for i, e in enumerate(kernel.init)]
        first = self.compile(kernel.init)({})
        reads = [tuple(map(expr.read, vs)) for vs in (accumulators, elements)]
        combine = kernel.combine
        if isinstance(combine, str):
            name = combine
            step = [expr.binary(name, a, e) for a, e in zip(*reads, strict=True)]
        else:
            step = list(combine(*reads))
        stepped = self.compile(step)
        rank = len(shape)
        element = (
            self.function(
                rank + len(space), lambda i: kernel.element(i[:rank], i[rank:])
            )
            if 0 not in (*shape, *space)
            else None
        )
        index = [Var(f"i{axis}", int64) for axis in range(rank)]
        at_reads = tuple(map(expr.read, index))
        finish = self.compile([f(at_reads, reads[0]) for f in kernel.finish])
        dtypes = [t.dtype for t in types[: len(kernel.finish)]]
        results = [np.empty(shape, d.dtype) for d in dtypes]
        for at in np.ndindex(shape):
            values = list(first)
            for r in np.ndindex(space):
                assert element is not None
                found = element((*at, *r))
                both = [*accumulators, *elements], [*values, *found]
                values = stepped(dict(zip(*both, strict=True)))
            assert len(values) == count
            known = dict(zip(accumulators, values, strict=True))
            known.update(zip(index, map(np.int64, at), strict=True))
            for result, value, dtype in zip(
                results, finish(known), dtypes, strict=True
            ):
                [result[at]] = _typed([value], dtype)
        return results

    def prefix(self, kernel: Prefix, type_: TensorType) -> Array:
        result = np.empty(self.shape(type_.shape), type_.dtype.dtype)
        if not result.size:
            return result
        element = self.function(type_.ndim, lambda i: [kernel.element(i)])
        old, new = Var("old", kernel.init.dtype), Var("new", kernel.init.dtype)
        combine = self.compile([kernel.combine(expr.read(old), expr.read(new))])
        [start] = self.compile([kernel.init])({})
        ranges = [range(n) for n in result.shape]
        line = ranges.pop(kernel.axis)
        for rest in product(*ranges):
            value = start
            for i in reversed(line) if kernel.reverse else line:
                at = (*rest[: kernel.axis], i, *rest[kernel.axis :])
                [value] = combine({old: value, new: element(at)[0]})
                result[at] = value
        return result

    def compact(self, kernel: Compact, type_: TensorType) -> Array:
        keep = self.function(1, lambda i: [kernel.keep(i)])
        [length] = self.shape((kernel.length,))
        result = np.zeros(self.shape(type_.shape), type_.dtype.dtype)
        found = [i for i in range(length) if keep((i,))[0]][: len(result)]
        result[: len(found)] = found
        return result

    def library(self, kernel: Library, types: Sequence[TensorType]) -> list[Array]:
        routine = ROUTINES[kernel.routine]
        inputs = [o.array for o in kernel.operands if isinstance(o, ArrayOperand)]
        results = [np.empty(self.shape(t.shape), t.dtype.dtype) for t in types]
        passed = [True] * len(inputs)
        for result, source in zip(results, kernel.overwrites, strict=False):
            if source is not None:
                result[...] = inputs[source]
                passed[source] = False
        inputs = [a for a, keep in zip(inputs, passed, strict=True) if keep]
        numbers = [int(n) for n in self.compile(kernel.scalars)({})]
        batch = self.shape(types[0].shape[: kernel.batch])
        for at in np.ndindex(batch):
            scratch = [
                np.empty(self.shape(t.shape), t.dtype.dtype) for t in kernel.workspace
            ]
            arrays = [*(a[at] for a in (*inputs, *results)), *scratch]
            shapes = routine.shapes(numbers[: len(routine.scalars)])
            arrays = [a.reshape(s) for a, s in zip(arrays, shapes, strict=True)]
            if routine.reference(arrays, numbers):
                raise KernelTrap("library")
        return results


def _test(check: Check, at: Index) -> tuple[Expr, ...]:
    return check.holds(at), *check.values(at)


def _typed(values: Sequence[Any], dtype: DType) -> Sequence[Any]:
    """`values`, all of `dtype`: a lowering rule casts by itself."""
    for value in values:
        assert np.asarray(value).dtype == dtype.dtype, (np.asarray(value).dtype, dtype)
    return values
