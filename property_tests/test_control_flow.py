"""`control_flow`: Python functions that Hypothesis writes do with tensors what they do
with numbers, whichever way they run."""

import contextlib
import itertools
import linecache
import zlib
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import hopflow
from hopflow.testing.executions import run_debug, run_jit, run_native

hf: Any = hopflow

# What functions may call; a helper that is called is rewritten too.
_HELPERS: Final = """\
def bounded(value):
    while value > 50:
        if value % 2:
            value = value - 37
            continue
        value = value // 2
    return value


def first_beyond(items, least):
    for k, item in enumerate(items):
        if item > least:
            return k * 10 + item
    return least


class Counter:
    def __init__(self, start):
        self.start = start

    def __call__(self, value):
        return self.start if value < self.start else value - self.start


"""


class _Writer:
    """Writes the body of a function of three integers, a list of such and a float.

    random  what it draws from
    names   integers that may be read
    lists   names of lists that a loop at hand may append to
    leaves  the ways to leave the block at hand
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.names = ["a", "b", "c"]
        self.lists: list[str] = []
        self.leaves = ["return"]
        self.new = (f"{letter}{k}" for k in itertools.count() for letter in "kvwz")

    def choose(self, items: Any) -> Any:
        return self.random.choice(list(items))

    # --- expressions ------------------------------------------------------------------

    def value(self, depth: int = 2) -> str:
        kind = self.choose(["name", "name", "constant", "sum", "choice", "call"])
        if kind == "constant" or depth == 0:
            return str(self.random.randint(0, 9))
        if kind == "sum":
            op = self.choose("+-*")
            return f"({self.value(depth - 1)} {op} {self.value(depth - 1)}) % 41"
        if kind == "choice":
            x, y = self.value(depth - 1), self.value(depth - 1)
            return f"({x} if {self.test(depth - 1)} else {y})"
        if kind == "call":
            x = self.value(depth - 1)
            return str(
                self.choose(
                    [
                        f"bounded({x})",
                        f"first_beyond(xs, {x})",
                        f"Counter(3)({x})",
                        f"(lambda n, m={x}: n - m if n > m else m)({self.value(0)})",
                        f"max([{x}, 7])" if x.isdigit() else f"bounded({x})",
                        f"sum(q * 2 for q in xs if q > {x})",
                        f"sum([q + {x} for q in xs])",
                        f"len([q for q in xs if q != {x}])",
                        f"int({x})" if x.isdigit() else x,
                    ]
                )
            )
        return str(self.choose(self.names))

    def test(self, depth: int = 2) -> str:
        x, y = self.value(min(depth, 1)), self.value(min(depth, 1))
        kinds = ["<", "==", "chain", "and", "or", "not", "in", "any"]
        kind = self.choose(kinds if depth else ["<", "=="])
        if kind == "chain":
            return f"{x} <= {y} < {self.value(0)}"
        if kind in ("and", "or"):
            return f"({self.test(depth - 1)} {kind} {self.test(depth - 1)})"
        if kind == "not":
            return f"not {self.test(depth - 1)}"
        if kind == "in":
            return f"{x} in (1, {self.value(0)}, 4)"
        if kind == "any":
            which = self.choose(["any", "all"])
            return f"{which}(q > {x} for q in xs)"
        return f"{x} {kind} {y}"

    def items(self) -> tuple[str, str, list[str]]:
        """What a `for` runs over, its target, and the names that this gives."""
        k, v = next(self.new), next(self.new)
        count = f"({self.value(1)}) % 4"
        found: tuple[str, str, list[str]] = self.choose(
            [
                (f"range({count})", k, [k]),
                (f"range({count}, -2, -2)", k, [k]),
                ("range(3)", k, [k]),
                ("xs", k, [k]),
                ("enumerate(xs)", f"{k}, {v}", [k, v]),
                (f"zip(xs, range(1, {count} + 2))", f"({k}, {v})", [k, v]),
                ("reversed(xs)", k, [k]),
                ("enumerate(zip(xs, xs), 2)", f"{k}, ({v}, *_)", [k, v]),
                (f"map(lambda q: q + {self.value(0)}, xs)", k, [k]),
                (f"[({self.value(0)}, 2), (3, {self.value(0)})]", f"{k}, {v}", [k, v]),
                ("[q * 2 for q in xs]", k, [k]),
            ]
        )
        return found

    # --- statements -------------------------------------------------------------------

    def block(self, depth: int) -> list[str]:
        lines: list[str] = []
        names = list(self.names)
        for _ in range(self.random.randint(1, 3)):
            lines += self.statement(depth)
        if self.random.randint(0, 4) == 0:
            lines += self.leave()
        self.names = names
        return ["    " + line for line in lines]

    def leave(self) -> list[str]:
        way = self.choose(self.leaves)
        if way == "return":
            return [f"return {self.value(1)}, b, c, y * 2"]
        return [way]

    def statement(self, depth: int) -> list[str]:
        simple = ["assign", "assign", "update", "float", "stars", "walrus", "temporary"]
        if self.lists:
            simple += ["append"] * 3
        nested = ["if", "if", "for", "for", "while", "try", "with", "match", "function"]
        nested += ["grow"]
        kind = self.choose(simple + (nested * 2 if depth else []))
        found: list[str] = getattr(self, f"_{kind}")(depth)
        return found

    def _assign(self, _: int) -> list[str]:
        return [f"{self.choose('abc')} = {self.value()}"]

    def _update(self, _: int) -> list[str]:
        # Of a name of its own: which others have the tensor depends on the way taken.
        name, op = next(self.new), self.choose("+-")
        first = [f"{name} = {self.value(1)} + 0", f"{name} {op}= {self.value(1)}"]
        return [*first, f"{name} %= 53", f"{self.choose('abc')} = {name}"]

    def _float(self, _: int) -> list[str]:
        texts = [f"y = y * 0.5 + {self.value(0)}", f"y = y + {self.value(1)}"]
        return [self.choose(texts)]

    def _stars(self, _: int) -> list[str]:
        return [f"a, *rest = {self.value(1)}, b, c", "b, c = rest[1], rest[0]"]

    def _walrus(self, _: int) -> list[str]:
        name = next(self.new)
        test = f"if ({name} := {self.value(1)}) > {self.value(0)}:"
        return [test, f"    {self.choose('abc')} = {name} + 1"]

    def _temporary(self, _: int) -> list[str]:
        name = next(self.new)
        return [f"{name} = {self.value(1)}", f"c = {name} % 29", f"del {name}"]

    def _append(self, _: int) -> list[str]:
        return [f"{self.choose(self.lists)}.append({self.value(1)})"]

    def _if(self, depth: int) -> list[str]:
        lines = [f"if {self.test()}:", *self.block(depth - 1)]
        if self.choose([True, False]):
            lines += [f"elif {self.test()}:", *self.block(depth - 1)]
        if self.choose([True, False]):
            lines += ["else:", *self.block(depth - 1)]
        return lines

    def looped(
        self, head: str, depth: int, names: list[str], first: list[str]
    ) -> list[str]:
        known, leaves = list(self.names), self.leaves
        self.names += names
        self.leaves = ["return", "break", "break", "continue", "continue"]
        lines = [head, *("    " + line for line in first), *self.block(depth - 1)]
        self.names, self.leaves = known, leaves
        if self.random.randint(0, 3) == 0:
            lines += ["else:", *self.block(0)]
        return lines

    def _for(self, depth: int) -> list[str]:
        items, target, names = self.items()
        return self.looped(f"for {target} in {items}:", depth, names, [])

    def _while(self, depth: int) -> list[str]:
        lists, self.lists = self.lists, []
        k, bound = next(self.new), f"({self.value(1)}) % 5"
        tests = [f"while {k} < {bound}:", f"while ({k} := {k} + 1) < {bound}:"]
        at = self.random.randint(0, 1)
        first = [f"{k} += 1"] if at == 0 else []
        lines = self.looped(tests[at], depth, [k], first)
        self.lists = lists
        return [f"{k} = 0", *lines]

    def _grow(self, depth: int) -> list[str]:
        name, around = next(self.new), self.lists
        self.lists = [name]
        items, target, names = self.items()
        before = self.choose(["", self.value(0)])
        lines = self.looped(f"for {target} in {items}:", depth, names, [])
        self.lists = around
        total = self.choose([f"sum({name})", f"len({name})", f"sum(q for q in {name})"])
        return [f"{name} = [{before}]", *lines, f"a = (a + {total}) % 61"]

    def _try(self, depth: int) -> list[str]:
        lists, self.lists = self.lists, []
        raises = ["    raise KeyError"] if self.choose([True, False]) else []
        lines = ["try:", *(raises or self.block(depth - 1))]
        lines += ["except KeyError:", *self.block(0)]
        if self.choose([True, False]):
            lines += ["else:", *self.block(0)]
        if self.choose([True, False]):
            leaves, self.leaves = self.leaves, ["pass"]
            lines += ["finally:", *self.block(0)]
            self.leaves = leaves
        self.lists = lists
        return lines

    def _with(self, depth: int) -> list[str]:
        return [f"with nullcontext({self.value(0)}) as c:", *self.block(depth - 1)]

    def _match(self, depth: int) -> list[str]:
        lines = [f"match {self.value(1)} % 4:"]
        name = next(self.new)
        cases = ["1", "0 | 2", f"{name} if {name} > 2", "_"]
        for case in cases[: self.random.randint(1, 4)]:
            block = self.block(depth - 1)
            lines += [f"    case {case}:", *("    " + line for line in block)]
        return lines

    def _function(self, depth: int) -> list[str]:
        name, n = next(self.new), next(self.new)
        state = self.names, self.leaves, self.lists
        self.names, self.leaves, self.lists = [*self.names, n], ["return b"], []
        body = self.block(depth - 1)
        self.names, self.leaves, self.lists = state
        body = [line.replace(", b, c, y * 2", "") for line in body]
        return [
            f"def {name}({n}, m=b):",
            "    nonlocal a, b, c, y",
            *body,
            f"    return {n} + m",
            f"{name}({self.value(0)})",
            f"b = {name}({self.value(1)}) % 31"
            if self.choose([True, False])
            else "pass",
        ]


def source_of(random: Random) -> str:
    """The text of a function `f(a, b, c, xs, y)`, and of what it calls."""
    writer = _Writer(random)
    body = [*writer.block(2), *writer.block(2)]
    lines = ["def f(a, b, c, xs, y):", *body, "    return a, b, c, y", ""]
    return _HELPERS + "\n".join(lines)


def made(source: str) -> Any:
    """The function of a text, which has its lines as those of a file have."""
    file = f"<control_flow {zlib.crc32(source.encode())}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    names: dict[str, Any] = {"nullcontext": contextlib.nullcontext}
    exec(compile(source, file, "exec"), names)
    return names["f"]


sources = st.randoms(use_true_random=False).map(source_of)
arguments = st.tuples(
    *[st.integers(0, 9)] * 3, st.lists(st.integers(0, 6), min_size=1, max_size=3)
)


def _equal(found: Any, want: Any) -> None:
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5)


def _tensors(args: tuple[Any, ...]) -> list[Any]:
    """New ones: `a += b` writes to a tensor."""
    return [*map(hf.asarray, args), hf.asarray(1.5, dtype=hf.float64)]


@pytest.mark.slow
@given(source=sources, args=arguments)
def test_functions_do_with_tensors_what_they_do_in_plain_python(
    source: str, args: tuple[Any, ...]
) -> None:
    note(source)
    f = made(source)
    rewritten = hf.control_flow(f)
    _equal(rewritten(*args, 1.5), f(*args, 1.5))
    want = run_debug(f, *_tensors(args))
    for run in (run_debug, run_native, run_jit):
        _equal(run(rewritten, *_tensors(args)), want)


@pytest.mark.slow
@given(source=sources, args=arguments)
def test_functions_have_the_derivatives_of_the_way_they_take(
    source: str, args: tuple[Any, ...]
) -> None:
    note(source)
    f = made(source)

    def slope(g: Any, jit: Any = lambda f: f) -> Any:
        *rest, y = _tensors(args)
        return jit(hf.grad(lambda y: g(*rest, y)[3]))(y)

    want = slope(f)
    rewritten = hf.control_flow(f)
    _equal([slope(rewritten), slope(rewritten, hf.jit)], [want, want])
