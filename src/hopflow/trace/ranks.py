"""Several processes that jit one function: they agree before each of them compiles.

What a process calls the function with may differ from the others' in sizes and numbers,
and yet all of them have to run one program. So a call that needs a trace is traced once
with its own sizes, and offered to the others as a record; then each process traces for
all the records, in one order. A size that differs between them is a symbol, and its
hint is the same everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.errors import ArgumentTypeError, RanksError
from hopflow.graph.types import TensorType
from hopflow.tensor import EagerTensor
from hopflow.trace.dims import Dynamic
from hopflow.trace.marks import mark_as, marks_of
from hopflow.trace.signature import Arguments
from hopflow.trace.source import name_of

Record: TypeAlias = dict[str, Any]
"""What a process tells the others: plain data, by name. Names may be added.

kind     the function, and the structure, dtypes and ranks of its arguments
numbers  the sizes of the arguments and the numbers among them, in order
items    by position of a leaf: the number that a tensor without axes holds
outside  the types of the tensors that the function reads from outside
error    None, or why this process cannot trace the function
"""

AllGather: TypeAlias = Callable[[Record], Sequence[Record]]
"""From the record of this process to those of all, in the order of their ranks."""


def calls_of_all(
    all_gather: AllGather,
    f: Callable[..., Any],
    dynamic: Dynamic,
    call: Arguments,
    preflight: Callable[[], Sequence[TensorType]],
) -> list[Arguments]:
    """The calls that all processes make now, in the order of their ranks.

    Those of others have no data, only sizes and numbers.

    Args:
        preflight: Traces `f` for this call alone; the types of what it reads from
            outside. What it raises is raised once the others know of it.

    Raises:
        ArgumentTypeError: `all_gather` gives no records.
        RanksError: they are not of one kind, or another process cannot trace `f`.
    """
    own, failure = _record(f, call), None
    try:
        own["outside"] = [str(type_) for type_ in preflight()]
    except Exception as error:
        failure, own["error"] = error, f"{type(error).__name__}: {error}"
    records = all_gather(own)
    if failure is not None:
        raise failure
    if not isinstance(records, Sequence) or not all(map(_is_record, records)):
        raise ArgumentTypeError(
            "jit: `ranks` must give the records of all processes, a list of what each "
            f"of them gave it, and it gave {records!r}."
        )
    for rank, record in enumerate(records):
        if record["kind"] != own["kind"]:
            raise RanksError(
                "jit: processes must make calls of one kind, in one order.\n"
                f"  here     {own['kind']}\n  rank {rank:<3} {record['kind']}"
            )
        if record["error"] is not None:
            raise RanksError(
                f"jit: rank {rank} could not trace `{name_of(f)}`, so that no process "
                f"compiles it. There it raised\n  {record['error']}"
            )
        if record["outside"] != own["outside"]:
            raise RanksError(
                f"jit: `{name_of(f)}` must read tensors of the same types from outside "
                "in all processes. Make an argument of one whose size differs.\n"
                f"  here     {', '.join(own['outside'])}\n"
                f"  rank {rank:<3} {', '.join(record['outside'])}"
            )
    return [_like(call, f, dynamic, record) for record in records]


_NAMES: Final = frozenset({"kind", "numbers", "items", "outside", "error"})


def _is_record(record: Any) -> bool:
    return isinstance(record, Mapping) and {*record} >= _NAMES


def _record(f: Callable[..., Any], call: Arguments) -> Record:
    leaves = call.flat.leaves
    types = [
        f"{x.type.dtype}[{', '.join('_' * x.ndim)}]"
        if isinstance(x, EagerTensor)
        else type(x).__name__
        for x in leaves
    ]
    texts = call.texts(f)
    marks = [f"; {m.text(texts[i], axis)}" for (i, axis), m in call.marks.items()]
    kind = f"{name_of(f)}: {call.flat.spec} of {', '.join(types)}{''.join(marks)}"
    return {
        "kind": kind,
        "numbers": [*call.values],
        "items": {i: x.item() for i, x in enumerate(leaves) if _holds_number(x)},
        "outside": [],
        "error": None,
    }


def _holds_number(leaf: Any) -> bool:
    return isinstance(leaf, EagerTensor) and not leaf.ndim


def _like(
    call: Arguments, f: Callable[..., Any], dynamic: Dynamic, record: Record
) -> Arguments:
    """The call of this kind that has the numbers of a record."""
    leaves = list(call.flat.leaves)
    numbers = iter(record["numbers"])
    shapes: dict[int, list[int]] = {}
    for place in call.places:
        if place.axis is None:
            leaves[place.leaf] = next(numbers)
        else:
            shapes.setdefault(place.leaf, []).append(next(numbers))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, EagerTensor):
            number = np.asarray(record["items"].get(i, 0), leaf.dtype.dtype)
            array = np.broadcast_to(number, shapes.get(i, ()))
            leaves[i] = EagerTensor(array, weak=leaf.type.weak)
            mark_as(leaves[i], marks_of(leaf))
    args, kwargs = pytree.unflatten(call.flat.spec, leaves)
    given = call.flat._replace(args=args, kwargs=kwargs, leaves=leaves)
    return Arguments.of(f, dynamic, given)
