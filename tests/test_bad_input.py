"""Every public function, given wrong arguments, raises an error of ours.

`CALLS` has a good call for each public callable. Each argument in turn is replaced by
each of `BAD`: the call works or raises a `HopflowError`, and never anything else.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import HopflowError
from hopflow.ops.opdef import OpDef
