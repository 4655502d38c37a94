"""What the autograd Functions share: what they save and return, first derivatives only, no autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.functional.arguments import TokenArguments
from mcore_entropy.functional.chunked import TokenResults
from mcore_entropy.functional.problem import Problem
from mcore_entropy.statistics import Normalizer, TokenStatistics


class _RefuseSecondDerivative(torch.autograd.Function):
    """Identity on a gradient; its own backward raises. It hangs on all that the gradient depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "mcore_entropy has no second derivatives: a gradient of log_probs or entropy was "
            "differentiated again (create_graph=True, a gradient penalty?); detach it, or use dense logits"
        )


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run a backward(ctx, saved_tensors, *grad_outputs) unrecorded; a second derivative is an error.

    The saved tensors are read here, once: inside `torch.utils.checkpoint` they can be read only once.

    torch's `once_differentiable` would let a gradient that depends on the saved logits alone pass as a
    constant: a gradient penalty added to an ordinary loss would then be silently ignored.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            saved: tuple[Tensor | None, ...] = ctx.saved_tensors
            gradients = backward(ctx, saved, *grad_outputs)
        if not create_graph:
            return gradients
        # Cast copies, under autocast, need no gradient: the anchor does, so that the node exists there too.
        anchor = torch.empty(0, requires_grad=True)
        depends_on = [t for t in (*saved, *grad_outputs) if t is not None and t.requires_grad]
        return tuple(
            _RefuseSecondDerivative.apply(value, anchor, *depends_on) if isinstance(value, Tensor) else value
            for value in gradients
        )

    return wrapped


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Switch autocast off inside a Function's or an op's code, for the device of its first tensor."""

    @functools.wraps(method)
    def wrapped(*args: Any) -> Any:
        device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
        if not torch.amp.is_autocast_available(device):
            return method(*args)
        with torch.autocast(device_type=device, enabled=False):
            return method(*args)

    return wrapped


def save_for_backward(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],
    problem: Problem,
    tokens: TokenArguments,
    results: TokenResults,
) -> None:
    """Save the inputs by reference, the per-token arguments, and three numbers a token."""
    temperature = tokens.temperature
    ctx.problem = problem
    number = 1.0 if isinstance(temperature, Tensor) else temperature
    ctx.tokens = TokenArguments(None, None, number, tokens.ignore_index)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *inputs,
        tokens.target,
        tokens.mask,
        temperature if isinstance(temperature, Tensor) else None,
        results.normalizer.maximum,
        results.normalizer.log_sum,
        results.entropy,
    )


def restore_for_backward(ctx: Any, saved: tuple[Any, ...]) -> tuple[list[Any], TokenArguments, TokenResults]:
    """What `save_for_backward` saved: the inputs, the per-token arguments and the results."""
    *inputs, target, mask, temperature, maximum, log_sum, entropy = saved
    tokens = TokenArguments(
        target, mask, ctx.tokens.temperature if temperature is None else temperature, ctx.tokens.ignore_index
    )
    return inputs, tokens, TokenResults(Normalizer(maximum, log_sum), None, entropy, {})


def outputs_of(ctx: Any, problem: Problem, results: TokenResults) -> tuple[Tensor | None, ...]:
    """A Function's outputs in the tokens' own shape: log_probs, entropy or None, and the metrics."""
    metrics = [own_output(problem, value) for value in results.metrics.values()]
    ctx.mark_non_differentiable(*metrics)
    return own_output(problem, results.log_probs), own_output(problem, results.entropy), *metrics


def own_output(problem: Problem, values: Tensor | None) -> Tensor | None:
    """[N] in the tokens' own shape, in memory of its own: a caller may change it in place.

    A view would not do: autograd forbids changing one that a Function made, and the entropy is saved.
    """
    if values is None:
        return None
    output = values.new_empty(problem.shape)
    output.view(-1).copy_(values)
    return output


def named_outputs(wanted_metrics: tuple[str, ...], outputs: tuple[Tensor | None, ...]) -> TokenStatistics:
    """The outputs of `outputs_of` under their names."""
    log_probs, entropy, *metrics = outputs
    assert log_probs is not None
    return TokenStatistics(log_probs, entropy, dict(zip(wanted_metrics, metrics, strict=True)))  # type: ignore[arg-type]
