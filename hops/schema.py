"""Schemas: the arguments and results of an operator, as text and plain data.

The schema of a call names the arguments as the user wrote them; that of a node names
the args of the node, by roles. Both can be printed, compared, stored, and used to check
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

    path     how a user would write it: "operands[0]"; for a node the name of the input
    kind     "tensor", "number", "function" or "static"; for a node its role
    type     "f32[n, 4]"; the text of a static argument; "" for a function
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
    """The arguments and results of an operator.

    operator    its name
    arguments   the leaves of the arguments, in order
    captures    the tensors that its functions close over
    results     the leaves of its result
    structure   of (args, kwargs), with a leaf as `*`; also `result_structure`
    functions   the name of each of its graphs, and "(x: f32[3]) -> f32[3]"
    options     the name and the text of each static parameter of the node
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
        """Return the paths of the tensors that a call writes to."""
        inputs = (*self.arguments, *self.captures)
        return tuple(a.path for a in inputs if a.written)

    def __str__(self) -> str:
        rows = [(f"{a},", a.written) for a in self.arguments]
        if self.captures:
            rows += [("*,", False), *((f"{a},", a.written) for a in self.captures)]
        lines = [f"    {text}{'  # written' if w else ''}" for text, w in rows]
        signature = "\n".join(["(", *lines, ")"]) if lines else "()"
        results = ", ".join(a.type for a in self.results)
        text = f"{self.operator}{signature} -> {self.result_structure}"
        text += f" of {results}" if results else ""
        details = [f"    {name}{types}" for name, types in self.functions]
        details += [f"    {name} = {value}" for name, value in self.options]
        return "\n".join([f"{text}:" if details else text, *details])

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Check other arguments against this schema. A size that is a name must be the
        same size wherever it occurs.

        Raises:
            SchemaError: their structure differs, or the kind, dtype or shape of a leaf;
                each is named by its path.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        if shown(spec) != self.structure:
            raise SchemaError(
                self.operator,
                [Mismatch("(args, kwargs)", self.structure, shown(spec), "structure")],
            )
        sizes: dict[str, str] = {}
        rows = [
            Mismatch(
                expected.path,
                expected.type or expected.kind,
                actual.type or actual.kind,
                reason,
            )
            for expected, leaf in zip(self.arguments, leaves, strict=True)
            if (
                reason := _difference(
                    expected, actual := _described(expected.path, leaf), sizes
                )
            )
        ]
        if rows:
            raise SchemaError(self.operator, rows)

    # --- plain data ---

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: dicts, lists, strings and bools, as in JSON."""
        data = asdict(self)
        for key, value in data.items():
            if isinstance(value, tuple):
                data[key] = [list(x) if isinstance(x, tuple) else x for x in value]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> "Schema":
        """Return the schema from which `to_dict` made this data.

        Raises:
            ProgramFormatError: the data has another form.
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


def _wrong(part: object) -> ProgramFormatError:
    # Only the type is shown: untrusted data may be of any size and depth.
    return ProgramFormatError(
        f"Schema: a part is {type(part).__name__}, which is none that `to_dict` gives."
    )


def _text(part: object) -> str:
    if not isinstance(part, str):
        raise _wrong(part)
    return part


def _rows(part: object) -> Sequence[Any]:
    if not isinstance(part, list | tuple):
        raise _wrong(part)
    return part


def _argument(part: Any) -> Argument:
    keys = {f.name for f in fields(Argument)}
    if not isinstance(part, Mapping) or set(part) != keys:
        raise _wrong(part)
    if type(part["written"]) is not bool:
        raise _wrong(part["written"])
    texts = {key: _text(part[key]) for key in keys - {"written"}}
    return Argument(**texts, written=part["written"])


def _pair(part: Any) -> tuple[str, str]:
    if not isinstance(part, list | tuple) or len(part) != 2:
        raise _wrong(part)
    return _text(part[0]), _text(part[1])


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


def _difference(expected: Argument, actual: Argument, sizes: dict[str, str]) -> str:
    """Return why an argument differs from the expected one; "" if it does not."""
    # A number may be passed for a 0-d tensor, and vice versa.
    data = {expected.kind, actual.kind} == {"tensor", "number"}
    if expected.kind != actual.kind and not data:
        return f"{expected.kind} != {actual.kind}"
    a, b = _TYPE.fullmatch(expected.type), _TYPE.fullmatch(actual.type)
    if a is None or b is None:
        return "" if expected.type == actual.type else "value"
    if a[1] != b[1]:
        return "dtype"
    shape, actual_shape = (m[2].split(", ") if m[2] else [] for m in (a, b))
    if len(shape) != len(actual_shape):
        return f"rank {len(shape)} != {len(actual_shape)}"
    for axis, (n, m) in enumerate(zip(shape, actual_shape, strict=True)):
        size = sizes.setdefault(n, m) if n.isidentifier() else n
        if size != m and (n.isidentifier() or n.isdecimal()):
            return f"axis {axis}: {size} != {m}"
    return ""


def schema_of_call(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    op: Any = None,
    declared: Callable[..., Any] | None = None,
) -> Schema:
    """Return the schema of `f(*args, **kwargs)`, which is traced for it; nothing runs.

    Args:
        op: The operator; None: the first one that the call uses, if there is one.
        declared: The function whose parameters name the arguments; None: `f`.

    Raises:
        HopflowError: the call raises it.
    """
    leaves, spec = pytree.flatten((args, kwargs))
    paths = _paths(declared or f, args, kwargs)
    outer = current()
    marks = mark(outer) if isinstance(outer, Tracer) else []
    parent = None if outer.is_eager else outer
    tracer = Tracer(parent, "schema", env=user_env())
    inputs = list(leaves)
    tensors: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = asarray(leaf)
        if isinstance(leaf, Value | TensorType):
            type_ = leaf if isinstance(leaf, TensorType) else leaf.type
            inputs[i] = tensors[i] = tracer.operand(type_, f"x{i}")
    try:
        inner_args, inner_kwargs = pytree.unflatten(spec, inputs)
        result = trace_into(tracer, lambda: f(*inner_args, **inner_kwargs), ())
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
    """Return the schema of a traced call, with captures, results, and the params of its
    node."""
    nodes = [n for n in tracer.graph.nodes if _is_of(n, op)]
    used = op or (nodes[0].op if nodes else None)
    written = {id(c) for c in tracer.written_captures().values()}
    captures = tuple(
        Argument(c.input.node.name, "tensor", str(c.input.type), id(c) in written)
        for c in tracer.captures.values()
    )
    leaves, spec = pytree.flatten(result)
    paths = pytree.leaf_paths(spec, "result")
    results = tuple(_described(p, x) for p, x in zip(paths, leaves, strict=True))
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
    """Return how a user would write each leaf of (args, kwargs)."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            indices = range(len(args) - len(names))
            names += [f"{parameter.name}[{i}]" for i in indices]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    names = names[: len(args)]
    paths: list[str] = []
    # A pytree orders the values of a dict by their keys.
    for name, tree in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        paths += pytree.leaf_paths(pytree.structure(tree), name)
    return paths


# --- nodes ----------------------------------------------------------------------------


_Pairs = tuple[tuple[str, str], ...]


def _details(node: Node) -> tuple[_Pairs, _Pairs]:
    """Return the graphs of a node, and its other params."""
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
    """Return the schema of a node: its args by roles. A node writes to no arg: tensors
    that its call writes to are results."""
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
    structure = shown(pytree.structure(((0,) * len(arguments), {})))
    returned = shown(pytree.structure((0,) * len(results)))
    return Schema(
        node.op.name, arguments, (), results, structure, returned, functions, options
    )


def schema(f: Any, *args: Any, **kwargs: Any) -> Schema:
    """Return the schema of a call `f(*args, **kwargs)`, or of a node.

        print(hf.schema(hf.cond, pred, true_fn, false_fn, (x,)))

    Args:
        f: A function that uses an operator, an operator, or a node of a graph.
        args, kwargs: The arguments of `f`; types (`hf.spec`) may stand for tensors.
            Nothing runs: the functions are traced.

    Raises:
        ArgumentTypeError: `f` is none of these.

    >>> print(hf.schema(lambda x: hf.map(hf.square, x), hf.spec("f32[3]")).results)
    (Argument(path='result', kind='tensor', type='f32[3]', written=False),)
    """
    if isinstance(f, Node) and hasattr(f.op, "signature"):
        return schema_of_node(f)
    if not callable(f) or isinstance(f, type):
        raise ArgumentTypeError(
            "schema: `f` must be a function that uses an operator, an operator, or a "
            f"node of one, and is `{type(f).__name__}`."
        )
    method: Any = getattr(f, "schema", None)
    result: Schema
    if callable(method):  # an operator, which knows the names of its arguments
        result = method(*args, **kwargs)
        return result
    if not kwargs:
        check_arity("schema", f, args)
    return schema_of_call(f, args, kwargs)
