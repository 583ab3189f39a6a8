"""hopflow: data-dependent control flow, first class in array programs.

`import hopflow as hf`. The tensor functions are those of the Python array API standard
(2024.12); other functions have the names that are common in the field.
"""

from importlib.metadata import version as _version
from math import e, inf, nan, pi
from sys import modules as _modules
from types import FunctionType as _FunctionType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from hopflow import bind as _bind
from hopflow import entries as _entries
from hopflow import fx, nn, random
from hopflow import synonyms as _synonyms
from hopflow.autograd.api import grad, jvp, linearize, value_and_grad, vjp
from hopflow.autograd.jacobian import hessian, jacfwd, jacrev
from hopflow.batching.api import vmap
from hopflow.bind import Handler as Interpreter
from hopflow.compiler.cpu.runtime import interrupt
from hopflow.compiler.pipeline import program as _compiled
from hopflow.config import config
from hopflow.dtypes import (
    bfloat16,
    can_cast,
    finfo,
    float16,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    uint8,
    uint16,
    uint32,
    uint64,
)
from hopflow.dtypes import bool_ as bool
from hopflow.export.api import export, load
from hopflow.export.program import ExportedProgram
from hopflow.fx.tracer import symbolic_trace
from hopflow.fx.wrapping import wrap
from hopflow.hops.associative_scan import associative_scan
from hopflow.hops.base import debug
from hopflow.hops.block_mask import BlockMask, create_block_mask
from hopflow.hops.checkpoint import checkpoint
from hopflow.hops.cond import cond
from hopflow.hops.custom import custom_jvp, custom_vjp
from hopflow.hops.flex_attention import flex_attention
from hopflow.hops.higher_order_op import HigherOrderOp
from hopflow.hops.invoke_subgraph import invoke_subgraph, subgraph
from hopflow.hops.map import map_ as map
from hopflow.hops.reverse_modes import Checkpoint
from hopflow.hops.scanning import scan
from hopflow.hops.schema import schema
from hopflow.hops.switch import switch
from hopflow.hops.while_loop import fori_loop, while_loop
from hopflow.jit import jit
from hopflow.ops import linalg
from hopflow.ops.check import check, check_is_size
from hopflow.ops.conv import conv, conv_transpose
from hopflow.ops.convert import astype, stop_gradient
from hopflow.ops.creation import (
    arange,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)
from hopflow.ops.dynamic import dynamic_slice, dynamic_update_slice
from hopflow.ops.elementwise import (
    abs,
    add,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    clip,
    conj,
    copy,
    copysign,
    divide,
    equal,
    floor,
    floor_divide,
    greater,
    greater_equal,
    imag,
    isclose,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    nan_to_num,
    negative,
    nextafter,
    not_equal,
    positive,
    pow,
    real,
    reciprocal,
    remainder,
    round,
    sign,
    signbit,
    square,
    subtract,
    trunc,
    where,
)
from hopflow.ops.indexing import take, take_along_axis
from hopflow.ops.manipulation import (
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    moveaxis,
    pad,
    permute_dims,
    ravel,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    swapaxes,
    tile,
    unstack,
)
from hopflow.ops.math import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cbrt,
    cos,
    cosh,
    digamma,
    erf,
    erfc,
    erfinv,
    exp,
    exp2,
    expm1,
    hypot,
    lgamma,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logistic,
    rsqrt,
    sigmoid,
    sin,
    sinh,
    sqrt,
    tan,
    tanh,
)
from hopflow.ops.matmul import matmul, matrix_transpose, outer, tensordot, vecdot
from hopflow.ops.normal import ndtri
from hopflow.ops.reduce import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    cummax,
    cummin,
    cumulative_prod,
    cumulative_sum,
    diff,
    logsumexp,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from hopflow.ops.scatter import one_hot, segment_sum
from hopflow.ops.searching import nonzero, searchsorted
from hopflow.ops.sets import unique_all, unique_counts, unique_inverse, unique_values
from hopflow.ops.sorting import argsort, sort, top_k
from hopflow.profile import Profile
from hopflow.reproduction import program as _program
from hopflow.rewrite.api import control_flow
from hopflow.stats import stats
from hopflow.tensor import Tensor, asarray, from_dlpack, from_numpy
from hopflow.tensor.info import API_VERSION as __array_api_version__
from hopflow.tensor.info import namespace_info as __array_namespace_info__
from hopflow.tensor.info import result_type
from hopflow.trace.callbacks import callback
from hopflow.trace.callbacks import print_ as print
from hopflow.trace.capture import spec, trace
from hopflow.trace.dims import Dim
from hopflow.trace.functionalize import functionalize
from hopflow.trace.marks import mark_dynamic, mark_unbacked

newaxis = None

# Operators may not import the compiler; this makes them run natively.
_bind.slots.program = _compiled
_entries.slots.program = _program

__all__ = [
    "BlockMask",
    "Checkpoint",
    "Dim",
    "ExportedProgram",
    "HigherOrderOp",
    "Interpreter",
    "Profile",
    "Tensor",
    "__array_api_version__",
    "__array_namespace_info__",
    "abs",
    "acos",
    "acosh",
    "add",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "asarray",
    "asin",
    "asinh",
    "associative_scan",
    "astype",
    "atan",
    "atan2",
    "atanh",
    "bfloat16",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "bool",
    "broadcast_arrays",
    "broadcast_to",
    "callback",
    "can_cast",
    "cbrt",
    "ceil",
    "check",
    "check_is_size",
    "checkpoint",
    "clip",
    "concat",
    "cond",
    "config",
    "conj",
    "control_flow",
    "conv",
    "conv_transpose",
    "copy",
    "copysign",
    "cos",
    "cosh",
    "count_nonzero",
    "create_block_mask",
    "cummax",
    "cummin",
    "cumulative_prod",
    "cumulative_sum",
    "custom_jvp",
    "custom_vjp",
    "debug",
    "diff",
    "digamma",
    "divide",
    "dynamic_slice",
    "dynamic_update_slice",
    "e",
    "empty",
    "empty_like",
    "equal",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expand_dims",
    "expm1",
    "export",
    "eye",
    "finfo",
    "flex_attention",
    "flip",
    "float16",
    "float32",
    "float64",
    "floor",
    "floor_divide",
    "fori_loop",
    "from_dlpack",
    "from_numpy",
    "full",
    "full_like",
    "functionalize",
    "fx",
    "grad",
    "greater",
    "greater_equal",
    "hessian",
    "hypot",
    "iinfo",
    "imag",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "interrupt",
    "invoke_subgraph",
    "isclose",
    "isdtype",
    "isfinite",
    "isinf",
    "isnan",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "less",
    "less_equal",
    "lgamma",
    "linalg",
    "linearize",
    "linspace",
    "load",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logistic",
    "logsumexp",
    "map",
    "mark_dynamic",
    "mark_unbacked",
    "matmul",
    "matrix_transpose",
    "max",
    "maximum",
    "mean",
    "meshgrid",
    "min",
    "minimum",
    "moveaxis",
    "multiply",
    "nan",
    "nan_to_num",
    "ndtri",
    "negative",
    "newaxis",
    "nextafter",
    "nn",
    "nonzero",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "outer",
    "pad",
    "permute_dims",
    "pi",
    "positive",
    "pow",
    "print",
    "prod",
    "random",
    "ravel",
    "real",
    "reciprocal",
    "remainder",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "rsqrt",
    "scan",
    "schema",
    "searchsorted",
    "segment_sum",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sort",
    "spec",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "stats",
    "std",
    "stop_gradient",
    "subgraph",
    "subtract",
    "sum",
    "swapaxes",
    "switch",
    "symbolic_trace",
    "take",
    "take_along_axis",
    "tan",
    "tanh",
    "tensordot",
    "tile",
    "top_k",
    "trace",
    "tril",
    "triu",
    "trunc",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "value_and_grad",
    "var",
    "vecdot",
    "vjp",
    "vmap",
    "where",
    "while_loop",
    "wrap",
    "zeros",
    "zeros_like",
]

# `fx` records calls of public functions.
for _space in (linalg, random):
    for _name in _space.__all__:
        if type(_function := getattr(_space, _name)) is _FunctionType:
            setattr(_space, _name, _bind.recordable(_function, _space.__name__))
for _name in set(__all__) - {"symbolic_trace", "wrap"}:
    if type(_function := globals()[_name]) is _FunctionType:
        globals()[_name] = _bind.public(_function)


# `import hopflow.linalg` works, although the module is `hopflow.ops.linalg`.
_modules["hopflow.linalg"] = linalg

if _TYPE_CHECKING:  # type checkers report unknown names themselves
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return _version("hopflow")
        raise _synonyms.unknown(name, __all__)

    def __dir__() -> list[str]:
        return sorted([*__all__, "__doc__", "__version__", "errors"])
