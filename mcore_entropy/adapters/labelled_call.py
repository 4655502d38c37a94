"""From a model's labels to a call of its head, and from the head's statistics to the model's loss.

b batch, s sequence, s' the positions that `logits_to_keep` asks for (all of them as a rule).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_entropy.adapters.lm_head import HeadCall
from mcore_entropy.config import EntropyConfig
from mcore_entropy.statistics import LogitTransform, TokenStatistics
from mcore_entropy.swap_handle import Request, check_like_labels


def head_call(
    labels: Tensor,
    shift_labels: Tensor | None,
    ignore_index: int,
    logits_to_keep: int | Tensor,
    request: Request,
    transform: LogitTransform,
    config: EntropyConfig,
) -> HeadCall:
    """What the head is to compute for labels [b, s] and a request in their places.

    Raises:
        ValueError: the request's mask or temperature has another shape than the labels.
    """
    temperature = config.temperature if request.temperature is None else request.temperature
    if request.mask is not None:
        check_like_labels("mask", request.mask, labels)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        check_like_labels("temperature", temperature, labels)

    def of_next(per_token: Any, nothing: float) -> Any:
        """[b, s] in the places of the labels, as [b, s'] in those of the tokens that predict them."""
        if not isinstance(per_token, Tensor) or per_token.dim() == 0:
            return per_token
        if shift_labels is None:
            per_token = F.pad(per_token, (0, 1), value=nothing)[..., 1:]
        return _kept_positions(per_token, logits_to_keep).contiguous()

    return HeadCall(
        target=of_next(labels if shift_labels is None else shift_labels, ignore_index),
        mask=of_next(request.mask, False),
        temperature=of_next(temperature, 1.0),
        ignore_index=ignore_index,
        entropy=config.entropy if request.entropy is None else request.entropy,
        transform=transform,
        config=config,
    )


def _kept_positions(per_token: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Those of [b, s] whose hidden states reach the head, as the models select them."""
    if not isinstance(logits_to_keep, Tensor):
        return per_token[:, -logits_to_keep:] if logits_to_keep else per_token
    logits_to_keep = logits_to_keep.to(per_token.device)
    if logits_to_keep.dim() < 2:
        return per_token[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return per_token[logits_to_keep]
    return per_token.take_along_dim(logits_to_keep, dim=1)


# The call whose head is to be computed next, in this thread: others, and calls inside this one, have theirs.
_current: ContextVar[HeadCall | None] = ContextVar("_current", default=None)


@contextmanager
def no_call() -> Iterator[None]:
    """Let a model's head give logits, inside a call with labels too."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def one_call_of(head: nn.Module, call: HeadCall) -> Iterator[list[Tensor]]:
    """Let the model call `head` once with `call`; the list gets what the head gives.

    The keyword comes in front of all that wraps the head, so that a wrapper which runs the head's forward
    again in backward has it then too.
    """
    received: list[Tensor] = []

    def with_call(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "call": call} if _current.get() is call else kwargs

    def receive(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        if _current.get() is not call:
            return result
        received.append(result)
        return result.detach().clone()  # for the model to do to it what it does to logits, in place too

    hooks = (
        head.register_forward_pre_hook(with_call, with_kwargs=True),
        head.register_forward_hook(receive),
    )
    token = _current.set(call)
    try:
        yield received
    finally:
        _current.reset(token)
        for hook in hooks:
            hook.remove()
    if len(received) != 1:
        raise RuntimeError(f"head: expected the model to call it once, got {len(received)} calls")
    if not call.fits(received[0]):
        raise ValueError(
            f"head: expected fp32 statistics for {tuple(call.target.shape)} tokens of it, got "
            f"{received[0].dtype} {tuple(received[0].shape)}; something that wraps the head casts its output "
            "(FSDP2: output_dtype) or changes it"
        )


def causal_lm_loss(
    call: HeadCall, statistics: TokenStatistics, num_items: int | Tensor | None, entropy_coeff: float
) -> Tensor:
    """The model's own loss, less the entropy bonus: means over tokens that have a label and no False mask."""
    log_probs, entropy = statistics.log_probs, statistics.entropy
    counted = (call.target != call.ignore_index).to(log_probs.device)
    if call.mask is not None:
        counted &= call.mask.to(log_probs.device)
    total = -log_probs.sum()
    if entropy_coeff:
        if entropy is None:
            raise ValueError("entropy: expected it to be asked for with a coefficient other than 0")
        total = total - entropy_coeff * torch.where(counted, entropy, 0.0).sum()
    if num_items is None:
        num_items = counted.sum()
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items
