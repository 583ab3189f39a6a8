"""Conditions on values from outside, which keep a trace that read them valid."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final
from weakref import ref

import numpy as np

from hopflow.bind import Value
from hopflow.dtypes import DType
from hopflow.pytree import exact_key
from hopflow.tensor import EagerTensor
from hopflow.trace.closures import type_key
from hopflow.trace.outside.paths import Path
from hopflow.trace.source import name_of

CONSTANTS: Final = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice),
    *(type(NotImplemented), np.generic, np.dtype, DType),
)
"""Immutable types whose values are compared by value."""


def is_same(a: Any, b: Any) -> bool:
    """Whether two constants have the same type and value: 1 is not True, 0.0 is not
    -0.0, and a NaN equals itself."""
    return type(a) is type(b) and bool(exact_key(a) == exact_key(b))


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """A condition on a value.

    kind    "constant"; "tensor": the type of a tensor with memory; "operand": the type
            of any tensor; "elements" of a tensor with memory; "array": dtype and shape;
            "content" of an array; "bytes" of a buffer; "class"; "code" of a function;
            "identity"; "alias": identity with the value at another path; "length";
            "keys"; "members" of a set; "lacks" an attribute; "lacks key"
    value   the expected value
    """

    kind: str
    value: Any

    def failure(
        self, v: str, hold: Callable[[Any], str], path: Callable[[Path], str]
    ) -> str:
        """Return Python code that is true if the condition fails for the variable `v`.

        Args:
            hold: A constant -> its name.
            path: A path -> the variable that has the value there.
        """
        match self.kind:
            case "alias":
                return f"{v} is not {path(self.value)}"
            case "constant":
                expected = hold(self.value)
                if self.value is None or isinstance(self.value, bool):
                    return f"{v} is not {expected}"
                return f"{v} is not {expected} and not {hold(is_same)}({v}, {expected})"
            case "tensor":
                expected = hold(self.value)
                other = f"({v}.type is not {expected} and {v}.type != {expected})"
                return f"type({v}) is not {hold(EagerTensor)} or {other}"
            case "operand":
                key = f"{hold(type_key)}({v}.type) != {hold(type_key(self.value))}"
                return f"not isinstance({v}, {hold(Value)}) or {key}"
            case "array":
                dtype, shape = map(hold, self.value)
                kind = f"type({v}) is not {hold(np.ndarray)}"
                return f"{kind} or {v}.dtype != {dtype} or {v}.shape != {shape}"
            case "content":
                return f"{v}.tobytes() != {hold(self.value)}"
            case "bytes":
                return f"{hold(bytes)}({v}) != {hold(self.value)}"
            case "elements":
                other = f"{hold(elements)}({v}) != {hold(self.value)}"
                return f"type({v}) is not {hold(EagerTensor)} or {other}"
            case "class":
                return f"type({v}) is not {hold(self.value)}"
            case "code":
                code, scope = map(hold, self.value)
                return f"{v}.__code__ is not {code} or {v}.__globals__ is not {scope}"
            case "identity":
                expected = hold(self.value)
                call = "()" if isinstance(self.value, ref) else ""
                return f"{expected}{call} is not {v}"
            case "length":
                return f"len({v}) != {self.value}"
            case "keys":
                return f"[*{v}] != {hold(self.value)}"
            case "members":
                return f"{v} != {hold(self.value)}"
            case "lacks":
                return f"hasattr({v}, {self.value!r})"
        assert self.kind == "lacks key", self.kind
        return f"{hold(self.value)} in {v}"

    @property
    def is_of_parts(self) -> bool:
        """Whether it is a condition on the contents of a value."""
        return self.kind in (
            "length",
            "keys",
            "members",
            "content",
            "bytes",
            "elements",
            "lacks",
            "lacks key",
        )

    def reason(self, text: str, value: Any) -> str:
        """Return why it fails for a value; `text` is the user's expression for it."""
        match self.kind:
            case "lacks":
                return f"`{text}` has an attribute `{self.value}` now"
            case "lacks key":
                return f"`{text}` has a key {self.value!r} now"
            case "length":
                return f"`{text}` had {self.value} items, and has {len(value)}"
            case "keys" | "members" | "content" | "bytes" | "elements":
                return f"what `{text}` contains has changed"
            case "alias":
                other = self.value.text()
                return f"`{text}` was the same object as `{other}`, and is another"
        before, after = self._expected(), described(value)
        if before == after or self.kind == "identity":
            return f"`{text}` is another {type(value).__name__} now"
        return f"`{text}` was {before}, and is {after}"

    def _expected(self) -> str:
        match self.kind:
            case "tensor" | "operand":
                return str(self.value)
            case "array":
                return f"a NumPy array of {self.value[0]}, shape {self.value[1]}"
            case "class":
                return f"of type {self.value.__name__}"
            case "code":
                return _function(self.value[0])
        return described(self.value)


def described(value: Any) -> str:
    """Return a description of a value, for an explanation."""
    if isinstance(value, Value):
        return str(value.type)
    if isinstance(value, np.ndarray):
        return f"a NumPy array of {value.dtype}, shape {value.shape}"
    if isinstance(value, CONSTANTS):
        return reprlib.repr(value)
    if isinstance(value, FunctionType | MethodType):
        return _function(value.__code__)
    if isinstance(value, BuiltinFunctionType | type):
        return f"`{name_of(value)}`"
    return f"of type {type(value).__name__}"


def _function(code: CodeType) -> str:
    file = code.co_filename.rsplit("/", 1)[-1]
    return f"the function `{code.co_name}` ({file}:{code.co_firstlineno})"


def elements(tensor: EagerTensor) -> bytes:
    """Return the elements of a tensor."""
    return tensor.host_array.tobytes()


def identity(value: Any) -> Check:
    """Return the check of identity with an object. It refers to the object weakly if
    possible, but never only by id, which may be reused."""
    is_light = isinstance(value, type | BuiltinFunctionType) or (
        isinstance(value, FunctionType) and value.__closure__ is None
    )
    if not is_light:
        try:
            return Check("identity", ref(value))
        except TypeError:
            pass
    return Check("identity", value)
