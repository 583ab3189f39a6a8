"""Exported programs as WebAssembly: equal answers in Node and in a browser, and what
its JavaScript refuses."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from tests import test_export_native
from tests.targets import wasm

import hopflow as hf
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ExportError
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.requires import requires
from hopflow.testing.units import difference
from hopflow.testing.wasm_code import WasmOutcome, WasmPrograms

pytestmark = [requires("node", "wasm-ld")]

_NATIVE: Final = vars(test_export_native)
Call, exported, leaves = (_NATIVE[n] for n in ("Call", "exported", "leaves"))
CALLS: Final = _NATIVE["CALLS"]
COMPILED: Final = _NATIVE["NATIVE"]

Array = np.ndarray[Any, Any]


class Ran(NamedTuple):
    """Programs, and what all calls of them in one process have given.

    importing   those whose code calls JavaScript
    """

    programs: dict[str, Any]
    outcomes: dict[Any, WasmOutcome]
    importing: frozenset[str] = frozenset()


def same(x: Array, y: Array) -> bool:
    """Whether arrays have the same bits; which ones a NaN has does not matter."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    is_float = np.issubdtype(x.dtype, np.inexact) or x.dtype.kind == "V"
    both = (x != x) & (y != y) if is_float else np.zeros(x.shape, np.bool_)
    return bool(np.all((x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")) | both))


@pytest.fixture(scope="module")
def of_operations(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    calls = {name: _NATIVE["operation"](OPERATIONS[name]) for name in COMPILED}
    programs = {f"op_{name}": call.program for name, call in calls.items()}
    linked = WasmPrograms(programs, tmp_path_factory.mktemp("operations"))
    outcomes = linked.run([(f"op_{name}", call.args) for name, call in calls.items()])
    importing = [n for n in calls if b"fmod" in linked.compiled[f"op_{n}"].code]
    found = dict(zip(calls, outcomes, strict=True))
    return Ran(calls, found, frozenset(importing))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_an_operation_gives_equal_answers(name: str, of_operations: Ran) -> None:
    program, args = of_operations.programs[name]
    found = of_operations.outcomes[name]
    assert not found.text
    assert (name in of_operations.importing) == ("JavaScript" in wasm.operation(name))
    expected = leaves(hf.jit(program)(*args))
    assert len(expected) == len(found.results)
    for x, y in zip(found.results, expected, strict=True):
        if OPERATIONS[name].batch is batching.pointwise:
            assert same(x, y), (x, y)
        else:  # sums have another order of the terms
            assert difference(x, y, of_largest=True) <= 4


# --- operators, arguments, results, state ---------------------------------------------


def fused(x: Any, y: Any, z: Any) -> Any:
    return OPERATIONS["fma"](x, y, z)


def narrow_rows(x: Any) -> Any:
    """Lanes write rows of float16, which are integers there, beside rows of int16."""

    def one(x: Any) -> Any:
        step = lambda k, y: (k + 1, y * 2)  # noqa: E731
        k, y = hf.while_loop(lambda _, y: y < 30, step, (hf.astype(0, hf.int16), x))
        return hf.stack([k, k + 1]), hf.stack([y, -y])

    return hf.vmap(one)(x)


def factors(dtype: Any) -> tuple[Array, ...]:
    """Numbers of all sizes, and sums in which nearly everything cancels."""
    rng = np.random.default_rng(7)
    info, n = np.finfo(dtype), 4000
    least, most = info.minexp - info.nmant, info.maxexp - 1

    def drawn(low: int, high: int) -> Array:
        digits = rng.uniform(-2, 2, n)
        return np.ldexp(digits, rng.integers(low, high, n)).astype(dtype)

    x, y, z = (drawn(least, most) for _ in range(3))
    x2, y2 = drawn(-60, 60), drawn(-60, 60)
    tail = np.ldexp(drawn(-3, 3), rng.integers(-120, 3, n)).astype(dtype)
    near = -(x2 * y2) * (1 + tail)
    small, other = drawn(least, least // 2), drawn(least // 2, 2)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, info.max, info.tiny])
    special = np.concatenate([special, [info.smallest_subnormal]]).astype(dtype)
    grid = [a.ravel() for a in np.meshgrid(special, special, special)]
    parts = (x, y, z), (x2, y2, near), (small, other, small * other), grid
    with np.errstate(all="ignore"):
        return tuple([np.concatenate(column) for column in zip(*parts, strict=True)])


def programs() -> dict[str, Any]:
    """The operators, and the programs of the tests of native code."""
    found = dict(_NATIVE["programs"]())
    for dtype in (np.float32, np.float64):
        args = tuple(map(hf.asarray, factors(dtype)))
        found[f"fma_{np.dtype(dtype).name}"] = exported(fused, *args)
    found["narrow_rows"] = exported(narrow_rows, hf.arange(1, 12, dtype=hf.float16))
    return found


CASES: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "no rows": ("steps", (_NATIVE["A"], hf.zeros((0, 2), dtype=hf.float64), 0)),
    "one row": ("steps", (_NATIVE["A"], hf.ones((1, 2), dtype=hf.float64), 1)),
    "none positive": ("positive", (hf.zeros((0, 2), dtype=hf.float64),)),
    "many positive": ("positive", (hf.ones((4000, 2), dtype=hf.float64),)),
    "halves of none": (
        "halves",
        (hf.arange(7.0, dtype=hf.float64), hf.ones((0, 2), dtype=hf.float64)),
    ),
    "other sizes": ("asked", (hf.arange(5.0), 2.0, hf.asarray(0))),
}
"""More calls of the programs: empty arrays, loops of no steps, other sizes."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    calls = programs()
    linked = WasmPrograms(
        {name: call.program for name, call in calls.items()},
        tmp_path_factory.mktemp("programs"),
    )
    asked = {name: (name, call.args) for name, call in calls.items()} | CASES
    asked |= {f"stop {k}": ("stops", args) for k, (args, _) in STOPS.items()}
    outcomes = linked.run(list(asked.values()))
    return Ran(calls, dict(zip(asked, outcomes, strict=True)))


STOPS: Final = _NATIVE["STOPS"]
NAMES: Final = [
    *(f"call{k}{suffix}" for k in range(len(CALLS)) for suffix in ("", "_sym")),
    *(f.__name__ for f in _NATIVE["_MORE"]),
    narrow_rows.__name__,
    *CASES,
]


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_gives_equal_answers(name: str, ran: Ran) -> None:
    program, args = CASES.get(name, (name, None))
    call = ran.programs[program]
    found = ran.outcomes[name]
    assert not found.text
    # Of numbers among its arguments, `asked` makes sizes while it is traced.
    run = call.program if program == "asked" else hf.jit(call.program)
    expected = leaves(run(*(args or call.args)))
    assert len(found.results) >= len(expected)  # those are followed by what is written
    for x, y in zip(found.results, expected, strict=False):
        assert difference(x, y, of_largest=True) <= 64


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_multiply_add_has_the_bits_of_the_instruction(
    dtype: str, ran: Ran
) -> None:
    program, args = ran.programs[f"fma_{dtype}"]
    [found] = ran.outcomes[f"fma_{dtype}"].results
    expected = np.asarray(hf.jit(program)(*args))
    wrong = np.flatnonzero(~((found == expected) | (found != found)))
    assert wrong.size == 0, [(np.asarray(a)[wrong[0]].hex()) for a in args]
    assert same(found, expected)
    x, y, z = map(np.asarray, args)
    with np.errstate(all="ignore"):
        assert np.sum(found != x * y + z) > 2000  # rounding twice gives another number


@pytest.mark.parametrize("name", STOPS)
def test_the_error_is_that_of_python(name: str, ran: Ran) -> None:
    args, _ = STOPS[name]
    with pytest.raises(hf.errors.HopflowError) as found:
        hf.jit(ran.programs["stops"].program)(*args)
    text = f"{type(found.value).__name__}: {found.value}"
    assert ran.outcomes[f"stop {name}"].text == text


def test_what_a_call_writes_is_written_in_the_array(ran: Ran) -> None:
    found = ran.outcomes["counting"].results
    assert [x.tolist() for x in found] == [[3.0, 5.0], [2.0, 4.0], [1, 1]]


# --- the JavaScript around a module ---------------------------------------------------


def grow(x: Any, rows: Any, scale: float, n: int, flag: Any) -> Any:
    hf.check(scale > 0, "the scale must be positive")
    y = hf.fori_loop(0, n, lambda i, y: y * scale, hf.sum(rows, axis=0) + x)
    return hf.where(flag, y, x), rows.shape[0], n + 1


HOSTILE: Final = """\
import { readFileSync } from "node:fs";
import { load, ProgramError, signature } from "./grow.mjs";

let memory;
const { instantiate } = WebAssembly;
WebAssembly.instantiate = async (...args) => {
  const instance = await instantiate(...args);
  memory = instance.exports.memory;
  return instance;
};
const program = await load();
const shaped = (n, shape) => Object.assign(new Float64Array(n), { shape });
const good = {
  x: new Float32Array([1, 2]),
  rows: shaped([1, 2, 3, 4], [2, 2]),
  scale: 2,
  n: 3n,
  flag: true,
};
const changed = {
  good: {},
  "flat rows": { rows: new Float64Array(6) },
  "a number": { n: 3 },
  "a view": { x: new Float32Array([9, 1, 2]).subarray(1) },
  missing: { x: undefined },
  unknown: { z: 1 },
  "other dtype": { x: new Float64Array(2) },
  "a list": { x: [1, 2] },
  "too long": { x: new Float32Array(3) },
  "a part of a row": { rows: new Float64Array(5) },
  "another shape": { rows: shaped(6, [2, 3]) },
  "a shape of too few": { rows: shaped(3, [2, 2]) },
  "a negative size": { rows: shaped(0, [-1, 2]) },
  "no integer": { n: 1.5 },
  "a large integer": { n: 2n ** 63n },
  "a text": { scale: "2" },
  "no bool": { flag: new Uint8Array([2]) },
  "a wrong size": { r: 5 },
  "a failed check": { scale: -1 },
};
const found = {};
for (const [name, given] of Object.entries(changed)) {
  try {
    const { result_0, result_1, result_2 } = program.run({ ...good, ...given });
    const numbers = `${typeof result_1} ${result_1} ${result_2}`;
    found[name] = `${result_0} ${result_0.shape} ${numbers}`;
  } catch (error) {
    found[name] = `${error.constructor.name}: ${error.message}`;
    if (error instanceof ProgramError) found.kind = `${error.kind} ${error.status > 0}`;
  }
}
try {
  program.run(null);
} catch (error) {
  found["no arguments"] = `${error.constructor.name}: ${error.message}`;
}
const before = memory.buffer.byteLength;
for (let k = 0; k < 10000; k++) {
  program.run({ ...good, rows: new Float64Array(2 * (k % 50)) });
}
found.grown = memory.buffer.byteLength - before;
const large = new Float64Array(200000);
program.run({ ...good, rows: large });
found["grown for more"] = memory.buffer.byteLength > before;
const bytes = readFileSync(new URL("./grow.wasm", import.meta.url));
const url = new URL("./grow.wasm", import.meta.url);
const others = [bytes, await WebAssembly.compile(bytes), url];
found.loaded = [];
for (const other of others) {
  found.loaded.push(String((await load(other)).run(good).result_0));
}
found.dtypes = signature.parameters.map((p) => p.dtype);
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("grow")
    x, rows = hf.ones((2,), dtype=hf.float32), hf.ones((3, 2), dtype=hf.float64)
    args = (x, rows, 2.0, 3, hf.asarray(True))
    axes = [None, {0: hf.Dim("r")}, None, None, None]
    program = hf.export(grow, args, dynamic_shapes=axes)
    code = program.to_wasm(folder)
    assert code.types.read_text().count("x: MaybeShaped<Float32Array>;") == 1
    (folder / "hostile.mjs").write_text(HOSTILE)
    ran = subprocess.run(
        ["node", str(folder / "hostile.mjs")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


ANSWERS: Final = {
    "good": r"40,64 2 bigint 2 4",
    "flat rows": r"8,16 2 bigint 3 4",
    "a number": r"40,64 2 bigint 2 4",
    "a view": r"40,64 2 bigint 2 4",
    "missing": r"TypeError: .*: the argument `x` is missing \(x: f32\[2\]\)",
    "unknown": r"TypeError: .*: no argument `z`; there are x, rows, flag, scale, n, r",
    "other dtype": r"TypeError: grow: `x` must be a Float32Array .* a Float64Array",
    "a list": r"TypeError: grow: `x` must be a Float32Array .* and is a Array",
    "too long": r"RangeError: .* `x` must be x: f32\[2\], .* has 3 elements instead.*",
    "a part of a row": r"RangeError: .* has 5 elements of the shape \[2.5, 2\].*",
    "another shape": r"RangeError: .* must be rows: f64\[r, 2\], .* 3 elem.* 2",
    "a shape of too few": r"RangeError: .* has 3 elements of the shape \[2, 2\].*",
    "a negative size": r"RangeError: .* has 0 elements of the shape \[-1, 2\].*",
    "no integer": r"TypeError: .* `n` must be an integer, and is the number 1.5",
    "a large integer": r"TypeError: .* `n` must be an integer, and is the bigint \d+",
    "a text": r"TypeError: grow: `scale` must be a number, and is the string 2",
    "no bool": r"TypeError: grow: `flag` is of 0 and 1, and has 2",
    "a wrong size": r"RangeError: .* must be rows: f64\[r, 2\], .* 2 elem.* of 5",
    "a failed check": r"ProgramError: CheckError: .* must be positive \(.*:\d+\)",
    "no arguments": r"TypeError: grow: arguments are an object: \{x, rows, .*\}",
    "kind": r"CheckError true",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_arguments_are_checked(name: str, hostile: dict[str, Any]) -> None:
    assert re.fullmatch(ANSWERS[name], hostile[name]), hostile[name]


def test_calls_leave_no_memory_behind(hostile: dict[str, Any]) -> None:
    assert hostile["grown"] == 0
    assert hostile["grown for more"]


def test_a_module_is_loaded_from_bytes_urls_and_modules(
    hostile: dict[str, Any],
) -> None:
    assert hostile["loaded"] == ["40,64"] * 3


USE: Final = """\
import { load, ProgramError, signature } from "./typed.mjs";

const program = await load(new Uint8Array(8));
const { result_0_a, result_0_n, result_0_b } = program.run({
  x: new Float32Array(2), h: new Uint16Array(2), k: 3, flag: true,
});
const total: number = result_0_a.shape[0] + result_0_a[0] + signature.name.length;
const whole: bigint = result_0_n + program.state.counts[0];
const bit: number = result_0_b[0];
program.run({ x: result_0_a, h: new Uint16Array(2), k: 3n, flag: new Uint8Array(1) });
try {
  // @ts-expect-error: it is no array of float32
  program.run({ x: new Float64Array(2), h: new Uint16Array(2), k: 3, flag: true });
  // @ts-expect-error: an argument is missing
  program.run({ x: result_0_a, k: 3, flag: true });
} catch (error) {
  const numbers = [total, whole, bit];
  if (error instanceof ProgramError) console.log(error.kind, error.status, numbers);
}
"""


@requires("tsc")
def test_the_declarations_are_what_typescript_accepts(tmp_path: Path) -> None:
    counts = hf.zeros((2,), dtype=hf.int64)

    def typed(x: Any, h: Any, k: int, flag: Any) -> Any:
        nonlocal counts
        counts += 1
        return {"a": x + counts[0], "n": k + 1, "b": flag}, h * 2

    x = hf.ones((2,))
    args = (x, hf.astype(x, hf.float16), 3, hf.asarray(True))
    hf.export(typed, args, dynamic_shapes={"x": {0: True}}).to_wasm(tmp_path)
    use = tmp_path / "use.mts"
    use.write_text(USE)
    words = "tsc --noEmit --strict --target es2022 --module nodenext".split()
    ran = subprocess.run(
        [*words, "--lib", "es2022,dom", str(use)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout


# --- pages ----------------------------------------------------------------------------


class Site(ThreadingHTTPServer):
    """A server of a folder; it lets a page finish loading once that says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.folder, self.finished = folder, Event()
        self.address = f"http://127.0.0.1:{self.server_port}"

    def dump(self, page: Path, done: str, query: str = "", more: str = "") -> str:
        """The page, after its scripts have run.

        Args:
            done: A condition in JavaScript, which holds once they have.
            query: What stands behind its address.
            more: A script that runs beside those of the page.
        """
        own = page.with_name(f"watched_{page.name}")
        watch = _WATCH.format(address=self.address, done=done, more=more)
        own.write_text(page.read_text() + watch)
        is_served = page.parent == self.folder
        url = f"{self.address}/{own.name}" if is_served else own.as_uri()
        self.finished.clear()
        words = [chromium(), "--headless", "--no-sandbox", "--disable-gpu"]
        words += ["--dump-dom", url + query]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stderr
        assert self.finished.is_set(), ran.stdout
        return ran.stdout


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Site)
        if self.path not in ("/wait", "/finished"):
            return super().do_GET()
        if self.path == "/finished":
            self.server.finished.set()
        else:
            self.server.finished.wait(150)
        self.send_response(204)
        self.end_headers()
        return None

    def guess_type(self, path: Any) -> str:  # Python 3.11 does not know this one
        is_module = str(path).endswith(".mjs")
        return "text/javascript" if is_module else super().guess_type(path)

    def log_message(self, *_: Any) -> None:
        pass


_WATCH: Final = """
<img src="{address}/wait">
<script type="module">
{more}
function watch() {{
  if ({done}) fetch("{address}/finished", {{ mode: "no-cors" }});
  else setTimeout(watch, 20);
}}
watch();
</script>
"""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on PATH")


def shown(page: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>([^<]*)<', page)
    assert found, page
    return found[1]


EXAMPLES: Final = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of the pages of examples/, of a network that has learned nothing."""
    folder = tmp_path_factory.mktemp("site")
    network = runpy.run_path(str(EXAMPLES / "adaptive_computation.py"))
    runpy.run_path(str(EXAMPLES / "web" / "export.py"))["write"](
        folder, network["initial"](hf.random.key(0))
    )
    with Site(folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@requires("browser", "sklearn")
def test_the_page_of_a_program_needs_no_server(tmp_path: Path, site: Site) -> None:
    def settle(x: Any, target: float) -> Any:
        hf.check(hf.all(x > 0), "all must </script> grow")
        double = hf.while_loop(lambda x: hf.sum(x) < target, lambda x: (x * 2,), (x,))
        return double[0], hf.astype(x, hf.float16)

    program = hf.export(settle, (hf.ones((2,)), 10.0), dynamic_shapes=[{0: True}, None])
    page = program.to_wasm(tmp_path).page
    assert "http" not in page.read_text()
    done = 'document.getElementById("results").textContent'
    text = site.dump(page, done, "#x=[1,2.5,3]&target=50")
    assert shown(text, "results").startswith("result_0 = [8, 20, 24]\nresult_1 = [1")
    text = site.dump(page, done, "#x=[1,-1]&target=50")
    assert "CheckError: all must &lt;/script&gt; grow" in shown(text, "results")


@requires("browser", "sklearn")
def test_the_page_of_the_mandelbrot_set_draws_it(site: Site) -> None:
    done = 'document.getElementById("status").textContent'
    text = site.dump(site.folder / "mandelbrot.html", done)
    xs = -0.75 + (np.arange(640) - 320) * (1 / 192)
    ys = 0 + (np.arange(480) - 240) * (1 / 192)
    program = runpy.run_path(str(EXAMPLES / "web" / "export.py"))["mandelbrot"]()
    steps = hf.jit(program)(hf.asarray(xs), hf.asarray(ys), 300)
    expected = rf"{np.asarray(steps).sum()} steps in \d+ ms"
    assert re.fullmatch(expected, shown(text, "status"))


STROKES: Final = """
const canvas = document.getElementById("drawing");
function at(kind, x, y) {
  const event = new PointerEvent(kind, { bubbles: true });
  Object.defineProperties(event, { offsetX: { value: x }, offsetY: { value: y } });
  canvas.dispatchEvent(event);
}
function draw() {
  if (document.body.dataset.ready !== "yes") return setTimeout(draw, 20);
  at("pointerdown", 80, 60);
  for (const [x, y] of [[180, 60], [120, 200]]) at("pointermove", x, y);
  at("pointerup", 120, 200);
  document.body.dataset.drawn = "yes";
}
draw();
"""


@requires("browser", "sklearn")
def test_a_digit_that_is_drawn_is_recognized(site: Site) -> None:
    done = 'document.body.dataset.drawn === "yes"'
    text = site.dump(site.folder / "digits.html", done, more=STROKES)
    drawn = re.search(r'data-pixels="([^"]*)"', text)
    assert drawn, text
    image = np.array(drawn[1].split(), np.float32)
    assert 5 < image.sum() < 40
    network = runpy.run_path(str(EXAMPLES / "adaptive_computation.py"))
    layers = network["initial"](hf.random.key(0))
    thought = hf.jit(network["think"])(layers, hf.asarray(image))
    assert shown(text, "answer") == str(int(hf.argmax(thought.answer)))
    assert shown(text, "steps") == f"in {int(thought.steps)} steps"


# --- what is refused ------------------------------------------------------------------


def test_arguments_of_another_kind_are_refused(tmp_path: Path) -> None:
    program = hf.export(hf.sin, (hf.ones((2,)),))
    with pytest.raises(ArgumentTypeError, match="to_wasm: `folder` must be a path"):
        program.to_wasm(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="to_wasm: `name` must be"):
        program.to_wasm(tmp_path, name="two words")
    assert program.to_wasm(tmp_path).name == "sin_"


@pytest.mark.parametrize("name", wasm.REFUSED)
def test_a_factorisation_is_refused_with_the_operation_and_the_line(
    name: str, tmp_path: Path
) -> None:
    program = _NATIVE["operation"](OPERATIONS[name]).program
    refusal = rf"`{name}` \(.*:\d+\) calls LAPACK's `{wasm.REFUSED[name]}"
    with pytest.raises(ExportError, match=refusal):
        program.to_wasm(tmp_path)
    assert wasm.REFUSED[name] in wasm.operation(name)


def test_without_a_linker_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"pip install 'hopflow\[wasm\]'"):
        hf.export(hf.sin, (hf.ones((2,)),)).to_wasm(tmp_path)


def test_a_failing_linker_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wasm-ld").write_text("#!/bin/sh\necho no disk >&2\nexit 1\n")
    (tmp_path / "wasm-ld").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ExportError, match="wasm-ld has failed: no disk"):
        hf.export(hf.sin, (hf.ones((2,)),)).to_wasm(tmp_path)
