"""Compiled code outlives the process: what a second one finds, and what it does not."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler import files, pipeline
from hopflow.compiler.cpu import elf, library
from hopflow.compiler.cpu.jit import jit, link
from hopflow.compiler.cpu.target import host
from hopflow.compiler.llvm.compiler import Compiler
from hopflow.config import config
from hopflow.errors import CompileError
from hopflow.graph.hashing import is_portable
from hopflow.graph.rewriting import effects

PROGRAMS = dedent("""
    import sys
    import numpy as np
    import hopflow as hf

    x = hf.asarray(np.arange(12.0).reshape(4, 3) / 7)
    square = hf.asarray(np.arange(9.0).reshape(3, 3) % 5 + 3 * np.eye(3))
    rows = hf.asarray(np.arange(400.0).reshape(20, 20))

    def told(f, *args):
        try:
            return f(*args)
        except Exception as error:
            return type(error).__name__, str(error)

    def loop(x):
        return hf.while_loop(lambda c: hf.sum(c) < 50, lambda c: hf.sin(c) + c + 1, x)

    def sizes(x):
        n = x.shape[0] ** 2 // 3
        return hf.concat([x[:, 0], hf.zeros((n,))])

    def refused(x, k):
        return x[k] // hf.astype(x, hf.int64)[0, 0]

    def called(x):
        return hf.callback(lambda v: np.asarray(v) * 2, hf.spec("f64[4, 3]"), x)

    TABLE = hf.asarray(np.arange(1000.0))
    programs = [
        lambda: hf.jit(loop)(x),
        lambda: hf.jit(hf.grad(lambda x: hf.sum(hf.tanh(x @ square))))(x),
        lambda: hf.jit(lambda x: hf.linalg.inv(x) @ x)(square),
        lambda: hf.jit(lambda x: hf.sort(x, axis=0))(x),
        lambda: hf.jit(sizes, dynamic=True)(x),
        lambda: hf.jit(sizes, dynamic=True)(hf.asarray(np.ones((7, 2)))),
        lambda: hf.jit(lambda x: x[x > 0.5] * 2.0)(x),
        lambda: hf.jit(lambda x: hf.sum(x[::2, ::3]))(rows.T[::-1]),
        lambda: hf.jit(lambda x: x + 1.0, donate=(0,))(hf.asarray(np.ones(9))),
        lambda: told(hf.jit(refused), x, hf.asarray([9])),
        lambda: hf.jit(called)(x),
        lambda: hf.jit(lambda i: TABLE[i] + 1.0)(hf.asarray([3, 5])),
        lambda: hf.jit(lambda x: hf.random.uniform(hf.random.key(0), (3,)) + x)(x[0]),
        lambda: hf.vmap(lambda r: hf.fori_loop(0, 3, lambda i, c: c * r, r))(x),
        lambda: hf.jit(lambda x: hf.sum(x, axis=0))(hf.astype(x, hf.bfloat16)),
    ]
    for program in programs:
        print(program())
    stats = hf.stats()
    print(stats.compiles, stats.file_hits, "llvmlite.binding" in sys.modules)
""")


def run(program: str, folder: Path | str, **environment: str) -> str:
    """What a process prints that keeps its code in a folder."""
    environment = {**os.environ, "HOPFLOW_CACHE_DIR": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def last(text: str) -> list[str]:
    return text.splitlines()[-1].split()


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first = run(PROGRAMS, tmp_path)
    second = run(PROGRAMS, tmp_path)
    *results, counts = first.splitlines()
    *again, found = second.splitlines()
    assert again == results
    compiles, hits, has_llvm = counts.split()
    assert (int(hits), has_llvm) == (0, "True")
    assert found.split() == ["0", compiles, str(not is_linked_here())]


def is_linked_here() -> bool:
    """Whether code is linked without LLVM on this platform."""
    return sys.platform == "linux" and host().triple.startswith("x86_64")


ONE = dedent("""
    import numpy as np
    import hopflow as hf
    print(hf.jit(lambda x: hf.sin(x) * 3.0)(hf.asarray(np.arange(3.0))))
    print(hf.stats().compiles)
""")


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_a_damaged_file_counts_as_missing_and_is_made_again(
    tmp_path: Path, damage: str
) -> None:
    want = run(ONE, tmp_path)
    for file in tmp_path.iterdir():
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        changed = {
            "flipped": data,
            "cut": data[:-9],
            "empty": data[:0],
            "longer": data + b"\0",
        }
        file.write_bytes(changed[damage])
    assert run(ONE, tmp_path) == want
    assert last(run(ONE, tmp_path)) == ["0"]


def test_processes_that_write_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    environment = {**os.environ, "HOPFLOW_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", ONE]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    texts = {process.communicate()[0].splitlines()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(texts) == 1
    assert last(run(ONE, tmp_path)) == ["0"]


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    assert last(run(ONE, "")) == ["1"]
    assert last(run(ONE, tmp_path / "no" / "folder")) == ["1"]
    assert last(run(ONE, tmp_path / "no" / "folder")) == ["0"]  # it was made


@pytest.mark.skipif(os.name != "posix", reason="no owners and modes of files")
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert last(run(ONE, tmp_path)) == ["1"]
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("no folder")
    assert last(run(ONE, tmp_path / "file")) == ["1"]


@pytest.mark.skipif(os.name != "posix", reason="no owners and modes of files")
def test_files_are_the_owner_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    run(ONE, folder)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


# --- within one process ---------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for code, and a cache in memory that is empty."""
    before = config.cache_dir, config.cache_dir_bytes
    config.cache_dir = str(tmp_path)
    pipeline.clear_cache()
    yield tmp_path
    config.cache_dir, config.cache_dir_bytes = before
    pipeline.clear_cache()


def compiles(f: Any, *args: Any) -> int:
    """How many programs the call of a new function compiles."""
    pipeline.clear_cache()
    before = hf.stats().compiles
    f(*args)
    return hf.stats().compiles - before


X = np.arange(5.0)


def test_settings_that_change_code_have_files_of_their_own(folder: Path) -> None:
    def f() -> Any:
        return hf.jit(lambda x: hf.cos(x) + 2.0)

    assert [compiles(f(), X), compiles(f(), X)] == [1, 0]
    for setting in ("check_bounds", "guard_pages"):
        setattr(config, setting, True)
        try:
            assert [compiles(f(), X), compiles(f(), X)] == [1, 0]
        finally:
            setattr(config, setting, False)
    assert compiles(f(), X) == 0


def test_verification_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", True)
    assert compiles(hf.jit(lambda x: hf.cos(x) + 3.0), X) == 1
    assert compiles(hf.jit(lambda x: hf.cos(x) + 3.0), X) == 1


def test_another_source_has_files_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiles(hf.jit(lambda x: hf.cos(x) + 4.0), X) == 1
    files._toolchain.cache_clear()
    monkeypatch.setattr(files, "_source", lambda: "another")
    assert compiles(hf.jit(lambda x: hf.cos(x) + 4.0), X) == 1
    monkeypatch.undo()
    files._toolchain.cache_clear()
    assert compiles(hf.jit(lambda x: hf.cos(x) + 4.0), X) == 0


def test_the_least_recently_used_files_go(folder: Path) -> None:
    for k in range(8):
        files.store(f"{k}", bytes(1000))
        for file in folder.iterdir():  # as if each was used long before the next
            at = file.stat().st_mtime - 100
            os.utime(file, (at, at))
    assert files.find("0") is not None  # used just now
    config.cache_dir_bytes = 8200
    files.store("8", bytes(1000))
    left = [k for k in range(9) if files.find(f"{k}") is not None]
    assert left == [0, 4, 5, 6, 7, 8]
    config.cache_dir_bytes = 500
    files.store("9", bytes(1000))
    assert files.find("9") is None


def test_what_only_this_process_has_is_not_kept(folder: Path) -> None:
    class Doubled(hf.HigherOrderOp):
        """A user's operator: its code is no part of the package."""

        def debug(self, x: Any) -> Any:
            return x + x

    doubled = Doubled()
    before = len([*folder.iterdir()])
    graph = hf.trace(lambda x: doubled(x), X).graph
    ours = hf.trace(lambda x: hf.check(hf.all(x > -1.0), "negative"), X).graph
    assert is_portable(ours)
    assert not is_portable(graph)
    assert len([*folder.iterdir()]) == before


def test_functions_that_call_others_twice_are_looked_at_once() -> None:
    def level(k: int) -> Any:
        if not k:
            return hf.subgraph(lambda x: hf.sin(x) * 0.5)
        inner = level(k - 1)
        return hf.subgraph(lambda x: inner(x) + inner(x * 0.5))

    graph = hf.trace(level(60), X).graph  # of 2**60 calls
    assert is_portable(graph)
    assert not effects(graph)


# --- the linker -----------------------------------------------------------------------


linked_here = pytest.mark.skipif(not is_linked_here(), reason="LLVM links here")


@linked_here
def test_what_our_code_has_not_is_refused() -> None:
    compiler = jit(host())
    variable = compiler.compile(
        "@n = global i64 5\ndefine i64 @f() {\n  %x = load i64, ptr @n\n  ret i64 %x\n}"
    )
    with pytest.raises(CompileError, match=r"section \.data can be written"):
        elf.link([variable], ["f"], lambda _: 0)
    private = compiler.compile(
        "@n = external thread_local global i64\n"
        "define i64 @f() {\n  %x = load i64, ptr @n\n  ret i64 %x\n}"
    )
    with pytest.raises(CompileError, match="a relocation of type"):
        elf.link([private], ["f"], lambda _: 0)
    assert not elf.is_object(b"")
    assert not elf.is_object(b"\x7fELF\x02\x01\x01" + bytes(100))


@linked_here
def test_a_symbol_that_is_nowhere_is_named() -> None:
    code = jit(host()).compile(
        "declare i64 @nowhere()\n"
        "define i64 @f() {\n  %x = call i64 @nowhere()\n  ret i64 %x\n}"
    )
    with pytest.raises(CompileError, match="there is no `nowhere`"):
        link([code], ["f"], {}, host())


@linked_here
def test_addresses_in_constants_and_tables_of_jumps_are_linked() -> None:
    cases = "\n".join(f"    i64 {k}, label %case{k}" for k in range(9))
    blocks = "\n".join(f"case{k}:\n  ret i64 {k * k + 7}" for k in range(9))
    text = f"""
    @one = internal constant i64 11
    @two = internal constant i64 22
    @table = internal constant [2 x ptr] [ptr @one, ptr @two]
    define i64 @f(i64 %n) {{
    entry:
      switch i64 %n, label %other [
    {cases}
      ]
    {blocks}
    other:
      %k = and i64 %n, 1
      %at = getelementptr [2 x ptr], ptr @table, i64 0, i64 %k
      %p = load ptr, ptr %at
      %x = load volatile i64, ptr %p
      ret i64 %x
    }}
    """
    code = jit(host()).compile(text)
    image = elf.link([code], ["f"], lambda _: 0)
    f = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(image["f"])
    got = [f(k) for k in range(12)]
    assert got == [*(k * k + 7 for k in range(9)), 22, 11, 22]


@pytest.mark.parametrize(
    "linked", [pytest.param(True, marks=linked_here), False], ids=["elf", "LLVM"]
)
def test_object_files_refer_to_each_other(linked: bool) -> None:
    first = """
    declare hidden i64 @g(i64)
    define hidden i64 @twice(i64 %n) {
      %x = mul i64 %n, 2
      ret i64 %x
    }
    define i64 @f(i64 %n) {
      %x = call i64 @g(i64 %n)
      ret i64 %x
    }
    """
    second = """
    @table = internal constant [2 x ptr] [ptr @twice, ptr @same]
    declare hidden i64 @twice(i64)
    define internal i64 @same(i64 %n) {
      ret i64 %n
    }
    define hidden i64 @g(i64 %n) {
      %k = and i64 %n, 1
      %at = getelementptr [2 x ptr], ptr @table, i64 0, i64 %k
      %p = load ptr, ptr %at
      %x = call i64 %p(i64 %n)
      ret i64 %x
    }
    """
    objects = jit(host()).compile_all([first, second])
    if linked:
        image: Any = elf.link(objects, ["f"], lambda _: 0)
    else:
        image = jit(host()).link(objects, ["f"], {})
    f = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(image["f"])
    assert [f(k) for k in range(6)] == [0, 1, 4, 3, 8, 5]


LONG_LOOPS = """
import hopflow as hf

def long_loops(x):  # each is a function, since threads share it
    def step(k, x):
        first = hf.sin(x[1:-1] * 0.5) + x[:-2] * x[2:]
        second = hf.sin(first * 0.25) - hf.sum(hf.exp(-first * first)) * 1e-9
        return k + 1, x.at[1:-1].set(second)

    return hf.while_loop(lambda k, _: k < 3, step, (0, x))[1]
"""


def modules_compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that grows by the modules of each compilation."""
    modules: list[list[str]] = []
    right = Compiler.compile_all

    def compile_all(self: Compiler, texts: Any, **options: Any) -> Any:
        modules.append(list(texts))
        return right(self, texts, **options)

    monkeypatch.setattr(Compiler, "compile_all", compile_all)
    return modules


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_functions_are_compiled_by_several_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    scope: dict[str, Any] = {}
    exec(LONG_LOOPS, scope)
    long_loops = scope["long_loops"]
    x = np.linspace(0.0, 9.0, 300_000)
    expected = np.asarray(long_loops(hf.asarray(x)))
    monkeypatch.setattr(config, "cache_dir", "")
    monkeypatch.setattr(config, "num_threads", threads)
    hf.jit(long_loops)(x)  # the libraries that it needs are compiled, too
    pipeline.clear_cache()
    modules = modules_compiled(monkeypatch)
    got = hf.jit(long_loops)(x)
    [parts] = modules
    assert len(parts) == 1 if threads == 1 else 1 < len(parts) <= threads
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12)


@pytest.fixture
def nothing_linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions that programs share are as in a new process."""
    pipeline.clear_cache()
    monkeypatch.setattr(library, "_linked", {})
    yield
    pipeline.clear_cache()  # of what calls functions that go now


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("nothing_linked")
def test_functions_that_programs_share_are_compiled_with_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int
) -> None:
    monkeypatch.setattr(config, "cache_dir", str(tmp_path))
    monkeypatch.setattr(config, "num_threads", threads)
    modules = modules_compiled(monkeypatch)
    x = np.random.default_rng(0).normal(size=(4, 90)).astype(np.float32)
    for rows in (4, 3, 2):
        got = hf.jit(lambda x: hf.argsort(hf.argsort(x)))(x[:rows])
        np.testing.assert_array_equal(np.asarray(got), x[:rows].argsort().argsort())
    first = library._linked
    monkeypatch.setattr(library, "_linked", {})  # as in another process
    hf.jit(lambda x: -hf.argsort(hf.argsort(x)))(x)
    assert [*library._linked] == [*first]
    sorts = [sum("define i64 @hf_argsort" in m for m in texts) for texts in modules]
    assert sorts == [2, 0, 0, 0]


@pytest.mark.usefixtures("nothing_linked")
def test_threads_may_need_one_shared_function_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linked: list[str] = []
    right, barrier = library._link, threading.Barrier(4)

    def link(name: str, *args: Any) -> Any:
        linked.append(name)
        return right(name, *args)

    monkeypatch.setattr(library, "_link", link)
    x = np.random.default_rng(0).normal(size=90)

    def sort(k: int) -> Any:
        barrier.wait()
        return np.asarray(hf.jit(lambda x: hf.sort(x) * k)(x))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(sort, range(4)))
    for k, got in enumerate(results):
        np.testing.assert_array_equal(got, np.sort(x) * k)
    assert len(linked) == 1


def test_an_error_in_one_part_is_raised() -> None:
    right = "define i64 @f() {\n  ret i64 0\n}"
    wrong = "define i64 @g() {\n  ret i32 0\n}"
    for texts in ([right, wrong], [wrong, right]):
        with pytest.raises(CompileError, match="invalid LLVM IR"):
            jit(host()).compile_all(texts)
    assert len(jit(host()).compile_all([right])) == 1


def test_programs_are_compiled_while_the_interpreter_ends() -> None:
    """Python starts no threads then."""
    code = f"""
import atexit
import numpy as np
{LONG_LOOPS}
hf.config.cache_dir = ""
hf.config.num_threads = 2
x = np.ones(300_000)
atexit.register(lambda: print(float(hf.jit(long_loops)(x)[0])))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("1.0\n", "")
