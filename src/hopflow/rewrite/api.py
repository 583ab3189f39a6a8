"""`control_flow`: the decorator."""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError
from hopflow.rewrite import runtime as _runtime  # noqa: F401 - for rewritten code
from hopflow.rewrite.convert import SKIP, converted, is_rewritten

F = TypeVar("F", bound=Callable[..., Any])


class _ControlFlow:
    """The decorator; see `__call__`."""

    @entry
    def __call__(self, f: F) -> F:
        """Rewrite a function so that Python's `if`, `while` and `for` become operators
        where they depend on tensors.

            >>> @hf.control_flow
            ... def collatz_steps(n):
            ...     steps = 0
            ...     while n > 1:
            ...         n = n // 2 if n % 2 == 0 else 3 * n + 1
            ...         steps += 1
            ...     return steps
            >>> int(hf.jit(collatz_steps)(hf.asarray(27)))
            111

        Tensors may be conditions of `if`, `while`, `assert`, `and`, `or`, `not`,
        conditional expressions and chained comparisons, and items of `for` and of
        comprehensions, directly or by `range`, `enumerate`, `zip`, `reversed` and
        `map`. Such blocks may contain `break`, `continue` and `return`, and append to
        lists, which become stacks. Statements that do not depend on tensors remain
        Python. Functions defined in `f` and those that it calls are rewritten too,
        except for installed packages.

        A name that an `if` or a loop assigns and that is live afterwards must be bound
        on all paths, with one type. Statements with effects other than on local names
        and tensors (an assignment to an attribute or a `global` name, also by a called
        function of the module, a `raise`) remain Python, and must not depend on a
        tensor.

        Raises:
            ArgumentTypeError: `f` is no function written in Python.
            ControlFlowError: its source is unavailable, or it is an asynchronous
                generator. When it is traced: a statement that depends on a tensor
                cannot be rewritten, with the reason.
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
        rewritten = converted(f)
        functools.update_wrapper(rewritten, f)
        return cast(F, rewritten)

    @staticmethod
    def skip(f: F) -> F:
        """Mark `f` as a function that `control_flow` does not rewrite."""
        setattr(f, SKIP, True)
        return f


control_flow = _ControlFlow()
