"""`while` and `for` as `hf.while_loop`, `hf.fori_loop` and `hf.scan`, if the number of
steps is known only at run time, or a loop iterates over tensors."""

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
from hopflow.pytree import tree_map
from hopflow.rewrite.branches import if_
from hopflow.rewrite.exits import RESULT
from hopflow.rewrite.growing import Chunk, Growing, joined_chunks
from hopflow.rewrite.items import Items, exhaust, items_of
from hopflow.rewrite.lists import is_unshared, weak_rows
from hopflow.rewrite.parts import Parts, shown_as, unknown, zeros_for
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
    run_with_state,
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
    """Run a `while`, and assign the final values to the names of its state.

    Args:
        captured: The names that only inner functions read.
        updated: The names that are written in place, and not assigned.
        test_assigns: Whether the condition may assign names.
    """
    while True:
        interpreter = current()
        marks = mark(interpreter) if isinstance(interpreter, Tracer) else []
        holds = condition(test())
        if isinstance(holds, Value):
            break
        if not holds:
            return
        body()
    refuse_changes(containers)
    state, names = narrowed(state, names, captured)
    before = state()

    def evaluate(*values: Any) -> Any:
        return run_with_state(state, values, before, lambda: condition(test()))[0]

    def step(*values: Any) -> _Values:
        return run_with_state(state, values, before, body)[1]

    if interpreter.is_eager or test_assigns:
        after = _while_after_test(holds, test, body, state, names, updated)
    else:
        rollback(marks)  # the operator evaluates the condition again
        after = _while(
            shown_as(test, "test", evaluate),
            shown_as(body, "body", step),
            before,
            names,
            updated,
            (RESULT,),
        )
    state(after)


def _while_after_test(
    holds: Value,
    test: Callable[[], Any],
    body: Callable[[], None],
    state: State,
    names: _Names,
    updated: _Names,
) -> _Values:
    """Return the final state of a loop whose condition was already evaluated before the
    first step. Its value is part of the carry, so that side effects of the condition
    happen once per step."""
    before = state()
    count = len(names)

    def run() -> Any:
        body()
        return condition(test())

    def step(*values: Any) -> _Values:
        answer, after = run_with_state(state, values[:count], before, run)
        return (*after, answer)

    return _while(
        shown_as(test, "test", lambda *values: values[count]),
        shown_as(body, "body", step),
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
    """Return the final state of a loop by `hf.while_loop`."""
    carry = _Carry(names, _bound(body, values, names, unbound), updated)
    last = while_loop(
        shown_as(test, "test", lambda data: condition(test(*carry.state(data)))),
        shown_as(body, "body", lambda data: carry.after(body(*carry.state(data)))),
        carry.data,
    )
    return carry.last(last)


# --- for ------------------------------------------------------------------------------


def plain_items(items: Any, reason: str) -> Any:
    """Return the items of a `for` that remains Python.

    Raises:
        ControlFlowError: their number is known only at run time.
    """
    operator_items = items_of(items)
    if operator_items is not None and not isinstance(operator_items.length, int):
        raise ControlFlowError(
            "control_flow: this `for` depends on a tensor and cannot be rewritten: "
            f"{reason} ({user_line()})."
        )
    return items


class _Flag(NamedTuple):
    """The flag that ends a loop, and the function that reads it."""

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
    """Run a `for`, and assign the final values to the names of its state.

    Args:
        names, grows: The names of the state: those that the loop may assign, and those
            of lists that it only appends to.
        captured: The names that only inner functions read.
        updated: The names that are written in place, and not assigned.
        flag: The name of the flag that ends the loop, and the function that reads it.
        targets: The names that the items are assigned to.
    """
    operator_items = items_of(items)
    if operator_items is not None:
        reason = _unrolled(state, names, grows, containers)
        if reason is None:
            state, names = narrowed(state, names, captured)
            loop = _For(operator_items, body, state, names, grows, updated, targets)
            exhaust(items)
            loop.run(None if flag is None else flag[0])
            return
        if not isinstance(operator_items.length, int):
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
                shown_as(body, "else", lambda item=item: body(item)),
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
    """Return why a loop cannot be an operator but must be Python; None: it can."""
    if python_containers(containers):
        return "the loop changes a container"
    for k, name in enumerate(grows, len(names)):
        kind = type(state()[k])
        if kind is not Growing and (
            kind not in (list, Rows) or not is_unshared(state, k)
        ):
            return (
                f"a loop whose number of steps only a run knows appends to `{name}`, "
                "which is no list, or has another name or place too. Begin with `[]` "
                "in this function, and give it away after the loop"
            )
    return None


class _For:
    """A `for` as an operator.

    items      its items
    names      the names that it may assign
    grows      the names of lists that it appends to
    before     the state before the loop
    chunks     name of a list -> what a step appends, and which leaves are weak
    by_number  whether items are taken by index, and not as slices of a scan
    """

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
        # `hf.scan` needs the number of slices.
        no_slices = not pytree.flatten(items.xs)[0]
        self.by_number = no_slices or isinstance(items.length, Value)

    def run(self, flag: str | None) -> None:
        """Run the loop, which ends early if the flag `flag` is set."""
        length = self.items.length
        if isinstance(length, int) and length == 0:
            return
        values = self.before[: len(self.names)]
        index = zeros((), dtype=int64)
        values = _bound(
            lambda *state: self.step(self.items.at(index), state)[0],
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

    def step(self, item: Any, values: _Values) -> tuple[_Values, dict[str, Growing]]:
        """Return the state after a step, and what the step appends to each list."""
        state = (*values, *(Growing() for _ in self.grows))
        _, after = run_with_state(
            self.state, state, self.before, lambda: self.body(item)
        )
        count = len(self.names)
        return after[:count], dict(zip(self.grows, after[count:], strict=True))

    def counted(self, flag: str, values: _Values) -> _Values:
        """Return the final state of a loop that a flag may end."""
        position, count, length = (
            self.names.index(flag),
            len(self.names),
            self.items.length,
        )

        def test(*carry: Any) -> Any:
            return logical_and(carry[count] < length, not_(carry[position]))

        def step(*carry: Any) -> _Values:
            k = carry[count]
            return (*self.step(self.items.at(k), carry[:count])[0], k + 1)

        names = (*self.names, "the step")
        return _while(
            test,
            shown_as(self.body, "body", step),
            (*values, 0),
            names,
            self.updated,
            (RESULT,),
        )[:count]

    def fori(self, carry: "_Carry") -> Any:
        """Run the loop as a `hf.fori_loop`."""

        def step(k: Any, data: Any) -> Any:
            return carry.after(self.step(self.items.at(k), carry.state(data))[0])

        run = shown_as(self.body, "body", step)
        return fori_loop(0, self.items.length, run, carry.data)

    def scanned(self, carry: "_Carry", **options: Any) -> Any:
        """Run the loop as a `hf.scan`, whose outputs are what the steps append."""
        counts = self.by_number or self.items.counts
        xs = None if self.by_number else self.items.xs

        def step(state: Any, x: Any) -> Any:
            k, data = state if counts else (None, state)
            item = self.items.at(k) if self.by_number else self.items.pick(k, x)
            after, lists = self.step(item, carry.state(data))
            data = carry.after(after)
            appended = {n: self.appended(n, entries) for n, entries in lists.items()}
            return (data if k is None else (k + 1, data)), appended

        init = (0, carry.data) if counts else carry.data
        run = shown_as(self.body, "body", step)
        last, *outputs = scan(run, init, xs, **options)
        return (last[1] if counts else last), *outputs

    def appended(self, name: str, entries: Growing) -> Any:
        """Return what a step appends to a list, as an output of the scan."""
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
        """Return the final state of a loop that appends to lists."""
        length = self.items.length
        options: dict[str, Any] = {}
        if self.by_number:
            options["length"] = length.item() if isinstance(length, Value) else length
        if flag is not None:
            position = self.names.index(flag)
            counts = self.by_number or self.items.counts

            def stops(state: Any) -> Any:
                return condition(carry.state(state[1] if counts else state)[position])

            options["until"] = stops
        last, appended, *steps = self.scanned(carry, **options)
        lists = [
            self.grown_list(name, value, appended[name], *steps)
            for name, value in zip(
                self.grows, self.before[len(self.names) :], strict=True
            )
        ]
        return (*carry.last(last), *lists)

    def grown_list(self, name: str, before: list[Any], chunks: Any, *steps: Any) -> Any:
        """Return a list with what the steps have appended.

        Args:
            chunks: The output of the scan: the entries of all steps, stacked.
            steps: The number of steps, if the loop can end early.
        """
        chunk = self.chunks[name]
        if chunk is None:
            return before
        leaves, spec = pytree.flatten(chunks.rows)
        n, m, *_ = leaves[0].shape
        rows = [reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])) for x in leaves]
        mask = None if chunks.mask is None else reshape(chunks.mask, (n * m,))
        if steps:  # only entries of executed steps count
            done = arange(n * m) < steps[0] * m
            mask = done if mask is None else logical_and(done, mask)
        if isinstance(before, Growing):
            before.append(Chunk(pytree.unflatten(spec, rows), mask))
            return before
        if mask is not None:
            rows = [x[mask] for x in rows]
        appended = Rows(pytree.unflatten(spec, rows), chunk[1])
        return appended.after(before)


# --- state ----------------------------------------------------------------------------


def _bound(body: _Step, state: _Values, names: _Names, unbound: _Names) -> _Values:
    """Return the state with zeros for unbound names in `unbound`, of the types that a
    step assigns to them.

    Raises:
        ControlFlowError: another name is unbound.
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
        values.update(zeros_for(missing, [lambda: _after(body, state, names)]))
    if still := [name for name in missing if values[name] is UNBOUND]:
        # What a number decides before the first step is a branch in the loop.
        values.update(
            zeros_for(still, [lambda: _after(body, tree_map(unknown, state), names)])
        )
    return tuple(values.values())


def _after(body: _Step, state: _Values, names: _Names) -> dict[str, Any]:
    """Return the values of names after a step."""
    return dict(zip(names, body(*state), strict=True))


class _Carry:
    """The carry of a loop: the values of the names that it assigns. Tensors that it
    only updates are no part of it: the body writes to them in place.

    kept      the tensors that are only updated, by name
    data      the initial carry
    first     the state before the loop
    entered   the state at the start of the current step
    varying   the names that a step has changed
    """

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
        """Return the part of a state that is carried, by name."""
        values = zip(self.names, state, strict=True)
        return {name: value for name, value in values if name not in self.kept}

    def state(self, data: dict[str, Any]) -> _Values:
        """Return the state at the start of a step, from the carry."""
        values = {**self.kept, **self.parts.joined(data)}
        self.entered = values
        return tuple([values[name] for name in self.names])

    def last(self, data: dict[str, Any]) -> _Values:
        """Return the state after the loop; names that no step changes keep their
        values."""
        values = {**self.kept, **self.parts.joined(data)}
        return tuple(
            [
                values[name] if name in self.varying else self.first[name]
                for name in self.names
            ]
        )

    def after(self, state: _Values) -> dict[str, Any]:
        """Return the carry for the state at the end of a step."""
        assigned = self.assigned(state)
        self.varying |= {n for n, x in assigned.items() if x is not self.entered[n]}
        parts = Parts.of(assigned)
        self.parts.check_same(parts, "a step changes it")
        return parts.data
