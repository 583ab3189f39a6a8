"""Operators of a user's: a class with `debug`, its reference, and rules that follow."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import (
    ArgumentTypeError,
    DerivativeError,
    MutationError,
    OperatorError,
    ResultTypeError,
    RuleReadError,
    RuleTypeError,
    StructureError,
    TraceError,
    UnsupportedRuleError,
)
from hopflow.graph.hashing import equal
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.hops.base import derived, unsupported
from hopflow.loop_ir.kernels import Inline
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.executions import EXECUTIONS, NAMES, SYMBOLIC, Run, agree


class Repeat(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any, *, times: int) -> Any:
        for _ in range(times):
            x = f(x)
        return x


class Fold(hf.HigherOrderOp):
    """Pytrees, several functions, and functions called in other operators."""

    def debug(self, f: Any, tree: Any, *fs: Any, scale: Any = 1.0) -> Any:
        total, rows = hf.scan(lambda c, x: (f(c, x), f(x, x)), tree["init"], tree["xs"])
        chosen = hf.cond(hf.sum(total) > 0, fs[0], fs[1], (total,))
        return {"total": total, "rows": [rows, chosen * scale]}


class FixedPoint(hf.HigherOrderOp):
    """With a rule of its own: the derivative of a fixed point is no loop backwards."""

    def debug(self, f: Any, x: Any, *, tol: float = 1e-12) -> Any:
        def far(x: Any) -> Any:
            return hf.max(hf.abs(f(x) - x)) > tol

        return hf.while_loop(far, lambda x: (f(x),), (x,))[0]

    def vjp(self, f: Any, x: Any, *, tol: float) -> Any:
        y = self(f, x, tol=tol)
        _, pull = hf.vjp(lambda f, y: f(y), f, y)

        def pullback(ct: Any) -> Any:
            w = self(lambda w: ct + pull(w)[1], ct, tol=tol)
            return pull(w)[0], None

        return y, pullback


class Twice(hf.HigherOrderOp):
    """With a `jvp` of its own, of the function's captures too."""

    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return hf.jvp(lambda f, x: f(f(x)), primals, tangents)


repeat, fold, fixed_point, twice = Repeat(), Fold(), FixedPoint(), Twice()
A = np.array([2.0, 3.0])


def tensor() -> Any:
    return hf.asarray(A)


def repeated(x: Any) -> Any:
    w = hf.asarray([0.5, 2.0], dtype=hf.float64)
    return repeat(lambda y: hf.sin(y) * w + x, x, times=3)


def plain_repeated(x: Any) -> Any:
    w, y = hf.asarray([0.5, 2.0], dtype=hf.float64), x
    for _ in range(3):
        y = hf.sin(y) * w + x
    return y


def folded(x: Any) -> Any:
    tree = {"init": x, "xs": hf.stack([x, x * 2, x + 1])}
    return fold(lambda a, b: a * hf.cos(b) + x, tree, hf.sin, lambda y: y * x, scale=2)


def root(x: Any) -> Any:
    return fixed_point(lambda y: 0.5 * (y + x / y), hf.ones(2, dtype=hf.float64))


def doubled(x: Any) -> Any:
    return twice(lambda y: hf.sin(y) * x, x * 2)


def in_all(x: Any) -> Any:
    """Within every other operator, and these within it."""
    y = hf.map(lambda a: repeat(lambda b: b * x, a, times=2), hf.stack([x, x + 1]))
    z = hf.cond(hf.sum(x) > 0, lambda: repeated(x), lambda: x)
    u = hf.checkpoint(lambda x: hf.scan(lambda c, b: (repeated(c), b), x, y)[0])(x)
    v = repeat(lambda b: hf.fori_loop(0, 2, lambda i, c: (c * x,), (b,))[0], z, times=2)
    return hf.subgraph(lambda: repeat(repeated, u + v, times=2))()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (repeated, folded, root, doubled, in_all)
}
every_program = pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)


def scalar(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def total(x: Any) -> Any:
        return sum(hf.sum(hf.sin(leaf)) for leaf in pytree.flatten(f(x))[0])

    return total


@pytest.mark.parametrize("run", [m.run for m in EXECUTIONS[1:]] + SYMBOLIC)
@every_program
def test_every_way_to_run_agrees_with_debug_mode(run: Run, f: Any) -> None:
    with hf.debug():
        expected = f(tensor())
    agree(run(f, tensor()), expected, rtol=1e-9)


def slopes(f: Any, x: Any) -> Any:
    """Central differences of a function of a vector in debug mode."""
    rows = []
    with hf.debug():
        for i in range(len(x)):
            step = np.eye(len(x))[i] * 1e-6
            above, below = f(hf.asarray(x + step)), f(hf.asarray(x - step))
            rows.append((np.asarray(above) - np.asarray(below)) / 2e-6)
    return np.stack(rows, axis=-1)


@every_program
def test_derivatives_are_those_of_what_it_means(f: Any) -> None:
    total = scalar(f)
    expected = slopes(total, A)
    one = hf.jvp(total, (tensor(),), (hf.asarray([1.0, 0.5], dtype=hf.float64),))[1]
    agree(one, expected @ [1.0, 0.5], rtol=1e-5)
    for transform in (hf.grad, hf.jacfwd):
        agree(transform(total)(tensor()), expected, rtol=1e-5)
        agree(hf.jit(transform(total))(tensor()), expected, rtol=1e-5)


@every_program
def test_second_derivatives_are_those_of_the_first(f: Any) -> None:
    first = hf.grad(scalar(f))
    expected = slopes(first, A)
    agree(hf.jacrev(first)(tensor()), expected, rtol=1e-5)
    agree(hf.hessian(scalar(f))(tensor()), expected, rtol=1e-5)


@every_program
def test_a_batch_is_each_example(f: Any) -> None:
    xs = hf.asarray(np.array([A, A + 1, A * 0.5]))
    total = scalar(f)
    expected = np.stack([np.asarray(total(x)) for x in xs])
    agree(hf.vmap(total)(xs), expected, rtol=1e-9)
    grads = np.stack([np.asarray(hf.grad(total)(x)) for x in xs])
    agree(hf.jit(hf.vmap(hf.grad(total)))(xs), grads, rtol=1e-9)
    agree(hf.grad(lambda xs: hf.sum(hf.vmap(total)(xs)))(xs), grads, rtol=1e-9)


def test_the_node_stays_until_a_rule_is_asked_for() -> None:
    graph = hf.trace(repeated, tensor(), captures=True).graph
    [node] = graph.nodes_of("repeat")
    assert set(node.graphs) == {"meaning", "f"}
    assert node.params["times"] == 3
    assert str(node.graphs["f"].out_types[0]) == "f64[2]"


def test_its_text_parses_back() -> None:
    graph = hf.trace(lambda x: repeat(lambda y: y * x, x, times=2), tensor()).graph
    text = format_graph(graph)
    again = parse(text, {**OPERATIONS, "repeat": repeat})
    assert equal(again, graph)
    assert format_graph(again) == text


def test_a_function_has_a_graph_for_each_kind_of_call() -> None:
    class Both(hf.HigherOrderOp):
        def debug(self, f: Any, x: Any) -> Any:
            return f(x), f(x[0]), f(x * 2)

    both = Both()
    [node] = hf.trace(lambda x: both(hf.sin, x), tensor()).graph.nodes_of("both")
    assert [str(g.out_types[0]) for g in node.params["f"]] == ["f64[2]", "f64[]"]


class UntilSettled(hf.HigherOrderOp):
    """Its loop has a weak carry that takes another dtype: the body is traced twice."""

    def debug(self, f: Any, x: Any) -> Any:
        def step(x: Any, change: Any) -> Any:
            new = f(x)
            return new, hf.max(hf.abs(new - x))

        return hf.while_loop(lambda x, change: change > 1e-9, step, (x, hf.inf))[0]


@pytest.mark.parametrize("run", [m.run for m in EXECUTIONS], ids=NAMES)
def test_a_function_captures_in_a_body_that_is_traced_again(run: Run) -> None:
    a, x = (hf.asarray(n, dtype=hf.float64) for n in (9.0, 1.0))
    found = run(lambda x: UntilSettled()(lambda y: (y + a / y) / 2, x), x)
    agree(found, hf.asarray(3.0, dtype=hf.float64))


@pytest.mark.parametrize("run", [m.run for m in EXECUTIONS], ids=NAMES)
def test_writes_reach_the_caller(run: Run) -> None:
    def f(x: Any) -> Any:
        z, seen = x * 1, hf.zeros(2, dtype=hf.float64)

        def step(y: Any) -> Any:
            seen[:] = seen + y
            y += 1
            return y * z

        return repeat(step, z, times=2), z, seen

    # Step 1 writes z, which is y: 3, 4; and returns 9, 16. Step 2: 10 * 3, 17 * 4.
    agree(
        run(f, tensor()), tuple(map(np.array, ([30.0, 68.0], [3.0, 4.0], [11.0, 19.0])))
    )


class Weighed(hf.HigherOrderOp):
    """Whose paths have one name, or that of something else, and functions with names;
    `debug` and a function may read tensors of outside."""

    rows: Any = 0.0

    def debug(self, fs: Any, fs_a: Any, self_: Any, *, g: Any, w: Any = 1.0) -> Any:
        found = fs["a"](self_) + fs["a b"](self_) * fs["a_b"](self_) * 10
        return g(found + fs_a(self_)) * w + self.rows

    def vjp(self, *args: Any, **options: Any) -> Any:
        return hf.vjp(lambda *args: self.debug(*args, **options), *args)


def weighed(x: Any) -> Any:
    fs = {"a": hf.sin, "a b": lambda y: y * x, "a_b": hf.cos}
    return hf.sum(Weighed()(fs, hf.exp, x, g=hf.tanh))


def test_names_and_options_of_a_class_with_rules_of_its_own() -> None:
    def plain(x: Any) -> Any:
        y = hf.sin(x) + x * x * hf.cos(x) * 10 + hf.exp(x)
        return hf.sum(hf.tanh(y))

    x = hf.asarray([0.3, 0.1], dtype=hf.float64)
    agree(hf.jit(hf.grad(weighed))(x), hf.grad(plain)(x), rtol=1e-9)


@pytest.mark.parametrize("given", ["w", "g", "rows"])
@pytest.mark.parametrize("op", ["jvp", "vjp"])
def test_a_derivative_that_a_rule_does_not_give_is_an_error(
    op: str, given: str
) -> None:
    def f(x: Any) -> Any:
        own = Weighed() if op == "vjp" else WeighedForward()
        own.rows = x * 2 if given == "rows" else 0.0
        options = {"w": x, "g": lambda y: y * x}
        chosen = {"g": hf.tanh} | {k: v for k, v in options.items() if k == given}
        fs = {"a": hf.sin, "a b": hf.sin, "a_b": hf.cos}
        return hf.sum(own(fs, hf.exp, x, **chosen))

    message = rf"a tensor f64\[2\] that is given by name, .* own `{op}` gives"
    with pytest.raises(DerivativeError, match=message):
        hf.grad(f)(tensor())


class WeighedForward(Weighed):
    vjp = hf.HigherOrderOp.vjp

    def jvp(self, primals: Any, tangents: Any, **options: Any) -> Any:
        return hf.jvp(lambda *a: self.debug(*a, **options), primals, tangents)


class TwiceBack(Twice):
    """With a `vjp` of its own, too."""

    def vjp(self, f: Any, x: Any) -> Any:
        return hf.vjp(lambda f, x: f(f(x)), f, x)


@pytest.mark.parametrize("op", [twice, TwiceBack()])
def test_functions_given_to_a_class_with_rules_of_its_own_may_write(op: Any) -> None:
    def written(op: Any, x: Any) -> Any:
        count, last = hf.zeros(2, dtype=hf.float64), hf.zeros(2, dtype=hf.float64)

        def step(y: Any) -> Any:
            count[:] = count + y
            last[:] = y
            y *= x
            return hf.sin(y) * count

        z = x * 2
        return op(step, z), z, count, last

    def plain(f: Any, x: Any) -> Any:
        return f(f(x))

    x = hf.asarray([0.3, 0.7], dtype=hf.float64)
    expected = written(plain, x)
    for execution in EXECUTIONS:
        agree(execution.run(lambda x: written(op, x), x), expected, rtol=1e-9)

    own, theirs = scalar(partial(written, op)), scalar(partial(written, plain))
    for derive in (hf.grad, hf.jacfwd, hf.hessian):
        agree(hf.jit(derive(own))(x), derive(theirs)(x), rtol=1e-9)
    xs = hf.stack([x, x + 1])
    agree(hf.vmap(hf.grad(own))(xs), hf.stack([hf.grad(theirs)(x) for x in xs]))
    agree(hf.jvp(own, (x,), (x,)), hf.jvp(theirs, (x,), (x,)), rtol=1e-9)


def test_a_tensor_of_the_instance_is_captured() -> None:
    class Table(hf.HigherOrderOp):
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def debug(self, f: Any, x: Any) -> Any:
            return f(x) + self.rows + hf.asarray([1.0, 2.0], dtype=hf.float64)

    table = Table(tensor())
    expected = np.sin(A) + A + [1, 2]
    agree(hf.jit(lambda x: table(hf.sin, x))(tensor()), expected)
    agree(hf.grad(lambda x: hf.sum(table(hf.sin, x)))(tensor()), np.cos(A))


def test_sizes_made_within_go_through_functions() -> None:
    class Positive(hf.HigherOrderOp):
        def debug(self, f: Any, x: Any) -> Any:
            return hf.sum(f(hf.nonzero(x)[0]))

    positive = Positive()
    x = hf.asarray([0.0, 2.0, 0.0, 3.0])
    assert int(hf.jit(lambda x: positive(lambda i: i * 2, x))(x)) == 8


def test_one_program_serves_all_sizes() -> None:
    before = hf.stats().compiles
    f = hf.jit(lambda x: repeat(lambda y: y * x, x, times=2), dynamic=True)
    for n in (2, 3, 5):
        agree(f(hf.ones(n)), np.ones(n))
    assert hf.stats().compiles - before <= 2  # a size of its own, then any


def test_a_batch_keeps_the_rules_of_a_class() -> None:
    calls = []

    class Noted(Twice):
        def vjp(self, f: Any, x: Any) -> Any:
            calls.append(x.shape)
            return hf.vjp(lambda f, x: f(f(x)), f, x)

    noted = Noted()
    xs = hf.stack([tensor(), tensor()])
    batch = hf.vmap(lambda x: noted(lambda y: y * x, x))
    agree(hf.grad(lambda xs: hf.sum(batch(xs)))(xs), 3 * np.asarray(xs) ** 2)
    assert set(calls) == {(2,)}  # for one example


# --- names and declarations -----------------------------------------------------------


def test_its_name_is_that_of_the_class() -> None:
    class DoTwiceOver(hf.HigherOrderOp):
        pass

    assert [repeat.name, DoTwiceOver.name] == ["repeat", "do_twice_over"]


def test_a_rule_may_be_left_to_the_class_above_or_refused() -> None:
    class Refusing(Twice):
        jvp = derived
        batch = unsupported("its function knows no examples")

    refusing = Refusing()
    assert refusing.own_rules == ("jvp",)
    message = "refusing: it has no rule `batch`: its function knows no examples."
    with pytest.raises(UnsupportedRuleError, match=message):
        hf.vmap(lambda x: refusing(hf.sin, x))(hf.ones((3, 2)))


# --- errors ---------------------------------------------------------------------------


class Bad(hf.HigherOrderOp):
    """Whose rules return what they are told to."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def debug(self, f: Any, x: Any) -> Any:
        return f(x)

    def vjp(self, f: Any, x: Any) -> Any:
        return self.found(f, x)


def writing(f: Any, x: Any) -> Any:
    def pull(ct: Any) -> Any:
        x[:] = ct
        return None, ct

    return f(x), pull


class Misjudged(Twice):
    def infer(self, *types: Any, **_params: Any) -> Any:
        return types[0], types[0]


class Squared(Twice):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), tangents[1] * tangents[1]


class ReadingBatch(Twice):
    def batch(self, *args: Any) -> Any:
        found, batched = super().batch(*args)
        return [x * WEIGHT for x in found], batched


class ReadingLower(Twice):
    def lower(self, types: Any, *args: Any, **_params: Any) -> Any:
        module = hf.trace(lambda x: x * WEIGHT, *types, mode="fake", captures=True)
        return Inline(module.graph, args)


WEIGHT = hf.asarray(A)


class Unasked(Twice):
    def jvp(self, primals: Any) -> Any:  # type: ignore[override]
        return primals


ERRORS = [
    (
        OperatorError,
        r"misjudged: `Misjudged.infer` must .*, \(f64\[2\]\), and gives \(f64",
        lambda x: hf.grad(lambda x: hf.sum(Misjudged()(hf.sin, x)))(x),
    ),
    (
        ArgumentTypeError,
        r"`jvp` \(.*\) does not take the arguments that it is called with",
        lambda x: hf.grad(lambda x: hf.sum(Unasked()(hf.sin, x)))(x),
    ),
    (
        DerivativeError,
        "multiply: a derivative that is not linear in the tangents has no transpose",
        lambda x: hf.grad(lambda x: hf.sum(Squared()(hf.sin, x)))(x),
    ),
    (
        MutationError,
        r"bad: `pull` \(.*\) writes to a captured tensor f64\[2\], but a rule computes",
        lambda x: hf.grad(lambda x: hf.sum(Bad(writing)(hf.sin, x)))(x),
    ),
    (
        RuleReadError,
        r"a rule `batch` reads a tensor f64\[2\] of outside, but a node has",
        lambda x: hf.vmap(
            lambda x: hf.fori_loop(
                0, 2, lambda i, c: (ReadingBatch()(hf.sin, c),), (x,)
            )
        )(hf.stack([x, x])),
    ),
    (
        RuleReadError,
        r"a rule `lower` reads a tensor f64\[2\] of outside, but a node has",
        hf.jit(lambda x: ReadingLower()(hf.sin, x)),
    ),
    (OperatorError, "operator: it has no meaning", lambda x: hf.HigherOrderOp()(x)),
    (
        ArgumentTypeError,
        "repeat: missing a required argument: 'x'. It is called as "
        r"`repeat\(f: Any, x: Any, \*, times",
        lambda x: repeat(hf.sin, times=2),
    ),
    (ResultTypeError, "its `result` is `str`", lambda x: repeat(str, x, times=1)),
    (ArgumentTypeError, "must be a tensor or a number", lambda x: twice(hf.sin, "x")),
    (
        TraceError,
        "Branch with `hf.cond`",
        lambda x: repeat(lambda y: y if y[0] > 0 else x, x, times=1),
    ),
    (
        ResultTypeError,
        r"bad.vjp must return a pair \(result, pullback\), and returns `int`",
        lambda x: hf.grad(lambda x: Bad(lambda f, x: 1)(hf.sum, x))(x),
    ),
    (
        ResultTypeError,
        "must return a tuple of 2 cotangents",
        lambda x: hf.grad(lambda x: Bad(lambda f, x: (f(x), lambda ct: ct))(hf.sum, x))(
            x
        ),
    ),
    (
        StructureError,
        "`cotangent` must have the structure",
        lambda x: hf.grad(
            lambda x: Bad(lambda f, x: (f(x), lambda ct: (None, [x, x])))(hf.sum, x)
        )(x),
    ),
    (
        RuleTypeError,
        r"bad: `vjp` \(.*py:\d+\) must return results of the types that `debug` "
        r"returns.\n  result  expected f64\[\], got f64\[2\]  \(rank 0 != 1\)",
        lambda x: hf.grad(lambda x: Bad(lambda f, x: (x, print))(hf.sum, x))(x),
    ),
    (
        RuleTypeError,
        r"expected f64\[2\], got f64\[4\]  \(axis 0: 2 != 4\)",
        lambda x: hf.grad(
            lambda x: hf.sum(Bad(lambda f, x: (hf.concat([x, x]), print))(hf.sin, x))
        )(x),
    ),
    (
        StructureError,
        r"the structure that `debug` returns.\n  expected \*\n  got      \(\*,\)",
        lambda x: hf.grad(lambda x: Bad(lambda f, x: ((f(x),), print))(hf.sum, x))(x),
    ),
    (
        OperatorError,
        r"a rule calls `f` with \(f64\[\]\), as `debug` never does",
        lambda x: hf.grad(lambda x: Bad(lambda f, x: (f(x[0]), id))(hf.sum, x))(x),
    ),
]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda x: hf.sum(x),
            r"must return the results of the node: \(f64\[2\]\), and",
        ),
        (lambda x: (x, x), r"and not \(f64\[2\], f64\[2\]\)"),
        (lambda x: hf.astype(x, hf.float32), r"`Lowered.lower`.*not \(f32\[2\]\)"),
        (lambda: hf.ones(2, dtype=hf.float64), r"must take the operands .*not \(\)\."),
        (lambda x: x + 1, ""),
    ],
)
def test_what_an_operator_is_lowered_to_has_its_types(made: Any, message: str) -> None:
    class Lowered(hf.HigherOrderOp):
        def debug(self, f: Any, x: Any) -> Any:
            return f(x)

        def lower(self, types: Any, *args: Any, **_params: Any) -> Any:
            given = types[: len(inspect.signature(made).parameters)]
            return Inline(hf.trace(made, *given, mode="fake").graph, args)

    run = hf.jit(lambda x: Lowered()(hf.sin, x))
    if message:
        with pytest.raises(OperatorError, match=message):
            run(tensor())
    else:
        agree(run(tensor()), A + 1)


class Same(hf.HigherOrderOp):
    def debug(self, x: Any, y: Any) -> Any:
        return x[1:], y


class SameForward(Same):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self.debug(*primals), self.debug(*tangents)


class SameBackward(Same):
    def vjp(self, x: Any, y: Any) -> Any:
        return (x[1:], y), lambda given: (hf.pad(given[0], ((1, 0),)), given[1])


@pytest.mark.parametrize("op", [Same(), SameForward(), SameBackward()])
@pytest.mark.parametrize("jit", [hf.jit, lambda f: f])
@pytest.mark.parametrize(
    "run",
    [
        lambda f, x: f(x),
        lambda f, x: hf.jvp(f, (x,), (x,))[0],
        lambda f, x: hf.vjp(f, x)[0],
        lambda f, x: hf.grad(lambda x: (hf.sum(x), f(x)), has_aux=True)(x)[1],
    ],
)
def test_a_result_is_no_view_of_an_operand(op: Any, jit: Any, run: Any) -> None:
    shared = hf.zeros(2)

    def later(x: Any) -> Any:
        kept, own = op(shared, x)
        shared[1] = 5.0
        return kept, own

    assert jit(lambda x: run(later, x))(hf.ones(1))[0].tolist() == [0.0]
    assert shared.tolist() == [0.0, 5.0]


@pytest.mark.parametrize(("error", "message", "call"), ERRORS)
def test_wrong_use_is_an_error_of_ours(error: Any, message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call(tensor())
