"""verl's names for the entropy of logits that exist already, on a vocabulary that is not sharded.

[*, V] logits of any leading shape: packed [tokens, V] or padded [b, s, V].
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mcore_entropy.functional.arguments import check_bool, checked_chunk_size
from mcore_entropy.functional.logits import entropy_of_logits
from mcore_entropy.parallel import TensorParallelGroup


def entropy_from_logits(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Entropy in nats of every token's distribution.

    Args:
        logits: [*, V], bf16, fp16, fp32 or fp64, any strides; never changed. This rank has the whole
            vocabulary, whatever groups Megatron has.
        mask: bool [*]; tokens where it is False, such as padding, give 0 and get no gradient.

    Returns:
        [*], fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument does not fit.

    Saved for backward: the logits by reference, the mask, and three numbers a token. The gradient, in the
    logits' dtype, is computed from those in tiles: beside it there is no tensor of the logits' size, in
    forward or backward.
    """
    return _entropy(logits, mask, None)


def entropy_from_logits_with_chunking(
    logits: Tensor, chunk_size: int = 2048, *, mask: Tensor | None = None
) -> Tensor:
    """`entropy_from_logits`, at most `chunk_size` tokens at a time.

    The tokens are cut whatever the layout, [b, s, V] across sequences too. Memory hardly depends on it: the
    tiles are bounded without it, and a forward without a mask takes all tokens in one pass.
    """
    return _entropy(logits, mask, checked_chunk_size(chunk_size, default=2048))


def entropy_function(
    *,
    entropy_from_logits_with_chunking: bool = False,
    entropy_from_logits_chunk_size: int = 2048,
    entropy_checkpointing: bool = False,
) -> Callable[..., Tensor]:
    """What verl's options ask for, as one function ``(logits, *, mask=None)``.

    Args:
        entropy_from_logits_with_chunking: a chunk of tokens at a time.
        entropy_from_logits_chunk_size: tokens of a chunk, if there are chunks; with checkpointing too.
        entropy_checkpointing: compute the softmax again in backward instead of keeping it. It is never kept
            here: True asks for what False gets as well, at the same cost.

    Raises:
        ValueError: a value is not of its kind.
    """
    check_bool("entropy_from_logits_with_chunking", entropy_from_logits_with_chunking)
    check_bool("entropy_checkpointing", entropy_checkpointing)
    size = checked_chunk_size(entropy_from_logits_chunk_size, default=2048)
    chunk_size = size if entropy_from_logits_with_chunking else None

    def entropy(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return _entropy(logits, mask, chunk_size)

    return entropy


def _entropy(logits: Tensor, mask: Tensor | None, chunk_size: int | None) -> Tensor:
    one_rank = TensorParallelGroup.single_rank()
    return entropy_of_logits(logits, mask, 1.0, None, None, one_rank, chunk_size, None)
