"""Sorting: the order of keys, or the keys in order, as Loop IR.

Many keys are sorted digit by digit, from the last one (D. Knuth, The Art of Computer
Programming, volume 3, section 5.2.5): each pass keeps the order of the one before where
digits are equal. Few keys are sorted in short runs by a network of exchanges, and the
runs are merged. Both are stable.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from hopflow import dtypes
from hopflow.compiler.cpu.blas import Wrapper
from hopflow.compiler.cpu.routines import FEW, KEPT, PARTS, code_type
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.module import Module
from hopflow.compiler.llvm.types import NARROW_FLOATS, memory_type
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.networks import merge_exchanges
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

RUN: Final = 16
"""The numbers of a run that a network sorts: words, or as many words as positions, of
which an exchange takes so many more instructions that LLVM needs a while for them."""
LANES: Final = 4
"""The runs that a network sorts at a time, one in each lane."""
_DIGIT: Final = 8
"""Bits of a digit. A pass writes to one place for each value of a digit, and these
places should be in the first-level cache."""
_POSITION: Final = 32
"""Bits of a position in a word with a code."""
_I64: Final = dtypes.int64
_SIGNED: Final = {8: dtypes.int8, 16: dtypes.int16, 32: dtypes.int32}


def define(
    module: Module, name: str, routine: str, dtype: DType, target: CpuTarget
) -> None:
    """Define "argsort", "sort" or "top_order" for keys of `dtype`, or the part of one
    that `routines.part_of` names."""
    whole, _, part = routine.rpartition("_")
    if part not in PARTS:
        whole, part = routine, ""
    w = Wrapper(module, name, ROUTINES[whole], dtype, target)
    if whole == "top_order":
        _select(w, part)
    else:
        descending = e.compare("ne", w.scalars["descending"], e.index(0))
        workspace = w.buffers.get("workspace")
        _sort(_Keys(w, w.buffers["out"], workspace, descending), part)
    w.finish()
    module.define(name, w.f.text)


class _Keys(NamedTuple):
    """The keys of a routine, and what it returns.

    out         the positions of the keys in order; without `workspace`, the keys
    workspace   as large as `out`
    """

    w: Wrapper
    out: Buffer
    workspace: Buffer | None
    descending: Expr


def _sort(keys: _Keys, part: str = "") -> None:
    """Emit code that sorts.

    Args:
        part: "few" or "many"; else the code chooses by the number of keys.
    """
    w = keys.w
    sorts: list[Callable[[], None]] = [
        lambda: w.emitter.body(_Merge(keys).passes()),
        lambda: _Radix(keys).emit(),
    ]
    if part:
        sorts[PARTS.index(part)]()
        return
    most = FEW * code_type(w.buffers["keys"].dtype).bits
    w.emitter.branch(e.compare("le", w.scalars["n"], e.index(most)), *sorts)


def _on_stack(w: Wrapper, count: int, dtype: DType) -> str:
    """Return a register with the address of `count` numbers on the stack."""
    return w.f.slot(f"[{count} x {memory_type(dtype)}]", "numbers", align=64)


class _Sort:
    """What sorts have in common: passes that move numbers from one array to another.

    moved   the arrays of what is moved: codes (or words), and the positions of keys
            where those are not in the words
    value   the code of `key`
    copies  whether the result is keys of which equal ones may have other bits: floats
    differ  whether some of them have: there is a -0 or a NaN
    """

    def __init__(self, keys: _Keys) -> None:
        self.w, self.out, self.workspace, self.descending = keys
        self.keys, self.n = self.w.buffers["keys"], self.w.scalars["n"]
        self.key, self.differ = Var("key", self.keys.dtype), Var("differ", dtypes.bool_)
        self.value = _code(e.read(self.key), self.descending)
        self.moved: list[tuple[Buffer, Buffer]] = []
        self.copies = self.workspace is None and self.keys.dtype.kind == "f"

    def add_moved(self, dtype: DType, size: Expr, old: str, new: str) -> None:
        """Add two arrays in the memory at two addresses."""
        pair = (
            Buffer("old", dtype, (size,), "arena"),
            Buffer("new", dtype, (size,), "arena"),
        )
        for buffer, address in zip(pair, (old, new), strict=True):
            self.w.memory.place_in_slot(buffer, address)
        self.moved.append(pair)

    def move(self, to: Expr, at: Expr) -> list[Stmt]:
        """Move a code, and its position, to another place."""
        return [Store(new, (to,), e.load(old, (at,))) for old, new in self.moved]

    def exchange(self) -> list[Stmt]:
        """Make the order that a pass has written that of the next one."""
        return [Swap(old, new) for old, new in self.moved]

    def encoded(self, at: Var, write: list[Stmt]) -> list[Stmt]:
        """Run statements with each `key`."""
        body: list[Stmt] = [Let(self.key, e.load(self.keys, (e.read(at),))), *write]
        if not self.copies:
            return [For(at, self.n, body)]
        key = _as_float(e.read(self.key))
        is_zero = e.compare("eq", key, e.const(0, key.dtype))
        code = e.bitcast(key, code_type(key.dtype))
        sign = e.const(1 << (code.dtype.bits - 1), code.dtype)
        is_negative = e.compare("ge", code, sign)
        other = e.binary(
            "or", e.unary("isnan", key), e.binary("and", is_zero, is_negative)
        )
        note = Assign(self.differ, e.binary("or", e.read(self.differ), other))
        false = e.const(False, dtypes.bool_)
        return [Declare(self.differ, false), For(at, self.n, [*body, note])]

    def decoded(self, code_at: Callable[[Expr], Expr]) -> list[Stmt]:
        """Write the keys in the order of their codes."""
        at = Var("at", _I64)
        key = _key(code_at(e.read(at)), self.keys.dtype, self.descending)
        write = For(at, self.n, [Store(self.out, (e.read(at),), key)])
        if not self.copies:
            return [write]
        return [write, If(e.read(self.differ), self._copy_equal())]

    def _copy_equal(self) -> list[Stmt]:
        """Write zeros and NaNs once more, with their own bits."""
        at, zero, nan, less, more, nans = (
            Var(name, _I64) for name in ("at", "zero", "nan", "less", "more", "nans")
        )
        key = _as_float(e.load(self.keys, (e.read(at),)))
        constant = e.const(0, key.dtype)
        tests = {
            less: e.compare("lt", key, constant),
            more: e.compare("gt", key, constant),
            nans: e.unary("isnan", key),
        }
        count: list[Stmt] = [
            Assign(number, e.add(e.read(number), e.cast(test, _I64)))
            for number, test in tests.items()
        ]
        first_nan = e.select(self.descending, e.index(0), e.sub(self.n, e.read(nans)))
        first_zero = e.select(
            self.descending, e.add(e.read(nans), e.read(more)), e.read(less)
        )
        is_zero = e.compare("eq", key, constant)
        return [
            *(Declare(number, e.index(0)) for number in tests),
            For(at, self.n, count),
            Declare(zero, first_zero),
            Declare(nan, first_nan),
            For(
                at,
                self.n,
                [
                    If(test, self._copy(e.read(at), place))
                    for test, place in ((is_zero, zero), (tests[nans], nan))
                ],
            ),
        ]

    def _copy(self, at: Expr, place: Var) -> list[Stmt]:
        to = e.read(place)
        return [
            Store(self.out, (to,), e.load(self.keys, (at,))),
            Assign(place, e.add(to, e.index(1))),
        ]


# --- by digits ------------------------------------------------------------------------


class _Radix(_Sort):
    """A radix sort. It skips a digit that all codes share.

    counts     for each digit, counted from the last: the number of codes that have it,
               and then the place of the next of them
    """

    def __init__(self, keys: _Keys) -> None:
        super().__init__(keys)
        w, dtype = self.w, self.value.dtype
        codes = w.buffers["codes"], w.buffers["sorted_codes"]
        self.add_moved(dtype, self.n, *map(w.pointer, codes))
        if self.workspace is not None:
            positions = self.out, self.workspace
            self.add_moved(_I64, self.n, *map(w.pointer, positions))
        self.code, self.at = Var("code", dtype), Var("at", _I64)
        self.count = dtype.bits // _DIGIT
        shape = e.index(self.count), e.index(1 << _DIGIT)
        self.counts = Buffer("counts", _I64, shape, "arena")
        w.memory.place(self.counts, _on_stack(w, self.count << _DIGIT, _I64))

    def emit(self) -> None:
        w = self.w
        w.clear(self.counts)
        w.emitter.body(self._passes())
        if self.workspace is None:
            codes, _ = self.moved[0]
            w.emitter.body(self.decoded(lambda at: e.load(codes, (at,))))
            return
        # An odd number of passes ends in the workspace.
        _, (positions, _) = self.moved
        in_workspace = Var(w.f.name("ends"), dtypes.bool_)
        w.emitter.values.constants[in_workspace] = w.f.emit(
            f"icmp ne ptr {w.pointer(positions)}, {w.pointer(self.out)}"
        )
        copy = Copy(self.out, self.workspace)
        w.emitter.body([If(e.read(in_workspace), [copy])])

    def _place(self, number: Expr) -> Index:
        """Return the index in the counts of a digit of the code."""
        bits = e.cast(e.mul(number, e.index(_DIGIT)), self.code.dtype)
        rest = e.binary("lshr", e.read(self.code), bits)
        mask = e.const((1 << _DIGIT) - 1, self.code.dtype)
        return number, e.cast(e.binary("and", rest, mask), _I64)

    def _passes(self) -> list[Stmt]:
        at, number = e.read(self.at), Var("pass", _I64)
        digit = e.read(number)
        is_shared = e.compare("eq", e.load(self.counts, self._place(digit)), self.n)
        (codes, _), *positions = self.moved
        count: list[Stmt] = [
            Let(self.code, self.value),
            Store(codes, (at,), e.read(self.code)),
            *(Store(old, (at,), at) for old, _ in positions),
            *(self._add_one(e.index(p)) for p in range(self.count)),
        ]
        sort: list[Stmt] = [
            Let(self.code, e.load(codes, (e.index(0),))),
            If(e.unary("not", is_shared), self._one_pass(digit)),
        ]
        return [
            *self.encoded(self.at, count),
            For(number, e.index(self.count), sort),
        ]

    def _add_one(self, number: Expr) -> Stmt:
        place = self._place(number)
        return Store(self.counts, place, e.add(e.load(self.counts, place), e.index(1)))

    def _one_pass(self, number: Expr) -> list[Stmt]:
        """Move all codes to the places of their digits."""
        place, at, to = self._place(number), e.read(self.at), Var("to", _I64)
        codes, _ = self.moved[0]
        body: list[Stmt] = [
            Let(self.code, e.load(codes, (at,))),
            Let(to, e.load(self.counts, place)),
            Store(self.counts, place, e.add(e.read(to), e.index(1))),
            *self.move(e.read(to), at),
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


# --- codes ----------------------------------------------------------------------------


def _as_float(key: Expr) -> Expr:
    """Return a float key as one of at least 32 bits."""
    return e.cast(key, dtypes.float32) if key.dtype in NARROW_FLOATS else key


def _complement(code: Expr, is_complemented: Expr) -> Expr:
    ones, zeros = e.const(-1, code.dtype), e.const(0, code.dtype)
    return e.binary("xor", code, e.select(is_complemented, ones, zeros))


def _code(key: Expr, descending: Expr) -> Expr:
    """Return an unsigned integer whose order is that of a key.

    -0 equals 0, all NaNs are equal and greater than any number, and in descending order
    the code is complemented.
    """
    key = _as_float(key)
    dtype, to = key.dtype, code_type(key.dtype)
    sign = e.const(1 << (to.bits - 1), to)
    if dtype.kind == "b":
        code = e.cast(key, to)
    elif dtype.kind == "f":
        zero = e.const(0, dtype)
        number = e.select(e.compare("eq", key, zero), zero, key)
        code = e.bitcast(number, to)
        is_negative = e.compare("ge", code, sign)
        code = e.binary("xor", code, e.select(is_negative, e.const(-1, to), sign))
        code = e.select(e.unary("isnan", number), e.const(-1, to), code)
    else:
        code = e.bitcast(key, to)
        if dtype.kind == "i":
            code = e.binary("xor", code, sign)
    return _complement(code, descending)


def _key(code: Expr, dtype: DType, descending: Expr) -> Expr:
    """Return a key with a code: of zeros 0, and of NaNs one of them."""
    code = _complement(code, descending)
    sign = e.const(1 << (code.dtype.bits - 1), code.dtype)
    if dtype.kind == "b":
        return e.cast(code, dtype)
    if dtype.kind == "f":
        is_negative = e.compare("lt", code, sign)
        bits = e.select(is_negative, e.const(-1, code.dtype), sign)
        wide = dtypes.float32 if dtype in NARROW_FLOATS else dtype
        return e.cast(e.bitcast(e.binary("xor", code, bits), wide), dtype)
    if dtype.kind == "i":
        code = e.binary("xor", code, sign)
    return e.bitcast(code, dtype)


# --- the first ones -------------------------------------------------------------------


def _select(w: Wrapper, part: str) -> None:
    """Write the positions of the `k` largest keys.

    If `k` is small, one scan keeps the largest so far in order; otherwise all keys are
    sorted.

    Args:
        part: "few" if `k` is small; else the code chooses.
    """
    k, out = w.scalars["k"], w.buffers["out"]
    first, second = w.buffers["workspace"], w.buffers["other"]
    true = e.const(True, dtypes.bool_)

    def keep_first() -> None:
        w.emitter.body(_keep_first(w, true))

    def sort_all() -> None:
        _sort(_Keys(w, first, second, true))
        at = Var("at", _I64)
        index = e.read(at)
        w.emitter.body([For(at, k, [Store(out, (index,), e.load(first, (index,)))])])

    if part:
        keep_first()
    else:
        w.emitter.branch(e.compare("le", k, e.index(KEPT)), keep_first, sort_all)


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
    """A merge sort of words on the stack: signed integers in the order of the codes.

    If it returns positions, a word has the position of its key in its last bits, or,
    where it has no room for it, positions are moved along with the words. The number of
    words is a power of two: beyond the keys, there are words that no key follows.

    size      the number of words
    run       the words of a sorted run
    shortest  the words of a run that a network sorts, and of all runs of up to so many
              keys
    """

    def __init__(self, keys: _Keys) -> None:
        super().__init__(keys)
        bits = self.value.dtype.bits
        self.is_packed = self.workspace is not None and bits <= _POSITION
        self.word = _I64 if self.is_packed else _SIGNED.get(bits, _I64)
        most = FEW * bits
        types = [self.word]
        if self.workspace is not None and not self.is_packed:
            types.append(_I64)
        for dtype in types:
            memory = [_on_stack(self.w, most, dtype) for _ in range(2)]
            self.add_moved(dtype, e.index(most), *memory)
        self.size, self.run = Var("size", _I64), Var("run", _I64)
        self.shortest = RUN // len(self.moved)

    def passes(self) -> list[Stmt]:
        at, pad, first = (Var(name, _I64) for name in ("at", "pad", "first"))
        short, size = self.shortest, e.read(self.size)
        is_short = e.compare("le", self.n, e.index(short))
        word, *position = [old for old, _ in self.moved]
        end = e.add(self.n, e.read(pad))
        last = e.const((1 << (self.word.bits - 1)) - 1, self.word)
        encode: list[Stmt] = [
            Store(word, (e.read(at),), self._word(self.value, e.read(at))),
            *(Store(b, (e.read(at),), e.read(at)) for b in position),
        ]
        fill: list[Stmt] = [
            Store(word, (end,), last),
            *(Store(b, (end,), end) for b in position),
        ]
        grow = Assign(self.size, e.add(size, size))
        block = e.mul(e.read(first), e.index(short * LANES))
        blocks = e.div(size, e.index(short * LANES))
        return [
            Declare(
                self.size,
                e.select(is_short, e.index(short), e.index(short * LANES)),
            ),
            While([], e.compare("lt", size, self.n), [grow]),
            *self.encoded(at, encode),
            For(pad, e.sub(size, self.n), fill),
            If(
                is_short,
                self._sorted_runs(e.index(0), short // LANES),
                [For(first, blocks, self._sorted_runs(block, short))],
            ),
            *self.exchange(),
            Declare(
                self.run,
                e.select(is_short, e.index(short // LANES), e.index(short)),
            ),
            While([], e.compare("lt", e.read(self.run), size), self._one_pass()),
            *self._results(),
        ]

    def _word(self, code: Expr, at: Expr) -> Expr:
        word = e.binary("xor", code, e.const(1 << (code.dtype.bits - 1), code.dtype))
        word = e.bitcast(word, _SIGNED.get(code.dtype.bits, _I64))
        if not self.is_packed:
            return word
        word = e.binary("shl", e.cast(word, _I64), e.index(_POSITION))
        return e.binary("or", word, at)

    def _results(self) -> list[Stmt]:
        old = [old for old, _ in self.moved]
        if self.workspace is None:
            return self.decoded(lambda at: self._code_of(e.load(old[0], (at,))))
        at = Var("at", _I64)
        position = e.load(old[-1], (e.read(at),))
        if self.is_packed:
            position = e.binary("and", position, e.index((1 << _POSITION) - 1))
        return [For(at, self.n, [Store(self.out, (e.read(at),), position)])]

    def _code_of(self, word: Expr) -> Expr:
        code = e.bitcast(word, self.value.dtype)
        return e.binary("xor", code, e.const(1 << (code.dtype.bits - 1), code.dtype))

    def _sorted_runs(self, first: Expr, length: int) -> list[Stmt]:
        """Sort `LANES` runs of some words from `first` on, each in one lane."""
        lane = Var("lane", _I64)
        run = e.add(first, e.mul(e.read(lane), e.index(length)))
        places = [e.add(run, e.index(k)) for k in range(length)]
        # Equal words have no order. Other words are taken in that of their positions.
        sources = places
        if len(self.moved) == 1:
            row = e.add(first, e.read(lane))
            sources = [e.add(row, e.index(k * LANES)) for k in range(length)]
        body: list[Stmt] = []

        def let(value: Expr) -> Expr:
            var = Var("word", value.dtype)
            body.append(Let(var, value))
            return e.read(var)

        rows = [
            [let(e.load(old, (place,))) for old, _ in self.moved] for place in sources
        ]
        for a, b in merge_exchanges(length):
            low, high = rows[a], rows[b]
            if len(low) == 1:
                pair = low[0], high[0]
                rows[a] = [let(e.binary("min", *pair))]
                rows[b] = [let(e.binary("max", *pair))]
                continue
            swaps = let(_goes_before(high, low))
            pairs = [*zip(low, high, strict=True)]
            rows[a] = [let(e.select(swaps, y, x)) for x, y in pairs]
            rows[b] = [let(e.select(swaps, x, y)) for x, y in pairs]
        body += [
            Store(new, (place,), value)
            for place, row in zip(places, rows, strict=True)
            for (_, new), value in zip(self.moved, row, strict=True)
        ]
        return [For(lane, e.index(LANES), body, True, Binding("vector", LANES))]

    def _one_pass(self) -> list[Stmt]:
        """Merge each two neighbouring runs."""
        pair, run = Var("pair", _I64), e.read(self.run)
        both = e.add(run, run)
        start = e.mul(e.read(pair), both)
        return [
            For(pair, e.div(e.read(self.size), both), self._merged(start, run)),
            *self.exchange(),
            Assign(self.run, both),
        ]

    def _merged(self, start: Expr, run: Expr) -> list[Stmt]:
        """Merge two runs without data-dependent branches, from both ends at a time.

        Each end takes as many words as a run has, so that no run is left before the
        last step. The steps of the two ends do not wait for each other.
        """
        at, last = Var("step", _I64), e.sub(e.add(run, run), e.index(1))
        left, right, left_end, right_end = (
            Var(name, _I64) for name in ("left", "right", "left_end", "right_end")
        )
        forward = e.add(start, e.read(at))
        backward = e.sub(e.add(start, last), e.read(at))
        return [
            Declare(left, start),
            Declare(right, e.add(start, run)),
            Declare(left_end, e.add(start, e.sub(run, e.index(1)))),
            Declare(right_end, e.add(start, last)),
            For(
                at,
                run,
                [
                    *self._taken(left, right, forward, 1),
                    *self._taken(left_end, right_end, backward, -1),
                ],
            ),
        ]

    def _taken(self, left: Var, right: Var, to: Expr, by: int) -> list[Stmt]:
        """Move the first (`by` 1) or the last (-1) of two words, each of a run.

        Of equal words that of the left run comes first.
        """
        words, _ = self.moved[0]
        x, y = (Var(name, words.dtype) for name in ("x", "y"))
        test, takes = (e.read(y), e.read(x)), Var("takes", dtypes.bool_)
        is_right = e.compare("lt", *test) if by > 0 else e.compare("ge", *test)
        chosen = e.cast(e.read(takes), _I64)
        at_left, at_right = (e.read(left),), (e.read(right),)
        moves: list[Stmt] = [
            Store(
                new,
                (to,),
                e.select(e.read(takes), e.load(old, at_right), e.load(old, at_left)),
            )
            for old, new in self.moved
        ]
        steps = (right, chosen), (left, e.sub(e.index(1), chosen))
        return [
            Let(x, e.load(words, at_left)),
            Let(y, e.load(words, at_right)),
            Let(takes, is_right),
            *moves,
            *(
                Assign(var, e.add(e.read(var), e.mul(e.index(by), taken)))
                for var, taken in steps
            ),
        ]


def _goes_before(x: Sequence[Expr], y: Sequence[Expr]) -> Expr:
    """Return whether a word and its position come before others."""
    (code, position), (other, after) = x, y
    is_equal = e.binary(
        "and", e.compare("eq", code, other), e.compare("lt", position, after)
    )
    return e.binary("or", e.compare("lt", code, other), is_equal)
