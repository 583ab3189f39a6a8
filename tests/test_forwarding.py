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
k_of_i = at(K, i)
CASES: Final[dict[str, tuple[Any, list[str]]]] = {
    "the last of several stores stays": (
        lambda: [more(i), more(i), more(i)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "let s_v_stored1: f64 = s_v_stored0 + x[i]",
            "let s_v_stored2: f64 = s_v_stored1 + x[i]",
            "s[i] = s_v_stored2",
        ],
    ),
    "another element is read between": (
        lambda: [more(i), set_(X, j, at(S, j)), more(i)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "s[i] = s_v_stored0",
            "let x_v_stored1: f64 = s[j]",
            "x[j] = x_v_stored1",
            "let s_v_stored2: f64 = s_v_stored0 + x[i]",
            "s[i] = s_v_stored2",
        ],
    ),
    "another element is stored": (
        lambda: [more(i), more(j)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "s[i] = s_v_stored0",
            "let s_v_stored1: f64 = s[j] + x[j]",
            "s[j] = s_v_stored1",
        ],
    ),
    "the variable of the index changes": (
        lambda: [more(i), Assign(FIRST, e.add(i, e.index(1))), more(i)],
        [
            "let s_v_stored0: f64 = s[i] + x[i]",
            "s[i] = s_v_stored0",
            "i = i + 1",
            "let s_v_stored2: f64 = s[i] + x[i]",
            "s[i] = s_v_stored2",
        ],
    ),
    "the index is read, and changes": (
        lambda: [more(k_of_i), set_(K, j, i), more(k_of_i)],
        [
            "let s_v_stored0: f64 = s[k[i]] + x[k[i]]",
            "s[k[i]] = s_v_stored0",
            "let k_v_stored1: i64 = i",
            "k[j] = k_v_stored1",
            "let s_v_stored2: f64 = s[k[i]] + x[k[i]]",
            "s[k[i]] = s_v_stored2",
        ],
    ),
    "the value of the second store reads the element": (
        lambda: [
            set_(S, i, at(X, i)),
            set_(S, i, e.load(S, (i,), e.compare("lt", i, j))),
        ],
        [
            "let s_v_stored0: f64 = x[i]",
            "s[i] = s_v_stored0",
            "let s_v_stored1: f64 = (s[i] if i < j else 0)",
            "s[i] = s_v_stored1",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_code_reads_nothing_that_it_has_stored(name: str) -> None:
    body, expected = CASES[name]
    found: list[Let | Store | Assign] = forwarded(body(), "v")
    assert [format_statement(s) for s in found] == expected
