"""`export` and `load`: from a function to a program, and from a file."""

import inspect
from collections.abc import Callable, Mapping
from keyword import iskeyword
from os import PathLike
from typing import Any

from hopflow import pytree
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ExportError
from hopflow.export.document import read_document
from hopflow.export.files import read_file
from hopflow.export.portable import portable
from hopflow.export.program import ExportedProgram
from hopflow.ops.rules import as_flag, as_integer
from hopflow.recursion import deep_recursion
from hopflow.trace.capture import captured
from hopflow.trace.dims import Dynamic, LeafPlan, plan_leaves
from hopflow.trace.source import check_arity, name_of, parameter_names


@entry
def export(
    f: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Dynamic = None,
    derivatives: int = 0,
    strict: bool = False,
) -> ExportedProgram:
    """The program that `f(*args, **kwargs)` runs, as data: see `ExportedProgram`.

    Loops and branches are operators in it, and sizes may be symbols. What `f` decides
    by sizes becomes a constraint on the arguments; what only a run knows, a check.

        >>> rows = {0: hf.Dim("n", min=2)}
        >>> program = hf.export(hf.sum, (hf.ones((3,)),), dynamic_shapes=[rows])
        >>> program(hf.ones((5,))).item()
        5.0

    Args:
        f: Takes and returns pytrees of tensors and numbers; a function, or a module,
            whose tensors become the program's parameters.
        args, kwargs: What it is called with. Python numbers are symbols, and other
            values that are no tensors are constants, which each call must have.
        dynamic_shapes: Which sizes are symbols: None for no others than those marked by
            `hf.mark_dynamic`, True for all, or for each argument (a sequence, or a
            mapping by name) an `hf.Dim`, True, False, or a mapping or sequence of these
            by axis; in containers of the argument's structure. False for a number makes
            it a constant.
        derivatives: How many orders are kept of the derivatives of functions with
            rules of their own (`hf.custom_jvp`, `hf.custom_vjp`, operators), at least.
            Those of all else are always there.
        strict: As of `hf.trace`: refuse a function that does more than compute.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is of another kind, or
            `dynamic_shapes` does not fit.
        DimError: `f` decides by a size that was declared to be any of a range.
        ExportError: it uses what cannot leave Python; the message names the operation
            and the line.
        ResultTypeError, TraceError, ImpurityError: as of `hf.trace`.
    """
    _check_callee(f, args)
    named = _named(kwargs)
    as_flag("export", "strict", strict)
    derivatives = as_integer("export", "derivatives", derivatives)
    if derivatives < 0:
        raise ArgumentValueError(
            f"export: `derivatives` must not be negative, and is {derivatives}."
        )
    check_arity("export", f, args, kwargs=named)
    names = [*parameter_names(f, len(args)), *named]
    if len(set(names)) < len(names):
        names[: len(args)] = [f"args[{i}]" for i in range(len(args))]
    values = (*args, *named.values())
    plans = _with_numbers(
        plan_leaves("export", dynamic_shapes, values, names, "dynamic_shapes"), values
    )
    module = captured(
        "export",
        _by_position(f, len(args), names) if named else f,
        values,
        names,
        mode="symbolic",
        plans=plans,
        strict=strict,
        keep_guards=True,
    )
    with deep_recursion():
        module = module.with_graph(portable(module.graph, derivatives))
        program = ExportedProgram(module, tuple(names), len(args), derivatives)
        _check_arguments(program)
        program.operators  # noqa: B018 - what no file can hold is refused here
    return program


def _check_callee(f: object, args: object) -> None:
    if not callable(f):
        raise ArgumentTypeError(
            f"export: `f` must be a function, and is `{type(f).__name__}`."
        )
    if not isinstance(args, tuple | list):
        raise ArgumentTypeError(
            "export: `args` must be a tuple of the arguments by position, and is "
            f"`{type(args).__name__}`. Write `(x,)` for one."
        )


def _named(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            "export: `kwargs` must be a mapping of arguments by name, and is "
            f"`{type(kwargs).__name__}`."
        )
    named = dict(sorted((kwargs or {}).items()))
    for name in named:
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ArgumentValueError(
                f"export: `kwargs` has an argument {name!r}, which is no identifier."
            )
    return named


def _with_numbers(plans: list[LeafPlan], values: Any) -> list[LeafPlan]:
    """Plans by which numbers of which nothing is said are symbols."""
    leaves = pytree.flatten(values)[0]
    return [
        True if plan is None and type(leaf) in (int, float) else plan
        for plan, leaf in zip(plans, leaves, strict=True)
    ]


def _by_position(f: Callable[..., Any], count: int, names: list[str]) -> Any:
    """`f` with its arguments by name behind those by position."""

    def call(*values: Any) -> Any:
        named = zip(names[count:], values[count:], strict=True)
        return f(*values[:count], **dict(named))

    call.__name__ = name_of(f)
    call.__wrapped__ = f  # type: ignore[attr-defined]
    plain = [n if n.isidentifier() else f"arg{i}" for i, n in enumerate(names)]
    kind = inspect.Parameter.POSITIONAL_ONLY
    parameters = [inspect.Parameter(name, kind) for name in plain]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _check_arguments(program: ExportedProgram) -> None:
    """
    Raises:
        ExportError: an argument is a constant that is no data.
    """
    for found in program.signature.inputs:
        if callable(found.value):
            raise ExportError(
                f"export: `{found.path}` is the function or class `{found.value!r}`, "
                "which no file can hold. Close over it: export a function that calls "
                "yours with it."
            )


@entry
def load(path: str | PathLike[str], *, verify: bool | None = None) -> ExportedProgram:
    """The program of a `.hopflow` file.

    Nothing of the file runs, and nothing is imported. Its tensors are mapped: they take
    memory once they are used, and writes to them do not reach the file, which must not
    be cut short meanwhile. The code that made it is not needed; a class of containers
    that this process does not know has a named tuple in its place.

    Args:
        verify: Whether to check the checksum of the tensors, which reads them all.
            None: if they have at most 64 MB. All else is checked always.

    Raises:
        ArgumentTypeError: `path` is no path.
        ProgramFormatError: it is no program, one that is broken, or one of a version
            that this hopflow does not read.
        OSError: it cannot be read.
    """
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError(
            f"load: `path` must be a path, and is `{type(path).__name__}`."
        )
    if verify is not None:
        as_flag("load", "verify", verify)
    with deep_recursion():
        data, tensors = read_file(path, verify)
        return ExportedProgram(*read_document(data, tensors))
