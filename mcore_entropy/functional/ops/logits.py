"""The logits form's ops: a whole forward or backward on this rank, with the collectives of the forward.

[*] any leading shape, V/tp columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_entropy.functional.autograd import first_derivative_only, without_autocast
from mcore_entropy.functional.logits_passes import (
    LogitsForward,
    backward_logits,
    forward_logits,
    resolve_logits,
)
from mcore_entropy.functional.ops.call import (
    CALL_SCHEMA,
    OP_OPTIONS,
    UPSTREAM_SCHEMA,
    Call,
    Upstream,
    call_of,
    fake_outputs,
    outputs_of_op,
    restore_call,
    results_of,
    save_call,
)
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import GroupArgument
from mcore_entropy.statistics import TokenStatistics, statistics_dtype


def logits_entropy_op(logits: Tensor, tp_group: GroupArgument, keywords: Keywords) -> Tensor:
    """Entropy [*] of logits [*, V/tp] through the op; dynamo traces this."""
    call = call_of(tp_group, keywords)
    _, entropy, _ = results_of(call, logits_forward(logits, *call))
    assert entropy is not None
    return entropy


def logits_statistics_op(logits: Tensor, tp_group: GroupArgument, keywords: Keywords) -> TokenStatistics:
    """Statistics [*] of logits [*, V/tp] through the op; dynamo traces this."""
    call = call_of(tp_group, keywords)
    log_probs, entropy, metrics = results_of(call, logits_forward(logits, *call))
    assert log_probs is not None
    return TokenStatistics(log_probs, entropy, metrics)


@torch.library.custom_op(
    "mcore_entropy::logits_forward",
    mutates_args=(),
    schema=f"(Tensor logits, {CALL_SCHEMA}) -> Tensor[]",
    **OP_OPTIONS,
)
@without_autocast
def logits_forward(logits: Tensor, *arguments: Any) -> list[Tensor]:
    """See `outputs_of_op`."""
    call = Call(*arguments)
    return outputs_of_op(forward_logits(logits, call.resolved_group(), call.keywords()))


@logits_forward.register_fake
def _(logits: Tensor, *arguments: Any) -> list[Tensor]:
    return fake_outputs(Call(*arguments), logits.shape[:-1], logits, statistics_dtype(logits.dtype))


@torch.library.custom_op(
    "mcore_entropy::logits_backward",
    mutates_args=(),
    schema=f"(Tensor logits, {CALL_SCHEMA}, {UPSTREAM_SCHEMA}) -> Tensor",
    **OP_OPTIONS,
)
@without_autocast
def logits_backward(logits: Tensor, *arguments: Any) -> Tensor:
    """The gradient for the logits, [*, V/tp]."""
    call, upstream = Call(*arguments[: len(Call._fields)]), Upstream(*arguments[len(Call._fields) :])
    problem, tokens = resolve_logits(logits, call.resolved_group(), call.keywords())
    forward = LogitsForward(problem, tokens, upstream.results())
    return backward_logits(logits, forward, upstream.grad_log_probs, upstream.grad_entropy)


@logits_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, *arguments = inputs
    save_call(ctx, (logits,), Call(*arguments), output)


@first_derivative_only
def _backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * len(Call._fields)
    restored = restore_call(ctx, saved, grads)
    if restored is None:
        return None, *nothing
    (logits,), call, upstream = restored
    return logits_backward(logits, *call, *upstream), *nothing


logits_forward.register_autograd(lambda ctx, grads: _backward(ctx, *grads), setup_context=_setup_context)
