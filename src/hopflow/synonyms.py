"""What other libraries call our functions, for who looks for them by those names."""

from collections.abc import Iterable

import numpy

from hopflow.errors import UnknownNameError

_OTHERS = """
    array as_array tensor as_tensor constant: asarray
    ndarray Array: Tensor
    bool_: bool
    half: float16
    single: float32
    double: float64
    short: int16
    long: int64
    identity: eye
    rand uniform: random.uniform
    randn normal: random.normal
    key PRNGKey manual_seed seed: random.key

    cumsum: cumulative_sum
    cumprod: cumulative_prod
    accumulate: associative_scan
    amax: max
    amin: min
    average: mean
    unique: unique_values
    argwhere flatnonzero: nonzero
    topk: top_k

    cat concatenate hstack: concat
    vstack dstack column_stack: stack concat
    unbind: unstack
    permute transpose: permute_dims
    flatten: ravel
    view: reshape
    unsqueeze: expand_dims
    expand: broadcast_to
    fliplr flipud: flip
    repeat_interleave: repeat
    gather: take_along_axis take
    index_select: take
    scatter_add: segment_sum

    dot inner: vecdot matmul
    mm bmm mv: matmul
    einsum: tensordot matmul
    norm: linalg.vector_norm linalg.matrix_norm
    inv cholesky det eigh qr svd solve pinv cross diagonal: linalg.
    diag: linalg.diagonal

    arccos: acos
    arccosh: acosh
    arcsin: asin
    arcsinh: asinh
    arctan: atan
    arctan2: atan2
    arctanh: atanh
    absolute fabs: abs
    clamp: clip
    expit: sigmoid
    gammaln loggamma: lgamma
    power: pow
    mod: remainder
    sub: subtract
    mul: multiply
    div true_divide: divide
    neg: negative
    eq: equal
    ne: not_equal
    lt: less
    le: less_equal
    gt: greater
    ge: greater_equal
    invert bitwise_not: bitwise_invert
    left_shift: bitwise_left_shift
    right_shift: bitwise_right_shift
    allclose: isclose
    array_equal: equal
    relu: maximum
    select: where

    compile: jit
    make_jaxpr: trace
    foreach: map
    vectorize pmap: vmap
    if_else ifelse: cond
    for_loop: fori_loop
    reduce: scan
    remat: checkpoint
    detach no_grad: stop_gradient
"""
"""A line: names elsewhere, and where it is here; in `linalg.` under the same name."""


def unknown(name: str, public: Iterable[str]) -> UnknownNameError:
    """The error for a name that `hopflow` does not have."""
    return UnknownNameError(name, _ours(name) or _close(name, public))


def _ours(name: str) -> list[str]:
    for line in _OTHERS.splitlines():
        theirs, _, ours = line.partition(":")
        if name in theirs.split():
            return [
                f"{word}{name}" if word[-1] == "." else word for word in ours.split()
            ]
    return []


_NOT_HERE = frozenset(
    """
    conv conv1d conv2d conv3d convolve pmax pmean pmin psum ppermute pcast pvary
    addmm baddbmm scatter selu gelu celu softmax softmin logit trapz vander stft
    istft xlogy xlog1py entr ndtr betainc erfcx polygamma multigammaln pdist
    cdist cond_ scan_ fix frac lerp renorm narrow chunk masked_fill masked_select
    index_add index_copy named_scope named_call eval_shape ravel_pytree device_put
    device_get shard_map pure while_ for_ select_n custom_root sample seeds dist
    distributed save load
    """.split()
)
"""What other libraries have, and hopflow does not: no slip, however close to a name."""


def _close(name: str, public: Iterable[str]) -> list[str]:
    """The names that differ by one slip of the fingers."""
    # Asked by a tool and not by a user, or the name of something else.
    if name.startswith("_") or name in _NOT_HERE or hasattr(numpy, name):
        return []
    return [ours for ours in public if _is_slip(name.lower(), ours.lower())][:2]


_LONG = 6
"""In a shorter name another letter makes another word."""


def _is_slip(name: str, ours: str) -> bool:
    """Whether two names differ by a letter that is missing, or too many; by two that
    have changed places; or, if they are long, by one that is another."""
    start = 0
    while start < min(len(name), len(ours)) and name[start] == ours[start]:
        start += 1
    left, right = name[start:], ours[start:]
    if len(left) == len(right):
        is_swapped = left[:2] == right[:2][::-1] and left[2:] == right[2:]
        return is_swapped or (len(name) >= _LONG and left[1:] == right[1:])
    if len(left) > len(right):
        left, right = right, left
    return left == right[1:] and right[0].isalpha() | (right[0] == "_")
