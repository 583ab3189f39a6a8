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
    """Return a key that is computed fast: the ids of the types of tensors, and the
    classes of other arguments."""
    return tuple([id(x.type) if type(x) is EagerTensor else type(x) for x in leaves])


def plain_leaves(args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]] | None:
    """Return the leaves of arguments that are tensors, NumPy arrays and numbers, or
    plain containers of these, in the order in which the containers hold them, and a
    key like `kinds_of`; None if there is anything else.

    It takes half of the time of `FlatArguments.of`.
    """
    leaves: list[Any] = []
    key: list[Any] = []
    return (leaves, tuple(key)) if _add_plain(args, leaves, key) else None


def _add_plain(parts: Iterable[Any], leaves: list[Any], key: list[Any]) -> bool:
    for part in parts:
        kind = type(part)
        if kind is EagerTensor:
            leaves.append(part)
            key.append(id(part.type))
        elif kind is np.ndarray:
            tensor = slots.from_array(part)
            leaves.append(tensor)
            key.append(id(tensor.type))
        elif kind is dict:
            key.append((kind, *part))
            if not _add_plain(part.values(), leaves, key):
                return False
        elif kind is tuple or kind is list:
            key.append((kind, len(part)))
            if not _add_plain(part, leaves, key):
                return False
        elif kind in _NUMBERS:
            leaves.append(part)
            key.append(kind)
        else:
            return False
    return True


def order_of_plain(args: tuple[Any, ...], spec: Spec) -> list[int]:
    """Return for each leaf of `(args, {})`, of this structure, its position among
    `plain_leaves(args)`: a structure has the items of a dict in the order of keys."""
    numbers = range(spec.num_leaves)
    positions: list[int] = []
    _add_positions(args, pytree.unflatten(spec, numbers)[0], positions)
    return sorted(numbers, key=positions.__getitem__)


def _add_positions(tree: Any, numbered: Any, positions: list[int]) -> None:
    if type(tree) is dict:
        for name, part in tree.items():
            _add_positions(part, numbered[name], positions)
    elif type(tree) in (tuple, list):
        for part, number in zip(tree, numbered, strict=True):
            _add_positions(part, number, positions)
    else:
        positions.append(numbered)


def weak_tensor(number: float) -> EagerTensor:
    """Return the operand for a Python float: a weak f64[]."""
    return EagerTensor(np.asarray(number), weak=True)


class FlatArguments(NamedTuple):
    """The arguments of one call, flattened.

    leaves  the leaves of `(args, kwargs)`, with tensors for arrays
    spec    their structure
    orders  the keys of each dict, in order, which `spec` does not record
    passed  `(args, kwargs)` with the user's containers
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Spec
    orders: list[tuple[Any, ...]]
    passed: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "FlatArguments":
        """Flatten the arguments of a call."""
        passed = args, kwargs
        args, kwargs = opened(passed)
        leaves, spec = pytree.flatten((args, kwargs))
        leaves = [slots.from_array(x) if isinstance(x, _ARRAYS) else x for x in leaves]
        return FlatArguments(
            args, kwargs, leaves, spec, _key_orders((args, kwargs)), passed
        )

    @property
    def kinds(self) -> tuple[Any, ...]:
        """`kinds_of` the leaves, and their structure unless they are just `args`."""
        args, leaves = self.args, self.leaves
        is_plain = not self.kwargs and len(args) == len(leaves)
        if is_plain and all(map(is_, args, leaves)):
            return kinds_of(leaves)
        return self.spec, *self.orders, *kinds_of(leaves)


class Arguments(NamedTuple):
    """The arguments of one call, sorted into operands, static values and numbers.

    flat      the flattened arguments
    tensors   the operands of the graph: tensors, and floats
    operands  for each operand, the position of its leaf
    key       structure, dtypes, ranks and static values: what every trace depends on
    places    the places of the numbers that may be symbols
    values    those numbers
    plans     for each leaf, what `dynamic` says of it
    marks     the marks of tensors, see `hf.mark_dynamic`, where `dynamic` says nothing
    """

    flat: FlatArguments
    tensors: list[EagerTensor]
    operands: list[int]
    key: tuple[Any, ...]
    places: list[Place]
    values: tuple[Any, ...]
    plans: Sequence[LeafPlan]
    marks: Marks

    @staticmethod
    def of(f: Callable[..., Any], dynamic: Dynamic, flat: FlatArguments) -> "Arguments":
        """Sort the arguments of a call.

        Raises:
            EscapedValueError: one is a tensor of a trace.
            ArgumentTypeError, ArgumentValueError: `dynamic` does not fit them.
        """
        plans = _plans(f, dynamic, flat)
        key: list[Any] = [flat.spec, *flat.orders]
        tensors: list[EagerTensor] = []
        operands: list[int] = []
        places: list[Place] = []
        values: list[Any] = []
        marks: dict[tuple[int, int], Mark] = {}
        for i, leaf in enumerate(flat.leaves):
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
                key.append(_static(f, flat.spec, i, leaf))
        return Arguments(
            flat, tensors, operands, tuple(key), places, tuple(values), plans, marks
        )

    def names(self, f: Callable[..., Any]) -> list[str]:
        """The parameters' names, of positional arguments and then of the others."""
        return _names(f, self.flat.spec)

    def texts(self, f: Callable[..., Any]) -> list[str]:
        """Return for each leaf the expression that a user would write."""
        return _texts(f, self.flat.spec)

    @property
    def numbers(self) -> list[int]:
        """The positions of leaves that are numbers and may be symbols."""
        return [place.leaf for place in self.places if place.axis is None]

    @property
    def is_keyed_by_kinds(self) -> bool:
        """Whether calls with these kinds differ only in data and in numbers."""
        numbers = self.numbers
        return all(
            type(leaf) is EagerTensor or i in numbers
            for i, leaf in enumerate(self.flat.leaves)
        )


def _plans(
    f: Callable[..., Any], dynamic: Dynamic, flat: FlatArguments
) -> Sequence[LeafPlan]:
    if dynamic is None or isinstance(dynamic, bool):
        return [dynamic] * len(flat.leaves)
    names = _names(f, flat.spec)
    named = [flat.kwargs[k] for k in names[len(flat.args) :]]
    if isinstance(dynamic, Mapping):  # an entry for an omitted argument has no effect
        absent = {*declared_names(f)}.difference(names)
        dynamic = {k: dynamic[k] for k in dynamic if k not in absent}
    return plan_leaves("jit", dynamic, [*flat.args, *named], names)


def _names(f: Callable[..., Any], spec: Spec) -> list[str]:
    """The parameters' names, of positional arguments and then of the others."""
    positional, named = spec.children()
    names = parameter_names(f, positional.num_children)
    return [*names, *map(str, named.entries())]


def _texts(f: Callable[..., Any], spec: Spec) -> list[str]:
    specs = [child for part in spec.children() for child in part.children()]
    return argument_texts(_names(f, spec), specs)


def is_data(leaf: Any) -> bool:
    """Whether an argument is a tensor or an array."""
    return isinstance(leaf, (Value, *_ARRAYS))


def _static(f: Callable[..., Any], spec: Spec, i: int, leaf: Any) -> Hashable:
    """Return the key of a static leaf.

    Raises:
        ArgumentTypeError: the leaf cannot be hashed.
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
    """Return the keys of each dict in a tree, in order; a pytree structure sorts
    them."""
    kind = type(tree)
    if kind in _SIMPLE:
        return []
    if isinstance(tree, dict):
        orders = [tuple(tree)]
        parts: Iterable[Any] = tree.values()
    elif isinstance(tree, tuple | list):
        orders, parts = [], tree
    else:
        spec = pytree.structure(tree)
        if pytree.is_leaf(spec):
            return []
        level = spec.one_level()
        orders, parts = [], level.flatten_up_to(tree) if level is not None else ()
    for part in parts:
        if type(part) not in _SIMPLE:
            orders += _key_orders(part)
    return orders


_NUMBERS: Final = frozenset((bool, int, float))
_ARRAYS: Final = (np.ndarray, np.generic)
_SIMPLE: Final = frozenset((EagerTensor, bool, int, float, str, np.ndarray, type(None)))
