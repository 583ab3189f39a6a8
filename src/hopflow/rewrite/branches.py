"""`if` and conditional expressions, as `hf.cond` where only a run can tell."""

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any, Final, TypeAlias

from hopflow import pytree
from hopflow.bind import Value
from hopflow.hops.cond import cond
from hopflow.rewrite.exits import RESULT
from hopflow.rewrite.growing import Chunk, Growing, chunk_of
from hopflow.rewrite.lists import extended, require_alone, require_lists
from hopflow.rewrite.parts import Named, Parts, standing_for, tried, zero, zeros_for
from hopflow.rewrite.values import (
    UNBOUND,
    Containers,
    State,
    condition,
    is_tensor,
    narrowed,
    refuse_changes,
    run_within,
)

_Names: TypeAlias = Sequence[str]

THE_RESULT: Final = "the result"


def if_(
    test: Any,
    then: Callable[[], None],
    otherwise: Callable[[], None],
    state: State,
    names: _Names,
    grows: _Names,
    containers: Containers,
    captured: _Names,
    results: _Names,
    updated: _Names,
) -> None:
    """An `if`: afterwards the names of its state have the values that it gives them.

    Args:
        names, grows: The names of the state: those that it may assign, and those of
            lists that it appends to.
        captured: Those of `names` that only functions within read.
        results: Those of `names` that are read afterwards.
        updated: The names that are written to, and not assigned.
    """
    holds = condition(test)
    if not isinstance(holds, Value):
        (then if holds else otherwise)()
        return
    refuse_changes(containers)
    alone = require_lists(state, names, grows)
    state, names = narrowed(state, names, captured)
    results = [name for name in results if name in names]
    before = state()
    lists = dict(zip(grows, before[len(names) :], strict=True))
    named = dict(zip(names, before, strict=False))
    kept = {n for n in names if n in updated and is_tensor(named[n])}
    wanted = [name for name in results if name not in kept]

    def run(branch: Callable[[], None]) -> dict[str, Any]:
        own = (*before[: len(names)], *(Growing() for _ in lists))
        _, values = run_within(state, own, before, branch)
        after = dict(zip((*names, *grows), values, strict=True))
        found = {name: after[name] for name in wanted}
        for name in grows:
            for k, entry in enumerate(after[name]):
                found[_place(name, k)] = entry
        return found

    first: Named = lambda: run(then)  # noqa: E731
    second: Named = lambda: run(otherwise)  # noqa: E731
    if grows:
        appended = _appended((first, second))
        first, second = _completed(first, appended), _completed(second, appended)
    found = _branches(holds, first, second, (then, otherwise))
    grown = []
    for name, value in lists.items():
        places = takewhile(found.__contains__, (_place(name, k) for k in count()))
        entries = Growing([found[place] for place in places])
        grown.append(extended(name, value, entries, alone=name in alone))
    state((*[found.get(n, named[n]) for n in names], *grown))


def _place(name: str, k: int) -> str:
    return f"{name}.append (no. {k})"


def _appended(blocks: Sequence[Named]) -> dict[str, Any]:
    """Chunks that hold nothing, by place, for what only one of two blocks appends."""
    found: dict[str, Any] = {}
    both: list[set[str]] = []
    for block in blocks:
        parts, types = tried(block)
        values = parts.joined(pytree.tree_map(zero, types))
        places = {n: v for n, v in values.items() if n.partition(".append (no.")[1]}
        found.update({n: chunk_of(v, present=False) for n, v in places.items()})
        both.append({n for n, v in places.items() if not isinstance(v, Chunk)})
    for place in both[0] & both[1]:
        del found[place]  # one value, whichever way it goes
    return found


def _completed(block: Named, appended: dict[str, Any]) -> Named:
    """A block with what only the other one appends."""

    def run() -> dict[str, Any]:
        found = block()
        for place, nothing in appended.items():
            found[place] = chunk_of(found[place]) if place in found else nothing
        return dict(sorted(found.items()))

    return run


def if_return(
    test: Any,
    then: Callable[[], Any],
    otherwise: Callable[[], Any],
    state: State,
    names: _Names,
    grows: _Names,
    containers: Containers,
) -> Any:
    """An `if` whose branches return."""
    holds = condition(test)
    if not isinstance(holds, Value):
        return then() if holds else otherwise()
    refuse_changes(containers)
    alone = require_lists(state, names, grows)
    for name in grows:
        require_alone(name, name in alone)
    before = state()

    def run(branch: Callable[[], Any]) -> dict[str, Any]:
        own = (*before[: len(names)], *map(list, before[len(names) :]))
        return {THE_RESULT: run_within(state, own, before, branch)[0]}

    parts = (lambda: run(then)), (lambda: run(otherwise))
    return _branches(holds, *parts, (then, otherwise))[THE_RESULT]


def if_value(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`then() if test else otherwise()`."""
    holds = condition(test)
    if not isinstance(holds, Value):
        return then() if holds else otherwise()
    found = _branches(
        holds,
        lambda: {THE_RESULT: then()},
        lambda: {THE_RESULT: otherwise()},
        (then, otherwise),
    )
    return found[THE_RESULT]


def and_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`, where its value is wanted."""
    holds = condition(first)
    if not isinstance(holds, Value):
        return first and second()
    # What is not true equals zero, here of the type that the other value has.
    zero = zeros_for(["value"], [lambda: {"value": second()}])["value"]
    return if_value(holds, second, lambda: zero)


def or_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`, where its value is wanted."""
    holds = condition(first)
    if not isinstance(holds, Value):
        return first or second()
    value = first if isinstance(first, Value) else holds
    if value.type.dtype.kind == "b":  # True equals one of the other's type
        zero = zeros_for(["value"], [lambda: {"value": second()}])["value"]
        numeric = isinstance(zero, Value) and zero.type.dtype.kind != "b"
        if numeric or type(zero) in (int, float):
            value = value + zero
    return if_value(holds, lambda: value, second)


def _branches(
    holds: Value,
    then: Named,
    otherwise: Named,
    written: Sequence[Callable[..., Any]],
) -> dict[str, Any]:
    """The values of one branch, which a run chooses; `written` are the user's."""
    parts: list[Parts] = []

    def run(branch: Named, other: Named) -> dict[str, Any]:
        found = branch()
        for name in {RESULT, THE_RESULT} & found.keys():
            if found[name] is UNBOUND:  # then it is not read
                found.update(zeros_for([name], [other]))
        parts.append(Parts.of(found))
        parts[0].check_same(parts[-1], "branches of an `if` on a tensor differ in it")
        return parts[-1].data

    first, second = written
    data = cond(
        holds,
        standing_for(first, "then", lambda: run(then, otherwise)),
        standing_for(second, "else", lambda: run(otherwise, then)),
    )
    found = parts[0].joined(data)
    for name, x in parts[0].data.items():
        others = [other.data[name] for other in parts[1:]]
        if others and type(x) in _NUMBERS and all(_same(x, other) for other in others):
            found[name] = x  # it need not be chosen
    return found


_NUMBERS: Final = (bool, int, float)


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y)
