"""`control_flow`: the decorator."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError
from hopflow.rewrite import runtime as _runtime  # noqa: F401 - what the code calls
from hopflow.rewrite.convert import SKIP, converted, is_rewritten

F = TypeVar("F", bound=Callable[..., Any])


class _ControlFlow:
    """The decorator; see `__call__`."""

    @entry
    def __call__(self, f: F) -> F:
        """`f`, with plain Python `if`, `while` and `for` that depend on tensors as
        operators.

        Conditions of `if`, `while`, `assert`, `and`, `or`, `not`, conditional
        expressions and chains of comparisons may be tensors, and so may the items of a
        `for`, as they are or by `range`, `enumerate`, `zip`, `reversed` and `map`; so
        may those of comprehensions. `break`, `continue` and `return` may stand in them,
        and a list to which a loop appends is a stack. Where a condition is no tensor,
        it is Python as before. Functions defined within `f` are rewritten too, and so
        are those that it calls, but for those of installed packages.

        A name that an `if` or a loop assigns, and that is used afterwards, must have a
        value on all ways, of one type. What has effects on other things than local
        names and tensors (an attribute that is assigned, a `raise`, a `global` name,
        by a function of its module that it calls, too) stays Python: it must not depend
        on a tensor.

        Raises:
            ArgumentTypeError: `f` is no function written in Python.
            ControlFlowError: its source is not known, or it is an asynchronous
                generator. When it is traced: something that depends on a tensor cannot
                be rewritten, with the reason.
        """
        if isinstance(f, staticmethod | classmethod):
            return type(f)(self(f.__func__))
        if not isinstance(f, FunctionType):
            raise ArgumentTypeError(
                "control_flow: `f` must be a Python function, and is "
                f"`{type(f).__name__}`. Decorate the function itself, first of all."
            )
        if SKIP in f.__dict__ or is_rewritten(f.__code__):
            return f
        made = converted(f)
        functools.update_wrapper(made, f)
        return cast(F, made)

    @staticmethod
    def skip(f: F) -> F:
        """`f`, which `control_flow` leaves alone."""
        setattr(f, SKIP, True)
        return f


control_flow = _ControlFlow()
