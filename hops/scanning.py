"""`scan`, the public function. With `until` it is a `while_loop`."""

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
    """A scan that stops after the first step for whose carry `test` is True."""

    call: Call
    test: Callable[[Any], Any]

    def stops(self, carry: Any) -> Value:
        """Return whether the loop ends with this carry.

        Raises:
            PredicateError: `until` does not return a bool scalar.
        """
        function = Function("until", self.test, (), self.test)
        leaves, _ = flatten_results(self.call.name, function, function(carry))
        if len(leaves) != 1:
            raise PredicateError(
                f"{self.call.name}: {function.label} must return a bool scalar "
                f"(bool[]), and returns {len(leaves)} tensors."
            )
        label = f"the result of {function.label}"
        check_scalar(self.call.name, label, leaves[0].type, "b")
        return as_value(leaves[0])

    def run(self) -> Any:
        """Return the carry, stacks of full length, and the number of steps."""
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
        """Run a `while_loop` that reads and writes slices at its counter."""
        call = self.call
        length, reverse = call.params["length"], call.params["reverse"]
        count = call.params["num_carry"]
        xs, function = call.operands[count:], call.functions["body"]
        spec, types, y_types = scan_types(call)

        def test(i: Any, stop: Any, _carry: Any, _ys: Any) -> Any:
            return logical_and(less(i, length), logical_not(stop))

        def step(i: Any, _stop: Any, carry: Any, ys: Any) -> Any:
            at = as_value(subtract(subtract(length, 1), i) if reverse else i)
            flat, _ = pytree.flatten(carry)
            # The body may write to its slices in place.
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
        return carry, pytree.unflatten(spec.child(1), ys), steps

    def loop(self, *args: Any) -> Call:
        """Return the call of a `while_loop` with the dynamic sizes of the scan's
        carry."""
        loop = WHILE.prepare(
            *args, max_steps=None, reverse_mode="auto", dynamic_carry=None
        )
        loop.params |= counted(progress_of(self.call.params))
        # The counter and the result of `test` precede the scan's carry.
        loop.dynamic = {2 + i: dims for i, dims in self.call.dynamic.items()}
        paths = self.call.paths
        loop.paths = [*loop.paths[:2], *paths, *loop.paths[2 + len(paths) :]]
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
    """Run `carry, y = combine_fn(carry, x)` for each slice; return the carry and `ys`.

    Carries and slices are values: in-place writes to them in the body go to private
    copies. Writes to tensors of enclosing functions reach the caller.

    Args:
        combine_fn: Returns the next carry, of the same structure and types, and any
            pytree.
        init: The first carry. Numbers in it take the dtypes that the body returns.
        xs: A pytree of tensors T[*s, n, *t] with `n` slices along axis `dim`; `x` has
            its structure, and leaves T[*s, *t].
        length: The number of steps; required if `xs` has no tensors.
        dim: The axis of `xs` that is sliced. Results are stacked along axis 0.
        reverse: Take the slices from last to first; `ys[i]` still belongs to slice `i`.
        unroll: The number of copies of the body in a compiled loop; steps beyond a
            multiple of it run in another loop. It speeds up short bodies by up to a
            quarter, unless they wait for the carry, and does not change results.
        until: Called with the carry after each step; the loop ends if it is True.
        dynamic_carry: The sizes of the carry that steps change; see `while_loop`.
        progress: A label to show a progress bar with, or a function; see `while_loop`.

    Returns:
        carry, ys; with `until` carry, ys, steps: `steps` is the number of steps that
        ran, i64[], and `ys` has zeros for the others.

    Raises:
        StructureError, CarryTypeError: `combine_fn` returns no pair, or a carry of
            another structure or type.
        LengthError: the numbers of slices differ, or there is no leaf and no `length`.
        PredicateError: `until` does not return a bool scalar.
        ResultTypeError: `combine_fn` returns something other than tensors and numbers.

    >>> hf.scan(lambda total, x: (total + x, total * x), 0, hf.asarray([1, 2, 3]))
    (Tensor(6, i64[]), Tensor([0, 2, 9], i64[3]))
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
