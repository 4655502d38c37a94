"""The loss for a model whose head was swapped, in the form that Megatron's training loop takes and reports.

[b, s] tokens of one micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_entropy.config import EntropyConfig
from mcore_entropy.megatron.arguments import config_from_args
from mcore_entropy.statistics import TokenStatistics

LossFunction = Callable[..., tuple[Any, ...]]


def masked_token_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's own loss: the sum over the tokens that count, their number, and both as the report."""
    mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum()
    return loss, tokens.to(torch.int), {"lm loss": torch.stack([loss.detach(), tokens])}


class EntropyLoss:
    """Megatron's ``loss_func(loss_mask, output)``: minus log-prob minus ``entropy_coeff`` times entropy.

    It gives the micro-batch's (loss, number of tokens, report): the loss is a sum over the tokens that
    `loss_mask` counts, and each entry of the report is [sum, number of tokens], which Megatron adds up over
    micro-batches, data-parallel and context-parallel ranks before it divides. So they reach its log lines,
    TensorBoard and W&B. "lm loss" stays minus the log-prob alone. With the coefficient 0 the entropy is
    detached: its gradient costs nothing.

    Args:
        config: coefficient, metrics and log interval; the rest is the head's.
        loss_func: what the tokens' -log_prob [b, s] goes through, with all further arguments:
            Megatron's own ``loss_func`` with its checks for NaN, or anything of the same form.
        iteration: the number of the current iteration, which a log interval above 1 needs.

    Raises:
        ValueError: a log interval without `iteration`; when called, an output that is no statistics or lacks
            what the config asks for, or a loss_func of another form.
    """

    def __init__(
        self,
        config: EntropyConfig,
        loss_func: LossFunction = masked_token_sum,
        iteration: Callable[[], int] | None = None,
    ) -> None:
        if config.log_interval > 1 and iteration is None:
            raise ValueError(
                f"log_interval: expected 1 where nothing tells the iteration, got {config.log_interval}"
            )
        self._config = config
        self._loss_func = loss_func
        self._iteration = iteration
        self._reported = _Reported()

    def __call__(self, loss_mask: Tensor, output: Any, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        """(loss, number of tokens, report) of a micro-batch.

        Args:
            loss_mask: one number a token, [b, s] or flat.
            output: the swapped model's `TokenStatistics`, [b, s]. Tokens that do not count may hold anything.
        """
        self._check(loss_mask, output)
        mask = loss_mask.reshape(-1).float()

        def counted(per_token: Tensor) -> Tensor:
            # Not a product: 0 * NaN is NaN.
            return torch.where(mask != 0, per_token.reshape(-1).float(), 0.0)

        losses = counted(-output.log_probs).view_as(output.log_probs)
        result = self._loss_func(loss_mask, losses, *args, **keywords)
        if not isinstance(result, tuple) or len(result) != 3:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise ValueError(
                "loss_func: expected (sum over tokens, number of tokens, report), as Megatron-core 0.13 and "
                f"newer take it, got {got}"
            )
        loss, tokens, report = result

        def masked_sum(per_token: Tensor) -> Tensor:
            return (counted(per_token) * mask).sum()

        sums = {name: masked_sum(value) for name, value in output.metrics.items()}
        coefficient = self._config.entropy_coeff
        if output.entropy is not None:
            entropy = masked_sum(output.entropy if coefficient else output.entropy.detach())
            if coefficient:
                loss = loss - coefficient * entropy
            sums = {"entropy": entropy, **sums}
        twice = sorted(report.keys() & sums.keys())
        if twice:
            raise ValueError(f"loss_func: expected no report of {twice}, which are reported here")
        count = mask.sum()
        measured = {name: torch.stack([value.detach(), count]) for name, value in sums.items()}
        return loss, tokens, {**report, **self._to_report(measured)}

    def _check(self, loss_mask: Tensor, output: Any) -> None:
        if not isinstance(output, TokenStatistics):
            raise ValueError(
                f"output: expected TokenStatistics, got {type(output).__name__}; the model's head is not "
                "swapped (swap_output_layer), or was called without labels"
            )
        if self._config.entropy_coeff and output.entropy is None:
            raise ValueError("entropy: expected it in the model's output for a coefficient other than 0")
        missing = set(self._config.metrics) - output.metrics.keys()
        if missing:
            raise ValueError(
                f"metrics: expected {sorted(missing)} in the model's output; swapped with others"
            )
        if loss_mask.numel() != output.log_probs.numel():
            raise ValueError(
                f"loss_mask: expected a number for each of {tuple(output.log_probs.shape)} tokens, got shape "
                f"{tuple(loss_mask.shape)}"
            )

    def _to_report(self, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        interval = self._config.log_interval
        if interval == 1 or self._iteration is None or not torch.is_grad_enabled():  # evaluation
            return measured
        return self._reported.of(self._iteration(), interval, measured)


class _Reported:
    """This rank's report of the last iteration that had one of its own, for those in between to repeat.

    Megatron adds up an iteration's micro-batches, so the first of them repeats the whole report.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None
        self._measured_at: int | None = None
        self._sums: dict[str, Tensor] = {}

    def of(self, iteration: int, interval: int, measured: dict[str, Tensor]) -> dict[str, Tensor]:
        first_of_iteration = iteration != self._iteration
        self._iteration = iteration
        if self._measured_at is None or iteration % interval == 0 or iteration == self._measured_at:
            if iteration != self._measured_at:
                self._measured_at, self._sums = iteration, {}
            for name, value in measured.items():
                self._sums[name] = self._sums.get(name, 0) + value
            return measured
        if first_of_iteration:
            return {name: value.clone() for name, value in self._sums.items()}
        return {name: torch.zeros_like(value) for name, value in measured.items()}


def entropy_loss_func(loss_func: LossFunction, arguments: Callable[[], argparse.Namespace]) -> LossFunction:
    """Megatron-LM's ``loss_func`` for a swapped head, where the arguments ask for one; else as it is.

    Args:
        loss_func: ``pretrain_gpt.loss_func``, or one like it.
        arguments: ``get_args`` of megatron.training: what was parsed with `add_entropy_args`; looked at when
            the first loss is computed.

    Raises:
        ValueError: see `EntropyLoss` and `config_from_args`.
    """
    made: list[EntropyLoss] = []

    def with_entropy(loss_mask: Tensor, output: Any, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        if not made:
            config = config_from_args(arguments())
            if config is None:
                return loss_func(loss_mask, output, *args, **keywords)
            # Megatron counts iterations from 0, and shows them from 1.
            made.append(EntropyLoss(config, loss_func, lambda: int(arguments().curr_iteration) + 1))
        return made[0](loss_mask, output, *args, **keywords)

    return with_entropy
