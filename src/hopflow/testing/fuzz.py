"""`hopflow fuzz`: draw programs for some time, and compare all their executions.

A failing program is saved as its script, which `from_text` reads, with a script that
repeats the failed comparison; so is, in a corpus, the first program that exercises each
rule of an operator.
"""

import itertools
import json
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from hopflow.testing.checks import Disagreement, Report, check, label_of
from hopflow.testing.executions import REGISTRY
from hopflow.testing.products import PRODUCTS
from hopflow.testing.program import OPERATORS, Program, walk
from hopflow.testing.program_text import to_text
from hopflow.testing.strategies import ALIASING, BODIES, BRANCHES, programs

RULES: Final = {
    "debug": ("debug",),
    "infer": ("eager",),
    "functionalize": ("functionalized",),
    "lower": ("jit",),
    "batch": ("jit of vmap",),
    "jvp": ("jit of jvp", "dynamic of jvp"),
    "vjp": ("jit of grad", "dynamic of grad"),
    "jvp of vjp": ("jit of jvp of grad", "dynamic of jvp of grad"),
}
"""Rule of operators -> the comparisons that exercise it."""


DERIVATIVE_RULES: Final = frozenset(["jvp", "vjp", "jvp of vjp"])


def _exercised(labels: Collection[str]) -> set[str]:
    """Return the rules that comparisons exercise."""
    return {rule for rule, uses in RULES.items() if not set(uses).isdisjoint(labels)}


def _cells(program: Program, labels: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the operators of a program with each rule that comparisons exercise.

    Derivatives exercise a rule only of an operator with floating results.
    """
    rules = sorted(_exercised(labels))
    calls = [s for s in walk(program.main) if s.operation in OPERATORS]
    smooth = {s.operation for s in calls if any(map(_is_float, s.types))}
    for operator, rule in itertools.product({s.operation for s in calls}, rules):
        if operator in smooth or rule not in DERIVATIVE_RULES:
            yield operator, rule


def _recheck(error: Disagreement, transforms: Sequence[str]) -> str:
    """Return a script that repeats the failed comparison."""
    name, _, transform = error.execution.partition(" of ")
    if name != "reference":  # the reference of any transform of the round
        transforms = [transform or "value"]
    executions = [name] if name in REGISTRY else []
    text = to_text(error.program)
    return RECHECK.format(text=text, executions=executions, transforms=list(transforms))


RECHECK: Final = """\
from hopflow.testing import check, from_text

text = r'''{text}'''
check(from_text(text), {executions}, {transforms})
"""


def _is_float(type_: str) -> bool:
    return type_.startswith(("f", "bf"))


EVERY: Final = (*BRANCHES, *BODIES, "custom_vjp", "grow", "chosen", "examples")

SLICE: Final = 30
"""The number of programs per seed, for which Hypothesis is restarted; its first ten
programs are small."""


@dataclass(frozen=True)
class Round:
    """Parameters for drawing and comparing programs; a campaign cycles through rounds.

    profile         the `--profile` that it belongs to
    kind, options   the arguments of `programs`
    executions      the executions to compare; None: all
    transforms      the transforms to compare
    """

    profile: str
    kind: str
    options: dict[str, Any]
    executions: Sequence[str] | None
    transforms: Sequence[str] = ("value",)

    def rules(self) -> set[str]:
        """Return the rules that its comparisons exercise."""
        pairs = itertools.product(self.executions or REGISTRY, self.transforms)
        return _exercised([label_of(*pair) for pair in pairs])


CHEAP: Final = tuple(name for name, execution in REGISTRY.items() if execution.cheap)
NOT_JAX: Final = tuple(name for name in REGISTRY if name != "jax")
"""All executions except JAX's, which flushes denormals to 0."""
QUICK: Final = (
    *("debug", "native", "jit", "jit, 2 threads", "jit, rebound reads"),
    *("jit, donated arguments", "dynamic", "jax"),
)
"""The executions without a Python step per element."""
ALIASED: Final = ("eager", "jit", "jit, donated arguments", "dynamic")
WRITTEN: Final = {"operators": EVERY, "mutation": True}
BEYOND: Final = {
    "mutation": True,
    "out_of_range": True,
    "weights": dict.fromkeys(("index", "gather", "sum_by", "write"), 4)
    | {"take_along": 2, "update": 2},
}
SIZED: Final = {"weights": {"sized": 8}, "size": 4}
RESIZED: Final = ["dynamic", "dynamic, other sizes first"]
MULTIPLIED: Final = {
    "operators": (*BRANCHES, *BODIES, "examples"),
    "weights": dict.fromkeys(PRODUCTS, 8) | {"examples": 3},
    "size": 4,
}
CLOSED: Final = {"operators": (*BRANCHES, *BODIES, "custom_vjp"), "size": 4}
"""Programs without unbacked sizes, which JAX and batching support."""

REUSED: Final = CLOSED | {"aliasing": True, "weights": {"recurred": 6, "stepped": 4}}
"""Programs that copy, update and exchange arrays."""

RECURRED: Final = {
    "aliasing": True,
    "operations": ["recurred", "add"],
    "operators": ["fori"],
    "size": 3,
    "weights": dict.fromkeys(ALIASING, 0) | {"recurred": 8},
}
"""Programs of loops that read what they stored in earlier steps."""

STEPPED: Final = RECURRED | {
    "operations": ["stepped", "add"],
    "weights": dict.fromkeys(ALIASING, 0) | {"stepped": 8},
}
"""Programs of scans over short rows."""

FLAT: Final = {"operators": (*BRANCHES, *BODIES), "size": 3, "depth": 1}
"""Small programs, because each is compared under many transforms."""

OFTEN: Final = {"weights": {"prefix": 4, "custom": 2, "switch": 4, "subgraph": 2}}
"""Weights of operators that would be too rare to exercise their rules in each round."""

DERIVATIVES: Final = ("grad", "jvp", "jvp of grad")
NESTED: Final = (
    *("vmap", "grad of vmap", "vmap of grad", "jvp of vmap", "vmap of jvp"),
    *("linearize of vmap", "hessian", "vmap of hessian", "hessian of vmap"),
    *("vmap of vmap", "grad of grad", "grad of vmap of vmap", "vmap of grad of vmap"),
    *(
        "jvp of grad of vmap",
        "checkpoint of grad of vmap",
        "grad of checkpoint of vmap",
    ),
)
"""Transforms of transforms, with symbolic batch sizes."""
BATCHES: Final = ("vmap", "vmap of grad", "grad of vmap")

ROUNDS: Final = (
    Round("all", "exact", WRITTEN, None),
    Round("all", "smooth", WRITTEN | OFTEN, None),
    Round("all", "exact", BEYOND, None),
    Round("cheap", "exact", WRITTEN, CHEAP),
    Round("cheap", "smooth", WRITTEN | OFTEN, CHEAP),
    Round("cheap", "exact", BEYOND, CHEAP),
    Round("aliasing", "exact", WRITTEN | {"aliasing": True}, None),
    Round("aliasing", "exact", RECURRED, QUICK),
    Round("aliasing", "large", RECURRED, QUICK),
    Round("aliasing", "exact", STEPPED, QUICK, ["value", "vmap"]),
    Round("aliasing", "smooth", STEPPED, QUICK, ["value", "grad", "vmap of grad"]),
    Round("aliasing", "large", STEPPED, QUICK),
    Round("aliasing", "exact", REUSED, [*ALIASED, "jax"]),
    Round(
        "aliasing",
        "smooth",
        REUSED | {"mutation": True},
        ALIASED,
        ["value", "vmap", "grad"],
    ),
    Round("aliasing", "large", REUSED | {"depth": 1}, QUICK),
    Round("special", "special", {"mutation": True}, NOT_JAX),
    Round("large", "large", {"depth": 1, "size": 4}, QUICK),
    Round("sizes", "exact", SIZED, ["eager", "symbolic", *RESIZED, "jax"]),
    Round("sizes", "smooth", SIZED, RESIZED, ["value", "vmap", "grad", "vmap of grad"]),
    Round("products", "exact", MULTIPLIED, ["eager", "jit", *RESIZED, "jax"]),
    Round("products", "smooth", MULTIPLIED, RESIZED, ["value", "vmap", "grad"]),
    Round("vmap", "exact", CLOSED, ["eager", "jit", "jax"], ["vmap"]),
    Round("vmap", "smooth", CLOSED | OFTEN, ["eager", "jit", "jax"], BATCHES),
    Round("derivatives", "smooth", CLOSED | OFTEN, ["eager", "jit"], DERIVATIVES),
    Round(
        "derivatives elsewhere",
        "smooth",
        CLOSED | OFTEN,
        ["dynamic", "jax"],
        DERIVATIVES,
    ),
    Round("nested", "smooth", FLAT, RESIZED, NESTED),
)

PROFILES: Final = tuple(dict.fromkeys(part.profile for part in ROUNDS))


@dataclass
class Campaign:
    """The results of a campaign.

    folder      the folder for programs and the summary
    rules       the rules that its rounds exercise, of `RULES`
    programs    the number of programs by profile
    counts      the number of comparisons ("jit of grad"), of "tie" and of "refused"
    coverage    (operator, rule) -> the number of programs that agreed
    failures    failure -> its script; the error alone if no program could be drawn
    seeds       the first seed, and the one after the last
    """

    folder: Path
    rules: Sequence[str] = tuple(RULES)
    seeds: tuple[int, int] = (0, 0)
    programs: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[str, Path] = field(default_factory=dict)

    def note(self, profile: str, program: Program, report: Report) -> None:
        """Count a program that was compared."""
        self.programs[profile] += 1
        self.counts["tie"] += report.tie
        self.counts["refused"] += len(report.refused)
        self.counts.update(report.agreed)
        for operator, rule in _cells(program, report.agreed):
            if not self.coverage[operator, rule]:
                self.keep("corpus", f"{operator}-{rule}", program)
            self.coverage[operator, rule] += 1

    def failed(self, error: Exception, transforms: Sequence[str] = ("value",)) -> None:
        """Save an error and its program, once per execution and kind of failure.

        Args:
            transforms: The transforms that were compared.
        """
        execution, message = "drawing", f"{type(error).__name__}: {error}"
        program: Program | None = None
        if isinstance(error, Disagreement):
            execution, message, program = error.execution, error.what, error.program
        key = f"{execution}: {message.splitlines()[0][:60]}"
        if key in self.failures:
            return
        # The name has a hash of the content, so that campaigns can share a folder.
        content = to_text(program) if program else message
        name = f"{execution}-{sha256(content.encode()).hexdigest()[:8]}"
        path = self._path("failures", name, ".txt")
        path.write_text("".join(traceback.format_exception(error)))
        if isinstance(error, Disagreement):
            self.keep("failures", name, error.program)
            path = self._path("failures", f"check_{name}", ".py")
            path.write_text(_recheck(error, transforms))
        self.failures[key] = path

    def keep(self, folder: str, name: str, program: Program) -> Path:
        """Save the text of a program in a folder."""
        path = self._path(folder, name, ".py")
        path.write_text(to_text(program))
        return path

    def _path(self, folder: str, name: str, suffix: str) -> Path:
        path = self.folder / folder / (re.sub(r"[^\w-]+", "_", name) + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def empty_cells(self) -> list[tuple[str, str]]:
        """Return the rules of operators that no program has exercised."""
        cells = itertools.product(sorted(OPERATORS), self.rules)
        return [c for c in cells if not self.coverage[c] and c not in NO_RULE]

    def write_summary(self) -> None:
        """Write `summary.json`, which can be added to those of other seeds."""
        coverage: dict[str, dict[str, int]] = {}
        for (operator, rule), count in sorted(self.coverage.items()):
            coverage.setdefault(operator, {})[rule] = count
        summary = {
            "seeds": self.seeds,
            "programs": dict(self.programs),
            "failures": {failure: str(path) for failure, path in self.failures.items()},
            "counts": dict(self.counts),
            "coverage": coverage,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(summary, indent=1)
        (self.folder / "summary.json").write_text(text + "\n")


NO_RULE: Final = {("custom_vjp", "jvp"), ("custom_vjp", "jvp of vjp")}
NONE: Final = "none: a function with a rule for cotangents has none for tangents"


@dataclass(frozen=True)
class Limit:
    """The end of a campaign: after a number of minutes, or of programs."""

    minutes: float = math.inf
    programs: float = math.inf
    began: float = field(default_factory=time.monotonic)

    def share(self, campaign: Campaign) -> float:
        """Return the share of the limit that is used up, at most 1."""
        passed = (time.monotonic() - self.began) / 60
        done = campaign.programs.total() / self.programs
        return min(max(passed / self.minutes, done), 1.0)


def run(
    limit: Limit,
    start: int,
    folder: Path,
    progress: Callable[[Campaign, float], None] = lambda *_: None,
    rounds: Sequence[Round] = ROUNDS,
) -> Campaign:
    """Draw and compare programs until the limit, and write `summary.json`.

    Args:
        start: The first seed, which determines the programs. Each seed draws `SLICE`
            programs.
        folder: The folder for programs and the summary.
        progress: Called after each program with the share of the limit that is used up.
    """
    campaign = _begun(folder, rounds)
    _go_on(campaign, limit, start, progress, rounds)
    return campaign


def _begun(folder: Path, rounds: Sequence[Round]) -> Campaign:
    exercised = set[str]().union(*(part.rules() for part in rounds))
    return Campaign(folder, [rule for rule in RULES if rule in exercised])


def _go_on(
    campaign: Campaign,
    limit: Limit,
    start: int,
    progress: Callable[[Campaign, float], None],
    rounds: Sequence[Round],
) -> None:
    try:
        for number, part in zip(itertools.count(start), itertools.cycle(rounds)):
            campaign.seeds = (start, number)
            campaign.write_summary()  # even if the process is killed later
            if limit.share(campaign) >= 1:
                break
            try:
                _slice(part, number, campaign, limit, progress)
            except Exception as error:
                error.add_note(f"{part}, seed {number}")
                campaign.programs[part.profile] += 1
                campaign.failed(error, part.transforms)
    finally:  # of Ctrl-C, too
        campaign.write_summary()


def drawn(
    part: Round, number: int, judge: Callable[[Program], None], most: int = SLICE
) -> None:
    """Call a judge with the programs of one seed; a program for which it raises an
    error is shrunk."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    settings(
        max_examples=most,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )(seed(number)(given(programs(part.kind, **part.options))(judge)))()


def _slice(
    part: Round,
    number: int,
    campaign: Campaign,
    limit: Limit,
    progress: Callable[[Campaign, float], None],
) -> None:
    """Compare the programs of one seed.

    Raises:
        Disagreement: for the smallest program that failed.
        Exception: an error in drawing.
    """
    most = int(min(SLICE, limit.programs - campaign.programs.total()))

    def compare(program: Program) -> None:
        share = limit.share(campaign)
        if share >= 1 and not failed:  # but a failed program is shrunk first
            return
        try:
            report = _checked(part, program)
        except Disagreement as error:
            failed.append(error)
            raise
        if not failed:
            campaign.note(part.profile, program, report)
        progress(campaign, share)

    failed: list[Disagreement] = []
    try:
        drawn(part, number, compare, most)
    except KeyboardInterrupt:
        if failed:  # shrunk so far
            campaign.failed(failed[-1], part.transforms)
        raise
    except Exception:
        if failed:  # Hypothesis raises its own error for flaky failures
            raise failed[-1] from failed[-1].__cause__
        raise


def _checked(part: Round, program: Program) -> Report:
    """Run `check`; errors of the reference are disagreements, too."""
    try:
        return check(program, part.executions, part.transforms)
    except Disagreement:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise Disagreement(program, "reference", message) from error


# --- display --------------------------------------------------------------------------


@contextmanager
def progress_bar(console: Any = None) -> Iterator[Callable[[Campaign, float], None]]:
    """Show the progress of a campaign by `rich`; yields the function to call."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("no programs yet", total=1.0)

        def advance(campaign: Campaign, share: float) -> None:
            done, failed = campaign.programs.total(), len(campaign.failures)
            text = f"{done} programs, {failed} failures"
            bars.update(bar, completed=share, description=text)

        yield advance


def show(limit: Limit, start: int, folder: Path, profiles: Sequence[str]) -> int:
    """Run with a progress bar, until Ctrl-C at most, and print the results.

    Returns:
        The exit status: 1 if something failed, 130 after Ctrl-C, or 0.
    """
    from rich.console import Console

    console = Console()
    rounds = [part for part in ROUNDS if part.profile in profiles]
    campaign, stopped = _begun(folder, rounds), False
    with progress_bar(console) as advance:
        try:
            _go_on(campaign, limit, start, advance, rounds)
        except KeyboardInterrupt:
            stopped = True
    console.print(_comparisons(campaign))
    if campaign.rules:
        console.print(_coverage(campaign))
    if empty := campaign.empty_cells():
        cells = ", ".join(f"{operator}: {rule}" for operator, rule in empty)
        console.print(f"No program has exercised {cells} yet: run longer.")
    for failure, path in campaign.failures.items():
        how = "python" if path.suffix == ".py" else "see"
        console.print(f"FAILED {failure}\n    {how} {path}")
    if stopped:
        console.print("Ctrl-C has ended it.")
    return 1 if campaign.failures else 130 if stopped else 0


def _comparisons(campaign: Campaign) -> Any:
    """Return a table of the numbers of programs that agreed, by execution and
    transform."""
    from rich.table import Table

    counts = campaign.counts
    total, ties = campaign.programs.total(), counts["tie"]
    title = (
        f"{total} programs, of which {ties} ({ties / max(total, 1):.1%}) hang on "
        f"rounding; {counts['refused']} refusals"
    )
    table = Table(title=title, padding=0)
    transforms = dict.fromkeys(t for part in ROUNDS for t in part.transforms)
    table.add_column("execution", min_width=max(map(len, " ".join(REGISTRY).split())))
    for column in transforms:
        table.add_column(column, justify="right")
    for name in (*REGISTRY, "differences"):
        labels = [label_of(name, transform) for transform in transforms]
        table.add_row(name, *(str(counts[label] or "") for label in labels))
    return table


def _coverage(campaign: Campaign) -> Any:
    """Return a table of the numbers of programs that exercised each rule of each
    operator."""
    from rich.table import Table

    some_none = any(rule in campaign.rules for _, rule in NO_RULE)
    table = Table(title="operators and rules", caption=NONE if some_none else None)
    for column in ("operator", *campaign.rules):
        table.add_column(column, justify="left" if column == "operator" else "right")
    for operator in sorted(OPERATORS):
        cells = (
            "none" if (operator, rule) in NO_RULE else campaign.coverage[operator, rule]
            for rule in campaign.rules
        )
        table.add_row(operator, *map(str, cells))
    return table
