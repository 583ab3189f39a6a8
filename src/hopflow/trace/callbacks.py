"""`callback` and `print`: Python that runs when the program does, loops included."""

import builtins
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Interpreter, Operand, Value, bind, current
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.ops.callback import Callback, callback_op
from hopflow.ops.opdef import as_default, as_operand, convert_to
from hopflow.ops.rules import Array
from hopflow.pytree import Spec
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Symbol, SymFloat, SymInt, free_symbols
from hopflow.tensor import EagerTensor
from hopflow.trace.source import check_arity, name_of, user_line
from hopflow.trace.tracer import Tracer

_NUMBERS = (SymInt, SymFloat, SymBool)


@dataclass(slots=True)
class _Arguments:
    """The arguments of a callback, divided into operands and static leaves.

    spec      the structure of the arguments
    leaves    the leaves, with None for operands
    places    the positions of the operands among the leaves
    numbers   the positions of operands that are Python numbers
    operands  the operands
    """

    spec: Spec
    leaves: list[Any]
    places: list[int]
    numbers: set[int]
    operands: list[Operand]

    def with_operands(self, values: Sequence[Any]) -> Any:
        """Return the arguments with these tensors, or arrays, as operands."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value.item() if place in self.numbers else value
        return pytree.unflatten(self.spec, leaves)


def _arguments(name: str, tree: Any) -> _Arguments:
    """Divide a tree of arguments into operands and static leaves."""
    leaves, spec = pytree.flatten(tree)
    arguments = _Arguments(spec, list(leaves), [], set(), [])
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, (Value, np.ndarray, np.generic, *_NUMBERS)):
            continue
        if isinstance(leaf, _NUMBERS):
            arguments.numbers.add(i)
            arguments.operands.append(as_operand(name, i, leaf))
        else:
            arguments.operands.append(as_default(as_operand(name, i, leaf)))
        arguments.places.append(i)
        arguments.leaves[i] = None
    return arguments


def _tensors(operands: Sequence[Array]) -> list[EagerTensor]:
    """Copy operands to tensors, which a function may keep or write to."""
    return [EagerTensor(np.array(x)) for x in operands]


def callback(fn: Callable[..., Any], result_spec: Any, *args: Any) -> Any:
    """Call the Python function `fn(*args)` whenever the program runs, also compiled.

    It is called as often and in the same order as in plain Python: in each step of a
    loop, in the branch that is taken, for one batch element of `vmap` after the other;
    never again for a derivative, and also if the result is unused. An exception ends
    the program, and is raised to the caller.

        >>> @hf.jit
        ... def f(x):
        ...     return hf.callback(lambda x: x + 1, hf.spec("f32[]"), x)
        >>> float(f(hf.asarray(1.0)))
        2.0

    Args:
        fn: Gets copies of tensors, and symbolic sizes and numbers as Python numbers. It
            must not write to tensors that the program uses.
        result_spec: The types of the result: a pytree of types (`hf.spec("f32[3]")`),
            or of tensors of the same types. None: the result is ignored.
        args: Pytrees. Leaves that are neither tensors nor arrays are passed unchanged.

    Returns:
        The result of `fn`, with tensors of the types in `result_spec`.

    Raises:
        ArgumentTypeError, ArgumentValueError: `fn` is not callable, or `result_spec` is
            no tree of types with known sizes.
        StructureError, ResultTypeError: `fn` returns another structure or other types.
        DerivativeError: a differentiated value is among the arguments, and a float
            among the results.
    """
    if not callable(fn):
        raise ArgumentTypeError(
            f"callback: `fn` must be a function, and is `{type(fn).__name__}`."
        )
    check_arity("callback", fn, args, "fn")
    types_or_tensors, spec = pytree.flatten(result_spec)
    paths = pytree.leaf_paths(spec, "result_spec")
    types = tuple(map(_result_type, paths, types_or_tensors))
    arguments = _arguments("callback", args)
    name = name_of(fn)

    def run(operands: Sequence[Array], types: tuple[TensorType, ...]) -> list[Array]:
        result = fn(*arguments.with_operands(_tensors(operands)))
        return list(_checked(name, result, spec, types)) if types else []

    results = _bind(Callback(name, user_line(), run), arguments, types)
    return pytree.unflatten(spec, results)


def _bind(
    fn: Callback, arguments: _Arguments, types: tuple[TensorType, ...]
) -> tuple[Value, ...]:
    operands, arguments.operands = arguments.operands, []  # not kept alive by `fn`
    return bind(callback_op, operands, {"fn": fn, "types": types})


def _result_type(path: str, type_or_tensor: Any) -> TensorType:
    type_ = type_or_tensor.type if isinstance(type_or_tensor, Value) else type_or_tensor
    if not isinstance(type_, TensorType):
        raise ArgumentTypeError(
            f'callback: `{path}` must be a type, as `hf.spec("f32[3]")` is, or a '
            f"tensor, and is `{type(type_or_tensor).__name__}`."
        )
    for symbol in free_symbols(*type_.shape):
        if symbol.env is None and not _is_input(symbol):
            raise ArgumentValueError(
                f"callback: the size `{symbol}` of `{path}`, {type_}, is that of no "
                "tensor here. Give a number, or a tensor of the type that is returned."
            )
    return type_.strong()


def _is_input(symbol: Symbol) -> bool:
    """Whether the symbol, which a user's type has, is an input of a current trace."""
    here: Interpreter | None = current()
    while here is not None:
        if isinstance(here, Tracer) and symbol in here.symbols:
            return True
        here = here.parent
    return False


def _checked(
    name: str, result: Any, spec: Spec, types: Sequence[TensorType]
) -> Iterator[Array]:
    """Yield the leaves of a result as arrays of these types.

    Raises:
        StructureError, ResultTypeError: it has another structure or other types.
    """
    leaves, result_spec = pytree.flatten(result)
    if result_spec != spec:
        raise StructureError(
            f"callback: `{name}` must return what `result_spec` says, {spec}, and "
            f"returns {result_spec}."
        )
    for path, leaf, type_ in zip(
        pytree.leaf_paths(spec, "result"), leaves, types, strict=True
    ):
        try:
            value = as_operand("callback", path, leaf)
        except ArgumentTypeError as error:
            raise ResultTypeError(
                f"callback: `{name}` must return tensors or numbers, and its `{path}` "
                f"is `{type(leaf).__name__}`."
            ) from error
        kind = value.type.dtype.kind
        if isinstance(value, Constant) and kind in _TAKES[type_.dtype.kind]:
            value = convert_to(value, type_.dtype)
        if value.type != type_:
            raise ResultTypeError(
                f"callback: `{path}` of `{name}` must be {type_}, as `result_spec` "
                f"says, and is {value.type}."
            )
        is_constant = isinstance(value, Constant)
        yield np.asarray(value.value if is_constant else value, type_.dtype.dtype)


_TAKES: Final = {"b": "b", "i": "bi", "u": "bi", "f": "bif"}
"""Kind of a result's dtype -> the kinds of Python numbers that convert to it."""


# --- print ----------------------------------------------------------------------------


def print_(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print `fmt.format(*args, **kwargs)` whenever the program runs; see `callback`.

        >>> hf.print("step {}: {x}", 3, x=hf.asarray([1.0, 2.0]))
        step 3: [1. 2.]

    Args:
        fmt: A format string. Tensors are formatted like NumPy arrays.
        args, kwargs: Pytrees as for `callback`, each used by a field at least once.

    Raises:
        ArgumentTypeError: `fmt` is no string.
        ArgumentValueError: it is no format string, names a missing argument, leaves an
            argument unused, or, at run time, its format does not fit the type.
    """
    if not isinstance(fmt, str):
        raise ArgumentTypeError(
            f'print: `fmt` must be a string such as "x = {{}}", and is '
            f"`{type(fmt).__name__}`."
        )
    _check_fields(fmt, args, kwargs)
    arguments = _arguments("print", (args, kwargs))

    def run(operands: Sequence[Array], _: tuple[TensorType, ...]) -> list[Array]:
        arrays = [x if x.ndim else x[()] for x in map(np.asarray, operands)]
        filled_args, filled_kwargs = arguments.with_operands(arrays)
        try:
            text = fmt.format(*filled_args, **filled_kwargs)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ArgumentValueError(
                f"print: {fmt!r} does not format what it is given: {error}. A tensor "
                "of no axes is formatted as a NumPy number, another as a NumPy array."
            ) from error
        builtins.print(text)
        return []

    _bind(Callback("print", user_line(), run), arguments, ())


def _check_fields(fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the fields of a format string are exactly the arguments.

    Raises:
        ArgumentValueError: they are not, or it is no format string.
    """
    check = _Fields(fmt)
    try:
        check.format(fmt, *[check] * len(args), **dict.fromkeys(kwargs, check))
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, ArgumentValueError):
            raise
        why = f"is no format string: {error}"
        if isinstance(error, LookupError):
            why = "names an argument that is not given"
        raise ArgumentValueError(
            f"print: `fmt` {fmt!r} {why}. Give what each of its fields names; a brace "
            "is written twice."
        ) from None


class _Fields(string.Formatter):
    """A formatter like `str.format` that requires that every argument is used.

    An instance also serves as a dummy argument: it has every attribute and every item.
    """

    def __init__(self, fmt: str) -> None:
        self.fmt = fmt

    def check_unused_args(
        self,
        used_args: Collection[int | str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        places = [i for i in range(len(args)) if i not in used_args]
        names = [name for name in kwargs if name not in used_args]
        if not places and not names:
            return
        is_numbered = re.search(r"\{\d", self.fmt)
        fields = [f"{{{i}}}" if is_numbered else "{}" for i in places]
        fields += [f"{name}={{{name}}}" for name in names]
        unused = [*(f"argument {i}" for i in places), *(f"`{name}`" for name in names)]
        raise ArgumentValueError(
            f"print: `fmt` {self.fmt!r} has no field for {' and '.join(unused)}, which "
            "would not be printed. Write one for each, as in "
            f"`hf.print({' '.join([self.fmt, *fields])!r}, ...)`."
        )

    def __format__(self, spec: str) -> str:
        return ""

    def __getattr__(self, _: str) -> "_Fields":
        return self

    def __getitem__(self, _: Any) -> "_Fields":
        return self
