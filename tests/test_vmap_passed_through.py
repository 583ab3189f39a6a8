"""`vmap` keeps what operators only pass through: one copy, the same for all."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.graph.core import Graph
from hopflow.testing.executions import NAMES, RUNNERS, agree
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

COUNTS = np.array([2.0, 0.0, 3.0, 1.0], np.float32)
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


# Each takes a count that differs from example to example, and a weight that does not.
# Each returns something that depends on the example, and the weight.


def cond(n: Any, w: Any) -> Any:
    return hf.cond(n > 1, lambda n, w: (n * hf.sum(w), w), lambda n, w: (n, w), (n, w))


def cond_of_a_closure(n: Any, w: Any) -> Any:
    return hf.cond(n > 1, lambda: (n * hf.sum(w), w), lambda: (n, w))


def cond_of_one_operand_twice(n: Any, w: Any) -> Any:
    return hf.cond(n > 1, lambda a, b: (n, a), lambda a, b: (-n, b), (w, w))


def switch(n: Any, w: Any) -> Any:
    branches = [lambda n, w, k=k: (n * k, w) for k in range(3)]
    return hf.switch(hf.astype(n, hf.int64), branches, (n, w))


def while_loop(n: Any, w: Any) -> Any:
    return hf.while_loop(
        lambda n, w: n < 9, lambda n, w: (n + 1 + hf.sum(w), w), (n, w)
    )


def while_whose_test_reads_it(n: Any, w: Any) -> Any:
    return hf.while_loop(lambda n, w: n < hf.sum(w), lambda n, w: (n + 1, w), (n, w))


def while_of_permuted_carries(n: Any, w: Any) -> Any:
    n, _, w = hf.while_loop(
        lambda n, a, b: n < 9, lambda n, a, b: (n + 1 + a[0, 1], b, a), (n, w, w)
    )
    return n, w


def while_that_takes_a_capture(n: Any, w: Any) -> Any:
    return hf.while_loop(lambda n, a: n < 9, lambda n, a: (n + 1 + a[0, 1], w), (n, w))


def fori_loop(n: Any, w: Any) -> Any:
    steps = hf.astype(n, hf.int64)
    return hf.fori_loop(0, steps, lambda i, n, w: (n + hf.sum(w) * i, w), (n, w))


def checkpointed_loop(n: Any, w: Any) -> Any:
    return hf.while_loop(
        lambda n, w: n < 9,
        lambda n, w: (n + 1 + hf.sum(w), w),
        (n, w),
        max_steps=20,
        reverse_mode="checkpoint",
    )


def scan(n: Any, w: Any) -> Any:
    step = lambda c, x: ((c[0] + x * hf.sum(c[1]), c[1]), None)  # noqa: E731
    return hf.scan(step, (n, w), WEIGHT[0])[0]


def scan_until(n: Any, w: Any) -> Any:
    step = lambda c, x: ((c[0] + x, c[1]), None)  # noqa: E731
    return hf.scan(step, (n, w), WEIGHT[0], until=lambda c: c[0] > 2)[0]


def map_(n: Any, w: Any) -> Any:
    rows, weights = hf.map(lambda x: (x * n, w), hf.asarray(WEIGHT[0]))
    return rows, weights[0]


def scan_that_stacks_slices(n: Any, w: Any) -> Any:
    return hf.scan(lambda c, x: (c + x[1], x), n, w, reverse=True)


def map_of_slices(n: Any, w: Any) -> Any:
    sums, rows = hf.map(lambda x: (hf.sum(x), x), w)
    return n * hf.sum(sums), rows


def associative_scan_of_the_last(n: Any, w: Any) -> Any:
    last = hf.associative_scan(lambda _, b: b, w)
    return n * hf.sum(last), last


def invoke_subgraph(n: Any, w: Any) -> Any:
    return hf.invoke_subgraph(cond, n, w)


def checkpoint(n: Any, w: Any) -> Any:
    return hf.checkpoint(cond)(n, w)


def loop_around_cond(n: Any, w: Any) -> Any:
    def step(n: Any, w: Any) -> Any:
        return hf.cond(
            n > 2, lambda n, w: (n + 2 + hf.sum(w), w), lambda n, w: (n + 1, w), (n, w)
        )

    return hf.while_loop(lambda n, w: n < 9, step, (n, w))


def loop_around_subgraph(n: Any, w: Any) -> Any:
    def step(n: Any, w: Any) -> Any:
        return hf.invoke_subgraph(lambda n, w: (n + 1 + hf.sum(w), w), n, w)

    return hf.while_loop(lambda n, w: n < 9, step, (n, w))


def cond_around_permuting_loop(n: Any, w: Any) -> Any:
    def then(n: Any, a: Any, b: Any) -> Any:
        step = lambda i, n, a, b: (n + a[0, 1], b, a)  # noqa: E731
        return hf.fori_loop(0, 3, step, (n, a, b))

    n, w, _ = hf.cond(n > 1, then, lambda n, a, b: (n, a, b), (n, w, w))
    return n, w


class Nudge(hopflow.HigherOrderOp):
    def debug(self, f: Any, n: Any, w: Any) -> Any:
        return hf.cond(n > 1, lambda: (f(n), w), lambda: (n, w))


class NudgeWithRule(hopflow.HigherOrderOp):
    def debug(self, f: Any, n: Any, w: Any) -> Any:
        return f(n), w

    def vjp(self, f: Any, n: Any, w: Any) -> Any:
        return (f(n), w), lambda ct: (None, 2 * ct[0], 3 * ct[1])


def class_of_ones_own(n: Any, w: Any) -> Any:
    return Nudge()(lambda n: n * 2 + w[0, 1], n, w)


def class_with_a_rule(n: Any, w: Any) -> Any:
    return NudgeWithRule()(lambda n: n * 2, n, w)


@hopflow.custom_vjp
def with_vjp(n: Any, w: Any) -> Any:
    return n * hf.sum(w), w


with_vjp.defvjp(
    lambda n, w: ((n * hf.sum(w), w), (n, w)),
    lambda r, ct: (
        ct[0] * hf.sum(r[1]),
        ct[0] * r[0] * hf.ones_like(r[1]) + 3 * ct[1],
    ),
)


@hopflow.custom_jvp
def with_jvp(n: Any, w: Any) -> Any:
    return n * hf.sum(w), w


def _jvp(primals: Any, tangents: Any) -> Any:
    (n, w), (dn, dw) = primals, tangents
    return with_jvp(n, w), (dn * hf.sum(w) + n * hf.sum(dw), 3 * dw)


with_jvp.defjvp(_jvp)


OPERATORS: tuple[Callable[..., Any], ...] = (
    *(cond, cond_of_a_closure, cond_of_one_operand_twice, switch),
    *(while_loop, while_whose_test_reads_it, while_of_permuted_carries),
    *(
        while_that_takes_a_capture,
        fori_loop,
        checkpointed_loop,
        scan,
        scan_until,
    ),
    *(scan_that_stacks_slices, map_of_slices, associative_scan_of_the_last),
    *(map_, invoke_subgraph, checkpoint),
    *(loop_around_cond, loop_around_subgraph, cond_around_permuting_loop),
    *(class_of_ones_own, class_with_a_rule, with_vjp, with_jvp),
)

each_operator = pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)


def inputs() -> tuple[Any, Any]:
    return hf.asarray(COUNTS), hf.asarray(WEIGHT)


def one_by_one(f: Any, counts: Any, weight: Any) -> Any:
    return np.stack([np.asarray(f(n, weight)[0]) for n in counts])


@each_execution
@each_operator
def test_what_passes_through_is_the_same_for_all_examples(f: Any, run: Any) -> None:
    n, w = inputs()
    first, weight = run(hf.vmap(f, (0, None), (0, None)), n, w)
    agree(first, one_by_one(f, n, w))
    assert weight.shape == WEIGHT.shape
    agree(weight, WEIGHT)


@each_operator
def test_a_result_that_passes_through_is_a_tensor_of_its_own(f: Any) -> None:
    n, w = inputs()
    weight = hf.vmap(f, (0, None), (0, None))(n, w)[1]
    weight += 1
    agree(w, WEIGHT)


@each_operator
def test_it_may_be_had_for_each_example_too(f: Any) -> None:
    n, w = inputs()
    got = hf.vmap(f, (0, None))(n, w)[1]
    agree(got, np.broadcast_to(WEIGHT, (4, 2, 3)))


@each_operator
def test_nested_vmaps_keep_one(f: Any) -> None:
    n, w = inputs()
    inner = hf.vmap(f, (0, None), (0, None))
    n = hf.stack([n, n + 1])
    first, weight = hf.vmap(inner, (0, None), (0, None))(n, w)
    agree(first, np.stack([one_by_one(f, row, w) for row in n]))
    agree(weight, WEIGHT)


@each_operator
def test_of_no_examples_too(f: Any) -> None:
    n, w = inputs()
    first, weight = hf.vmap(f, (0, None), (0, None))(n[:0], w)
    assert first.shape[0] == 0
    agree(weight, WEIGHT)


@each_operator
def test_gradients_flow_through_what_passes(f: Any) -> None:
    n, w = inputs()
    factor = hf.asarray(np.cos(WEIGHT))

    def loss(n: Any, w: Any) -> Any:
        first, weight = hf.vmap(f, (0, None), (0, None))(n, w)
        return hf.sum(first) + hf.sum(weight * factor)

    def expected(n: Any, w: Any) -> Any:
        rows = [f(row, w) for row in n]
        # The one that is returned is the first example's.
        return sum(hf.sum(r[0]) for r in rows) + hf.sum(rows[0][1] * factor)

    got = hf.grad(loss, argnums=(0, 1))(n, w)
    agree(got, hf.grad(expected, argnums=(0, 1))(n, w))
    agree(hf.jit(hf.grad(loss, argnums=(0, 1)))(n, w), got)


@each_operator
def test_under_vmap_a_derivative_keeps_it_too(f: Any) -> None:
    n, w = inputs()

    def value_and_weight(n: Any, w: Any) -> Any:
        value, weight = f(n, w)
        return hf.sum(value), weight

    grad = hf.grad(value_and_weight, has_aux=True)
    first, weight = hf.vmap(grad, (0, None), (0, None))(n, w)
    agree(first, np.stack([np.asarray(grad(row, w)[0]) for row in n]))
    agree(weight, WEIGHT)


def large_types(graph: Graph, numbers: int) -> list[str]:
    """The types of values in a graph that hold more than so many numbers."""
    values = [v for node in graph.walk() for v in node.results]
    return [str(v.type) for v in values if math.prod(v.type.shape) > numbers]


@pytest.mark.parametrize(
    "f",
    [f for f in OPERATORS if f not in (map_, class_with_a_rule, with_vjp, with_jvp)],
    ids=lambda f: f.__name__,
)
def test_nothing_as_large_as_all_copies_is_made(f: Any) -> None:
    n, w = inputs()
    traced = hf.trace(hf.vmap(f, (0, None), (0, None)), n, w)
    assert not large_types(traced.graph, WEIGHT.size)


@pytest.mark.parametrize("f", [while_loop, fori_loop, scan, loop_around_cond])
def test_a_derivative_keeps_no_copy_for_each_step(f: Any) -> None:
    n, w = inputs()

    def of_each_number(n: Any, w: Any) -> Any:
        n, w = f(hf.broadcast_to(n, w.shape)[0, 0], w)
        return n

    graph = hf.trace(hf.grad(of_each_number, argnums=1), n[0], w).graph
    stacks = [v for node in graph.walk() for v in node.results if v.type.ndim == 3]
    assert not stacks


def test_what_differs_from_example_to_example_is_still_refused() -> None:
    n, w = inputs()

    def f(n: Any, w: Any) -> Any:
        return hf.cond(n > 1, lambda: w, lambda: w * 2)

    with pytest.raises(hopflow.errors.ArgumentValueError, match="differs from example"):
        hf.vmap(f, (0, None), None)(n, w)

    def permuted(n: Any, w: Any) -> Any:
        step = lambda n, a, b: (n + 1, b, a)  # noqa: E731
        return hf.while_loop(lambda n, a, b: n < 9, step, (n, w, w * 2))[1]

    with pytest.raises(hopflow.errors.ArgumentValueError, match="differs from example"):
        hf.vmap(permuted, (0, None), None)(n, w)


def test_a_carry_that_only_some_steps_change_differs() -> None:
    n, w = inputs()

    def f(n: Any, w: Any) -> Any:
        step = lambda n, w: (n + 1, hf.cond(n > 5, lambda: w, lambda: w + 1))  # noqa: E731
        return hf.while_loop(lambda n, w: n < 9, step, (n, w))[1]

    agree(hf.vmap(f, (0, None))(n, w), np.stack([np.asarray(f(x, w)) for x in n]))


@each_operator
def test_of_a_number_of_examples_that_the_call_tells(f: Any) -> None:
    n, w = inputs()
    call = hf.jit(hf.vmap(f, (0, None), (0, None)), dynamic=True)
    for size in (4, 3, 2):
        first, weight = call(n[:size], w)
        agree(first, one_by_one(f, n[:size], w))
        agree(weight, WEIGHT)


@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_beside_a_size_that_differs_from_example_to_example(wrap: Any) -> None:
    n, w = inputs()

    def f(n: Any, w: Any) -> Any:
        steps = w[0][w[0] < n].shape[0]
        return hf.fori_loop(0, steps, lambda i, n, w: (n + hf.sum(w) * i, w), (n, w))

    first, weight = wrap(hf.vmap(f, (0, None), (0, None)))(n, w)
    agree(first, one_by_one(f, n, w))
    agree(weight, WEIGHT)


def test_forward_mode_keeps_the_tangent_of_what_passes() -> None:
    n, w = inputs()
    f = hf.vmap(while_loop, (0, None), (0, None))
    values, tangents = hf.jvp(f, (n, w), (hf.ones_like(n), hf.cos(w)))
    agree(values[1], WEIGHT)
    agree(tangents[1], np.cos(WEIGHT))


def test_of_one_tensor_with_two_tangents_neither_is_lost() -> None:
    _, w = inputs()

    def f(a: Any, b: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, a, b: (b, a), (a, b))

    _, tangents = hf.jvp(f, (w, w), (hf.ones_like(w), hf.zeros_like(w)))
    agree(tangents, (np.zeros((2, 3)), np.ones((2, 3))))


def test_a_rule_for_what_passes_is_used() -> None:
    n, w = inputs()

    def total(w: Any) -> Any:
        return hf.sum(hf.cond(n[0] > 1, lambda: with_vjp(n[0], w)[1], lambda: w))

    agree(hf.grad(total)(w), np.full((2, 3), 3.0))


@requires("jax")
@pytest.mark.parametrize("name", ["cond", "while_loop", "nested"])
def test_jax_keeps_it_in_the_same_programs(name: str) -> None:
    import jax

    def ours(lax: Any, spread: bool) -> Any:
        def pair(f: Any) -> Any:
            return f if spread else lambda c: f(*c)

        def cond(n: Any, w: Any) -> Any:
            args = ((n, w),) if spread else (n, w)
            return lax.cond(
                n > 1, lambda n, w: (n * w.sum(), w), lambda n, w: (n, w), *args
            )

        def loop(body: Any) -> Any:
            return lambda n, w: lax.while_loop(
                pair(lambda n, w: n < 9), pair(body), (n, w)
            )

        return {
            "cond": cond,
            "while_loop": loop(lambda n, w: (n + 1 + w.sum(), w)),
            "nested": loop(lambda n, w: (cond(n, w)[0] + 1, cond(n, w)[1])),
        }[name]

    n, w = inputs()
    got = hf.vmap(ours(hf, True), (0, None), (0, None))(n, w)
    agree(got, jax.vmap(ours(jax.lax, False), (0, None), (0, None))(COUNTS, WEIGHT))
    assert len(pytree.flatten(got)[0]) == 2
