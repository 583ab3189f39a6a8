"""Operators with subgraphs: JAX's own where there is one, else what they lower to.

A loop that ends by a test is `lax.while_loop`, of which JAX has no reverse mode. One
whose steps are counted, or of which there are at most `max_steps`, has one: it is
differentiated as a scan.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from hopflow.errors import ExportError
from hopflow.export.jax.custom import custom_call
from hopflow.export.jax.frames import Array, Frame, Site
from hopflow.export.jax.sizes import is_dimension
from hopflow.graph.core import Arg, Constant, Graph, Var
from hopflow.graph.origin import origin, replaying
from hopflow.hops.base import split_args
from hopflow.hops.dynamic_shapes import changing_sizes
from hopflow.hops.while_loop import limit_message
from hopflow.loop_ir.kernels import Branch, CountedLoop, Inline, WhileLoop
from hopflow.ops.opdef import OPERATIONS

Run = Callable[..., list[Array]]


def region(site: Site) -> list[Array]:
    """The results of an operator with subgraphs, by what it lowers to."""
    node = site.node
    with replaying():  # what it lowers to has its line
        origin.node = node
        lowered = node.op.lower(tuple(site.results), *node.args, **node.params)
    if isinstance(lowered, Inline):
        return site.run(lowered.graph, _given(site, lowered.operands))
    if isinstance(lowered, Branch):
        return _branch(site, lowered)
    if "num_carry" in node.params and changing_sizes(node.params):
        raise ExportError(
            "its steps change sizes of the carry, and JAX has no such loops. Keep the "
            "size, and mask what is not used."
        )
    if isinstance(lowered, WhileLoop):
        return _while(site, lowered)
    assert isinstance(lowered, CountedLoop)
    return _counted(site, lowered)


def _given(site: Site, operands: Sequence[Any]) -> list[Any]:
    return [site.frame.given(operand) for operand in operands]


def _values(site: Site, operands: Sequence[Any]) -> list[Array]:
    return [site.frame.value(operand) for operand in operands]


class _Closed(NamedTuple):
    """What a graph is given: arrays, and numbers that JAX does not trace."""

    args: Sequence[Any]

    @property
    def arrays(self) -> list[Array]:
        return [a for a in self.args if not _is_number(a)]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers, and None for each array."""
        return tuple([a if _is_number(a) else None for a in self.args])

    def filled(self, arrays: Sequence[Array]) -> list[Any]:
        rest = iter(arrays)
        return [a if _is_number(a) else next(rest) for a in self.args]


def _is_number(x: Any) -> bool:
    return isinstance(x, float) or is_dimension(x)


# --- calls ----------------------------------------------------------------------------


def _invoke(site: Site) -> list[Array]:
    """A graph that JAX traces once for all of its calls."""
    body, given = site.params["body"], _Closed(_given(site, site.node.args))
    context, functions = site.frame.context, site.translation.functions
    if context.around:  # whose rules hold what is traced now
        return site.run(body, given.args)
    key = body, given.numbers, context.axes
    if key not in functions:

        def run(*arrays: Array) -> list[Array]:
            return Frame(context, body, given.filled(arrays)).run()

        run.__name__ = body.name
        functions[key] = site.jax.jit(run)
    return list(functions[key](*given.arrays))


_POLICIES: Final = {
    "nothing": "nothing_saveable",
    "dots": "dots_saveable",
    "everything": "everything_saveable",
}


def _checkpoint(site: Site) -> list[Array]:
    body, given = site.params["body"], _Closed(_given(site, site.node.args))
    policy = getattr(site.jax.checkpoint_policies, _POLICIES[site.params["policy"]])

    def run(*arrays: Array) -> list[Array]:
        return site.run(body, given.filled(arrays))

    return list(site.jax.checkpoint(run, policy=policy)(*given.arrays))


# --- branches -------------------------------------------------------------------------


def _branch(site: Site, branch: Branch) -> list[Array]:
    args, selector = _given(site, branch.operands), site.frame.given(branch.selector)

    def run(number: int) -> Callable[[], list[Array]]:
        return lambda: site.run(branch.branches[number], args)

    if isinstance(selector, int):
        return run(int(selector))()
    choices = [run(k) for k in range(len(branch.branches))]
    if selector.dtype == bool:
        return list(site.lax.cond(selector, choices[1], choices[0]))
    return list(site.lax.switch(selector, choices))


# --- loops ----------------------------------------------------------------------------


def _while(site: Site, loop: WhileLoop) -> list[Array]:
    count = len(loop.carry)
    if len(loop.body.outputs) > count:
        raise ExportError(
            "it stacks what each step leaves, as derivatives do, and only the run "
            "knows how many there are. Export the function, and differentiate what "
            "`to_jax` gives: JAX has a reverse mode of loops with `max_steps`."
        )
    before, after = _given(site, loop.before), _given(site, loop.after)
    carry = _values(site, loop.carry)
    trips = _trips(loop, before, _given(site, loop.carry), after)
    if trips is not None and loop.max_steps is None:

        def step(carry: list[Array], _: None) -> tuple[list[Array], None]:
            return site.run(loop.body, [*before, *carry, *after]), None

        return list(site.lax.scan(step, carry, None, length=trips)[0])
    if loop.max_steps is None:
        return _unbounded(site, loop, before, carry, after)
    return _bounded(site, loop, before, carry, after)


def _unbounded(
    site: Site, loop: WhileLoop, before: Any, carry: Any, after: Any
) -> list[Array]:
    def test(carry: Sequence[Array]) -> Array:
        return site.run(loop.test, [*before, *carry, *after])[0]

    def step(carry: Sequence[Array]) -> list[Array]:
        return site.run(loop.body, [*before, *carry, *after])

    return list(site.lax.while_loop(test, step, list(carry)))


def _bounded(
    site: Site, loop: WhileLoop, before: Any, carry: Any, after: Any
) -> list[Array]:
    """A loop of at most `max_steps`; JAX differentiates it as a scan of so many steps,
    of which the last ones do nothing."""
    jax, lax, first = site.jax, site.lax, len(before)
    given = _Closed([*before, *carry, *after])
    limit = loop.max_steps
    assert limit is not None

    def parts(arrays: Sequence[Array]) -> tuple[Any, Any, Any]:
        args, last = given.filled(arrays), first + len(loop.carry)
        return args[:first], args[first:last], args[last:]

    def goes_on(before: Any, carry: Any, after: Any) -> Array:
        return site.run(loop.test, [*before, *carry, *after])[0]

    def limited(*arrays: Array) -> list[Array]:
        before, carry, after = parts(arrays)

        def test(state: Any) -> Array:
            steps, running, _ = state
            return running & (steps < limit)

        def step(state: Any) -> Any:
            steps, _, carry = state
            carry = site.run(loop.body, [*before, *carry, *after])
            return steps + 1, goes_on(before, carry, after), carry

        none = site.frame.context.varying(site.jnp.int64(0))
        start = none, goes_on(before, carry, after), list(carry)
        _, running, last = lax.while_loop(test, step, start)
        return [*last, running]

    def scanned(*arrays: Array) -> list[Array]:
        before, carry, after = parts(arrays)

        def step(carry: Any, _: None) -> Any:
            def run() -> list[Array]:
                return site.run(loop.body, [*before, *carry, *after])

            return lax.cond(goes_on(before, carry, after), run, lambda: carry), None

        last = list(lax.scan(step, list(carry), None, length=limit)[0])
        return [*last, goes_on(before, last, after)]

    function = jax.custom_jvp(limited)
    function.defjvp(lambda primals, tangents: jax.jvp(scanned, primals, tangents))
    *last, running = function(*given.arrays)
    site.check(~running, limit_message(site.node.op.name, limit))
    return list(last)


def _trips(
    loop: WhileLoop, before: Sequence[Any], carry: Sequence[Any], after: Sequence[Any]
) -> int | None:
    """The number of steps of a loop that tests `i < n` of numbers that are known, and
    whose step makes `i + 1`; None of another one."""
    [condition] = loop.test.outputs
    if not (isinstance(condition, Var) and condition.node.op is OPERATIONS["less"]):
        return None
    given: dict[Arg, Any] = dict(
        zip(loop.test.inputs, [*before, *carry, *after], strict=True)
    )
    counter, end = condition.node.args
    carried = loop.test.inputs[len(before) : len(before) + len(carry)]
    if counter not in carried or end in carried:
        return None
    place = carried.index(counter)
    first = given[counter]
    last: Any = end.value if isinstance(end, Constant) else given.get(end)
    if not (isinstance(first, int) and isinstance(last, int)):
        return None
    counts = _counts(loop.body, len(before) + place, place)
    return max(last - first, 0) if counts else None


def _counts(body: Graph, place: int, output: int) -> bool:
    """Whether an output is an input and 1."""
    found = body.outputs[output]
    if not isinstance(found, Var) or found.node.op is not OPERATIONS["add"]:
        return False
    args = found.node.args
    ones = [a for a in args if isinstance(a, Constant) and a.value == 1]
    return body.inputs[place] in args and len(ones) == 1


def _counted(site: Site, loop: CountedLoop) -> list[Array]:
    before, after = _given(site, loop.before), _given(site, loop.after)
    carry, xs = _values(site, loop.carry), _values(site, loop.xs)
    count, length = len(carry), site.size(loop.length)

    def step(carry: Sequence[Array], xs: Sequence[Array]) -> Any:
        results = site.run(loop.body, [*before, *carry, *xs, *after])
        return results[:count], results[count:]

    if not (xs or len(loop.body.outputs) > count or is_dimension(length)):
        last = site.lax.fori_loop(0, length, lambda _, c: step(c, ())[0], carry)
        return list(last)
    size = site.dimension(loop.length)
    if not (xs or isinstance(size, int)):  # JAX has symbolic lengths of arrays alone
        numbers = [site.lax.iota(site.jnp.int64, size)]
        last, rows = site.lax.scan(lambda c, _: step(c, ()), carry, numbers)
        return [*last, *rows]
    last, rows = site.lax.scan(
        *(step, carry, xs),
        length=None if xs else size,
        reverse=loop.reverse,
        unroll=loop.unroll,
    )
    return [*last, *rows]


def _associative_scan(site: Site) -> list[Array]:
    """JAX's own, whose function combines many pairs at once."""
    body, length = site.params["body"], site.dimension(site.params["length"])
    if not isinstance(length, int):
        return region(site)
    parts = split_args(site.node.op, site.node.args, dict(site.params))
    before, after = _given(site, parts.symbols), _given(site, parts.captures)

    def combine(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
        return site.run(body, [*before, *a, *b, *after])

    xs = _values(site, parts.operands)
    function, reverse = site.jax.vmap(combine), site.params["reverse"]
    return list(site.lax.associative_scan(function, xs, reverse=reverse))


REGIONS: Final[dict[str, Callable[[Site], list[Array]]]] = {
    "associative_scan": _associative_scan,
    "checkpoint": _checkpoint,
    "custom_call": custom_call,
    "invoke_subgraph": _invoke,
}
"""By the name of an operator. Those that are not here are what they lower to."""
