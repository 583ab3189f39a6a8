"""`hopflow fuzz`: draw programs for some minutes, and compare all their executions.

What failed is kept as a script that shows it and as a text for `from_text`; so is, as a
corpus, each program that was the first to exercise a rule of an operator.
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
from hopflow.testing.strategies import BODIES, BRANCHES, programs

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
"""Rules of operators, each with the comparisons that exercise it."""


DERIVATIVE_RULES: Final = frozenset(["jvp", "vjp", "jvp of vjp"])


def _exercised(labels: Collection[str]) -> set[str]:
    """The rules that comparisons exercise."""
    return {rule for rule, those in RULES.items() if not set(those).isdisjoint(labels)}


def _cells(program: Program, labels: Collection[str]) -> Iterator[tuple[str, str]]:
    """The operators of a program, each with the rules that comparisons exercise.

    Derivatives exercise a rule of an operator only where it gives floats.
    """
    rules = sorted(_exercised(labels))
    calls = [s for s in walk(program.main) if s.operation in OPERATORS]
    smooth = {s.operation for s in calls if any(map(_is_float, s.types))}
    for operator, rule in itertools.product({s.operation for s in calls}, rules):
        if operator in smooth or rule not in DERIVATIVE_RULES:
            yield operator, rule


def _again(error: Disagreement, transforms: Sequence[str]) -> str:
    """The end of a script, which compares again what has failed."""
    name, _, transform = error.execution.partition(" of ")
    if name != "reference":  # which is that of one of a round's transforms
        transforms = [transform or "value"]
    executions = [name] if name in REGISTRY else []
    text = to_text(error.program)
    return AGAIN.format(text=text, executions=executions, transforms=list(transforms))


AGAIN: Final = """
# What failed, of the same program as a text:
from hopflow.testing import check, from_text

text = r'''{text}'''
check(from_text(text), {executions}, {transforms})
"""


def _is_float(type_: str) -> bool:
    return type_.startswith(("f", "bf"))


EVERY: Final = (*BRANCHES, *BODIES, "custom_vjp", "grow", "chosen")

SLICE: Final = 30
"""Programs for which Hypothesis is started anew, with another seed; its first ten are
small. When all rounds are over a turn begins."""


@dataclass(frozen=True)
class Round:
    """What is drawn, and how it is compared; the rounds take turns.

    profile         what a campaign asks for
    kind, options   of `programs`
    """

    profile: str
    kind: str
    options: dict[str, Any]
    executions: Sequence[str] | None
    transforms: Sequence[str] = ("value",)

    def rules(self) -> set[str]:
        """Those that its comparisons exercise."""
        pairs = itertools.product(self.executions or REGISTRY, self.transforms)
        return _exercised([label_of(*pair) for pair in pairs])


CHEAP: Final = tuple(name for name, execution in REGISTRY.items() if execution.cheap)
NOT_JAX: Final = tuple(name for name in REGISTRY if name != "jax")
"""JAX takes denormals for 0."""
QUICK: Final = (
    *("debug", "native", "jit", "jit, 2 threads", "jit, rebound reads"),
    *("jit, donated arguments", "dynamic", "jax"),
)
"""Those that take no step in Python for each element."""
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
MULTIPLIED: Final = {"weights": dict.fromkeys(PRODUCTS, 8), "size": 4}
CLOSED: Final = {"operators": (*BRANCHES, *BODIES, "custom_vjp"), "size": 4}
"""Sizes that JAX and batching know."""

REUSED: Final = CLOSED | {"aliasing": True}
"""Programs in which arrays are copied, updated and exchanged."""

FLAT: Final = {"operators": (*BRANCHES, *BODIES), "size": 3, "depth": 1}
"""Programs that are small, as each is compared under many transforms."""

OFTEN: Final = {"weights": {"prefix": 4, "custom": 2, "switch": 4, "subgraph": 2}}
"""What else were drawn too seldom for each round to exercise its rules."""

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
"""Transforms of transforms, where the numbers of batch elements are symbols."""
BATCHES: Final = ("vmap", "vmap of grad", "grad of vmap")

ROUNDS: Final = (
    Round("all", "exact", WRITTEN, None),
    Round("all", "smooth", WRITTEN | OFTEN, None),
    Round("all", "exact", BEYOND, None),
    Round("cheap", "exact", WRITTEN, CHEAP),
    Round("cheap", "smooth", WRITTEN | OFTEN, CHEAP),
    Round("cheap", "exact", BEYOND, CHEAP),
    Round("aliasing", "exact", WRITTEN | {"aliasing": True}, None),
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
    """What was done and found.

    rules       of `RULES`, those that its rounds exercise
    programs    by profile
    counts      comparisons ("jit of grad"), "tie", "refused"
    coverage    by operator and rule, how many programs agreed
    failures    by what failed, the scripts; the error alone of what could not be drawn
    seeds       the first, and the one after the last
    """

    folder: Path
    rules: Sequence[str] = tuple(RULES)
    seeds: tuple[int, int] = (0, 0)
    programs: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[str, Path] = field(default_factory=dict)

    def note(self, profile: str, program: Program, report: Report) -> None:
        self.programs[profile] += 1
        self.counts["tie"] += report.tie
        self.counts["refused"] += len(report.refused)
        self.counts.update(report.agreed)
        for operator, rule in _cells(program, report.agreed):
            if not self.coverage[operator, rule]:
                self.keep("corpus", f"{operator}-{rule}", program)
            self.coverage[operator, rule] += 1

    def failed(self, error: Exception, transforms: Sequence[str] = ("value",)) -> None:
        """Keep the error and its program; failures of one execution in one way once.

        Args:
            transforms: Of which the executions were compared.
        """
        execution, what = "drawing", f"{type(error).__name__}: {error}"
        program: Program | None = None
        if isinstance(error, Disagreement):
            execution, what, program = error.execution, error.what, error.program
        key = f"{execution}: {what.splitlines()[0][:60]}"
        if key in self.failures:
            return
        # By what it is: another campaign into this folder leaves it as it is.
        known = to_text(program) if program else what
        name = f"{execution}-{sha256(known.encode()).hexdigest()[:8]}"
        told = self._path("failures", name, ".txt")
        told.write_text("".join(traceback.format_exception(error)))
        if isinstance(error, Disagreement):
            told = self.keep("failures", name, error.program, _again(error, transforms))
        self.failures[key] = told

    def keep(self, folder: str, name: str, program: Program, more: str = "") -> Path:
        """Keep a program in a folder, as a script and as a text."""
        path = self._path(folder, name, ".py")
        path.write_text(program.script() + more)
        path.with_suffix(".json").write_text(to_text(program))
        return path

    def _path(self, folder: str, name: str, suffix: str) -> Path:
        path = self.folder / folder / (re.sub(r"[^\w-]+", "_", name) + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def empty_cells(self) -> list[tuple[str, str]]:
        """Rules of operators that no program has exercised."""
        cells = itertools.product(sorted(OPERATORS), self.rules)
        return [c for c in cells if not self.coverage[c] and c not in NO_RULE]

    def write_summary(self) -> None:
        """What was done, to be added to what other seeds have done."""
        coverage: dict[str, dict[str, int]] = {}
        for (operator, rule), count in sorted(self.coverage.items()):
            coverage.setdefault(operator, {})[rule] = count
        summary = {
            "seeds": self.seeds,
            "programs": dict(self.programs),
            "failures": {what: str(path) for what, path in self.failures.items()},
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
    """When a campaign is over: after so many minutes, or programs."""

    minutes: float = math.inf
    programs: float = math.inf
    began: float = field(default_factory=time.monotonic)

    def share(self, campaign: Campaign) -> float:
        """How much of it is over; 1 is all."""
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
    """Draw and compare until the limit; then `summary.json` in the folder says what.

    Args:
        start: The first seed; the same finds the same. A seed is for `SLICE` programs.
        folder: Where programs are kept.
        progress: Called after each program, with the share of the limit that is over.
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
            campaign.write_summary()  # what was done is known if the process dies, too
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
    """Call a judge with the programs of one seed; what it raises is made small."""
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
        Disagreement: the smallest program that failed.
        Exception: what stopped the drawing.
    """
    most = int(min(SLICE, limit.programs - campaign.programs.total()))

    def compare(program: Program) -> None:
        share = limit.share(campaign)
        if share >= 1 and not failed:  # what failed is made small before we stop
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
        if failed:  # as small as it is by now
            campaign.failed(failed[-1], part.transforms)
        raise
    except Exception:
        if failed:  # Hypothesis has an error of its own for what fails now and then
            raise failed[-1] from failed[-1].__cause__
        raise


def _checked(part: Round, program: Program) -> Report:
    """`check`, with errors of what it compares with as failures, too."""
    try:
        return check(program, part.executions, part.transforms)
    except Disagreement:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise Disagreement(program, "reference", what) from error


# --- what people see ------------------------------------------------------------------


@contextmanager
def progress_bar(console: Any = None) -> Iterator[Callable[[Campaign, float], None]]:
    """What shows how far a campaign is, on rich's console."""
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
    """Run with a progress bar, until Ctrl-C at most, and print what was done.

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
    for what, path in campaign.failures.items():
        how = "python" if path.suffix == ".py" else "see"
        console.print(f"FAILED {what}\n    {how} {path}")
    if stopped:
        console.print("Ctrl-C has ended it.")
    return 1 if campaign.failures else 130 if stopped else 0


def _comparisons(campaign: Campaign) -> Any:
    """How many programs agreed, by execution and transform."""
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
    """How many programs exercised each rule of each operator."""
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
