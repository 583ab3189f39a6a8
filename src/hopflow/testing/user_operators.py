"""Operators of users among those that `programs` draws.

An operator is called with tensors and with functions of tensors. Which of its
parameters are functions is found by trying; what they are called with, by tracing.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.trace.capture import trace
from hopflow.trace.source import name_of

Function = Callable[..., Any]

MOST: Final = 4
"""Parameters that are tried."""

_PREFIX: Final = "own_"

SAMPLES: Final = ((3,), (), (2, 3), (3, 3))
"""Shapes that an operator is tried with."""


@dataclass(frozen=True)
class UserOperator:
    """An operator, or a function that calls one, as programs call it.

    name       by which it stands in a program's text: `own_repeat`
    call       the operator
    functions  for each parameter whether it is a function: of tensors, to as many of
               the same types
    """

    name: str
    call: Function
    functions: tuple[bool, ...]

    def __repr__(self) -> str:
        return self.plain_name

    @property
    def plain_name(self) -> str:
        """What its home calls it."""
        return self.name.removeprefix(_PREFIX)

    @property
    def bodies(self) -> int:
        return sum(self.functions)

    def given(self, functions: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The arguments of a call, in the order of its parameters."""
        bodies, rest = iter(functions), iter(values)
        return [next(bodies) if f else next(rest) for f in self.functions]

    def __call__(self, functions: Sequence[Any], values: Sequence[Any]) -> Any:
        return self.call(*self.given(functions, values))

    def outline(self, samples: Sequence[Any]) -> "Outline":
        """What a call with tensors of these types calls and returns.

        Raises:
            HopflowError: the types do not fit the operator.
            Exception: what the operator raises.
        """
        found: list[list[Any] | None] = [None] * self.bodies
        functions = [_noting(self.plain_name, found, k) for k in range(self.bodies)]
        traced = trace(lambda *xs: self(functions, xs), *samples, captures=True)
        results = pytree.unflatten(
            traced.out_spec, map(_sample, traced.graph.out_types)
        )
        return Outline([samples[:1] if g is None else g for g in found], results)

    @property
    def home(self) -> str | None:
        """The module from which a script can import it by its name."""
        modules = (getattr(self.call, "__module__", None), type(self.call).__module__)
        for module in modules:
            if module in (None, "__main__"):
                continue
            if getattr(sys.modules.get(module), self.plain_name, None) is self.call:
                return module
        return None


@dataclass(frozen=True)
class Outline:
    """What a call of an operator does, by samples.

    given     for each function what it is called with
    results   what the operator returns
    """

    given: list[Any]
    results: Any


def as_user_operator(call: Any) -> UserOperator:
    """How programs call an operator of a user's.

    Raises:
        ArgumentTypeError: it cannot be called.
        ArgumentValueError: it has no name that a program can have, or cannot be called
            with tensors and functions of tensors.
    """
    if not callable(call):
        raise ArgumentTypeError(
            "programs: `operators` must have names, operators and functions, and has "
            f"`{type(call).__name__}`."
        )
    name = getattr(call, "name", None) or name_of(call)
    if not (isinstance(name, str) and name.isidentifier()) or name[-1].isdigit():
        raise ArgumentValueError(
            f"programs: `operators` has a function called {name!r}, of which a program "
            "can make no name. Define it with `def`, under a name without a number at "
            "its end."
        )
    failed: Exception | None = None
    for functions in _ways(call):
        operator = UserOperator(_PREFIX + name, call, functions)
        for shape in SAMPLES:
            try:
                operator.outline([np.full(shape, 0.5)] * functions.count(False))
            except Exception as error:  # one of the user's, for what does not fit
                failed = error
            else:
                return operator
    raise ArgumentValueError(
        f"programs: the operator `{name}` cannot be called with tensors and functions "
        "of tensors that return as many of the same types. Give a function instead "
        "that takes those, and calls it."
    ) from failed


def _ways(call: Function) -> Iterator[tuple[bool, ...]]:
    """For the parameters that have no default which are functions, as far as is known:
    a few first."""
    target = getattr(call, "debug", call)
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    parameters = inspect.signature(target).parameters.values()
    needed = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    ways = itertools.product((False, True), repeat=min(len(needed), MOST))
    return iter(sorted((way for way in ways if not all(way)), key=sum))


def _noting(name: str, found: list[list[Any] | None], k: int) -> Function:
    """A function that notes what it is called with, and returns it."""

    def function(*args: Any) -> Any:
        leaves, spec = pytree.flatten(args)
        if not leaves or not all(isinstance(x, Value) for x in leaves):
            raise ArgumentValueError(
                f"programs: the operator `{name}` calls a function with what is no "
                "tensor. Give a function instead that calls it with functions of "
                "tensors."
            )
        given = list(pytree.unflatten(spec, [_sample(x.type) for x in leaves]))
        known = found[k]
        if known is not None and _types(known) != _types(given):
            raise ArgumentValueError(
                f"programs: the operator `{name}` calls one function with different "
                "types, and programs have functions of one."
            )
        found[k] = given
        return args[0] if len(args) == 1 else args

    return function


def _types(tree: Any) -> Any:
    leaves, spec = pytree.flatten(tree)
    return spec, [(x.dtype, x.shape) for x in leaves]


def _sample(type_: Any) -> Any:
    """A value of a type. Of a size that only a run knows, one."""
    shape = [n if isinstance(n, int) else 1 for n in type_.shape]
    return np.ones(shape, type_.dtype.dtype)
