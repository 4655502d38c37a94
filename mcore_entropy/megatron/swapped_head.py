"""What a swap changes in one model, and how labels reach the head and its statistics the caller.

The class of its output_layer, the method that calls that layer (`_postprocess` of a GPTModel, `forward` of a
HybridModel), and those that get what it gives: `compute_language_model_loss` and, where Megatron has it,
`_scale_logits`. docs/decisions/0002-hook.md says why these.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcore_entropy.config import EntropyConfig
from mcore_entropy.functional.agreement import check_agreement, errors_on_every_rank
from mcore_entropy.megatron.output_layer import EntropyAwareOutputLayer, PendingCall
from mcore_entropy.megatron.supported import check_call, name_of_head_caller
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import TokenStatistics
from mcore_entropy.swap_handle import SWAP, Request, check_like_labels


class SwappedHead:
    """One model whose head is ours."""

    def __init__(self, model: Any, config: EntropyConfig) -> None:
        self.model = model
        self.config = config
        self.request: Request | None = None
        self._caller_name = name_of_head_caller(model)
        self._call_head = getattr(model, self._caller_name)
        self._parameters = tuple(inspect.signature(self._call_head).parameters)
        self._compute_language_model_loss = model.compute_language_model_loss
        layer = self._layer = model.output_layer
        layer.__class__ = EntropyAwareOutputLayer
        layer.entropy_config = config
        replaced: dict[str, Callable[..., Any]] = {
            self._caller_name: self._call_head_with_target,
            "compute_language_model_loss": self._loss_or_statistics,
        }
        if hasattr(model, "_scale_logits"):  # from megatron-core 0.17 on
            self._scale_logits = model._scale_logits
            replaced["_scale_logits"] = self._scaled_logits_or_statistics
        self._replaced = {name: _bound(method, model) for name, method in replaced.items()}
        for name, method in self._replaced.items():
            setattr(model, name, method)
        setattr(model, SWAP, self)

    def restore(self) -> None:
        if not self.in_place:
            return  # done before, perhaps by another handle of the same swap
        for name, ours in self._replaced.items():
            if vars(self.model).get(name) != ours:
                raise RuntimeError(
                    f"restore: expected the model's {name} to be the one that the swap put in place, got "
                    "another; undo what replaced it first"
                )
        self._check_layer()
        layer = self._layer
        if "forward" in vars(layer):
            raise RuntimeError(
                "restore: expected the output layer's own forward, got one that something else has put in "
                "its place; undo that first"
            )
        layer.__class__ = EntropyAwareOutputLayer.__base__
        for name in ("entropy_config", "pending_call"):
            vars(layer).pop(name, None)
        for name in self._replaced:
            delattr(self.model, name)  # an instance attribute that shadowed the class's method
        delattr(self.model, SWAP)

    def _check_layer(self) -> None:
        found = self.model.output_layer
        if found is not self._layer or type(found) is not EntropyAwareOutputLayer:
            raise RuntimeError(
                "output_layer: expected the one that was swapped, got "
                f"{type(found).__module__}.{type(found).__qualname__}; it was replaced or wrapped (LoRA) "
                "after the swap: wrap first, and the swap says whether it can be done"
            )

    @property
    def in_place(self) -> bool:
        return getattr(self.model, SWAP, None) is self

    def _call_head_with_target(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's method that calls the layer: with labels, the layer finds its target waiting.

        With an output_processor (megatron-core 0.18 and newer) the head belongs to that: it gets logits.
        """
        given = {**dict(zip(self._parameters, arguments, strict=False)), **keywords}
        labels = given.get("labels")
        if labels is None or given.get("output_processor") is not None:
            return self._call_head(*arguments, **keywords)
        check_call(self.model, given.get("inference_context"))
        self._check_layer()
        layer = self._layer
        group = TensorParallelGroup.resolve(layer.tp_group)
        with errors_on_every_rank(group):
            layer.pending_call = self._pending_call(labels)
        try:
            # The collectives of MTP layers, or of a whole HybridModel, may come before the head's.
            check_agreement(group, "labels of a swapped model", {}, {})
            result = self._call_head(*arguments, **keywords)
            if layer.pending_call is not None:
                raise RuntimeError(
                    f"{type(self.model).__name__}.{self._caller_name}: expected it to call its output layer "
                    f"once for each of its {self._mtp_layers()} MTP layers and once for the loss, got fewer "
                    "calls; labels in inference mode, or a version of Megatron-core that is not known here"
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
        if self._caller_name == "forward" and not getattr(self.model, "mtp_process", False):
            return 0  # a HybridModel goes by its pattern of layers, a GPTModel by its config alone
        return self.model.config.mtp_num_layers or 0

    def _scaled_logits_or_statistics(self, logits: Any) -> Any:
        """GPTModel._scale_logits, MuP's factor, which statistics have in them already."""
        return logits if isinstance(logits, TokenStatistics) else self._scale_logits(logits)

    def _loss_or_statistics(self, labels: Tensor, logits: Any) -> Any:
        """The model's compute_language_model_loss, which MTP layers call with logits of theirs."""
        if not isinstance(logits, TokenStatistics):
            return self._compute_language_model_loss(labels, logits)
        return TokenStatistics(
            _batch_first(logits.log_probs),
            None if logits.entropy is None else _batch_first(logits.entropy),
            {name: _batch_first(value) for name, value in logits.metrics.items()},
        )


def _bound(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """`function` as a method of `model`, which those who are passed one may ask for its owner."""

    def method(_: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return types.MethodType(method, model)


def _sequence_first(name: str, values: Tensor, labels: Tensor) -> Tensor:
    """[b, s] as [s, b]."""
    check_like_labels(name, values, labels)
    return values.transpose(0, 1).contiguous()


def _batch_first(values: Tensor) -> Tensor:
    """[s, b] as [b, s]."""
    return values.transpose(0, 1).contiguous()
