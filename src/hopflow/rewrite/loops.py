"""`while` and `for`, as `hf.while_loop`, `hf.fori_loop` and `hf.scan` where only a run
can tell how many steps they take, or there are tensors to run over."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.dtypes import int64
from hopflow.errors import ControlFlowError
from hopflow.hops.scanning import scan
from hopflow.hops.while_loop import fori_loop, while_loop
from hopflow.ops.creation import arange, zeros
from hopflow.ops.elementwise import logical_and
from hopflow.ops.manipulation import reshape
from hopflow.rewrite.branches import if_
from hopflow.rewrite.exits import RESULT
from hopflow.rewrite.growing import Chunk, Growing, joined_chunks
from hopflow.rewrite.items import Items, items_of, taken
from hopflow.rewrite.lists import alone, weak_rows
from hopflow.rewrite.parts import Parts, standing_for, zeros_for
from hopflow.rewrite.rows import Rows
from hopflow.rewrite.values import (
    UNBOUND,
    Containers,
    State,
    condition,
    is_tensor,
    narrowed,
    not_,
    python_containers,
    refuse_changes,
    run_within,
)
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import user_line
from hopflow.trace.tracer import Tracer

_Names: TypeAlias = Sequence[str]
_Values: TypeAlias = tuple[Any, ...]
_Step: TypeAlias = Callable[..., _Values]


# --- while ----------------------------------------------------------------------------


def while_(
    test: Callable[[], Any],
    body: Callable[[], None],
    state: State,
    names: _Names,
    captured: _Names,
    containers: Containers,
    updated: _Names,
    test_assigns: bool,
) -> None:
    """A `while`: afterwards the names of its state have the values that it gives them.

    Args:
        captured: Those of `names` that only functions within read.
        updated: The names that are written to, and not assigned.
        test_assigns: Whether the condition may assign names.
    """
    while True:
        around = current()
        marks = mark(around) if isinstance(around, Tracer) else []
        holds = condition(test())
        if isinstance(holds, Value):
            break
        if not holds:
            return
        body()
    refuse_changes(containers)
    state, names = narrowed(state, names, captured)
    before = state()

    def asked(*own: Any) -> Any:
        return run_within(state, own, before, lambda: condition(test()))[0]

    def step(*own: Any) -> _Values:
        return run_within(state, own, before, body)[1]

    if around.is_eager or test_assigns:
        after = _while_asked(holds, test, body, state, names, updated)
    else:
        rollback(marks)  # the loop asks by itself
        after = _while(
            standing_for(test, "test", asked),
            standing_for(body, "body", step),
            before,
            names,
            updated,
            (RESULT,),
        )
    state(after)


def _while_asked(
    holds: Value,
    test: Callable[[], Any],
    body: Callable[[], None],
    state: State,
    names: _Names,
    updated: _Names,
) -> _Values:
    """A loop whose condition was asked before the first step: it begins with the
    answer, so that what the condition does besides is done once a step."""
    before = state()
    count = len(names)

    def run() -> Any:
        body()
        return condition(test())

    def step(*own: Any) -> _Values:
        answer, after = run_within(state, own[:count], before, run)
        return (*after, answer)

    return _while(
        standing_for(test, "test", lambda *own: own[count]),
        standing_for(body, "body", step),
        (*before, holds),
        (*names, "the condition"),
        updated,
        (RESULT,),
    )[:count]


def _while(
    test: _Step,
    body: _Step,
    values: _Values,
    names: _Names,
    updated: _Names,
    unbound: _Names,
) -> _Values:
    """A loop whose condition only a run can tell."""
    carry = _Carry(names, _bound(body, values, names, unbound), updated)
    last = while_loop(
        standing_for(test, "test", lambda data: condition(test(*carry.state(data)))),
        standing_for(body, "body", lambda data: carry.after(body(*carry.state(data)))),
        carry.data,
    )
    return carry.last(last)


# --- for ------------------------------------------------------------------------------


def plain_items(items: Any, reason: str) -> Any:
    """What a `for` that must stay Python runs over.

    Raises:
        ControlFlowError: only a run knows how many there are.
    """
    found = items_of(items)
    if found is not None and not isinstance(found.length, int):
        raise ControlFlowError(
            "control_flow: this `for` depends on a tensor and cannot be rewritten: "
            f"{reason} ({user_line()})."
        )
    return items


class _Flag(NamedTuple):
    """The name that ends a loop, and what reads it."""

    name: str
    get: Callable[[], Any]


def for_(
    items: Any,
    body: Callable[[Any], None],
    state: State,
    names: _Names,
    captured: _Names,
    grows: _Names,
    containers: Containers,
    updated: _Names,
    flag: tuple[str, Callable[[], Any]] | None,
    targets: _Names,
) -> None:
    """A `for`: afterwards the names of its state have the values that it gives them.

    Args:
        names, grows: The names of the state: those that it may assign, and those of
            lists that it does nothing with but to append to them.
        captured: Those of `names` that only functions within read.
        updated: The names that are written to, and not assigned.
        flag: The name that ends the loop, if there is one, and what reads it.
        targets: The names that take the items.
    """
    found = items_of(items)
    if found is not None:
        reason = _unrolled(state, names, grows, containers)
        if reason is None:
            state, names = narrowed(state, names, captured)
            loop = _For(found, body, state, names, grows, updated, targets)
            taken(items)
            loop.run(None if flag is None else flag[0])
            return
        if not isinstance(found.length, int):
            refuse_changes(containers)
            raise ControlFlowError(f"control_flow: {reason} ({user_line()}).")
    for item in items:
        if flag is None:
            body(item)
            continue
        stop = condition(flag[1]())
        if isinstance(stop, Value):
            if_(
                stop,
                _nothing,
                standing_for(body, "else", lambda item=item: body(item)),
                state,
                names,
                grows,
                containers,
                captured,
                names,
                updated,
            )
        else:
            body(item)
        if condition(flag[1]()) is True:
            break


def _nothing() -> None:
    pass


def _unrolled(
    state: State, names: _Names, grows: _Names, containers: Containers
) -> str | None:
    """Why Python must run over items that an operator could run over, if it must."""
    if python_containers(containers):
        return "the loop changes a container"
    for k, name in enumerate(grows, len(names)):
        kind = type(state()[k])
        if kind is not Growing and (kind not in (list, Rows) or not alone(state, k)):
            return (
                f"a loop whose number of steps only a run knows appends to `{name}`, "
                "which is no list, or has another name or place too. Begin with `[]` "
                "in this function, and give it away after the loop"
            )
    return None


class _For:
    """A loop over items that an operator takes."""

    def __init__(
        self,
        items: Items,
        body: Callable[[Any], None],
        state: State,
        names: _Names,
        grows: _Names,
        updated: _Names,
        targets: _Names,
    ) -> None:
        self.items = items
        self.body = body
        self.state = state
        self.names = names
        self.grows = grows
        self.updated = updated
        self.targets = targets
        self.before = state()
        self.chunks: dict[str, tuple[Chunk, list[bool]] | None] = {}
        # Slices cannot be taken one after another if only a run knows how many.
        no_slices = not pytree.flatten(items.xs)[0]
        self.by_number = no_slices or isinstance(items.length, Value)

    def run(self, flag: str | None) -> None:
        length = self.items.length
        if isinstance(length, int) and length == 0:
            return
        values = self.before[: len(self.names)]
        at_any = zeros((), dtype=int64)
        values = _bound(
            lambda *own: self.step(self.items.at(at_any), own)[0],
            values,
            self.names,
            (RESULT, *self.targets),
        )
        if flag is not None and not self.grows:
            self.state(self.counted(flag, values))
            return
        carry = _Carry(self.names, values, self.updated)
        if self.grows:
            self.state(self.growing(flag, carry))
        elif self.by_number:
            self.state(carry.last(self.fori(carry)))
        else:
            last, _ = self.scanned(carry)
            self.state(carry.last(last))

    def step(self, item: Any, own: _Values) -> tuple[_Values, dict[str, Growing]]:
        """The state after a step, and what it appends."""
        state = (*own, *(Growing() for _ in self.grows))
        _, after = run_within(self.state, state, self.before, lambda: self.body(item))
        count = len(self.names)
        return after[:count], dict(zip(self.grows, after[count:], strict=True))

    def counted(self, flag: str, values: _Values) -> _Values:
        """A loop that a flag may end."""
        at, count, length = self.names.index(flag), len(self.names), self.items.length

        def test(*own: Any) -> Any:
            return logical_and(own[count] < length, not_(own[at]))

        def step(*own: Any) -> _Values:
            k = own[count]
            return (*self.step(self.items.at(k), own[:count])[0], k + 1)

        names = (*self.names, "the step")
        return _while(
            test,
            standing_for(self.body, "body", step),
            (*values, 0),
            names,
            self.updated,
            (RESULT,),
        )[:count]

    def fori(self, carry: "_Carry") -> Any:
        def step(k: Any, data: Any) -> Any:
            return carry.after(self.step(self.items.at(k), carry.state(data))[0])

        run = standing_for(self.body, "body", step)
        return fori_loop(0, self.items.length, run, carry.data)

    def scanned(self, carry: "_Carry", **options: Any) -> Any:
        """A scan over the items, and what its steps append."""
        counts = self.by_number or self.items.counts
        xs = None if self.by_number else self.items.xs

        def step(own: Any, x: Any) -> Any:
            k, data = own if counts else (None, own)
            item = self.items.at(k) if self.by_number else self.items.pick(k, x)
            after, lists = self.step(item, carry.state(data))
            data = carry.after(after)
            appended = {n: self.appended(n, entries) for n, entries in lists.items()}
            return (data if k is None else (k + 1, data)), appended

        init = (0, carry.data) if counts else carry.data
        run = standing_for(self.body, "body", step)
        last, *found = scan(run, init, xs, **options)
        return (last[1] if counts else last), *found

    def appended(self, name: str, entries: Growing) -> Any:
        """What a step appends to a list, as its operator returns it."""
        if not entries:
            self.chunks[name] = None
            return None
        chunk = joined_chunks(entries)
        if chunk is None:
            raise ControlFlowError(
                f"control_flow: a loop on a tensor appends values of differing "
                f"structures to `{name}` ({user_line()}). Use a list for each."
            )
        self.chunks[name] = chunk, weak_rows(entries)
        return chunk

    def growing(self, flag: str | None, carry: "_Carry") -> _Values:
        """A loop that appends to lists."""
        length = self.items.length
        options: dict[str, Any] = {}
        if self.by_number:
            options["length"] = length.item() if isinstance(length, Value) else length
        if flag is not None:
            at = self.names.index(flag)
            counts = self.by_number or self.items.counts

            def stops(own: Any) -> Any:
                return condition(carry.state(own[1] if counts else own)[at])

            options["until"] = stops
        last, appended, *steps = self.scanned(carry, **options)
        lists = [
            self.made(name, value, appended[name], *steps)
            for name, value in zip(
                self.grows, self.before[len(self.names) :], strict=True
            )
        ]
        return (*carry.last(last), *lists)

    def made(self, name: str, before: list[Any], chunks: Any, *steps: Any) -> Any:
        """A list with what the steps have appended."""
        known = self.chunks[name]
        if known is None:
            return before
        leaves, spec = pytree.flatten(chunks.rows)
        n, m, *_ = leaves[0].shape
        rows = [reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in leaves]
        mask = None if chunks.mask is None else reshape(chunks.mask, (n * m,))
        if steps:  # of those that were made
            done = arange(n * m) < steps[0] * m
            mask = done if mask is None else logical_and(done, mask)
        if isinstance(before, Growing):
            before.append(Chunk(pytree.unflatten(spec, rows), mask))
            return before
        if mask is not None:
            rows = [x[mask] for x in rows]
        made = Rows(pytree.unflatten(spec, rows), known[1])
        return made.after(before)


# --- state ----------------------------------------------------------------------------


def _bound(body: _Step, state: _Values, names: _Names, unbound: _Names) -> _Values:
    """The state with zeros for names of `unbound` that have no value yet, of the types
    that a step gives them.

    Raises:
        ControlFlowError: another name has none.
    """
    values = dict(zip(names, state, strict=True))
    missing = [name for name, value in values.items() if value is UNBOUND]
    for name in missing:
        if name not in unbound:
            raise ControlFlowError(
                f"control_flow: `{name}` is used in or after a loop on a tensor, which "
                f"may take no step, and has no value before it ({user_line()}). Assign "
                f"`{name}` before the loop."
            )
    if missing:
        step = lambda: dict(zip(names, body(*state), strict=True))  # noqa: E731
        values.update(zeros_for(missing, [step]))
    return tuple(values.values())


class _Carry:
    """The state of a loop as an operator carries it: what it assigns. It writes to the
    tensors that it only updates, and so to what other names have of them."""

    def __init__(self, names: _Names, state: _Values, updated: _Names) -> None:
        values = dict(zip(names, state, strict=True))
        self.names = names
        self.kept = {n: values[n] for n in updated if is_tensor(values.get(n))}
        self.parts = Parts.of(self.assigned(state))
        self.data = self.parts.data
        self.first = values
        self.entered: dict[str, Any] = {}
        self.varying: set[str] = set()

    def assigned(self, state: _Values) -> dict[str, Any]:
        values = zip(self.names, state, strict=True)
        return {name: value for name, value in values if name not in self.kept}

    def state(self, data: dict[str, Any]) -> _Values:
        values = {**self.kept, **self.parts.joined(data)}
        self.entered = values
        return tuple([values[name] for name in self.names])

    def last(self, data: dict[str, Any]) -> _Values:
        """The state after the loop; what no step has changed is what it was."""
        values = {**self.kept, **self.parts.joined(data)}
        return tuple(
            [
                values[name] if name in self.varying else self.first[name]
                for name in self.names
            ]
        )

    def after(self, state: _Values) -> dict[str, Any]:
        """The data of a state that a step gives."""
        assigned = self.assigned(state)
        self.varying |= {n for n, x in assigned.items() if x is not self.entered[n]}
        parts = Parts.of(assigned)
        self.parts.check_same(parts, "a step changes it")
        return parts.data
