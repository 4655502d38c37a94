"""Exact per-token log-probability and entropy when the vocabulary is sharded over tensor-parallel ranks."""

from typing import TYPE_CHECKING, Any

from mcore_entropy.config import EntropyConfig
from mcore_entropy.execution import Execution
from mcore_entropy.functional.linear import linear_log_probs_and_entropy
from mcore_entropy.functional.logits import (
    VocabParallelEntropy,
    vocab_parallel_entropy,
    vocab_parallel_entropy_with_chunking,
    vocab_parallel_log_probs_and_entropy,
)
from mcore_entropy.statistics import LogitTransform, TokenStatistics

if TYPE_CHECKING:
    from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer as EntropyAwareOutputLayer
    from mcore_entropy.megatron.swap import swap_output_layer as swap_output_layer

__version__ = "0.1.0"

# Without the two names that need megatron-core (see __getattr__), so that `import *` works without it.
__all__ = [
    "EntropyConfig",
    "Execution",
    "LogitTransform",
    "TokenStatistics",
    "VocabParallelEntropy",
    "linear_log_probs_and_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_and_entropy",
]


def __dir__() -> list[str]:
    return [*__all__, "EntropyAwareOutputLayer", "swap_output_layer", "__version__"]


def __getattr__(name: str) -> Any:
    # These need megatron-core, which `import mcore_entropy` does not.
    if name == "EntropyAwareOutputLayer":
        from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer

        return EntropyAwareOutputLayer
    if name == "swap_output_layer":
        from mcore_entropy.megatron.swap import swap_output_layer

        return swap_output_layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
