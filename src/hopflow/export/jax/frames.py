"""Evaluations of graphs by JAX: each node by its rule, each value an array of JAX.

JAX traces the evaluation, so what a rule returns may be a tracer. Sizes are Python
numbers, or symbolic dimensions of `jax.export`, wherever the arguments' shapes tell
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from hopflow.errors import ExportError, GraphError
from hopflow.export.jax.library import library
from hopflow.export.jax.sizes import Number, as_array, is_dimension, number
from hopflow.export.symbols import Symbols
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, plain_symbol
from hopflow.graph.types import Shape
from hopflow.symbolic.size import Size, SymFloat, SymInt

Array: TypeAlias = Any
"""A `jax.Array`, or a tracer of one."""

Asserts: TypeAlias = Literal["drop", "checkify"]
ASSERTS: Final = ("drop", "checkify")


@dataclass(eq=False)
class Translation:
    """How one program is evaluated.

    asserts    what becomes of checks: see `ExportedProgram.to_jax`
    rule       how a node is evaluated: one function for all
    functions  of shared graphs, by what they are and what they close over
    """

    asserts: Asserts
    rule: "Callable[[Site], Sequence[Array]]"
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)


class Context(NamedTuple):
    """What an evaluation and those of inner graphs share.

    axes     of a mesh, along which all values vary: within `jax.shard_map`, a loop must
             not have a carry that varies only after some step, and a derivative must
             not sum over devices that take different branches
    around   the calls whose rules this is within, the innermost last: see `custom`
    """

    translation: Translation
    axes: frozenset[str] = frozenset()
    around: tuple[Any, ...] = ()

    def varying(self, value: Array) -> Array:
        """A value as one that varies along all axes of the mesh."""
        if not self.axes:
            return value
        missing = self.axes - axes_of(value)
        if not missing:
            return value
        return library().lax.pcast(value, tuple(sorted(missing)), to="varying")


def axes_of(value: Array) -> frozenset[str]:
    """The axes of a mesh along which a value varies."""
    type_ = library().typeof(value)
    found: Any = getattr(type_, "manual_axis_type", None)  # since JAX 0.12
    axes: frozenset[str] = (
        getattr(type_, "vma", frozenset()) if found is None else found.varying
    )
    return axes


class Frame:
    """One evaluation of a graph.

    state    the tensors that the program holds, for the outermost graph
    values   of its vars so far
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        args: Sequence[Number],
        state: Mapping[str, Array] | None = None,
    ) -> None:
        self.context = context
        self.graph = graph
        self.state = state or {}
        self.values: dict[Var, Array] = {}
        self.symbols: Symbols[Number] = Symbols()
        for var, arg in zip(graph.inputs, args, strict=True):
            if var.node.symbol is None:
                self.store(var, arg)
            elif arg is not None:  # the shapes of other inputs may tell it
                self.symbols[var.node.symbol] = arg

    def store(self, var: Var, value: Array) -> None:
        """Note a value, and what its shape says of the symbols of its type."""
        self.values[var] = value
        for axis, size in enumerate(var.type.shape):
            symbol = plain_symbol(size)
            if symbol is not None:
                self.symbols.offer(symbol, partial(_axis_size, value, axis))

    def value(self, arg: Arg | Size | SymFloat) -> Array:
        """What an operand is, as an array."""
        if isinstance(arg, Constant):
            constant = np.asarray(arg.value).astype(arg.type.dtype.dtype)
            return self.context.varying(library().numpy.asarray(constant))
        if not isinstance(arg, Var):
            return self.context.varying(as_array(self.size(arg)))
        known = self.values.get(arg)
        if known is None:
            if arg.node.symbol is None:
                raise GraphError(f"{self.graph.name}: {arg!r} is read before it is.")
            known = as_array(self.symbols[arg.node.symbol])
            known = self.values[arg] = self.context.varying(known)
        return known

    def given(self, arg: Any) -> Number:
        """What an input of an inner graph gets: numbers that are known stay numbers, so
        that sizes in there are."""
        if isinstance(arg, Constant):
            return arg.value if not arg.type.dtype.is_float else self.value(arg)
        if isinstance(arg, Var):
            symbol = arg.node.symbol
            return self.value(arg) if symbol is None else self.symbols[symbol]
        return self.size(arg)

    def size(self, size: Size | SymFloat) -> Number:
        """A size, or another symbolic number."""
        return number(size, self.symbols.__getitem__)

    def run(self) -> list[Array]:
        """The outputs.

        Raises:
            ExportError: JAX has nothing for a node; the message names it and the user's
                line.
        """
        for node in self.graph.nodes:
            if node.op is None:
                self.store(node.results[0], self.state[node.name])
            else:
                self.evaluate(node)
        return [self.value(arg) for arg in self.graph.outputs]

    def evaluate(self, node: Node) -> None:
        try:
            results = self.context.translation.rule(Site(self, node))
        except ExportError as error:
            raise located(node, error) from error
        except library().extend.core.InconclusiveDimensionOperation as error:
            first = str(error).splitlines()[0]
            raise located(node, ExportError(f"{first} JAX does not know.")) from error
        results = list(map(self.context.varying, results))
        if node.symbol is not None:
            self.symbols[node.symbol] = results[0]
        for var, value in zip(node.results, results, strict=True):
            self.store(var, value)


def _axis_size(value: Array, axis: int) -> Number:
    return value.shape[axis]


def located(node: Node, error: ExportError) -> ExportError:
    """The error with the operation and the user's line."""
    if error.operation:
        return error
    name = node.op.name
    where = "" if node.line is None else f" ({node.line})"
    return ExportError(f"to_jax: `{name}`{where} cannot be in JAX: {error}", name)


class Site:
    """A node that is being evaluated: what its rule may ask and do.

    types    of its operands
    results  the types of its results
    """

    def __init__(self, frame: Frame, node: Node) -> None:
        self.frame = frame
        self.node = node
        self.translation = frame.context.translation
        self.jax = library()
        self.jnp, self.lax = self.jax.numpy, self.jax.lax
        self.types = [a.type for a in node.args]
        self.results = [v.type for v in node.results]

    @property
    def operands(self) -> list[Array]:
        return [self.frame.value(a) for a in self.node.args]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.node.params

    def run(self, graph: Graph, args: Sequence[Number]) -> list[Array]:
        """The outputs of an inner graph."""
        return Frame(self.frame.context, graph, args).run()

    # --- sizes ---

    def size(self, size: Size) -> Number:
        return self.frame.size(size)

    def dimension(self, size: Size) -> Any:
        """A size as one of an array's.

        Raises:
            ExportError: JAX traces what it is computed from.
        """
        found = self.frame.size(size)
        if is_dimension(found):
            return found
        if isinstance(found, self.jax.core.Tracer):
            raise ExportError(
                f"the size `{size}` is computed from a number that JAX traces, and "
                "sizes of its arrays are known when it does. Give the number as a "
                "Python int, under `jax.jit` by `static_argnums`."
            )
        return int(found)

    def shape(self, shape: Shape) -> tuple[Any, ...]:
        return tuple([self.dimension(n) for n in shape])

    def is_static(self, *sizes: Size) -> bool:
        return all(
            not isinstance(n, SymInt) or isinstance(self.size(n), int) for n in sizes
        )

    # --- checks ---

    @property
    def is_checked(self) -> bool:
        """Whether checks are wanted."""
        return self.translation.asserts == "checkify"

    def check(self, holds: Array, message: str) -> None:
        """Check that `holds` is true everywhere, if checks are wanted."""
        if not self.is_checked:
            return
        where = "" if self.node.line is None else f"  ({self.node.line})"
        text = f"{message}{where}".replace("{", "{{").replace("}", "}}")
        self.jax.experimental.checkify.check(self.jnp.all(holds), text)
