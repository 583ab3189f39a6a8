"""What a program takes and gives, by the user's names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hopflow import pytree
from hopflow.graph.module import GraphModule
from hopflow.graph.types import TensorType
from hopflow.pytree import Spec
from hopflow.trace.capture import Run

Kind: TypeAlias = Literal["tensor", "number", "constant"]


@dataclass(frozen=True, slots=True)
class Input:
    """One leaf of the arguments.

    path     as a user writes it: `params['w']`
    kind     "tensor"; "number": a Python number, which calls may choose; "constant":
             what each call must have
    type     of a tensor, or of the tensor that a number is
    value    of a constant
    written  whether a call writes to it
    """

    path: str
    kind: Kind
    type: TensorType | None = None
    value: Any = None
    written: bool = False

    def __str__(self) -> str:
        if self.kind == "constant":
            return f"{self.path} = {self.value!r}"
        text = f"{self.path}: {'int' if self.type is None else self.type}"
        return f"{text}  # written" if self.written else text


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what a call returns.

    path   as a user writes it: `result[0]`
    kind   "tensor", or "number": a Python number
    same   the path of the argument that it is, after it was written; "": none
    """

    path: str
    kind: Kind
    type: TensorType
    same: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.type}" + (f" is {self.same}" if self.same else "")


@dataclass(frozen=True, slots=True)
class Signature:
    """The names, structures and types of a program.

    arguments   their names, those that calls may give by position first
    positional  how many these are
    inputs, outputs   the leaves, in order
    in_spec, out_spec   the structure of the tuple of arguments, and of the result
    parameters  the tensors that the program holds and does not write, by module path,
                of floats
    buffers     all others that it holds: what it writes, integers, masks
    written     the arguments and buffers that a call writes, by path
    """

    arguments: tuple[str, ...]
    positional: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_spec: Spec = field(repr=False)
    out_spec: Spec = field(repr=False)
    parameters: Mapping[str, TensorType]
    buffers: Mapping[str, TensorType]
    written: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["arguments:", *(f"    {x}" for x in self.inputs)]
        lines += ["result:", *(f"    {x}" for x in self.outputs)]
        for name, held in (("parameters", self.parameters), ("buffers", self.buffers)):
            rows = [
                f"    {path}: {type_}" + ("  # written" * (path in self.written))
                for path, type_ in held.items()
            ]
            lines += [f"{name}:", *rows] if rows else []
        return "\n".join(lines)


def plain_path(path: str) -> str:
    """A path of a leaf as a name: `params['w'][0]` is `params.w.0`."""
    text = path.replace(" (written)", ".written")
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", "")):
        text = text.replace(old, new)
    return text


def signature_of(
    module: GraphModule, arguments: tuple[str, ...], positional: int
) -> Signature:
    """The signature of a captured function whose arguments have these names."""
    run: Run = module.run  # type: ignore[assignment]
    operands = iter(module.graph.operands)
    paths: list[str] = []  # of the operands
    inputs: list[Input] = []
    for i, text in enumerate(module.texts):
        if i in module.constants:
            inputs.append(Input(text, "constant", value=module.constants[i].value))
        elif i in module.numbers:
            inputs.append(Input(text, "number"))
        else:
            type_ = next(operands).type
            kind: Kind = "number" if _is_float_number(module, i) else "tensor"
            is_written = len(paths) in run.written
            inputs.append(Input(text, kind, type_, written=is_written))
            paths.append(text)
    results = pytree.leaf_paths(module.out_spec, "result")
    outputs = [
        Output(
            path,
            "number" if i in run.numbers else "tensor",
            arg.type,
            paths[run.same[i]] if i in run.same else "",
        )
        for i, (path, arg) in enumerate(
            zip(results, module.graph.outputs, strict=False)
        )
    ]
    written = tuple([paths[w] if isinstance(w, int) else w for w in run.written])
    held = {
        node.name: node.results[0].type
        for node in module.graph.nodes
        if node.kind == "get_attr"
    }
    parameters = {
        path: type_
        for path, type_ in held.items()
        if type_.dtype.is_float and path not in written
    }
    return Signature(
        arguments,
        positional,
        tuple(inputs),
        tuple(outputs),
        module.in_spec,
        module.out_spec,
        parameters,
        {path: type_ for path, type_ in held.items() if path not in parameters},
        written,
    )


def _is_float_number(module: GraphModule, leaf: int) -> bool:
    """Whether a leaf is a Python float: a symbol, and an operand too."""
    return any(
        symbol.real and getattr(source, "leaf", None) == leaf
        for symbol, source in module.sources.items()
    )
