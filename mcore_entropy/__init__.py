"""Exact per-token log-probability and entropy when the vocabulary is sharded over tensor-parallel ranks."""

from typing import TYPE_CHECKING, Any

from mcore_entropy.execution import Execution
from mcore_entropy.functional.linear import linear_log_probs_and_entropy
from mcore_entropy.functional.logits import (
    VocabParallelEntropy,
    vocab_parallel_entropy,
    vocab_parallel_entropy_with_chunking,
    vocab_parallel_log_probs_and_entropy,
)
from mcore_entropy.megatron.arguments import EntropyConfig
from mcore_entropy.statistics import LogitTransform, TokenStatistics

if TYPE_CHECKING:
    from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer
    from mcore_entropy.megatron.swap import swap_output_layer

__version__ = "0.1.0"

__all__ = [
    "EntropyAwareOutputLayer",
    "EntropyConfig",
    "Execution",
    "LogitTransform",
    "TokenStatistics",
    "VocabParallelEntropy",
    "linear_log_probs_and_entropy",
    "swap_output_layer",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_and_entropy",
]


def __getattr__(name: str) -> Any:
    # These need megatron-core, which `import mcore_entropy` does not.
    if name == "EntropyAwareOutputLayer":
        from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer

        return EntropyAwareOutputLayer
    if name == "swap_output_layer":
        from mcore_entropy.megatron.swap import swap_output_layer

        return swap_output_layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
