"""`Dim`, a named dimension of arguments; and the option `dynamic`, by which users
choose the sizes and numbers of arguments that are symbols.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, TypeAlias

from hopflow import pytree
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.ops.rules import as_flag, as_integer
from hopflow.symbolic.declared import Declaration, ends
from hopflow.trace.marks import Mark


class Dim:
    """A named dynamic size of arguments: `hf.Dim("batch", max=4096)`.

    The same name in two places is one size. `2 * n`, `n + 1` and `n - 1` are derived
    sizes.

        >>> n = hf.Dim("n", max=4096)
        >>> 2 * n + 1
        2*n + 1

    Args:
        name: An identifier.
        min, max: The range of the size, inclusive.
        may_narrow: Whether the function may specialise on the size, so that a trace
            serves only a part of the range. False: that is a `DimError`.

    Raises:
        ArgumentTypeError: `name` is no string, an end no int, or `may_narrow` no bool.
        ArgumentValueError: `name` is no identifier, or the range is empty.
    """

    __slots__ = ("factor", "max", "may_narrow", "min", "name", "offset")

    @entry
    def __init__(
        self,
        name: str,
        *,
        min: int = 0,
        max: int | None = None,
        may_narrow: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"Dim: `name` must be a string, and is `{type(name).__name__}`."
            )
        if not name.isidentifier():
            raise ArgumentValueError(f"Dim: {name!r} is no name: use an identifier.")
        low = as_integer("Dim", "min", min)
        high = inf if max is None else as_integer("Dim", "max", max)
        if not 0 <= low <= high:
            raise ArgumentValueError(
                f"Dim: sizes of `{name}` cannot lie from {low} to {high}. Give a `min` "
                "of at least 0, and a `max` that is no less."
            )
        self.name = name
        self.min = low
        self.max = high
        self.may_narrow = as_flag("Dim", "may_narrow", may_narrow)
        self.factor = 1  # the size is factor * name + offset
        self.offset = 0

    def _derived(self, factor: int, offset: int) -> "Dim":
        derived = Dim(self.name, may_narrow=self.may_narrow)
        derived.min, derived.max = self.min, self.max
        derived.factor, derived.offset = factor, offset
        return derived

    def __add__(self, other: int) -> "Dim":
        if type(other) is not int:
            return NotImplemented
        return self._derived(self.factor, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> "Dim":
        return self + -other if type(other) is int else NotImplemented

    def __mul__(self, other: int) -> "Dim":
        if type(other) is not int:
            return NotImplemented
        if other < 1:
            raise ArgumentValueError(
                f"Dim: `{self}` times {other} is no size. Multiply by at least 1."
            )
        return self._derived(self.factor * other, self.offset * other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        text = self.name if self.factor == 1 else f"{self.factor}*{self.name}"
        if self.offset:
            text += f" {'+' if self.offset > 0 else '-'} {abs(self.offset)}"
        return text

    @property
    def declaration(self) -> Declaration | None:
        """The declaration, for the error on narrowing; None: narrowing is allowed."""
        if self.may_narrow:
            return None
        arguments = ", ".join([f'"{self.name}"', *ends(self.min, self.max)])
        return Declaration(f"hf.Dim({arguments})", self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it is the named size itself, and not derived from it."""
        return self.factor == 1 and not self.offset

    def of(self, value: Any) -> Any:
        """Return the size for a value of `name`, which may be infinite or a symbol."""
        return self.factor * value + self.offset

    def solve(self, size: int) -> int | None:
        """Return the value of `name` for which this is `size`, or None."""
        value, rest = divmod(size - self.offset, self.factor)
        return None if rest or not self.min <= value <= self.max else value


Choice: TypeAlias = bool | Dim | Mark | None
"""Whether a size or number is a symbol (True, a `Dim` or a mark of the tensor) or a
constant (False); None: the default. `dynamic` has no marks: where it says None, that of
the tensor counts, by `mark_dynamic` or `mark_unbacked`."""

LeafPlan: TypeAlias = Choice | tuple[Choice, ...]
"""One choice for all sizes of a leaf, or for the number it is; or one for each axis."""

Dynamic: TypeAlias = Any
"""The option `dynamic`: a Choice for all arguments; or for each (a sequence, or a
mapping by name) a Choice, a mapping from axes, or a sequence with one for each axis; in
containers of the argument's structure."""


def plan_leaves(
    name: str,
    dynamic: Dynamic,
    args: Sequence[Any],
    parameters: Sequence[str],
    option: str = "dynamic",
) -> list[LeafPlan]:
    """Return a plan for each leaf of `args`.

    Args:
        name: The public function, for messages.
        parameters: The names of the function's parameters, one for each of `args`.
        option: The public function's name of the argument `dynamic`.

    Raises:
        ArgumentTypeError: an element of `dynamic` is no choice.
        ArgumentValueError: it names an argument or axis that does not exist.
    """
    if _is_choice(dynamic):
        return [dynamic for arg in args for _ in pytree.flatten(arg)[0]]
    if isinstance(dynamic, Mapping):
        for key in dynamic:
            if key not in parameters:
                raise ArgumentValueError(
                    f"{name}: `{option}` names an argument {key!r}, and there are "
                    f"{', '.join(parameters) or 'none'}."
                )
        specs = [dynamic.get(p) for p in parameters]
    elif isinstance(dynamic, tuple | list):
        if len(dynamic) > len(args):
            raise ArgumentValueError(
                f"{name}: `{option}` is for {len(dynamic)} arguments, and there are "
                f"{len(args)}."
            )
        specs = [*dynamic, *[None] * (len(args) - len(dynamic))]
    else:
        raise _no_choice(name, option, dynamic)
    plans: list[LeafPlan] = []
    for arg, spec, parameter in zip(args, specs, parameters, strict=True):
        plans += _plan(name, spec, arg, f"{option}[{parameter!r}]")
    return plans


def _is_choice(spec: Any) -> bool:
    return spec is None or isinstance(spec, bool | Dim)


def _plan(name: str, spec: Any, tree: Any, where: str) -> list[LeafPlan]:
    """Return a plan for each leaf of an argument, by the user's `spec` of it."""
    leaves, structure = pytree.flatten(tree)
    if _is_choice(spec):
        return [spec] * len(leaves)
    if pytree.is_leaf(structure):
        return [_plan_axes(name, spec, leaves[0], where)]
    level = structure.one_level()
    parts = [] if level is None else level.flatten_up_to(tree)
    keys = structure.entries()
    if isinstance(spec, Mapping):
        for key in spec:
            if key not in keys:
                raise ArgumentValueError(f"{name}: `{where}` has no {key!r}.")
        specs = [spec.get(k) for k in keys]
    elif isinstance(spec, tuple | list) and len(spec) == len(parts):
        specs = list(spec)
    else:
        raise _no_choice(name, where, spec)
    plans: list[LeafPlan] = []
    for key, part, part_spec in zip(keys, parts, specs, strict=True):
        plans += _plan(name, part_spec, part, f"{where}[{key!r}]")
    return plans


def _plan_axes(name: str, spec: Any, leaf: Any, where: str) -> LeafPlan:
    """Return the plan of a tensor, by the user's `spec` for its axes."""
    ndim = len(getattr(leaf, "shape", ()))
    if isinstance(spec, Mapping):
        chosen: dict[int, Choice] = {}
        for key, choice in spec.items():
            axis = as_integer(name, where, key)
            if not -ndim <= axis < ndim:
                raise ArgumentValueError(
                    f"{name}: `{where}` names axis {axis}, and the argument has {ndim}."
                )
            chosen[axis % ndim] = choice
        choices = tuple(chosen.get(i) for i in range(ndim))
    elif isinstance(spec, tuple | list):
        if len(spec) != ndim:
            raise ArgumentValueError(
                f"{name}: `{where}` is for {len(spec)} axes, and the argument has "
                f"{ndim}."
            )
        choices = tuple(spec)
    else:
        raise _no_choice(name, where, spec)
    for choice in choices:
        if not _is_choice(choice):
            raise _no_choice(name, where, choice)
    return choices


def _no_choice(name: str, where: str, choice: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{name}: `{where}` must be True, False, None, an `hf.Dim`, or a mapping or "
        f"sequence of those, and is {choice!r}."
    )


def choice_of(plan: LeafPlan, axis: int | None) -> Choice:
    """Return the choice for an axis of a leaf; None: for the number that it is."""
    if isinstance(plan, tuple):
        return None if axis is None else plan[axis]
    return plan
