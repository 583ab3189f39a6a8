"""Control flow for random programs, and the drawing of a whole program from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from property_tests.differential.grammar import (
    Block,
    Control,
    Generator,
    Let,
    Program,
    Type,
)
from property_tests.differential.operations import OPERATIONS


def cond(g: Generator) -> None:
    switch = g.random.random() < 0.35
    if switch:
        index = g.pick(lambda t: t == Type("int64", ())) or g.want(Type("int64", ()))
        chosen = g.let(Type("int64", ()), [index], "xp.clip({0}, -1, 4)") or ""
    else:
        chosen = g.predicate()
    types = [g.types[n] for n in g.carries()]
    blocks = [
        g.block([], g.results(types), g.random.randint(1, 3), writes=True)
        for _ in range(g.random.randint(1, 3) if switch else 2)
    ]
    outs = tuple(g.name(t) for t in types)
    kind = "switch" if switch else "cond"
    g.control(Control(kind, outs, tuple(types), (chosen,), tuple(blocks)))


def loop(g: Generator) -> None:
    kind = g.random.choice(("while", "fori", "scan"))
    firsts = g.carries()
    types = [g.types[n] for n in firsts]
    size = g.random.randint(1, 4)
    tree = g.random.random() < 0.4
    if kind == "while":
        counter = g.let(Type("int64", ()), [], "xp.asarray(0, dtype=xp.int64)") or ""
        firsts, types = [counter, *firsts], [Type("int64", ()), *types]
        test = while_condition(g, types)
        step = g.block(types, g.results(types[1:]), size, writes=True)
        following = g.name(types[0])
        count = Let(following, types[0], (step.params[0],), "{0} + 1")
        step = replace(
            step, body=(*step.body, count), results=(following, *step.results)
        )
        blocks: tuple[Block, ...] = (test, step)
        args, slices = tuple(firsts), 0
    elif kind == "fori":
        low, high = g.random.randint(-2, 2), g.random.randint(-2, 5)
        bounds = [
            g.let(Type("int64", ()), [], f"xp.asarray({n}, dtype=xp.int64)") or ""
            for n in (low, high)
        ]
        blocks = (
            g.block([Type("int64", ()), *types], g.results(types), size, writes=True),
        )
        args, slices = (*bounds, *firsts), 0
    else:
        xs = sliceable(g)
        if not xs:
            return
        rows = [Type(g.types[n].dtype, g.types[n].shape[1:]) for n in xs]
        ys = [*types, g.random.choice(rows)]
        blocks = (g.block([*types, *rows], g.results(ys), size, writes=True),)
        args, slices = (*xs, *firsts), len(xs)
        types = [*types, Type(ys[-1].dtype, (g.types[xs[0]].shape[0], *ys[-1].shape))]
    outs = tuple(g.name(t) for t in types)
    reverse = kind == "scan" and g.random.random() < 0.3
    g.control(Control(kind, outs, tuple(types), args, blocks, slices, tree, reverse))


def while_condition(g: Generator, types: Sequence[Type]) -> Block:
    def result() -> Sequence[str]:
        data = g.predicate()
        bound = (
            g.let(Type("bool", ()), [params[0]], f"{{0}} < {g.random.randint(0, 4)}")
            or ""
        )
        both = g.let(
            Type("bool", ()),
            [bound, data],
            "{0} & {1}",
        )
        return [both or ""]

    params = [f"v{g.count + 1}"]
    return g.block(types, result, g.random.randint(0, 1), writes=False)


def sliceable(g: Generator) -> list[str]:
    def fits(t: Type) -> bool:
        return len(t.shape) > 0 and t.shape[0] <= 13 and t.size < 500

    x = g.pick(fits)
    if x is None:
        return []
    n = g.types[x].shape[0]
    y = g.pick(lambda t: fits(t) and repr(t.shape[0]) == repr(n))
    return [x, y] if y is not None and g.random.random() < 0.5 and y != x else [x]


def mapped(g: Generator) -> None:
    xs = sliceable(g)
    if not xs:
        return
    n = g.types[xs[0]].shape[0]
    if n == 0 and g.random.random() < 0.7:
        return
    rows = [Type(g.types[x].dtype, g.types[x].shape[1:]) for x in xs]
    types = [g.random.choice(rows), Type(g.random.choice(g.dtypes), ())]
    block = g.block(rows, g.results(types), g.random.randint(1, 4), writes=False)
    outer = tuple(Type(t.dtype, (n, *t.shape)) for t in types)
    outs = tuple(g.name(t) for t in outer)
    kind = g.random.choice(("map", "vmap"))
    g.control(Control(kind, outs, outer, tuple(xs), (block,), len(xs)))


CONTROLS: Final = (cond, cond, loop, loop, loop, mapped)


def generate(seed: int) -> Program:
    return Generator(seed, OPERATIONS, CONTROLS).program()
