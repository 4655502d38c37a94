"""`swap_output_layer`: an `EntropyAwareOutputLayer` in the place of a GPTModel's output layer, and back.

Three things of one model instance change: the class of its output_layer, and its methods `_postprocess` and
`compute_language_model_loss`. docs/decisions/0002-hook.md says why these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.arguments import checked_temperature_number
from mcore_entropy.megatron.arguments import EntropyConfig, config_from_args
from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer, PendingCall, check_supported
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import TokenStatistics

_SWAP = "_mcore_entropy_swap"
# Arguments of Megatron-LM under which its own hooks or losses read the output layer's logits.
_TAKE_LOGITS = ("logits_save_dir", "logits_load_dir", "modelopt_enabled")


@dataclass
class _Request:
    """What `SwapHandle.request` was given, and whether a forward has used it."""

    mask: Tensor | None
    temperature: float | Tensor | None
    entropy: bool | None
    used: bool = False


class SwapHandle:
    """What `swap_output_layer` did to a model or its chunks, to pass requests through and to undo it."""

    def __init__(self, config: EntropyConfig, heads: Sequence[_SwappedHead]) -> None:
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
        request = _Request(mask, temperature, entropy)
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
                "request: expected the model to be called with labels inside the block, and it was not; "
                "mask, temperature and entropy reach the head only there"
            )

    def restore(self) -> None:
        """Put the stock head back. Doing it twice does nothing.

        Raises:
            RuntimeError: something else has replaced what the swap put in place, and would be lost.
        """
        for head in self._heads:
            head.restore()


class _SwappedHead:
    """One GPTModel whose head is ours."""

    def __init__(self, model: Any, config: EntropyConfig) -> None:
        self.model = model
        self.config = config
        self.request: _Request | None = None
        self._postprocess = model._postprocess
        self._compute_language_model_loss = model.compute_language_model_loss
        layer = model.output_layer
        layer.__class__ = EntropyAwareOutputLayer
        layer.entropy_config = config
        self._replaced = {
            "_postprocess": self._postprocess_with_target,
            "compute_language_model_loss": self._loss_or_statistics,
        }
        for name, method in self._replaced.items():
            setattr(model, name, method)
        setattr(model, _SWAP, self)

    def restore(self) -> None:
        if not self.in_place:
            return  # done before, perhaps by another handle of the same swap
        for name, ours in self._replaced.items():
            if vars(self.model).get(name) != ours:
                raise RuntimeError(
                    f"restore: expected the model's {name} to be the one that the swap put in place, got "
                    "another; undo what replaced it first"
                )
        layer = self.model.output_layer
        layer.__class__ = EntropyAwareOutputLayer.__base__
        for name in ("entropy_config", "pending_call"):
            vars(layer).pop(name, None)
        for name in self._replaced:
            delattr(self.model, name)  # an instance attribute that shadowed the class's method
        delattr(self.model, _SWAP)

    @property
    def in_place(self) -> bool:
        return getattr(self.model, _SWAP, None) is self

    def _postprocess_with_target(self, **arguments: Any) -> Any:
        """GPTModel._postprocess, which calls the layer: with labels, the layer finds its target waiting.

        With an output_processor (megatron-core 0.18 and newer) the head belongs to that: it gets logits.
        """
        labels = arguments.get("labels")
        if labels is None or arguments.get("output_processor") is not None:
            return self._postprocess(**arguments)
        layer = self.model.output_layer
        with errors_on_every_rank(TensorParallelGroup.resolve(layer.tp_group)):
            layer.pending_call = self._pending_call(labels)
        try:
            result = self._postprocess(**arguments)
            if layer.pending_call is not None:
                raise RuntimeError(
                    "GPTModel._postprocess: expected it to call its output layer once for each of its "
                    f"{self._mtp_layers()} MTP layers and once for the loss, got fewer calls; labels in "
                    "inference mode, or a version of Megatron-core that is not known here"
                )
        finally:
            layer.pending_call = None
        return result

    def _pending_call(self, labels: Tensor) -> PendingCall:
        mask = temperature = None
        entropy = self.config.entropy
        if self.request is not None:
            self.request.used = True
            mask, temperature = self.request.mask, self.request.temperature
            if self.request.entropy is not None:
                entropy = self.request.entropy
        return PendingCall(
            logits_calls=self._mtp_layers(),
            target=_sequence_first("labels", labels, labels),
            mask=None if mask is None else _sequence_first("mask", mask, labels),
            temperature=(
                _sequence_first("temperature", temperature, labels)
                if isinstance(temperature, Tensor) and temperature.dim() > 0
                else temperature
            ),
            entropy=entropy,
        )

    def _mtp_layers(self) -> int:
        return self.model.config.mtp_num_layers or 0

    def _loss_or_statistics(self, labels: Tensor, logits: Any) -> Any:
        """GPTModel.compute_language_model_loss, which MTP layers call with logits of theirs."""
        if not isinstance(logits, TokenStatistics):
            return self._compute_language_model_loss(labels, logits)
        return TokenStatistics(
            _batch_first(logits.log_probs),
            None if logits.entropy is None else _batch_first(logits.entropy),
            {name: _batch_first(value) for name, value in logits.metrics.items()},
        )


def _sequence_first(name: str, values: Tensor, labels: Tensor) -> Tensor:
    """[b, s] as [s, b]."""
    if not isinstance(values, Tensor) or values.shape != labels.shape or values.dim() != 2:
        shape = tuple(values.shape) if isinstance(values, Tensor) else values
        raise ValueError(f"{name}: expected shape [b, s] = {tuple(labels.shape)}, as the labels, got {shape}")
    return values.transpose(0, 1).contiguous()


def _batch_first(values: Tensor) -> Tensor:
    """[s, b] as [b, s]."""
    return values.transpose(0, 1).contiguous()


def swap_output_layer(model_or_chunks: nn.Module | Sequence[nn.Module], config: EntropyConfig) -> SwapHandle:
    """Make a GPTModel's output layer an `EntropyAwareOutputLayer`, in place.

    Called with labels, the model then gives `TokenStatistics` in [b, s] instead of a loss (MTP losses stay
    what they were); without labels it gives the stock head's logits. Parameters, their names, checkpoints and
    tied weights do not change. Swapping again with an equal config changes nothing.

    Args:
        model_or_chunks: a GPTModel, wrapped (Float16Module, DistributedDataParallel) or not, or a list of
            model chunks. A pipeline stage without a head is left alone.
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
    swapped = [getattr(model, _SWAP, None) for model in models]
    for model, head in zip(models, swapped, strict=True):
        _check_model(model, head, config)
    return SwapHandle(
        config, [head or _SwappedHead(model, config) for model, head in zip(models, swapped, strict=True)]
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
    """The GPTModel inside its wrappers; None on a stage without a head."""
    while not hasattr(chunk, "post_process") and isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    if not hasattr(chunk, "post_process"):
        raise ValueError(
            f"model: expected a Megatron GPTModel or a wrapper of one, got {type(chunk).__name__}"
        )
    return chunk if chunk.post_process else None


def _check_model(model: Any, head: _SwappedHead | None, config: EntropyConfig) -> None:
    if head is not None:
        if head.config != config:
            raise ValueError(
                f"config: expected the one this model was swapped with, {head.config}, got {config}; call "
                "restore() on its handle first"
            )
        return
    for method in ("_postprocess", "compute_language_model_loss"):
        if not hasattr(model, method):
            raise ValueError(
                f"model: expected a GPTModel of megatron-core 0.13 or newer, got a {type(model).__name__} "
                f"without {method}"
            )
        if method in vars(model):
            raise ValueError(
                f"model: expected GPTModel's own {method}, got one that something else has put in its place"
            )
    check_supported(getattr(model, "output_layer", None))
