"""Array operations for random programs: each draws one, with operands that suit it."""

import math
from collections.abc import Sequence
from typing import Final

from property_tests.differential.grammar import (
    BITS,
    EXACT_UNARY,
    INTS,
    ROUNDED_UNARY,
    SIGNED,
    SMOOTH_UNARY,
    UNSIGNED,
    Generator,
    Let,
    Size,
    Type,
    is_number,
    joined,
)


def unary(g: Generator) -> None:
    x = g.pick(lambda t: t.is_float)
    if x is None:
        return
    rounded = g.random.random() < 0.5
    names = ROUNDED_UNARY if rounded else EXACT_UNARY
    if g.smooth:
        names, rounded = SMOOTH_UNARY, True
    g.let(g.types[x], [x], f"xp.{g.random.choice(names)}({{0}})", rounded=rounded)


def unary_of_integers(g: Generator) -> None:
    x = g.pick(lambda t: not t.is_float)
    if x is None:
        return
    type_ = g.types[x]
    names = (
        ["logical_not"]
        if type_.dtype == "bool"
        else ["bitwise_invert", "square", "sign"]
    )
    if type_.dtype in SIGNED:
        names += ["negative", "abs"]
    g.let(type_, [x], f"xp.{g.random.choice(names)}({{0}})")


def binary(g: Generator) -> None:
    found = g.pair(is_number)
    if found is None:
        return
    a, b, type_ = found
    names = ["add", "subtract", "multiply", "maximum", "minimum"]
    text = f"xp.{g.random.choice(names)}({{0}}, {{1}})"
    if type_.is_float and not g.smooth and g.random.random() < 0.4:
        name = g.random.choice(
            (
                "divide",
                "copysign",
                "hypot",
                "atan2",
                "logaddexp",
                "floor_divide",
                "remainder",
                "nextafter",
            )
        )
        text = f"xp.{name}({{0}}, {{1}})"
        g.let(type_, [a, b], text, rounded=name in ("hypot", "atan2", "logaddexp"))
        return
    if g.smooth and type_.is_float and g.random.random() < 0.2:
        text = "{0} / (1.5 + xp.square({1}))"
    g.let(type_, [a, b], text)


def binary_of_integers(g: Generator) -> None:
    found = g.pair(lambda t: t.dtype in INTS)
    if found is None:
        return
    a, b, type_ = found
    dtype = type_.dtype
    nonzero = f"xp.where({{1}} == 0, xp.asarray(1, dtype=xp.{dtype}), {{1}})"
    short = f"({{1}} & {BITS[dtype] - 1})"
    text = g.random.choice(
        (
            f"xp.floor_divide({{0}}, {nonzero})",
            f"xp.remainder({{0}}, {nonzero})",
            "xp.bitwise_and({0}, {1})",
            "xp.bitwise_or({0}, {1})",
            "xp.bitwise_xor({0}, {1})",
            f"xp.bitwise_left_shift({{0}}, {short})",
            f"xp.bitwise_right_shift({{0}}, {short})",
            "xp.pow({0}, {1} & 7)",
        )
    )
    g.let(type_, [a, b], text)


def binary_of_bools(g: Generator) -> None:
    if (found := g.pair(lambda t: t.dtype == "bool")) is None:
        return
    a, b, type_ = found
    name = g.random.choice(("logical_and", "logical_or", "logical_xor", "bitwise_xor"))
    g.let(type_, [a, b], f"xp.{name}({{0}}, {{1}})")


def with_number(g: Generator) -> None:
    x = g.pick(is_number)
    if x is None:
        return
    type_ = g.types[x]
    number = g.random.choice(("2", "3", "1"))
    if type_.is_float:
        number = g.random.choice(("0.5", "2", "-1.25", "3"))
    sign = g.random.choice("+*-")
    text = g.random.choice((f"{{0}} {sign} {number}", f"{number} {sign} {{0}}"))
    g.let(type_, [x], text)


def promoted(g: Generator) -> None:
    pairs = (
        ("float32", "float64"),
        ("int32", "int64"),
        ("uint8", "int32"),
        ("uint16", "int64"),
        ("uint8", "uint32"),
    )
    low, high = g.random.choice(pairs)
    a = g.pick(lambda t: t.dtype == low)
    if a is None:
        return
    b = g.pick(
        lambda t: t.dtype == high and joined(g.types[a].shape, t.shape) is not None
    )
    if b is None:
        return
    shape = joined(g.types[a].shape, g.types[b].shape)
    assert shape is not None
    g.let(Type(high, shape), [a, b], f"{{0}} {g.random.choice('+-*')} {{1}}")


def compare(g: Generator) -> None:
    if (found := g.pair(is_number)) is None:
        return
    a, b, type_ = found
    sign = g.random.choice(("<", "<=", "==", "!=", ">", ">="))
    g.let(Type("bool", type_.shape), [a, b], f"{{0}} {sign} {{1}}")


def select(g: Generator) -> None:
    if (found := g.pair(lambda t: True)) is None:
        return
    a, b, type_ = found
    p = g.pick(lambda t: t.dtype == "bool" and joined(t.shape, type_.shape) is not None)
    if p is None:
        return
    shape = joined(g.types[p].shape, type_.shape)
    assert shape is not None
    g.let(Type(type_.dtype, shape), [p, a, b], "xp.where({0}, {1}, {2})")


def clipped(g: Generator) -> None:
    if (x := g.pick(is_number)) is not None:
        g.let(g.types[x], [x], "xp.clip({0}, 1, 3)")


def cast(g: Generator) -> None:
    x = g.pick()
    if x is None:
        return
    type_ = g.types[x]
    dtype = g.random.choice(g.dtypes)
    text = f"xp.astype({{0}}, xp.{dtype})"
    if type_.is_float and dtype in INTS:
        low = 0 if dtype in UNSIGNED else -100
        numbers = "xp.where(xp.isnan({0}), 0.0, {0})"
        text = f"xp.astype(xp.clip({numbers}, {low}, 100), xp.{dtype})"
    g.let(Type(dtype, type_.shape), [x], text)


def reduction(g: Generator) -> None:
    x = g.pick()
    if x is None:
        return
    type_ = g.types[x]
    rank = len(type_.shape)
    axes: object = None
    if rank and g.random.random() < 0.8:
        axes = tuple(
            sorted(g.random.sample(range(rank), g.random.randint(1, min(rank, 2))))
        )
    over = range(rank) if axes is None else axes
    assert isinstance(over, (tuple, range))
    keep = g.random.random() < 0.3
    shape = tuple(
        1 if k in over else n
        for k, n in enumerate(type_.shape)
        if keep or k not in over
    )
    end = f"axis={axes!r}, keepdims={keep}"
    count = math.prod(type_.shape[k] for k in over)
    if type_.dtype == "bool":
        g.let(
            Type("bool", shape),
            [x],
            f"xp.{g.random.choice(('any', 'all'))}({{0}}, {end})",
        )
        return
    kinds = ["sum", "count_nonzero"] + ["prod"] * (count < 30 and not g.smooth)
    kinds += ["max", "min", "argmax"] * (count > 0)
    kinds += ["mean", "var"] * (count > 0 and type_.is_float)
    kind = g.random.choice(kinds)
    if kind == "argmax":
        axis = g.axis(type_.shape)
        if axis is None or type_.shape[axis] == 0:
            return
        shape = type_.shape[:axis] + type_.shape[axis + 1 :]
        g.let(
            Type("int64", shape),
            [x],
            f"xp.{g.random.choice(('argmax', 'argmin'))}({{0}}, axis={axis})",
        )
        return
    if kind == "count_nonzero":
        g.let(
            Type("int64", shape),
            [x],
            f"xp.astype(xp.count_nonzero({{0}}, {end}), xp.int64)",
        )
        return
    dtype = f", dtype=xp.{type_.dtype}" if kind in ("sum", "prod") else ""
    rounded = kind in ("sum", "prod", "mean", "var")
    inner = "E({0})" if rounded and type_.is_float else "{0}"
    text = {
        "hf": f"xp.{kind}({{0}}, {end}{dtype})",
        "np": f"xp.{kind}({inner}, {end}{dtype})",
        "jnp": f"xp.{kind}({{0}}, {end}{dtype})",
    }
    g.let(Type(type_.dtype, shape), [x], text, rounded=rounded)


def cumulative(g: Generator) -> None:
    x = g.pick(lambda t: is_number(t) and len(t.shape) > 0)
    if x is None:
        return
    type_ = g.types[x]
    axis = g.axis(type_.shape)
    assert axis is not None
    product = type_.shape[axis] < 30 and not g.smooth and g.random.random() < 0.3
    name = "cumulative_prod" if product else "cumulative_sum"
    text = f"xp.{name}({{0}}, axis={axis}, dtype=xp.{type_.dtype})"
    rounded = text.replace("{0}", "E({0})") if type_.is_float else text
    g.let(type_, [x], {"hf": text, "np": rounded, "jnp": text}, rounded=True)


def sorted_(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0 and t.dtype != "bool")
    if x is None:
        return
    type_ = g.types[x]
    axis = g.axis(type_.shape)
    if g.random.random() < 0.6:
        g.let(type_, [x], f"xp.sort({{0}}, axis={axis})")
    else:
        g.let(
            Type("int64", type_.shape),
            [x],
            f"xp.argsort({{0}}, axis={axis}, stable=True)",
        )


def matmul(g: Generator) -> None:
    a = g.pick(lambda t: is_number(t) and len(t.shape) in (1, 2, 3))
    if a is None:
        return
    of_a = g.types[a]
    inner = of_a.shape[-1]

    def fits(t: Type) -> bool:
        if t.dtype != of_a.dtype or not t.shape:
            return False
        mine = t.shape[-2] if len(t.shape) > 1 else t.shape[0]
        same = mine == inner and isinstance(mine, Size) == isinstance(inner, Size)
        return same and len(t.shape) <= 2

    b = g.pick(fits)
    if b is None:
        return
    shape = of_a.shape[:-1] + g.types[b].shape[1:]
    if math.prod(shape) * inner > 3_000_000 or inner > 5000:
        return
    near = "xp.matmul(E({0}), E({1}))" if of_a.is_float else "xp.matmul({0}, {1})"
    text = "xp.matmul({0}, {1})"
    g.let(
        Type(of_a.dtype, shape),
        [a, b],
        {"hf": text, "np": near, "jnp": text},
        rounded=True,
    )


def transposed(g: Generator) -> None:
    if (x := g.pick()) is not None:
        shape = g.types[x].shape
        axes = g.random.sample(range(len(shape)), len(shape))
        type_ = Type(g.types[x].dtype, tuple(shape[k] for k in axes))
        g.let(type_, [x], f"xp.permute_dims({{0}}, {tuple(axes)!r})", view=True)


def reshaped(g: Generator) -> None:
    x = g.pick(lambda t: not any(isinstance(n, Size) for n in t.shape))
    if x is None:
        return
    type_ = g.types[x]
    left = type_.size
    shape: list[int] = []
    while left > 1 and len(shape) < 4:
        n = g.random.choice([d for d in range(1, min(left, 12) + 1) if left % d == 0])
        shape.append(n)
        left //= n
    shape.append(left)
    g.random.shuffle(shape)
    g.let(
        Type(type_.dtype, tuple(shape)),
        [x],
        f"xp.reshape({{0}}, {tuple(shape)!r})",
        view=True,
    )


def broadcast(g: Generator) -> None:
    if (x := g.pick(lambda t: t.size < 300)) is not None:
        type_ = g.types[x]
        shape = (g.random.randint(0, 3), *type_.shape)
        g.let(
            Type(type_.dtype, shape), [x], f"xp.copy(xp.broadcast_to({{0}}, {shape!r}))"
        )


def moved(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0)
    if x is None:
        return
    type_ = g.types[x]
    axis = g.axis(type_.shape)
    by = g.random.randint(-4, 4)
    if g.random.random() < 0.5:
        g.let(type_, [x], f"xp.flip({{0}}, axis={axis})", view=True)
    else:
        g.let(type_, [x], f"xp.roll({{0}}, {by}, axis={axis})")


def joined_arrays(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0)
    if x is None:
        return
    type_ = g.types[x]
    if g.random.random() < 0.4:
        y = g.pick(
            lambda t: (
                t == type_ and list(map(repr, t.shape)) == list(map(repr, type_.shape))
            )
        )
        axis = g.random.randint(0, len(type_.shape))
        shape = (*type_.shape[:axis], 2, *type_.shape[axis:])
        if y is not None:
            g.let(
                Type(type_.dtype, shape),
                [x, y],
                f"xp.stack([{{0}}, {{1}}], axis={axis})",
            )
        return
    at = g.axis(type_.shape, fixed=True)
    if at is None:
        return

    def fits(t: Type) -> bool:
        rest = [
            (repr(m), repr(n))
            for k, (m, n) in enumerate(zip(t.shape, type_.shape, strict=True))
            if k != at
        ]
        return all(m == n for m, n in rest) and not isinstance(t.shape[at], Size)

    y = g.pick(
        lambda t: (
            t.dtype == type_.dtype and len(t.shape) == len(type_.shape) and fits(t)
        )
    )
    if y is not None:
        shape = (
            *type_.shape[:at],
            type_.shape[at] + g.types[y].shape[at],
            *type_.shape[at + 1 :],
        )
        g.let(Type(type_.dtype, shape), [x, y], f"xp.concat([{{0}}, {{1}}], axis={at})")


def basic_index(g: Generator, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The text of slices, integers and `None`, and the shape that they leave."""
    parts: list[str] = []
    out: list[int] = []
    for n in shape:
        kind = g.random.random()
        if isinstance(n, Size):
            parts.append(g.random.choice((":", "::-1")))
            out.append(n)
        elif kind < 0.25 and n > 0:
            parts.append(str(g.random.randint(-n, n - 1)))
        else:
            ends = (None, *range(-n - 1, n + 2))
            low, high = g.random.choice(ends), g.random.choice(ends)
            step = g.random.choice((None, None, 1, 2, -1, -2, 3))
            out.append(len(range(*slice(low, high, step).indices(n))))
            parts.append(
                ":".join("" if v is None else str(v) for v in (low, high, step))
            )
        if g.random.random() < 0.08:
            parts.append("None")
            out.append(1)
    while parts and parts[-1] == ":" and len(out) < 3:
        parts[-1] = "..."
        break
    return ", ".join(parts) or "...", tuple(out)


def sliced(g: Generator) -> None:
    if (x := g.pick(lambda t: len(t.shape) > 0)) is not None:
        index, shape = basic_index(g, g.types[x].shape)
        g.let(Type(g.types[x].dtype, shape), [x], f"{{0}}[{index}]", view=True)


def indices(g: Generator, extent: int) -> tuple[str, tuple[int, ...]] | None:
    """A variable of integers that are valid indices of an axis, and its shape."""
    source = g.pick(lambda t: t.dtype in INTS and len(t.shape) > 0 and t.size < 500)
    if source is None or extent == 0:
        return None
    type_ = g.types[source]
    low = 0 if isinstance(extent, Size) or type_.dtype in UNSIGNED else extent
    bound = 3 if isinstance(extent, Size) else int(extent)
    within = f"xp.astype(xp.remainder(xp.astype({{0}}, xp.int64), {bound}), xp.int64)"
    if low and g.random.random() < 0.5:
        within += f" - {low}"
    name = g.let(Type("int64", type_.shape), [source], within)
    return None if name is None else (name, type_.shape)


def gathered(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0)
    if x is None:
        return
    type_ = g.types[x]
    axis = g.axis(type_.shape)
    assert axis is not None
    found = indices(g, type_.shape[axis])
    if found is None:
        return
    index, shape = found
    out = Type(type_.dtype, type_.shape[:axis] + shape + type_.shape[axis + 1 :])
    text = "{0}[" + ":, " * axis + "{1}]"
    g.let(out, [x, index], text)


def scattered(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0 and is_number(t))
    if x is None:
        return
    type_ = g.types[x]
    found = indices(g, type_.shape[0])
    if found is None:
        return
    index, shape = found
    value = g.want(Type(type_.dtype, g.random.choice(((), shape + type_.shape[1:]))))
    how = g.random.choice(("add", "add", "max", "min"))
    if how in ("max", "min") and g.smooth:
        return
    at = f"{{0}}.at[{{1}}].{how}({{2}})"
    function = {"add": "add", "max": "maximum", "min": "minimum"}[how]
    text = {"hf": at, "np": f"scatter(np.{function}, {{0}}, {{1}}, {{2}})", "jnp": at}
    g.let(type_, [x, index, value], text, rounded=how == "add")


def updated(g: Generator) -> None:
    x = g.pick(lambda t: len(t.shape) > 0)
    if x is None:
        return
    type_ = g.types[x]
    index, shape = basic_index(g, type_.shape)
    value = g.want(Type(type_.dtype, g.random.choice(((), shape))))
    at = f"{{0}}.at[{index}].set({{1}})"
    text = {"hf": at, "np": f"put({{0}}, np.s_[{index}], {{1}})", "jnp": at}
    g.let(type_, [x, value], text)


def masked(g: Generator) -> None:
    x = g.pick(lambda t: is_number(t) and len(t.shape) > 0 and not t.is_float)
    if x is None:
        return
    type_ = g.types[x]
    m = g.pick(
        lambda t: (
            t == Type("bool", type_.shape)
            and list(map(repr, t.shape)) == list(map(repr, type_.shape))
        )
    )
    if m is None:
        m = g.let(Type("bool", type_.shape), [x], "{0} > 1") or ""
    end = f", dtype=xp.{type_.dtype})"
    text = {
        "hf": "xp.sum({0}[{1}]" + end,
        "np": "xp.sum({0}[{1}]" + end,
        "jnp": "xp.sum(xp.where({1}, {0}, 0)" + end,
    }
    if m:
        g.let(Type(type_.dtype, ()), [x, m], text)


def local(g: Generator) -> None:
    """A tensor of the program that later statements write to."""
    x = g.pick(lambda t: 0 < t.size < 3000)
    if x is not None:
        name = g.let(g.types[x], [x], "xp.copy({0})")
        if name is not None:
            g.writable.add(name)
            write(g)


def write(g: Generator) -> None:
    names = [n for n in g.scope if n in g.writable]
    if not names:
        return
    x = g.random.choice(names)
    type_ = g.types[x]
    index, shape = basic_index(g, type_.shape)
    value = g.want(Type(type_.dtype, g.random.choice(((), shape))))
    if value == x:
        return
    add = type_.dtype != "bool" and g.random.random() < 0.4
    plain = f"{{0}}[{index}] {'+' if add else ''}= {{1}}"
    text = {
        "hf": plain,
        "np": plain,
        "jnp": f"{{0}} = {{0}}.at[{index}].{'add' if add else 'set'}({{1}})",
    }
    g.body.append(Let(x, type_, (x, value), text, write=True))


def mask_write(g: Generator) -> None:
    names = [
        n
        for n in g.scope
        if n in g.writable and is_number(g.types[n]) and g.types[n].shape
    ]
    if not names:
        return
    x = g.random.choice(names)
    type_ = g.types[x]
    value = g.want(Type(type_.dtype, ()))
    plain = "{0}[{0} > 1] = {1}"
    text = {"hf": plain, "np": plain, "jnp": "{0} = xp.where({0} > 1, {1}, {0})"}
    g.body.append(Let(x, type_, (x, value), text, write=True))


OPERATIONS: Final = (
    *(unary, unary, unary_of_integers, binary, binary, binary, binary_of_integers),
    *(binary_of_integers, binary_of_bools, with_number, promoted, compare, select),
    *(clipped, cast, cast, reduction, reduction, reduction, cumulative, sorted_),
    *(matmul, matmul, transposed, reshaped, broadcast, moved, joined_arrays, sliced),
    *(sliced, gathered, gathered, scattered, updated, masked, local, local, write),
    *(write, mask_write),
)
