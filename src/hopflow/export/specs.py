"""Example arguments as text, for the command `hopflow export`.

    f32[rows, 3]                    a tensor with a symbolic size
    {"w": f32[3, 2], "b": f32[2]}   a dict of tensors
    (f64[n], 0.5, "relu")           a tuple: a tensor, a number and a constant
    @x.npy                          an array that is saved

A spec is a Python expression of literals, containers, and dtypes with shapes in
brackets; `f32[]` is a scalar tensor. Names in a shape are symbolic sizes, and so is
`2*n + 1`.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.dtypes import DType, as_dtype
from hopflow.errors import ArgumentValueError, DTypeError
from hopflow.export.arrays import read_array
from hopflow.tensor import Tensor, asarray
from hopflow.trace.dims import Dim, Dynamic

_CLEAR_OF_SPECIAL_SIZES: Final = 5
"""The first example size. 0, 1 and small fixed sizes often have a path of their own."""
_SCALAR: Final = re.compile(r"""("[^"]*"|'[^']*')|\b(\w+)\[\]""")
"""A string, or a type without axes."""


class Example(NamedTuple):
    """An argument to export a function with, and which of its sizes are symbolic."""

    value: Any
    dynamic: Dynamic


class Specs:
    """Reads specs whose symbolic sizes have one meaning.

    dims   the declared sizes by name; a name that is not declared may have any size
    """

    def __init__(self, dims: Mapping[str, Dim]) -> None:
        self._dims = dict(dims)
        self._sizes: dict[str, int] = {}  # of the examples

    def read(self, text: str) -> Example:
        """Return the example that a spec describes.

        Raises:
            ArgumentValueError: `text` is no spec, or names no array file.
        """
        if text.startswith("@"):
            return Example(asarray(read_array(text[1:])), None)
        # `f32[]`, which types print, is no Python.
        expression = _SCALAR.sub(lambda m: m[1] or f"{m[2]}[()]", text.strip())
        try:
            return self._example(ast.parse(expression, mode="eval").body)
        except SyntaxError as error:
            raise _no_spec(text, error.msg) from None
        except (ArgumentValueError, DTypeError) as error:
            raise _no_spec(text, str(error)) from None
        except (RecursionError, MemoryError):
            raise _no_spec(text[:80], "it is nested too deep, or too large") from None

    def _example(self, tree: ast.expr) -> Example:
        match tree:
            case ast.Subscript(value=ast.Name(id=name), slice=shape):
                return self._tensor(name, shape)
            case ast.Tuple(elts=elements):
                values, plans = self._all(elements)
                return Example(tuple(values), tuple(plans))
            case ast.List(elts=elements):
                values, plans = self._all(elements)
                return Example(values, plans)
            case ast.Dict(keys=keys, values=elements):
                names = [None if k is None else _literal(k) for k in keys]
                values, plans = self._all(elements)
                return Example(
                    dict(zip(names, values, strict=True)),
                    dict(zip(names, plans, strict=True)),
                )
            case _:
                return Example(_literal(tree), None)

    def _all(self, elements: Sequence[ast.expr]) -> tuple[list[Any], list[Dynamic]]:
        examples = [self._example(element) for element in elements]
        return [e.value for e in examples], [e.dynamic for e in examples]

    def _tensor(self, name: str, shape: ast.expr) -> Example:
        dtype = as_dtype(name)
        extents = shape.elts if isinstance(shape, ast.Tuple) else [shape]
        sizes = [self._size(extent) for extent in extents]
        dims = [size if isinstance(size, Dim) else None for size in sizes]
        example = [
            size.of(self._sizes[size.name]) if isinstance(size, Dim) else size
            for size in sizes
        ]
        return Example(_zeros(example, dtype), dims if any(dims) else None)

    def _size(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=int(size)) if type(size) is int:
                return size
            case ast.Name(id=name):
                return self._dim(name)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._size(left), self._size(right)
                if isinstance(op, ast.Add) and int in (type(a), type(b)):
                    return a + b
                if isinstance(op, ast.Sub) and type(b) is int:
                    return a - b
                if isinstance(op, ast.Mult) and int in (type(a), type(b)):
                    return a * b
        raise ArgumentValueError(
            f"`{ast.unparse(tree)}` is no size; write 3, n, or a sum or product of a "
            "name and a number, as `2*n + 1`"
        )

    def _dim(self, name: str) -> Dim:
        dim = self._dims.setdefault(name, Dim(name))
        if name not in self._sizes:
            size = _CLEAR_OF_SPECIAL_SIZES + 2 * len(self._sizes)
            self._sizes[name] = int(min(max(size, dim.min), dim.max))
        return dim


def _zeros(shape: Sequence[int], dtype: DType) -> Tensor:
    """Return a tensor of zeros, whose memory is not touched."""
    if any(size < 0 for size in shape):
        raise ArgumentValueError(f"{list(shape)} is no shape: a size is negative")
    return asarray(np.zeros(shape, dtype.dtype))


def _literal(tree: ast.expr) -> Any:
    try:
        value = ast.literal_eval(tree)
    except ValueError:
        raise ArgumentValueError(
            f"`{ast.unparse(tree)}` is no literal, container or dtype with a shape"
        ) from None
    return value


def _no_spec(text: str, why: str) -> ArgumentValueError:
    return ArgumentValueError(
        f"`{text}` describes no argument: {why.rstrip('.')}. Examples: f32[rows, 3], "
        '{"w": f64[3]}, 0.5, True.'
    )
