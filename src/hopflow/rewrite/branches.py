"""`if` and conditional expressions as `hf.cond`, if the condition is a tensor."""

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any, Final, TypeAlias

from hopflow import pytree
from hopflow.bind import Value
from hopflow.hops.cond import cond
from hopflow.rewrite.exits import RESULT
from hopflow.rewrite.growing import Chunk, Growing, chunk_of
from hopflow.rewrite.lists import extended, require_lists, require_unshared
from hopflow.rewrite.parts import Named, Parts, dry_run, shown_as, zero, zeros_for
from hopflow.rewrite.values import (
    UNBOUND,
    Containers,
    State,
    condition,
    is_tensor,
    narrowed,
    refuse_changes,
    run_with_state,
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
    """Run an `if`, and assign the final values to the names of its state.

    Args:
        names, grows: The names of the state: those that it may assign, and those of
            lists that it appends to.
        captured: The names that only inner functions read.
        results: The names that are live afterwards.
        updated: The names that are written in place, and not assigned.
    """
    holds = condition(test)
    if not isinstance(holds, Value):
        (then if holds else otherwise)()
        return
    refuse_changes(containers)
    unshared = require_lists(state, names, grows)
    state, names = narrowed(state, names, captured)
    results = [name for name in results if name in names]
    before = state()
    lists = dict(zip(grows, before[len(names) :], strict=True))
    named = dict(zip(names, before, strict=False))
    in_place = {n for n in names if n in updated and is_tensor(named[n])}
    live = [name for name in results if name not in in_place]

    def run(branch: Callable[[], None]) -> dict[str, Any]:
        start = (*before[: len(names)], *(Growing() for _ in lists))
        _, values = run_with_state(state, start, before, branch)
        after = dict(zip((*names, *grows), values, strict=True))
        outputs = {name: after[name] for name in live}
        for name in grows:
            for k, entry in enumerate(after[name]):
                outputs[_place(name, k)] = entry
        return outputs

    first: Named = lambda: run(then)  # noqa: E731
    second: Named = lambda: run(otherwise)  # noqa: E731
    if grows:
        appended = _appended((first, second))
        first, second = _completed(first, appended), _completed(second, appended)
    outputs = _branches(holds, first, second, (then, otherwise))
    grown = []
    for name, value in lists.items():
        places = takewhile(outputs.__contains__, (_place(name, k) for k in count()))
        entries = Growing([outputs[place] for place in places])
        grown.append(extended(name, value, entries, is_unshared=name in unshared))
    state((*[outputs.get(n, named[n]) for n in names], *grown))


def _place(name: str, k: int) -> str:
    """Return the key of the entry `k` that a branch appends to a list."""
    return f"{name}.append (no. {k})"


def _appended(blocks: Sequence[Named]) -> dict[str, Any]:
    """Return empty chunks, by place, for what only one of two branches appends."""
    empty: dict[str, Any] = {}
    always: list[set[str]] = []
    for block in blocks:
        parts, types = dry_run(block)
        values = parts.joined(pytree.tree_map(zero, types))
        places = {n: v for n, v in values.items() if n.partition(".append (no.")[1]}
        empty.update({n: chunk_of(v, present=False) for n, v in places.items()})
        always.append({n for n, v in places.items() if not isinstance(v, Chunk)})
    for place in always[0] & always[1]:
        del empty[place]  # both branches append one value
    return empty


def _completed(block: Named, appended: dict[str, Any]) -> Named:
    """Return a branch that also has empty chunks for what only the other appends."""

    def run() -> dict[str, Any]:
        results = block()
        for place, empty in appended.items():
            results[place] = chunk_of(results[place]) if place in results else empty
        return dict(sorted(results.items()))

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
    """Run an `if` whose branches return, and return its result."""
    holds = condition(test)
    if not isinstance(holds, Value):
        return then() if holds else otherwise()
    refuse_changes(containers)
    unshared = require_lists(state, names, grows)
    for name in grows:
        require_unshared(name, name in unshared)
    before = state()

    def run(branch: Callable[[], Any]) -> dict[str, Any]:
        start = (*before[: len(names)], *map(list, before[len(names) :]))
        return {THE_RESULT: run_with_state(state, start, before, branch)[0]}

    parts = (lambda: run(then)), (lambda: run(otherwise))
    return _branches(holds, *parts, (then, otherwise))[THE_RESULT]


def if_value(test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`then() if test else otherwise()`."""
    holds = condition(test)
    if not isinstance(holds, Value):
        return then() if holds else otherwise()
    results = _branches(
        holds,
        lambda: {THE_RESULT: then()},
        lambda: {THE_RESULT: otherwise()},
        (then, otherwise),
    )
    return results[THE_RESULT]


def and_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`, if its value is used."""
    holds = condition(first)
    if not isinstance(holds, Value):
        return first and second()
    # A false value equals zero, here of the type of the other value.
    zero = zeros_for(["value"], [lambda: {"value": second()}])["value"]
    return if_value(holds, second, lambda: zero)


def or_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`, if its value is used."""
    holds = condition(first)
    if not isinstance(holds, Value):
        return first or second()
    value = first if isinstance(first, Value) else holds
    if value.type.dtype.kind == "b":  # True is one of the other's type
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
    """Return the results of the branch that is chosen at run time, by `hf.cond`.

    Args:
        written: The user's functions for the branches, for error messages.
    """
    parts: list[Parts] = []

    def run(branch: Named, other: Named) -> dict[str, Any]:
        results = branch()
        for name in {RESULT, THE_RESULT} & results.keys():
            if results[name] is UNBOUND:  # then it is not read
                results.update(zeros_for([name], [other]))
        parts.append(Parts.of(results))
        parts[0].check_same(parts[-1], "branches of an `if` on a tensor differ in it")
        return parts[-1].data

    first, second = written
    data = cond(
        holds,
        shown_as(first, "then", lambda: run(then, otherwise)),
        shown_as(second, "else", lambda: run(otherwise, then)),
    )
    results = parts[0].joined(data)
    for name, x in parts[0].data.items():
        others = [other.data[name] for other in parts[1:]]
        if others and type(x) in _NUMBERS and all(_same(x, other) for other in others):
            results[name] = x  # equal in both branches
    return results


_NUMBERS: Final = (bool, int, float)


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y)
