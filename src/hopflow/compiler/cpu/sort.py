"""Sorting: the positions of keys in the order of their codes, as Loop IR.

Many keys are sorted digit by digit, from the last one (D. Knuth, The Art of Computer
Programming, volume 3, section 5.2.5): each pass keeps the order of the one before where
digits are equal. Few keys are merged, which needs no counts of digits; in the shortest
runs each key is compared with all others. Both are stable.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.cpu.blas import Wrapper
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.module import Module
from hopflow.compiler.llvm.types import NARROW_FLOATS, memory_type
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import (
    Assign,
    Binding,
    Copy,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
    Swap,
    While,
)
from hopflow.loop_ir.routines import ROUTINES

FEW: Final = 2
"""Up to this number of keys for each bit of a code are merged: counting digits takes
as long as the digits that there can be."""
RUN: Final = 16
"""The number of keys in a run that is not merged from shorter ones."""
KEPT: Final = 64
"""Up to this number of the largest keys are found by one scan."""
_DIGIT: Final = 8
"""Bits of a digit. A pass writes to one place for each value of a digit, and these
places should be in the first-level cache."""
_LANES: Final = 8
"""Keys that are compared at a time."""
_I64: Final = dtypes.int64
_CODES: Final = {8: dtypes.uint8, 16: dtypes.uint16, 32: dtypes.uint32}


def define(
    module: Module, name: str, routine: str, dtype: DType, target: CpuTarget
) -> None:
    """Define "argsort" or "top_order" for keys of `dtype`."""
    w = Wrapper(module, name, ROUTINES[routine], dtype, target)
    if routine == "argsort":
        descending = e.compare("ne", w.scalars["descending"], e.index(0))
        _sort(w, w.buffers["out"], w.buffers["workspace"], descending)
    else:
        _select(w)
    w.finish()
    module.define(name, w.f.text)


def _sort(w: Wrapper, out: Buffer, workspace: Buffer, descending: Expr) -> None:
    """Emit code that writes the order of the keys to `out`."""
    n = w.scalars["n"]
    source, sink = (Buffer(name, _I64, (n,), "arena") for name in ("source", "sink"))
    w.memory.place_in_slot(source, w.pointer(out))
    w.memory.place_in_slot(sink, w.pointer(workspace))
    order = _Order(w, source, sink, descending)

    def sort(passes: Callable[[_Order], list[Stmt]]) -> None:
        at = Var("at", _I64)
        first = For(at, n, [Store(source, (e.read(at),), e.read(at))])
        w.emitter.body([first, *passes(order)])
        # An odd number of passes ends in the workspace.
        in_workspace = Var(w.f.name("ends"), dtypes.bool_)
        w.emitter.values.constants[in_workspace] = w.f.emit(
            f"icmp ne ptr {w.pointer(source)}, {w.pointer(out)}"
        )
        w.emitter.body([If(e.read(in_workspace), [Copy(out, workspace)])])

    w.emitter.branch(
        e.compare("le", n, e.index(FEW * _code_type(w.buffers["keys"].dtype).bits)),
        lambda: sort(lambda order: _Merge(order).passes()),
        lambda: sort(lambda order: _Radix(order).passes()),
    )


class _Order(NamedTuple):
    """The operands of a sort, whose passes move positions from `source` to `sink`."""

    w: Wrapper
    source: Buffer
    sink: Buffer
    descending: Expr


def _on_stack(w: Wrapper, count: int, dtype: DType) -> str:
    """Return a register with the address of `count` numbers on the stack."""
    return w.f.slot(f"[{count} x {memory_type(dtype)}]", "numbers", align=64)


class _Sort:
    """What sorts have in common: passes that move codes along with positions.

    value      the code of `key`
    old, new   the codes in the order of `source`, and in that of `sink`
    """

    def __init__(self, order: _Order) -> None:
        w, self.source, self.sink, descending = order
        self.keys, self.n = w.buffers["keys"], w.scalars["n"]
        self.key = Var("key", self.keys.dtype)
        self.value = _code(e.read(self.key), descending)
        self.old, self.new = (
            Buffer(name, self.value.dtype, (self.n,), "arena")
            for name in ("old", "new")
        )
        for buffer, memory in ((self.old, "codes"), (self.new, "sorted_codes")):
            w.memory.place_in_slot(buffer, w.pointer(w.buffers[memory]))

    def exchange(self) -> list[Stmt]:
        """Make the order that a pass has written that of the next one."""
        return [Swap(self.old, self.new), Swap(self.source, self.sink)]


# --- by digits ------------------------------------------------------------------------


class _Radix(_Sort):
    """A radix sort. It skips a digit that all codes share.

    counts     for each digit, counted from the last: the number of codes that have it,
               and then the place of the next of them
    """

    def __init__(self, order: _Order) -> None:
        super().__init__(order)
        w, dtype = order.w, self.value.dtype
        self.code, self.at = Var("code", dtype), Var("at", _I64)
        self.count = dtype.bits // _DIGIT
        shape = e.index(self.count), e.index(1 << _DIGIT)
        self.counts = Buffer("counts", _I64, shape, "arena")
        w.memory.place(self.counts, _on_stack(w, self.count << _DIGIT, _I64))
        w.clear(self.counts)

    def place(self, number: Expr) -> Index:
        """Return the index in the counts of a digit of the code."""
        bits = e.cast(e.mul(number, e.index(_DIGIT)), self.code.dtype)
        rest = e.binary("lshr", e.read(self.code), bits)
        mask = e.const((1 << _DIGIT) - 1, self.code.dtype)
        return number, e.cast(e.binary("and", rest, mask), _I64)

    def passes(self) -> list[Stmt]:
        at, number = e.read(self.at), Var("pass", _I64)
        digit = e.read(number)
        is_shared = e.compare("eq", e.load(self.counts, self.place(digit)), self.n)
        count: list[Stmt] = [
            Let(self.key, e.load(self.keys, (at,))),
            Let(self.code, self.value),
            Store(self.old, (at,), e.read(self.code)),
            *(self.add_one(e.index(p)) for p in range(self.count)),
        ]
        sort: list[Stmt] = [
            Let(self.code, e.load(self.old, (e.index(0),))),
            If(e.unary("not", is_shared), self.one_pass(digit)),
        ]
        return [
            For(self.at, self.n, count),
            For(number, e.index(self.count), sort),
        ]

    def add_one(self, number: Expr) -> Stmt:
        place = self.place(number)
        return Store(self.counts, place, e.add(e.load(self.counts, place), e.index(1)))

    def one_pass(self, number: Expr) -> list[Stmt]:
        """Move all positions to the places of their digits."""
        place, at, to = self.place(number), e.read(self.at), Var("to", _I64)
        body: list[Stmt] = [
            Let(self.code, e.load(self.old, (at,))),
            Let(to, e.load(self.counts, place)),
            Store(self.counts, place, e.add(e.read(to), e.index(1))),
            Store(self.new, (e.read(to),), e.read(self.code)),
            Store(self.sink, (e.read(to),), e.load(self.source, (at,))),
        ]
        return [
            *_sum_before(self.counts, number, e.index(1 << _DIGIT)),
            For(self.at, self.n, body),
            *self.exchange(),
        ]


def _sum_before(counts: Buffer, row: Expr, length: Expr) -> list[Stmt]:
    """Replace each count of a row by the sum of those before it."""
    total, at, count = Var("total", _I64), Var("digit", _I64), Var("own", _I64)
    place = row, e.read(at)
    body: list[Stmt] = [
        Let(count, e.load(counts, place)),
        Store(counts, place, e.read(total)),
        Assign(total, e.add(e.read(total), e.read(count))),
    ]
    return [Declare(total, e.index(0)), For(at, length, body)]


def _code_type(dtype: DType) -> DType:
    """Return the dtype of the codes of keys."""
    if dtype in NARROW_FLOATS:
        return dtypes.uint32
    return _CODES.get(max(8, dtype.bits), dtypes.uint64)


def _code(key: Expr, descending: Expr) -> Expr:
    """Return an unsigned integer whose order is that of a key.

    -0 equals 0, all NaNs are equal and greater than any number, and in descending order
    the code is complemented.
    """
    dtype = key.dtype
    if dtype in NARROW_FLOATS:
        key, dtype = e.cast(key, dtypes.float32), dtypes.float32
    to = _code_type(dtype)
    ones = e.const(-1, to)
    if dtype.kind == "b":
        code = e.cast(key, to)
    else:
        sign = e.const(1 << (dtype.bits - 1), to)
        if dtype.kind == "f":
            key = e.select(
                e.compare("eq", key, e.const(0, dtype)), e.const(0, dtype), key
            )
        code = e.bitcast(key, to)
        if dtype.kind == "f":
            is_negative = e.compare("ge", code, sign)
            code = e.binary("xor", code, e.select(is_negative, ones, sign))
            code = e.select(e.unary("isnan", key), ones, code)
        elif dtype.kind == "i":
            code = e.binary("xor", code, sign)
    return e.binary("xor", code, e.select(descending, ones, e.const(0, to)))


# --- the first ones -------------------------------------------------------------------


def _select(w: Wrapper) -> None:
    """Write the positions of the `k` largest keys.

    If `k` is small, one scan keeps the largest so far in order; otherwise all keys are
    sorted.
    """
    k, out = w.scalars["k"], w.buffers["out"]
    first, second = w.buffers["workspace"], w.buffers["other"]
    true = e.const(True, dtypes.bool_)

    def sort_all() -> None:
        _sort(w, first, second, true)
        at = Var("at", _I64)
        index = e.read(at)
        w.emitter.body([For(at, k, [Store(out, (index,), e.load(first, (index,)))])])

    w.emitter.branch(
        e.compare("le", k, e.index(KEPT)),
        lambda: w.emitter.body(_keep_first(w, true)),
        sort_all,
    )


def _keep_first(w: Wrapper, descending: Expr) -> list[Stmt]:
    """Return a scan that keeps the first `k` positions in order.

    A key that comes before the last of them moves those behind it; of equal keys the
    later one stays behind.
    """
    keys, out, k = w.buffers["keys"], w.buffers["out"], w.scalars["k"]
    some = e.compare("gt", k, e.index(0))
    count = e.select(some, w.scalars["n"], e.index(0))
    at, key, place = Var("at", _I64), Var("key", keys.dtype), Var("place", _I64)
    value = _code(e.read(key), descending)
    code, one = Var("code", value.dtype), e.index(1)
    codes = Buffer("kept", value.dtype, (e.index(KEPT),), "arena")
    w.memory.place(codes, _on_stack(w, KEPT, value.dtype))
    position, to, last = e.read(at), e.read(place), e.sub(k, one)
    before = e.sub(to, one)
    is_less = e.compare("lt", e.read(code), e.load(codes, (last,)))
    # There are codes up to `place`, except those that stood there and moved.
    moves = e.compare(
        "lt", e.read(code), e.load(codes, (e.binary("max", before, e.index(0)),))
    )
    insert: list[Stmt] = [
        Declare(place, e.binary("min", position, last)),
        While(
            [],
            e.binary("and", e.compare("gt", to, e.index(0)), moves),
            [
                Store(codes, (to,), e.load(codes, (before,))),
                Store(out, (to,), e.load(out, (before,))),
                Assign(place, before),
            ],
        ),
        Store(codes, (to,), e.read(code)),
        Store(out, (to,), position),
    ]
    return [
        For(at, k, [Store(codes, (position,), e.const(-1, value.dtype))]),
        For(
            at,
            count,
            [
                Let(key, e.load(keys, (position,))),
                Let(code, value),
                If(e.binary("or", e.compare("lt", position, k), is_less), insert),
            ],
        ),
    ]


# --- by merging -----------------------------------------------------------------------


class _Merge(_Sort):
    """A merge sort of short runs, which are sorted by the ranks of their keys.

    ranks   for each key of a run: the number of keys that go before it
    """

    def __init__(self, order: _Order) -> None:
        super().__init__(order)
        self.ranks = Buffer("ranks", _I64, (e.index(RUN),), "arena")
        order.w.memory.place(self.ranks, _on_stack(order.w, RUN, _I64))

    def passes(self) -> list[Stmt]:
        at, block, run = Var("at", _I64), Var("block", _I64), Var("run", _I64)
        whole = e.div(self.n, e.index(RUN))
        first, rest = (e.mul(k, e.index(RUN)) for k in (e.read(block), whole))
        code: list[Stmt] = [
            Let(self.key, e.load(self.keys, (e.read(at),))),
            Store(self.old, (e.read(at),), self.value),
        ]
        return [
            For(at, self.n, code),
            For(block, whole, self.ranked(first, e.index(RUN))),
            *self.ranked(rest, e.sub(self.n, rest)),
            *self.exchange(),
            Declare(run, e.index(RUN)),
            While([], e.compare("lt", e.read(run), self.n), self.one_pass(run)),
        ]

    def ranked(self, first: Expr, length: Expr) -> list[Stmt]:
        """Sort the run of at most `RUN` keys from `first` on."""
        i, other, code = Var("i", _I64), Var("other", _I64), Var("code", self.old.dtype)
        to, at, each = Var("to", _I64), e.read(i), Binding("vector", _LANES)
        own = e.load(self.old, (e.add(first, at),))
        is_after = e.binary(
            "or",
            e.compare("lt", e.read(code), own),
            e.binary(
                "and",
                e.compare("eq", e.read(code), own),
                e.compare("lt", e.read(other), at),
            ),
        )
        rank = e.load(self.ranks, (at,))
        count = Store(self.ranks, (at,), e.add(rank, e.cast(is_after, _I64)))
        move: list[Stmt] = [
            Let(to, e.add(first, rank)),
            Store(self.new, (e.read(to),), own),
            Store(self.sink, (e.read(to),), e.load(self.source, (e.add(first, at),))),
        ]
        compare: list[Stmt] = [
            Let(code, e.load(self.old, (e.add(first, e.read(other)),))),
            For(i, length, [count], True, each),
        ]
        return [
            For(i, length, [Store(self.ranks, (at,), e.index(0))], True, each),
            For(other, length, compare),
            For(i, length, move),
        ]

    def one_pass(self, run: Var) -> list[Stmt]:
        """Merge each two neighbouring runs."""
        start, middle, end = (Var(name, _I64) for name in ("start", "middle", "end"))

        def later(position: Var) -> Expr:
            return e.binary("min", self.n, e.add(e.read(position), e.read(run)))

        pair: list[Stmt] = [
            Let(middle, later(start)),
            Let(end, later(middle)),
            *self.merged(e.read(start), e.read(middle), e.read(end)),
            Assign(start, e.read(end)),
        ]
        return [
            Declare(start, e.index(0)),
            While([], e.compare("lt", e.read(start), self.n), pair),
            *self.exchange(),
            Assign(run, e.add(e.read(run), e.read(run))),
        ]

    def merged(self, start: Expr, middle: Expr, end: Expr) -> list[Stmt]:
        """Merge [start, middle) and [middle, end) without data-dependent branches.

        A position past its run is clamped to the last of the run, whose code is then
        not used.
        """
        left, right, at = Var("left", _I64), Var("right", _I64), Var("step", _I64)
        x, y = (Var(name, self.old.dtype) for name in ("x", "y"))
        take, one = Var("take", dtypes.bool_), e.index(1)
        from_left = e.binary("min", e.read(left), e.sub(middle, one))
        from_right = e.binary("min", e.read(right), e.sub(end, one))
        left_done = e.compare("ge", e.read(left), middle)
        right_remains = e.compare("lt", e.read(right), end)
        before = e.binary("or", left_done, e.compare("lt", e.read(y), e.read(x)))
        taken, to = e.cast(e.read(take), _I64), (e.add(start, e.read(at)),)
        sources = [e.load(self.source, (k,)) for k in (from_right, from_left)]
        body: list[Stmt] = [
            Let(x, e.load(self.old, (from_left,))),
            Let(y, e.load(self.old, (from_right,))),
            Let(take, e.binary("and", right_remains, before)),
            Store(self.new, to, e.select(e.read(take), e.read(y), e.read(x))),
            Store(self.sink, to, e.select(e.read(take), *sources)),
            Assign(right, e.add(e.read(right), taken)),
            Assign(left, e.add(e.read(left), e.sub(one, taken))),
        ]
        return [
            Declare(left, start),
            Declare(right, middle),
            For(at, e.sub(end, start), body),
        ]
