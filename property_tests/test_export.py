"""Programs of a file are the same program, bit by bit; and no file does any harm.

The ordinary suite draws a few. `make soak` draws 800 programs and 4,000 files, and with
SOAK=10 it draws 2,000 and 10,000.
"""

import io
import json
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from property_tests.soak import SOAK

import hopflow as hf
from hopflow import pytree
from hopflow.errors import HopflowError, ProgramFormatError
from hopflow.export.container import read_members, write_members
from hopflow.export.fields import written
from hopflow.export.files import PROGRAM, WEIGHTS
from hopflow.testing.fuzz import EVERY
from hopflow.testing.program import Program
from hopflow.testing.strategies import programs

pytestmark = pytest.mark.slow

QUICK: Final = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SHARED: Final = {"subgraph": 8, "while": 6, "window": 8, "top_k": 8}
"""Of calls that share bodies, and of what asks for sizes, many."""

DRAWN: Final = (
    programs("smooth", operators=EVERY, mutation=True)
    | programs("exact", operators=EVERY, mutation=True)
    | programs("exact", operators=EVERY, mutation=True, weights=SHARED)
)


# --- through a file -------------------------------------------------------------------


def bits(tree: Any) -> list[tuple[Any, ...]]:
    arrays = [np.asarray(leaf) for leaf in pytree.flatten(tree)[0]]
    return [(a.dtype, a.shape, a.tobytes()) for a in arrays]


def outcome(program: Any, drawn: Program) -> Any:
    """What a call gives and writes; or the error that it ends with."""
    given = [hf.asarray(x) for x in drawn.values()]
    try:
        return bits(program(*given)), bits(given)
    except (HopflowError, ArithmeticError, IndexError) as error:
        return type(error), str(error)


def check_through_a_file(drawn: Program, path: Path) -> None:
    given = tuple(map(hf.asarray, drawn.values()))
    for dynamic in (None, True):
        try:
            program = hf.export(
                drawn.function(hf), given, dynamic_shapes=dynamic, derivatives=1
            )
        except (HopflowError, ArithmeticError, IndexError):
            continue  # of whatever plain Python refuses, too
        program.save(path)
        found = hf.load(path)
        assert found.diff(program) == ()
        assert outcome(found, drawn) == outcome(program, drawn)
        first = path.read_bytes()
        found.save(path)
        assert path.read_bytes() == first


def test_drawn_programs_are_the_same_in_a_file(tmp_path: Path) -> None:
    @QUICK
    @given(DRAWN)
    def through(drawn: Program) -> None:
        check_through_a_file(drawn, tmp_path / "program.hopflow")

    through()


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4 * SOAK))
def test_many_drawn_programs_are_the_same_in_a_file(part: int, tmp_path: Path) -> None:
    @seed(part)
    @settings(QUICK, derandomize=False, max_examples=50)
    @given(DRAWN)
    def through(drawn: Program) -> None:
        check_through_a_file(drawn, tmp_path / "program.hopflow")

    through()


# --- files of strangers ---------------------------------------------------------------


@hf.custom_vjp
def ruled(x: Any) -> Any:
    return hf.sin(x)


ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (ct * hf.cos(x),))


def everything(p: Any, x: Any, n: int, mode: str) -> Any:
    """A function whose program has a bit of all that files have."""
    weight, flags = hf.asarray(np.eye(3)), hf.asarray(np.array([True, False]))
    y, _ = hf.while_loop(
        lambda c, i: i < n, lambda c, i: (hf.tanh(c @ weight) + p["b"], i + 1), (x, 0)
    )
    y = hf.cond(hf.any(flags), lambda: ruled(y), lambda: y * 2)
    found = y[y > 0.0]
    hf.check(found.shape[0] < 100, "few")
    last, rows = hf.scan(lambda c, r: (c + r, c * r), y[0], y)
    flat = hf.reshape(x, (3 * x.shape[0],))
    noise = hf.random.uniform(hf.random.key(0), (4,))
    sums = hf.map(hf.sum, x)
    return {"y": y, "found": found, "n": n + 1}, (last, rows, None), flat, sums, noise


class Original:
    """A file, and its parts: what mutants are made of."""

    def __init__(self, path: Path) -> None:
        given = {"b": hf.ones((3,))}, hf.asarray(np.arange(6.0).reshape(2, 3)), 3, "a"
        sizes = {"x": {0: hf.Dim("rows", min=2, max=4096)}}
        program = hf.export(everything, given, dynamic_shapes=sizes, derivatives=1)
        program.save(path)
        self.bytes = path.read_bytes()
        members = read_members(memoryview(self.bytes), (WEIGHTS, PROGRAM))
        weights, data = (
            self.bytes[m.start : m.start + m.size]
            for m in (members[WEIGHTS], members[PROGRAM])
        )
        self.weights, self.data = weights, json.loads(data)
        self.places = list(_places(self.data, ()))


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, part in items:
        yield (*path, key)
        yield from _places(part, (*path, key))


def packed(data: bytes, weights: bytes) -> bytes:
    file = io.BytesIO()
    members = [(WEIGHTS, weights), (PROGRAM, data)]
    write_members(file, [(name, len(part), [part]) for name, part in members])
    return file.getvalue()


NUMBERS: Final = (0, 1, -1, 2, 7, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5)
PLANTED: Final[Sequence[Any]] = (
    *(None, True, False, *NUMBERS, "", "x", "s0", "rows", "add", "f32", [], {}),
    *({"float": "nan"}, {"float": "0x1p+2000"}, {"graph": 0}, {"graph": 1}),
    *({"size": "rows"}, {"op": "*", "args": ["rows"] * 40}, {"dtype": "f64"}),
    *({"op": "//", "args": ["rows", 0]}, {"type": 3}, ["*"], "*", [[[[]]]]),
    *("x" * 10_000, "\ud800", {"rules": {}}, ["rows"] * 64),
)


def in_data(original: Original, random: Random) -> bytes:
    """Other values, in a file that is whole otherwise."""
    data = json.loads(json.dumps(original.data))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        *path, last = random.choice(original.places)
        owner = data
        try:
            for key in path:
                owner = owner[key]
            before = owner[last]
        except (KeyError, IndexError, TypeError):
            continue  # taken out before
        if not isinstance(owner, dict | list):
            continue
        match random.randrange(6):
            case 0 | 1:
                owner[last] = random.choice(PLANTED)
            case 2:
                owner[last] = json.loads(json.dumps(_other(original, random)))
            case 3 if type(before) is int:
                owner[last] = before + random.choice([-1, 1, 10, -100])
            case 4:
                del owner[last]
            case _ if isinstance(owner, list):
                owner.insert(last, random.choice(PLANTED))
            case _:
                key = random.choice(["x", "op", "axis", "num_carry", "length", "float"])
                owner[key] = random.choice(PLANTED)
    return packed(written(data), original.weights)


def _other(original: Original, random: Random) -> Any:
    value = original.data
    for key in random.choice(original.places):
        value = value[key]
    return value


def in_bytes(part: bytes, random: Random, allowed: bytes = bytes(range(256))) -> bytes:
    found = bytearray(part)
    for _ in range(random.choice([1, 2, 8])):
        found[random.randrange(len(found))] = random.choice(allowed)
    return bytes(found)


def in_text(original: Original, random: Random) -> bytes:
    text = in_bytes(written(original.data), random, b'0123456789"[]{},:eE-.truefals')
    return packed(text, original.weights)


def in_weights(original: Original, random: Random) -> bytes:
    """Another header of the tensors, with the checksum that it has."""
    weights = in_bytes(original.weights[:400], random) + original.weights[400:]
    own = {**original.data["weights"], "sha256": sha256(weights).hexdigest()}
    return packed(written({**original.data, "weights": own}), weights)


def in_file(original: Original, random: Random) -> bytes:
    return in_bytes(original.bytes, random)


def cut(original: Original, random: Random) -> bytes:
    whole = original.bytes
    start = random.randrange(len(whole))
    inserted = random.randbytes(random.randrange(20))
    return whole[:start] + inserted + whole[start + random.randrange(100) :]


MUTATIONS: Final[Sequence[Callable[[Original, Random], bytes]]] = (
    *(in_data,) * 6,
    *(in_text, in_weights, in_file, cut),
)


def check_mutants(count: int, start: int, folder: Path) -> None:
    """A file is read or refused, in time; what is read can be looked at and saved."""
    original = Original(folder / "original.hopflow")
    path = folder / "mutant.hopflow"
    random = Random(start)
    read = 0
    for _ in range(count):
        path.write_bytes(random.choice(MUTATIONS)(original, random))
        before = time.process_time()
        try:
            program = hf.load(path)
        except ProgramFormatError:
            pass
        else:
            assert f"{program}{program.signature}{program.constraints}"
            program.save(path)
            read += 1
        assert time.process_time() - before < 2
    assert read  # some mutations change nothing that matters


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    check_mutants(100, 0, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SOAK))
def test_many_mutated_files_are_read_or_refused(part: int, tmp_path: Path) -> None:
    check_mutants(1_000, 1 + part, tmp_path)
