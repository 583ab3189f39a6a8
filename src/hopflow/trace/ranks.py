"""Agreement of several processes (ranks) that jit the same function.

The arguments of the processes may differ in sizes and numbers, but all have to compile
the same program. A call that needs a trace is first traced with its own sizes and sent
to the others as a record; then each process traces for all records, in the same order.
A size that differs between processes becomes a symbol with the same hint everywhere.
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
"""The record of a call, as plain data by name. Users may add names.

kind     the function, and the structure, dtypes and ranks of its arguments
numbers  the sizes of the arguments and the numbers among them, in order
items    position of a leaf -> the number in a tensor of rank 0
outside  the types of the tensors that the function reads from outside
error    None, or the error of tracing the function in this process
"""

AllGather: TypeAlias = Callable[[Record], Sequence[Record]]
"""The record of this process -> the records of all, in the order of their ranks."""


def calls_of_all(
    all_gather: AllGather,
    f: Callable[..., Any],
    dynamic: Dynamic,
    call: Arguments,
    preflight: Callable[[], Sequence[TensorType]],
) -> list[Arguments]:
    """Return the current calls of all processes, in the order of their ranks.

    The calls of other processes have sizes and numbers, but dummy data.

    Args:
        preflight: Traces `f` for this call, and returns the types of tensors from
            outside. Its error is raised after the other processes know of it.

    Raises:
        ArgumentTypeError: `all_gather` does not return records.
        RanksError: the calls are of different kinds, or another process cannot trace
            `f`.
    """
    local, failure = _record(f, call), None
    try:
        local["outside"] = [str(type_) for type_ in preflight()]
    except Exception as error:
        failure, local["error"] = error, f"{type(error).__name__}: {error}"
    records = all_gather(local)
    if failure is not None:
        raise failure
    if not isinstance(records, Sequence) or not all(map(_is_record, records)):
        raise ArgumentTypeError(
            "jit: `ranks` must give the records of all processes, a list of what each "
            f"of them gave it, and it gave {records!r}."
        )
    for rank, record in enumerate(records):
        if record["kind"] != local["kind"]:
            raise RanksError(
                "jit: processes must make calls of one kind, in one order.\n"
                f"  here     {local['kind']}\n  rank {rank:<3} {record['kind']}"
            )
        if record["error"] is not None:
            raise RanksError(
                f"jit: rank {rank} could not trace `{name_of(f)}`, so that no process "
                f"compiles it. There it raised\n  {record['error']}"
            )
        if record["outside"] != local["outside"]:
            raise RanksError(
                f"jit: `{name_of(f)}` must read tensors of the same types from outside "
                "in all processes. Make an argument of one whose size differs.\n"
                f"  here     {', '.join(local['outside'])}\n"
                f"  rank {rank:<3} {', '.join(record['outside'])}"
            )
    return [_like(call, f, dynamic, record) for record in records]


_NAMES: Final = frozenset({"kind", "numbers", "items", "outside", "error"})


def _is_record(record: Any) -> bool:
    return isinstance(record, Mapping) and {*record} >= _NAMES


def _record(f: Callable[..., Any], call: Arguments) -> Record:
    """Return the record of a call."""
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
    """Return a call like `call` with the sizes and numbers of a record."""
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
    flat = call.flat._replace(args=args, kwargs=kwargs, leaves=leaves)
    return Arguments.of(f, dynamic, flat)
