"""What a jitted function does to containers of its arguments is done at each call."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree


class State:
    """A pytree that can be changed."""

    def __init__(self, w: Any) -> None:
        self.w = w


pytree.register(
    State,
    lambda s: ([s.w], None, ["w"]),
    lambda _, children: State(next(iter(children))),
    by_name=True,
)


def append(x: Any, items: Any) -> Any:
    items.append(2 * x)
    return items[0]


def pop(_: Any, items: Any) -> Any:
    return items.pop()


def rearrange(x: Any, items: Any) -> Any:
    items[0], items[1] = items[1], items[0]
    items.insert(1, x + 1)
    del items[-1]
    items.append({"x": x, "n": 3, "both": (x, None)})
    return x


def numbers(x: Any, items: Any) -> Any:
    items[:] = [1, 2.5, "text", None, True, x.shape[0], x.shape[0] * 2]
    return x


def in_a_dict(x: Any, d: Any) -> Any:
    d["y"] = 3 * x
    del d["b"]
    d["a"] = d["a"] + d.pop("c")
    d["k"] = x.shape[0] + 1
    return d["y"]


def within(x: Any, tree: Any) -> Any:
    tree["rows"][0].append(x)
    tree["rows"].append(tree["rows"][0])
    tree["state"] = tree["rows"]
    return x


def attribute(x: Any, states: Any) -> Any:
    states[0].w = states[0].w * 2 + x
    states[0].count = 7
    return states[0].w


def nothing(x: Any, d: Any) -> Any:
    d["a"] = d["a"]
    return x


X: Final = np.array([1.0, 2.0])
CASES: Final[dict[str, tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "append": (append, lambda: [hf.asarray(X)]),
    "pop": (pop, lambda: [hf.asarray(X), hf.asarray(X + 1), 5]),
    "rearrange": (rearrange, lambda: [hf.asarray(X), hf.asarray(2 * X), 4.0]),
    "numbers": (numbers, list),
    "a deque": (append, lambda: deque([hf.asarray(X)])),
    "a dict": (in_a_dict, lambda: {"b": 1, "a": hf.asarray(X), "c": 2.0}),
    "an ordered dict": (
        in_a_dict,
        lambda: OrderedDict(b=1, a=hf.asarray(X), c=2.0),
    ),
    "a default dict": (
        in_a_dict,
        lambda: defaultdict(list, {"b": 1, "a": hf.asarray(X), "c": 2.0}),
    ),
    "within": (within, lambda: {"rows": [[hf.asarray(X)], []], "n": 1}),
    "attribute": (attribute, lambda: [State(hf.asarray(X))]),
    "nothing": (nothing, lambda: {"a": hf.asarray(X)}),
}
MODES: Final[dict[str, Callable[..., Any]]] = {
    "jit": hf.jit,
    "dynamic": lambda f: hf.jit(f, dynamic=True),
    "interpreter": lambda f: hf.jit(f, backend="interpreter"),
    "in jit": lambda f: hf.jit(lambda x, c: hf.jit(f)(x, c)),
}


def shown(tree: Any) -> Any:
    """A tree as lists and numbers, with the classes of containers."""
    if isinstance(tree, hf.Tensor):
        return str(tree.dtype), tree.tolist()
    if isinstance(tree, State):
        return {name: shown(value) for name, value in vars(tree).items()}
    if isinstance(tree, dict):
        return type(tree), {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple | deque):
        return type(tree), [shown(value) for value in tree]
    return type(tree), tree


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_containers_change_as_in_plain_python(name: str, mode: str) -> None:
    f, make = CASES[name]
    run = MODES[mode](f)
    for scale in (1.0, 3.0):  # traced, and run again
        x = hf.asarray(scale * X)
        mine, wanted = make(), make()
        with hf.debug():
            result = f(x, wanted)
        assert shown(run(x, mine)) == shown(result)
        assert shown(mine) == shown(wanted)


def test_what_stays_is_the_same_object() -> None:
    a, b, inner = hf.ones(2), hf.zeros(2), [hf.ones(1)]

    @hf.jit
    def f(items: Any) -> None:
        items.reverse()
        items.append(items[1])
        items.pop(0)

    items = [a, inner, b]
    f(items)
    assert items[0] is inner
    assert items[1] is a
    assert items[2] is inner


def test_a_queue_is_emptied_call_by_call() -> None:
    pop_one = hf.jit(lambda items: items.pop() * 2)
    items = [hf.full((), float(k)) for k in range(4)]
    assert [float(pop_one(items)) for _ in range(4)] == [6.0, 4.0, 2.0, 0.0]
    assert items == []


def test_a_call_that_fails_changes_nothing() -> None:
    @hf.jit
    def f(items: Any, n: Any) -> Any:
        items.clear()
        hf.check(n > 0, "n is positive")
        return n

    items = [hf.ones(2)]
    with pytest.raises(hf.errors.CheckError, match="n is positive"):
        f(items, hf.asarray(0))
    assert len(items) == 1
    f(items, hf.asarray(1))
    assert items == []


def test_containers_change_beside_writes_and_donations() -> None:
    def f(x: Any, d: Any) -> Any:
        x += 1.0
        d["x"] += 2.0
        d["sum"] = x + d["x"]
        return x * 1.0

    x, d = hf.zeros(2), {"x": hf.ones(2)}
    inside = d["x"]
    hf.jit(f)(x, d)
    assert d["x"] is inside
    assert (x.tolist(), inside.tolist(), d["sum"].tolist()) == ([1, 1], [3, 3], [4, 4])
    donated: dict[str, Any] = {"x": hf.ones(2)}
    hf.jit(lambda x, d: f(x.copy(), d), donate=(0,))(hf.zeros(2), donated)
    assert donated["sum"].tolist() == [4, 4]


@pytest.mark.parametrize("first", ["apart", "shared"])
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(
    ("change", "make"),
    [
        (lambda p: p.update(w=p["w"] * 2), lambda x: {"w": x}),
        (lambda p: p.append(p[0] * 2), lambda x: [x]),
        (lambda p: setattr(p, "w", p.w * 2), State),
    ],
    ids=["dict", "list", "object"],
)
def test_a_container_that_is_changed_is_passed_once(
    change: Any, make: Any, inline: bool, first: str
) -> None:
    @hf.jit
    def f(tree: Any, x: Any) -> Any:
        x += 1.0
        change(tree[0])
        return tree[1]

    x = hf.ones(2)
    call = hf.jit(f) if inline else f
    if first == "apart":
        call((make(hf.ones(2)), make(hf.ones(2))), x)
    shared = make(hf.ones(2))
    before = pytree.flatten(shared)[0]
    seen = x.tolist()
    with pytest.raises(hf.errors.ImpurityError, match="at 2 places"):
        call((shared, shared), x)
    assert all(a is b for a, b in zip(pytree.flatten(shared)[0], before, strict=True))
    assert x.tolist() == seen
    # What is only read may be passed twice.
    assert (
        hf.jit(lambda p, q: hf.sum(pytree.flatten((p, q))[0][0]))(shared, shared) == 2
    )


# --- calls that are looked up by the kinds of their leaves ----------------------------


def _named(c: Any) -> Any:
    return {"b": c["b"] - c["a"][0], "a": (c["a"][1] * c["n"], c["a"][0])}


@pytest.mark.parametrize("array", [hf.asarray, np.asarray], ids=["tensor", "NumPy"])
@pytest.mark.parametrize("order", ["abn", "ban", "nba"])
def test_repeated_calls_take_the_items_of_a_dict_by_name(
    array: Any, order: str
) -> None:
    jitted = hf.jit(_named)
    for k in range(4):
        parts = {
            "a": [array(np.full(2, k + 1.0)), array(np.full(2, k + 2.0))],
            "b": array(np.full(2, 10.0 * k)),
            "n": k,
        }
        got = jitted({name: parts[name] for name in order})
        np.testing.assert_array_equal(np.asarray(got["b"]), np.full(2, 9.0 * k - 1))
        np.testing.assert_array_equal(
            np.asarray(got["a"][0]), np.full(2, k * (k + 2.0))
        )
        np.testing.assert_array_equal(np.asarray(got["a"][1]), np.full(2, k + 1.0))


def test_repeated_calls_tell_containers_apart() -> None:
    jitted = hf.jit(lambda *trees: [hf.asarray(x) + 1.0 for x in leaves_of(trees)])
    x, y, z = (hf.asarray(np.full(3, v)) for v in (1.0, 2.0, 3.0))
    calls: list[Any] = [
        (x, y, z),
        ((x, y), z),
        ((x,), (y, z)),
        ([x, y], z),
        ({"p": x, "q": y}, z),
        ({"q": x, "p": y}, z),
        ({"q": x, "p": (y, z)},),
        ({"q": (x,), "p": [y, {"z": z}]},),
        ([], x, (), y, {}, z),
        (None, x, y, z),
    ]
    for _ in range(3):
        for args in calls:
            got = [float(v[0]) - 1.0 for v in jitted(*args)]
            assert got == [float(v[0]) for v in leaves_of(args)]


def leaves_of(tree: Any) -> list[Any]:
    """The leaves in the order in which the containers hold them."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in leaves_of(part)]
    return [] if tree is None else [tree]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0),
        np.arange(12.0)[::2],
        np.arange(6.0)[::-1],
        np.arange(6.0).astype(">f8"),
        np.frombuffer(np.arange(6.0).tobytes()),  # read-only
        np.frombuffer(b" " + np.arange(6.0).tobytes(), offset=1),  # not aligned
        np.arange(6).astype(np.int8),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0)[3],
        np.zeros((0, 3)),
    ],
    ids=str,
)
def test_arrays_of_all_layouts_are_arguments_of_repeated_calls(array: Any) -> None:
    jitted = hf.jit(lambda x, y: x * 2 + y)
    for k in range(3):
        got = jitted(array, hf.asarray(float(k), dtype="float64"))
        np.testing.assert_array_equal(np.asarray(got), array * 2 + float(k))


def test_an_argument_that_changes_its_kind_is_another_call() -> None:
    jitted = hf.jit(lambda c: c["x"] * 2)
    for value in (hf.ones(2), np.ones(2), 3, 2.5, True, hf.ones(3), np.float32(2), 4):
        for _ in range(2):
            want = np.asarray(value) * 2
            np.testing.assert_array_equal(np.asarray(jitted({"x": value})), want)


def test_a_written_array_of_a_dict_is_written_in_repeated_calls() -> None:
    def fill(c: Any) -> Any:
        c["x"][0] = 7.0
        return hf.sum(c["x"])

    jitted = hf.jit(fill)
    for _ in range(3):
        x = np.zeros(3)
        assert float(jitted({"x": x})) == 7.0
        np.testing.assert_array_equal(x, [7.0, 0.0, 0.0])
