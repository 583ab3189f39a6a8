"""One program through all levels of the compiler, as `docs/compiler_levels.md` has it.

`python tests/test_compiler_levels.py` writes that page anew.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule import schedule as schedules
from hopflow.graph.printer import format_graph

PAGE: Final = Path(__file__).parent.parent / "docs" / "compiler_levels.md"

EXAMPLE: Final = '''\
def wave(u, k):
    """A string after 100 steps, drawn back by the sum of what it is at points `k`."""

    def step(t, new, old):
        bend = hf.roll(new, 1) + hf.roll(new, -1) - 2.0 * new
        return 2.0 * new - old + 0.1 * bend - 0.5 * hf.sum(new[k]), new

    return hf.fori_loop(0, 100, step, (u, u))[0]
'''

PAGE_TEXT: Final = """\
# One program through all levels

[The compiler](compiler.md) says what each level is for. This page has the texts of one
program on each of them, after each pass that changes something, for vectors of 256
bits. A test makes it: `python tests/test_compiler_levels.py` writes it anew.

```python
{example}

wave(hf.ones(1000), hf.arange(10))
```

{levels}"""


class Level(NamedTuple):
    """A program on one level; `name` is the pass that has made it so."""

    name: str
    text: str


def target() -> CpuTarget:
    """A CPU with vectors of 256 bits, whichever this one is."""
    features = ",".join(f"+{name}" for name in ("avx2", "fma", "f16c"))
    return CpuTarget(host().triple, host().layout, "haswell", features)


def levels() -> list[Level]:
    """The texts of the example, in order; passes that change nothing are left out."""
    scope: dict[str, Any] = {"hf": hf}
    exec(compile(EXAMPLE, str(PAGE), "exec"), scope)
    u, k = hf.spec("f64[1000]"), hf.spec("i64[10]")
    graph = hf.trace(scope["wave"], u, k, mode="fake").graph
    kernels = kernels_of(graph)
    made = [Level("graph", re.sub(r" +#.*", "", format_graph(graph)))]
    made.append(Level("kernel program", format_kernels(kernels)))

    @contextmanager
    def passing(
        name: str, _: str, text: Callable[[], str] = lambda: ""
    ) -> Iterator[None]:
        before = text()
        yield
        if text() != before:
            made.append(Level(name, text()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "passing", passing)
        schedules.schedule(kernels, target())
    return made


def page() -> str:
    parts = []
    for level in levels():
        text = "\n".join(f"    {line}".rstrip() for line in level.text.splitlines())
        parts.append(f"## {level.name}\n\n{text}\n")
    return PAGE_TEXT.format(example=EXAMPLE, levels="\n".join(parts))


def test_the_page_of_levels_has_the_texts_that_passes_make() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
