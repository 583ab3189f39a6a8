"""`check_operator`: compare all rules of an operator with `debug`, its reference."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.autograd.api import jvp, vjp
from hopflow.batching.api import vmap
from hopflow.bind import Value, bind
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ConformanceError,
    HopflowError,
    UnsupportedRuleError,
)
from hopflow.export.api import export, load
from hopflow.graph.core import Graph
from hopflow.graph.hashing import equal
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph, named_objects
from hopflow.graph.running import run_text
from hopflow.graph.verifier import verify
from hopflow.hops.base import RegionOperator
from hopflow.hops.schema import Schema, schema
from hopflow.jit import jit
from hopflow.ops.convert import as_value
from hopflow.ops.joining import stack
from hopflow.ops.opdef import OPERATIONS, as_operand
from hopflow.testing.executions import (
    agree,
    run_debug,
    run_dynamic,
    run_jit,
    run_symbolic,
    run_traced,
)
from hopflow.trace.capture import trace
from hopflow.trace.functionalize import functionalize

OK: Final = "ok"


@dataclass(frozen=True, slots=True)
class _Case:
    """A call of an operator, as a function of the tensors among its arguments.

    leaves, spec   the arguments, flattened
    data           the positions of the leaves that are tensors
    floats         the positions of the leaves that have derivatives
    rtol           the tolerance of results
    """

    op: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.Spec
    data: tuple[int, ...]
    floats: tuple[int, ...]
    rtol: float

    @classmethod
    def of(cls, op: Any, args: Any, kwargs: Any, rtol: float) -> "_Case":
        leaves, spec = pytree.flatten((args, kwargs))
        data = tuple(i for i, x in enumerate(leaves) if isinstance(x, Value))
        floats = tuple(i for i in data if leaves[i].dtype.is_float)
        return cls(op, tuple(leaves), spec, data, floats, rtol)

    def fresh(self) -> list[Any]:
        """Return copies of the tensors, which an operator may write."""
        return [self.leaves[i].copy() for i in self.data]

    def __call__(self, *tensors: Any) -> Any:
        """Call the operator with these tensors."""
        args, kwargs = self.arguments(tensors)
        return self.op(*args, **kwargs)

    def arguments(self, tensors: Sequence[Any]) -> Any:
        """Return (args, kwargs) with these tensors."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.data, tensors, strict=True):
            leaves[i] = tensor
        return pytree.unflatten(self.spec, leaves)

    def run(self, execute: Callable[..., Any]) -> Any:
        """Run the call by an execution, and return its results and the tensors after
        it."""
        tensors = self.fresh()
        return execute(self, *tensors), tensors

    def smooth(self, *floats: Any) -> list[Any]:
        """Return the floating results, as a function of the floating arguments."""
        tensors = self.fresh()
        places = [self.data.index(i) for i in self.floats]
        for place, x in zip(places, floats, strict=True):
            tensors[place] = x * 1
        results = [as_value(as_operand("result", 0, x)) for x in _flat(self(*tensors))]
        return [x for x in results if x.dtype.is_float]

    @property
    def point(self) -> list[Any]:
        """Copies of the floating arguments."""
        return [self.leaves[i].copy() for i in self.floats]

    def directions(self, like: Sequence[Any], seed: int) -> list[Any]:
        """Return random tensors of the types of others."""
        draw = np.random.default_rng(seed)
        return [
            as_value(as_operand("check", 0, draw.uniform(-1, 1, x.shape))).astype(
                x.dtype
            )
            for x in like
        ]


def _flat(tree: Any) -> list[Any]:
    return pytree.flatten(tree)[0]


# --- the checks -----------------------------------------------------------------------


def _runs(execute: Callable[..., Any]) -> Callable[[_Case], None]:
    """Return the check of an execution."""

    def check(case: _Case) -> None:
        agree(case.run(execute), case.run(run_debug), rtol=case.rtol)

    return check


def _debug(case: _Case) -> None:
    case.run(run_debug)


def _fake(case: _Case) -> None:
    graph = trace(case, *case.fresh(), mode="fake", captures=True).graph
    results = list(map(np.asarray, _flat(case.run(run_debug)[0])))
    types = [o.type for o in graph.outputs][: len(results)]
    expected = [(r.dtype, r.shape) for r in results]
    inferred = [(t.dtype.dtype, t.shape) for t in types]
    assert inferred == expected, f"the types are {inferred}, and the results {expected}"


def _slope(case: _Case, tangents: Sequence[Any]) -> list[Any]:
    """Return the central difference of `debug` in one direction."""
    return _difference(lambda *xs: run_debug(case.smooth, *xs), case.point, tangents)


def _difference(
    f: Callable[..., Any], point: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    size = 1e-6 if all(x.dtype.itemsize == 8 for x in point) else 1e-3

    def shifted(sign: int) -> list[Any]:
        pairs = zip(point, tangents, strict=True)
        moved = [x + (sign * size) * t for x, t in pairs]
        return [np.asarray(y, dtype=np.float64) for y in f(*moved)]

    pairs = zip(shifted(1), shifted(-1), strict=True)
    return [(above - below) / (2 * size) for above, below in pairs]


def _tolerance(case: _Case) -> float:
    exact = all(x.dtype.itemsize == 8 for x in case.point)
    return max(case.rtol, 1e-5 if exact else 1e-2)


def _jvp(case: _Case) -> None:
    tangents = case.directions(case.point, 1)
    _, out_tangents = jvp(case.smooth, tuple(case.point), tuple(tangents))
    agree(out_tangents, _slope(case, tangents), rtol=_tolerance(case))


def _dot(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    pairs = zip(xs, ys, strict=True)
    return float(sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in pairs))


def _vjp(case: _Case) -> None:
    results, pull = vjp(case.smooth, *case.point)
    expected = run_debug(case.smooth, *case.point)
    agree(results, expected, rtol=case.rtol)
    cotangents = case.directions(results, 2)
    gradients = pull(cotangents)
    for seed in (3, 4):
        tangents = case.directions(case.point, seed)
        forward, backward = (
            _dot(cotangents, _slope(case, tangents)),
            _dot(gradients, tangents),
        )
        agree(backward, forward, rtol=_tolerance(case))


def _second(case: _Case) -> None:
    cotangents = case.directions(run_debug(case.smooth, *case.point), 5)

    def gradient(*xs: Any) -> list[Any]:
        return list(vjp(case.smooth, *xs)[1](cotangents))

    slopes, pull = vjp(gradient, *case.point)
    weights = case.directions(slopes, 6)
    tangents = case.directions(case.point, 7)
    forward = _dot(weights, _difference(gradient, case.point, tangents))
    agree(_dot(pull(weights), tangents), forward, rtol=10 * _tolerance(case))


def _vmap(case: _Case) -> None:
    examples = [list(map(_other(k), case.fresh())) for k in range(3)]
    rows = [
        pytree.flatten(run_debug(case, *map(_copy, tensors))) for tensors in examples
    ]
    spec = rows[0][1]
    columns = zip(*(leaves for leaves, _ in rows), strict=True)
    expected = pytree.unflatten(
        spec, [np.stack(list(map(np.asarray, column))) for column in columns]
    )
    batch = [stack(list(column)) for column in zip(*examples, strict=True)]
    for batched in (vmap(case), jit(vmap(case))):
        agree(batched(*map(_copy, batch)), expected, rtol=case.rtol)


def _copy(x: Any) -> Any:
    return x.copy()


def _other(k: int) -> Callable[[Any], Any]:
    """Return a function that makes batch element `k`: scaled floats, and every second
    bool negated."""

    def example(x: Any) -> Any:
        if x.dtype.is_float:
            return x * (1 + k / 8)
        return x != (k % 2 == 1) if x.dtype.kind == "b" else x

    return example


def _through_a_file(f: Callable[..., Any], *tensors: Any) -> Any:
    """Call the program that `load` reads of the file of `f`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.hopflow"
        export(f, tensors).save(path)
        return load(path)(*tensors)


def _text(case: _Case) -> None:
    module = trace(case, *case.fresh(), captures=True)
    graph: Graph = module.graph
    verify(graph)
    text = format_graph(graph)
    operators = {node.op.name: node.op for node in graph.walk() if node.op is not None}
    again = parse(text, {**OPERATIONS, **operators}, objects=named_objects(graph))
    assert equal(again, graph), f"the text is that of another graph:\n{text}"
    found = module.evaluated(partial(run_text, bind=bind), *case.fresh())
    agree(found, module(*case.fresh()), rtol=case.rtol)


def _schema(case: _Case) -> None:
    tensors = case.fresh()
    args, kwargs = case.arguments(tensors)
    call_schema = schema(case.op, *args, **kwargs)
    call_schema.check(*args, **kwargs)
    parsed = Schema.from_dict(json.loads(json.dumps(call_schema.to_dict())))
    assert parsed == call_schema, (
        f"its plain data are those of another schema:\n{parsed}"
    )
    results, after = case.run(run_debug)
    types = [as_value(as_operand("result", 0, x)).type for x in _flat(results)]
    expected, listed = list(map(str, types)), [r.type for r in call_schema.results]
    assert listed == expected, (
        f"the schema gives results {listed}, and debug mode {expected}"
    )
    paths = [call_schema.arguments[i].path for i in case.data]
    for path, x, y in zip(paths, case.fresh(), after, strict=True):
        if not np.array_equal(np.asarray(x), np.asarray(y)):
            assert path in call_schema.written, (
                f"`{path}` is written, and the schema is not so"
            )


CHECKS: Final[Mapping[str, Callable[[_Case], str | None]]] = MappingProxyType(
    {
        "debug": _debug,
        "eager": _runs(lambda f, *xs: f(*xs)),
        "traced": _runs(run_traced),
        "fake": _fake,
        "functional": _runs(lambda f, *xs: functionalize(f)(*xs)),
        "jvp": _jvp,
        "vjp": _vjp,
        "second": _second,
        "vmap": _vmap,
        "lower": _runs(run_jit),
        "symbolic": _runs(run_symbolic),
        "dynamic": _runs(run_dynamic),
        "export": _runs(_through_a_file),
        "text": _text,
        "schema": _schema,
    }
)
"""Name -> check, which compares with `debug` or returns why it cannot."""


def _nothing(name: str, case: _Case) -> str:
    """Return why a check does not apply; "" if it does."""
    if name in ("jvp", "vjp", "second") and not case.floats:
        return "no argument is a floating tensor"
    return "no argument is a tensor" if name == "vmap" and not case.data else ""


def check_operator(
    op: Any,
    *args: Any,
    rtol: float = 1e-6,
    without: Mapping[str, str] = MappingProxyType({}),
    **kwargs: Any,
) -> dict[str, str]:
    """Run all rules of an operator on one call, and compare them with `debug`.

    Floating tensors among the arguments should be float64 and away from kinks, because
    derivatives are compared with central differences.

        >>> from hopflow.testing import check_operator
        >>> x = hf.ones((), dtype="float64")
        >>> checks = check_operator(hf.cond, True, hf.sin, hf.cos, (x,))
        >>> checks["jvp"]
        'ok'

    Args:
        op: A class of operators without constructor arguments, an operator, or a
            function that uses one, such as `hf.cond`.
        args, kwargs: The arguments of the call.
        rtol: The relative tolerance of results.
        without: Check (see `CHECKS`) that must fail with an error of hopflow -> why.

    Returns:
        Name of each check -> "ok", or why the check does not apply.

    Raises:
        ConformanceError: rules disagree; it names each, and says why.
        ArgumentTypeError: `op` is neither an operator nor callable.
        ArgumentValueError: `without` has an unknown check.
    """
    if isinstance(op, type) and issubclass(op, RegionOperator):
        op = op()
    if not callable(op):
        raise ArgumentTypeError(
            "check_operator: `op` must be an operator, or a function that uses one, "
            f"and is `{type(op).__name__}`."
        )
    if unknown := set(without) - set(CHECKS):
        raise ArgumentValueError(
            f"check_operator: `without` names {sorted(unknown)}; there are the checks "
            f"{', '.join(CHECKS)}."
        )
    case = _Case.of(op, args, kwargs, rtol)
    outcomes: dict[str, str] = {}
    failures: dict[str, str] = {}
    for name, check in CHECKS.items():
        if reason := _nothing(name, case):
            outcomes[name] = reason
            continue
        try:
            outcomes[name] = check(case) or OK
        except Exception as error:
            if name in without and isinstance(error, HopflowError):
                outcomes[name] = without[name]
            elif isinstance(error, UnsupportedRuleError):
                outcomes[name] = str(error).split(": ", 2)[-1].rstrip(".")
            else:
                failures[name] = f"{type(error).__name__}: {error}"
        else:
            if name in without:
                failures[name] = f"it works, and was to fail: {without[name]}"
    if failures:
        label = getattr(op, "name", getattr(op, "__name__", repr(op)))
        raise ConformanceError(label, failures)
    return outcomes
