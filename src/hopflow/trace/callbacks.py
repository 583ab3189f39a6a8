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
    """Arguments of a call: the leaves that only the run knows, and all others.

    spec      their structure
    leaves    each leaf, with None for those that are operands
    places    where the operands stand
    numbers   those of the places at which a Python number stands
    operands  tensors
    """

    spec: Spec
    leaves: list[Any]
    places: list[int]
    numbers: set[int]
    operands: list[Operand]

    def given(self, values: Sequence[Any]) -> Any:
        """The arguments with these tensors, or arrays, for operands."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value.item() if place in self.numbers else value
        return pytree.unflatten(self.spec, leaves)


def _arguments(name: str, given: Any) -> _Arguments:
    leaves, spec = pytree.flatten(given)
    found = _Arguments(spec, list(leaves), [], set(), [])
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, (Value, np.ndarray, np.generic, *_NUMBERS)):
            continue
        if isinstance(leaf, _NUMBERS):
            found.numbers.add(i)
            found.operands.append(as_operand(name, i, leaf))
        else:
            found.operands.append(as_default(as_operand(name, i, leaf)))
        found.places.append(i)
        found.leaves[i] = None
    return found


def _tensors(operands: Sequence[Array]) -> list[EagerTensor]:
    """Tensors of their own: what a function keeps, or writes to, is no one else's."""
    return [EagerTensor(np.array(x)) for x in operands]


def callback(fn: Callable[..., Any], result_spec: Any, *args: Any) -> Any:
    """`fn(*args)`, called by Python where the program runs, compiled loops included.

    It is called as often as plain Python would, and in the same order: for each step of
    a loop, in the branch that is taken, for each example of `vmap` one after the other;
    never again for a derivative, and also if nothing reads the result. An exception
    ends the program, and is raised to the caller.

    Args:
        fn: Gets tensors of its own; symbolic sizes and numbers as Python numbers. It
            must not write to tensors that the program uses.
        result_spec: What `fn` returns: a pytree of types (`hf.spec("f32[3]")`), or of
            tensors of the same types. None: nothing; a value it returns is ignored.
        args: Pytrees. What is neither a tensor nor an array is passed as it is.

    Returns:
        What `fn` returns, as tensors.

    Raises:
        ArgumentTypeError, ArgumentValueError: `fn` is no function, or `result_spec` no
            tree of types whose sizes are known here.
        StructureError, ResultTypeError: `fn` returns something else than it says.
        DerivativeError: what is differentiated is among the arguments, and floats are
            among the results.
    """
    if not callable(fn):
        raise ArgumentTypeError(
            f"callback: `fn` must be a function, and is `{type(fn).__name__}`."
        )
    check_arity("callback", fn, args, "fn")
    wanted, spec = pytree.flatten(result_spec)
    paths = pytree.leaf_paths(spec, "result_spec")
    types = tuple(map(_result_type, paths, wanted))
    arguments = _arguments("callback", args)
    name = name_of(fn)

    def run(operands: Sequence[Array], types: tuple[TensorType, ...]) -> list[Array]:
        result = fn(*arguments.given(_tensors(operands)))
        return list(_checked(name, result, spec, types)) if types else []

    found = _bind(Callback(name, user_line(), run), arguments, types)
    return pytree.unflatten(spec, found)


def _bind(
    fn: Callback, arguments: _Arguments, types: tuple[TensorType, ...]
) -> tuple[Value, ...]:
    operands, arguments.operands = arguments.operands, []  # `fn` is not to keep them
    return bind(callback_op, operands, {"fn": fn, "types": types})


def _result_type(path: str, given: Any) -> TensorType:
    type_ = given.type if isinstance(given, Value) else given
    if not isinstance(type_, TensorType):
        raise ArgumentTypeError(
            f'callback: `{path}` must be a type, as `hf.spec("f32[3]")` is, or a '
            f"tensor, and is `{type(given).__name__}`."
        )
    for symbol in free_symbols(*type_.shape):
        if symbol.env is None and not _is_input(symbol):
            raise ArgumentValueError(
                f"callback: the size `{symbol}` of `{path}`, {type_}, is that of no "
                "tensor here. Give a number, or a tensor of the type that is returned."
            )
    return type_.strong()


def _is_input(symbol: Symbol) -> bool:
    """Whether a trace has the symbol, that of a type it was given, among its inputs."""
    here: Interpreter | None = current()
    while here is not None:
        if isinstance(here, Tracer) and symbol in here.symbols:
            return True
        here = here.parent
    return False


def _checked(
    name: str, result: Any, spec: Spec, types: Sequence[TensorType]
) -> Iterator[Array]:
    """The leaves of what a function returned, of the types that it was to have.

    Raises:
        StructureError, ResultTypeError: they have not.
    """
    leaves, found = pytree.flatten(result)
    if found != spec:
        raise StructureError(
            f"callback: `{name}` must return what `result_spec` says, {spec}, and "
            f"returns {found}."
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
        number = isinstance(value, Constant)
        yield np.asarray(value.value if number else value, type_.dtype.dtype)


_TAKES: Final = {"b": "b", "i": "bi", "u": "bi", "f": "bif"}
"""The kinds of Python numbers that a result of each kind may be given as."""


# --- print ----------------------------------------------------------------------------


def print_(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print `fmt.format(*args, **kwargs)` where the program runs: see `callback`.

        hf.print("step {}: {x}", i, x=x)

    Args:
        fmt: A format string. Tensors are formatted as NumPy does.
        args, kwargs: What its fields name, each at least once; pytrees, as those of
            `callback`.

    Raises:
        ArgumentTypeError: `fmt` is no string.
        ArgumentValueError: it names what is not given, does not name what is given, is
            no format string, or, when the program runs, has a format of another type.
    """
    if not isinstance(fmt, str):
        raise ArgumentTypeError(
            f'print: `fmt` must be a string such as "x = {{}}", and is '
            f"`{type(fmt).__name__}`."
        )
    _check_fields(fmt, args, kwargs)
    arguments = _arguments("print", (args, kwargs))

    def run(operands: Sequence[Array], _: tuple[TensorType, ...]) -> list[Array]:
        shown = [x if x.ndim else x[()] for x in map(np.asarray, operands)]
        own_args, own_kwargs = arguments.given(shown)
        try:
            text = fmt.format(*own_args, **own_kwargs)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ArgumentValueError(
                f"print: {fmt!r} does not format what it is given: {error}. A tensor "
                "of no axes is formatted as a NumPy number, another as a NumPy array."
            ) from error
        builtins.print(text)
        return []

    _bind(Callback("print", user_line(), run), arguments, ())


def _check_fields(fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a format string names all arguments, and no other.

    Raises:
        ArgumentValueError: it does not, or is no format string.
    """
    check = _Fields(fmt)
    try:
        check.format(fmt, *[check] * len(args), **dict.fromkeys(kwargs, check))
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, ArgumentValueError):
            raise
        what = f"is no format string: {error}"
        if isinstance(error, LookupError):
            what = "names an argument that is not given"
        raise ArgumentValueError(
            f"print: `fmt` {fmt!r} {what}. Give what each of its fields names; a brace "
            "is written twice."
        ) from None


class _Fields(string.Formatter):
    """Formats as `str.format` does, but requires that every argument is named.

    An instance also stands for every argument: it has each attribute and each item.
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
