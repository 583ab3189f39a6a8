"""Sorting: a stable merge sort of positions, as a program of the Loop IR."""

from hopflow import dtypes
from hopflow.compiler.cpu.blas import Wrapper
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.module import Module
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.nest import (
    Assign,
    Copy,
    Declare,
    For,
    Let,
    Stmt,
    Store,
    Swap,
    While,
)
from hopflow.loop_ir.routines import ROUTINES

_I64 = dtypes.int64


def define(module: Module, name: str, dtype: DType, target: CpuTarget) -> None:
    """Define "argsort" for keys of `dtype`."""
    w = Wrapper(module, name, ROUTINES["argsort"], dtype, target)
    keys, out, workspace = (w.buffers[a] for a in ("keys", "out", "workspace"))
    n = w.scalars["n"]
    descending = e.compare("ne", w.scalars["descending"], e.index(0))
    source, sink = (Buffer(name, _I64, (n,), "arena") for name in ("source", "sink"))
    w.memory.place_in_slot(source, w.pointer(out))
    w.memory.place_in_slot(sink, w.pointer(workspace))
    at = Var("at", _I64)
    w.emitter.body(
        [
            For(at, n, [Store(source, (e.read(at),), e.read(at))]),
            *_merge_passes(keys, source, sink, n, descending),
        ]
    )
    # An odd number of passes ends in the workspace.
    same = w.f.emit(f"icmp eq ptr {w.pointer(source)}, {w.pointer(out)}")
    w.when(same, lambda: None)
    w.emitter.body([Copy(out, workspace)])
    w.finish()
    module.define(name, w.f.text)


def _merge_passes(
    keys: Buffer, source: Buffer, sink: Buffer, n: Expr, descending: Expr
) -> list[Stmt]:
    """Merge runs of 1, 2, 4, ... from `source` to `sink`, which then change places."""
    run, start = Var("run", _I64), Var("start", _I64)
    middle, end = Var("middle", _I64), Var("end", _I64)

    def later(position: Var) -> Expr:
        return e.binary("min", n, e.add(e.read(position), e.read(run)))

    return [
        Declare(run, e.index(1)),
        While(
            [],
            e.compare("lt", e.read(run), n),
            [
                Declare(start, e.index(0)),
                While(
                    [],
                    e.compare("lt", e.read(start), n),
                    [
                        Let(
                            middle,
                            e.binary("min", n, e.add(e.read(start), e.read(run))),
                        ),
                        Let(
                            end, e.binary("min", n, e.add(e.read(middle), e.read(run)))
                        ),
                        *_merge(
                            keys,
                            source,
                            sink,
                            (e.read(start), e.read(middle), e.read(end)),
                            descending,
                        ),
                        Assign(start, e.read(end)),
                    ],
                ),
                Swap(source, sink),
                Assign(run, e.add(e.read(run), e.read(run))),
            ],
        ),
    ]


def _merge(
    keys: Buffer,
    source: Buffer,
    sink: Buffer,
    borders: tuple[Expr, Expr, Expr],
    descending: Expr,
) -> list[Stmt]:
    """Merge the runs [start, middle) and [middle, end), without a branch that the data
    decide. A position past its run is read as the last of it, and not used."""
    start, middle, end = borders
    left, right, at = Var("left", _I64), Var("right", _I64), Var("step", _I64)
    from_left, from_right = Var("from_left", _I64), Var("from_right", _I64)
    x, y = Var("x", keys.dtype), Var("y", keys.dtype)
    take = Var("take", dtypes.bool_)
    one = e.index(1)
    last_left, last_right = e.sub(middle, one), e.sub(end, one)
    before = e.select(
        descending,
        _less(e.read(x), e.read(y)),
        _less(e.read(y), e.read(x)),
    )
    left_done = e.compare("ge", e.read(left), middle)
    right_left = e.compare("lt", e.read(right), end)
    taken = e.cast(e.read(take), _I64)
    body: list[Stmt] = [
        Let(from_left, e.load(source, (e.binary("min", e.read(left), last_left),))),
        Let(from_right, e.load(source, (e.binary("min", e.read(right), last_right),))),
        Let(x, e.load(keys, (e.read(from_left),))),
        Let(y, e.load(keys, (e.read(from_right),))),
        Let(take, e.binary("and", right_left, e.binary("or", left_done, before))),
        Store(
            sink,
            (e.add(start, e.read(at)),),
            e.select(e.read(take), e.read(from_right), e.read(from_left)),
        ),
        Assign(right, e.add(e.read(right), taken)),
        Assign(left, e.add(e.read(left), e.sub(one, taken))),
    ]
    return [
        Declare(left, start),
        Declare(right, middle),
        For(at, e.sub(end, start), body),
    ]


def _less(x: Expr, y: Expr) -> Expr:
    """The order of keys: NaNs are greater than any number."""
    less = e.compare("lt", x, y)
    if x.dtype.kind != "f":
        return less
    x_nan, y_nan = e.unary("isnan", x), e.unary("isnan", y)
    return e.binary("or", less, e.binary("and", e.unary("not", x_nan), y_nan))
