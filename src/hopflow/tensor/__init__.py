"""The user's array: `Tensor` for any value, `EagerTensor` with memory, and `Eager`."""

from hopflow.tensor.base import Tensor
from hopflow.tensor.convert import asarray, from_dlpack, from_numpy, scalar
from hopflow.tensor.eager import Eager, EagerTensor
from hopflow.tensor.memory import Storage

__all__ = [
    "Eager",
    "EagerTensor",
    "Storage",
    "Tensor",
    "asarray",
    "from_dlpack",
    "from_numpy",
    "scalar",
]
