"""Other libraries' names of hopflow's functions, for errors on unknown names."""

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
    conv1d conv2d conv3d conv_general_dilated convolve: conv
    conv_transpose1d conv_transpose2d conv_transpose3d: conv_transpose
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
"""Each line has names in other libraries, and hopflow's names for the same; `linalg.`
stands for the same name in that module."""


def unknown(name: str, public: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that `hopflow` does not have.

    Args:
        public: All public names.
    """
    return UnknownNameError(name, _synonyms(name) or _close(name, public))


def _synonyms(name: str) -> list[str]:
    """Return hopflow's names for what other libraries call `name`."""
    for line in _OTHERS.splitlines():
        foreign, _, names = line.partition(":")
        if name in foreign.split():
            return [
                f"{word}{name}" if word[-1] == "." else word for word in names.split()
            ]
    return []


_NOT_HERE = frozenset(
    """
    pmax pmean pmin psum ppermute pcast pvary
    addmm baddbmm scatter selu gelu celu softmax softmin logit trapz vander stft
    istft xlogy xlog1py entr ndtr betainc erfcx polygamma multigammaln pdist
    cdist cond_ scan_ fix frac lerp renorm narrow chunk masked_fill masked_select
    index_add index_copy named_scope named_call eval_shape ravel_pytree device_put
    device_get shard_map pure while_ for_ select_n custom_root sample seeds dist
    distributed save load
    """.split()
)
"""Names in other libraries that hopflow lacks: they are no typos of a similar name."""


def _close(name: str, public: Iterable[str]) -> list[str]:
    """Return the public names that differ from `name` by one typo."""
    # Private names are looked up by tools; NumPy's names are no typos.
    if name.startswith("_") or name in _NOT_HERE or hasattr(numpy, name):
        return []
    return [other for other in public if _is_typo(name.lower(), other.lower())][:2]


_LONG = 6
"""The least length of names of which one letter may be replaced."""


def _is_typo(name: str, other: str) -> bool:
    """Whether two names differ by an inserted or deleted letter, by two swapped letters
    that are adjacent, or, if they are long, by one replaced letter."""
    start = 0
    while start < min(len(name), len(other)) and name[start] == other[start]:
        start += 1
    left, right = name[start:], other[start:]
    if len(left) == len(right):
        is_swapped = left[:2] == right[:2][::-1] and left[2:] == right[2:]
        return is_swapped or (len(name) >= _LONG and left[1:] == right[1:])
    if len(left) > len(right):
        left, right = right, left
    return left == right[1:] and right[0].isalpha() | (right[0] == "_")
