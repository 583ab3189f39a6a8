"""Schemas: what an operator is called with and gives, as text and plain data.

A schema of a call names the arguments as the user wrote them; one of a node names what
the node passes, by roles. Both can be printed, compared, stored, and checked against
other arguments.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.errors import (
    ArgumentTypeError,
    Mismatch,
    ProgramFormatError,
    SchemaError,
)
from hopflow.graph.core import Graph, Node
from hopflow.graph.printer import Names
from hopflow.graph.types import TensorType
from hopflow.hops.subgraphs import shown
from hopflow.ops.opdef import as_operand
from hopflow.tensor import asarray
from hopflow.trace.captures import is_written
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import check_arity, name_of, user_env
from hopflow.trace.tracer import Tracer, trace_into


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the arguments or results, or a captured tensor.

    path     how a user would write it: "operands[0]"; of a node the name of the input
    kind     "tensor", "number", "function" or "static"; of a node its role
    type     "f32[n, 4]"; of a static one its text; "" of a function
    written  whether the call writes to it
    """

    path: str
    kind: str
    type: str = ""
    written: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.type or self.kind}"


@dataclass(frozen=True, slots=True)
class Schema:
    """What an operator takes and gives.

    operator    its name
    arguments   the leaves of the arguments, in order
    captures    the tensors that its functions close over
    results     the leaves of what it returns
    structure   of (args, kwargs), a leaf as `*`; and that of the result
    functions   of each of its graphs the name, and "(x: f32[3]) -> f32[3]"
    options     of each static parameter of the node the name and the text
    """

    operator: str
    arguments: tuple[Argument, ...]
    captures: tuple[Argument, ...]
    results: tuple[Argument, ...]
    structure: str
    result_structure: str
    functions: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The paths of what a call writes."""
        own = (*self.arguments, *self.captures)
        return tuple(a.path for a in own if a.written)

    def __str__(self) -> str:
        rows = [(f"{a},", a.written) for a in self.arguments]
        if self.captures:
            rows += [("*,", False), *((f"{a},", a.written) for a in self.captures)]
        lines = [f"    {text}{'  # written' if w else ''}" for text, w in rows]
        given = "\n".join(["(", *lines, ")"]) if lines else "()"
        results = ", ".join(a.type for a in self.results)
        text = f"{self.operator}{given} -> {self.result_structure}"
        text += f" of {results}" if results else ""
        details = [f"    {name}{types}" for name, types in self.functions]
        details += [f"    {name} = {value}" for name, value in self.options]
        return "\n".join([f"{text}:" if details else text, *details])

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Check other arguments, given in the same way. A size that is a name is one
        size in all of them.

        Raises:
            SchemaError: they are of another structure, or a leaf of another kind, dtype
                or shape; it names each by its path.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        if shown(spec) != self.structure:
            raise SchemaError(
                self.operator,
                [Mismatch("(args, kwargs)", self.structure, shown(spec), "structure")],
            )
        sizes: dict[str, str] = {}
        rows = [
            Mismatch(own.path, own.type or own.kind, found.type or found.kind, why)
            for own, leaf in zip(self.arguments, leaves, strict=True)
            if (why := _difference(own, found := _described(own.path, leaf), sizes))
        ]
        if rows:
            raise SchemaError(self.operator, rows)

    # --- plain data ---

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, lists, strings and bools, as JSON has them."""
        found = asdict(self)
        for key, value in found.items():
            if isinstance(value, tuple):
                found[key] = [list(x) if isinstance(x, tuple) else x for x in value]
        return found

    @classmethod
    def from_dict(cls, data: Any) -> "Schema":
        """The schema that `to_dict` gave.

        Raises:
            ProgramFormatError: it is none.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ProgramFormatError(
                f"Schema: expected a dict of {', '.join(sorted(names))}, and found "
                f"{'other keys' if isinstance(data, Mapping) else type(data).__name__}."
            )

        def arguments(key: str) -> tuple[Argument, ...]:
            return tuple(map(_argument, _rows(data[key])))

        return cls(
            _text(data["operator"]),
            arguments("arguments"),
            arguments("captures"),
            arguments("results"),
            _text(data["structure"]),
            _text(data["result_structure"]),
            tuple(map(_pair, _rows(data["functions"]))),
            tuple(map(_pair, _rows(data["options"]))),
        )


def _wrong(found: object) -> ProgramFormatError:
    # By its type alone: what a stranger gives may be of any size, and depth.
    return ProgramFormatError(
        f"Schema: a part is {type(found).__name__}, which is none that `to_dict` gives."
    )


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise _wrong(found)
    return found


def _rows(found: object) -> Sequence[Any]:
    if not isinstance(found, list | tuple):
        raise _wrong(found)
    return found


def _argument(found: Any) -> Argument:
    keys = {f.name for f in fields(Argument)}
    if not isinstance(found, Mapping) or set(found) != keys:
        raise _wrong(found)
    if type(found["written"]) is not bool:
        raise _wrong(found["written"])
    texts = {key: _text(found[key]) for key in keys - {"written"}}
    return Argument(**texts, written=found["written"])


def _pair(found: Any) -> tuple[str, str]:
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise _wrong(found)
    return _text(found[0]), _text(found[1])


# --- calls ----------------------------------------------------------------------------


def _described(path: str, leaf: Any) -> Argument:
    if isinstance(leaf, TensorType):
        return Argument(path, "tensor", str(leaf))
    if isinstance(leaf, Value):
        return Argument(path, "tensor", str(leaf.type))
    if isinstance(leaf, np.ndarray | np.generic):
        return Argument(path, "tensor", str(asarray(leaf).type))
    if isinstance(leaf, bool | int | float):
        return Argument(path, "number", str(as_operand("schema", path, leaf).type))
    if callable(leaf) and not isinstance(leaf, type):
        return Argument(path, "function")
    return Argument(path, "static", repr(leaf))


_TYPE: Final = re.compile(r"(\w+)\[(.*)\]")


def _difference(own: Argument, found: Argument, sizes: dict[str, str]) -> str:
    """Why an argument is not as it is to be; "" if it is."""
    # A number may be given for a tensor of no axes, and the other way round.
    data = {own.kind, found.kind} == {"tensor", "number"}
    if own.kind != found.kind and not data:
        return f"{own.kind} != {found.kind}"
    a, b = _TYPE.fullmatch(own.type), _TYPE.fullmatch(found.type)
    if a is None or b is None:
        return "" if own.type == found.type else "value"
    if a[1] != b[1]:
        return "dtype"
    ours, theirs = (m[2].split(", ") if m[2] else [] for m in (a, b))
    if len(ours) != len(theirs):
        return f"rank {len(ours)} != {len(theirs)}"
    for axis, (n, m) in enumerate(zip(ours, theirs, strict=True)):
        known = sizes.setdefault(n, m) if n.isidentifier() else n
        if known != m and (n.isidentifier() or n.isdecimal()):
            return f"axis {axis}: {known} != {m}"
    return ""


def schema_of_call(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    op: Any = None,
    declared: Callable[..., Any] | None = None,
) -> Schema:
    """The schema of `f(*args, **kwargs)`, which is traced for it; nothing runs.

    Args:
        op: The operator; None: the first one that the call uses, if there is one.
        declared: The function whose parameters name the arguments; None: `f`.

    Raises:
        HopflowError: what the call itself raises.
    """
    leaves, spec = pytree.flatten((args, kwargs))
    paths = _paths(declared or f, args, kwargs)
    outer = current()
    marks = mark(outer) if isinstance(outer, Tracer) else []
    parent = None if outer.is_eager else outer
    tracer = Tracer(parent, "schema", env=user_env())
    given = list(leaves)
    tensors: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = asarray(leaf)
        if isinstance(leaf, Value | TensorType):
            type_ = leaf if isinstance(leaf, TensorType) else leaf.type
            given[i] = tensors[i] = tracer.operand(type_, f"x{i}")
    try:
        own_args, own_kwargs = pytree.unflatten(spec, given)
        result = trace_into(tracer, lambda: f(*own_args, **own_kwargs), ())
        rows = [_described(path, x) for path, x in zip(paths, leaves, strict=True)]
        arguments = tuple(
            replace(a, written=i in tensors and is_written(tensors[i]))
            for i, a in enumerate(rows)
        )
        return _traced_schema(tracer, op, name_of(f), arguments, shown(spec), result)
    finally:
        rollback(marks)


def _traced_schema(
    tracer: Tracer,
    op: Any,
    name: str,
    arguments: tuple[Argument, ...],
    structure: str,
    result: Any,
) -> Schema:
    """The rest of what a trace says of its call: captures, results, the node."""
    nodes = [n for n in tracer.graph.nodes if _is_of(n, op)]
    used = op or (nodes[0].op if nodes else None)
    written = {id(c) for c in tracer.written_captures().values()}
    captures = tuple(
        Argument(c.input.node.name, "tensor", str(c.input.type), id(c) in written)
        for c in tracer.captures.values()
    )
    found, spec = pytree.flatten(result)
    paths = pytree.leaf_paths(spec, "result")
    results = tuple(_described(p, x) for p, x in zip(paths, found, strict=True))
    functions, options = _details(nodes[0]) if nodes else ((), ())
    return Schema(
        getattr(used, "name", name),
        arguments,
        captures,
        results,
        structure,
        shown(spec),
        functions,
        options,
    )


def _is_of(node: Node, op: Any) -> bool:
    return bool(node.graphs) if op is None else node.op is op


def _paths(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """How a user would write each leaf of (args, kwargs)."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = range(len(args) - len(names))
            names += [f"{parameter.name}[{i}]" for i in rest]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    names = names[: len(args)]
    found: list[str] = []
    # A pytree has the values of a dict in the order of their names.
    for name, tree in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        found += pytree.leaf_paths(pytree.structure(tree), name)
    return found


# --- nodes ----------------------------------------------------------------------------


_Pairs = tuple[tuple[str, str], ...]


def _details(node: Node) -> tuple[_Pairs, _Pairs]:
    """The graphs of a node, and its other params."""
    functions = tuple((key, _signature(graph)) for key, graph in node.graphs.items())
    graphs = {key.partition("[")[0] for key in node.graphs}
    options = tuple(
        (key, Names().static(value, {}))
        for key, value in node.params.items()
        if key not in graphs
    )
    return functions, options


def _signature(graph: Graph) -> str:
    inputs = ", ".join(f"{v.node.name}: {v.type}" for v in graph.inputs)
    return f"({inputs}) -> ({', '.join(map(str, graph.out_types))})"


def schema_of_node(node: Node) -> Schema:
    """The schema of a node: what it passes, by roles. It writes nothing: what its call
    wrote are results of it."""
    signature = node.op.signature(node)
    names: list[str] = list(signature.args)
    for region in reversed(signature.regions):
        for var, port in zip(region.graph.inputs, region.inputs, strict=True):
            if port.at is not None:
                names[port.at] = var.node.name
    rows = zip(names, signature.args, node.args, strict=True)
    arguments = tuple(Argument(n, role, str(a.type)) for n, role, a in rows)
    results = tuple(
        Argument(f"result[{i}]", role, str(var.type))
        for i, (role, var) in enumerate(
            zip(signature.results, node.results, strict=True)
        )
    )
    functions, options = _details(node)
    given = shown(pytree.structure(((0,) * len(arguments), {})))
    returned = shown(pytree.structure((0,) * len(results)))
    return Schema(
        node.op.name, arguments, (), results, given, returned, functions, options
    )


def schema(f: Any, *args: Any, **kwargs: Any) -> Schema:
    """What the operator of a call `f(*args, **kwargs)` takes and gives, or a node does.

        print(hf.schema(hf.cond, pred, true_fn, false_fn, (x,)))

    Args:
        f: A function that uses an operator, an operator, or a node of a graph.
        args, kwargs: What `f` is called with; types (`hf.spec`) may stand for tensors.
            Nothing runs: the functions are traced.

    Raises:
        ArgumentTypeError: `f` is none of these.
    """
    if isinstance(f, Node) and hasattr(f.op, "signature"):
        return schema_of_node(f)
    if not callable(f) or isinstance(f, type):
        raise ArgumentTypeError(
            "schema: `f` must be a function that uses an operator, an operator, or a "
            f"node of one, and is `{type(f).__name__}`."
        )
    own: Any = getattr(f, "schema", None)
    found: Schema
    if callable(own):  # an operator, which knows the names of its arguments
        found = own(*args, **kwargs)
        return found
    if not kwargs:
        check_arity("schema", f, args)
    return schema_of_call(f, args, kwargs)
