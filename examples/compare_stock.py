"""--compare-stock: each step with Megatron's own head too, from the same weights and tokens.

The two heads take turns on one model, so that the gradients of a step differ by the head alone. (Two separate
trainings drift apart: Adam makes a whole step of a gradient that is nothing but rounding.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt import ModelInputs
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from mcore_entropy import EntropyConfig, TokenStatistics, swap_output_layer

# The largest difference allowed: of loss and entropy, as a share of their value; of a gradient, as a share of
# its largest entry on any rank. A wrong mask or scale, or a missing reduction, makes one of order 1.
# fp32: both heads add up V exponentials and then H or V products, in orders of their own. A sum of n terms is
#   off by about eps * sqrt(n), 6e-8 * 64 for V = 4096, and the layers below pass that on. Seen: 2e-6.
# bf16: the stock head rounds its logits and their gradient to bf16, by up to 2^-9 of each. A logit of 8 is
#   off by 1.6e-2, and so is its probability; the mean over tokens evens that out in the loss, not in a
#   gradient, and the layers below round theirs as well. Seen: 5e-5 and 3e-2.
VALUE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1}


class Sums(NamedTuple):
    """One iteration over all ranks: means of loss and entropy, in nats, over so many tokens."""

    loss: float
    entropy: float
    tokens: int


Head = Callable[[Any, ModelInputs], TokenStatistics]  # (model, inputs) -> log_probs and entropy, [b, s] each


def entropy_aware_head(handle: Any) -> Head:
    """How to call a swapped model: with labels it gives TokenStatistics, and masked tokens cost nothing."""

    def head(model: Any, inputs: ModelInputs) -> TokenStatistics:
        with handle.request(mask=inputs.loss_mask):
            return model(inputs.tokens, inputs.position_ids, inputs.attention_mask, labels=inputs.labels)

    return head


def stock_head(gpt: GPTModel) -> Head:
    """Megatron's logits and loss, and the entropy the plain way: the vocabulary gathered on each rank."""

    def head(model: Any, inputs: ModelInputs) -> TokenStatistics:
        logits = model(inputs.tokens, inputs.position_ids, inputs.attention_mask)  # [b, s, V/tp]
        log_p = gather_from_tensor_model_parallel_region(logits.float()).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        # Megatron's loss wants [s, b, V/tp], and writes into fp32 logits: hence a copy.
        copy = logits.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        loss = gpt.compute_language_model_loss(inputs.labels, copy)
        return TokenStatistics(log_probs=-loss, entropy=entropy)

    return head


@dataclass
class Worst:
    """The largest difference so far, and the largest as a share of its scale. A NaN stays."""

    tolerance: float
    absolute: float = 0.0
    share: float = 0.0

    def add(self, difference: float, scale: float) -> None:
        share = difference / scale if scale else float("nan")  # nothing to compare with is no agreement
        self.absolute = self.absolute if difference <= self.absolute else difference
        self.share = self.share if share <= self.share else share

    def passed(self) -> bool:
        return self.share <= self.tolerance


class Comparison:
    """Runs steps with both heads and keeps the largest differences. Every rank holds the same numbers."""

    def __init__(self, gpt: GPTModel, config: EntropyConfig) -> None:
        self.gpt, self.config = gpt, config
        self.steps = 0
        dtype = gpt.config.params_dtype
        self.values = {name: Worst(VALUE_TOLERANCE[dtype]) for name in ("loss", "entropy")}
        self.gradients = {name: Worst(GRADIENT_TOLERANCE[dtype]) for name, _ in gpt.named_parameters()}

    def step(self, compute: Callable[[Head], Sums]) -> Sums:
        """`compute(head)` leaves a step's gradients in main_grad and returns its sums; ours are left last."""
        stock = compute(stock_head(self.gpt))
        stock_gradients = [p.main_grad.clone() for p in self.gpt.parameters()]
        handle = swap_output_layer(self.gpt, self.config)
        try:
            ours = compute(entropy_aware_head(handle))
        finally:
            handle.restore()
        self.steps += 1
        self.values["loss"].add(abs(ours.loss - stock.loss), abs(stock.loss))
        self.values["entropy"].add(abs(ours.entropy - stock.entropy), abs(stock.entropy))
        largest = torch.stack(
            [
                torch.stack([(p.main_grad - gradient).abs().max(), gradient.abs().max()])
                for p, gradient in zip(self.gpt.parameters(), stock_gradients, strict=True)
            ]
        )
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
        for worst, (difference, scale) in zip(self.gradients.values(), largest.tolist(), strict=True):
            worst.add(difference, scale)
        return ours

    def passed(self) -> bool:
        return all(worst.passed() for worst in [*self.values.values(), *self.gradients.values()])

    def report(self) -> list[str]:
        """A row for loss, entropy and the gradient of every parameter, and the verdict."""
        width = max(map(len, self.gradients))
        rows = [f"{'largest difference of':{width}}   absolute   relative to its largest entry (allowed)"]
        for name, worst in [*self.values.items(), *self.gradients.items()]:
            verdict = f"({worst.tolerance:.0e})" if worst.passed() else f"({worst.tolerance:.0e}) TOO LARGE"
            rows.append(f"{name:{width}}   {worst.absolute:8.1e}   {worst.share:8.1e} {verdict}")
        gradient = max(self.gradients, key=lambda name: self.gradients[name].share)
        rows.append(
            f"Entropy-aware against stock head, {self.steps} iterations: "
            f"loss within {self.values['loss'].absolute:.1e}, entropy within "
            f"{self.values['entropy'].absolute:.1e}, every gradient within "
            f"{self.gradients[gradient].share:.1e} of its largest entry ({gradient}). "
            f"{'PASSED' if self.passed() else 'FAILED'}"
        )
        return rows
