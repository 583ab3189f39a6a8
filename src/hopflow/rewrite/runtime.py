"""What rewritten code calls: an operator where a condition is a tensor, else Python."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.dtypes import int64
from hopflow.errors import ControlFlowError, DataDependentError, TraceError
from hopflow.graph.types import TensorType
from hopflow.hops.bodies import Function, trace_body
from hopflow.hops.cond import cond
from hopflow.hops.scan import scan
from hopflow.hops.while_loop import fori_loop, while_loop
from hopflow.ops.check import check
from hopflow.ops.creation import zeros
from hopflow.ops.elementwise import logical_and, logical_not, maximum, not_equal, sign
from hopflow.pytree import Spec
from hopflow.rewrite.exits import RESULT
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import user_line
from hopflow.trace.tracer import Tracer

__all__ = [
    *(
        "UNBOUND",
        "and_",
        "and_value",
        "asking",
        "assert_",
        "augmented",
        "compare",
        "for_",
        "if_",
    ),
    *("if_return", "load", "not_", "or_", "or_value", "plain", "plain_items"),
    *("plain_subject", "range_", "while_"),
]

State: TypeAlias = tuple[Any, ...]
_Names: TypeAlias = Sequence[str]
_Named: TypeAlias = Callable[[], dict[str, Any]]


class _Unbound:
    def __repr__(self) -> str:
        return "<unbound>"


UNBOUND: Final = _Unbound()
"""The value of a name that has none."""


def load(get: Callable[[], Any]) -> Any:
    """What a name holds, `UNBOUND` if nothing."""
    try:
        return get()
    except NameError:
        return UNBOUND


def augmented(op: str, x: Any, y: Any) -> Any:
    """`x += y`: into a tensor, but not into a number that a trace has for a tensor."""
    name = _OPERATORS[op]
    in_place = "" if isinstance(x, Value) and not _is_tensor(x) else "i"
    return getattr(operator, f"__{in_place}{name}__")(x, y)


_OPERATORS: Final = dict(
    pair.split(":")
    for pair in (
        "Add:add Sub:sub Mult:mul MatMult:matmul Div:truediv FloorDiv:floordiv Mod:mod "
        "Pow:pow LShift:lshift RShift:rshift BitAnd:and BitOr:or BitXor:xor"
    ).split()
)


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor in plain Python too, which `+=` writes to."""
    return isinstance(value, Value) and not (value.type.weak and not value.type.shape)


# --- conditions -----------------------------------------------------------------------


def condition(test: Any) -> bool | Value:
    """A condition as a bool, or as a tensor of bools if only a run can tell."""
    if isinstance(test, SymBool):
        try:
            return bool(test)
        except DataDependentError:
            return current().value_of(test)
    if isinstance(test, Value):
        return test if test.type.dtype.kind == "b" else not_equal(test, 0)
    return bool(test)


def and_(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return holds and second()
    return cond(holds, lambda: condition(second()), lambda: False)


def or_(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return holds or second()
    return cond(holds, lambda: True, lambda: condition(second()))


def and_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`, where its value is wanted."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return first and second()
    # What is not true equals zero, here of the type that the other value has.
    zero = _zeros_for(["value"], [lambda: {"value": second()}])["value"]
    return if_return(holds, second, lambda: zero, ())


def or_value(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`, where its value is wanted."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return first or second()
    value = first if isinstance(first, Value) else holds
    if value.type.dtype.kind == "b":  # True equals one of the other's type
        zero = _zeros_for(["value"], [lambda: {"value": second()}])["value"]
        numeric = isinstance(zero, Value) and zero.type.dtype.kind != "b"
        if numeric or type(zero) in (int, float):
            value = value + zero
    return if_return(holds, lambda: value, second, ())


def not_(test: Any) -> Any:
    """`not test`."""
    holds = condition(test)
    return logical_not(holds) if isinstance(holds, Value) else not holds


def compare(first: Any, *pairs: Callable[..., Any]) -> Any:
    """`first < second() < …`: comparisons, each followed by what it compares with."""
    holds, value = pairs[:2]
    other = value()
    found = holds(first, other)
    if len(pairs) == 2:
        return found
    return and_(found, lambda: compare(other, *pairs[2:]))


def assert_(test: Any, message: Callable[[], Any]) -> None:
    """`assert test, message()`, as `hf.check` if only a run can tell."""
    holds = condition(test)
    if isinstance(holds, Value):
        text = message()
        check(holds, "the assertion does not hold" if text is None else str(text))
    elif not holds:
        text = message()
        raise AssertionError(*([] if text is None else [text]))


def plain(test: Any, kind: str, reason: str) -> Any:
    """The condition of what must stay Python.

    Raises:
        ControlFlowError: only a run can tell it.
    """
    try:
        bool(test)
    except (TraceError, DataDependentError) as error:
        raise ControlFlowError(
            f"control_flow: this `{kind}` depends on a tensor and cannot be rewritten: "
            f"{reason} ({user_line()})."
        ) from error
    return test


def asking(asked: Any, containers: Sequence[Any], names: _Names) -> Any:
    """What decides over a block that sets items of containers.

    Raises:
        ControlFlowError: only a run knows it, and one of them is Python's.
    """
    if isinstance(asked, Value | _Range):
        for name, container in zip(names, containers, strict=True):
            if isinstance(container, list | dict):
                raise ControlFlowError(
                    f"control_flow: a block that depends on a tensor sets an item of "
                    f"`{name}`, which is a `{type(container).__name__}`, and no tensor "
                    f"({user_line()}). Assign local names in it, and the item after."
                )
    return asked


# --- branches -------------------------------------------------------------------------


def if_(
    test: Any,
    then: Callable[..., State],
    otherwise: Callable[..., State],
    args: State,
    params: _Names,
    results: _Names,
    updated: _Names,
) -> State:
    """An `if`: the values of the names that it may assign.

    Args:
        params: The names of `args`.
        updated: The names that are written to, and not assigned.
    """
    holds = condition(test)
    if not isinstance(holds, Value):
        return (then if holds else otherwise)(*args)
    before = dict(zip(params, args, strict=True))
    kept = {n: x for n, x in before.items() if n in updated and _is_tensor(x)}
    names = [name for name in results if name not in kept]

    def values(branch: Callable[..., State]) -> dict[str, Any]:
        after = dict(zip(results, branch(*args), strict=True))
        return {name: after[name] for name in names}

    found = _branches(
        holds,
        lambda: values(then),
        lambda: values(otherwise),
        (then, otherwise),
        names,
    )
    return tuple([kept[n] if n in kept else found[n] for n in results])


def if_return(
    test: Any, then: Callable[..., Any], otherwise: Callable[..., Any], args: State
) -> Any:
    """An `if` whose branches return, or `then if test else otherwise`."""
    holds = condition(test)
    if not isinstance(holds, Value):
        return (then if holds else otherwise)(*args)
    found = _branches(
        holds,
        lambda: {"the result": then(*args)},
        lambda: {"the result": otherwise(*args)},
        (then, otherwise),
    )
    return found["the result"]


def _branches(
    holds: Value,
    then: _Named,
    otherwise: _Named,
    written: Sequence[Callable[..., Any]],
    names: _Names = (),
) -> dict[str, Any]:
    """The values of one branch, which a run chooses; `written` are the user's."""
    parts: list[_Parts] = []
    fill: dict[str, Any] = {}
    if RESULT in names:
        fill = _zeros_for([RESULT], [then, otherwise])

    def run(branch: _Named) -> dict[str, Any]:
        found = branch()
        if fill and found[RESULT] is UNBOUND:
            found.update(fill)
        parts.append(_Parts.of(found))
        parts[0].check_same(parts[-1], "branches of an `if` on a tensor differ in it")
        return parts[-1].data

    first, second = written
    data = cond(
        holds,
        _standing_for(first, "then", lambda: run(then)),
        _standing_for(second, "else", lambda: run(otherwise)),
    )
    return parts[0].joined(data)


def _standing_for(
    written: Callable[..., Any], name: str, f: Callable[..., Any]
) -> Callable[..., Any]:
    """`f`, which errors show as what the user has written."""
    f.__name__ = name
    f.__wrapped__ = written  # type: ignore[attr-defined]
    return f


# --- loops ----------------------------------------------------------------------------


def while_(
    test: Callable[..., Any],
    body: Callable[..., State],
    state: State,
    names: _Names,
    updated: _Names,
) -> State:
    """A `while`: the state after it."""
    while True:
        around = current()
        marks = mark(around) if isinstance(around, Tracer) else []
        holds = condition(test(*state))
        if isinstance(holds, Value):
            if around.is_eager:
                return _while_asked(holds, test, body, state, names, updated)
            rollback(marks)  # the loop asks by itself
            return _while(test, body, state, names, updated, (RESULT,))
        if not holds:
            return state
        state = body(*state)


def _while_asked(
    holds: Value,
    test: Callable[..., Any],
    body: Callable[..., State],
    state: State,
    names: _Names,
    updated: _Names,
) -> State:
    """A loop whose condition was asked before the first step: it begins with the
    answer, so that what the condition does besides is done once a step."""
    count = len(state)

    def step(*own: Any) -> State:
        after = body(*own[:count])
        return (*after, condition(test(*after)))

    return _while(
        _standing_for(test, "test", lambda *own: own[count]),
        _standing_for(body, "body", step),
        (*state, holds),
        (*names, "the condition"),
        updated,
        (RESULT,),
    )[:count]


def _while(
    test: Callable[..., Any],
    body: Callable[..., State],
    state: State,
    names: _Names,
    updated: _Names,
    unbound: _Names,
) -> State:
    """A loop whose condition only a run can tell."""
    carry = _Carry(names, _bound(body, state, names, unbound), updated)
    last = while_loop(
        _standing_for(test, "test", lambda data: condition(test(*carry.state(data)))),
        _standing_for(body, "body", lambda data: carry.after(body(*carry.state(data)))),
        carry.data,
    )
    return carry.state(last)


class _Range(NamedTuple):
    """`range` over numbers that only a run knows."""

    start: Any
    stop: Any
    step: Any

    @property
    def length(self) -> Any:
        if isinstance(self.step, int):
            over = self.step - (1 if self.step > 0 else -1)
        else:
            check(self.step != 0, "range: the step must not be zero")
            over = self.step - sign(self.step)
        return maximum((self.stop - self.start + over) // self.step, 0)

    def __getitem__(self, k: Any) -> Any:
        return self.start + k * self.step


def range_(kind: Any, *args: Any) -> Any:
    """`range(...)` in the head of a loop."""
    dynamic = any(isinstance(a, Value | SymInt) for a in args)
    if kind is not range or not dynamic or not 1 <= len(args) <= 3:
        return kind(*args)
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if step == 0 and isinstance(step, int):
        raise ValueError("range() arg 3 must not be zero")
    numbers = [
        current().value_of(n) if isinstance(n, SymInt) else n
        for n in (start, stop, step)
    ]
    return _Range(*numbers)


def plain_items(items: Any, reason: str) -> Any:
    """What a `for` that must stay Python runs over.

    Raises:
        ControlFlowError: only a run knows how many there are.
    """
    if isinstance(items, _Range):
        raise ControlFlowError(
            "control_flow: this `for` depends on a tensor and cannot be rewritten: "
            f"{reason} ({user_line()})."
        )
    return items


def plain_subject(subject: Any) -> Any:
    """What a `match` compares with constants.

    Raises:
        ControlFlowError: it is a tensor, or holds one.
    """
    if any(isinstance(leaf, Value) for leaf in pytree.flatten(subject)[0]):
        raise ControlFlowError(
            "control_flow: this `match` compares a tensor with a constant, and cannot "
            f"be rewritten ({user_line()}). Write `if`."
        )
    return subject


def for_(
    items: Any,
    body: Callable[..., State],
    state: State,
    names: _Names,
    updated: _Names,
    flag: int | None,
    targets: _Names,
) -> State:
    """A `for`: the state after it.

    Args:
        updated: The names that are written to, and not assigned.
        flag: Where the state has the flag that ends the loop, if there is one.
        targets: The names that take the items.
    """
    if isinstance(items, _Range | Value):
        return _for(items, body, state, names, updated, flag, (RESULT, *targets))
    for item in items:
        if flag is None:
            state = body(item, *state)
            continue
        stop = condition(state[flag])
        if isinstance(stop, Value):
            state = if_(
                stop,
                lambda *own: own,
                lambda *own, item=item: body(item, *own),
                state,
                names,
                names,
                updated,
            )
        else:
            state = body(item, *state)
        if condition(state[flag]) is True:
            break
    return state


def _for(
    items: Any,
    body: Callable[..., State],
    state: State,
    names: _Names,
    updated: _Names,
    flag: int | None,
    unbound: _Names,
) -> State:
    """A loop over a tensor, or as many steps as only a run knows."""
    length = items.length if isinstance(items, _Range) else items.shape[0]
    if isinstance(length, int) and length == 0:
        return state

    def step_at_any(*own: Any) -> State:
        return body(items[zeros((), dtype=int64)], *own)

    state = _bound(step_at_any, state, names, unbound)
    if flag is not None:
        position = len(names)

        def test(*own: Any) -> Any:
            return logical_and(own[position] < length, not_(own[flag]))

        def step(*own: Any) -> State:
            k = own[position]
            return (*body(items[k], *own[:position]), k + 1)

        steps = (*names, "the step")
        return _while(test, step, (*state, 0), steps, updated, ())[:position]
    carry = _Carry(names, state, updated)
    if isinstance(items, _Range):
        last = fori_loop(
            0,
            length,
            _standing_for(
                body,
                "body",
                lambda k, data: carry.after(body(items[k], *carry.state(data))),
            ),
            carry.data,
        )
    else:
        last, _ = scan(
            _standing_for(
                body,
                "body",
                lambda data, item: (carry.after(body(item, *carry.state(data))), None),
            ),
            carry.data,
            items,
        )
    return carry.state(last)


def _bound(
    body: Callable[..., State], state: State, names: _Names, unbound: _Names
) -> State:
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
        values.update(_zeros_for(missing, [step]))
    return tuple(values.values())


# --- state ----------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Values by name, apart: tensors and numbers, which operators take, and the rest.

    data    the values, with None for each leaf of the rest
    rest    by name and position, the leaves that are neither tensor nor number
    specs   by name
    """

    data: dict[str, Any]
    rest: dict[tuple[str, int], Any]
    specs: dict[str, Spec]

    @staticmethod
    def of(values: dict[str, Any]) -> "_Parts":
        found = _Parts({}, {}, {})
        for name, value in values.items():
            leaves, spec = pytree.flatten(value)
            for k, leaf in enumerate(leaves):
                if not isinstance(leaf, _DATA):
                    found.rest[name, k], leaves[k] = leaf, None
            found.specs[name] = spec
            found.data[name] = pytree.unflatten(spec, leaves)
        return found

    def joined(self, data: dict[str, Any]) -> dict[str, Any]:
        """Values as `of` took them apart, with other data."""
        found: dict[str, Any] = {}
        for name, spec in self.specs.items():
            own = iter(pytree.flatten(data[name])[0])
            found[name] = pytree.unflatten(
                spec,
                [
                    self.rest[name, k] if (name, k) in self.rest else next(own)
                    for k in range(spec.num_leaves)
                ],
            )
        return found

    def check_same(self, other: "_Parts", how: str) -> None:
        """Raises: ControlFlowError: a leaf of the rest is not the same in `other`."""
        for name, k in {**self.rest, **other.rest}:
            here = self.rest.get((name, k), _DATUM)
            there = other.rest.get((name, k), _DATUM)
            if here is there or (type(here) is type(there) and bool(here == there)):
                continue
            both = f"{here!r} and {there!r}"
            if UNBOUND in (here, there):
                raise ControlFlowError(
                    f"control_flow: `{name}` has a value in one of two cases only, and "
                    f"is used after them ({user_line()}). Assign `{name}` before."
                )
            raise ControlFlowError(
                f"control_flow: `{name}` is no tensor, and {how}: {both} "
                f"({user_line()}). Make it a tensor or a number, or leave it as it is."
            )


class _Datum:
    def __repr__(self) -> str:
        return "a tensor"


_DATUM: Final = _Datum()
_DATA: Final = (
    *(Value, np.ndarray, np.generic, bool, int, float),
    *(SymBool, SymInt, SymFloat),
)


class _Carry:
    """The state of a loop as an operator carries it: what it assigns. It writes to the
    tensors that it only updates, and so to what other names have of them."""

    def __init__(self, names: _Names, state: State, updated: _Names) -> None:
        values = dict(zip(names, state, strict=True))
        self.names = names
        self.kept = {n: values[n] for n in updated if _is_tensor(values.get(n))}
        self.parts = _Parts.of(self.assigned(state))
        self.data = self.parts.data

    def assigned(self, state: State) -> dict[str, Any]:
        values = zip(self.names, state, strict=True)
        return {name: value for name, value in values if name not in self.kept}

    def state(self, data: dict[str, Any]) -> State:
        values = {**self.kept, **self.parts.joined(data)}
        return tuple([values[name] for name in self.names])

    def after(self, state: State) -> dict[str, Any]:
        """The data of a state that a step gives."""
        parts = _Parts.of(self.assigned(state))
        self.parts.check_same(parts, "a step changes it")
        return parts.data


def _zeros_for(names: _Names, functions: Sequence[_Named]) -> dict[str, Any]:
    """Zeros of the types that names have in the first of these that gives them any."""
    found: dict[str, Any] = {}
    for f in functions:
        for name, types in _types_of(f, names).items():
            found.setdefault(name, pytree.tree_map(_zero, types))
    return found


def _types_of(f: _Named, names: _Names) -> dict[str, Any]:
    """The types of the values that `f` gives to names, by a trace that leaves nothing;
    of those that it gives any."""

    def data(_: Any) -> dict[str, Any]:
        values = f()
        given = {n: values[n] for n in names if values.get(n, UNBOUND) is not UNBOUND}
        return _Parts.of(given).data

    around = current()
    marks = mark(around) if isinstance(around, Tracer) else []
    function = Function("f", f, (), data)
    body = trace_body("control_flow", "control_flow", function, [])
    rollback(marks)
    found: dict[str, Any] = pytree.unflatten(body.spec, body.types)
    return found


def _zero(type_: TensorType) -> Any:
    if type_.weak and not type_.shape:
        return {"b": False, "f": 0.0}.get(type_.dtype.kind, 0)
    return zeros(type_.shape, dtype=type_.dtype)
