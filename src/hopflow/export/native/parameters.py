"""The parameters of the C function that a program becomes.

    def scale(x, factor: float): ...          x: f32[rows, 4]

    int scale(int64_t rows, const float *x, double factor, float *result, ...)

Each symbol of the sizes is a parameter, then each argument, each tensor that the
program holds and writes, and each result.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.export.exported import Exported
from hopflow.graph.core import Graph
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.rewriting import clone
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.symbolic.size import Symbol

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Role: TypeAlias = Literal["size", "number", "input", "updated", "output", "made"]
"""A size or a number by value; an array that is read, one that is read and written, one
that is written, and one that the program makes in the workspace."""

OWN: Final = ("workspace", "workspace_bytes", "details")
"""The names of the parameters that every function has."""


@dataclass(frozen=True, eq=False, slots=True)
class Parameter:
    """A parameter of the C function.

    name   in C
    path   as a user of Python writes it
    type   of the array; of a size or a number what it is as a tensor
    """

    name: str
    path: str
    role: Role
    type: TensorType

    @property
    def is_by_value(self) -> bool:
        return self.role in ("size", "number")


@dataclass(eq=False, slots=True)
class Parameters:
    """The parameters of a program.

    all       in the order of C
    symbols   where the value of a symbol comes from: a size or a number, an array of
              no axes, or a computation
    operands  for each operand of the graph its parameter, or its data
    outputs   for each output of the graph its parameter
    initial   what the state that the program writes is at first, by parameter
    """

    all: list[Parameter] = field(default_factory=list)
    symbols: dict[Symbol, Parameter | ComputedSource] = field(default_factory=dict)
    operands: list[Parameter | NDArray] = field(default_factory=list)
    outputs: list[Parameter] = field(default_factory=list)
    initial: dict[Parameter, NDArray] = field(default_factory=dict)

    @property
    def of_sizes(self) -> Iterator[Parameter]:
        """Those on which sizes may depend."""
        told = list(self.symbols.values())
        return (p for p in self.all if p.is_by_value or p in told)


def program_graph(program: Exported) -> Graph:
    """The graph of a program as a function of its arguments and of the tensors that it
    holds, without the results that are arguments."""
    graph = clone(program.module.graph)
    for node in [n for n in graph.nodes if n.kind == "get_attr"]:
        graph.nodes.remove(node)
        node.kind, node.section = "placeholder", "operand"
        graph.inputs += node.results
    same = [i for i, found in enumerate(program.signature.outputs) if found.same]
    outputs = enumerate(graph.outputs)
    graph.outputs = tuple([arg for i, arg in outputs if i not in same])
    return graph


def parameters_of(program: Exported, graph: Graph, made: set[int]) -> Parameters:
    """The parameters of a program.

    Args:
        graph: That of `program_graph`.
        made: The positions of the outputs whose sizes only a run knows.
    """
    return _Reading(program, graph, made).parameters()


class _Reading:
    """The names of one program's parameters."""

    def __init__(self, program: Exported, graph: Graph, made: set[int]) -> None:
        self.program, self.graph, self.made = program, graph, made
        self.found = Parameters()
        self._taken = set(OWN)

    def parameters(self) -> Parameters:
        self.sizes()
        leaves = self.arguments()
        self.state()
        self.tell_symbols(leaves)
        self.results()
        return self.found

    def add(self, name: str, path: str, role: Role, type_: TensorType) -> Parameter:
        parameter = Parameter(self.fresh(name), path, role, type_)
        self.found.all.append(parameter)
        return parameter

    def fresh(self, path: str) -> str:
        """A new identifier of C, after a path; so is `<name>_shape`."""
        name = identifier(path)
        number, fresh = 1, name
        while not self._taken.isdisjoint((fresh, f"{fresh}_shape")):
            fresh, number = f"{name}_{number}", number + 1
        self._taken |= {fresh, f"{fresh}_shape"}
        return fresh

    def sizes(self) -> None:
        sources = self.program.module.sources
        for var in self.graph.symbols:
            symbol = var.node.symbol
            assert symbol is not None
            source = sources.get(symbol)
            if source is None or source.axis is not None:
                text = str(symbol)
                size = self.add(text, text, "size", SYMBOL_TYPE)
                self.found.symbols[symbol] = size

    def arguments(self) -> dict[int, Parameter]:
        """Add the arguments; returns them by the position of the leaf."""
        module, leaves = self.program.module, dict[int, Parameter]()
        for i, leaf in enumerate(self.program.signature.inputs):
            if i in module.constants:
                continue
            role: Role = "updated" if leaf.written else "input"
            if leaf.kind == "number":
                role = "number"
            type_ = SYMBOL_TYPE if leaf.type is None else leaf.type
            leaves[i] = self.add(leaf.path, leaf.path, role, type_)
            if i not in module.numbers:
                self.found.operands.append(leaves[i])
        return leaves

    def state(self) -> None:
        """Add the tensors that are held: those that are written as parameters."""
        attributes = self.program.module.graph.attributes
        for var in self.graph.operands[len(self.found.operands) :]:
            path = var.node.name
            data = np.ascontiguousarray(attributes[path]).reshape(var.type.shape)
            if path in self.program.signature.written:
                parameter = self.add(path, path, "updated", var.type)
                self.found.operands.append(parameter)
                self.found.initial[parameter] = data
            else:
                self.found.operands.append(data)

    def tell_symbols(self, leaves: Mapping[int, Parameter]) -> None:
        """Note where symbols that are no sizes come from."""

        def tell(symbol: Symbol, source: Source | ComputedSource) -> None:
            if isinstance(source, ComputedSource):
                for inner, own in source.sources.items():
                    tell(inner, own)
                self.found.symbols[symbol] = source
            elif source.axis is None:
                self.found.symbols[symbol] = leaves[source.leaf]

        for symbol, source in self.program.module.sources.items():
            tell(symbol, source)

    def results(self) -> None:
        signature = self.program.signature
        paths = [found.path for found in signature.outputs if not found.same]
        written = {p.path: p for p in self.found.all if p.role == "updated"}
        for i, arg in enumerate(self.graph.outputs):
            if i < len(paths):
                role: Role = "made" if i in self.made else "output"
                found = self.add(paths[i], paths[i], role, arg.type)
            else:
                found = written[signature.written[i - len(paths)]]
            self.found.outputs.append(found)


def identifier(text: str) -> str:
    """A text as an identifier of C: `params['w'][0]` is `params_w_0`."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", text).strip("_") or "program"
    if name[0].isdigit():
        name = f"n{name}"
    return f"{name}_" if name in _RESERVED else name


def c_name(text: str) -> str:
    """The name of a program as that of a C function, which no library has.

    `sin` is `sin_`: the C library's own calls would find ours.
    """
    name = identifier(text)
    is_taken = name in _LIBRARY or (name[-1] in "fl" and name[:-1] in _LIBRARY)
    if name.startswith("hf_"):  # as our own routines
        name = f"n_{name}"
    return f"{name}_" if is_taken else name


_LIBRARY: Final = frozenset(
    (
        "abs abort acos acosh aligned_alloc asin asinh atan atan2 atanh atexit bsearch "
        "calloc cbrt ceil copysign cos cosh div erf erfc exit exp exp2 expm1 fabs fdim "
        "floor fma fmax fmin fmod free frexp getenv hypot ilogb index ldexp lgamma log "
        "log10 log1p log2 logb lrint lround malloc memchr memcmp memcpy memmove memset "
        "modf nan nearbyint nextafter pow printf puts qsort rand random read realloc "
        "remainder remquo rint round roundeven scalbln scalbn select signal sin sinh "
        "sleep sqrt srand stat strlen system tan tanh tgamma time trunc write"
    ).split()
)
"""Functions of the C library; its mathematical ones also end in `f` and `l`."""

_RESERVED: Final = frozenset(
    (
        "alignas alignof and and_eq asm auto bitand bitor bool break case catch char "
        "class compl concept const consteval constexpr constinit const_cast continue "
        "co_await co_return co_yield decltype default delete do double dynamic_cast "
        "else enum explicit export extern false float for friend goto if inline int "
        "long main mutable namespace new noexcept not not_eq nullptr operator or or_eq "
        "private protected public register reinterpret_cast requires restrict return "
        "short signed sizeof static static_assert static_cast struct switch template "
        "this thread_local throw true try typedef typeid typename typeof union "
        "unsigned using virtual void volatile wchar_t while xor xor_eq"
    ).split()
)
"""Words of C and C++."""

C_TYPES: Final = {
    dtypes.bool_: "bool",
    **{dtypes.as_dtype(f"int{n}"): f"int{n}_t" for n in (8, 16, 32, 64)},
    **{dtypes.as_dtype(f"uint{n}"): f"uint{n}_t" for n in (8, 16, 32, 64)},
    dtypes.float16: "uint16_t",
    dtypes.bfloat16: "uint16_t",
    dtypes.float32: "float",
    dtypes.float64: "double",
}
"""Of elements; those of 16-bit floats are their bits."""
