"""Attention masks that know which blocks of scores they keep."""

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
from hopflow.hops.attention_blocks import EMPTY, FULL, PARTIAL, blocks_in, map_cells
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
    """A mask, and the kind of each block of scores; see `create_block_mask`.

    kinds       i8[b, h, n, m]: 0 where it keeps nothing of a block, 2 where it keeps
                all, else 1; `b` and `h` may be 1 where all elements or heads are alike
    mask_mod    (b, h, q_idx, kv_idx) -> bool[]
    block_size  the number of queries, and the number of keys, of a block
    lengths     the number of queries, and the number of keys
    """

    kinds: Any
    mask_mod: Callable[..., Any]
    block_size: tuple[int, int]
    lengths: tuple[Size, Size]

    def sparsity(self) -> Any:
        """Return the percentage of blocks that are skipped."""
        return 100 * mean(astype(self.kinds == EMPTY, dtypes.float32))


def _flatten(mask: BlockMask) -> tuple[Sequence[Any], Any, Sequence[str]]:
    return (mask.kinds,), (mask.mask_mod, mask.block_size, mask.lengths), ("kinds",)


def _unflatten(fields: Any, children: Iterable[Any]) -> BlockMask:
    [kinds] = children
    return BlockMask(kinds, *fields)


pytree.register(BlockMask, _flatten, _unflatten, by_name=True)


def cell_function(role: str, fn: Any, *first: str) -> Function:
    """Return a function that is called for each score.

    Raises:
        ArgumentTypeError: it is not a function.
    """
    require_callable("flex_attention", role, fn)
    names = (*first, "b", "h", "q_idx", "kv_idx")
    return Function(role, fn, names, lambda flat: fn(*flat))


def check_mask(op: str, function: Function, types: Sequence[TensorType]) -> None:
    """Check the result of a `mask_mod`.

    Raises:
        PredicateError: it is not one bool.
    """
    if len(types) != 1:
        raise PredicateError(
            f"{op}: {function.label} must return one bool scalar (bool[]), "
            f"and returns {', '.join(map(str, types)) or 'nothing'}."
        )
    check_scalar(op, f"the result of {function.label}", types[0], "b")


def check_fits(
    mask: Any, mask_mod: Any, shape: Sequence[Size], lengths: Sequence[Size]
) -> None:
    """Check that a block mask fits the shape of the results, and the lengths.

    Raises:
        ArgumentTypeError: it is not a `BlockMask`.
        ArgumentValueError: a `mask_mod` is passed beside it.
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
    sizes = (*mask.kinds.shape[:2], *mask.lengths)
    expected = (*shape[:2], *lengths)
    for i, (a, b) in enumerate(zip(sizes, expected, strict=True)):
        if not (i < 2 and equals(a, 1)) and not equals(a, b):
            raise ShapeError(
                "flex_attention: `block_mask` is for (examples, heads, queries, keys) "
                f"{sizes}, and there are {expected}. Make one for these sizes."
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
    """Return a mask for `flex_attention` with the kind of each block of scores.

    Blocks in which the mask keeps nothing are skipped, and in blocks that it keeps
    entirely it is not evaluated again. The result can be reused for several calls.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool[], all scalars: whether to keep a score.
        B, H: The batch size and the number of heads; None: all have the same mask.
        Q_LEN, KV_LEN: The numbers of queries and keys.
        BLOCK_SIZE: The numbers of queries and keys in a block: an int, or a pair.

    Raises:
        ArgumentTypeError: `mask_mod` is not a function, or a size is not an int.
        ArgumentValueError: a size is negative, or a block size is not positive.
        PredicateError: `mask_mod` does not return one bool.

    >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    >>> hf.create_block_mask(causal, None, None, 256, 256).kinds
    Tensor([[[[1, 0],
              [2, 1]]]], i8[1, 1, 2, 2])
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
        kept = map_cells(checked, head // heads, head % heads, *ends)
        keeps_all = all_of(logical_or(kept, logical_not(inside)))
        keeps_some = any_of(logical_and(kept, inside))
        return astype(
            where(keeps_all, FULL, where(keeps_some, PARTIAL, EMPTY)), dtypes.int8
        )

    def checked(*at: Any) -> Value:
        leaves, _ = flatten_results(name, function, function(at))
        check_mask(name, function, [x.type for x in leaves])
        return as_value(leaves[0])

    kinds = map_(kind, arange(batch * heads * n_q * n_kv))
    kinds = reshape(kinds, (batch, heads, n_q, n_kv))
    return BlockMask(kinds, mask_mod, block, lengths)


def _block_size(name: str, choice: Any) -> tuple[int, int]:
    pair = choice if isinstance(choice, tuple | list) else (choice, choice)
    if len(pair) != 2:
        raise ArgumentValueError(
            f"{name}: `BLOCK_SIZE` must be an int or a pair, and has {len(pair)} sizes."
        )
    q, kv = (as_integer(name, "BLOCK_SIZE", n) for n in pair)
    if min(q, kv) < 1:
        raise ArgumentValueError(
            f"{name}: `BLOCK_SIZE` must be positive, and is {choice}."
        )
    return q, kv
