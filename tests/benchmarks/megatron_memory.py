"""Peak memory and time of a GPTModel's step with Megatron's own head and loss, and with the swapped head.

torchrun --nproc-per-node 1 -m tests.benchmarks.megatron_memory     # ranks are tensor parallel
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy import EntropyConfig, Execution, swap_output_layer
from tests.benchmarks.training_step import Losses, measure
from tests.gpu.gpt import GPT, HAS_TRANSFORMER_ENGINE, build, causal_mask, make_text, model_parallel


class Step:
    """Forward and backward of one model and batch; gradients are there beforehand, and are added to."""

    def __init__(self, options: GPT) -> None:
        self.model = build(options)
        text = make_text(options)
        self.labels = text[:, 1:].contiguous()
        positions = torch.arange(options.sequence_length, device="cuda").expand_as(self.labels)
        mask = None if options.transformer_engine else causal_mask(options.sequence_length)
        self.inputs = text[:, :-1].contiguous(), positions, mask
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def stock(self) -> Tensor:
        return self.model(*self.inputs, labels=self.labels).float().mean()

    def stock_and_entropy(self) -> Tensor:
        """What people write by hand: log-prob and entropy of a log_softmax in fp32 (one rank only)."""
        log_p = torch.log_softmax(self.model(*self.inputs).float(), -1)
        log_probs = log_p.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)
        return -log_probs.mean() + 0 * (log_p.exp() * log_p).sum(-1).mean()

    def ours(self) -> Tensor:
        output = self.model(*self.inputs, labels=self.labels)
        return -output.log_probs.mean() + 0 * output.entropy.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=3584)
    parser.add_argument("--vocab-size", type=int, default=152064)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequence-parallel", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    options = GPT(
        transformer_engine=HAS_TRANSFORMER_ENGINE,
        tensor_parallel=dist.get_world_size(),
        sequence_parallel=given.sequence_parallel,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        layers=given.layers,
        heads=given.heads,
        sequence_length=given.sequence_length,
        batch_size=given.batch_size,
    )
    model_parallel(options)
    step = Step(options)
    rows: list[tuple[str, tuple[float, float, float] | str]] = []

    def measured(name: str, losses: Losses) -> None:
        try:
            rows.append((name, measure(losses, given.rounds)))
        except torch.OutOfMemoryError:
            rows.append((name, "out of memory"))

    config: Any = step.model.config
    measured("Megatron's loss", step.stock)
    for implementation in ("native", "te") if HAS_TRANSFORMER_ENGINE else ("native",):
        config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, implementation
        measured(f"Megatron's loss, fused, {implementation}", step.stock)
    config.cross_entropy_loss_fusion = False
    if options.tensor_parallel == 1:
        measured("log_softmax in fp32, log-prob and entropy", step.stock_and_entropy)
    for budget in (0, 2**20):
        swap = EntropyConfig(execution=Execution(logits_budget_mib=budget))
        handle = swap_output_layer(step.model, swap)
        measured(f"swapped head, log-prob and entropy{', logits kept' if budget else ''}", step.ours)
        handle.restore()
    if dist.get_rank() == 0:
        spec = "Transformer Engine's" if options.transformer_engine else "the local"
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {spec} layer spec; {options}\n"
            f"{'':52}{'loss':>10}{'peak GiB':>10}{'seconds':>10}"
        )
        for name, row in rows:
            figures = row if isinstance(row, str) else f"{row[0]:10.4f}{row[1]:10.2f}{row[2]:10.3f}"
            print(f"{name:52}{figures}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
