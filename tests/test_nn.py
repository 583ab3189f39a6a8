"""nn: modules are trees, and layers what NumPy and JAX make of their formulas."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow import nn, pytree
from hopflow.errors import ArgumentTypeError, ArgumentValueError, HopflowError
from hopflow.fx import Tracer

KEY: Final = hf.random.key(0)
RNG: Final = np.random.default_rng(0)
IDS: Final = np.array([[0, 2], [4, 0]])
MASK: Final = np.tril(np.ones((5, 5), bool))


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape)


# --- the layers -----------------------------------------------------------------------


def sigmoid(xp: Any, x: Any) -> Any:
    return 1.0 / (1.0 + xp.exp(-x))


def linear(xp: Any, p: Any, x: Any) -> Any:
    return xp.einsum("...i,io->...o", x, p["weight"]) + p.get("bias", 0.0)


def embedding(xp: Any, p: Any, ids: Any) -> Any:
    return p["weight"][ids]


def layer_norm(xp: Any, p: Any, x: Any) -> Any:
    variance = xp.var(x, axis=-1, keepdims=True)
    normed = (x - xp.mean(x, axis=-1, keepdims=True)) / xp.sqrt(variance + 1e-3)
    return normed * p["weight"] + p["bias"]


def gates(xp: Any, p: Any, h: Any, x: Any, count: int) -> Any:
    from_input = x @ p["input_weight"] + p["input_bias"]
    from_state = h @ p["state_weight"] + p["state_bias"]
    return xp.split(from_input, count, axis=-1), xp.split(from_state, count, axis=-1)


def gru(xp: Any, p: Any, h: Any, x: Any) -> Any:
    (a_r, a_z, a_n), (b_r, b_z, b_n) = gates(xp, p, h, x, 3)
    r, z = sigmoid(xp, a_r + b_r), sigmoid(xp, a_z + b_z)
    return (1.0 - z) * xp.tanh(a_n + r * b_n) + z * h


def lstm(xp: Any, p: Any, state: Any, x: Any) -> Any:
    h, c = state
    i, f, g, o = (a + b for a, b in zip(*gates(xp, p, h, x, 4), strict=True))
    c = sigmoid(xp, f) * c + sigmoid(xp, i) * xp.tanh(g)
    return sigmoid(xp, o) * xp.tanh(c), c


def attention(
    xp: Any, p: Any, query: Any, key: Any = None, value: Any = None, mask: Any = None
) -> Any:
    """Two heads, one after the other."""
    key = query if key is None else key
    value = key if value is None else value
    parts: Any = {
        name: linear(xp, {k: p[f"{name}.{k}"] for k in ("weight", "bias")}, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    heads = []
    half = parts["query"].shape[-1] // 2
    for head in (slice(None, half), slice(half, None)):
        q, k, v = (parts[name][..., head] for name in ("query", "key", "value"))
        scores = xp.exp(xp.einsum("...nd,...md->...nm", q, k) / half**0.5)
        scores = scores if mask is None else scores * mask
        heads.append(scores / xp.sum(scores, axis=-1, keepdims=True) @ v)
    joined = xp.concatenate(heads, axis=-1)
    return linear(xp, {k: p[f"out.{k}"] for k in ("weight", "bias")}, joined)


class Case(NamedTuple):
    module: nn.Module
    reference: Callable[..., Any]
    args: tuple[Any, ...]


ANY: Final[Any] = "3"
DTYPE: Final[dict[str, Any]] = {"dtype": "float64"}
ATTENTION: Final = nn.MultiheadAttention.init(KEY, 8, 2, **DTYPE)
CASES: Final = {
    "linear": Case(nn.Linear.init(KEY, 3, 4, **DTYPE), linear, (drawn(2, 5, 3),)),
    "no bias": Case(
        nn.Linear.init(KEY, 3, 4, bias=False, **DTYPE), linear, (drawn(3),)
    ),
    "embedding": Case(nn.Embedding.init(KEY, 5, 3, **DTYPE), embedding, (IDS,)),
    "layer norm": Case(
        dataclasses.replace(
            nn.LayerNorm.init(6, epsilon=1e-3, **DTYPE), weight=hf.asarray(drawn(6))
        ),
        layer_norm,
        (drawn(2, 6),),
    ),
    "gru": Case(nn.GRUCell.init(KEY, 3, 4, **DTYPE), gru, (drawn(2, 4), drawn(2, 3))),
    "lstm": Case(
        nn.LSTMCell.init(KEY, 3, 4, **DTYPE),
        lstm,
        ((drawn(2, 4), drawn(2, 4)), drawn(2, 3)),
    ),
    "attention": Case(ATTENTION, attention, (drawn(2, 5, 8),)),
    "cross attention": Case(
        ATTENTION, attention, (drawn(5, 8), drawn(3, 8), drawn(3, 8))
    ),
    "masked attention": Case(
        ATTENTION, attention, (drawn(3, 2, 5, 8), None, None, MASK)
    ),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def close(found: Any, expected: Any) -> None:
    for a, b in zip(pytree.flatten(found)[0], pytree.flatten(expected)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-12)


def arrays(module: nn.Module) -> dict[str, Any]:
    return {k: np.asarray(v) for k, v in module.named_parameters().items()}


def test_a_layer_computes_its_formula(case: Case) -> None:
    module, reference, args = case
    args = pytree.tree_map(hf.asarray, args)
    expected = reference(np, arrays(module), *case.args)
    close(module(*args), expected)
    close(hf.jit(lambda m, a: m(*a))(module, args), expected)


def total(result: Any) -> Any:
    """A number that each element of a result counts in, by another factor."""
    parts = [result] if hasattr(result, "shape") else list(result)
    return sum((x * x * 0.5 + x * (k + 1.0)).sum() for k, x in enumerate(parts))


def test_gradients_of_a_layer_are_those_of_jax(case: Case) -> None:
    jax = pytest.importorskip("jax")
    module, reference, args = case
    args = pytree.tree_map(hf.asarray, args)
    with jax.enable_x64(True):
        expected = jax.jit(
            jax.grad(lambda p: total(reference(jax.numpy, p, *case.args)))
        )(arrays(module))
    found = hf.jit(hf.grad(lambda m, a: total(m(*a))))(module, args)
    assert type(found) is type(module)
    assert arrays(found).keys() == expected.keys()
    for name, gradient in arrays(found).items():
        np.testing.assert_allclose(
            gradient, expected[name], rtol=1e-8, atol=1e-10, err_msg=name
        )


class Everything(Tracer):
    """Traces into every layer."""

    def is_leaf_module(self, module: Any, path: str) -> bool:
        return False


@pytest.mark.parametrize("tracer", [Tracer, Everything])
def test_a_layer_is_traced_as_a_node_or_into(case: Case, tracer: type[Tracer]) -> None:
    module, _, args = case
    args = pytree.tree_map(hf.asarray, args)
    places = range(len(args))
    calls: dict[int, Callable[..., Any]] = {
        1: lambda x: module(x),
        2: lambda x, y: module(x, y),
        3: lambda x, y, z: module(x, y, z),
        4: lambda x, y, z, w: module(x, y, z, w),
    }
    call = calls[len(args)]
    names = dict(zip("xyzw", args, strict=False))
    none = {name: None for name, arg in names.items() if arg is None}
    if isinstance(args[0], tuple):  # two names, which a proxy is unpacked into
        call = lambda x, y: module((x[0], x[1]), y)  # noqa: E731
    traced = tracer().trace(call, none)
    kinds = [node.kind for node in traced.graph.nodes]
    assert ("call_module" in kinds) is (tracer is Tracer)
    close(traced(*[args[i] for i in places if args[i] is not None]), module(*args))


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_a_cell_is_trained_through_scan_and_jit(cell: Any) -> None:
    """To tell the sum of what it has seen so far."""

    class Network(nn.Module):
        cell: Any
        out: nn.Linear

        def forward(self, xs: Any) -> Any:
            zeros = hf.zeros((xs.shape[1], 8))
            start = (zeros, zeros) if isinstance(self.cell, nn.LSTMCell) else zeros

            def step(state: Any, x: Any) -> Any:
                state = self.cell(state, x)
                return state, state[0] if isinstance(state, tuple) else state

            return self.out(hf.scan(step, start, xs)[1])

    first, second = hf.random.split(KEY)
    network = Network(cell.init(first, 1, 8), nn.Linear.init(second, 8, 1))
    xs = hf.asarray(RNG.uniform(-0.3, 0.3, (6, 16, 1)).astype(np.float32))
    wanted = hf.cumulative_sum(xs, axis=0)

    @hf.jit
    def step(network: Network) -> tuple[Any, Network]:
        def loss(network: Network) -> Any:
            return hf.mean((network(xs) - wanted) ** 2)

        value, gradient = hf.value_and_grad(loss)(network)
        return value, pytree.tree_map(lambda p, g: p - 0.2 * g, network, gradient)

    losses = []
    for _ in range(400):
        value, network = step(network)
        losses.append(value.item())
    assert losses[-1] < 0.4 * losses[0]


def test_a_classifier_of_tokens_is_trained() -> None:
    class Classifier(nn.Module):
        table: nn.Embedding
        attention: nn.MultiheadAttention
        norm: nn.LayerNorm
        head: nn.Sequential

        def forward(self, ids: Any) -> Any:
            x = self.table(ids)
            x = self.norm(x + self.attention(x))
            return self.head(hf.mean(x, axis=-2))[..., 0]

    keys = list(hf.random.split(KEY, 4))
    model = Classifier(
        nn.Embedding.init(keys[0], 4, 8),
        nn.MultiheadAttention.init(keys[1], 8, 2),
        nn.LayerNorm.init(8),
        nn.Sequential(
            nn.Linear.init(keys[2], 8, 8), hf.tanh, nn.Linear.init(keys[3], 8, 1)
        ),
    )
    ids = RNG.integers(0, 4, (32, 6))
    labels = hf.asarray((ids == 3).any(axis=1).astype(np.float32))

    @hf.jit
    def step(model: Classifier, ids: Any) -> tuple[Any, Classifier]:
        def loss(model: Classifier) -> Any:
            x = model(ids)
            return hf.mean(hf.logaddexp(0.0, x) - labels * x)

        value, gradient = hf.value_and_grad(loss)(model)
        return value, pytree.tree_map(lambda p, g: p - 0.5 * g, model, gradient)

    losses = []
    for _ in range(60):
        value, model = step(model, hf.asarray(ids))
        losses.append(value.item())
    assert losses[-1] < 0.2 < losses[0]


# --- modules --------------------------------------------------------------------------


class Network(nn.Module):
    parts: list[Any]
    named: dict[str, Any]
    scale: Any = None
    depth: int = nn.static(default=2)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        for _ in range(self.depth):
            x = self.named["last"](x)
        return x


def network() -> Network:
    first, second = hf.random.split(KEY)
    return Network(
        [nn.Sequential(nn.Linear.init(first, 2, 3), hf.sin)],
        {"last": nn.Linear.init(second, 3, 3, bias=False)},
    )


def test_parameters_and_modules_have_paths() -> None:
    model = network()
    assert list(model.named_parameters()) == [
        "parts.0.layers.0.weight",
        "parts.0.layers.0.bias",
        "named.last.weight",
    ]
    assert list(model.named_modules()) == [
        "parts.0",
        "parts.0.layers.0",
        "parts.0.layers.1",
        "named.last",
    ]
    assert pytree.leaf_paths(pytree.structure(model), "m") == [
        "m.parts[0].layers[0].weight",
        "m.parts[0].layers[0].bias",
        "m.named['last'].weight",
    ]
    assert repr(model.named["last"]) == "Linear(weight=f32[3, 3], bias=None)"


@pytest.mark.parametrize(
    "transform",
    [
        hf.jit,
        hf.subgraph,
        lambda f: lambda m: hf.cond(m.w[0] > 0, f, lambda m: -f(m), m),
    ],
)
def test_static_numbers_are_told_apart_by_their_class(transform: Any) -> None:
    class Scaled(nn.Module):
        w: Any
        scale: Any = nn.static()

    f = transform(lambda m: m.w * m.scale)
    w = hf.asarray([1, 2])
    found = [f(Scaled(w, scale)).dtype for scale in (1, 1.0, True)]
    assert found == [hf.int64, hf.float32, hf.int64]


def test_what_is_static_is_structure() -> None:
    model = network()
    other = dataclasses.replace(model, depth=3)
    assert pytree.structure(other) != pytree.structure(model)
    run = hf.jit(lambda model, x: model(x))
    traces = hf.stats().traces
    for each in (model, other, model):
        expected = np.asarray(each(hf.ones(2)))
        np.testing.assert_allclose(np.asarray(run(each, hf.ones(2))), expected, 1e-5)
    assert hf.stats().traces == traces + 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.depth = 3  # type: ignore[misc]


def test_a_captured_graph_knows_the_modules() -> None:
    model = network()
    captured = hf.trace(lambda m, x: m(x), model, hf.ones((1, 2))).graph
    layers = "network.parts.0:Sequential.layers"
    assert [(n.op.name, n.module_path) for n in captured.nodes] == [
        ("matmul", f"{layers}.0:Linear"),
        ("add", f"{layers}.0:Linear"),
        ("sin", f"{layers}.1:Function"),
        ("matmul", "network.named.last:Linear"),
        ("matmul", "network.named.last:Linear"),
    ]
    symbolic = hf.symbolic_trace(model)
    assert [n.target for n in symbolic.graph.find_nodes("call_module")] == [
        *("parts.0.layers.0", "named.last", "named.last"),
    ]
    propagated = symbolic.propagate(hf.ones((1, 2))).graph
    assert [n.op.name for n in propagated.nodes if n.op] == [
        n.op.name for n in captured.nodes
    ]
    inside = hf.symbolic_trace(lambda x: model(x))
    assert list(inside.attributes) == [
        "network.parts.0.layers.0",
        "network.named.last",
    ]


def test_a_module_is_differentiated_where_it_is_traced() -> None:
    model = network()
    symbolic = hf.symbolic_trace(model)
    x = hf.ones(2)
    wanted = hf.grad(lambda m: hf.sum(m(x)))(model)
    found = hf.grad(lambda m: hf.sum(m(x)))(symbolic)
    close(found.attributes["named.last"].weight, wanted.named["last"].weight)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.Linear.init(KEY, 0, 3), ArgumentValueError, "`inputs` must be at"),
        (
            lambda: nn.GRUCell.init(KEY, 2, -1),
            ArgumentValueError,
            "GRUCell.init: `size`",
        ),
        (
            lambda: nn.LSTMCell.init(KEY, 2, ANY),
            ArgumentTypeError,
            "LSTMCell.init: `si",
        ),
        (
            lambda: nn.MultiheadAttention.init(KEY, 6, 4),
            ArgumentValueError,
            "4 does not",
        ),
        (
            lambda: nn.LayerNorm.init(3, epsilon=-1),
            ArgumentValueError,
            "`epsilon` must",
        ),
        (
            lambda: nn.Sequential(hf.sin, 3),
            ArgumentTypeError,
            "layer 1 must be a module",
        ),
    ],
)
def test_a_layer_that_makes_no_sense_is_refused(
    make: Any, error: type[HopflowError], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_module_says_that_it_defines_no_forward() -> None:
    class Empty(nn.Module):
        pass

    with pytest.raises(NotImplementedError, match="`Empty` defines no `forward`"):
        Empty()()


# --- shared parameters ----------------------------------------------------------------


class Tied(nn.Module):
    table: nn.Embedding
    layers: list[Any]

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Apart(Tied):
    """The same with tensors of its own for each use."""


def tied(cls: type[Tied]) -> Tied:
    def table() -> Any:
        return hf.asarray([[1.0, 2.0], [3.0, 4.0]])

    w = table()
    again = w if cls is Tied else table()
    return cls(nn.Embedding(w), [nn.Linear(again, None), nn.Linear(hf.eye(2), None)])


def loss_of(model: Any) -> Any:
    return hf.sum(model(hf.asarray([0, 1, 1])) ** 2)


@pytest.mark.parametrize("run", [lambda f: f, hf.jit, hf.symbolic_trace])
def test_a_shared_parameter_is_one_leaf_whose_gradients_add_up(run: Any) -> None:
    model, apart = tied(Tied), tied(Apart)
    names = ["table.weight", "layers.1.weight"]
    assert list(model.named_parameters()) == names
    leaves, spec = pytree.flatten(model)
    assert len(leaves) == 2
    assert pytree.leaf_paths(spec, "m") == ["m.table.weight", "m.layers[1].weight"]
    gradient, parts = run(hf.grad(loss_of))(model), hf.grad(loss_of)(apart)
    expected = parts.table.weight + parts.layers[0].weight
    np.testing.assert_array_equal(gradient.table.weight, expected)
    assert gradient.layers[0].weight is gradient.table.weight
    assert list(gradient.named_parameters()) == names
    new = pytree.tree_map(lambda p, g: p - 0.1 * g, model, gradient)
    assert new.layers[0].weight is new.table.weight
    traced = hf.symbolic_trace(model)  # whose leaf modules share it
    assert len(pytree.flatten(traced)[0]) == 2
    both = run(hf.grad(loss_of))(traced)
    np.testing.assert_array_equal(both.attributes["table"].weight, expected)


def test_a_method_of_a_module_knows_the_paths_in_it() -> None:
    traced = hf.symbolic_trace(tied(Apart).forward)
    assert list(traced.attributes) == ["table", "layers.0", "layers.1"]


def test_what_happens_to_be_the_same_in_a_tree_is_not_shared() -> None:
    model, zero = tied(Tied), hf.zeros(())
    zeros = pytree.tree_map(lambda _: zero, model)
    assert pytree.structure(zeros) == pytree.structure(model)
    apart = pytree.tree_map(lambda _: zero, tied(Apart))
    assert pytree.structure(apart) == pytree.structure(tied(Apart))
    pairs = pytree.tree_map(lambda p: (p, zero), model)
    found = pytree.tree_map(lambda p, pair: p + pair[1], model, pairs)
    np.testing.assert_array_equal(found.table.weight, model.table.weight)
    model.layers[0] = model.layers[1]  # of what is shared now, nothing was at first
    assert len(pytree.flatten(model)[0]) == 3
    other = dataclasses.replace(tied(Tied), table=nn.Embedding(hf.ones((2, 2))))
    assert len(pytree.flatten(other)[0]) == 3


@pytest.mark.parametrize(
    ("layer", "args", "name"),
    [
        (nn.Linear, (4, 2), "weight"),
        (nn.Linear, (hf.ones((4, 2)), 2), "bias"),
        (nn.Linear, ([[1.0]],), "weight"),
        (nn.Embedding, (10,), "weight"),
        (nn.LayerNorm, (hf.ones(4), 1e-5), "bias"),
        (nn.GRUCell, (4, 8, 1, 1), "input_weight"),
        (nn.LSTMCell, (4, 8, 1, 1), "input_weight"),
        (nn.MultiheadAttention, (64, 64, 64, 64, 8), "query"),
    ],
)
def test_a_size_is_no_parameter(layer: Any, args: Any, name: str) -> None:
    message = rf"{layer.__name__}: `{name}` must be a tensor .*\.init\(key"
    with pytest.raises(ArgumentTypeError, match=message):
        layer(*args)


def test_wrong_arguments_are_a_type_error_of_the_caller() -> None:
    layer, x = hf.nn.Linear.init(hf.random.key(0), 3, 2), hf.ones(3)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3"):
        layer(x, x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        layer()
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3"):
        hf.jit(lambda x: layer(x, x))(x)
    graph = hf.symbolic_trace(lambda x: x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        graph()
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        graph(q=x)
