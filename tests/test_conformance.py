"""Every rule of every operator against its `debug`; and the table of that.

`make tables` (or `HOPFLOW_WRITE_TABLES=1`) writes docs/operators_and_rules.md.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ConformanceError
from hopflow.graph.rewriting import clone
from hopflow.hops.associative_scan import ASSOCIATIVE_SCAN
from hopflow.hops.base import RegionOperator, unsupported
from hopflow.hops.checkpoint import CHECKPOINT
from hopflow.hops.cond import COND
from hopflow.hops.custom import CUSTOM
from hopflow.hops.flex_attention import FLEX_ATTENTION
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.map import MAP
from hopflow.hops.scan import SCAN
from hopflow.hops.subgraphs import Written
from hopflow.hops.switch import SWITCH
from hopflow.hops.while_loop import WHILE
from hopflow.loop_ir.kernels import Inline
from hopflow.testing.conformance import CHECKS, OK, check_operator

pytestmark = pytest.mark.slow

PAGE: Final = Path(__file__).parent.parent / "docs" / "operators_and_rules.md"


def f64(*values: Any) -> Any:
    return hf.asarray(np.array(values, dtype=np.float64))


A: Final = f64(0.5, 1.5)
W: Final = f64(0.3, -0.7)
ROWS: Final = f64([0.2, 0.4], [0.6, 0.8], [1.0, 1.2])

QKV: Final = f64(*np.sin(np.arange(72.0)).reshape(3, 2, 2, 3, 2))
SCALE: Final = f64(0.5, 1.5)


class Call(NamedTuple):
    """A call of an operator, and the checks that fail as they are to."""

    op: RegionOperator
    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    without: Mapping[str, str] = {}


@hf.custom_jvp
def squashed(x: Any, y: Any) -> Any:
    return {"a": hf.tanh(x) * y, "b": [y]}


@squashed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    t = hf.tanh(x)
    slope = (1 - t * t) * y * dx + t * dy
    return {"a": t * y, "b": [y]}, {"a": slope, "b": [dy]}


@hf.custom_vjp
def scaled(x: Any, y: Any) -> Any:
    return hf.sin(x) * y


scaled.defvjp(
    lambda x, y: (hf.sin(x) * y, (x, y)),
    lambda kept, ct: (ct * hf.cos(kept[0]) * kept[1], ct * hf.sin(kept[0])),
)


class FixedPoint(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        def is_far(x: Any) -> Any:
            return hf.max(hf.abs(f(x) - x)) > 1e-14

        return hf.while_loop(is_far, lambda x: (f(x),), (x,))[0]


def written_cond(pred: Any, x: Any, y: Any) -> Any:
    """Branches that write an operand and a captured tensor."""

    def then(x: Any) -> Any:
        x += y
        y[0] = 2 * x[1]
        return x * y

    return hf.cond(pred, then, lambda x: x - y, (x,))


def written_scan(c: Any, xs: Any, seen: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        seen[:] = seen + c * x
        return hf.sin(c) * W + x, c

    return hf.scan(step, c, xs)


CALLS: Final = {
    "cond": Call(
        COND,
        hf.cond,
        (hf.asarray(True), lambda x: hf.sin(x) * W, lambda x: x * x, (A,)),
    ),
    "cond, which writes": Call(COND, written_cond, (hf.asarray(True), A, W)),
    "switch": Call(
        SWITCH, hf.switch, (hf.asarray(1), (hf.sin, lambda x: x * W, hf.exp), (A,))
    ),
    "while_loop": Call(
        WHILE,
        hf.while_loop,
        (lambda i, x: i < 3, lambda i, x: (i + 1, hf.sin(x) * W + x), (0, A)),
    ),
    "while_loop, max_steps": Call(
        WHILE,
        hf.while_loop,
        (lambda x: hf.sum(x) < 9, lambda x: (x * 1.5,), (A,)),
        {"max_steps": 20, "reverse_mode": "checkpoint"},
    ),
    "fori_loop": Call(
        WHILE, hf.fori_loop, (0, hf.asarray(3), lambda i, x: x * W + i, A)
    ),
    "scan": Call(SCAN, hf.scan, (lambda c, x: (hf.sin(c) * x + W, {"c": c}), A, ROWS)),
    "scan, until": Call(
        SCAN,
        hf.scan,
        (lambda c, x: (c + x, c * x), A, ROWS),
        {"until": lambda c: hf.sum(c) > 3},
    ),
    "scan, which writes": Call(SCAN, written_scan, (A, ROWS, W)),
    "map": Call(MAP, hf.map, (lambda x, y: (hf.sin(x) * y, x @ W), ROWS, A)),
    "associative_scan": Call(
        ASSOCIATIVE_SCAN,
        hf.associative_scan,
        (lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (ROWS, ROWS + 1)),
    ),
    "invoke_subgraph": Call(
        INVOKE_SUBGRAPH,
        hf.invoke_subgraph,
        (lambda x, y: (x * y["w"] + W,), A, {"w": W}),
    ),
    "checkpoint": Call(
        CHECKPOINT, hf.checkpoint(lambda x, y: hf.sin(x @ y) * x), (A, W)
    ),
    "custom_jvp": Call(CUSTOM, squashed, (A, W)),
    "custom_vjp": Call(
        CUSTOM,
        scaled,
        (A, W),
        without={"jvp": "a function with `custom_vjp` has rules for reverse mode only"},
    ),
    "flex_attention": Call(
        FLEX_ATTENTION,
        hf.flex_attention,
        (QKV[0], QKV[1], QKV[2]),
        {
            "score_mod": lambda s, b, h, i, j: s * SCALE[h] + 0.1 * (i - j),
            "mask_mod": lambda b, h, i, j: i >= j,
        },
    ),
    "a user's own": Call(FixedPoint(), FixedPoint(), (lambda y: 0.5 * (y + 3 / y), A)),
}
# Nodes that only derivatives make; the rows above run them.
MADE_BY_DERIVATIVES: Final = {"loop_tangents", "loop_cotangents", "loop_curvature"}

_found: dict[str, dict[str, str]] = {}


def conforms(name: str) -> dict[str, str]:
    if name not in _found:
        call = CALLS[name]
        options = {**call.options, "without": call.without}
        _found[name] = check_operator(call.function, *call.args, **options)
    return _found[name]


@pytest.mark.parametrize("name", CALLS)
def test_every_rule_does_what_debug_does(name: str) -> None:
    assert conforms(name).keys() == CHECKS.keys()


def test_every_operator_is_checked() -> None:
    todo: list[type] = [RegionOperator]
    found = set()
    while todo:
        own: list[Any] = todo.pop().__subclasses__()
        todo += own
        found |= {
            c.name
            for c in own
            if getattr(c, "__final__", False) and c.__module__.startswith("hopflow.")
        }
    checked = {call.op.name for call in CALLS.values()}
    assert found - checked - MADE_BY_DERIVATIVES == set()


def test_a_text_with_objects_of_users_is_compared() -> None:
    assert conforms("custom_jvp")["text"] == OK


# --- the table ------------------------------------------------------------------------


class Column(NamedTuple):
    """What a column says: the checks behind it, and the methods that make a rule."""

    checks: tuple[str, ...]
    methods: tuple[str, ...]


COLUMNS: Final = {
    "debug": Column(("debug",), ("debug",)),
    "eager": Column(("eager", "traced"), ("run_eager",)),
    "fake": Column(("fake",), ("infer",)),
    "functional": Column(("functional",), ("functionalize",)),
    "jvp": Column(("jvp",), ("jvp_rule", "jvp")),
    "vjp": Column(("vjp", "second"), ("linearize_rule", "transpose_rule", "vjp")),
    "vmap": Column(("vmap",), ("batch_rule", "batch")),
    "lower": Column(("lower", "symbolic", "dynamic"), ("lower",)),
    "export": Column(("export",), ()),
}

_TOP: Final = """\
# Operators and their rules

Which rule each operator has, and where it comes from: `own` is written for the operator
or its family, `derived` follows from its subgraphs (`hops/base.py`). Each cell with one
of the two was run, and agrees with `debug`; `tests/test_conformance.py` has
the calls, and writes this page (`make tables`).

"""
_BOTTOM: Final = """
`debug` is plain Python under `hf.debug()`; `eager` a call by itself, and the graph that
is traced of it; `fake` the types of the results; `functional` writes that have become
results, by `hf.functionalize`. `jvp` and `vjp` are compared with central differences,
`vjp` to second order; `vmap` with a Python loop. `lower` is compiled code, for one size
and for all. `export` is the program that `hf.load` reads of its file. The text of each
graph parses back, and runs.

How to check an operator of your own: [add an operator](add_an_operator.md#is-it-right).
"""


def reason(call: Call, found: Mapping[str, str], column: Column) -> str:
    """Why there is no rule; "" if there is one."""
    for check in column.checks:
        if found[check] != OK:
            return found[check]
    for method in column.methods:
        rule = getattr(type(call.op), method, None)
        if isinstance(rule, unsupported):
            return rule.reason
    return ""


def cell(call: Call, column: Column) -> str:
    is_users = isinstance(call.op, hf.HigherOrderOp)
    base = hf.HigherOrderOp if is_users else RegionOperator
    own = any(
        getattr(type(call.op), m, None) is not getattr(base, m, None)
        for m in column.methods
    )
    return "own" if own else "derived"


def page() -> str:
    reasons: list[str] = []
    rows = [
        f"| operator | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for name, call in CALLS.items():
        cells = []
        for column in COLUMNS.values():
            why = reason(call, conforms(name), column)
            if why and why not in reasons:
                reasons.append(why)
            cells.append(
                f"none ({reasons.index(why) + 1})" if why else cell(call, column)
            )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{i}. {why}" for i, why in enumerate(reasons, start=1)]
    return _TOP + "\n".join([*rows, "", "Why there is none:", "", *notes, ""]) + _BOTTOM


def test_the_table_in_the_documents_is_that_of_this_run() -> None:
    text = page()
    if os.environ.get("HOPFLOW_WRITE_TABLES"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "write it with `make tables`"


# --- faults that it must find ---------------------------------------------------------


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))


class WrongJvp(Twice):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        y, dy = hf.jvp(lambda f, x: f(f(x)), primals, tangents)
        return y, dy * 1.01


class WrongVjp(Twice):
    def vjp(self, f: Any, x: Any) -> Any:
        y, pull = hf.vjp(lambda f, x: f(f(x)), f, x)
        return y, lambda ct: pull(ct * 1.01)


class WrongSecond(Twice):
    def vjp(self, f: Any, x: Any) -> Any:
        y, pull = hf.vjp(lambda f, x: f(f(x)), f, hf.stop_gradient(x))
        return y, pull


class WrongBatch(Twice):
    def batch(self, size: Any, batched: Any, args: Any, params: Any) -> Any:
        values, found = super().batch(size, batched, args, params)
        return [v + 0.01 for v in values], found


class WrongLower(Twice):
    def lower(self, *args: Any, **params: Any) -> Any:
        graph = clone(params["meaning"])
        graph.outputs = (graph.inputs[0],)
        return Inline(graph, args[1:])


class WrongInfer(Twice):
    def infer(self, *_types: Any, **params: Any) -> Any:
        return tuple(t.with_shape((*t.shape, 1)) for t in super().infer(**params))


class WrongFunctionalize(Twice):
    def functionalize(self, bodies: Any) -> Any:
        return Written()


class WrongTrace(Twice):
    def trace(self, call: Any) -> Any:
        return super().trace(call) * 1.01


FAULTS: Final[dict[type[RegionOperator], set[str]]] = {
    WrongJvp: {"jvp", "vjp"},
    WrongVjp: {"vjp"},
    WrongSecond: {"second"},
    WrongBatch: {"vmap"},
    WrongLower: {"eager", "lower", "dynamic"},
    WrongInfer: {"fake"},
    WrongFunctionalize: {"functional"},
    WrongTrace: {"eager", "traced", "functional", "lower"},
}


def writing(op: Any, x: Any) -> Any:
    z = x * 1

    def step(y: Any) -> Any:
        y += 1
        return hf.sin(y) * z

    return op(step, z), z


@pytest.mark.parametrize("op", FAULTS, ids=lambda op: op.name)
def test_a_wrong_rule_is_found(op: type[RegionOperator]) -> None:
    made = op()
    with pytest.raises(ConformanceError) as caught:
        check_operator(lambda x: writing(made, x), A)
    assert caught.value.failures.keys() >= FAULTS[op], caught.value.failures
    assert "debug" not in caught.value.failures


def test_the_right_operator_passes() -> None:
    assert set(check_operator(Twice, lambda y: hf.sin(y) * W, A).values()) == {OK}
    assert set(check_operator(lambda x: writing(Twice(), x), A).values()) == {OK}


def test_an_error_says_which_rules_and_why() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_operator(WrongBatch, lambda y: hf.sin(y) * W, A)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "wrong_batch: 1 of its rules do not do what `debug` does."
    assert second.startswith("  vmap: AssertionError: ")


def test_there_may_be_nothing_to_check() -> None:
    found = check_operator(hf.cond, True, lambda: hf.asarray(1), lambda: hf.asarray(2))
    assert found["jvp"] == "no argument is a floating tensor"


def test_wrong_use_is_an_error_of_ours() -> None:
    with pytest.raises(ArgumentTypeError, match="and is `int`"):
        check_operator(1)
    with pytest.raises(ArgumentValueError, match="there are the checks debug, eager"):
        check_operator(Twice, hf.sin, A, without={"speed": "it is slow"})
    with pytest.raises(ConformanceError, match="it works, and was to fail: no reason"):
        check_operator(Twice, hf.sin, A, without={"jvp": "no reason"})
