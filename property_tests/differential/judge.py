"""Runs a program by hopflow, NumPy and JAX, and compares; shrinks one that differs.

NumPy runs three times more with its rounded results disturbed by a few units in the
last place: an output may differ by as much as that moves it, and one whose integers, or
infinities, move is left out.
"""

import contextlib
import math
import random
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from property_tests.differential.control_flow import generate
from property_tests.differential.grammar import (
    Block,
    Control,
    Input,
    Program,
    Statement,
    Type,
    leaf,
    walk,
)
from property_tests.differential.render import PRELUDE, source, used

import hopflow as hf

SPECIAL: Final = (-0.0, 0.0, 5e-324, 1e-40, math.inf, -math.inf, math.nan, 1e15, -3.0)
NUMPY_ONLY: Final = ("alias", "large")


def values(v: Input, mode: str, turn: int = 0) -> np.ndarray[Any, Any]:
    """The data of an input; `turn` is which call it is for."""
    shape = tuple((13, 6)[turn % 2] if repr(n) == "N" else n for n in v.type.shape)
    rng = np.random.default_rng((v.seed, turn))
    dtype = np.dtype(v.type.dtype)
    if dtype == np.bool:
        return np.asarray(rng.random(shape) < 0.5)
    if mode == "smooth":
        return np.asarray(
            rng.uniform(-2, 2, shape)
            if dtype.kind == "f"
            else rng.integers(-3, 4, shape)
        ).astype(dtype)
    if dtype.kind == "f":
        data = np.asarray(np.round(rng.normal(0, 3, shape) * 8) / 8)
        if rng.random() < 0.3:
            data = np.asarray(rng.normal(0, 1, shape))
        if rng.random() < 0.25:
            data = np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), data)
        return np.asarray(data).astype(dtype)
    info = np.iinfo(dtype)
    data = rng.integers(max(info.min, -6), 7, shape).astype(dtype)
    if rng.random() < 0.3:
        edges = np.asarray([info.min, info.max, info.max - 1, 1, 0], dtype=dtype)
        data = np.where(rng.random(shape) < 0.4, rng.choice(edges, shape), data)
    return np.asarray(data)


@dataclass(frozen=True)
class Failure:
    what: str
    detail: str


class Disturbance:
    """`E` of NumPy's source."""

    def __init__(self, seed: int | None) -> None:
        self.rng = None if seed is None else np.random.default_rng(seed)

    def __call__(self, x: Any) -> Any:
        if self.rng is None or np.asarray(x).dtype.kind != "f":
            return x
        x = np.asarray(x)
        step = 4 * np.finfo(x.dtype).eps
        return (x * (1 + step * self.rng.choice((-1, 1), x.shape))).astype(x.dtype)


class Runner:
    """The three functions of a program, and the tensors that are global to them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.space: dict[str, dict[str, Any]] = {}
        self.text = (
            PRELUDE
            + "\n\n"
            + "\n\n".join(source(program, b) for b in ("hf", "np", "jnp"))
        )
        for backend in ("hf", "np", "jnp"):
            space: dict[str, Any] = {
                "hf": hf,
                "np": np,
                "jnp": jnp,
                "lax": lax,
                "jax": jax,
            }
            space |= {"STATE": types.SimpleNamespace(), "E": Disturbance(None)}
            space |= {"scatter": scatter, "put": put}
            exec(
                compile(
                    source(program, backend), f"<{backend} {program.seed}>", "exec"
                ),
                space,
            )
            self.space[backend] = space

    def function(self, backend: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self.space[backend][f"program_{backend}"]
        return found

    def rebind(self, turn: int) -> None:
        for name, kind in self.program.types.items():
            if name in ("GLOBAL", "STATE.value"):
                value = np.asarray((1.5, -2.25, 3.0)[turn % 3]).astype(kind.dtype)
                for backend, asarray in (
                    ("hf", hf.asarray),
                    ("np", np.asarray),
                    ("jnp", jnp.asarray),
                ):
                    space = self.space[backend]
                    given = asarray(value)
                    if name == "GLOBAL":
                        space["GLOBAL"] = given
                    else:
                        space["STATE"].value = given

    def expected(
        self, data: Sequence[np.ndarray[Any, Any]], seed: int | None = None
    ) -> list[np.ndarray[Any, Any]]:
        self.space["np"]["E"] = Disturbance(seed)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.function("np")(*(d.copy() for d in data))
        return [np.asarray(v) for v in out]

    def judged(
        self, data: Sequence[np.ndarray[Any, Any]]
    ) -> tuple[list[np.ndarray[Any, Any]], list[Any]]:
        """What NumPy gives, and how far each element may be from it (None: unknown)."""
        plain = self.expected(data)
        spread: list[Any] = [np.zeros(v.shape) for v in plain]
        for seed in range(3):
            with np.errstate(all="ignore"):
                for k, (v, other) in enumerate(
                    zip(plain, self.expected(data, seed), strict=True)
                ):
                    if v.dtype.kind != "f":
                        same = np.array_equal(v, other)
                    else:
                        same = (
                            np.array_equal(np.isnan(v), np.isnan(other))
                            and np.array_equal(v[np.isinf(v)], other[np.isinf(v)])
                            and not np.any(np.isinf(other) & ~np.isinf(v))
                        )
                    if not same:
                        spread[k] = None
                    elif spread[k] is not None and v.dtype.kind == "f":
                        moved = np.nan_to_num(
                            np.abs(np.float64(v) - np.float64(other)), posinf=0
                        )
                        spread[k] = np.maximum(spread[k], moved)
        return plain, spread


def scatter(function: Any, x: Any, index: Any, value: Any) -> Any:
    out = np.copy(x)
    function.at(out, index, value)
    return out


def put(x: Any, index: Any, value: Any) -> Any:
    out = np.copy(x)
    out[index] = value
    return out


def difference(found: Any, plain: np.ndarray[Any, Any], spread: Any) -> str | None:
    """Why `found` is not what NumPy gives, or None."""
    got = np.asarray(found)
    if got.shape != plain.shape or got.dtype != plain.dtype:
        return f"{got.dtype}{got.shape}, not {plain.dtype}{plain.shape}"
    if spread is None:
        return None
    if plain.dtype.kind != "f":
        same = got == plain
    else:
        with np.errstate(all="ignore"):
            scale = np.nan_to_num(np.abs(np.float64(plain)), posinf=0)
            eps = np.finfo(plain.dtype).eps
            # The spread of three runs varies; what sums to an element shares its scale.
            shared = np.max(spread, initial=0.0)
            margin = 60 * spread + 3 * shared + 4 * eps * scale * (shared > 0)
            margin += np.finfo(plain.dtype).smallest_subnormal * (shared > 0)
            near = np.abs(np.float64(got) - np.float64(plain)) <= margin
        same = (got == plain) | near | (np.isnan(got) & np.isnan(plain))
    if np.all(same):
        return None
    at = tuple(int(k[0]) for k in np.nonzero(~same)) if plain.ndim else ()
    count = f"{np.sum(~same)} of {plain.size} differ"
    return f"at {at}: {got[at]!r}, not {plain[at]!r} ({count})"


def compared(
    what: str, found: Sequence[Any], plain: Sequence[Any], spread: Sequence[Any]
) -> Failure | None:
    for k, (f, p, s) in enumerate(zip(found, plain, spread, strict=True)):
        if (reason := difference(f, p, s)) is not None:
            return Failure(what, f"output {k} {reason}")
    return None


def check(program: Program, *, use_jax: bool = True) -> Failure | None:
    """How hopflow disagrees with its judges on a program, or None."""
    with jax.enable_x64(True):
        return Check(program, use_jax).run()


class Check:
    """The calls of one program. `doing` says which one an error is of."""

    def __init__(self, program: Program, use_jax: bool) -> None:
        self.program, self.use_jax = program, use_jax
        self.runner = Runner(program)
        self.doing = "NumPy"

    def run(self) -> Failure | None:
        try:
            self.runner.rebind(0)
            return self.calls() or self.transforms()
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-4:])
            return Failure(f"{self.doing} raised {type(error).__name__}", text)

    def calls(self) -> Failure | None:
        runner, mode = self.runner, self.program.mode
        function = runner.function("hf")
        jitted = (
            hf.jit(function, dynamic=True) if mode == "dynamic" else hf.jit(function)
        )
        calls = [("eager", function, 0), ("jit", jitted, 0)]
        calls += [(f"jit, call {turn + 1}", jitted, turn) for turn in (1, 2)]
        for what, f, turn in calls:
            self.doing = "NumPy"
            runner.rebind(turn)
            data = [values(v, mode, turn) for v in self.program.inputs]
            judged = runner.judged(data)
            self.doing = f"hopflow {what}"
            if failure := compared(self.doing, f(*map(hf.asarray, data)), *judged):
                return failure
        return None

    def transforms(self) -> Failure | None:
        runner, mode = self.runner, self.program.mode
        runner.rebind(0)
        data = [values(v, mode) for v in self.program.inputs]
        if mode == "vmap":
            self.doing = "hopflow vmap"
            if failure := batched(runner):
                return failure
        if self.use_jax and mode == "smooth":
            self.doing = "derivatives"
            return derivatives(runner)
        if self.use_jax and mode not in NUMPY_ONLY:
            self.doing = "JAX"
            compare_types(runner, data)
        return None


def compare_types(runner: Runner, data: Sequence[Any]) -> None:
    """Raise an error if JAX's source gives results of other types than NumPy's.

    XLA on CPUs contracts products and sums, and flushes denormals, so that its values
    are a judge in smooth programs alone.
    """
    out = runner.function("jnp")(*map(jnp.asarray, data))
    for found, p in zip(out, runner.expected(data), strict=True):
        if found.shape != p.shape or found.dtype != p.dtype:
            raise AssertionError(
                f"JAX gives {found.dtype}{found.shape}, NumPy {p.dtype}{p.shape}"
            )


def batched(runner: Runner) -> Failure | None:
    program = runner.program
    rows = [
        [values(v, program.mode, turn) for v in program.inputs] for turn in range(3)
    ]
    function = hf.vmap(runner.function("hf"))
    stacked = [hf.asarray(np.stack(column)) for column in zip(*rows, strict=True)]
    for what, f in (("vmap", function), ("jit of vmap", hf.jit(function))):
        out = f(*stacked)
        for k, row in enumerate(rows):
            found = [np.asarray(v)[k] for v in out]
            if failure := compared(f"{what}, example {k}", found, *runner.judged(row)):
                return failure
    return None


# --- derivatives --------------------------------------------------------------------


def losses(runner: Runner) -> tuple[list[int], Callable[..., Any], Callable[..., Any]]:
    """Which inputs are floats, and a scalar function of them in hopflow and in JAX."""
    program = runner.program
    at = [k for k, v in enumerate(program.inputs) if v.type.is_float]
    floats = [
        k for k, n in enumerate(program.block.results) if program.types[n].is_float
    ]
    fixed = [values(v, program.mode) for v in program.inputs]

    def loss(space: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def f(*xs: Any) -> Any:
            arguments = [space.asarray(v) for v in fixed]
            for k, x in zip(at, xs, strict=True):
                arguments[k] = x
            out = function(*arguments)
            total = space.asarray(0.0, dtype=space.float64)
            for k in floats:
                total = total + space.sum(space.tanh(out[k]))
            return total

        return f

    return at, loss(hf, runner.function("hf")), loss(jnp, runner.function("jnp"))


def near(found: Any, wanted: Any) -> bool:
    f, w = np.asarray(found), np.asarray(wanted)
    if f.shape != w.shape or f.dtype != w.dtype:
        return False
    scale = np.max(np.abs(w), initial=1.0)
    return bool(np.all(np.abs(f - w) <= 1e-8 * scale))


def derivatives(runner: Runner) -> Failure | None:
    at, ours, theirs = losses(runner)
    if not at:
        return None
    rows = [
        [values(runner.program.inputs[k], "smooth", turn) for k in at]
        for turn in (0, 1, 2)
    ]
    xs = rows[0]
    ts = [np.cos(np.arange(x.size)).reshape(x.shape) for x in xs]
    loops = any(
        isinstance(s, Control) and s.kind == "while" for s in walk(runner.program.block)
    )
    loops = loops or "fori_loop" in runner.text

    def theirs_along(*v: Any) -> Any:
        return jax.jvp(theirs, tuple(map(jnp.asarray, v)), tuple(map(jnp.asarray, ts)))

    value, slope = jax.jit(theirs_along)(*xs)
    if not (np.isfinite(value) and np.isfinite(slope)) or abs(slope) > 1e6:
        return None
    if not near(ours(*map(hf.asarray, xs)), value):
        return Failure("value", f"{ours(*map(hf.asarray, xs))}, not {value} of JAX")
    argnums = tuple(range(len(at)))
    hx = tuple(map(hf.asarray, xs))
    ht = tuple(map(hf.asarray, ts))
    gradient = hf.grad(ours, argnums)
    found = {
        "jvp": hf.jvp(ours, hx, ht)[1],
        "jit of jvp": hf.jit(lambda *v: hf.jvp(ours, v, ht)[1])(*hx),
    }
    for what, g in (("grad", gradient(*hx)), ("jit of grad", hf.jit(gradient)(*hx))):
        found[what] = sum(np.sum(np.asarray(a) * t) for a, t in zip(g, ts, strict=True))
        if not loops:
            exact = jax.jit(jax.grad(theirs, argnums))(*map(jnp.asarray, xs))
            for k, (a, b) in enumerate(zip(g, exact, strict=True)):
                if np.all(np.isfinite(b)) and not near(a, b):
                    return Failure(what, f"argument {k}: {a}, not {b}")
    for what, got in found.items():
        if not near(got, slope):
            return Failure(what, f"along a direction: {got}, not {slope}")
    return batched_derivatives(gradient, ours, theirs_along, rows, ts)


def batched_derivatives(
    gradient: Any, ours: Any, theirs_along: Any, rows: Any, ts: Any
) -> Failure | None:
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    hx = tuple(map(hf.asarray, stacked))
    slopes = np.asarray(jax.jit(jax.vmap(theirs_along))(*stacked)[1])
    argnums = tuple(range(len(stacked)))
    each = hf.jit(hf.vmap(gradient))(*hx)
    of_sum = hf.jit(hf.grad(lambda *v: hf.sum(hf.vmap(ours)(*v)), argnums))(*hx)
    for what, g in (("jit of vmap of grad", each), ("jit of grad of vmap", of_sum)):
        for k, slope in enumerate(slopes):
            if not np.isfinite(slope) or abs(slope) > 1e6:
                continue
            got = sum(np.sum(np.asarray(a)[k] * t) for a, t in zip(g, ts, strict=True))
            if not near(got, slope):
                return Failure(what, f"example {k}: {got}, not {slope}")
    return None


# --- failures -----------------------------------------------------------------------


def without(block: Block, target: Statement, types_: dict[str, Type]) -> Block:
    """The block with one statement's results replaced by leaves."""
    body: list[Statement] = []
    for statement in block.body:
        if statement is target:
            if isinstance(statement, Control):
                body += [leaf(n, types_[n]) for n in statement.outs]
            elif not statement.write:
                body.append(leaf(statement.out, types_[statement.out]))
        elif isinstance(statement, Control):
            blocks = tuple(without(b, target, types_) for b in statement.blocks)
            body.append(replace(statement, blocks=blocks))
        else:
            body.append(statement)
    return replace(block, body=tuple(body))


def smaller(program: Program) -> Iterator[Program]:
    results = program.block.results
    if len(results) > 1:
        for name in results:
            yield used(replace(program, block=replace(program.block, results=(name,))))
    for statement in reversed(list(walk(program.block))):
        if isinstance(statement, Control) or statement.args:
            yield used(
                replace(program, block=without(program.block, statement, program.types))
            )


def shrink(
    program: Program, failure: Failure, tries: int = 300
) -> tuple[Program, Failure]:
    """The smallest program found, greedily, that fails in the same way."""
    going = True
    while going and tries > 0:
        going = False
        for candidate in smaller(program):
            tries -= 1
            if tries <= 0:
                break
            with contextlib.suppress(Exception):
                again = check(candidate)
                if again is not None and kind(again) == kind(failure):
                    program, failure, going = candidate, again, True
                    break
    return program, failure


def kind(failure: Failure) -> str:
    last = failure.detail.strip().splitlines()[-1]
    return failure.what.partition(",")[0] + (
        last[:30] if "raised" in failure.what else ""
    )


def script(program: Program, failure: Failure) -> str:
    """A script of its own, that prints what hopflow and NumPy give."""
    lines = [f"# Seed {program.seed}, {program.mode}: {failure.what}"]
    lines += [f"# {line}" for line in failure.detail.strip().splitlines()]
    text = [*lines, PRELUDE]
    for name, kind_ in program.types.items():
        if name in ("GLOBAL", "STATE.value"):
            text.append(f'{name} = hf.asarray(1.5, dtype="{kind_.dtype}")')
    text += [source(program, b) for b in ("hf", "np", "jnp")]
    text.append(
        "from numpy import array, float32, float64, inf, nan  # noqa\n\ndata = ["
    )
    for v in program.inputs:
        d = values(v, program.mode)
        if d.size <= 200:
            text.append(
                f'    np.asarray({d.tolist()!r}, dtype="{d.dtype}")'
                f".reshape({d.shape!r}),"
            )
        else:
            text.append(
                f"    values({v!r}, {program.mode!r}),  # of differential.judge"
            )
    text += ["]", "print(program_np(*(d.copy() for d in data)))"]
    text.append("print(program_hf(*map(hf.asarray, data)))")
    text.append("print(hf.jit(program_hf)(*map(hf.asarray, data)))")
    return "\n".join(text)


def run(seed: int, *, use_jax: bool = True) -> str | None:
    """The script of a disagreement, shrunk, or None."""
    program = used(generate(seed))
    failure = check(program, use_jax=use_jax)
    if failure is None:
        return None
    return script(*shrink(program, failure))


def stream(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(10**9)
