"""The arguments of a call, and the kind of call that they make."""

from collections.abc import Callable, Hashable, Iterable, Sequence
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
from hopflow.trace.source import argument_texts, name_of, parameter_names
from hopflow.trace.variants import Place

__all__ = ["Arguments", "is_data"]


class Arguments(NamedTuple):
    """The arguments of one call.

    leaves    of `(args, kwargs)`; `spec` is their structure
    tensors   the operands of the graph: tensors, and numbers that are floats
    operands  which leaf each of them is
    key       structure, dtypes, ranks, and the values of what is no data
    places    where the numbers are that may be symbols
    values    those numbers
    plans     what the user chose for each leaf
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Spec
    tensors: list[EagerTensor]
    operands: list[int]
    key: tuple[Any, ...]
    places: list[Place]
    values: tuple[Any, ...]
    plans: Sequence[LeafPlan]

    @staticmethod
    def of(
        f: Callable[..., Any],
        dynamic: Dynamic,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "Arguments":
        """A call's arguments, and the kind of call that it is.

        Raises:
            EscapedValueError: one is a tensor of a trace.
            ArgumentTypeError, ArgumentValueError: `dynamic` does not fit them.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        plans = _plans(f, dynamic, args, kwargs, leaves, spec)
        key: list[Any] = [spec, *_key_orders((args, kwargs))]
        tensors: list[EagerTensor] = []
        operands: list[int] = []
        places: list[Place] = []
        values: list[Any] = []
        for i, leaf in enumerate(leaves):
            if is_data(leaf):
                array = isinstance(leaf, np.ndarray | np.generic)
                tensor: Any = slots.from_array(leaf) if array else leaf
                if not isinstance(tensor, EagerTensor):
                    raise escaped(tensor, "its trace has ended, or is another thread's")
                tensors.append(tensor)
                operands.append(i)
                type_ = tensor.type
                key += [type_.dtype, type_.ndim, type_.weak]
                places += [Place(i, axis) for axis in range(type_.ndim)]
                values += type_.shape
            elif can_be_symbol(leaf) and choice_of(plans[i], None) is not False:
                key.append(type(leaf))
                places.append(Place(i, None))
                values.append(leaf)
                if type(leaf) is float:
                    tensors.append(EagerTensor(np.asarray(leaf), weak=True))
                    operands.append(i)
            else:
                key.append(_static(f, spec, i, leaf))
        return Arguments(
            args,
            kwargs,
            leaves,
            spec,
            tensors,
            operands,
            tuple(key),
            places,
            tuple(values),
            plans,
        )

    def texts(self, f: Callable[..., Any]) -> list[str]:
        """How a user would write each leaf."""
        return _texts(f, self.spec)

    @property
    def is_plain(self) -> bool:
        """Whether all arguments are tensors, given by position."""
        return (
            not self.kwargs
            and len(self.tensors) == len(self.args)
            and all(a is t for a, t in zip(self.args, self.tensors, strict=True))
        )


def _plans(
    f: Callable[..., Any],
    dynamic: Dynamic,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    spec: Spec,
) -> Sequence[LeafPlan]:
    if dynamic is None or isinstance(dynamic, bool):
        return [dynamic] * len(leaves)
    names = _names(f, spec)
    given = [*args, *(kwargs[k] for k in names[len(args) :])]
    return plan_leaves("jit", dynamic, given, names)


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
    return isinstance(leaf, Value | np.ndarray | np.generic)


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
    if kind is EagerTensor or tree is None or kind in _SIMPLE:
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
        found += _key_orders(part)
    return found


_SIMPLE: Final = frozenset((bool, int, float, str, np.ndarray))
