"""`to_jax` and `to_stablehlo`: an exported program as a function of JAX."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np

from hopflow import dtypes, pytree
from hopflow.errors import (
    ArgumentValueError,
    DTypeError,
    ExportError,
    GuardError,
    ShapeError,
    StructureError,
)
from hopflow.export.exported import Exported, Stateful
from hopflow.export.jax.frames import (
    Array,
    Asserts,
    Context,
    Frame,
    Translation,
    axes_of,
    located,
)
from hopflow.export.jax.library import library, wide_library
from hopflow.export.jax.rules import evaluate
from hopflow.export.jax.sizes import Number, condition, number, side
from hopflow.export.signature import Input, Signature
from hopflow.graph.core import Graph, Var
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.types import TensorType
from hopflow.recursion import deep_recursion
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Symbol, free_symbols


@dataclass(frozen=True, eq=False)
class _Definition:
    """All of a function that is no array."""

    program: Exported
    translation: Translation


class JaxFunction(Stateful):
    """An exported program as a function of JAX.

    It takes and gives the pytrees of the program, of `jax.Array`s. `jax.jit`,
    `jax.grad`, `jax.vmap` and `jax.shard_map` transform it as any function; loops and
    branches in it are those of `jax.lax`. It is a pytree of the arrays that it holds,
    so that these may be arguments of a transformed function:

        fn = program.to_jax()
        loss = jax.jit(lambda fn, x: fn(x).sum())
        loss(fn, x)
        jax.grad(lambda p: loss(fn.with_state(p), x))(fn.parameters)

    What a call writes, to arguments or to buffers, is returned: the result of a program
    that writes is a pair (result, written), of which `written` maps paths to arrays.
    """

    def __init__(self, definition: _Definition, state: Mapping[str, Any]) -> None:
        self._definition = definition
        self._state = dict(state)
        self.__name__ = definition.program.__name__
        self.__signature__ = definition.program.__signature__

    def __repr__(self) -> str:
        return f"<JaxFunction {self.__name__}{self.__signature__}>"

    @property
    def signature(self) -> Signature:
        """What it takes, gives, holds and writes."""
        return self._definition.program.signature

    @property
    def state(self) -> dict[str, Array]:
        """The arrays that it holds, by module path."""
        return self._state

    def with_state(self, state: Mapping[str, Array]) -> "JaxFunction":
        """The function with other arrays in places of those that it holds.

        Raises:
            StructureError: a name is none of the state.
        """
        return JaxFunction(self._definition, self._replaced(state))

    @deep_recursion()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, or trace, the program.

        Raises:
            StructureError: arguments of other names or another structure.
            ShapeError, DTypeError: an array of another type.
            ArgumentValueError: another value than the program has for a constant.
            GuardError: a size breaks one of the program's constraints.
            ExportError: JAX has nothing for a node of it, or makes no 64-bit arrays.
        """
        wide_library()
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise StructureError(f"{self.__name__}: {error}.") from None
        return _Call(self).run(tuple(bound.arguments.values()))


def to_function(program: Exported, asserts: Asserts) -> JaxFunction:
    """The program as a function of JAX.

    Raises:
        ExportError: JAX has nothing for it, or makes no 64-bit arrays; or the library
            is missing.
    """
    jnp = wide_library().numpy
    _registered()
    _check_sizes(program.module.graph)
    state = {name: jnp.asarray(np.asarray(x)) for name, x in program.state.items()}
    return JaxFunction(_Definition(program, Translation(asserts, evaluate)), state)


@cache
def _registered() -> None:
    """Tell JAX that functions are pytrees."""
    tree = library().tree_util

    def keys(function: JaxFunction) -> tuple[list[Any], Any]:
        pairs = [(tree.DictKey(name), x) for name, x in function.state.items()]
        return pairs, (function._definition, tuple(function.state))

    def restored(rest: Any, values: Iterable[Any]) -> JaxFunction:
        definition, names = rest
        return JaxFunction(definition, dict(zip(names, values, strict=True)))

    tree.register_pytree_with_keys(JaxFunction, keys, restored)


def _check_sizes(graph: Graph) -> None:
    """
    Raises:
        ExportError: the size of a tensor depends on values, so that JAX cannot trace
            the program.
    """
    unknown = {n.symbol for n in graph.distinct_nodes() if n.symbol is not None}
    for node in graph.distinct_nodes():
        for var in node.results:
            sizes = [n for n in var.type.shape if unknown & {*free_symbols(n)}]
            if sizes and node.op is not None:
                raise located(
                    node,
                    ExportError(
                        f"it makes a {var.type}, of which only the run knows "
                        f"`{sizes[0]}`. JAX knows all sizes when it traces: keep the "
                        "size of what it is made of, with `hf.where`."
                    ),
                )


# --- calls ----------------------------------------------------------------------------


class _Call:
    """One call: its arguments, checked, as the inputs of the graph."""

    def __init__(self, function: JaxFunction) -> None:
        self.function = function
        self.program = function._definition.program
        self.module = self.program.module
        self.translation = function._definition.translation
        self.name = function.__name__

    def run(self, args: tuple[Any, ...]) -> Any:
        module, signature = self.module, self.program.signature
        leaves, spec = pytree.flatten(args)
        if spec != module.in_spec:
            raise StructureError(
                f"{self.name}: the arguments have another structure than in the "
                f"program.\n  expected {module.in_spec}\n  got      {spec}"
            )
        inputs, state = self.inputs(leaves), self.function.state
        numbers = [x for k in module.numbers if not isinstance(x := leaves[k], int)]
        arrays = *inputs, *state.values(), *numbers
        axes = frozenset[str]().union(*map(axes_of, arrays))
        context = Context(self.translation, axes)
        state = {name: context.varying(x) for name, x in state.items()}
        args = (
            *(None for _ in module.graph.symbols),
            *map(context.varying, inputs),
        )
        frame = Frame(context, module.graph, args, state)
        for symbol, source in module.sources.items():
            frame.symbols.offer(symbol, partial(_found, source, leaves))
        self.check_shapes(frame)
        self.check_constraints(frame)
        found = frame.run()
        count = len(signature.outputs)
        result = pytree.unflatten(module.out_spec, found[:count])
        if not signature.written:
            return result
        return result, dict(zip(signature.written, found[count:], strict=True))

    def inputs(self, leaves: list[Any]) -> list[Array]:
        """The operands of the graph; leaves that are numbers become what symbols are,
        in place."""
        module, found = self.module, []
        operands = iter(module.graph.operands)
        for i, leaf in enumerate(leaves):
            if i in module.constants:
                self.check_constant(i, leaf)
            elif i in module.numbers:
                leaves[i] = self.integer(module.texts[i], leaf)
            else:
                array = library().numpy.asarray(leaf)
                self.check_type(module.texts[i], next(operands), array)
                found.append(array)
        return found

    def check_constant(self, position: int, leaf: Any) -> None:
        if isinstance(leaf, library().core.Tracer):
            raise ArgumentValueError(
                f"{self.name}: `{self.module.texts[position]}` is a constant of the "
                "program, and JAX traces it. Name it in `static_argnums`."
            )
        self.module.check_constant(self.module.constants[position], leaf)

    def integer(self, text: str, leaf: Any) -> Number:
        if isinstance(leaf, int) and not isinstance(leaf, bool):
            return leaf
        jnp = library().numpy
        is_integer = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.integer)
        if not is_integer or leaf.shape:
            raise ArgumentValueError(
                f"{self.name}: `{text}` is an integer, and {leaf!r} is none."
            )
        return jnp.asarray(leaf, jnp.int64)

    def check_type(self, text: str, var: Var, array: Array) -> None:
        dtype = dtypes.as_dtype(array.dtype)
        if dtype is not var.type.dtype:
            raise DTypeError(self.mismatch(text, var, array))
        if array.ndim != var.type.ndim:
            raise ShapeError(self.mismatch(text, var, array))

    def mismatch(self, text: str, var: Var, array: Array) -> str:
        found = f"{dtypes.as_dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"
        return f"{self.name}: `{text}` is {var.type} in the program, and {found} here."

    def check_shapes(self, frame: Frame) -> None:
        texts = [
            text
            for i, text in enumerate(self.module.texts)
            if i not in self.module.constants and i not in self.module.numbers
        ]
        for text, var in zip(texts, self.module.graph.operands, strict=True):
            array = frame.values[var]
            if any(
                not _is_equal(frame.size(n), size)
                for n, size in zip(var.type.shape, array.shape, strict=True)
            ):
                raise ShapeError(self.mismatch(text, var, array))

    def check_constraints(self, frame: Frame) -> None:
        guards = self.module.guards.guards
        for guard, text in zip(guards, self.program.constraints, strict=True):
            holds = condition(guard.holds, frame.symbols.__getitem__)
            if isinstance(holds, library().core.Tracer):
                if self.translation.asserts == "checkify":
                    checkify = library().experimental.checkify
                    message = text.replace("{", "{{").replace("}", "}}")
                    checkify.check(holds, message)
            elif not holds:
                raise GuardError(
                    f"{self.name}: the program is not for these arguments: {text}"
                )


def _found(source: Source | ComputedSource, leaves: Sequence[Any]) -> Number:
    if isinstance(source, ComputedSource):
        inner = source.sources
        return number(source.size, lambda symbol: _found(inner[symbol], leaves))
    leaf = leaves[source.leaf]
    if source.axis is None:
        return leaf if isinstance(leaf, int | float) else library().numpy.asarray(leaf)
    size = leaf.shape[source.axis]
    if source.factor == 1 and not source.offset:
        return size
    return (size - source.offset) // source.factor


def _is_equal(expected: Number, size: Any) -> bool:
    return bool(expected == size)


# --- StableHLO ------------------------------------------------------------------------


def to_artifact(
    program: Exported, platforms: Sequence[str] | None, derivatives: int
) -> bytes:
    """The program as `jax.export` writes it.

    Raises:
        ExportError: JAX has nothing for it, or cannot have its symbols or pytrees.
    """
    jax = library()
    with jax.enable_x64(True):
        function = to_function(program, "drop")
        args, kwargs = _arguments(program)
        call = jax.jit(_without_constants(function))
        try:
            export = jax.export.export(call, platforms=platforms)
            return bytes(export(*args, **kwargs).serialize(vjp_order=derivatives))
        except (
            *(ValueError, NotImplementedError),
            jax.extend.core.InconclusiveDimensionOperation,
        ) as error:
            raise ExportError(f"to_stablehlo: {error}") from error


def _without_constants(function: JaxFunction) -> Any:
    """The function, which has its constants where a call has None."""
    module = function._definition.program.module

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = function.__signature__.bind(*args, **kwargs)
        rest = iter(pytree.flatten(tuple(bound.arguments.values()))[0])
        leaves = [
            module.constants[i].value if i in module.constants else next(rest)
            for i in range(module.in_spec.num_leaves)
        ]
        values = pytree.unflatten(module.in_spec, leaves)
        bound.arguments.update(zip(bound.arguments, values, strict=True))
        return function(*bound.args, **bound.kwargs)

    call.__name__ = function.__name__
    return call


def _arguments(program: Exported) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The types of the arguments, with symbolic dimensions for symbols."""
    module, signature = program.module, program.signature
    dimensions = _Dimensions(program)
    leaves = [
        None if x.kind == "constant" else dimensions.type_of(x)
        for x in signature.inputs
    ]
    values = pytree.unflatten(module.in_spec, leaves)
    count = signature.positional
    named = zip(signature.arguments[count:], values[count:], strict=True)
    return tuple(values[:count]), dict(named)


class _Dimensions:
    """The symbolic dimensions of `jax.export` for the sizes of a program's arguments,
    with its constraints on them."""

    def __init__(self, program: Exported) -> None:
        module = program.module
        symbols = {
            symbol: None
            for var in module.graph.operands
            for symbol in free_symbols(*var.type.shape)
        }
        self.names = _names(symbols)
        plain = self.made(())
        limits = [g.holds for g in module.guards.guards]
        self.known = self.made([t for h in limits for t in _texts(h, plain)])

    def made(self, constraints: Sequence[str]) -> dict[Symbol, Any]:
        names = ", ".join(self.names.values())
        shape = library().export.symbolic_shape
        found = shape(f"{names}," if names else "", constraints=constraints)
        return dict(zip(self.names, found, strict=True))

    def type_of(self, found: Input) -> Any:
        type_ = found.type or TensorType(dtypes.int64)
        shape = [number(n, self.known.__getitem__) for n in type_.shape]
        return library().ShapeDtypeStruct(shape, type_.dtype.dtype)


def _names(symbols: Iterable[Symbol]) -> dict[Symbol, str]:
    found: dict[Symbol, str] = {}
    for symbol in symbols:
        name = symbol.name if _NAME.fullmatch(symbol.name) else "n"
        while name in _RESERVED or name in found.values():
            name += "_"
        found[symbol] = name
    return found


_NAME: Final = re.compile("[A-Za-z][A-Za-z0-9_]*")
_RESERVED: Final = ("floordiv", "mod", "max", "min", "non_negative")


def _texts(holds: SymBool, known: Mapping[Symbol, Any]) -> list[str]:
    """A condition on dimensions as constraints; none if JAX has no such."""
    if holds.op == "and":
        return [text for part in holds.args for text in _texts(part, known)]
    if holds.op not in ("<=", ">=", "==") or not known.keys() >= {*holds.symbols}:
        return []
    terms, right = holds.args
    left = side(terms[:1], known.__getitem__)
    right -= side(terms[1:], known.__getitem__)
    is_symbolic = library().export.is_symbolic_dim(left)
    return [f"{left} {holds.op} {right}"] if is_symbolic else []
