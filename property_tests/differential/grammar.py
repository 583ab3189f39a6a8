"""Random programs as small typed trees: a seed is a program.

A program is a list of statements over named variables, each of which has a dtype and a
shape that are known when the statement is drawn. Nothing that is undefined is drawn:
indices are within bounds, integer divisors are not 0, shifts are shorter than the
dtype, and floats are clipped before they become integers.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

FLOATS: Final = ("float32", "float64")
SIGNED: Final = ("int32", "int64")
UNSIGNED: Final = ("uint8", "uint16", "uint32", "uint64")
INTS: Final = SIGNED + UNSIGNED
BITS: Final = {name: int("".join(filter(str.isdigit, name))) for name in INTS}

EXACT_UNARY: Final = "negative abs floor ceil trunc sign square sqrt round".split()
ROUNDED_UNARY: Final = (
    "sin cos tanh exp log expm1 log1p atan asinh sinh cbrt exp2 reciprocal log2"
).split()
SMOOTH_UNARY: Final = "sin cos tanh atan asinh square negative abs".split()


class Size(int):
    """An extent that another call of the program may change: `N` in its text."""

    def __repr__(self) -> str:
        return "N"


class Type(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


Text = str | dict[str, str]
"""An expression of `{0}`, `{1}`...; by backend where `hf`, `np`, `jnp` differ."""


@dataclass(frozen=True)
class Let:
    """`out = text`; a `write` changes its first argument in place instead."""

    out: str
    type: Type
    args: tuple[str, ...]
    text: Text
    rounded: bool = False
    write: bool = False


@dataclass(frozen=True)
class Block:
    params: tuple[str, ...]
    body: tuple["Statement", ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Control:
    """A higher-order operator; what `args` and `blocks` are depends on `kind`.

    cond, switch: predicate or index; a block for each branch.
    while: first carries; the condition (its one result), and the step.
    fori: lower and upper bound, then first carries; the step, whose first parameter is
    the counter. scan: `slices` arguments that are sliced, then first carries; the step.
    map, vmap: arguments that are sliced; the function.
    """

    kind: str
    outs: tuple[str, ...]
    types: tuple[Type, ...]
    args: tuple[str, ...]
    blocks: tuple[Block, ...]
    slices: int = 0
    tree: bool = False
    reverse: bool = False


Statement = Let | Control


@dataclass(frozen=True)
class Input:
    name: str
    type: Type
    seed: int


@dataclass(frozen=True)
class Program:
    seed: int
    mode: str
    inputs: tuple[Input, ...]
    block: Block
    types: dict[str, Type] = field(default_factory=dict)

    @property
    def statements(self) -> int:
        return sum(1 for _ in walk(self.block))


def walk(block: Block) -> Iterator[Statement]:
    """All statements of a block, those of inner blocks too."""
    for statement in block.body:
        yield statement
        if isinstance(statement, Control):
            for inner in statement.blocks:
                yield from walk(inner)


def outs_of(statement: Statement) -> tuple[str, ...]:
    return (statement.out,) if isinstance(statement, Let) else statement.outs


def leaf(name: str, type_: Type, value: object = 1) -> Let:
    if type_.dtype == "bool":
        value = bool(value)
    return Let(
        name, type_, (), f"xp.full({type_.shape!r}, {value!r}, dtype=xp.{type_.dtype})"
    )


MODES: Final = (
    *("plain",) * 6,
    *("alias",) * 2,
    *("dynamic",) * 3,
    *("vmap",) * 2,
    *("smooth",) * 5,
    "large",
)


class Generator:
    """Draws one program. `mode` says what it is for: see `MODES` and `judge`."""

    def __init__(
        self, seed: int, operations: Sequence["Draw"], controls: Sequence["Draw"]
    ) -> None:
        self.operations, self.controls = operations, controls
        self.random = random.Random(seed)
        self.seed = seed
        self.mode = self.random.choice(MODES)
        self.types: dict[str, Type] = {}
        self.scope: list[str] = []
        self.body: list[Statement] = []
        self.writable: set[str] = set()
        self.count = 0
        self.depth = 0
        self.smooth = self.mode == "smooth"
        self.limit = 1_500_000 if self.mode == "large" else 3000
        self.dtypes: tuple[str, ...] = (*("float64",) * 3, "int64", "bool")
        if not self.smooth:
            self.dtypes = (*FLOATS, *FLOATS, *SIGNED, *INTS, "bool")

    # --- the whole ------------------------------------------------------------------

    def program(self) -> Program:
        inputs = []
        for _ in range(self.random.randint(2, 4)):
            type_ = Type(self.random.choice(self.dtypes), self.shape())
            inputs.append(self.input(type_))
        if self.smooth:
            inputs.append(self.input(Type("float64", self.shape())))
        if self.mode == "dynamic":
            shape = (Size(13), *self.shape(2))
            inputs.insert(0, self.input(Type(self.random.choice(FLOATS), shape)))
            inputs.append(self.input(Type(self.random.choice(INTS), (Size(13),))))
        if self.mode == "large":
            shape = self.random.choice(((100_003,), (1009, 211), (3, 70_001), (10**6,)))
            inputs.append(self.input(Type(self.random.choice(self.dtypes), shape)))
        if self.random.random() < 0.4 and self.mode in ("plain", "dynamic"):
            for name in ("GLOBAL", "STATE.value"):
                self.types[name] = Type(self.random.choice(FLOATS + SIGNED), ())
                self.scope.append(name)
        self.fill(self.random.randint(5, 6 if self.mode == "large" else 14))
        drawn = [n for s in self.body for n in outs_of(s) if n in self.scope]
        results = drawn[-4:] or [inputs[0].name]
        if self.smooth and not any(self.types[n].is_float for n in results):
            results.append(inputs[-1].name)
        block = Block((), tuple(self.body), tuple(results))
        return Program(self.seed, self.mode, tuple(inputs), block, self.types)

    def input(self, type_: Type) -> Input:
        name = self.name(type_)
        self.scope.append(name)
        return Input(name, type_, self.random.randrange(10**6))

    def fill(self, statements: int) -> None:
        for _ in range(statements):
            if self.depth < 3 and self.random.random() < 0.22:
                self.random.choice(self.controls)(self)
            else:
                self.random.choice(self.operations)(self)

    # --- parts ----------------------------------------------------------------------

    def name(self, type_: Type) -> str:
        self.count += 1
        self.types[f"v{self.count}"] = type_
        return f"v{self.count}"

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        if rank is None:
            rank = self.random.choice((0, 1, 1, 1, 2, 2, 2, 3, 4, 5))
        extents = (0, 1, 1, 2, 2, 3, 3, 4, 5) if rank < 4 else (1, 2, 3)
        if self.smooth:
            extents = (1, 2, 3)
        return tuple(self.random.choice(extents) for _ in range(rank))

    def let(
        self,
        type_: Type,
        args: Sequence[str],
        text: Text,
        *,
        rounded: bool = False,
        view: bool = False,
    ) -> str | None:
        if type_.size > self.limit or len(type_.shape) > 6:
            return None
        if view and self.mode != "alias":
            parts = text if isinstance(text, dict) else dict.fromkeys(BACKENDS, text)
            text = {k: f"xp.copy({v})" for k, v in parts.items()}
        out = self.name(type_)
        self.body.append(Let(out, type_, tuple(args), text, rounded))
        self.scope.append(out)
        return out

    def pick(self, accept: Callable[[Type], bool] = lambda t: True) -> str | None:
        names = [n for n in self.scope if accept(self.types[n])]
        if not names:
            return None
        recent = names[-5:]
        return self.random.choice(recent if self.random.random() < 0.6 else names)

    def want(self, type_: Type) -> str:
        """A variable of this type: one that there is, or a conversion, or a leaf."""
        found = self.pick(lambda t: t == type_)
        if found is not None and self.random.random() < 0.8:
            return found
        fits = self.pick(lambda t: t.dtype == type_.dtype and t.size == 1)
        if fits is not None:
            text = f"xp.broadcast_to(xp.reshape({{0}}, ()), {type_.shape!r}) + 0"
            if type_.dtype == "bool":
                ones = f"xp.full({type_.shape!r}, True, dtype=xp.bool)"
                text = f"{ones} & xp.reshape({{0}}, ())"
            out = self.let(type_, [fits], text)
            if out is not None:
                return out
        out = self.name(type_)
        self.body.append(leaf(out, type_, self.value(type_.dtype)))
        self.scope.append(out)
        return out

    def value(self, dtype: str) -> object:
        if dtype == "bool":
            return self.random.random() < 0.5
        if dtype in FLOATS:
            return self.random.choice((0.5, -1.25, 2.0, 1.0, -0.75))
        return self.random.choice((0, 1, 2, 3, 5))

    def predicate(self) -> str:
        name = self.pick(lambda t: t == Type("bool", ()))
        if name is not None and self.random.random() < 0.4:
            return name
        source = self.pick(lambda t: t.size > 0 and t.dtype != "bool")
        if source is None:
            return self.want(Type("bool", ()))
        text = f"xp.any({{0}} > {self.random.choice((0, 1, 2))})"
        return self.let(Type("bool", ()), [source], text) or ""

    def pair(self, accept: Callable[[Type], bool]) -> tuple[str, str, Type] | None:
        """Two variables of one dtype that broadcast, and the type of both together."""
        a = self.pick(accept)
        if a is None:
            return None
        of_a = self.types[a]
        b = self.pick(
            lambda t: t.dtype == of_a.dtype and joined(t.shape, of_a.shape) is not None
        )
        assert b is not None
        shape = joined(of_a.shape, self.types[b].shape)
        assert shape is not None
        if self.random.random() < 0.5:
            a, b = b, a
        return a, b, Type(of_a.dtype, shape)

    def axis(self, shape: Sequence[int], *, fixed: bool = False) -> int | None:
        axes = [k for k, n in enumerate(shape) if not (fixed and isinstance(n, Size))]
        return self.random.choice(axes) if axes else None

    def block(
        self,
        params: Sequence[Type],
        draw: Callable[[], Sequence[str]],
        size: int,
        writes: bool,
    ) -> Block:
        """A block that reads what is in scope; `draw` says its results at its end."""
        kept = self.scope[:], self.body, set(self.writable)
        self.body = []
        if not writes:
            self.writable = set()
        names = [self.name(t) for t in params]
        self.scope = self.scope + names
        self.depth += 1
        self.fill(size)
        results = tuple(draw())
        block = Block(tuple(names), tuple(self.body), results)
        self.depth -= 1
        self.scope, self.body, self.writable = kept
        return block

    def results(self, types: Sequence[Type]) -> Callable[[], Sequence[str]]:
        return lambda: [self.want(t) for t in types]

    def control(self, node: Control) -> None:
        self.body.append(node)
        self.scope += node.outs

    def carries(self) -> list[str]:
        names = [n for _ in range(self.random.randint(1, 3)) if (n := self.pick())]
        return [n for n in names if self.types[n].size <= 200] or [
            self.want(Type(self.dtypes[0], ()))
        ]


BACKENDS: Final = ("hf", "np", "jnp")


def joined(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The broadcast shape, or None; an extent of another call equals only itself."""
    rank = max(len(a), len(b))
    out: list[int] = []
    for m, n in zip(
        (*(1,) * (rank - len(a)), *a), (*(1,) * (rank - len(b)), *b), strict=True
    ):
        if isinstance(m, Size) and (isinstance(n, Size) or n == 1):
            out.append(m)
        elif (isinstance(n, Size) and m == 1) or (m == 1 and not isinstance(n, Size)):
            out.append(n)
        elif isinstance(m, Size) or isinstance(n, Size) or not (m == n or n == 1):
            return None
        else:
            out.append(m)
    return tuple(out)


def is_number(type_: Type) -> bool:
    return type_.dtype != "bool"


Draw = Callable[[Generator], None]
"""Adds a statement to the block that is being drawn, or none where nothing fits."""
