"""Values that are no tensors, as plain data and back: parameters, static arguments.

None, truth values, integers and strings are what they are in JSON, and a tuple is a
list. All others are an object whose only member says the kind: `{"dtype": "f32"}`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hopflow.dtypes import ALL, DType
from hopflow.errors import ExportError
from hopflow.export.fields import MAX_DIGITS, Part
from hopflow.export.sizes import SymbolReader, SymbolWriter, read_float
from hopflow.graph.core import Graph
from hopflow.graph.types import FLOAT_TYPE, SYMBOL_TYPE, TensorType, shared
from hopflow.hops.reverse_modes import Checkpoint
from hopflow.ops.messages import Message
from hopflow.progress import Progress
from hopflow.symbolic.ranges import INT64, NON_NEGATIVE
from hopflow.symbolic.size import Size, SymFloat, SymInt

MAX_DEPTH: Final = 32  # of tuples in tuples
MAX_RANK: Final = 64
MAX_PRODUCT: Final = 1024
"""Terms of the product of the sizes in a tuple, if it is written out."""
DTYPES: Final = {dtype.short: dtype for dtype in ALL}
EXTENTS: Final = NON_NEGATIVE & INT64
NUMBERS: Final = (SYMBOL_TYPE, FLOAT_TYPE)
"""The types of Python numbers that are symbols, which are told by identity."""


# --- writing --------------------------------------------------------------------------


@dataclass(slots=True)
class StaticWriter:
    """Writes values; types and graphs as numbers in tables of the file."""

    symbols: SymbolWriter
    types: list[Any] = field(default_factory=list)
    graph: Callable[[Graph], int] = lambda _: 0
    _numbers: dict[Any, int] = field(default_factory=dict)

    def type(self, type_: TensorType) -> int:
        """The number of a type."""
        sizes = [self.symbols.size(n) for n in type_.shape]
        told = {"weak": type_.weak, "number": any(type_ is x for x in NUMBERS)}
        row: dict[str, Any] = {"dtype": type_.dtype.short, "shape": sizes}
        row |= {key: True for key, holds in told.items() if holds}
        key = repr(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.types)
            self.types.append(row)
        return self._numbers[key]

    def value(self, value: Any) -> Any:
        """
        Raises:
            ExportError: no file can hold it.
        """
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int and abs(value) < 10 ** (MAX_DIGITS - 2):
            return value
        if kind is tuple:
            return [self.value(item) for item in value]
        write = _WRITERS.get(kind)
        if write is None:
            raise ExportError(
                f"a `{kind.__name__}` is no data that a file can hold. Use numbers, "
                "strings, dtypes, None and tuples of them."
            )
        return write(self, value)


def _progress(_: StaticWriter, value: Progress) -> Any:
    if value.sink is not None:
        raise ExportError(
            f"`progress` is the function `{value.name}`, which is Python. Give a label "
            "for a bar, or leave it out."
        )
    return {"progress": [value.name, value.each, value.first]}


_WRITERS: Final[dict[type, Callable[[StaticWriter, Any], Any]]] = {
    float: lambda _, value: {"float": value.hex()},
    DType: lambda _, value: {"dtype": value.short},
    TensorType: lambda writer, value: {"type": writer.type(value)},
    SymInt: lambda writer, value: {"size": writer.symbols.size(value)},
    SymFloat: lambda writer, value: {"number": writer.symbols.size(value)},
    Graph: lambda writer, value: {"graph": writer.graph(value)},
    Message: lambda _, value: {"message": str(value)},
    Checkpoint: lambda _, value: {"checkpoint": value.count},
    Progress: _progress,
}


# --- reading --------------------------------------------------------------------------


@dataclass(slots=True)
class StaticReader:
    """Reads values; types and graphs by their numbers in tables of the file.

    kinds   the values that there may be beside those of JSON
    """

    symbols: SymbolReader
    types: list[TensorType] = field(default_factory=list)
    graphs: Sequence[Graph] = ()
    kinds: Collection[str] = (
        *("float", "dtype", "type", "size", "number", "graph"),
        *("message", "checkpoint", "progress"),
    )

    @property
    def of_data(self) -> "StaticReader":
        """One of data alone, which users give and compare: keys, constants."""
        return StaticReader(self.symbols, kinds=("float", "dtype"))

    def read_types(self, part: Part) -> None:
        self.types += part.each(self._type)

    def _type(self, part: Part) -> TensorType:
        found = part.members(["dtype", "shape"], ["weak", "number"])
        dtype = found["dtype"].known(DTYPES, "a dtype")
        if len(found["shape"].items()) > MAX_RANK:
            found["shape"].fail(f"at most {MAX_RANK} axes")
        shape = found["shape"].each(self._extent)
        _check_product(shape, part)
        weak = "weak" in found and found["weak"].flag()
        type_ = shared(TensorType(dtype, shape, weak))
        if "number" in found and found["number"].flag():
            if not weak or type_ not in NUMBERS:
                part.fail("the type of a number")
            return NUMBERS[NUMBERS.index(type_)]
        return type_

    def _extent(self, part: Part) -> Size:
        size = self.symbols.size(part)
        if isinstance(size, int) and size not in EXTENTS:
            part.fail("a size, which is not negative")
        return size

    def type(self, part: Part) -> TensorType:
        return part.within(self.types, "a type")

    def value(self, part: Part, depth: int = 0) -> Any:
        """The value that `StaticWriter.value` has written."""
        value = part.value
        kind = type(value)
        if value is None or kind in (bool, str, int):
            return value
        if depth > MAX_DEPTH:
            part.fail("tuples that are less deep")
        if kind is list:
            found = tuple([self.value(item, depth + 1) for item in part.items()])
            _check_product(found, part)
            return found
        members = part.named()
        if len(members) != 1:
            part.fail("an object with one member, which says the kind")
        [(key, inner)] = members.items()
        if key not in self.kinds:
            part.fail("a kind of value that there is")
        return _READERS[key](self, part, inner)


def _check_product(sizes: Sequence[Any], part: Part) -> None:
    """Refuse sizes of which none is large, and the product is."""
    total = 1
    for size in sizes:
        if isinstance(size, SymInt):
            total *= len(size.expression)
    if total > MAX_PRODUCT:
        part.fail("sizes whose product is a smaller expression")


def _read_progress(_: StaticReader, __: Part, inner: Part) -> Progress:
    label, each, first = inner.items(3)
    return Progress(label.text(), None, each.integer(1), first.integer())


_READERS: Final[dict[str, Callable[[StaticReader, Part, Part], Any]]] = {
    "float": lambda _, part, __: read_float(part),
    "dtype": lambda _, __, inner: inner.known(DTYPES, "a dtype"),
    "type": lambda reader, _, inner: reader.type(inner),
    "size": lambda reader, _, inner: reader.symbols.size(inner),
    "number": lambda reader, _, inner: reader.symbols.number(inner),
    "graph": lambda reader, _, inner: inner.within(reader.graphs, "a graph before it"),
    "message": lambda _, __, inner: Message(inner.text()),
    "checkpoint": lambda _, __, inner: Checkpoint(inner.integer(1)),
    "progress": _read_progress,
}
