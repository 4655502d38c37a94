"""What a swap gives back: a handle to pass a micro-batch's requests to the swapped heads and to undo it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mcore_entropy.config import EntropyConfig
from mcore_entropy.functional.arguments import checked_temperature_number

SWAP = "_mcore_entropy_swap"  # the attribute of a swapped model


@dataclass
class Request:
    """What `SwapHandle.request` was given, and whether a forward has used it."""

    mask: Tensor | None
    temperature: float | Tensor | None
    entropy: bool | None
    used: bool = False


class SwappedModel(Protocol):
    """One model whose head is ours."""

    request: Request | None

    @property
    def config(self) -> EntropyConfig:
        """What it was swapped with."""

    @property
    def in_place(self) -> bool:
        """Whether the model's head still is this swap's."""

    def restore(self) -> None:
        """Put the stock head back; doing it twice does nothing."""


class SwapHandle:
    """What a swap did to a model or its chunks, to pass requests through and to undo it."""

    def __init__(self, config: EntropyConfig, heads: Sequence[SwappedModel]) -> None:
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
            mask: bool [b, s], in the places of the labels; tokens where it is False give 0 and cost nothing.
            temperature: a number or [b, s], in the places of the labels; None for the config's.
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


def check_like_labels(name: str, values: object, labels: Tensor) -> None:
    """Raise ValueError unless `values` is a tensor [b, s], as the labels are."""
    if not isinstance(values, Tensor) or values.shape != labels.shape or values.dim() != 2:
        shape = tuple(values.shape) if isinstance(values, Tensor) else values
        raise ValueError(f"{name}: expected shape [b, s] = {tuple(labels.shape)}, as the labels, got {shape}")


def check_same_config(swapped: SwappedModel, config: EntropyConfig) -> None:
    """Raise ValueError unless a model that is swapped already was swapped with an equal config."""
    if swapped.config != config:
        raise ValueError(
            f"config: expected the one this model was swapped with, {swapped.config}, got {config}; call "
            "restore() on its handle first"
        )
