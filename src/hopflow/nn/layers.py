"""Common layers. The class method `init` makes one from a random key and sizes.

Weights are multiplied from the right, `x @ weight`, so they are f[inputs, outputs].
"""

import math
from typing import Any, ClassVar, Final, Self

from hopflow.bind import Value, public
from hopflow.dtypes import DTypeLike, finfo
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError, HopflowError
from hopflow.nn.module import Module, static
from hopflow.ops import indexing, logic, manipulation
from hopflow.ops.creation import ones, zeros
from hopflow.ops.math import exp, sigmoid, sqrt, tanh
from hopflow.ops.rules import as_flag, as_integer
from hopflow.random import normal, split, uniform

# The public functions, so that a trace into a layer records `hf.take`.
take: Final = public(indexing.take)
where: Final = public(logic.where)
swapaxes: Final = public(manipulation.swapaxes)


def _size(layer: str, argument: str, value: Any) -> int:
    """Return an argument that is a size, at least 1."""
    size = as_integer(layer, argument, value)
    if size < 1:
        raise ArgumentValueError(
            f"{layer}: `{argument}` must be at least 1, and is {size}."
        )
    return size


def _bounded(key: Any, shape: tuple[int, ...], fan: int, dtype: DTypeLike) -> Value:
    """Return weights uniform in ±1/sqrt(fan), as in PyTorch."""
    bound = 1.0 / math.sqrt(fan)
    return uniform(key, shape, dtype, minval=-bound, maxval=bound)


class _Layer(Module):
    """A module of tensors and layers, which rejects sizes in their place."""

    @entry
    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ArgumentTypeError: a parameter is a number, a string or a container.
        """
        for name in self._data:
            value = getattr(self, name)
            if isinstance(value, _NO_PARAMETERS):
                layer = type(self).__name__
                raise ArgumentTypeError(
                    f"{layer}: `{name}` must be a tensor or a layer, and is {value!r} "
                    f"(`{type(value).__name__}`). A layer is given its parameters; "
                    f"`{layer}.init(key, ...)` makes them, of sizes."
                )

    def _check(self, **arrays: Any) -> None:
        """Check the tensors that a call computes with.

        Raises:
            ArgumentTypeError: one of `arrays`, by name of the argument or parameter, is
                no tensor.
        """
        for name, value in arrays.items():
            if not hasattr(value, "shape") and not isinstance(value, int | float):
                raise ArgumentTypeError(
                    f"{type(self).__name__}: `{name}` must be a tensor, and is "
                    f"`{type(value).__name__}`."
                )


_NO_PARAMETERS: Final = (bool, int, float, complex, str, list, tuple, dict)


class Linear(_Layer):
    """The affine map `x @ weight + bias`.

    Shapes:
        weight   f[inputs, outputs]
        bias     f[outputs], or None
        x        f[*s, inputs] -> f[*s, outputs]

    >>> layer = hf.nn.Linear.init(hf.random.key(0), 3, 2)
    >>> layer(hf.ones((5, 3))).shape
    (5, 2)
    """

    is_leaf: ClassVar[bool] = True
    weight: Any
    bias: Any = None

    @classmethod
    def init(
        cls,
        key: Any,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        dtype: DTypeLike = "float32",
    ) -> Self:
        """Return a layer of these sizes, with parameters uniform in ±1/sqrt(inputs).

        Raises:
            ArgumentTypeError, ArgumentValueError: a size is no positive integer.
        """
        inputs = _size("Linear.init", "inputs", inputs)
        outputs = _size("Linear.init", "outputs", outputs)
        first, second = split(key)
        weight = _bounded(first, (inputs, outputs), inputs, dtype)
        if not as_flag("Linear.init", "bias", bias):
            return cls(weight)
        return cls(weight, _bounded(second, (outputs,), inputs, dtype))

    def forward(self, x: Any) -> Any:
        """Return `x @ weight + bias`.

        Raises:
            ArgumentTypeError: `x` or the weight is no tensor.
        """
        self._check(x=x, weight=self.weight)
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Embedding(_Layer):
    """A table that maps each id to a row of `weight`.

    Shapes:
        weight   f[count, size]
        ids      i[*s] -> f[*s, size]

    >>> layer = hf.nn.Embedding.init(hf.random.key(0), 10, 4)
    >>> layer(hf.asarray([1, 7, 7])).shape
    (3, 4)
    """

    is_leaf: ClassVar[bool] = True
    weight: Any

    @classmethod
    def init(
        cls, key: Any, count: int, size: int, *, dtype: DTypeLike = "float32"
    ) -> Self:
        """Return a table of `count` rows, normal with variance 1."""
        shape = (
            _size("Embedding.init", "count", count),
            _size("Embedding.init", "size", size),
        )
        return cls(normal(key, shape, dtype))

    def forward(self, ids: Any) -> Any:
        """Return the rows of these ids."""
        return take(self.weight, ids, axis=0)


class LayerNorm(_Layer):
    """Normalise to mean 0 and variance 1 along the last axis, then scale and shift.

    Shapes:
        weight, bias   f[size]
        x              f[*s, size] -> f[*s, size]

    >>> layer = hf.nn.LayerNorm.init(4)
    >>> layer(hf.zeros((2, 4))).shape
    (2, 4)
    """

    is_leaf: ClassVar[bool] = True
    weight: Any
    bias: Any
    epsilon: float = static(default=1e-5)

    @classmethod
    def init(
        cls, size: int, *, epsilon: float = 1e-5, dtype: DTypeLike = "float32"
    ) -> Self:
        """Return a layer of this size whose scale is 1 and shift is 0."""
        size = _size("LayerNorm.init", "size", size)
        if not isinstance(epsilon, float | int) or not 0 <= epsilon < math.inf:
            raise ArgumentValueError(
                "LayerNorm.init: `epsilon` must be a number that is not negative, and "
                f"is {epsilon!r}."
            )
        return cls(ones(size, dtype=dtype), zeros(size, dtype=dtype), float(epsilon))

    def forward(self, x: Any) -> Any:
        """Return `x`, normalised, times `weight`, plus `bias`.

        Raises:
            ArgumentTypeError: `x` or a parameter is no tensor.
        """
        self._check(x=x, weight=self.weight, bias=self.bias)
        centered = x - x.mean(axis=-1, keepdims=True)
        variance = (centered * centered).mean(axis=-1, keepdims=True)
        return centered / sqrt(variance + self.epsilon) * self.weight + self.bias


class _Cell(_Layer):
    """The base of recurrent cells: a step from a state and an input.

    Shapes:
        input_weight    f[inputs, gates * size]
        state_weight    f[size, gates * size]
        input_bias, state_bias   f[gates * size]
    """

    is_leaf: ClassVar[bool] = True
    gates: ClassVar[int]
    input_weight: Any
    state_weight: Any
    input_bias: Any
    state_bias: Any

    @classmethod
    def init(
        cls, key: Any, inputs: int, size: int, *, dtype: DTypeLike = "float32"
    ) -> Self:
        """Return a cell of these sizes, with parameters uniform in ±1/sqrt(size)."""
        name = f"{cls.__name__}.init"
        inputs, size = _size(name, "inputs", inputs), _size(name, "size", size)
        width = cls.gates * size
        shapes = ((inputs, width), (size, width), (width,), (width,))
        parts = [
            _bounded(k, shape, size, dtype)
            for k, shape in zip(split(key, 4), shapes, strict=True)
        ]
        return cls(*parts)

    def _affine(self, x: Any, h: Any) -> tuple[Any, Any]:
        """Return the gates' contributions of an input and of a state.

        Raises:
            ArgumentTypeError: an argument or a parameter is no tensor.
        """
        self._check(x=x, h=h, **{name: getattr(self, name) for name in self._data})
        from_input = x @ self.input_weight + self.input_bias
        return from_input, h @ self.state_weight + self.state_bias

    def _parts(self, y: Any) -> list[Any]:
        """Split `y`, in which the gates are concatenated, into the gates."""
        size = self.state_weight.shape[0]
        return [y[..., k * size : (k + 1) * size] for k in range(self.gates)]


class GRUCell(_Cell):
    """A step of a gated recurrent unit, as in PyTorch and cuDNN.

        r = sigmoid(x Wr + br + h Ur + cr)
        z = sigmoid(x Wz + bz + h Uz + cz)
        n = tanh(x Wn + bn + r * (h Un + cn))
        h' = (1 - z) * n + z * h

    Shapes:
        h   f[*s, size]
        x   f[*s, inputs] -> f[*s, size]

    >>> cell = hf.nn.GRUCell.init(hf.random.key(0), 3, 4)
    >>> cell(hf.zeros((2, 4)), hf.ones((2, 3))).shape
    (2, 4)
    """

    gates: ClassVar[int] = 3

    def forward(self, h: Any, x: Any) -> Any:
        """Return the next state.

        Raises:
            ArgumentTypeError: an argument or a parameter is no tensor.
        """
        from_input, from_state = self._affine(x, h)
        reset, update, new = self._parts(from_input)
        r, z, n = self._parts(from_state)
        r, z = sigmoid(reset + r), sigmoid(update + z)
        n = tanh(new + r * n)
        return n + z * (h - n)


class LSTMCell(_Cell):
    """A step of a long short-term memory, as in PyTorch and cuDNN.

        i, f, o = sigmoid(x W + b + h U + c), for each of the three
        g = tanh(x Wg + bg + h Ug + cg)
        c' = f * c + i * g
        h' = o * tanh(c')

    Shapes:
        state   (h, c), both f[*s, size]
        x       f[*s, inputs] -> (h', c')

    >>> cell = hf.nn.LSTMCell.init(hf.random.key(0), 3, 4)
    >>> h, c = cell((hf.zeros((2, 4)), hf.zeros((2, 4))), hf.ones((2, 3)))
    >>> h.shape
    (2, 4)
    """

    gates: ClassVar[int] = 4

    def forward(self, state: Any, x: Any) -> Any:
        """Return the next state, (h', c').

        Raises:
            ArgumentTypeError: an argument or a parameter is no tensor, or `state` is no
                pair of tensors.
        """
        try:
            h, c = state
        except HopflowError:
            raise
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                "LSTMCell: `state` must be a pair of tensors (h, c), and is "
                f"`{type(state).__name__}`."
            ) from None
        self._check(c=c)
        from_input, from_state = self._affine(x, h)
        i, f, g, o = self._parts(from_input + from_state)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        return sigmoid(o) * tanh(c), c


class MultiheadAttention(_Layer):
    """Attention with several heads, each over a part of the features.

    Shapes:
        query         f[*s, n, size]
        key, value    f[*s, m, size]; None: the query
        mask          bool, broadcast to [*s, heads, n, m]: True where a query attends
        result        f[*s, n, size]

    A query whose mask is all False attends to all keys equally.

    >>> layer = hf.nn.MultiheadAttention.init(hf.random.key(0), 8, 2)
    >>> layer(hf.ones((5, 8))).shape
    (5, 8)
    """

    is_leaf: ClassVar[bool] = True
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    heads: int = static()

    @classmethod
    def init(
        cls,
        key: Any,
        size: int,
        heads: int,
        *,
        bias: bool = True,
        dtype: DTypeLike = "float32",
    ) -> Self:
        """Return a layer with this many features, `size`, and heads.

        Raises:
            ArgumentValueError: `heads` does not divide `size`.
        """
        size = _size("MultiheadAttention.init", "size", size)
        heads = _size("MultiheadAttention.init", "heads", heads)
        if size % heads:
            raise ArgumentValueError(
                f"MultiheadAttention.init: `heads` must divide `size`, and {heads} "
                f"does not divide {size}."
            )
        query, key, value, out = (
            Linear.init(k, size, size, bias=bias, dtype=dtype) for k in split(key, 4)
        )
        return cls(query, key, value, out, heads)

    def forward(
        self, query: Any, key: Any = None, value: Any = None, mask: Any = None
    ) -> Any:
        """Return the attention of the queries; see the class for shapes."""
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self.query(query), self.key(key), self.value(value)
        q, k, v = self._split(q), self._split(k), self._split(v)
        size = self.query.weight.shape[1] // self.heads
        scores = q @ swapaxes(k, -1, -2) * (1.0 / math.sqrt(size))
        if mask is not None:
            lowest = finfo(self.query.weight.dtype).min
            scores = where(mask, scores, lowest)
        weights = exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        mixed = swapaxes(weights @ v, -2, -3)
        return self.out(_reshaped(mixed, 2, (self.heads * size,)))

    def _split(self, x: Any) -> Any:
        """Split the heads: f[*s, n, size] -> f[*s, heads, n, size / heads]."""
        return swapaxes(_reshaped(x, 1, (self.heads, -1)), -2, -3)


def _reshaped(x: Any, count: int, sizes: tuple[int, ...]) -> Any:
    """Return `x` with its last `count` sizes replaced by `sizes`.

    A tuple can be added to the shape of a proxy, which cannot be unpacked.
    """
    return x.reshape(x.shape[:-count] + sizes)


class Function(Module):
    """A function without parameters, such as `hf.tanh`, as a module."""

    function: Any = static()

    @entry
    def __post_init__(self) -> None:
        """Check the function.

        Raises:
            ArgumentTypeError: `function` is not callable.
        """
        if not callable(self.function):
            raise ArgumentTypeError(
                "Function: `function` must be a function, and is "
                f"`{type(self.function).__name__}`."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the function."""
        return self.function(*args, **kwargs)


class Sequential(Module):
    """A chain of modules and functions, each of which takes the previous result.

    >>> first, second = hf.random.split(hf.random.key(0))
    >>> net = hf.nn.Sequential(
    ...     hf.nn.Linear.init(first, 4, 8), hf.tanh, hf.nn.Linear.init(second, 8, 1)
    ... )
    >>> net(hf.ones((3, 4))).shape
    (3, 1)
    """

    layers: tuple[Any, ...]

    @entry
    def __init__(self, *layers: Any) -> None:
        """Create a chain of these layers.

        Raises:
            ArgumentTypeError: a layer is not callable.
        """
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise ArgumentTypeError(
                    f"Sequential: layer {i} must be a module or a function, and is "
                    f"`{type(layer).__name__}`."
                )
        modules = [f if isinstance(f, Module) else Function(f) for f in layers]
        # Modules are frozen dataclasses.
        object.__setattr__(self, "layers", tuple(modules))

    def forward(self, x: Any) -> Any:
        """Return the result of the last layer."""
        for layer in self.layers:
            x = layer(x)
        return x
