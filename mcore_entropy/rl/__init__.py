"""Small pieces that RL loops share: means over ranks, next-token targets, statistics of the entropy.

They need torch alone, and every process group is passed explicitly.
"""

from mcore_entropy.rl.context_parallel import (
    context_parallel_shard,
    context_parallel_unshard,
    cu_seqlens_of_shard,
)
from mcore_entropy.rl.entropy import EntropyStatistics, entropy_statistics
from mcore_entropy.rl.means import packed_sequence_mean, sequence_mean, token_count, token_mean
from mcore_entropy.rl.targets import next_token_targets, next_token_targets_of_shard

__all__ = [
    "EntropyStatistics",
    "context_parallel_shard",
    "context_parallel_unshard",
    "cu_seqlens_of_shard",
    "entropy_statistics",
    "next_token_targets",
    "next_token_targets_of_shard",
    "packed_sequence_mean",
    "sequence_mean",
    "token_count",
    "token_mean",
]
