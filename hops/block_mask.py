"""Masks of attention of which it is known what they keep of each block."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hopflow import dtypes, pytree
from hopflow.bind import Value
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    PredicateError,
    ShapeError,
)
from hopflow.graph.types import TensorType
from hopflow.hops.attention_blocks import EMPTY, FULL, PARTIAL, blocks_in, over
from hopflow.hops.base import check_scalar
from hopflow.hops.map import map_
from hopflow.hops.subgraphs import Function, flatten_results, require_callable
from hopflow.ops.convert import as_value, astype
from hopflow.ops.creation import arange
from hopflow.ops.elementwise import logical_and, logical_not, logical_or, minimum, where
from hopflow.ops.manipulation import expand_dims, reshape
from hopflow.ops.reduce import all as all_of
from hopflow.ops.reduce import any as any_of
from hopflow.ops.reduce import mean
from hopflow.ops.rules import as_integer, as_size
from hopflow.ops.sizes import equals
from hopflow.symbolic.size import Size

DEFAULT_BLOCK: Final = 128


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask, and what it keeps of each block; see `create_block_mask`.

    kinds       i8[b, h, n, m]: 0 where it keeps nothing of a block, 2 where all of it,
                else 1; `b` and `h` may be 1 where it is the same for all
    mask_mod    (b, h, q_idx, kv_idx) -> bool[]
    block_size  how many queries, and how many keys, a block has
    lengths     how many queries, and how many keys, there are
    """

    kinds: Any
    mask_mod: Callable[..., Any]
    block_size: tuple[int, int]
    lengths: tuple[Size, Size]

    def sparsity(self) -> Any:
        """The part of the blocks, in percent, that is skipped."""
        return 100 * mean(astype(self.kinds == EMPTY, dtypes.float32))


def _flatten(mask: BlockMask) -> tuple[Sequence[Any], Any, Sequence[str]]:
    return (mask.kinds,), (mask.mask_mod, mask.block_size, mask.lengths), ("kinds",)


def _unflatten(rest: Any, children: Iterable[Any]) -> BlockMask:
    [kinds] = children
    return BlockMask(kinds, *rest)


pytree.register(BlockMask, _flatten, _unflatten, by_name=True)


def cell_function(role: str, fn: Any, *first: str) -> Function:
    """A function that is called for one score.

    Raises:
        ArgumentTypeError: it is no function.
    """
    require_callable("flex_attention", role, fn)
    names = (*first, "b", "h", "q_idx", "kv_idx")
    return Function(role, fn, names, lambda flat: fn(*flat))


def check_mask(op: str, function: Function, types: Sequence[TensorType]) -> None:
    """Raises: PredicateError: a `mask_mod` has not returned one bool."""
    if len(types) != 1:
        raise PredicateError(
            f"{op}: {function.label} must return one bool scalar (bool[]), "
            f"and returns {', '.join(map(str, types)) or 'nothing'}."
        )
    check_scalar(op, f"the result of {function.label}", types[0], "b")


def check_fits(
    mask: Any, mask_mod: Any, shape: Sequence[Size], lengths: Sequence[Size]
) -> None:
    """Check a block mask for results of a shape and as many queries and keys.

    Raises:
        ArgumentTypeError: it is no `BlockMask`.
        ArgumentValueError: there is a `mask_mod` beside it.
        ShapeError: it is for other sizes.
    """
    if not isinstance(mask, BlockMask):
        raise ArgumentTypeError(
            "flex_attention: `block_mask` must be a `BlockMask`, and is "
            f"`{type(mask).__name__}`. Make one with `hf.create_block_mask`."
        )
    if mask_mod is not None:
        raise ArgumentValueError(
            "flex_attention: `block_mask` has a `mask_mod` of its own. Give one of "
            "the two."
        )
    own = (*mask.kinds.shape[:2], *mask.lengths)
    wanted = (*shape[:2], *lengths)
    for i, (a, b) in enumerate(zip(own, wanted, strict=True)):
        if not (i < 2 and equals(a, 1)) and not equals(a, b):
            raise ShapeError(
                "flex_attention: `block_mask` is for (examples, heads, queries, keys) "
                f"{own}, and there are {wanted}. Make one for these sizes."
            )


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    *,
    BLOCK_SIZE: Any = DEFAULT_BLOCK,
) -> BlockMask:
    """A mask for `flex_attention`, and what it keeps of each block of scores.

    Where it keeps nothing of a block that is skipped, and where it keeps all of one it
    is not asked again. It is worth keeping for several calls.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool[], all scalars: whether to keep a score.
        B, H: How many examples and heads there are; None: it is the same for all.
        Q_LEN, KV_LEN: How many queries and keys there are.
        BLOCK_SIZE: How many queries and keys a block has: an int, or a pair.

    Raises:
        ArgumentTypeError: `mask_mod` is no function, a size no int.
        ArgumentValueError: a size is negative, or that of blocks not positive.
        PredicateError: `mask_mod` returns something else than one bool.
    """
    name = "create_block_mask"
    function = cell_function("mask_mod", mask_mod)
    batch = 1 if B is None else as_size(name, B, "B")
    heads = 1 if H is None else as_size(name, H, "H")
    lengths = as_size(name, Q_LEN, "Q_LEN"), as_size(name, KV_LEN, "KV_LEN")
    size_q, size_kv = block = _block_size(name, BLOCK_SIZE)
    n_q, n_kv = map(blocks_in, lengths, block)

    def kind(at: Any) -> Any:
        row = at // n_kv
        head = row // n_q
        q = row % n_q * size_q + arange(size_q)
        kv = at % n_kv * size_kv + arange(size_kv)
        inside = logical_and(expand_dims(q < lengths[0], axis=1), kv < lengths[1])
        ends = minimum(q, lengths[0] - 1), minimum(kv, lengths[1] - 1)
        kept = over(checked, head // heads, head % heads, *ends)
        whole = all_of(logical_or(kept, logical_not(inside)))
        some = any_of(logical_and(kept, inside))
        return astype(where(whole, FULL, where(some, PARTIAL, EMPTY)), dtypes.int8)

    def checked(*at: Any) -> Value:
        found, _ = flatten_results(name, function, function(at))
        check_mask(name, function, [x.type for x in found])
        return as_value(found[0])

    kinds = map_(kind, arange(batch * heads * n_q * n_kv))
    kinds = reshape(kinds, (batch, heads, n_q, n_kv))
    return BlockMask(kinds, mask_mod, block, lengths)


def _block_size(name: str, given: Any) -> tuple[int, int]:
    pair = given if isinstance(given, tuple | list) else (given, given)
    if len(pair) != 2:
        raise ArgumentValueError(
            f"{name}: `BLOCK_SIZE` must be an int or a pair, and has {len(pair)} sizes."
        )
    q, kv = (as_integer(name, "BLOCK_SIZE", n) for n in pair)
    if min(q, kv) < 1:
        raise ArgumentValueError(
            f"{name}: `BLOCK_SIZE` must be positive, and is {given}."
        )
    return q, kv
