"""What straight-line code reads from memory, and which of its stores are dead."""

from typing import Any, Final

import pytest

from hopflow.compiler.schedule.forwarding import forwarded
from hopflow.dtypes import float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.printer import format_statement
from hopflow.loop_ir.program import Assign, Let, Store

X: Final = Buffer("x", float64, (e.index(8),), "input")
S: Final = Buffer("s", float64, (e.index(8),), "output")
K: Final = Buffer("k", int64, (e.index(8),), "arena")
FIRST, SECOND = Var("i", int64), Var("j", int64)


def at(buffer: Buffer, index: Expr) -> Expr:
    return e.load(buffer, (index,))


def set_(buffer: Buffer, index: Expr, value: Expr) -> Store:
    return Store(buffer, (index,), value)


def more(index: Expr) -> Store:
    """Add an element of `x` to one of `s`."""
    return set_(S, index, e.add(at(S, index), at(X, index)))


i, j = e.read(FIRST), e.read(SECOND)
k_of_i, next_ = at(K, i), e.add(i, e.index(1))
CASES: Final[dict[str, tuple[Any, list[str]]]] = {
    "the last of several stores stays": (
        lambda: [more(i), more(i), more(i)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "let s_v_stored1: f64 = s_v_stored0 + x[i]",
            "s[i] = s_v_stored1 + x[i]",
        ],
    ),
    "elements that differ by a constant": (
        lambda: [more(i), more(next_), more(i), more(next_)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "let s_v_stored1: f64 = s[i + 1] + x[i + 1]",
            "s[i] = s_v_stored0 + x[i]",
            "s[i + 1] = s_v_stored1 + x[i + 1]",
        ],
    ),
    "another element is read between": (
        lambda: [more(i), set_(X, j, at(S, j)), more(i)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "s[i] = s_v_stored0",
            "x[j] = s[j]",
            "s[i] = s_v_stored0 + x[i]",
        ],
    ),
    "another element may be stored": (
        lambda: [more(i), more(j), more(i)],
        ["s[i] = s[i] + x[i]", "s[j] = s[j] + x[j]", "s[i] = s[i] + x[i]"],
    ),
    "the variable of the index changes": (
        lambda: [more(i), Assign(FIRST, next_), more(i)],
        ["s[i] = s[i] + x[i]", "i = i + 1", "s[i] = s[i] + x[i]"],
    ),
    "the index is read, and changes": (
        lambda: [more(k_of_i), set_(K, j, i), more(k_of_i)],
        [
            "s[k[i]] = s[k[i]] + x[k[i]]",
            "k[j] = i",
            "s[k[i]] = s[k[i]] + x[k[i]]",
        ],
    ),
    "the value of the second store reads the element": (
        lambda: [
            set_(S, i, at(X, i)),
            set_(S, i, e.load(S, (i,), e.compare("lt", i, j))),
        ],
        ["s[i] = x[i]", "s[i] = (s[i] if i < j else 0)"],
    ),
    "the index of a store reads its buffer": (
        lambda: [set_(K, k_of_i, j), set_(S, i, at(X, k_of_i)), set_(K, k_of_i, i)],
        ["k[k[i]] = j", "s[i] = x[k[i]]", "k[k[i]] = i"],
    ),
    "a store that nothing reads": (
        lambda: [set_(S, i, at(X, i)), set_(S, i, at(X, j))],
        ["s[i] = x[j]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_code_reads_nothing_that_it_has_stored(name: str) -> None:
    body, expected = CASES[name]
    found: list[Let | Store | Assign] = forwarded(body(), "v")
    assert [format_statement(s) for s in found] == expected
