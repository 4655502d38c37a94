"""`swap_output_layer`: an `EntropyAwareOutputLayer` in the place of a model's output layer, and back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mcore_entropy.functional.arguments import checked_temperature_number
from mcore_entropy.megatron.arguments import EntropyConfig, config_from_args
from mcore_entropy.megatron.supported import check_model
from mcore_entropy.megatron.swapped_head import SWAP, Request, SwappedHead

# Arguments of Megatron-LM under which its own hooks or losses read the output layer's logits.
_TAKE_LOGITS = ("logits_save_dir", "logits_load_dir", "modelopt_enabled")


class SwapHandle:
    """What `swap_output_layer` did to a model or its chunks, to pass requests through and to undo it."""

    def __init__(self, config: EntropyConfig, heads: Sequence[SwappedHead]) -> None:
        self.config = config
        self._heads = tuple(heads)

    @contextmanager
    def request(
        self,
        *,
        mask: Tensor | None = None,
        temperature: float | Tensor | None = None,
        entropy: bool | None = None,
    ) -> Iterator[None]:
        """Pass what a micro-batch needs to the head, around ``model(..., labels=labels)``.

        A request inside another replaces it. A forward that `torch.utils.checkpoint` runs again in backward
        needs its request then too: where the whole model's call is checkpointed, open the request inside the
        checkpointed function. (Megatron's own recomputation leaves the head out, and needs nothing.)

        Args:
            mask: bool [b, s], as the labels; tokens where it is False give 0 and cost nothing.
            temperature: a number or [b, s]; None for the config's.
            entropy: whether to compute the entropy; None for the config's.

        Raises:
            ValueError: temperature or entropy is not of the kind above.
            RuntimeError: the stock head was restored; or the block ended, without another error, and the head
                never saw labels: what was asked for would have been ignored. Not on a stage without a head.
        """
        if any(not head.in_place for head in self._heads):
            raise RuntimeError("request: expected a swapped model, got one whose stock head was restored")
        if entropy is not None and not isinstance(entropy, bool):
            raise ValueError(f"entropy: expected True, False or None, got {entropy!r}")
        if temperature is not None and not isinstance(temperature, Tensor):
            temperature = checked_temperature_number(temperature)
        request = Request(mask, temperature, entropy)
        outer = [head.request for head in self._heads]
        for head in self._heads:
            head.request = request
        try:
            yield
        finally:
            for head, previous in zip(self._heads, outer, strict=True):
                head.request = previous
        if self._heads and not request.used:
            raise RuntimeError(
                "request: expected the model to be called with labels inside the block, outside of any inner "
                "request, and it was not; mask, temperature and entropy reach the head only there"
            )

    def restore(self) -> None:
        """Put the stock head back. Doing it twice does nothing.

        Raises:
            RuntimeError: something else has replaced what the swap put in place, and would be lost.
        """
        for head in self._heads:
            head.restore()


def swap_output_layer(model_or_chunks: nn.Module | Sequence[nn.Module], config: EntropyConfig) -> SwapHandle:
    """Make the output layer of a GPTModel or HybridModel an `EntropyAwareOutputLayer`, in place.

    Called with labels, the model then gives `TokenStatistics` in [b, s] instead of a loss (MTP losses stay
    what they were); without labels it gives the stock head's logits. Parameters, their names, checkpoints and
    tied weights do not change. Swapping again with an equal config changes nothing.

    Args:
        model_or_chunks: a GPTModel, HybridModel or MambaModel, wrapped (Float16Module,
            DistributedDataParallel) or not, or a list of model chunks. A pipeline stage without a head is
            left alone.
        config: how to compute the statistics.

    Returns:
        A handle to pass per-micro-batch requests through and to undo the swap.

    Raises:
        ValueError: the model or its head is of a kind that cannot be swapped, by name; nothing changes then.
    """
    if not isinstance(config, EntropyConfig):
        raise ValueError(f"config: expected an EntropyConfig, got {config!r}")
    chunks = [model_or_chunks] if isinstance(model_or_chunks, nn.Module) else list(model_or_chunks)
    models = [model for chunk in chunks if (model := _model_with_head(chunk)) is not None]
    swapped = [getattr(model, SWAP, None) for model in models]
    for model, head in zip(models, swapped, strict=True):
        _check_model(model, head, config)
    return SwapHandle(
        config, [head or SwappedHead(model, config) for model, head in zip(models, swapped, strict=True)]
    )


def swap_from_args(
    model_or_chunks: nn.Module | list[nn.Module], args: argparse.Namespace
) -> nn.Module | list[nn.Module]:
    """`swap_output_layer` if the arguments of `add_entropy_args` ask for it; gives the model or chunks back.

    Raises:
        ValueError: see `swap_output_layer` and `config_from_args`; or `args` also ask Megatron-LM for
            something that takes the head's logits.
    """
    config = config_from_args(args)
    if config is not None:
        for name in _TAKE_LOGITS:
            if getattr(args, name, None):
                raise ValueError(
                    f"{name}: expected it off, got {getattr(args, name)!r}; distillation takes the logits of "
                    "the output layer, and with the entropy-aware one there are none"
                )
        swap_output_layer(model_or_chunks, config)
    return model_or_chunks


def _model_with_head(chunk: Any) -> Any | None:
    """The model inside its wrappers; None on a stage without a head."""
    while not hasattr(chunk, "post_process") and isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    if not hasattr(chunk, "post_process"):
        raise ValueError(
            f"model: expected a Megatron GPTModel or a wrapper of one, got {type(chunk).__name__}"
        )
    return chunk if chunk.post_process else None


def _check_model(model: Any, head: SwappedHead | None, config: EntropyConfig) -> None:
    if head is not None:
        if head.config != config:
            raise ValueError(
                f"config: expected the one this model was swapped with, {head.config}, got {config}; call "
                "restore() on its handle first"
            )
        return
    check_model(model, config)
