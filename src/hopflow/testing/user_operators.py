"""Users' operators in programs that `programs` draws.

An operator is called with tensors and with functions of tensors. Which of its
parameters are functions is found by trial, and the inputs of these by tracing.
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
"""The most parameters for which functions are tried."""

_PREFIX: Final = "own_"

SAMPLES: Final = ((3,), (), (2, 3), (3, 3))
"""The shapes with which an operator is tried."""


@dataclass(frozen=True)
class UserOperator:
    """An operator, or a function that calls one, and how programs call it.

    name       its name in the text of programs: `own_repeat`
    call       the operator
    functions  for each parameter, whether it is a function, from tensors to as many
               tensors of the same types
    """

    name: str
    call: Function
    functions: tuple[bool, ...]

    def __repr__(self) -> str:
        return self.plain_name

    @property
    def plain_name(self) -> str:
        """Its name in the module that defines it."""
        return self.name.removeprefix(_PREFIX)

    @property
    def bodies(self) -> int:
        """The number of parameters that are functions."""
        return sum(self.functions)

    def arguments(self, functions: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call, in the order of the parameters."""
        bodies, rest = iter(functions), iter(values)
        return [next(bodies) if f else next(rest) for f in self.functions]

    def __call__(self, functions: Sequence[Any], values: Sequence[Any]) -> Any:
        return self.call(*self.arguments(functions, values))

    def outline(self, samples: Sequence[Any]) -> "Outline":
        """Trace a call with tensors of these types, and return samples of the inputs of
        functions and of the results.

        Raises:
            HopflowError: the types do not fit the operator.
            Exception: an error of the operator.
        """
        inputs: list[list[Any] | None] = [None] * self.bodies
        functions = [_noting(self.plain_name, inputs, k) for k in range(self.bodies)]
        traced = trace(lambda *xs: self(functions, xs), *samples, captures=True)
        results = pytree.unflatten(
            traced.out_spec, map(_sample, traced.graph.out_types)
        )
        return Outline([samples[:1] if g is None else g for g in inputs], results)

    @property
    def home(self) -> str | None:
        """The module from which a script can import it, or None."""
        modules = (getattr(self.call, "__module__", None), type(self.call).__module__)
        for module in modules:
            if module in (None, "__main__"):
                continue
            if getattr(sys.modules.get(module), self.plain_name, None) is self.call:
                return module
        return None


@dataclass(frozen=True)
class Outline:
    """Samples of a call of an operator.

    inputs    for each function, the inputs that the operator calls it with
    results   the results of the operator
    """

    inputs: list[Any]
    results: Any


def as_user_operator(call: Any) -> UserOperator:
    """Return a user's operator as programs call it.

    Raises:
        ArgumentTypeError: it is not callable.
        ArgumentValueError: its name is unusable, or it cannot be called with tensors
            and functions of tensors.
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
    for functions in _signatures(call):
        operator = UserOperator(_PREFIX + name, call, functions)
        for shape in SAMPLES:
            try:
                operator.outline([np.full(shape, 0.5)] * functions.count(False))
            except Exception as error:  # any error: such a call does not fit
                failed = error
            else:
                return operator
    raise ArgumentValueError(
        f"programs: the operator `{name}` cannot be called with tensors and functions "
        "of tensors that return as many of the same types. Give a function instead "
        "that takes those, and calls it."
    ) from failed


def _signatures(call: Function) -> Iterator[tuple[bool, ...]]:
    """Return the candidates for which required parameters are functions, those with few
    functions first."""
    target = getattr(call, "debug", call)
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    parameters = inspect.signature(target).parameters.values()
    needed = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    choices = itertools.product((False, True), repeat=min(len(needed), MOST))
    return iter(sorted((choice for choice in choices if not all(choice)), key=sum))


def _noting(name: str, inputs: list[list[Any] | None], k: int) -> Function:
    """Return an identity function `k` that stores samples of its inputs in `inputs`."""

    def function(*args: Any) -> Any:
        leaves, spec = pytree.flatten(args)
        if not leaves or not all(isinstance(x, Value) for x in leaves):
            raise ArgumentValueError(
                f"programs: the operator `{name}` calls a function with what is no "
                "tensor. Give a function instead that calls it with functions of "
                "tensors."
            )
        samples = list(pytree.unflatten(spec, [_sample(x.type) for x in leaves]))
        previous = inputs[k]
        if previous is not None and _types(previous) != _types(samples):
            raise ArgumentValueError(
                f"programs: the operator `{name}` calls one function with different "
                "types, and programs have functions of one."
            )
        inputs[k] = samples
        return args[0] if len(args) == 1 else args

    return function


def _types(tree: Any) -> Any:
    leaves, spec = pytree.flatten(tree)
    return spec, [(x.dtype, x.shape) for x in leaves]


def _sample(type_: Any) -> Any:
    """Return ones of a type, with size 1 for symbolic sizes."""
    shape = [n if isinstance(n, int) else 1 for n in type_.shape]
    return np.ones(shape, type_.dtype.dtype)
