"""`scan`: the function that users call. With `until` it is a `while_loop`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hopflow import pytree
from hopflow.bind import Value, slots
from hopflow.dtypes import int64
from hopflow.errors import PredicateError
from hopflow.graph.types import is_zero
from hopflow.hops.base import Call, check_scalar, debugging
from hopflow.hops.loops import (
    as_types,
    empty_stacks,
    read_row,
    slices,
    stacked,
    stacked_types,
    write_row,
)
from hopflow.hops.scan import SCAN, Step, first_scan_carry, scan_result, scan_types
from hopflow.hops.subgraphs import (
    Function,
    as_value,
    flatten_results,
    own_copy,
    require_callable,
)
from hopflow.hops.while_loop import WHILE, counted
from hopflow.ops.convert import astype
from hopflow.ops.elementwise import add, less, logical_and, logical_not, subtract
from hopflow.progress import Meter, progress_of
from hopflow.symbolic.size import Size


class _Until(NamedTuple):
    """A scan that may stop: after a step whose carry `test` holds for."""

    call: Call
    test: Callable[[Any], Any]

    def stops(self, carry: Any) -> Value:
        """Whether the loop ends with this carry.

        Raises:
            PredicateError: `until` returns no bool scalar.
        """
        function = Function("until", self.test, (), self.test)
        leaves, _ = flatten_results(self.call.name, function, function(carry))
        if len(leaves) != 1:
            raise PredicateError(
                f"{self.call.name}: {function.label} must return a bool scalar "
                f"(bool[]), and returns {len(leaves)} tensors."
            )
        what = f"the result of {function.label}"
        check_scalar(self.call.name, what, leaves[0].type, "b")
        return as_value(leaves[0])

    def run(self) -> Any:
        """Carry, stacks of full length, and the number of steps."""
        if is_zero(self.call.params["length"]):
            return *SCAN.trace(self.call), astype(0, int64)
        return self.run_debug() if debugging() else self.run_loop()

    def run_debug(self) -> Any:
        call, rows = self.call, []
        length, reverse = call.params["length"], call.params["reverse"]
        count = call.params["num_carry"]
        xs = [own_copy(o) for o in call.operands[count:]]
        carry = first_scan_carry(call)
        step = Step(call)
        assert call.spec is not None
        with Meter(call.params.get("progress"), length) as meter:
            for i in reversed(range(length)) if reverse else range(length):
                results = step(*carry, *slices(xs, i))
                carry, y = results[:count], results[count:]
                rows.append(y)
                meter.step()
                if self.stops(pytree.unflatten(call.spec, carry)):
                    break
        steps = len(rows)
        types = [v.type for v in rows[-1]]
        rows += [[empty_stacks([t])[0] for t in types] for _ in range(length - steps)]
        ys = stacked(rows[::-1] if reverse else rows)
        done = [own_copy(v) for v in (*carry, *ys)]
        return *scan_result(call, step.body.spec, done), astype(steps, int64)

    def run_loop(self) -> Any:
        """A `while_loop` that takes and writes slices where it is."""
        call = self.call
        length, reverse = call.params["length"], call.params["reverse"]
        count = call.params["num_carry"]
        xs, function = call.operands[count:], call.functions["body"]
        found, types, y_types = scan_types(call)

        def test(i: Any, stop: Any, _carry: Any, _ys: Any) -> Any:
            return logical_and(less(i, length), logical_not(stop))

        def step(i: Any, _stop: Any, carry: Any, ys: Any) -> Any:
            at = as_value(subtract(subtract(length, 1), i) if reverse else i)
            flat, _ = pytree.flatten(carry)
            # The body may write to them.
            elements = [own_copy(read_row(x, at)) for x in xs]
            carry, y = function([*flat, *elements])
            rows, _ = flatten_results(call.name, function, y)
            written = [write_row(a, row, at) for a, row in zip(ys, rows, strict=True)]
            return add(i, 1), self.stops(carry), carry, written

        assert call.spec is not None
        init = map(as_value, as_types(call.operands[:count], types))
        carry = pytree.unflatten(call.spec, init)
        ys = list(empty_stacks(stacked_types(y_types, length)))
        first = (astype(0, int64), False, carry, ys)
        steps, _, carry, ys = WHILE.use(lambda: self.loop(test, step, first))
        return carry, pytree.unflatten(found.child(1), ys), steps

    def loop(self, *args: Any) -> Call:
        """The call of a `while_loop`, with the sizes of our carry that steps change."""
        loop = WHILE.prepare(
            *args, max_steps=None, reverse_mode="recompute", dynamic_carry=None
        )
        loop.params |= counted(progress_of(self.call.params))
        # Before our carry stand the number of the step, and whether it was the last.
        loop.dynamic = {2 + i: dims for i, dims in self.call.dynamic.items()}
        own = self.call.paths
        loop.paths = [*loop.paths[:2], *own, *loop.paths[2 + len(own) :]]
        return loop


def scan(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: Size | None = None,
    dim: int = 0,
    reverse: bool = False,
    unroll: int = 1,
    until: Callable[[Any], Any] | None = None,
    dynamic_carry: Any = None,
    progress: str | Callable[[int, int | None], Any] | None = None,
) -> Any:
    """`carry, y = combine_fn(carry, x)` for each slice; the last carry, and all `y`.

    Carries and slices are values: a write to one in the body is one to a private copy.
    Writes to tensors of enclosing functions reach the caller.

    Args:
        combine_fn: Returns the next carry, of the structure and types that it came in,
            and any pytree.
        init: The first carry: a pytree of tensors and numbers. A number takes the dtype
            that the body returns.
        xs: A pytree of tensors T[*s, n, *t] with `n` slices along axis `dim`; `x` has
            its structure, and leaves T[*s, *t].
        length: The number of steps; needed where `xs` has no tensors.
        dim: The axis of `xs` of which slices are taken. Results are stacked on axis 0.
        reverse: Take the slices from last to first; `ys[i]` still belongs to slice `i`.
        unroll: How many copies of the body a compiled loop has in a row; steps beyond a
            multiple of it take another loop. A short body gains up to a quarter, unless
            all of it waits for the carry of the step before; results are the same.
        until: Tested with the carry after each step; the loop ends once it holds.
        dynamic_carry: The sizes of the carry that steps change; see `while_loop`.
        progress: A label to show a bar of, or a function; see `while_loop`.

    Returns:
        carry, ys; with `until` carry, ys, steps: `ys` of full length, with zeros where
        no step was made, and how many were, as i64[].

    Raises:
        StructureError, CarryTypeError: `combine_fn` returns another carry than it got,
            or no pair.
        LengthError: the leaves of `xs` have different numbers of slices, or there is
            neither one nor `length`.
        PredicateError: `until` returns no bool scalar.
        ResultTypeError: `combine_fn` returns what is no tensor or number.
    """
    options: dict[str, Any] = {
        "length": length,
        "dim": dim,
        "reverse": reverse,
        "unroll": unroll,
        "dynamic_carry": dynamic_carry,
        "progress": progress,
    }
    if until is None:
        return SCAN(combine_fn, init, xs, **options)
    require_callable("scan", "until", until)
    return _Until(SCAN.prepare(combine_fn, init, xs, **options), until).run()


slots.scan = scan
