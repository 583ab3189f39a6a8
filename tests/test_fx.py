"""fx: functions as graphs without shapes, and how users edit them."""

import copy
import gc
import importlib
import inspect
import linecache
import math
import operator
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx, pytree
from hopflow.errors import (
    ArgumentTypeError,
    GraphError,
    ShapeError,
    TraceError,
)
from hopflow.graph.origin import in_module
from hopflow.testing.executions import agree


def code(f: Callable[..., Any], **concrete: Any) -> list[str]:
    """The lines of the graph of `f`, without the user's."""
    lines = str(hf.symbolic_trace(f, concrete)).splitlines()
    return [line.partition("  #")[0].strip() for line in lines]


def many(x: Any, y: Any = 2.0, *, flag: bool = True) -> dict[str, Any]:
    z = hf.sin(x) + y
    rows, columns = z.shape
    z[0] = -1.5
    z += 1
    both = hf.concat([z[1:, ...], x.T[None, 0, ::-1]], axis=0)
    parts = hf.where(z > 0.0, abs(z), ~(z == 2.0))
    inverse = hf.linalg.inv(hf.eye(2) * y)
    return {
        "a": both,
        "n": rows * columns,
        "sum": 2 ** -parts.sum(axis=0),
        "flag": flag,
        "i": (inverse,),
    }


X = np.linspace(-1.0, 2.0, 9, dtype=np.float32).reshape(3, 3)


def same(found: Any, expected: Any) -> None:
    assert pytree.structure(found) == pytree.structure(expected)
    leaves = zip(pytree.flatten(found)[0], pytree.flatten(expected)[0], strict=True)
    for a, b in leaves:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# --- what is recorded -----------------------------------------------------------------


def test_a_graph_prints_as_what_the_user_called() -> None:
    assert code(many, flag=False) == [
        "def many(self, x: Any, y: Any = 2.0) -> dict[str, typing.Any]:",
        "sin = hf.sin(x)",
        "add = sin + y",
        "shape = add.shape",
        "getitem = shape[0]",
        "getitem_1 = shape[1]",
        "add[0] = -1.5",
        "iadd = operator.iadd(add, 1)",
        "getitem_2 = iadd[1:, ...]",
        "T = x.T",
        "getitem_3 = T[None, 0, ::-1]",
        "concat = hf.concat([getitem_2, getitem_3], axis=0)",
        "gt = iadd > 0.0",
        "abs_1 = operator.abs(iadd)",
        "eq = iadd == 2.0",
        "invert = ~eq",
        "where = hf.where(gt, abs_1, invert)",
        "tensor = self.attributes['tensor']",
        "mul = tensor * y",
        "inv = hf.linalg.inv(mul)",
        "mul_1 = getitem * getitem_1",
        "sum_1 = where.sum(axis=0)",
        "neg = -sum_1",
        "pow_1 = 2 ** neg",
        "return {'a': concat, 'n': mul_1, 'sum': pow_1, 'flag': False, 'i': (inv,)}",
    ]


@pytest.mark.parametrize(
    "run",
    [
        lambda module: module,
        lambda module: fx.Interpreter(module).run,
        lambda module: fx.Transformer(module).transform(),
        lambda module: hf.symbolic_trace(module),
        lambda module: fx.GraphModule(module.graph),
    ],
    ids=["code", "interpreter", "transformer", "again", "graph"],
)
def test_a_module_does_what_the_function_does(run: Any) -> None:
    module = run(hf.symbolic_trace(many, {"flag": True}))
    same(module(hf.asarray(X)), many(hf.asarray(X)))
    same(module(hf.asarray(X), y=3.0), many(hf.asarray(X), 3.0))


def test_a_tensor_of_outside_is_read_and_written_where_a_proxy_says() -> None:
    table, cache = hf.asarray(X), hf.zeros((2, 3))

    def f(i: Any, v: Any) -> Any:
        cache[i] = table[i, 1:].sum()
        cache[0, 1] = v
        return table[i], cache.at[i].add(v)

    module = hf.symbolic_trace(f)
    assert cache.tolist() == [[0.0] * 3] * 2
    i, v = hf.asarray(1), hf.asarray(5.0)
    same(module(i, v), f(i, v))
    assert cache.tolist()[0] == [0.0, 5.0, 0.0]
    same(hf.trace(module, i, v, captures=True)(i, v), f(i, v))


def test_attributes_that_edits_make_one_are_one_leaf() -> None:
    a, b = hf.ones(2), hf.zeros(2)
    module = hf.symbolic_trace(lambda x: x * a + b)
    _, two = pytree.flatten(module)
    assert pytree.structure(pytree.unflatten(two, [b, b])) == two
    first, second = module.attributes
    module.attributes[second] = module.attributes[first]
    module.recompile()
    [leaf], spec = pytree.flatten(module)
    zeros = pytree.unflatten(spec, [hf.zeros_like(leaf)])
    same(zeros(hf.ones(2)), hf.zeros(2))


def test_what_python_decides_is_decided_once() -> None:
    def f(x: Any, depth: int) -> Any:
        for _ in range(depth):
            x = hf.tanh(x)
        return x

    assert len(hf.symbolic_trace(f, {"depth": 3}).graph.nodes) == 5
    with pytest.raises(ArgumentTypeError, match="has 'dept', and the parameters are x"):
        hf.symbolic_trace(f, {"dept": 3})


def test_annotations_and_defaults_are_kept() -> None:
    ones: Any = hf.ones(2)

    def f(x: hf.Tensor, scale: float = math.inf, *, shift: "hf.Tensor") -> hf.Tensor:
        return x * scale + shift

    module = hf.symbolic_trace(f)
    [head, *_] = module.code.splitlines()
    assert head == (
        "def f(self, x: hopflow.tensor.base.Tensor, scale: float = float('inf'), *, "
        "shift: hf.Tensor) -> hopflow.tensor.base.Tensor:"
    )
    assert module.graph.placeholders[0].type is hf.Tensor
    assert module.graph.output_node().type is hf.Tensor
    again = hf.symbolic_trace(module)
    assert again.code.splitlines()[0] == head
    same(again(ones, 2.0, shift=ones), f(ones, 2.0, shift=ones))


def test_operators_are_nodes_with_their_bodies() -> None:
    def f(x: Any, p: Any) -> Any:
        return hf.cond(p, hf.sin, lambda x: x * 2.0, (x,))

    module = hf.symbolic_trace(f)
    [node] = module.graph.find_nodes("call_function", hf.cond)
    assert node.args[1] is hf.sin
    for p in (True, False):
        same(module(hf.ones(2), p), f(hf.ones(2), p))


class Pair(hf.nn.Module):
    a: Any
    b: Any

    def forward(self, x: Any) -> Any:
        return self.a * x + self.b


PAIR = Pair(hf.asarray(2.0), hf.asarray(3.0))


def through_cells(x: Any, w: Any) -> Any:
    held = {"w": [w]}

    def outer(c: Any, row: Any, *, scale: Any = w * 2.0) -> Any:
        def inner(v: Any, depth: int) -> Any:
            return v if depth == 0 else inner(v + held["w"][0] * scale, depth - 1)

        return inner(c, 2), c * row

    return hf.scan(outer, w, x)


def in_a_loop(x: Any, w: Any) -> Any:
    for k in range(3):
        x = hf.map(lambda row: row * k + 1.0, x)  # noqa: B023
    return x, w


@pytest.mark.parametrize(
    ("f", "made"),
    [
        (through_cells, ["make_outer"]),
        (in_a_loop, []),
        (lambda x, w: hf.cond(True, lambda: x, lambda: w), ["make_lambda"] * 2),
        (lambda x, w: hf.map(partial(lambda a, b: a * b, w), x), ["make_partial"]),
        (lambda x, w: hf.grad(lambda v: hf.sum(v * w))(x), ["make_lambda"]),
        (
            lambda x, w: hf.while_loop(
                lambda i, v: i < w[0], lambda i, v: (i + 1, v * w), (0.0, x)
            )[1],
            ["make_lambda"] * 2,
        ),
        (
            lambda x, w: hf.map(
                lambda row: hf.cond(row[0] > 0, lambda: w, lambda: row), x
            ),
            ["make_lambda"],
        ),
        (lambda x, w: hf.map(PAIR.forward, x) + w, ["make_forward"]),
        (lambda x, w: hf.cond(w[0] > 0, Pair(w, x), PAIR, (x,)), ["make_Pair"] * 2),
        (lambda x, w: hf.fori_loop(0, 2, lambda i, p: p, Pair(w, x)).a, ["make_Pair"]),
    ],
)
def test_what_a_body_closes_over_is_lifted(f: Any, made: list[str]) -> None:
    module = hf.symbolic_trace(f)
    targets = [n.target for n in module.graph.find_nodes("call_function")]
    names = [t.__name__ for t in targets if isinstance(t, fx.bodies.Maker)]
    assert names == made
    args = hf.asarray(X[:, :2]), hf.asarray([1.0, 2.0])
    expected = f(*args)
    for run in (
        *(module, fx.Interpreter(module).run, hf.jit(module)),
        *(fx.Transformer(module).transform(), hf.symbolic_trace(module)),
        *(fx.GraphModule(module.graph), module.propagate(*args)),
    ):
        assert pytree.structure(run(*args)) == pytree.structure(expected)
        agree(run(*args), expected)


def test_what_a_body_closes_over_can_be_edited() -> None:
    told: list[Any] = []
    pair = PAIR

    def f(x: Any, w: Any) -> Any:
        hf.map(lambda row: told.append(row * w), x)
        return hf.map(lambda row: row * w + pair.a, x)

    module = hf.symbolic_trace(f)
    [a, _] = module.attributes.values()
    assert a is pair.a
    _, w = module.graph.placeholders
    w.replace_all_uses_with(3.0)
    assert module.graph.eliminate_dead_code() == 0  # bodies may have effects
    module.recompile()
    same(module(hf.ones((3, 2)), hf.ones(2)), hf.full((3, 2), 5.0))
    assert told


def test_functions_that_jit_made_are_nodes() -> None:
    double = hf.jit(lambda x: x * 2.0)
    module = hf.symbolic_trace(lambda x: double(x))
    assert [n.target for n in module.graph.nodes if n.kind == "call_function"] == [
        double
    ]
    assert module(hf.asarray(3.0)).item() == 6.0


@pytest.mark.parametrize("name", ["sum", "linalg.inv", "random.key", "cond"])
def test_a_public_function_says_where_it_is(name: str) -> None:
    function = operator.attrgetter(name)(hf)
    home = importlib.import_module(getattr(function, "__module__", "hopflow"))
    assert getattr(home, function.__name__) is function


def square(x: Any) -> Any:
    return hf.sum(x * x)


@pytest.mark.parametrize(
    "transform",
    [
        *(hf.grad, hf.value_and_grad, hf.jacfwd, hf.vmap, hf.checkpoint, hf.subgraph),
        *(hf.custom_jvp, hf.custom_vjp, hf.jit),
    ],
    ids=lambda transform: transform.__name__,
)
def test_what_a_transform_returns_is_a_node(transform: Any) -> None:
    made = transform(square)
    if transform is hf.custom_jvp:
        made.defjvp(lambda primals, tangents: (square(primals[0]), tangents[0].sum()))
    if transform is hf.custom_vjp:
        made.defvjp(lambda x: (square(x), x), lambda x, ct: (ct * x,))
    module = hf.symbolic_trace(lambda x: made(x))
    assert [n.target for n in module.graph.find_nodes("call_function")] == [made]
    same(module(hf.asarray(X)), made(hf.asarray(X)))
    assert hf.symbolic_trace(lambda x: x.astype(hf.int8)).code.count("hf.int8") == 1


# --- wrap -----------------------------------------------------------------------------


@hf.wrap
def rescale(x: Any, low: float) -> Any:
    return x - low if x.ndim > 1 else x


length = hf.wrap(len)


def test_a_wrapped_function_is_one_node() -> None:
    module = hf.symbolic_trace(lambda x: rescale(x, 1.0) * length(x))
    [first, second] = [n for n in module.graph.nodes if n.kind == "call_function"][:2]
    assert (first.target, second.target) == (rescale, length)
    same(module(hf.asarray(X)), (hf.asarray(X) - 1.0) * 3)
    assert rescale(hf.ones(2), 1.0).tolist() == [1.0, 1.0]
    with pytest.raises(ArgumentTypeError, match=r"length = hf.wrap\(len\)"):
        hf.wrap(3)  # type: ignore[arg-type]


def test_what_cannot_be_hashed_is_wrapped() -> None:
    class Table:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x * 2.0

    table = hf.wrap(Table())
    assert hf.symbolic_trace(lambda x: table(x))(hf.ones(1)).tolist() == [2.0]


def test_numpy_on_the_left_is_recorded() -> None:
    row = np.ones(2, np.float32)
    module = hf.symbolic_trace(lambda x: row - np.float32(2.0) * x)
    assert module(hf.ones(2)).tolist() == [-1.0, -1.0]
    assert list(module.attributes) == ["tensor"]


@pytest.mark.parametrize(
    ("f", "code"),
    [
        (lambda x: np.sin(x), "sin = np.sin(x)"),
        (lambda x: np.sum(x, axis=0), "np.sum(x, axis=0)"),
        (lambda x: np.add.reduce(x), "np.add.reduce(x)"),
        (lambda x: np.concatenate([x, 2 * x]), "np.concatenate([x, mul])"),
        (lambda x: np.concatenate([hf.ones(3), x[0]]), "np.concatenate"),
        (lambda x: np.modf(x)[1], "np.modf"),
        (lambda x: np.linalg.norm(x, axis=1), "np.linalg.norm"),
        (lambda x: X * x, "tensor * x"),
        (lambda x: np.add(x, 1.0), "x + 1.0"),
        (lambda x: np.add(x, 1.0, dtype=np.float64), "dtype="),
        (lambda x: x.sum(axis=0), "x.sum(axis=0)"),
    ],
)
def test_numpys_functions_are_recorded(f: Any, code: str) -> None:
    module = hf.symbolic_trace(f)
    assert code in module.code
    x = X + 1.25
    again = hf.symbolic_trace(module)
    copied = copy.deepcopy(module)
    for call in (module, again, copied, hf.jit(module)):
        np.testing.assert_allclose(call(hf.asarray(x)), f(x), rtol=1e-6)


# --- what has no answer ---------------------------------------------------------------


def branchy(x: Any) -> Any:
    y = hf.sin(x)
    z = y * 2.0
    if z > 1.0:
        return x
    return y


def test_control_flow_on_a_proxy_walks_back_through_the_code() -> None:
    with pytest.raises(TraceError) as caught:
        hf.symbolic_trace(branchy)
    first = branchy.__code__.co_firstlineno
    assert str(caught.value).splitlines() == [
        "symbolic trace: `gt` is a proxy without a value, and was asked for its truth.",
        f"  asked by  test_fx.py:{first + 3}, in branchy: if z > 1.0:",
        f"  `gt`  test_fx.py:{first + 3}, in branchy: if z > 1.0:",
        f"  `mul`  test_fx.py:{first + 2}, in branchy: z = y * 2.0",
        f"  `sin`  test_fx.py:{first + 1}, in branchy: y = hf.sin(x)",
        "  `x`  an argument",
        "Write `hf.cond` or `hf.where` for a choice at run time, give what decides as "
        "one of `concrete_args`, or capture the function with `hf.trace`.",
    ]


def unpacked(x: Any) -> Any:
    return [*x]


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: len(x), r"its length(.|\n)*hf.wrap\(len\)"),
        (lambda x: math.sqrt(x), r"a Python float(.|\n)*hf.wrap\(math.sqrt\)"),
        (lambda x: int(x), r"hf.wrap\(int\)"),
        (lambda x: [0][x], r"hf.wrap\(operator.index\)"),
        (lambda x: complex(x), r"hf.wrap\(complex\)"),
        (lambda x: 1 in x, "whether something is in it"),
        (lambda x: np.asarray(x), "a NumPy array"),
        (lambda x: [y for y in x], "its items, of which nobody knows the number"),
        (unpacked, "its items"),
        (lambda x: not x, "its truth"),
    ],
)
def test_what_needs_a_value_is_an_error_with_a_remedy(f: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        hf.symbolic_trace(f)


def test_a_proxy_does_not_outlive_its_trace() -> None:
    kept = []

    def f(x: Any) -> Any:
        kept.append(x)
        return x

    hf.symbolic_trace(f)
    with pytest.raises(TraceError, match="used after its trace"):
        kept[0] + 1
    with pytest.raises(TraceError, match="a proxy of another trace"):
        hf.symbolic_trace(lambda y: hf.symbolic_trace(lambda x: x + y)(y))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (3, "must be a function, and is `int`"),
        (partial(lambda *xs: xs), "takes any number of arguments, and is no function"),
        (type, "does not tell the parameters"),
    ],
)
def test_what_cannot_be_traced_is_refused(f: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        hf.symbolic_trace(f)


def test_a_trace_in_one_thread_leaves_the_others_alone() -> None:
    found = []

    def f(x: Any) -> Any:
        other = threading.Thread(target=lambda: found.append(hf.sum(hf.ones(3)).item()))
        other.start()
        other.join()
        return hf.sum(x)

    hf.symbolic_trace(f)
    assert found == [3.0]


def test_any_number_of_arguments_is_one_proxy() -> None:
    def added(*xs: Any, **named: Any) -> Any:
        return xs[0] + xs[1] if named is not None else xs

    module = hf.symbolic_trace(added)
    assert module.code.startswith("def added(self, *xs: Any, **named: Any)")
    assert module(1.0, 2.0) == 3.0


def test_any_number_of_arguments_beside_others() -> None:
    def g(x: Any, /, *rest: Any, scale: float = 2.0, **named: Any) -> Any:
        def first() -> Any:
            return rest[0] * scale

        return x + first() - named["by"]

    module = hf.symbolic_trace(g)
    targets = [node.target for node in module.graph.placeholders]
    assert targets == ["x", "*rest", "scale", "**named"]
    for args, kwargs in (((1, 3), {"by": 4}), ((1, 3, 5), {"scale": 1, "by": 2})):
        assert module(*args, **kwargs) == g(*args, **kwargs)
        assert fx.Interpreter(module).run(*args, **kwargs) == g(*args, **kwargs)
        again = fx.Transformer(module).transform()
        assert again(*args, **kwargs) == g(*args, **kwargs)
    assert hf.symbolic_trace(g, {"named": {"by": 1}})(1, 2) == g(1, 2, by=1)


def test_the_number_of_arguments_is_unknown() -> None:
    with pytest.raises(TraceError, match="its items, of which nobody knows the number"):
        hf.symbolic_trace(lambda *xs: hf.concat([*xs]))


def test_methods_take_any_number_of_arguments() -> None:
    class Sum:
        def forward(self, *xs: Any) -> Any:
            return xs[0] + xs[1] + self.one

        one = 1

        def __call__(self, *xs: Any) -> Any:
            return self.forward(*xs)

    assert hf.symbolic_trace(Sum())(1, 2, 5) == 4


# --- your own tracer ------------------------------------------------------------------


class Scale:
    """A module in the sense of `Tracer.call_module`: it announces its calls."""

    def __init__(self, factor: float) -> None:
        self.factor = hf.asarray(factor)

    def __call__(self, x: Any) -> Any:
        tracer = fx.tracer.current_tracer()
        if tracer is None:
            return self.forward(x)
        return tracer.call_module(self, self.forward, (x,), {})

    def forward(self, x: Any) -> Any:
        return x * self.factor


class Leaves(fx.Tracer):
    def is_leaf_module(self, module: Any, path: str) -> bool:
        return isinstance(module, Scale)


def test_a_tracer_decides_what_is_a_leaf() -> None:
    scale = Scale(3.0)

    def f(x: Any) -> Any:
        return scale(x) + scale(x)

    inside = hf.symbolic_trace(f)
    assert [n.kind for n in inside.graph.nodes].count("call_module") == 0
    assert [n.module_path for n in inside.graph.find_nodes("call_function")] == [
        *("scale", "scale", ""),
    ]
    leaves = Leaves().trace(f)
    assert leaves.attributes == {"scale": scale}
    assert [n.target for n in leaves.graph.find_nodes("call_module")] == ["scale"] * 2
    same(leaves(hf.ones(2)), inside(hf.ones(2)))


class Noted(fx.Tracer):
    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        proxy.node.meta["noted"] = True
        return proxy

    def to_bool(self, proxy: fx.Proxy) -> bool:
        return False


def test_a_tracer_decides_what_is_recorded() -> None:
    graph = Noted().trace(branchy).graph
    assert all(n.meta["noted"] for n in graph.nodes if n.kind != "output")
    assert graph.output_node().inputs == graph.find_nodes("call_function", hf.sin)


# --- types ----------------------------------------------------------------------------


def affine(x: Any, w: Any) -> Any:
    return hf.tanh(x @ w) + 1.0


def test_propagation_gives_a_captured_graph_with_the_users_lines() -> None:
    module = hf.symbolic_trace(affine)
    captured = module.propagate(hf.spec("f32[2, 3]"), hf.spec("f32[3, 4]"))
    line = f"# test_fx.py:{affine.__code__.co_firstlineno + 1}"
    assert [text.split("  ")[0] for text in str(captured).splitlines()] == [
        "def affine(x: f32[2, 3], w: f32[3, 4]) -> f32[2, 4]:",
        "",
        "",
        "",
        "",
    ]
    assert str(captured).count(line) == 3
    x, w = hf.ones((2, 3)), hf.ones((3, 4))
    same(captured(x, w), affine(x, w))
    same(hf.jit(module)(x, w), hf.jit(affine)(x, w))


def test_an_error_of_propagation_names_the_node() -> None:
    module = hf.symbolic_trace(affine)
    with pytest.raises(ShapeError) as caught:
        module.propagate(hf.spec("f32[2, 3]"), hf.spec("f32[4, 4]"))
    line = affine.__code__.co_firstlineno + 1
    assert caught.value.__notes__ == [f"in node `matmul` (test_fx.py:{line})"]


def test_lines_and_module_paths_survive_propagation() -> None:
    scale = Scale(2.0)
    module = hf.symbolic_trace(lambda x: scale(x))
    [multiply] = module.propagate(hf.spec("f32[3]")).graph.nodes_of("multiply")
    assert multiply.module_path == "scale"
    with in_module("outer"):
        [multiply] = hf.trace(lambda x: x * 2, hf.ones(2)).graph.nodes_of("multiply")
    assert multiply.module_path == "outer"


# --- interpreters ---------------------------------------------------------------------


class Recorded(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, Any] = {}

    def run_node(self, node: Any) -> Any:
        result = super().run_node(node)
        self.shapes[node.name] = getattr(result, "shape", None)
        return result


def test_an_interpreter_sees_every_node() -> None:
    recorded = Recorded(hf.symbolic_trace(affine))
    recorded.run(hf.ones((2, 3)), w=hf.ones((3, 4)))
    assert recorded.shapes == {
        "x": (2, 3),
        "w": (3, 4),
        **dict.fromkeys(("matmul", "tanh", "add", "output"), (2, 4)),
    }


def named_alike(sum: Any, _y: Any = 2.0, *args: Any, hf: Any = 3.0) -> Any:
    return sum * _y + hf + args[0]


@pytest.mark.parametrize(
    "run",
    [
        lambda module: module,
        lambda module: fx.Interpreter(module).run,
        lambda module: fx.Transformer(module).transform(),
        lambda module: hf.jit(module),
    ],
)
def test_parameters_keep_their_names(run: Any) -> None:
    """Also those that the source needs for something else."""
    module = hf.symbolic_trace(named_alike)
    assert list(inspect.signature(module).parameters) == ["sum", "_y", "args", "hf"]
    call = run(module)
    assert float(call(4.0, 3.0, 1.0, hf=1.0)) == named_alike(4.0, 3.0, 1.0, hf=1.0)
    single = run(hf.symbolic_trace(lambda _y, sum: _y - sum))
    assert float(single(sum=1.0, _y=3.0)) == 2.0


def test_an_interpreter_needs_a_compiled_signature() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("x"), graph.placeholder("x")  # x and x_1
    output = graph.output(graph.call_function(hf.subtract, first, second))
    module = fx.GraphModule(graph)
    assert fx.Interpreter(module).run(3.0, 2.0).item() == module(3.0, x_1=2.0).item()
    output.prepend(graph.placeholder("z"))
    with pytest.raises(GraphError, match=r"Call `module\.recompile"):
        fx.Interpreter(module).run(3.0, 2.0)


class Faster(fx.Transformer):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is hf.tanh:
            return args[0] / (1.0 + hf.abs(args[0]))
        return super().call_function(target, args, kwargs)


def test_a_transformer_writes_what_its_methods_compute() -> None:
    module = hf.symbolic_trace(affine)
    module.graph.nodes[3].meta["note"] = 1
    faster = Faster(module).transform()
    names = "x w matmul abs_1 add truediv add_1 output".split()
    assert [n.name for n in faster.graph.nodes] == names
    assert faster.graph.nodes[5].meta == {"note": 1}
    line = affine.__code__.co_firstlineno + 1
    assert {n.line.line for n in faster.graph.nodes if n.line} == {line}
    assert len(module.graph.nodes) == 6


# --- modules as data ------------------------------------------------------------------


def test_a_module_is_a_tree_of_its_attributes() -> None:
    w = hf.asarray([1.0, 2.0])
    module = hf.symbolic_trace(lambda x: hf.sum(w * x))
    assert pytree.leaf_paths(pytree.structure(module), "m") == ["m['tensor']"]
    gradient = hf.grad(lambda m, x: m(x))(module, hf.asarray([3.0, 4.0]))
    assert gradient.attributes["tensor"].tolist() == [3.0, 4.0]
    doubled = pytree.tree_map(lambda leaf: leaf * 2.0, module)
    assert doubled(hf.ones(2)).item() == 6.0
    assert module(hf.ones(2)).item() == 3.0


def test_a_tree_of_a_module_runs_what_was_compiled() -> None:
    w = hf.asarray([1.0, 2.0])
    module = hf.symbolic_trace(lambda x: hf.sum(w * x))
    run = hf.jit(lambda module, x: module(x))
    x, traces = hf.ones(2), hf.stats().traces
    assert [run(module, x).item(), run(pytree.tree_map(hf.sin, module), x).item()] == [
        3.0,
        pytest.approx(math.sin(1.0) + math.sin(2.0)),
    ]
    [total] = module.graph.find_nodes("call_function", hf.sum)
    total.target = hf.max
    assert run(module, x).item() == 3.0
    assert run(module.recompile(), x).item() == 2.0
    assert hf.stats().traces == traces + 2


def test_the_source_of_a_module_is_forgotten_with_it() -> None:
    module = hf.symbolic_trace(lambda x: x.nothing())
    with pytest.raises(AttributeError) as caught:
        module(hf.ones(2))
    shown = "".join(traceback.format_exception(caught.value))
    assert "nothing = x.nothing()" in shown
    files = [name for name in linecache.cache if name.startswith("<graph forward")]
    del module, caught
    gc.collect()
    left = [name for name in linecache.cache if name.startswith("<graph forward")]
    assert len(left) < len(files)
