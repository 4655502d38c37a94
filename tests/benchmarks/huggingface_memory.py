"""Peak memory and time of a Hugging Face model's training step, with its own head and with the swapped one.

python -m tests.benchmarks.huggingface_memory        # Qwen2.5-0.5B's shapes, 16384 tokens, on a GPU
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from mcore_entropy import EntropyConfig
from mcore_entropy.adapters.huggingface import swap_lm_head
from tests.benchmarks.qwen2 import build, eager_statistics
from tests.benchmarks.training_step import measure


def loss_alone(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def stock_and_entropy(model: Any, ids: Tensor) -> Tensor:
    """What people write by hand on the model's logits."""
    log_probs, entropy = eager_statistics(model, ids)
    return -log_probs.mean() - 0.01 * entropy.mean()


def ours(model: Any, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, labels=ids)
    return output.loss - 0.01 * output.entropy[:, :-1].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    model = build("0.5b", args.device, vocab_size=args.vocab_size, num_hidden_layers=args.layers)
    ids = torch.randint(
        0, args.vocab_size, (args.sequences, args.tokens // args.sequences), device=args.device
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; {args}")
    print("| head | loss | peak GiB beside weights and gradients | seconds |\n|---|---|---|---|")
    for name, step in (("stock, loss alone", loss_alone), ("stock, log_softmax", stock_and_entropy)):
        print(
            "| {} | {:.4f} | {:.2f} | {:.3f} |".format(name, *measure(partial(step, model, ids), args.rounds))
        )
    swap_lm_head(model, EntropyConfig())
    print("| swapped | {:.4f} | {:.2f} | {:.3f} |".format(*measure(partial(ours, model, ids), args.rounds)))


if __name__ == "__main__":
    main()
