"""Schemas of calls and nodes: printed, compared, checked, and as plain data."""

import json
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import ArgumentTypeError, ProgramFormatError, SchemaError
from hopflow.hops.cond import COND
from hopflow.hops.schema import Schema


class Repeat(hf.HigherOrderOp):
    def debug(self, f: Any, *trees: Any, times: int = 2) -> Any:
        for _ in range(times):
            trees = f(*trees)
        return trees


repeat = Repeat()
X = hf.asarray(np.array([0.5, 1.5]))
seen = hf.asarray(np.zeros(2))


def writes(x: Any) -> Any:
    x += 1
    seen[0] = x[1]
    return {"y": x * seen}


def reads(x: Any) -> Any:
    return {"y": x}


def test_it_says_what_is_given_written_closed_over_and_returned() -> None:
    found = hf.schema(hf.cond, hf.spec("bool[]"), writes, reads, (X,))
    name = found.captures[0].path
    assert str(found) == (
        "cond(\n"
        "    pred: bool[],\n"
        "    true_fn: function,\n"
        "    false_fn: function,\n"
        "    operands[0]: f64[2],  # written\n"
        "    *,\n"
        f"    {name}: f64[2],  # written\n"
        ") -> {'y': *} of f64[2]:\n"
        f"    then(x0: f64[2], {name}: f64[2]) -> (f64[2], f64[2], f64[2])\n"
        f"    else_(x0: f64[2], {name}: f64[2]) -> (f64[2], f64[2], f64[2])"
    )
    assert found.written == ("operands[0]", name)
    assert seen.tolist() == [0, 0]  # nothing ran
    assert found == COND.schema(hf.spec("bool[]"), writes, reads, (X,))
    assert len({found, COND.schema(hf.spec("bool[]"), reads, reads, (X,))}) == 2


CALLS = [
    (hf.cond, (hf.asarray(True), reads, reads, (X,))),
    (hf.cond, (True, reads, reads, (X,))),  # of which one branch alone is called
    (hf.switch, (hf.asarray(1), [reads, reads], {"a": X}["a"])),
    (hf.while_loop, (lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, X))),
    (hf.fori_loop, (0, 3, lambda i, x: x + i, X)),
    (hf.scan, (lambda c, x: (c + x, (c, x)), X, hf.stack([X, X]))),
    (hf.map, (hf.sin, X)),
    (hf.associative_scan, (hf.add, X)),
    (hf.invoke_subgraph, (hf.sin, X)),
    (hf.subgraph(hf.sin), (X,)),
    (hf.checkpoint(hf.sin), (X,)),
    (hf.custom_jvp(hf.sin), (X,)),
    (hf.custom_vjp(hf.sin), (X,)),
    (repeat, (lambda a, b: (b, a), X, {"k": X})),
    (hf.sin, (X,)),
]


@pytest.mark.parametrize(("f", "args"), CALLS)
def test_a_schema_checks_its_own_call_and_is_plain_data(f: Any, args: Any) -> None:
    found = hf.schema(f, *args)
    found.check(*args)
    data = json.loads(json.dumps(found.to_dict()))
    assert Schema.from_dict(data) == found
    types = hf.trace(lambda: f(*args), captures=True).graph.out_types
    assert [r.type for r in found.results] == list(map(str, types))


def test_a_node_has_one_by_roles() -> None:
    graph = hf.trace(lambda x: hf.scan(lambda c, y: (c + y, c), x[0], x), X).graph
    [node] = graph.nodes_of("scan")
    found = hf.schema(node)
    assert [(a.kind, a.type) for a in found.arguments] == [
        ("carry", "f64[]"),
        ("slice", "f64[2]"),
    ]
    assert [(r.kind, r.type) for r in found.results] == [
        ("carry", "f64[]"),
        ("stacked", "f64[2]"),
    ]
    assert dict(found.options)["length"] == "2"
    assert Schema.from_dict(found.to_dict()) == found


def test_sizes_may_be_names() -> None:
    found = repeat.schema(lambda a, b: (a, b), *hf.spec("f32[n, 3]", "f32[n]"))
    assert [a.path for a in found.arguments] == ["f", "trees[0]", "trees[1]"]
    found.check(hf.sin, hf.ones((4, 3)), hf.ones(4))
    with pytest.raises(SchemaError) as caught:
        found.check(hf.sin, hf.ones((4, 3)), hf.ones(5))
    [leaf] = caught.value.leaves
    assert (leaf.path, leaf.reason) == ("trees[1]", "axis 0: 4 != 5")


@pytest.mark.parametrize(
    ("args", "path", "reason"),
    [
        ((hf.sin, hf.ones(3)), "x", "dtype"),
        ((hf.sin, X[0]), "x", "rank 1 != 0"),
        ((hf.sin, hf.stack([X[0]] * 3)), "x", "axis 0: 2 != 3"),
        ((X, X), "f", "function != tensor"),
        ((hf.sin, (X, X)), "(args, kwargs)", "structure"),
        ((hf.sin, "x"), "x", "tensor != static"),
    ],
)
def test_other_arguments_are_refused_by_path(args: Any, path: str, reason: str) -> None:
    class Apply(hf.HigherOrderOp):
        def debug(self, f: Any, x: Any) -> Any:
            return f(x)

    found = Apply().schema(hf.sin, X)
    with pytest.raises(SchemaError, match="apply: the arguments are not") as caught:
        found.check(*args)
    assert [(m.path, m.reason) for m in caught.value.leaves] == [(path, reason)]


def test_it_can_be_asked_for_within_a_trace_and_leaves_nothing_there() -> None:
    def f(x: Any) -> Any:
        found = hf.schema(hf.map, lambda y: y * x[0], x)
        assert [a.type for a in found.arguments] == ["", str(x.type)]
        return x * 2

    graph = hf.trace(f, X, mode="symbolic").graph
    assert [n.op.name for n in graph.nodes] == ["multiply"]


BROKEN: list[Any] = [
    None,
    {},
    ("operator", 1),
    ("arguments", 1),
    ("arguments", [{"path": "x"}]),
    ("arguments", [{"path": "x", "kind": "y", "type": "z", "written": 1}]),
    ("functions", [["f"]]),
    ("options", [["f", 1]]),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_other_data_are_refused(broken: Any) -> None:
    data = hf.schema(hf.map, hf.sin, X).to_dict()
    if isinstance(broken, tuple):
        data[broken[0]] = broken[1]
    with pytest.raises(ProgramFormatError, match="Schema: "):
        Schema.from_dict(data if isinstance(broken, tuple) else broken)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="schema: `f` must be a function"):
        hf.schema(1)
