"""A program as plain data and tensors, and back: what `program.json` holds.

`program.schema.json` is the schema of the data. The format has a version of its own,
for what stands around the operators; those have versions too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from keyword import iskeyword
from typing import Any, Final, NamedTuple

from hopflow.errors import GraphError, HopflowError, ProgramFormatError
from hopflow.export.fields import Part
from hopflow.export.graphs import GraphReader, GraphWriter
from hopflow.export.sizes import SymbolReader, SymbolWriter
from hopflow.export.statics import StaticReader, StaticWriter
from hopflow.export.trees import read_tree, write_tree
from hopflow.graph.core import Graph, match_shapes
from hopflow.graph.module import ComputedSource, GraphModule, Source, Specialization
from hopflow.graph.types import same_type
from hopflow.graph.verifier import verify
from hopflow.hops.rule_regions import refers_outside
from hopflow.symbolic.guards import Guard, GuardSet
from hopflow.symbolic.size import Size, Symbol, SymInt
from hopflow.trace.capture import Run, argument_value

FORMAT: Final = "hopflow program"
VERSION: Final = 1
LEAST_VERSION: Final = 1
"""The least version of the format that is readable."""


@dataclass(frozen=True, slots=True)
class Document:
    """A program as plain data.

    data      as JSON has it
    tensors   by the name of an attribute
    """

    data: dict[str, Any]
    tensors: dict[str, Any]


def structure_of(document: Document) -> dict[str, Any]:
    """What of a document is the program, and not where it was written."""
    return {k: v for k, v in document.data.items() if k not in ("lines", "producer")}


# --- writing --------------------------------------------------------------------------


def write_document(
    module: GraphModule,
    arguments: Sequence[str],
    positional: int,
    derivatives: int,
    *,
    with_lines: bool = True,
) -> Document:
    """
    Args:
        with_lines: Whether it says where in the user's code nodes are from.

    Raises:
        ExportError: the program has what no file can hold.
    """
    symbols = SymbolWriter(_told(module))
    statics = StaticWriter(symbols)
    graphs = GraphWriter(statics, with_lines=with_lines)
    graphs.graph(module.graph)
    run: Run = module.run  # type: ignore[assignment]
    constants = [
        {"leaf": i, "value": statics.value(found.value)}
        for i, found in module.constants.items()
    ]
    signature = {
        "arguments": list(arguments),
        "positional": positional,
        "inputs": write_tree(module.in_spec, statics),
        "outputs": write_tree(module.out_spec, statics),
        "paths": list(module.texts),
        "numbers": sorted(module.numbers),
        "constants": constants,
        "sources": [
            _source(symbols.name(symbol), source, symbols)
            for symbol, source in module.sources.items()
        ],
        "results": run.results,
        "written": list(run.written),
        "same": sorted(map(list, run.same.items())),
        "number_results": sorted(run.numbers),
    }
    constraints = [
        {"condition": symbols.condition(guard.holds), "line": guard.line}
        for guard in module.guards.guards
    ]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "producer": f"hopflow {version('hopflow')}",
        "derivatives": derivatives,
        "symbols": symbols.table(),
        "types": statics.types,
        "lines": graphs.lines,
        "operators": {key: graphs.operators[key] for key in sorted(graphs.operators)},
        "graphs": graphs.rows,
        "signature": signature,
        "constraints": constraints,
    }
    return Document(data, graphs.attributes)


def _told(module: GraphModule) -> dict[Symbol, str]:
    """The symbols that arguments tell, and how a user writes where."""
    return {
        symbol: (symbol.name if symbol.env is None else symbol.env.name(symbol))
        for symbol in module.sources
    }


def _source(
    name: str, source: Source | ComputedSource, symbols: SymbolWriter
) -> dict[str, Any]:
    if isinstance(source, ComputedSource):
        return {
            "symbol": name,
            "size": symbols.size(source.size),
            "of": [
                _source(symbols.name(symbol), own, symbols)
                for symbol, own in source.sources.items()
            ],
        }
    return {
        "symbol": name,
        "leaf": source.leaf,
        "axis": source.axis,
        "factor": source.factor,
        "offset": source.offset,
    }


# --- reading --------------------------------------------------------------------------


class Read(NamedTuple):
    """What a document says: what an `ExportedProgram` is made of."""

    module: GraphModule
    arguments: tuple[str, ...]
    positional: int
    derivatives: int


def read_document(data: Any, weights: Mapping[str, Any]) -> Read:
    """
    Args:
        weights: The tensors by name.

    Raises:
        ProgramFormatError: the data are no program, or one of another version.
    """
    top = Part(data)
    found = top.members(_MEMBERS)
    if found["format"].text() != FORMAT:
        found["format"].fail(f"{FORMAT!r}")
    found["version"].integer(LEAST_VERSION, VERSION)
    found["producer"].text()
    symbols = SymbolReader()
    symbols.read_table(found["symbols"])
    statics = StaticReader(symbols)
    statics.read_types(found["types"])
    graphs = GraphReader(statics, weights)
    graphs.read_lines(found["lines"])
    graphs.read_operators(found["operators"])
    graphs.read_graphs(found["graphs"])
    if not graphs.graphs:
        found["graphs"].fail("at least one graph")
    guards = _constraints(found["constraints"], symbols)
    reader = _Signature(found["signature"], graphs.graphs[-1], statics)
    module = reader.module(guards)
    _verify(graphs, symbols)
    derivatives = found["derivatives"].integer()
    return Read(module, reader.arguments, reader.positional, derivatives)


_MEMBERS: Final = (
    *("format", "version", "producer", "derivatives", "symbols", "types", "lines"),
    *("operators", "graphs", "signature", "constraints"),
)


def _constraints(part: Part, symbols: SymbolReader) -> GuardSet:
    """The conditions that calls are checked against, which are facts from here on."""
    guards: list[Guard] = []
    for row in part.items():
        found = row.members(["condition", "line"])
        condition = symbols.condition(found["condition"])
        if any(symbol not in symbols.inputs for symbol in condition.symbols):
            row.fail("a condition on what arguments tell")
        try:
            symbols.env.assume(condition)
        except HopflowError:
            row.fail("a condition that can hold beside the others")
        guards.append(Guard(condition, True, found["line"].text()))
    return GuardSet(tuple(guards))


def _verify(reader: GraphReader, symbols: SymbolReader) -> None:
    """Check the rules of graphs, for types over what the file states, and no more.

    Raises:
        ProgramFormatError: one is broken.
    """
    try:
        graph = reader.graphs[-1]
        verify(graph)
        if refers_outside(graph):
            raise GraphError("a call has the rules of one that is not around it.")
    except Exception as error:  # whatever operators do with what they never expected
        raise ProgramFormatError(f"program: {error}") from error
    if symbols.env.asked:
        raise ProgramFormatError(
            f"program: its types need `{symbols.env.asked[0]}`, which is none of its "
            "constraints."
        )


class _Signature:
    """Reads what calls of a graph take and give."""

    def __init__(self, part: Part, graph: Graph, statics: StaticReader) -> None:
        self.part = part
        self.graph = graph
        self.symbols = statics.symbols
        self.statics = statics = statics.of_data
        self.found = part.members(_SIGNATURE)
        self.arguments = self.found["arguments"].each(Part.text)
        self.positional = self.found["positional"].integer(0, len(self.arguments))
        self._check_names()
        self.in_spec = read_tree(self.found["inputs"], statics)
        self.out_spec = read_tree(self.found["outputs"], statics)
        self.paths = self.found["paths"].each(Part.text)
        leaves = self.in_spec.num_leaves
        if len(self.paths) != leaves:
            self.found["paths"].fail(f"{leaves} paths, one for each leaf")
        if self.in_spec.type is not tuple or (
            self.in_spec.num_children != len(self.arguments)
        ):
            self.found["inputs"].fail("a tuple with one item for each argument")
        self.numbers = frozenset(self.found["numbers"].each(self._leaf))
        self.constants = self._constants()
        apart = self.numbers | self.constants.keys()
        self.tensors = [i for i in range(leaves) if i not in apart]
        if len(self.tensors) != len(graph.operands) or graph.captures:
            part.fail("a leaf for each operand of the graph")

    def _check_names(self) -> None:
        part = self.found["arguments"]
        if len(set(self.arguments)) < len(self.arguments):
            part.fail("names that differ")
        for name in self.arguments[self.positional :]:
            if not name.isidentifier() or iskeyword(name):
                part.fail("names that are identifiers")
        own = [n for n in self.arguments[: self.positional] if n.isidentifier()]
        if any(map(iskeyword, own)):
            part.fail("names that are no words of Python")

    def _leaf(self, part: Part) -> int:
        return part.integer(0, max(self.in_spec.num_leaves - 1, 0))

    def _constants(self) -> dict[int, Specialization]:
        constants: dict[int, Specialization] = {}
        for row in self.found["constants"].items():
            found = row.members(["leaf", "value"])
            leaf = self._leaf(found["leaf"])
            if leaf in constants or leaf in self.numbers:
                row.fail("another leaf")
            value = self.statics.value(found["value"])
            constants[leaf] = Specialization(self.paths[leaf], value)
        return constants

    def module(self, guards: GuardSet) -> GraphModule:
        sources = dict(map(self._source, self.found["sources"].items()))
        self._check_told(sources)
        return GraphModule(
            self.graph,
            self.in_spec,
            self.out_spec,
            run=self._run(),
            as_value=argument_value,
            specializations=self.constants,
            numbers=self.numbers,
            sources=sources,
            guards=guards,
            texts=self.paths,
        )

    def _source(self, part: Part) -> tuple[Symbol, Source | ComputedSource]:
        if "size" not in part.named():
            return self._place(part)
        found = part.members(["symbol", "size", "of"])
        size = self.symbols.size(found["size"])
        if not isinstance(size, SymInt):
            found["size"].fail("a size over symbols")
        places = dict(map(self._place, found["of"].items()))
        return self._told_symbol(found["symbol"]), ComputedSource(size, places)

    def _place(self, part: Part) -> tuple[Symbol, Source]:
        found = part.members(["symbol", "leaf", "axis", "factor", "offset"])
        leaf = self._leaf(found["leaf"])
        axes = 0
        if leaf in self.tensors:
            axes = self.graph.operands[self.tensors.index(leaf)].type.ndim
        axis = None
        if found["axis"].value is not None:
            axis = found["axis"].integer(0, axes - 1)
        elif axes or leaf in self.constants:
            found["axis"].fail("an axis of the argument")
        factor = found["factor"].integer(1)
        offset = found["offset"].integer(-(1 << 62), 1 << 62)
        return self._told_symbol(found["symbol"]), Source(leaf, axis, factor, offset)

    def _told_symbol(self, part: Part) -> Symbol:
        symbol = self.symbols.symbol(part)
        if symbol not in self.symbols.inputs:
            part.fail("a symbol that has a source")
        return symbol

    def _check_told(self, sources: Mapping[Symbol, Any]) -> None:
        """Check that each call tells all symbols of the graph, and of the conditions
        that it is checked against."""
        known: dict[Symbol, Size] = dict.fromkeys(sources, 0)
        for var in self.graph.operands:
            match_shapes(var.type.shape, var.type.shape, known)
        wanted = [v.node.symbol for v in self.graph.symbols]
        if any(s not in known for s in (*wanted, *self.symbols.inputs)):
            self.found["sources"].fail("a source for each symbol")

    def _run(self) -> Run:
        graph, found = self.graph, self.found
        results = found["results"].integer(0, len(graph.outputs))
        if self.out_spec.num_leaves != results:
            found["outputs"].fail(f"a structure of {results} leaves")
        written = found["written"].each(self._target)
        rest = graph.outputs[results:]
        if len(written) != len(rest) or len(set(written)) < len(written):
            found["written"].fail(f"{len(rest)} operands or attributes")
        for target, arg in zip(written, rest, strict=True):
            if not same_type(self._type(target), arg.type):
                found["written"].fail("targets of the types that are written")
        same: dict[int, int] = {}
        for row in found["same"].items():
            result, operand = row.items(2)
            at = result.integer(0, results - 1)
            same[at] = operand.integer(0, len(graph.operands) - 1)
        numbers = found["number_results"].each(lambda p: p.integer(0, results - 1))
        if any(graph.outputs[i].type.shape for i in numbers):
            found["number_results"].fail("results without axes")
        return Run(results, written, same, frozenset(numbers))

    def _target(self, part: Part) -> int | str:
        if isinstance(part.value, str):
            part.known(self.graph.attributes, "an attribute of the graph")
            return part.value
        return part.integer(0, len(self.graph.operands) - 1)

    def _type(self, target: int | str) -> Any:
        if isinstance(target, int):
            return self.graph.operands[target].type
        [node] = [n for n in self.graph.nodes if n.op is None and n.name == target]
        return node.results[0].type


_SIGNATURE: Final = (
    *("arguments", "positional", "inputs", "outputs", "paths", "numbers"),
    *("constants", "sources", "results", "written", "same", "number_results"),
)
