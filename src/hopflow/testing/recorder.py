"""Recording of steps as a typed program: `record(Exact, steps, arguments)`.

The values of the pool are references that record each operation as a statement. The
type of a result comes from running the operation on samples in NumPy.
"""

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hopflow import dtypes, pytree
from hopflow.dtypes import DType, as_dtype
from hopflow.errors import HopflowError
from hopflow.testing.libraries import Library
from hopflow.testing.plain import Plain, row, zero_row
from hopflow.testing.program import (
    Argument,
    Body,
    ComputedSize,
    Name,
    Program,
    Size,
    Statement,
    bodies,
    walk,
)
from hopflow.testing.programs import Pool, Steps
from hopflow.testing.user_operators import UserOperator

Function = Callable[..., Any]


def record(
    kind: type[Pool],
    steps: Steps,
    arguments: Sequence[Argument],
    most: int = 3,
) -> Program:
    """Return the program of some steps.

    Args:
        kind: The kind of programs.
        steps: Adds values to a pool.
        arguments: The arguments of the program.
        most: How many of the newest values are results, besides those written to.
    """
    recorder = Recorder()
    refs = [Ref(recorder, a.name, a.value) for a in arguments]
    pool = kind(refs, lib=recorder.library())
    with np.errstate(all="ignore"):
        steps(pool)
    outputs = [*(pool.pick(k) for k in range(most)), *pool.owned]
    results = tuple({v.name: Name(v.name) for v in outputs}.values())
    names = tuple(Name(a.name) for a in arguments)
    main = Body("program", names, tuple(recorder.statements), results)
    main = _without_unused(main)
    used = {statement.operation for statement in walk(main)}
    operators = {k: x for k, x in recorder.operators.items() if k in used}
    return Program(tuple(arguments), main, kind.exact, kind.signed, operators)


def _computed(operator: str) -> Function:
    """Return a method of lengths that computes a sample and records the expression."""
    compute = _COMPUTE[operator]

    def method(self: Any, *others: Any) -> Any:
        value = compute(_number(self), *map(_number, others))
        result = Extent(value) if isinstance(value, int) else Ratio(value)
        result.source = ComputedSize(operator, tuple(map(_names, (self, *others))))
        return result

    return method


def _number(x: Any) -> Any:
    return int(x) if isinstance(x, int) else float(x)


_COMPUTE: dict[str, Function] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "/": operator.truediv,
    "floor": math.floor,
}


class _Arithmetic:
    """A number computed from lengths; `source` is its expression in the program."""

    source: Size | ComputedSize

    __add__, __sub__ = _computed("+"), _computed("-")
    __mul__, __pow__ = _computed("*"), _computed("**")
    __floordiv__, __mod__ = _computed("//"), _computed("%")
    __truediv__, __floor__ = _computed("/"), _computed("floor")


class Extent(_Arithmetic, int):
    """The length of an axis, or an integer computed from lengths."""


class Ratio(_Arithmetic, float):
    """A float computed from lengths."""


class Shape(tuple[int, ...]):
    """The shape of the value named `of`."""

    of: str

    def __getitem__(self, k: Any) -> Any:
        length = super().__getitem__(k)
        if isinstance(k, slice):
            return length
        extent = Extent(length)
        extent.source = Size(self.of, k % len(self))
        return extent


class Ref:
    """A reference to a value of the recorded program, with a sample of the value."""

    def __init__(self, recorder: "Recorder", name: str, sample: Any) -> None:
        self.recorder, self.name, self.sample = recorder, name, np.asarray(sample)

    @property
    def shape(self) -> Any:
        shape = Shape(self.sample.shape)
        shape.of = self.name
        return shape

    @property
    def ndim(self) -> int:
        return self.sample.ndim

    @property
    def dtype(self) -> DType:
        return as_dtype(self.sample.dtype)

    def copy(self) -> Any:
        return self.recorder.call("copy", self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Ref) and index.dtype.kind == "b":
            return self.recorder.get("mask", self, index)
        # With `...` even a single element is a view in NumPy, as in hopflow.
        index = index if isinstance(index, tuple) else (index,)
        return self.recorder.get(
            "get", self, index if ... in _plain(index) else (*index, ...)
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.add("set", self, index, value)

    def __isub__(self, other: Any) -> "Ref":
        self.recorder.add("subtract_from", self, other)
        return self

    def __neg__(self) -> Any:
        return self.recorder.call("negative", self)


def _plain(index: tuple[Any, ...]) -> list[Any]:
    return [None if isinstance(i, Ref | slice) else i for i in index]


def _operator(name: str, *, swapped: bool = False) -> Function:
    def method(self: Ref, other: Any) -> Any:
        pair = (other, self) if swapped else (self, other)
        return self.recorder.call(name, *pair)

    return method


for _method, _name in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
}.items():
    setattr(Ref, f"__{_method}__", _operator(_name))
    setattr(Ref, f"__r{_method}__", _operator(_name, swapped=True))
for _method, _name in {"lt": "less", "gt": "greater", "eq": "equal"}.items():
    setattr(Ref, f"__{_method}__", _operator(_name))


class Recorder:
    """Records the operations on its references as statements."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.plain = Plain()
        self.operators: dict[str, UserOperator] = {}
        self._count = 0
        self._functions: dict[
            Function, tuple[Name, Any]
        ] = {}  # recorded bodies, by function

    def library(self) -> Library:
        """Return the library whose functions are recorded."""
        return Library(
            m=_Functions(self),
            cond=self.cond,
            switch=self.switch,
            scan=self.scan,
            map=self.map,
            prefix=self.prefix,
            call=lambda f, *operands: self._calling("invoke_subgraph", f, operands),
            checkpoint=lambda f, *, policy: (
                lambda *operands: self._calling(
                    "checkpoint", f, operands, policy=policy
                )
            ),
            custom=lambda f, rule="custom_jvp": (
                lambda *operands: self._calling(rule, f, operands)
            ),
            fori=self.fori,
            loop=self.loop,
            update=lambda *args: self.call("dynamic_update_slice", *args),
            sum_by=lambda *args: self.call("segment_sum", *args),
            conv=lambda *args, **options: self.call("conv", *args, **options),
            noise=self.noise,
            user=self.user,
        )

    # Statements.

    def add(self, operation: str, *args: Any, **options: Any) -> None:
        """Record a statement without a result."""
        self._write(None, operation, args, options)

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Record a call of an array function."""
        run = getattr(self.plain, operation)
        samples = _samples((args, options))
        try:
            sample = run(*samples[0], **samples[1])
        except IndexError:  # as in `_read`
            sample = run(*_zeros(samples[0]), **samples[1])
        return self._result(sample, operation, args, options)

    def get(self, operation: str, x: Ref, index: Any) -> Any:
        return self._result(_read(x.sample, index), operation, (x, index), {})

    def noise(self, number: Ref, shape: Any) -> Any:
        return self._result(np.full(shape, 0.5), "uniform", (number, shape), {})

    def _result(
        self, sample: Any, operation: str, args: Any, options: dict[str, Any]
    ) -> Any:
        """Record a statement, and return references for the leaves of its result."""
        tree = pytree.tree_map(self.named, sample)
        self._write(tree, operation, args, options)
        return tree

    def named(self, sample: Any) -> Ref:
        self._count += 1
        return Ref(self, f"v{self._count}", sample)

    def _write(
        self, tree: Any, operation: str, args: Any, options: dict[str, Any]
    ) -> None:
        types = tuple(_type(ref.sample) for ref in pytree.flatten(tree)[0])
        self.statements.append(
            Statement(
                _names(tree),
                operation,
                tuple(_names(a) for a in args),
                {k: _names(v) for k, v in options.items()},
                types,
            )
        )

    def body(self, role: str, f: Function, *samples: Any) -> tuple[Body, Any]:
        """Record `f` as a body, and return it with samples of its result."""
        self._count += 1
        name = f"{role}{self._count}"
        refs = [pytree.tree_map(self.named, self.plain.copied(s)) for s in samples]
        outer, self.statements = self.statements, []
        result = f(*refs)
        inner, self.statements = self.statements, outer
        parameters = tuple(_names(g) for g in refs)
        return (
            Body(name, parameters, tuple(inner), _names(result)),
            _samples(result),
        )

    # Operators.

    def _calling(
        self, operation: str, f: Function, operands: Any, **options: Any
    ) -> Any:
        function: Body | Name
        if f in self._functions:  # refer to the definition of the first call
            function, sample = self._functions[f]
        else:
            function, sample = self.body("f", f, *_samples(operands))
            self._functions[f] = Name(function.name), sample
        return self._result(sample, operation, (function, *operands), options)

    def user(
        self,
        operator: UserOperator,
        functions: Sequence[Function],
        values: Sequence[Ref],
    ) -> Any:
        """Record a call of a user's operator; return None if it rejects the types."""
        try:
            outline = operator.outline(_samples(values))
        except HopflowError:
            return None
        self.operators[operator.name] = operator
        pairs = zip(functions, outline.inputs, strict=True)
        bodies = [self.body("f", f, *args)[0] for f, args in pairs]
        args = tuple(operator.arguments(bodies, values))
        return self._result(outline.results, operator.name, args, {})

    def cond(self, test: Ref, then: Function, other: Function) -> Any:
        (first, sample), (second, _) = (
            self.body("then", then),
            self.body("other", other),
        )
        return self._result(sample, "cond", (test, first, second), {})

    def switch(self, index: Ref, branches: Sequence[Function]) -> Any:
        recorded = [self.body("branch", f) for f in branches]
        names = [body for body, _ in recorded]
        return self._result(recorded[0][1], "switch", (index, names), {})

    def loop(self, test: Function, step: Function, carry: Any, **options: Any) -> Any:
        samples = _samples(carry)
        (more, _), (body, _) = (
            self.body("more", test, *samples),
            self.body("step", step, *samples),
        )
        if sizes := options.get("dynamic_carry"):
            names = list(inspect.signature(step).parameters)
            options["dynamic_carry"] = {
                body.parameters[names.index(name)].name: axes
                for name, axes in sizes.items()
            }
        return self._result(samples, "while_loop", (more, body, carry), options)

    def fori(self, lower: Any, upper: Any, step: Function, carry: Any) -> Any:
        body, _ = self.body("step", step, np.asarray(1), *_samples(carry))
        args = (lower, upper, body, carry)
        return self._result(_samples(carry), "fori_loop", args, {})

    def scan(
        self,
        step: Function,
        carry: Any,
        xs: Any,
        *,
        until: Function | None = None,
        **options: Any,
    ) -> Any:
        samples, stack = _samples(carry), _samples(xs)
        body, (_, y) = self.body("step", step, samples, _one(stack))
        if until is not None:
            options["until"], _ = self.body("until", until, samples)
        steps = () if until is None else (np.asarray(1),)
        result = (samples, _stack_of(y, stack), *steps)
        return self._result(result, "scan", (body, carry, xs), options)

    def map(self, f: Function, xs: Any, **options: Any) -> Any:
        stack = _samples(xs)
        body, y = self.body("f", f, _one(stack))
        return self._result(_stack_of(y, stack), "map", (body, xs), options)

    def prefix(self, f: Function, xs: Any, **options: Any) -> Any:
        stack = _samples(xs)
        body, _ = self.body("combine", f, stack, stack)
        return self._result(stack, "associative_scan", (body, xs), options)


class _Functions:
    """The module of array functions, which are recorded, and of dtypes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        if hasattr(dtypes, name):
            return getattr(dtypes, name)
        return lambda *args, **options: self._recorder.call(name, *args, **options)


def _samples(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.sample if isinstance(x, Ref) else x, tree)


def _read(sample: Any, index: Any) -> Any:
    """Return `x[index]` of samples; an index out of range is replaced by zero."""
    try:
        return sample[_samples(index)]
    except IndexError:
        return sample[_zeros(_samples(index))]


def _zeros(samples: Any) -> Any:
    """Return samples with zeros for arrays."""
    return pytree.tree_map(
        lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, samples
    )


def _one(stack: Any) -> Any:
    """Return a slice of stacked samples; zeros if they are empty."""
    count = pytree.flatten(stack)[0][0].shape[0]
    return row(stack, 0) if count else zero_row(stack)


def _stack_of(y: Any, stack: Any) -> Any:
    count = pytree.flatten(stack)[0][0].shape[0]
    return pytree.tree_map(lambda x: np.stack([x] * count) if count else x[None][:0], y)


def _names(x: Any) -> Any:
    """Return a part of a statement, with names for references."""
    match x:
        case Ref():
            return Name(x.name)
        case Shape():
            return Size(x.of)
        case _Arithmetic():
            return x.source
        case slice():
            return slice(*map(_names, (x.start, x.stop, x.step)))
        case tuple() | list():
            return type(x)(map(_names, x))
        case dict():
            return {k: _names(v) for k, v in x.items()}
        case bool() | np.bool_():
            return bool(x)
        case np.integer():
            return int(x)
    return x


def _type(x: np.ndarray[Any, Any]) -> str:
    return f"{as_dtype(x.dtype).short}[{', '.join(map(str, x.shape))}]"


# --- dead code elimination ------------------------------------------------------------


def _without_unused(main: Body) -> Body:
    """Return the program without dead statements."""
    return _kept(main, _used(main.result))


def _kept(body: Body, used: set[str]) -> Body:
    statements = []
    used = used | _used(body.result)
    for s in reversed(body.statements):
        targets = _used(s.target) | {b.name for b in bodies(s)}
        if not (targets & used or _writes(s)):
            continue
        inner = {id(b): _kept(b, used) for b in bodies(s)}
        args, options = pytree.tree_map(
            lambda x, inner=inner: inner.get(id(x), x), (s.args, dict(s.options))
        )
        used |= _used((args, options))
        for b in inner.values():
            used |= _reads(b)
        statements.append(Statement(s.target, s.operation, args, options, s.types))
    return Body(body.name, body.parameters, tuple(reversed(statements)), body.result)


def _writes(s: Statement) -> bool:
    return s.operation in ("set", "subtract_from") or any(
        _writes(inner) for b in bodies(s) for inner in b.statements
    )


def _used(tree: Any) -> set[str]:
    """Return the names in a part of a statement."""
    names = set()
    for x in pytree.flatten(tree)[0]:
        if isinstance(x, Name):
            names.add(x.name)
        elif isinstance(x, Size):
            names.add(x.of)
        elif isinstance(x, ComputedSize):
            names |= _used(x.operands)
        elif isinstance(x, slice):
            names |= _used([x.start, x.stop, x.step])
    return names


def _reads(body: Body) -> set[str]:
    names = _used(body.result)
    for s in body.statements:
        names |= _used((s.args, dict(s.options)))
        for inner in bodies(s):
            names |= _reads(inner)
    return names
