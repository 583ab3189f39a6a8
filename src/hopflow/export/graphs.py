"""Graphs as plain data, and back.

Graphs stand in a list, each after those that its nodes hold; the last one is the
program's. In a graph values have numbers: the inputs, then the results of each node. A
node's operand is the number of a value before it, or `[constant, type]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hopflow.dtypes import iinfo
from hopflow.errors import ExportError
from hopflow.export.fields import Part
from hopflow.export.operators import least_version, operators, schema, upgraded
from hopflow.export.rules import CALL, read_rules
from hopflow.export.sizes import read_float
from hopflow.export.statics import StaticReader, StaticWriter
from hopflow.graph.core import Arg, Constant, Graph, Node, Section, SourceLine, Var
from hopflow.graph.types import TensorType
from hopflow.hops.custom import CUSTOM

MAX_NESTING: Final = 512
SECTIONS: Final[tuple[Section, ...]] = ("symbol", "operand", "capture")


# --- writing --------------------------------------------------------------------------


class GraphWriter:
    """Writes graphs; those that several nodes share once.

    rows        the graphs
    lines       of the user's code, each after its caller
    operators   the schemas of those that are used
    attributes  the tensors that graphs hold, by name
    """

    def __init__(self, statics: StaticWriter, *, with_lines: bool = True) -> None:
        self.statics = statics
        self.with_lines = with_lines
        statics.graph = self.graph
        self.rows: list[Any] = []
        self.lines: list[Any] = []
        self.operators: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self._known = operators()
        self._graphs: dict[int, tuple[int, Graph]] = {}
        self._lines: dict[Any, int] = {}

    def graph(self, graph: Graph) -> int:
        """The number of a graph, which is written if it has none."""
        if id(graph) in self._graphs:
            return self._graphs[id(graph)][0]
        numbers: dict[Var, int] = {}
        inputs = [self._input(var, numbers) for var in graph.inputs]
        nodes = [self._node(graph, node, numbers) for node in graph.nodes]
        row = {
            "name": graph.name,
            "inputs": inputs,
            "nodes": nodes,
            "outputs": [self._arg(arg, numbers) for arg in graph.outputs],
        }
        self.rows.append(row | self._line(graph.output_line))
        self._graphs[id(graph)] = len(self.rows) - 1, graph
        return len(self.rows) - 1

    def _input(self, var: Var, numbers: dict[Var, int]) -> dict[str, Any]:
        numbers[var] = len(numbers)
        node = var.node
        row = {"name": node.name, "section": node.section}
        if node.symbol is not None:
            row["symbol"] = self.statics.symbols.name(node.symbol)
        return row | {"type": self.statics.type(var.type)}

    def _node(
        self, graph: Graph, node: Node, numbers: dict[Var, int]
    ) -> dict[str, Any]:
        row: dict[str, Any]
        if node.op is None:
            self.attributes[node.name] = graph.attributes[node.name]
            row = {"attribute": node.name}
        else:
            row = self._call(node, numbers)
        if node.symbol is not None:
            row["symbol"] = self.statics.symbols.name(node.symbol)
        for var in node.results:
            numbers[var] = len(numbers)
        row["results"] = [self.statics.type(var.type) for var in node.results]
        row |= self._line(node.line)
        if self.with_lines:
            told = {"module": node.module_path, "path": node.operator_path}
            row |= {key: text for key, text in told.items() if text}
        return row

    def _call(self, node: Node, numbers: dict[Var, int]) -> dict[str, Any]:
        name = node.op.name
        try:
            if self._known.get(name) is not node.op:
                raise ExportError("it is known in this process alone.")
            params = {k: self.statics.value(x) for k, x in node.params.items()}
        except ExportError as error:
            raise located(node, error) from error
        if name not in self.operators:
            self.operators[name] = schema(node.op)
        args = [self._arg(arg, numbers) for arg in node.args]
        return {"op": name, "args": args, "params": params}

    def _arg(self, arg: Arg, numbers: dict[Var, int]) -> Any:
        if isinstance(arg, Constant):
            value: Any = arg.value
            if arg.type.dtype.is_float:
                value = {"float": float(value).hex()}
            return [value, self.statics.type(arg.type)]
        return numbers[arg]

    def _line(self, line: SourceLine | None) -> dict[str, int]:
        if line is None or not self.with_lines:
            return {}
        number: int | None = None
        for part in line.stack:
            file = part.file.rsplit("/", 1)[-1]
            key = file, part.line, part.function, number
            number = self._lines.setdefault(key, len(self._lines))
            if number == len(self.lines):
                self.lines.append(list(key))
        assert number is not None
        return {"line": number}


def located(node: Node, error: ExportError) -> ExportError:
    """The error with the operation and the user's line in front."""
    at = f" ({node.line})" if node.line is not None else ""
    return ExportError(f"export: `{node.op.name}`{at} cannot leave Python: {error}")


# --- reading --------------------------------------------------------------------------


@dataclass(slots=True)
class GraphReader:
    """Reads graphs that refer only to what stands before them.

    weights   the tensors of attributes, by name
    depths    of each graph, how many are in each other in it
    """

    statics: StaticReader
    weights: Mapping[str, Any]
    graphs: list[Graph] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)
    lines: list[SourceLine] = field(default_factory=list)
    versions: dict[str, tuple[Any, int]] = field(default_factory=dict)

    def read_lines(self, part: Part) -> None:
        for row in part.items():
            file, number, function, caller = row.items(4)
            above = None
            if caller.value is not None:
                above = caller.within(self.lines, "a line before it")
            self.lines.append(
                SourceLine(file.text(), number.integer(), function.text(), above)
            )

    def read_operators(self, part: Part) -> None:
        """The operators of the file, with the versions that they have in it."""
        known = operators()
        for name, row in part.named().items():
            op = Part(name, row.path).known(known, "an operator of this version")
            found = row.members(["version", "operands", "params", "effects"])
            for texts in (found["operands"], found["effects"]):
                texts.each(Part.text)
            for kind in found["params"].named().values():
                kind.text()
            self.versions[name] = op, readable(op, found["version"])

    def read_graphs(self, part: Part) -> None:
        self.statics.graphs = self.graphs
        for row in part.items():
            self.graphs.append(self._graph(row))

    def _graph(self, part: Part) -> Graph:
        found = part.members(["name", "inputs", "nodes", "outputs"], ["line"])
        graph = Graph(found["name"].text())
        values: list[Var] = []
        for row in found["inputs"].items():
            values.append(self._input(graph, row))
        depth = 0
        for row in found["nodes"].items():
            node = self._node(graph, row, values)
            values += node.results
            inner = [self.depths[id(body)] for body in node.graphs.values()]
            depth = max([depth, *(d + 1 for d in inner)])
        if depth > MAX_NESTING:
            part.fail(f"graphs nested at most {MAX_NESTING} deep")
        self.depths[id(graph)] = depth
        graph.outputs = found["outputs"].each(lambda arg: self._arg(arg, values))
        graph.output_line = self._line(found)
        return graph

    def _input(self, graph: Graph, part: Part) -> Var:
        found = part.members(["name", "section", "type"], ["symbol"])
        section = found["section"].one_of(SECTIONS)
        symbol = None
        if "symbol" in found:
            symbol = self.statics.symbols.symbol(found["symbol"])
        type_ = self.statics.type(found["type"])
        return graph.add_input(type_, found["name"].text(), section, symbol)  # type: ignore[arg-type]

    def _node(self, graph: Graph, part: Part, values: Sequence[Var]) -> Node:
        names = part.named()
        told = ["symbol", "line", "module", "path"]
        if "attribute" in names:
            found = part.members(["attribute", "results"], told)
            node = self._attribute(graph, found)
        else:
            found = part.members(["op", "args", "params", "results"], told)
            node = self._call(graph, found, values)
        if "symbol" in found:
            node.symbol = self.statics.symbols.symbol(found["symbol"])
        node.line = self._line(found)
        node.module_path = found["module"].text() if "module" in found else ""
        node.operator_path = found["path"].text() if "path" in found else ""
        return node

    def _attribute(self, graph: Graph, found: Mapping[str, Part]) -> Node:
        name = found["attribute"].text()
        value = found["attribute"].known(self.weights, "a tensor of the weights")
        [type_] = found["results"].items(1)
        if name in graph.attributes:
            found["attribute"].fail("a tensor that no node before it has")
        return graph.add_attribute(self.statics.type(type_), name, value).node

    def _call(
        self, graph: Graph, found: Mapping[str, Part], values: Sequence[Var]
    ) -> Node:
        op, version = found["op"].known(self.versions, "an operator of the file")
        params = {
            key: self._param(op, key, x) for key, x in found["params"].named().items()
        }
        if version < op.version:
            try:
                params = upgraded(op, version, params)
            except Exception:  # whatever it finds instead of what it has written
                found["params"].fail(f"params of version {version} of `{op.name}`")
        types = found["results"].each(self.statics.type)
        args = found["args"].each(lambda arg: self._arg(arg, values))
        return graph.call(op, args, params, types)

    def _param(self, op: Any, key: str, part: Part) -> Any:
        if op is CUSTOM and key == "use":  # of version 1
            rules = part.members(["rules"])["rules"]
            return read_rules(rules, self.graphs, self.statics.symbols)
        if op is CUSTOM and key not in CALL:
            part.fail(f"a param of `{op.name}`")
        return self.statics.value(part)

    def _arg(self, part: Part, values: Sequence[Var]) -> Arg:
        if isinstance(part.value, list):
            value, type_ = part.items(2)
            return self._constant(value, self.statics.type(type_))
        return part.within(values, "a value before it")

    def _constant(self, part: Part, type_: TensorType) -> Constant:
        dtype = type_.dtype
        if dtype.is_float:
            return Constant(read_float(part), type_)
        if dtype.is_integer:
            info = iinfo(dtype)
            return Constant(part.integer(info.min, info.max), type_)
        return Constant(part.flag(), type_)

    def _line(self, found: Mapping[str, Part]) -> SourceLine | None:
        if "line" not in found:
            return None
        return found["line"].within(self.lines, "a line")


def readable(op: Any, part: Part) -> int:
    """The version of an operator in a file.

    Raises:
        ProgramFormatError: its nodes cannot be read.
    """
    version = part.integer()
    least = least_version(op)
    if not least <= version <= op.version:
        part.fail(f"a version of `{op.name}` from {least} to {op.version}")
    return version
