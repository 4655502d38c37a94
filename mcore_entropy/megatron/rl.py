"""What the patches of Megatron-RL (patches/megatron_rl) call: log-probs from sharded logits, true entropy.

b sequences, s tokens of each, H hidden size.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mcore_entropy.megatron.arguments import config_from_args
from mcore_entropy.megatron.arguments import (
    entropy_head_wanted as entropy_head_wanted,  # the patch imports it from here
)
from mcore_entropy.megatron.swap import swap_from_args
from mcore_entropy.statistics import TokenStatistics

_ENTROPY = "mcore_entropy_of_the_distribution"


def swap_for_rl(model_chunks: list[nn.Module], args: argparse.Namespace) -> list[nn.Module]:
    """`swap_from_args`, as a hook of the model's configuration (megatron-core 0.19 and newer).

    Raises:
        ValueError: see `swap_from_args`; or an argument is the pre-training loss's, which RL does not have;
            or the model is no GPTModel.
    """
    config = config_from_args(args)
    if config is not None:
        if config.entropy_coeff:
            raise ValueError(
                f"entropy_coeff: expected 0 in RL, got {config.entropy_coeff}; the weight of the entropy is "
                "--grpo-entropy-term-weight"
            )
        if config.metrics or config.log_interval > 1:
            raise ValueError(
                "metrics, log_interval: expected none and 1 in RL, whose loss reports the entropy alone, got "
                f"{config.metrics} and {config.log_interval}"
            )
        if not all(hasattr(chunk, "_postprocess") for chunk in model_chunks):
            raise ValueError(
                "model: expected a GPTModel, got one without _postprocess; RL's log-probs come from an "
                "output_processor, which a HybridModel does not have"
            )
        swap_from_args(model_chunks, args)
    return model_chunks


def token_log_probs(
    model: Any,
    tokens: Tensor,
    position_ids: Tensor,
    *,
    packed_seq_params: Any,
    no_grad: bool,
    args: argparse.Namespace,
) -> Tensor:
    """The log-prob of each token but the first, [b, s - 1] in fp32; hidden states on stages before the last.

    The logits are divided by ``--entropy-temperature``. Unless `no_grad`, the result carries the entropy, for
    `entropy_of`; with a ``--grpo-entropy-term-weight`` of 0 it is detached, and its gradient costs nothing.

    Args:
        model: a GPTModel of megatron-core 0.18 or newer whose head is swapped, in its wrappers.
        tokens, position_ids: [b, s].
        packed_seq_params: as the model takes it.
        no_grad: whether to build no graph, and leave the entropy out.
        args: Megatron's.
    """

    def statistics_of(
        *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, **_: Any
    ) -> TokenStatistics:
        # The last token has no successor: whatever stands there is cut off below.
        target = tokens.roll(-1, dims=1).transpose(0, 1).contiguous()
        statistics: TokenStatistics = output_layer(
            hidden_states, weight=output_weight, target=target, entropy=not no_grad
        )[0]
        return statistics

    # Labels would do as well, and give the MTP layers other ones than they have in RL.
    with _training_attention(model), torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
        output = model(
            tokens,
            position_ids,
            None,
            packed_seq_params=packed_seq_params,
            output_processor=statistics_of,
        )
        if not isinstance(output, TokenStatistics):
            return output  # type: ignore[no-any-return]
        log_probs = _without_last(output.log_probs)
        if output.entropy is not None:
            entropy = output.entropy if args.grpo_entropy_term_weight else output.entropy.detach()
            setattr(log_probs, _ENTROPY, _without_last(entropy))
        return log_probs


def entropy_of(log_probs: Tensor, otherwise: Tensor) -> Tensor:
    """The entropy [b, s - 1] that came with these log-probs of `token_log_probs`; `otherwise` if none did."""
    entropy: Tensor = getattr(log_probs, _ENTROPY, otherwise)
    return entropy


def log_probs_dtype(args: argparse.Namespace, otherwise: torch.dtype) -> torch.dtype:
    """What `token_log_probs` gives on every stage, where the swapped head is wanted."""
    return torch.float32 if entropy_head_wanted(args) else otherwise


def _without_last(values: Tensor) -> Tensor:
    """[s, b] as [b, s - 1]."""
    return values[:-1].transpose(0, 1).contiguous()


@contextlib.contextmanager
def _training_attention(model: Any) -> Iterator[None]:
    """Without flash decoding, which generation may have switched on for its own forwards."""
    decoding = model.config.flash_decode
    model.config.flash_decode = False
    try:
        yield
    finally:
        model.config.flash_decode = decoding
