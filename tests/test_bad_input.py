"""Every public function, given a wrong argument, raises an error of ours.

`CALLS` has a good call of each public callable. Each argument in turn is replaced by
each of `bad_values`: the call works, or raises a `HopflowError` that is the user's (a
defect of the compiler is not), and never anything else.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.errors import CompileError, GraphError, HopflowError, LoopIRError
from hopflow.ops.opdef import OpDef
from hopflow.tensor import EagerTensor

pytestmark = pytest.mark.slow


class Good(NamedTuple):
    """Arguments that a public callable takes: all of them, so that each can be spoilt.

    Tensors are made anew for each call by `fresh`.
    """

    args: tuple[Any, ...]
    options: dict[str, Any]


def _good(*args: Any, **options: Any) -> Good:
    return Good(args, options)


class _Make(NamedTuple):
    """A tensor of a dtype and shape: positive numbers, well apart."""

    dtype: str
    shape: tuple[int, ...]

    def __call__(self) -> hf.Tensor:
        count = int(np.prod(self.shape))
        values = (np.arange(count) * 7 % 5 + 1).reshape(self.shape)
        return hf.asarray(values.astype(self.dtype))


class _Matrix(NamedTuple):
    """A symmetric positive definite matrix f64[n, n]."""

    n: int

    def __call__(self) -> hf.Tensor:
        return hf.asarray(np.eye(self.n) * self.n + np.ones((self.n, self.n)))


class _Order(NamedTuple):
    """The numbers below n: i64[n]."""

    n: int

    def __call__(self) -> hf.Tensor:
        return hf.asarray(np.arange(self.n))


class _Key(NamedTuple):
    """A random key."""

    seed: int

    def __call__(self) -> Any:
        return hf.random.key(self.seed)


def fresh(tree: Any) -> Any:
    """`tree` with tensors for the descriptions of tensors in it."""
    if isinstance(tree, _Make | _Matrix | _Order | _Key | _Traced | _Captured):
        return tree()
    if type(tree) in (list, tuple):
        return type(tree)(map(fresh, tree))
    if type(tree) is dict:
        return {k: fresh(v) for k, v in tree.items()}
    return tree


class _Traced(NamedTuple):
    """A module that `symbolic_trace` made."""

    def __call__(self) -> Any:
        return hf.symbolic_trace(_grow)


class _Captured(NamedTuple):
    """A graph that `trace` made."""

    def __call__(self) -> Any:
        return hf.trace(_grow, hf.ones(3)).graph


KEY: Final = _Key(0)
X: Final = _Make("float32", (3, 4))
V: Final = _Make("float32", (4,))
SIGNAL: Final = _Make("float32", (2, 2, 4))
ROWS: Final = _Make("float32", (2, 3, 4))
INTS: Final = _Make("int64", (3, 4))
IDS: Final = _Make("int64", (4,))
HEADS: Final = _Make("float32", (1, 2, 4, 3))
BOOLS: Final = _Make("bool", (3, 4))
SCALAR: Final = _Make("float32", ())
COUNT: Final = _Make("int32", ())
TRUTH: Final = _Make("bool", ())
SQUARE: Final = _Matrix(3)


def _same(*xs: Any) -> Any:
    return xs if len(xs) > 1 else xs[0]


# With functions, where an operator of Python's would refuse an operand by itself.
def _step(c: Any, x: Any) -> Any:
    return hf.add(c, x), c


def _small(c: Any) -> Any:
    return hf.less(c, 3.0)


def _grow(c: Any) -> Any:
    return hf.add(c, 1.0)


def _count(_: Any, c: Any) -> Any:
    return hf.add(c, 1.0)


def _scored(score: Any, *_: Any) -> Any:
    return hf.multiply(score, 2.0)


def _kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return hf.greater_equal(q, kv)


def _until(c: Any) -> Any:
    return hf.all(hf.greater(c, 100.0))


_COMPOSED: Final = (
    "digamma matrix_transpose positive ravel reciprocal rsqrt square nonzero "
    "unique_all unique_counts unique_inverse unique_values"
).split()
_COMPOSED_OF_TWO: Final = "floor_divide logaddexp pow remainder".split()


def _operations() -> dict[str, Good]:
    """A good call of each public function that is an elementwise operation itself."""
    calls = {}
    for name in hf.__all__:
        op = getattr(hf, name)
        if isinstance(op, OpDef) and op.reference is not None:
            sample = op.samples[0]
            of_floats = dtypes.float32 in sample.dtypes
            operands = (X, V) if of_floats else (INTS, IDS)
            calls[name] = _good(*operands[: len(sample.operands)])
    return calls


_LIKE: Final = _good(X, dtype="float32", device="cpu")
_REDUCTION: Final = _good(X, axis=0, keepdims=True)
_RANDOM: Final = _good(KEY, (2, 3), "float32")

CALLS: Final[dict[str, Good]] = {
    **_operations(),
    **dict.fromkeys(_COMPOSED, _good(X)),
    **dict.fromkeys(_COMPOSED_OF_TWO, _good(X, V)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _good(BOOLS, TRUTH)),
    **dict.fromkeys("all any argmax argmin".split(), _REDUCTION),
    **dict.fromkeys("count_nonzero logsumexp max mean min".split(), _REDUCTION),
    **dict.fromkeys(("std", "var"), _good(X, axis=0, correction=1.0, keepdims=True)),
    **dict.fromkeys(("sum", "prod"), _good(X, axis=0, dtype="float32", keepdims=True)),
    **dict.fromkeys(("cummax", "cummin"), _good(X, axis=0)),
    **dict.fromkeys(
        ("cumulative_sum", "cumulative_prod"),
        _good(X, axis=0, dtype="float32", include_initial=True),
    ),
    **dict.fromkeys(
        ("sort", "argsort"), _good(X, axis=0, descending=True, stable=True)
    ),
    **dict.fromkeys(("empty_like", "ones_like", "zeros_like"), _LIKE),
    **dict.fromkeys(
        ("empty", "ones", "zeros"), _good((2, 3), dtype="float32", device="cpu")
    ),
    **dict.fromkeys(("tril", "triu"), _good(X, k=1)),
    "Checkpoint": _good(3),
    "arange": _good(0, 10, 2, dtype="int64", device="cpu"),
    "asarray": _good([1.0, 2.0], dtype="float32", device="cpu", copy=True),
    "associative_scan": _good(hf.add, X, dim=0, reverse=True),
    "astype": _good(X, "float64", copy=True, device="cpu"),
    "broadcast_arrays": _good(X, V),
    "broadcast_to": _good(V, (3, 4)),
    "can_cast": _good("int8", "int16"),
    "Dim": _good("n", min=1),
    "callback": _good(_same, X, X),
    "check": _good(TRUTH, "must hold"),
    "check_is_size": _good(3, max=5),
    "clip": _good(X, 1.0, 2.0),
    "conj": _good(X),
    "concat": _good([X, X], axis=0),
    "schema": _good(hf.cond, TRUTH, _grow, _same, (X,)),
    "cond": _good(TRUTH, _grow, _same, (X,)),
    "BlockMask": _good(_Make("int8", (1, 1, 2, 2)), _kept, (2, 2), (4, 4)),
    "create_block_mask": _good(_kept, 1, 2, Q_LEN=4, KV_LEN=4, BLOCK_SIZE=2),
    "diff": _good(X, axis=0, n=1, prepend=_Make("float32", (1, 4)), append=X),
    "dynamic_slice": _good(X, (0, COUNT), (1, 2)),
    "dynamic_update_slice": _good(X, _Make("float32", (1, 2)), (0, COUNT)),
    "expand_dims": _good(X, axis=0),
    "export": _good(_grow, (X,), {}, dynamic_shapes=None, derivatives=0, strict=False),
    "eye": _good(2, 3, k=1, dtype="float32", device="cpu"),
    "finfo": _good("float32"),
    "flip": _good(X, axis=0),
    "fori_loop": _good(0, 3, _count, X),
    "from_dlpack": _good(np.arange(3.0), device="cpu", copy=True),
    "from_numpy": _good(np.arange(3.0)),
    "full": _good((2, 3), 1.5, dtype="float32", device="cpu"),
    "full_like": _good(X, 1.5, dtype="float32", device="cpu"),
    "iinfo": _good("int32"),
    "interrupt": _good(1),
    "invoke_subgraph": _good(_same, X),
    "imag": _good(X),
    "isclose": _good(X, V, rtol=1e-5, atol=1e-8, equal_nan=True),
    "isdtype": _good("float32", "numeric"),
    "jit": _good(_same, donate=(0,), backend="interpreter"),
    "functionalize": _good(_same),
    "jvp": _good(_same, (X,), (X,), has_aux=False),
    "linearize": _good(_same, X),
    "vjp": _good(_same, X, has_aux=False),
    "stop_gradient": _good(X),
    "flex_attention": _good(
        *(HEADS, HEADS, HEADS),
        score_mod=_scored,
        mask_mod=_kept,
        block_mask=None,
        scale=1.0,
        enable_gqa=False,
        return_lse=True,
    ),
    "checkpoint": _good(_same, policy="dots"),
    "control_flow": _good(_same),
    **dict.fromkeys(("conv", "conv_transpose"), _good(SIGNAL, SIGNAL, stride=2)),
    **dict.fromkeys(("custom_jvp", "custom_vjp"), _good(_same, nondiff_argnums=(0,))),
    **dict.fromkeys(("grad", "value_and_grad"), _good(_same, 0, has_aux=False)),
    **dict.fromkeys(("jacfwd", "jacrev", "hessian"), _good(_same, 0)),
    "vmap": _good(_same, in_dims=0, out_dims=0),
    "linspace": _good(0.0, 1.0, 5, dtype="float32", device="cpu", endpoint=False),
    "logical_not": _good(BOOLS),
    "map": _good(_same, X, V, dim=0, batch_size=2),
    "mark_dynamic": _good(_Make("float32", (3, 4)), 0, min=1, max=9, may_narrow=True),
    "mark_unbacked": _good(_Make("float32", (3, 4)), -1, min=1, max=9),
    "matmul": _good(X, V),
    "meshgrid": _good(V, V, indexing="ij"),
    "moveaxis": _good(X, 0, 1),
    "nan_to_num": _good(X, nan=0.0, posinf=1.0, neginf=-1.0),
    "one_hot": _good(IDS, 6, dtype="float32", axis=-1),
    "outer": _good(V, V),
    "pad": _good(X, ((0, 1), (2, 0)), "constant", constant_values=1.0),
    "permute_dims": _good(X, (1, 0)),
    "real": _good(X),
    "repeat": _good(X, 2, axis=0),
    "reshape": _good(X, (4, 3), copy=True),
    "result_type": _good(X, "float64", 1.0),
    "roll": _good(X, 1, axis=0),
    "scan": _good(_step, V, X, length=3, dim=0, reverse=True, unroll=2, until=_until),
    "searchsorted": _good(V, V, side="left", sorter=_Order(4)),
    "segment_sum": _good(V, IDS, 6),
    "print": _good("{} {x}", X, x=V),
    "spec": _good("f32[3]"),
    "squeeze": _good(_Make("float32", (1, 3)), 0),
    "stack": _good([X, X], axis=0),
    "subgraph": _good(_same),
    "swapaxes": _good(X, 0, 1),
    "symbolic_trace": _good(_grow, concrete_args={"c": 1.0}),
    "wrap": _good(_same),
    "switch": _good(COUNT, [_grow, _same], (X,), check=True),
    "take": _good(X, IDS, axis=1, mode="clip"),
    "take_along_axis": _good(X, INTS, axis=1, mode="clip"),
    "tensordot": _good(X, X, axes=((0, 1), (0, 1))),
    "tile": _good(X, (2, 1)),
    "top_k": _good(X, 2, axis=0),
    "trace": _good(_same, X, mode="real", strict=True, captures=True),
    "unstack": _good(X, axis=0),
    "vecdot": _good(X, V, axis=-1),
    "where": _good(BOOLS, X, V),
    "while_loop": _good(_small, _grow, SCALAR, max_steps=10, reverse_mode="recompute"),
    "fx.Graph": _good("f"),
    **dict.fromkeys(
        ("fx.Interpreter", "fx.ShapeProp", "fx.Transformer", "fx.open_bodies"),
        _good(_Traced()),
    ),
    **dict.fromkeys(("fx.FxGraphDrawer", "fx.to_dot"), _good(_Traced(), "picture")),
    "fx.module_of": _good(_Captured()),
    "fx.split_module": _good(_Traced(), None, _same, {}),
    "fx.replace_pattern": _good(_Traced(), _grow, _grow),
    "fx.symbolic_trace": _good(_grow, concrete_args={"c": 1.0}),
    "fx.wrap": _good(_same),
    "linalg.cholesky": _good(SQUARE, upper=True),
    "linalg.cross": _good(_Make("float32", (2, 3)), _Make("float32", (3,)), axis=-1),
    "linalg.det": _good(SQUARE),
    "linalg.diagonal": _good(X, offset=1),
    "linalg.eigh": _good(SQUARE),
    "linalg.eigvalsh": _good(SQUARE),
    "linalg.inv": _good(SQUARE),
    "linalg.matmul": _good(X, V),
    "linalg.matrix_norm": _good(X, keepdims=True, ord="fro"),
    "linalg.matrix_power": _good(SQUARE, 3),
    "linalg.matrix_rank": _good(SQUARE, rtol=1e-6),
    "linalg.matrix_transpose": _good(X),
    "linalg.outer": _good(V, V),
    "linalg.pinv": _good(SQUARE, rtol=1e-6),
    "linalg.qr": _good(SQUARE, mode="reduced"),
    "linalg.slogdet": _good(SQUARE),
    "linalg.solve": _good(SQUARE, _Make("float64", (3,))),
    "linalg.solve_triangular": _good(
        *(SQUARE, _Make("float64", (3, 2))),
        lower=True,
        transpose=True,
        unit_diagonal=True,
    ),
    "linalg.svd": _good(SQUARE, full_matrices=True),
    "linalg.svdvals": _good(SQUARE),
    "linalg.tensordot": _good(X, X, axes=2),
    "linalg.trace": _good(X, offset=1, dtype="float64"),
    "linalg.vecdot": _good(X, V, axis=-1),
    "linalg.vector_norm": _good(X, axis=0, keepdims=True, ord=2.0),
    "nn.Sequential": _good(_grow, _grow),
    "nn.Embedding.init": _good(KEY, 3, 4, dtype="float32"),
    **dict.fromkeys(("nn.GRUCell.init", "nn.LSTMCell.init"), _good(KEY, 3, 4)),
    "nn.LayerNorm.init": _good(4, epsilon=1e-5, dtype="float32"),
    "nn.Linear.init": _good(KEY, 3, 4, bias=True, dtype="float32"),
    "nn.MultiheadAttention.init": _good(KEY, 4, 2, bias=True, dtype="float32"),
    **dict.fromkeys(
        [f"random.{name}" for name in "bits exponential gumbel laplace normal".split()],
        _RANDOM,
    ),
    "random.bits": _good(KEY, (2, 3), "uint32"),
    "random.bernoulli": _good(KEY, 0.5, (2, 3)),
    "random.categorical": _good(KEY, X, axis=-1, shape=(3,)),
    "random.choice": _good(
        KEY, 4, (2,), replace=True, p=_Make("float32", (4,)), axis=0
    ),
    "random.fold_in": _good(KEY, 7),
    "random.key": _good(42),
    "random.permutation": _good(KEY, X, axis=0, independent=True),
    "random.randint": _good(KEY, (2, 3), 0, 10, "int32"),
    "random.split": _good(KEY, 3),
    "random.truncated_normal": _good(KEY, -1.0, 1.0, (2, 3), "float32"),
    "random.uniform": _good(KEY, (2, 3), "float32", minval=0.0, maxval=1.0),
    **{
        f"Tensor.{name}": _good(X, axis=0, keepdims=True)
        for name in "all any argmax argmin max mean min".split()
    },
    **dict.fromkeys(
        ("Tensor.std", "Tensor.var"), _good(X, axis=0, correction=1.0, keepdims=True)
    ),
    **dict.fromkeys(
        ("Tensor.sum", "Tensor.prod"),
        _good(X, axis=0, dtype="float32", keepdims=True),
    ),
    "Tensor.__getitem__": _good(X, (0, slice(1, 3))),
    "Tensor.__setitem__": _good(X, (0, slice(1, 3)), 5.0),
    "Tensor.astype": _good(X, "float64", copy=True, device="cpu"),
    "Tensor.conj": _good(X),
    "Tensor.copy": _good(X),
    "Tensor.flatten": _good(X),
    "Tensor.item": _good(SCALAR),
    "Tensor.reshape": _good(X, (4, 3)),
    "Tensor.squeeze": _good(_Make("float32", (1, 3)), axis=0),
    "Tensor.to_device": _good(X, "cpu"),
    "Tensor.tolist": _good(X),
    "Tensor.transpose": _good(X, (1, 0)),
    "at.get": _good(X, 0),
    **{f"at.{name}": _good(X, 0, 5.0) for name in "set add mul min max".split()},
}

EXEMPT: Final = {
    "Interpreter": "is a class to derive from: tests/test_interpreters.py",
    "HigherOrderOp": "is a class to derive from: tests/test_own_operators.py",
    "Tensor": "its subclasses are made by functions",
    "ExportedProgram": "is made by `export` and `load`",
    "Profile": "is made by `jitted.profile`",
    "load": "reads a file: tests/test_export_files.py has what is wrong with one",
    "__array_namespace_info__": "takes no arguments",
    "debug": "takes no arguments",
    "stats": "takes no arguments",
    "fx.GraphModule": "takes a graph: tests/test_fx.py has what is wrong with one",
    "fx.Match": "is made by `replace_pattern`",
    "fx.Node": "is made by graphs",
    "fx.Proxy": "is made by tracers",
    "fx.Tracer": "takes no arguments",
    **dict.fromkeys(
        [f"nn.{n}" for n in hf.nn.__all__ if n not in ("Sequential", "static")],
        "is a dataclass: of what it is given, nothing is asked until it is called",
    ),
    "nn.static": "takes what `dataclasses.field` takes",
    "linalg.EighResult": "a named tuple of results",
    "linalg.QRResult": "a named tuple of results",
    "linalg.SVDResult": "a named tuple of results",
    "linalg.SlogdetResult": "a named tuple of results",
}


# --- the namespace --------------------------------------------------------------------


def _updater(method: str) -> Callable[..., Any]:
    def update(x: hf.Tensor, key: Any, *args: Any) -> Any:
        return getattr(x.at[key], method)(*args)

    return update


def resolve(name: str) -> Callable[..., Any]:
    """The public callable that `CALLS` has under `name`."""
    if name.startswith("at."):
        return _updater(name.removeprefix("at."))
    found: Any = hf
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def public_callables() -> list[str]:
    """The names of all public callables, as in `CALLS`."""
    names = [n for n in hf.__all__ if callable(getattr(hf, n))]
    names += [
        f"nn.{n}.init" for n in hf.nn.__all__ if hasattr(getattr(hf.nn, n), "init")
    ]
    for space in ("fx", "linalg", "nn", "random"):
        names += [f"{space}.{n}" for n in getattr(hf, space).__all__]
    methods = [n for n in vars(hf.Tensor) if not n.startswith("_")]
    names += [f"Tensor.{n}" for n in methods if callable(getattr(hf.Tensor, n))]
    names += ["Tensor.__getitem__", "Tensor.__setitem__"]
    updater = type(hf.zeros(1).at[0])
    names += [f"at.{n}" for n in vars(updater) if not n.startswith("_")]
    return names


# --- what is wrong --------------------------------------------------------------------


class _Liar:
    """Says that it is an index, an array and a context, and is none of them."""

    shape = (2,)
    dtype = "float33"

    def __index__(self) -> int:
        raise TypeError("not an index")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def bad_values() -> dict[str, Any]:
    """Values by what they are: each is wrong for most arguments."""
    donated = EagerTensor(np.zeros((3, 4), np.float32))
    donated.storage.invalidate("donated")
    return {
        "None": None,
        "object": object(),
        "text": "text",
        "bytes": b"bytes",
        "complex": 1j,
        "True": True,
        "float": 1.5,
        "NaN": float("nan"),
        "infinity": float("inf"),
        "negative": -1,
        "far": 99,
        "huge": 2**70,
        "minus huge": -(2**70),
        "list": [1, 2],
        "ragged": [[1], [2, 3]],
        "list of text": ["a", "b"],
        "list of None": [None],
        "empty list": [],
        "empty tuple": (),
        "twice": (0, 0),
        "twice, once negative": (0, -1, 1),
        "far axes": (0, 99),
        "negative sizes": (2, -3),
        "NaN sizes": (2, float("nan")),
        "huge sizes": (2**40, 2**40),
        "too many sizes": (1,) * 65,
        "text sizes": ("2", "3"),
        "dict": {},
        "dict of numbers": {"a": 1},
        "dict of mixed keys": {"a": 1, 2: 3},
        "set": {1},
        "range": range(3),
        "generator": (i for i in range(2)),
        "slice": slice(None),
        "slice of text": slice("a"),
        "ellipsis": Ellipsis,
        "function": _same,
        "function of no arguments": lambda: 1,
        "function giving text": lambda *_: "text",
        "type": int,
        "complex type": complex,
        "module": np,
        "liar": _Liar(),
        "scalar tensor": hf.asarray(2.0),
        "integer tensor": hf.asarray([1, 2]),
        "bool tensor": hf.asarray([True, False]),
        "large tensor": hf.zeros((2, 3, 5)),
        "empty tensor": hf.zeros((0, 4)),
        "half tensor": hf.zeros((3, 4), dtype="bfloat16"),
        "donated tensor": donated,
        "complex array": np.zeros(3, np.complex64),
        "object array": np.array([object()]),
        "array of text": np.array(["a"]),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
        "record array": np.zeros(2, [("a", "i4")]),
        "NumPy bool": np.bool_(True),
        "NumPy scalar": np.float64(1.5),
        "dtype": np.dtype("complex128"),
        "our dtype": hf.float16,
    }


# --- the tests ------------------------------------------------------------------------


OURS: Final = (CompileError, GraphError, LoopIRError)
"""Errors that say that hopflow has a defect."""


def spoilt(good: Good, slot: int | str, bad: Any) -> tuple[list[Any], dict[str, Any]]:
    args, options = list(fresh(good.args)), fresh(good.options)
    if isinstance(slot, int):
        args[slot] = bad
    else:
        options[slot] = bad
    return args, options


def slots(name: str) -> list[int | str]:
    good = CALLS[name]
    first = 1 if name.startswith(("Tensor.", "at.")) else 0
    return [*range(first, len(good.args)), *good.options]


def complaint(f: Callable[..., Any], args: Any, options: Any) -> str | None:
    """What is wrong with the error of a call; None if nothing is."""
    try:
        f(*args, **options)
    except HopflowError as error:
        if isinstance(error, OURS) or not str(error):
            return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_every_public_callable_has_a_good_call() -> None:
    names = set(public_callables())
    assert names == CALLS.keys() | EXEMPT.keys()
    assert not CALLS.keys() & EXEMPT.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_good_call_works(name: str) -> None:
    good = CALLS[name]
    resolve(name)(*fresh(good.args), **fresh(good.options))


def complaints(f: Callable[..., Any], name: str) -> str:
    """What is wrong with the errors of a public callable, called by way of `f`."""
    found = []
    for slot in slots(name):
        for label in bad_values():
            args, options = spoilt(CALLS[name], slot, bad_values()[label])
            if wrong := complaint(f, args, options):
                found.append(f"{name}, {slot}, {label}: {wrong}")
    return "\n".join(found)


@pytest.mark.parametrize("name", list(CALLS))
def test_a_wrong_argument_is_an_error_of_ours(name: str) -> None:
    assert not complaints(resolve(name), name)


@pytest.mark.parametrize("name", list(CALLS))
def test_a_wrong_argument_of_a_traced_call_is_an_error_of_ours(name: str) -> None:
    f = resolve(name)

    def traced(*args: Any, **options: Any) -> None:
        def call() -> None:
            f(*args, **options)

        hf.trace(call, captures=True)

    assert not complaints(traced, name)


# --- messages -------------------------------------------------------------------------


def two(a: Any, b: Any) -> Any:
    return a, b


api: Any = hf  # a type checker would refuse these calls

MESSAGES: Final[list[tuple[Callable[[Any], Any], str]]] = [
    (lambda x: api.sum(x, keepdims=1), "sum: `keepdims` must be a bool, and is `int`"),
    (lambda x: api.astype(x, "int8", copy=None), "astype: `copy` must be a bool"),
    (
        lambda x: api.zeros(3, dtype=x),
        "zeros: `dtype` must be a dtype, .* `EagerTensor`",
    ),
    (lambda x: api.ones(3, dtype="f33"), "ones: `dtype`: `f33` is not a hopflow dtype"),
    (lambda x: api.sum(x, dtype=1.5), "sum: `dtype` must be a dtype"),
    (lambda x: api.zeros((2**40, 2**40)), "zeros: the result, .* is larger than any"),
    (lambda x: api.ones((1,) * 65), "ones: the result would have 65 axes"),
    (lambda x: api.take(x, [0], mode="wrap"), "take: `mode` must be 'check' or 'clip'"),
    (
        lambda x: api.meshgrid(x, indexing=3),
        "`indexing` must be 'xy' or 'ij', .* `int`",
    ),
    (
        lambda x: api.diff(x, prepend="a"),
        "diff: `prepend` must be a tensor or a number",
    ),
    (lambda x: api.diff(x, n=True), "diff: `n` must be an int, and is `bool`"),
    (lambda x: api.stack(b"12"), "stack: `arrays` must be a sequence of tensors"),
    (lambda x: api.sin(x, out=x), "sin: has no argument `out`"),
    (lambda x: api.add(x), r"add: takes 2 operand\(s\), and was given 1"),
    (lambda x: api.copy(2**70), "does not fit int64"),
    (lambda x: api.while_loop(two, two, x), "`body_fn`: `two` .* does not take"),
    (lambda x: api.cond(True, two, two, (x,)), "`true_fn`: `two` .* missing 1"),
    (lambda x: api.scan(lambda c: c, x, x), "`combine_fn`: `<lambda>` .* but 2 were"),
    (
        lambda x: api.scan(lambda c, _: (c, _), 0, length=2**70),
        "`length` must fit int64",
    ),
    (lambda x: api.cond(True, two, two, (x, 2**70)), "does not fit int64"),
    (lambda x: api.invoke_subgraph(lambda: 2**70), "does not fit int64"),
    (lambda x: api.jit(two, donate=0), "jit: `donate` must be a tuple of positions"),
]


@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_a_message_names_the_function_and_the_argument(
    call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(HopflowError, match=message):
        call(hf.ones(3))


def test_a_type_error_of_a_body_itself_is_the_users() -> None:
    def body(x: Any) -> Any:
        return two(x)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="missing 1 required") as caught:
        hf.map(body, hf.ones(3))
    assert not isinstance(caught.value, HopflowError)
