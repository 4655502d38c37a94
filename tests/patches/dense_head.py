"""Megatron-LM's pretrain_gpt.py with head, loss and entropy written out: dense, in fp64, by autograd.

    torchrun ... tests/patches/dense_head.py PRETRAIN_GPT ARGUMENTS

On the CPU. The truth for what the patched script logs: none of the package's mathematics is in it. The
coefficient of the entropy in the loss is the environment's DENSE_COEFF. The script's file is not changed,
only the forward_step that its main part is given.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron_lm"))
from run_on_cpu import megatron_lm_on_cpu

MAIN = 'if __name__ == "__main__":\n'


def exact_head(layer: Any) -> Any:
    """A forward for Megatron's output layer with the product in fp64, and no shortcut in its backward."""
    from megatron.core.tensor_parallel import mappings

    def forward(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        whole = (
            mappings.gather_from_sequence_parallel_region(input_)
            if layer.sequence_parallel
            else mappings.copy_to_tensor_model_parallel_region(input_)
        )
        return torch.nn.functional.linear(
            whole.double(), (layer.weight if weight is None else weight).double()
        ), None

    return forward


def gathered(logits: Tensor) -> Tensor:
    """[b, s, V/tp] of each rank as [b, s, V]; every rank has the same gradient, and takes its slice of it."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)


def dense_loss(loss_mask: Tensor, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, its number of tokens, and the means that `--entropy-metrics` can report."""
    log_p = gathered(logits).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    per_token = {
        "lm loss": -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        "entropy": entropy,
        "sum_pi_squared": p.square().sum(-1),
        "varentropy": (p * log_p.square()).sum(-1) - entropy.square(),
        "max_prob": p.amax(-1),
    }
    sums = {name: (value * loss_mask).sum() for name, value in per_token.items()}
    loss = sums["lm loss"] - float(os.environ.get("DENSE_COEFF", "0")) * sums["entropy"]
    tokens = loss_mask.sum()
    report = {name: torch.stack([value.detach().float(), tokens]) for name, value in sums.items()}
    return loss.float(), tokens.to(torch.int), report


def forward_step_of(script: dict[str, Any]) -> Any:
    """A forward_step on top of the script's own get_batch, whichever order that gives a batch in."""

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        batch = script["get_batch"](data_iterator, None)
        if "BATCH_KEYS" in script:  # 0.19
            named = dict(zip(script["BATCH_KEYS"], batch, strict=True))
        else:  # 0.16
            names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed")
            named = dict(zip(names, batch, strict=True))
        core = model
        while hasattr(core, "module"):
            core = core.module
        if core.post_process:
            core.output_layer.forward = exact_head(core.output_layer)
        logits = model(named["tokens"], named["position_ids"], named["attention_mask"])
        return logits, partial(dense_loss, named["loss_mask"], named["labels"])

    return forward_step


def main() -> None:
    path = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    functions, main_part = path.read_text(encoding="utf-8").split(MAIN)
    script: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    with megatron_lm_on_cpu(path.parent):
        exec(compile(functions, path, "exec"), script)
        script["forward_step"] = forward_step_of(script)
        exec(compile("if True:\n" + main_part, path, "exec"), script)


if __name__ == "__main__":
    main()
