"""LAPACK's routines on row-major arrays, as `loop_ir.routines` specifies them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from hopflow import dtypes
from hopflow.compiler.cpu.blas import Wrapper
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.module import Module
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import Accumulate, Copy, Declare, For, If, Let, Stmt, Store
from hopflow.loop_ir.routines import Routine


def define(
    module: Module, name: str, routine: Routine, dtype: DType, target: CpuTarget
) -> None:
    """Define the function of a routine."""
    w = Wrapper(module, name, routine, dtype, target)
    _BODIES[routine.name](w)
    w.finish()
    module.define(name, w.f.text)


# --- helpers --------------------------------------------------------------------------


def _each(
    w: Wrapper, shape: tuple[Expr, ...], body: Callable[[Index], list[Stmt]]
) -> None:
    """Emit `body` for each index of `shape`."""
    variables = [Var(w.f.name("at"), dtypes.int64) for _ in shape]
    statements = body(tuple(e.read(var) for var in variables))
    for var, extent in reversed(list(zip(variables, shape, strict=True))):
        statements = [For(var, extent, statements)]
    w.emitter.body(statements)


def _transpose(w: Wrapper, target: Buffer, source: Buffer) -> None:
    """Emit `target[i, j] = source[j, i]`."""
    _each(
        w,
        target.shape,
        lambda at: [Store(target, at, e.load(source, (at[1], at[0])))],
    )


def _transpose_in_place(w: Wrapper, a: Buffer) -> None:
    low, high = Var("low", a.dtype), Var("high", a.dtype)

    def exchange(at: Index) -> list[Stmt]:
        i, j = at
        return [
            If(
                e.compare("lt", j, i),
                [
                    Let(low, e.load(a, (i, j))),
                    Let(high, e.load(a, (j, i))),
                    Store(a, (i, j), e.read(high)),
                    Store(a, (j, i), e.read(low)),
                ],
            )
        ]

    _each(w, a.shape, exchange)


def _copy(w: Wrapper, source: Buffer) -> Buffer:
    copy = w.scratch(f"{source.name}.copy", source.dtype, *source.shape)
    w.emitter.body([Copy(copy, source)])
    return copy


def _fill(w: Wrapper, *targets: Buffer) -> None:
    """Emit code that fills arrays with NaN."""
    for target in targets:
        nan = e.const(math.nan, target.dtype)
        _each(w, target.shape, partial(_store, target, nan))


def _store(target: Buffer, value: Expr, at: Index) -> list[Stmt]:
    return [Store(target, at, value)]


def _need_finite(
    w: Wrapper, a: Buffer, results: tuple[Buffer, ...], *, lower: bool = False
) -> None:
    """If `a`, or its lower half, is not finite, fill `results` with NaN and return 0.

    Some versions of LAPACK do not terminate on an infinity.
    """
    finite = Var(w.f.name("finite"), dtypes.bool_)
    limit = e.const(math.inf, a.dtype)

    def element(at: Index) -> list[Stmt]:
        holds = e.compare("lt", e.unary("abs", e.load(a, at)), limit)
        if lower:
            holds = e.binary("or", holds, e.compare("lt", at[0], at[1]))
        return [Accumulate(finite, "and", holds)]

    w.emitter.body([Declare(finite, e.const(True, dtypes.bool_))])
    _each(w, a.shape, element)
    w.when(w.value(e.unary("not", e.read(finite))), lambda: _fill(w, *results))


class _Info:
    """The INFO argument of LAPACK calls."""

    def __init__(self, w: Wrapper) -> None:
        self.w, self.slot = w, w.f.slot("i32", "info")

    def check(self) -> None:
        """Return INFO from the function if it is not 0."""
        value = self.w.f.emit(f"load i32, ptr {self.slot}")
        status = self.w.f.emit(f"sext i32 {value} to i64")
        self.w.status(status, self.w.f.emit(f"icmp ne i64 {status}, 0"))

    def otherwise(self, fill: Callable[[], None]) -> None:
        """If INFO is not 0, there is no result: `fill` the results and return 0."""
        value = self.w.f.emit(f"load i32, ptr {self.slot}")
        self.w.when(self.w.f.emit(f"icmp ne i32 {value}, 0"), fill)


def _with_workspace(
    w: Wrapper,
    name: str,
    arguments: list[str],
    *,
    integers: bool = False,
    after: tuple[str, ...] = (),
    results: tuple[Buffer, ...] = (),
) -> None:
    """Call a function that first tells the size of its workspace.

    Its last arguments are `work, lwork`, then `iwork, liwork` if `integers`, then
    `after` and INFO. If INFO is not 0, fill `results` with NaN and return 0; without
    `results`, return INFO.
    """
    f, info = w.f, _Info(w)
    answer = w.number(0)
    integer_answer = f.slot("i32", "liwork")
    query = [answer, w.integer(-1)]
    if integers:
        query += [integer_answer, w.integer(-1)]
    w.call(name, *arguments, *query, *after, info.slot)
    info.check()
    t = "float" if w.dtype is dtypes.float32 else "double"
    size = Var(f.name("lwork"), dtypes.int64)
    optimal = f.emit(f"load {t}, ptr {answer}")
    # A float32 cannot represent every size, and may be a little too small.
    w.emitter.values.constants[size] = f.emit(
        f"add i64 {f.emit(f'fptosi {t} {optimal} to i64')}, 16"
    )
    work = w.scratch("work", w.dtype, e.read(size))
    workspace = [w.pointer(work), w.integer(e.read(size))]
    if integers:
        count = Var(f.name("liwork"), dtypes.int64)
        short = f.emit(f"load i32, ptr {integer_answer}")
        w.emitter.values.constants[count] = f.emit(f"sext i32 {short} to i64")
        iwork = w.scratch("iwork", dtypes.int32, e.read(count))
        workspace += [w.pointer(iwork), w.integer(e.read(count))]
    w.call(name, *arguments, *workspace, *after, info.slot)
    if results:
        info.otherwise(lambda: _fill(w, *results))
    else:
        info.check()


# --- routines -------------------------------------------------------------------------


def _potrf(w: Wrapper) -> None:
    a, n = w.buffers["a"], w.scalars["n"]
    w.leave_if_empty(a)
    info = _Info(w)
    order = w.integer(n)
    w.call("potrf", w.character("U"), order, w.pointer(a), w.leading(n), info.slot)
    zero, nan = e.const(0, w.dtype), e.const(math.nan, w.dtype)

    def clear_above(at: Index) -> list[Stmt]:
        return [If(e.compare("lt", at[0], at[1]), [Store(a, at, zero)])]

    def clear_all(at: Index) -> list[Stmt]:
        return [Store(a, at, e.select(e.compare("lt", at[0], at[1]), zero, nan))]

    info.otherwise(lambda: _each(w, a.shape, clear_all))
    _each(w, a.shape, clear_above)


def _getrf(w: Wrapper) -> None:
    a, pivots = w.buffers["a"], w.buffers["pivots"]
    m, n = w.scalars["m"], w.scalars["n"]
    w.leave_if_empty(a)
    scratch = w.scratch("columns", w.dtype, n, m)
    _transpose(w, scratch, a)
    info = _Info(w)
    w.call(
        "getrf",
        w.integer(m),
        w.integer(n),
        w.pointer(scratch),
        w.leading(m),
        w.pointer(pivots),
        info.slot,
    )
    _transpose(w, a, scratch)
    one = e.const(1, dtypes.int32)
    _each(
        w,
        pivots.shape,
        lambda at: [Store(pivots, at, e.sub(e.load(pivots, at), one))],
    )


def _gesv(w: Wrapper) -> None:
    a, x = w.buffers["a"], w.buffers["x"]
    n, k = w.scalars["n"], w.scalars["k"]
    w.leave_if_empty(x)
    factors = _copy(w, a)
    pivots = w.scratch("pivots", dtypes.int32, n)
    columns = w.scratch("columns", w.dtype, k, n)
    info = _Info(w)
    order, lead, matrix = w.integer(n), w.leading(n), w.pointer(factors)
    w.call("getrf", order, order, matrix, lead, w.pointer(pivots), info.slot)
    info.check()
    _transpose(w, columns, x)
    w.call(
        "getrs",
        w.character("T"),
        order,
        w.integer(k),
        matrix,
        lead,
        w.pointer(pivots),
        w.pointer(columns),
        lead,
        info.slot,
    )
    info.check()
    _transpose(w, x, columns)


def _inv(w: Wrapper) -> None:
    a, n = w.buffers["a"], w.scalars["n"]
    w.leave_if_empty(a)
    pivots = w.scratch("pivots", dtypes.int32, n)
    info = _Info(w)
    order, lead = w.integer(n), w.leading(n)
    w.call("getrf", order, order, w.pointer(a), lead, w.pointer(pivots), info.slot)
    info.check()
    _with_workspace(w, "getri", [order, w.pointer(a), lead, w.pointer(pivots)])


def _qr(w: Wrapper) -> None:
    a, q, r = (w.buffers[name] for name in ("a", "q", "r"))
    m, n = w.scalars["m"], w.scalars["n"]
    k = e.binary("min", m, n)
    columns = q.shape[1]
    copy = _copy(w, a)
    tau = w.scratch("tau", w.dtype, k)
    some = w.f.emit(f"icmp ne i64 {w.value(e.mul(m, n))}, 0")
    name = w.f.name("some")
    w.f.branch_if(some, name, f"end.{name}")
    w.f.start(name)
    with w.emitter.values.scope():
        dimensions = [w.integer(n), w.integer(m)]
        _with_workspace(
            w, "gelqf", [*dimensions, w.pointer(copy), w.leading(n), w.pointer(tau)]
        )
    w.f.branch(f"end.{name}")
    w.f.start(f"end.{name}")
    zero = e.const(0, w.dtype)

    def upper(at: Index) -> list[Stmt]:
        is_inside = e.binary(
            "and", e.compare("le", at[0], at[1]), e.compare("lt", at[0], k)
        )
        return [If(is_inside, [Store(r, at, e.load(copy, at))], [Store(r, at, zero)])]

    def reflectors(at: Index) -> list[Stmt]:
        is_inside = e.compare("lt", at[1], k)
        return [If(is_inside, [Store(q, at, e.load(copy, at))], [Store(q, at, zero)])]

    _each(w, r.shape, upper)
    _each(w, q.shape, reflectors)
    w.leave_if_empty(q)
    _with_workspace(
        w,
        "orglq",
        [
            w.integer(columns),
            w.integer(m),
            w.integer(k),
            w.pointer(q),
            w.leading(columns),
            w.pointer(tau),
        ],
    )


def _syevd(w: Wrapper) -> None:
    v = w.buffers["v"]
    w.leave_if_empty(v)
    _call_syevd(w, "V", v, v)
    _transpose_in_place(w, v)


def _syevd_values(w: Wrapper) -> None:
    w.leave_if_empty(w.buffers["a"])
    _call_syevd(w, "N", _copy(w, w.buffers["a"]))


def _call_syevd(w: Wrapper, job: str, matrix: Buffer, *results: Buffer) -> None:
    n, values = w.scalars["n"], w.buffers["w"]
    _need_finite(w, matrix, (values, *results), lower=True)
    _with_workspace(
        w,
        "syevd",
        [
            w.character(job),
            w.character("U"),
            w.integer(n),
            w.pointer(matrix),
            w.leading(n),
            w.pointer(values),
        ],
        integers=True,
        results=(values, *results),
    )


def _gesdd(w: Wrapper) -> None:
    """Call gesdd with `u` and `vt` swapped (see `loop_ir.routines`), or without."""
    a, s = w.buffers["a"], w.buffers["s"]
    m, n = w.scalars["m"], w.scalars["n"]
    outputs = [w.buffers[name] for name in ("vt", "u") if name in w.buffers]
    if len(outputs) == 2:
        _identities_if_empty(w, a, outputs)
    w.leave_if_empty(a)
    _need_finite(w, a, (s, *outputs))
    integers = w.scratch("iwork", dtypes.int32, e.mul(e.index(8), s.shape[0]))
    job = {"gesdd": "S", "gesdd_full": "A", "gesdd_values": "N"}[w.routine.name]
    arguments = [
        w.character(job),
        w.integer(n),
        w.integer(m),
        w.pointer(_copy(w, a)),
        w.leading(n),
        w.pointer(s),
    ]
    if outputs:
        vt, u = outputs
        arguments += [w.pointer(vt), w.leading(n), w.pointer(u), w.leading(u.shape[1])]
    else:
        arguments += [w.number(0), w.integer(1), w.number(0), w.integer(1)]
    after = (w.pointer(integers),)
    _with_workspace(w, "gesdd", arguments, after=after, results=(s, *outputs))


def _identities_if_empty(w: Wrapper, a: Buffer, outputs: list[Buffer]) -> None:
    """If `a` is empty, store identities: any orthogonal `u` and `vt` do."""
    one, zero = e.const(1, w.dtype), e.const(0, w.dtype)
    count = e.mul(*a.shape)

    def identity(out: Buffer) -> None:
        def element(at: Index) -> list[Stmt]:
            return [Store(out, at, e.select(e.compare("eq", *at), one, zero))]

        _each(w, out.shape, element)

    def fill() -> None:
        for out in outputs:
            identity(out)

    w.when(w.f.emit(f"icmp eq i64 {w.value(count)}, 0"), fill)


def _trsm(w: Wrapper) -> None:
    t, x = w.buffers["t"], w.buffers["x"]
    n, k = w.scalars["n"], w.scalars["k"]
    w.leave_if_empty(x)
    w.call(
        "trsm",
        w.character("R"),
        w.choice("%upper", "L", "U"),
        w.choice("%transposed", "T", "N"),
        w.choice("%unit", "U", "N"),
        w.integer(k),
        w.integer(n),
        w.number(1),
        w.pointer(t),
        w.leading(n),
        w.pointer(x),
        w.leading(k),
    )


_BODIES: Final[dict[str, Callable[[Wrapper], None]]] = {
    "potrf": _potrf,
    "getrf": _getrf,
    "gesv": _gesv,
    "inv": _inv,
    "geqrf_orgqr": _qr,
    "geqrf_orgqr_complete": _qr,
    "syevd": _syevd,
    "syevd_values": _syevd_values,
    "gesdd": _gesdd,
    "gesdd_full": _gesdd,
    "gesdd_values": _gesdd,
    "trsm": _trsm,
}
