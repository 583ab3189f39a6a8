"""What two programs differ in, by their structure: nodes that came, went or changed."""

import json
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from hopflow.export.document import Document


class Difference(NamedTuple):
    """One difference: `+` what only the second program has, `-` the first, `~` both,
    in another way.

    where   a part of the program: `signature.arguments`, `while_loop/body: node 3`
    """

    sign: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.sign} {self.where}: {self.what}"


def differences(a: Document, b: Document) -> Iterator[Difference]:
    """In order: of the signature, of constraints, of nodes, of tensors' types."""
    for part in ("signature", "constraints", "derivatives"):
        yield from _values(part, a.data[part], b.data[part])
    one, two = _Program(a.data), _Program(b.data)
    yield from _graphs(one, len(one.graphs) - 1, two, len(two.graphs) - 1, "")


def _values(where: str, a: Any, b: Any) -> Iterator[Difference]:
    if a == b and type(a) is type(b):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            inner = f"{where}.{key}"
            if key not in b:
                yield Difference("-", inner, _text(a[key]))
            elif key not in a:
                yield Difference("+", inner, _text(b[key]))
            else:
                yield from _values(inner, a[key], b[key])
        return
    yield Difference("~", where, f"{_text(a)} -> {_text(b)}")


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


class _Program:
    """The graphs of a program, with types as texts for their numbers."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.graphs = data["graphs"]
        self.types = [_type(row) for row in data["types"]]

    def head(self, node: dict[str, Any]) -> str:
        """A node without its operands and graphs: what aligns it with another one."""
        types = ", ".join(self.types[t] for t in node["results"])
        if "attribute" in node:
            return f"{types} = get_attr({node['attribute']})"
        own = [f"{k}={_text(v)}" for k, v in node["params"].items() if not _held(v)]
        text = f"{types} = {node['op']}" if types else node["op"]
        return f"{text}({len(node['args'])} operands; {', '.join(own)})"


def _type(row: dict[str, Any]) -> str:
    shape = ", ".join(n if isinstance(n, str) else _text(n) for n in row["shape"])
    return f"{row['dtype']}[{shape}]"


def _held(value: Any) -> list[int]:
    """The graphs that a param holds."""
    if isinstance(value, list):
        return [number for item in value for number in _held(item)]
    if isinstance(value, dict) and "graph" in value:
        return [value["graph"]]
    if isinstance(value, dict) and "rules" in value:
        rules = value["rules"]
        return [rules[key] for key in ("jvp", "forward", "backward") if key in rules]
    return []


def _graphs(
    one: _Program, i: int, two: _Program, k: int, path: str
) -> Iterator[Difference]:
    """What two graphs differ in. Nodes are aligned by what they are, not by operands:
    one that came in between changes no other one."""
    a, b = one.graphs[i], two.graphs[k]
    where = f"{path}: " if path else ""
    heads = [one.head(n) for n in a["nodes"]], [two.head(n) for n in b["nodes"]]
    matcher = SequenceMatcher(None, *heads, autojunk=False)
    values = dict(enumerate(range(len(a["inputs"]))))
    if len(a["inputs"]) != len(b["inputs"]):
        yield Difference("~", f"{where}inputs", _counts(a["inputs"], b["inputs"]))
    firsts = _firsts(a), _firsts(b)
    for tag, i1, i2, k1, k2 in matcher.get_opcodes():
        if tag != "equal":
            for n in range(i1, i2):
                yield Difference("-", f"{where}node {n}", heads[0][n])
            for n in range(k1, k2):
                yield Difference("+", f"{where}node {n}", heads[1][n])
            continue
        for n, m in zip(range(i1, i2), range(k1, k2), strict=True):
            for r in range(len(a["nodes"][n]["results"])):
                values[firsts[0][n] + r] = firsts[1][m] + r
            yield from _nodes(one, a["nodes"][n], two, b["nodes"][m], values, path, n)
    if [_moved(x, values, one) for x in a["outputs"]] != [
        _named(x, two) for x in b["outputs"]
    ]:
        yield Difference("~", f"{where}outputs", "other values are returned")


def _counts(a: Sequence[Any], b: Sequence[Any]) -> str:
    return f"{len(a)} -> {len(b)}"


def _firsts(graph: dict[str, Any]) -> list[int]:
    """The number of the first result of each node."""
    found, at = [], len(graph["inputs"])
    for node in graph["nodes"]:
        found.append(at)
        at += len(node["results"])
    return found


def _moved(arg: Any, values: dict[int, int], program: _Program) -> Any:
    return values.get(arg) if isinstance(arg, int) else _named(arg, program)


def _named(arg: Any, program: _Program) -> Any:
    return arg if isinstance(arg, int) else (_text(arg[0]), program.types[arg[1]])


def _nodes(
    one: _Program,
    a: dict[str, Any],
    two: _Program,
    b: dict[str, Any],
    values: dict[int, int],
    path: str,
    number: int,
) -> Iterator[Difference]:
    """What two nodes of one kind differ in: operands, and what is in their graphs."""
    where = f"{path}: " if path else ""
    args = [_moved(x, values, one) for x in a.get("args", ())]
    if args != [_named(x, two) for x in b.get("args", ())]:
        operands = f"other operands of {one.head(a)}"
        yield Difference("~", f"{where}node {number}", operands)
    for key, value in a.get("params", {}).items():
        pairs = zip(_held(value), _held(b["params"].get(key)), strict=False)
        for i, k in pairs:
            inner = f"{a['op']}/{key}"
            yield from _graphs(one, i, two, k, f"{path} → {inner}" if path else inner)
