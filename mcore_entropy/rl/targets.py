"""The next token as each token's target: within its own sequence, and across context-parallel shards.

Rolling every shard on its own gives the last token of a chunk the first of a chunk that does not follow
it, and the log-probs there belong to other tokens.

T tokens of a row, R context-parallel ranks, n packed sequences.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.rl.arguments import check_cu_seqlens, check_group, check_mask
from mcore_entropy.rl.context_parallel import Chunks, Layout


def next_token_targets(
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: float = -100,
) -> Tensor:
    """The target of each token: its successor in its own sequence, or `ignore_index` where there is none.

    It takes whole sequences: before they are cut for context parallelism. After that, it is
    `next_token_targets_of_shard`.

    Args:
        tokens: [*, T] padded sequences, or packed ones: [T] or [1, T]. Any dtype: what belongs to the tokens,
            such as the mask of a response or advantages, comes to the places of their log-probs
            in the same way (with an ignore_index of 0).
        mask: bool [*, T], True for real tokens, on whichever side the padding is (Hugging Face's
            ``attention_mask.bool()``; from lengths, ``torch.arange(T) < lengths[:, None]``). A padding token
            is no target and has none. None: all are real.
        cu_seqlens: int32 or int64 [n + 1], where each packed sequence begins, and T; the bounds of the padded
            sequences where each is padded on its own. None: a row is a sequence.

    Returns:
        [*, T] in the dtype of `tokens`.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> next_token_targets(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    _check(tokens, mask, ignore_index)
    length = tokens.shape[-1]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, length, tokens.device)
    real = _real_tokens(tokens, mask, ignore_index)
    ends = _sequence_ends(cu_seqlens, length, tokens.device)
    return _real_tokens(real.roll(-1, dims=-1).masked_fill(ends, ignore_index), mask, ignore_index)


def next_token_targets_of_shard(
    tokens: Tensor,
    *,
    layout: Layout,
    cp_group: dist.ProcessGroup,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: float = -100,
) -> Tensor:
    """This rank's shard of `next_token_targets`, from its shard of the tokens.

    Args:
        tokens: [*, T / R], this rank's shard (`context_parallel_shard`), of the same shape on all ranks.
        layout: "zigzag" or "contiguous".
        cp_group: the context-parallel group; a rank's place in it is its place in the layout.
        mask: bool [*, T / R], True for real tokens.
        cu_seqlens: int32 or int64 [n + 1], bounds of packed sequences in the *whole* row, from 0 to T.

    Returns:
        [*, T / R] in the dtype of `tokens`.

    Raises:
        ValueError: an argument does not fit, or a length does not cut into equal chunks.

    Collectives: one all-gather of the first token of every chunk: n tokens a rank ("zigzag": 2 n) of packed
    sequences that are cut each on its own, else 1 (2) a row.
    """
    _check(tokens, mask, ignore_index)
    check_group("cp_group", cp_group)
    rank, size = dist.get_rank(cp_group), dist.get_world_size(cp_group)
    held = tokens.shape[-1]
    chunks = Chunks.of(layout, size, held * size, cu_seqlens, tokens.device)
    real = _real_tokens(tokens, mask, ignore_index)
    if not held:
        return tokens.clone()
    of_tokens = chunks.of_tokens(held)
    last_of_chunk = of_tokens != of_tokens.roll(-1)
    last_of_chunk[-1:].fill_(True)
    following = _following_first_tokens(real, chunks, rank, cp_group).flatten(-2)
    targets = torch.where(last_of_chunk, following[..., of_tokens], real.roll(-1, dims=-1))
    ends = _sequence_ends(cu_seqlens, held * size, tokens.device)[chunks.positions(rank, held)]
    return _real_tokens(targets.masked_fill(ends, ignore_index), mask, ignore_index)


def _following_first_tokens(tokens: Tensor, chunks: Chunks, rank: int, cp_group: dist.ProcessGroup) -> Tensor:
    """The first token of the chunk that follows each of this rank's, [*, parts, chunks].

    Behind the last chunk of a part comes its first one: a sequence ends there, and what stands there is
    ignored.
    """
    # A part without tokens has no first one, and nothing asks for it.
    firsts = tokens[..., chunks.first_positions().clamp(max=tokens.shape[-1] - 1)].contiguous()
    everyone = firsts.new_empty(len(chunks.of_rank), *firsts.shape)
    dist.all_gather_into_tensor(everyone.view(-1), firsts.view(-1), group=cp_group)
    by_number = {
        number: everyone[other][..., i]
        for other, numbers in enumerate(chunks.of_rank)
        for i, number in enumerate(numbers)
    }
    mine = chunks.of_rank[rank]
    return torch.stack([by_number[(number + 1) % chunks.per_part] for number in mine], -1)


def _check(tokens: Tensor, mask: Tensor | None, ignore_index: float) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() == 0:
        raise ValueError(f"tokens: expected a tensor [*, T], got {tokens!r}")
    _check_ignore_index(ignore_index, tokens.dtype)
    if mask is not None:
        check_mask(mask, tokens, "tokens")


def _check_ignore_index(ignore_index: object, dtype: torch.dtype) -> None:
    """Raise ValueError unless the dtype holds the number: -100 among uint8 tokens would be token 156."""
    if not isinstance(ignore_index, (int, float)):
        raise ValueError(f"ignore_index: expected a number, got {ignore_index!r}")
    if dtype == torch.bool and ignore_index not in (0, 1):
        raise ValueError(f"ignore_index: expected False or True among bool tokens, got {ignore_index!r}")
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        return
    limits = torch.iinfo(dtype)
    if not limits.min <= ignore_index <= limits.max or ignore_index != int(ignore_index):
        raise ValueError(
            f"ignore_index: expected a number that tokens of {dtype} can hold, got {ignore_index!r}; "
            "tokens.long() holds -100"
        )


def _real_tokens(tokens: Tensor, mask: Tensor | None, ignore_index: float) -> Tensor:
    return tokens if mask is None else tokens.masked_fill(~mask, ignore_index)


def _sequence_ends(cu_seqlens: Tensor | None, length: int, device: torch.device) -> Tensor:
    """bool [T]: the last token of every sequence."""
    ends = torch.zeros(length, dtype=torch.bool, device=device)
    if length:
        ends[-1:].fill_(True)  # not an assignment, which brings True to a GPU by a host sync
        if cu_seqlens is not None:
            # Sequences without tokens at the very beginning give -1: the row's last token, an end as well.
            ends.scatter_(0, (cu_seqlens[1:].long() - 1) % length, True)
    return ends
