"""The arguments of a call, and the kind of call that they make."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, slots
from hopflow.errors import ArgumentTypeError
from hopflow.pytree import Spec
from hopflow.tensor import EagerTensor
from hopflow.trace.dims import Dynamic, LeafPlan, choice_of, plan_leaves
from hopflow.trace.functional import escaped
from hopflow.trace.inputs import can_be_symbol
from hopflow.trace.marks import Mark, Marks, marks_of
from hopflow.trace.source import (
    argument_texts,
    declared_names,
    name_of,
    parameter_names,
)
from hopflow.trace.tensor_types import opened
from hopflow.trace.variants import Place


def kinds_of(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """What is told of arguments in no time: which types of tensors, which classes."""
    return tuple([id(x.type) if type(x) is EagerTensor else type(x) for x in leaves])


def weak_tensor(number: float) -> EagerTensor:
    """The operand that a Python float is."""
    return EagerTensor(np.asarray(number), weak=True)


class Given(NamedTuple):
    """The arguments of one call, flat.

    leaves  of `(args, kwargs)`, tensors in place of arrays; `spec` is their structure
    orders  the keys of each dict, in order, which a structure leaves out
    passed  `(args, kwargs)` with the user's own containers
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Spec
    orders: list[tuple[Any, ...]]
    passed: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Given":
        """These arguments, flat."""
        passed = args, kwargs
        args, kwargs = opened(passed)
        leaves, spec = pytree.flatten((args, kwargs))
        leaves = [slots.from_array(x) if isinstance(x, _ARRAYS) else x for x in leaves]
        return Given(args, kwargs, leaves, spec, _key_orders((args, kwargs)), passed)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """`kinds_of` the leaves, and their structure if it is not just `args`."""
        args, leaves = self.args, self.leaves
        is_plain = not self.kwargs and len(args) == len(leaves)
        if is_plain and all(map(is_, args, leaves)):
            return kinds_of(leaves)
        return self.spec, *self.orders, *kinds_of(leaves)


class Arguments(NamedTuple):
    """The arguments of one call.

    tensors   the operands of the graph: tensors, and numbers that are floats
    operands  which leaf each of them is
    key       structure, dtypes, ranks, and the values of what is no data
    places    where the numbers are that may be symbols
    values    those numbers
    plans     what the user chose for each leaf
    marks     how the tensors are marked where the user has chosen nothing else, see
              `hf.mark_dynamic`
    """

    given: Given
    tensors: list[EagerTensor]
    operands: list[int]
    key: tuple[Any, ...]
    places: list[Place]
    values: tuple[Any, ...]
    plans: Sequence[LeafPlan]
    marks: Marks

    @staticmethod
    def of(f: Callable[..., Any], dynamic: Dynamic, given: Given) -> "Arguments":
        """A call's arguments, and the kind of call that it is.

        Raises:
            EscapedValueError: one is a tensor of a trace.
            ArgumentTypeError, ArgumentValueError: `dynamic` does not fit them.
        """
        plans = _plans(f, dynamic, given)
        key: list[Any] = [given.spec, *given.orders]
        tensors: list[EagerTensor] = []
        operands: list[int] = []
        places: list[Place] = []
        values: list[Any] = []
        marks: dict[tuple[int, int], Mark] = {}
        for i, leaf in enumerate(given.leaves):
            if is_data(leaf):
                if not isinstance(leaf, EagerTensor):
                    raise escaped(leaf, "its trace has ended, or is another thread's")
                tensors.append(leaf)
                operands.append(i)
                type_ = leaf.type
                key += [type_.dtype, type_.ndim, type_.weak]
                places += [Place(i, axis) for axis in range(type_.ndim)]
                values += type_.shape
                marks.update(
                    ((i, axis), mark)
                    for axis, mark in marks_of(leaf).items()
                    if choice_of(plans[i], axis) is None
                )
            elif can_be_symbol(leaf) and choice_of(plans[i], None) is not False:
                key.append(type(leaf))
                places.append(Place(i, None))
                values.append(leaf)
                if type(leaf) is float:
                    tensors.append(weak_tensor(leaf))
                    operands.append(i)
            else:
                key.append(_static(f, given.spec, i, leaf))
        return Arguments(
            given, tensors, operands, tuple(key), places, tuple(values), plans, marks
        )

    def names(self, f: Callable[..., Any]) -> list[str]:
        """The parameters' names, of positional arguments and then of the others."""
        return _names(f, self.given.spec)

    def texts(self, f: Callable[..., Any]) -> list[str]:
        """How a user would write each leaf."""
        return _texts(f, self.given.spec)

    @property
    def numbers(self) -> list[int]:
        """The leaves that are numbers, and may be symbols."""
        return [place.leaf for place in self.places if place.axis is None]

    @property
    def is_told(self) -> bool:
        """Whether the kinds of the arguments tell such calls from all others, but for
        the values of numbers."""
        numbers = self.numbers
        return all(
            type(leaf) is EagerTensor or i in numbers
            for i, leaf in enumerate(self.given.leaves)
        )


def _plans(f: Callable[..., Any], dynamic: Dynamic, given: Given) -> Sequence[LeafPlan]:
    if dynamic is None or isinstance(dynamic, bool):
        return [dynamic] * len(given.leaves)
    names = _names(f, given.spec)
    named = [given.kwargs[k] for k in names[len(given.args) :]]
    if isinstance(dynamic, Mapping):  # of arguments that are left out nothing is asked
        absent = {*declared_names(f)}.difference(names)
        dynamic = {k: dynamic[k] for k in dynamic if k not in absent}
    return plan_leaves("jit", dynamic, [*given.args, *named], names)


def _names(f: Callable[..., Any], spec: Spec) -> list[str]:
    """The parameters' names, of positional arguments and then of the others."""
    positional, named = spec.children()
    names = parameter_names(f, positional.num_children)
    return [*names, *map(str, named.entries())]


def _texts(f: Callable[..., Any], spec: Spec) -> list[str]:
    specs = [child for part in spec.children() for child in part.children()]
    return argument_texts(_names(f, spec), specs)


def is_data(leaf: Any) -> bool:
    """Whether an argument is a tensor, or becomes one."""
    return isinstance(leaf, (Value, *_ARRAYS))


def _static(f: Callable[..., Any], spec: Spec, i: int, leaf: Any) -> Hashable:
    """A leaf that is no tensor, in a signature.

    Raises:
        ArgumentTypeError: it cannot be hashed.
    """
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"jit: argument `{_texts(f, spec)[i]}` of `{name_of(f)}` is a "
            f"`{type(leaf).__name__}`, which is neither data nor hashable. Pass "
            "tensors, numbers, or values that can be hashed."
        ) from None
    return pytree.exact_key(leaf)


def _key_orders(tree: Any) -> list[tuple[Any, ...]]:
    """The keys of each dict in a tree, in order, which structures leave out."""
    kind = type(tree)
    if kind in _SIMPLE:
        return []
    if isinstance(tree, dict):
        found = [tuple(tree)]
        parts: Iterable[Any] = tree.values()
    elif isinstance(tree, tuple | list):
        found, parts = [], tree
    else:
        spec = pytree.structure(tree)
        if pytree.is_leaf(spec):
            return []
        one = spec.one_level()
        found, parts = [], one.flatten_up_to(tree) if one is not None else ()
    for part in parts:
        if type(part) not in _SIMPLE:
            found += _key_orders(part)
    return found


_ARRAYS: Final = (np.ndarray, np.generic)
_SIMPLE: Final = frozenset((EagerTensor, bool, int, float, str, np.ndarray, type(None)))
