"""The user's array: `Tensor` for any value, `EagerTensor` with memory, and `Eager`."""

import sys
from types import ModuleType
from typing import Any, NoReturn

from hopflow.errors import ArgumentTypeError
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


class _Folder(ModuleType):
    """This module; a call, as of `torch.tensor`, raises an error with the remedy."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ArgumentTypeError(
            "`hf.tensor` is a module. Make tensors by `hf.asarray`."
        )


sys.modules[__name__].__class__ = _Folder
