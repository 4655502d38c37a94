"""Trains a small Hugging Face Llama on real text, data parallel, and watches the entropy of its predictions.

    torchrun --nproc-per-node 2 examples/fsdp_llama.py --parallel fsdp2

The order is: make the model, swap_lm_head, wrap it (FSDP2, FSDP1 or DDP), make the optimizer. Called with
labels, the model then gives the log-probability and the entropy of every token and never has logits. Runs on
GPUs (NCCL) where there is one for each process, otherwise on CPUs (gloo); without torchrun, on one process.

An iteration's sequences are shared out among the ranks, and each rank takes its share in micro-batches, which
go to the device one at a time. The loss is a mean over the tokens of all of them, on all ranks.

What you should see: loss and entropy both start at ln V, where every token is equally likely. The loss falls
first (which tokens are frequent is soon learnt), the entropy follows, and then they fall together: the model
is about as uncertain as it is wrong. --entropy-coeff 0.5 holds the entropy up.

The folder --save gets plot.png, metrics.jsonl and checkpoint/, with model and tokenizer, for from_pretrained.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import corpus
import launch
from launch import World

PACKAGES = {"mcore_entropy": "mcore-entropy"}
PACKAGES |= {name: name for name in ("transformers", "safetensors", "tokenizers", "tqdm", "matplotlib")}


def parse_arguments(world: World) -> argparse.Namespace:
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("parallelism")
    add = group.add_argument
    add("--parallel", choices=["fsdp2", "fsdp1", "ddp"], default="fsdp2", help="%(default)s")
    group = parser.add_argument_group("entropy")
    add = group.add_argument
    add("--entropy-coeff", type=float, default=0.0, metavar="C", help="loss = mean(-log_prob - C * entropy)")
    add("--chunk-size", type=int, metavar="TOKENS", help="tokens of one product (the library's default)")
    add(
        "--compare-stock",
        type=int,
        nargs="?",
        const=10,
        metavar="K",
        help="at the first and every K-th iteration (10) compute loss and entropy from the stock logits too, "
        "print how far they differ, and exit with 1 if it is more than rounding",
    )
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--data", nargs="+", metavar="FILE", help="text files (the Python standard library's sources)")
    add("--max-data-mib", type=float, default=4.0, metavar="MIB", help="read that much of it (%(default)s)")
    add("--vocab-size", type=int, default=4096, metavar="V", help="%(default)s")
    add("--cache-dir", type=Path, default=corpus.default_cache(), metavar="DIR", help="%(default)s")
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=int, default=2, metavar="N", help="%(default)s")
    add("--hidden-size", type=int, default=128, metavar="N", help="%(default)s")
    add("--intermediate-size", type=int, metavar="N", help="8/3 of --hidden-size, rounded up to 32")
    add("--num-attention-heads", type=int, default=4, metavar="N", help="%(default)s")
    add("--num-key-value-heads", type=int, default=2, metavar="N", help="%(default)s")
    add("--seq-length", type=int, default=128, metavar="N", help="%(default)s")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--bf16", action="store_true", help="compute in bf16; weights and gradients' sums stay fp32")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--train-iters", type=int, default=300, metavar="N", help="%(default)s")
    add("--micro-batch-size", type=int, default=4, metavar="N", help="sequences at a time (%(default)s)")
    add("--global-batch-size", type=int, metavar="N", help="sequences an iteration (2 micro-batches a rank)")
    add("--lr", type=float, default=5e-3, help="%(default)s")
    add("--min-lr", type=float, help="of the last iteration (a tenth of --lr)")
    add("--lr-warmup-iters", type=int, default=20, metavar="N", help="%(default)s")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="%(default)s")
    add("--clip-grad", type=float, default=1.0, metavar="NORM", help="%(default)s")
    add("--seed", type=int, default=1234, metavar="N", help="%(default)s")
    add("--log-interval", type=int, default=10, metavar="N", help="without a progress bar (%(default)s)")
    add("--save", type=Path, default=Path("runs/fsdp_llama"), metavar="DIR", help="%(default)s")
    args = parser.parse_args()
    check_arguments(args, world)
    return args


def check_arguments(args: argparse.Namespace, world: World) -> None:
    """Finds what is wrong before anything slow happens, and sets the sizes that follow from others."""
    launch.check_counts(args)
    launch.check_finite(args)
    launch.check_above_zero(args, "max_data_mib", "lr", "clip_grad")
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    args.intermediate_size = args.intermediate_size or 32 * math.ceil(args.hidden_size / 12)
    micro_batch_each = args.micro_batch_size * world.size
    args.global_batch_size = args.global_batch_size or 2 * micro_batch_each
    launch.check_multiples(
        args,
        ("hidden_size", 2 * args.num_attention_heads, "twice --num-attention-heads (rotary halves)"),
        ("num_attention_heads", args.num_key_value_heads, "--num-key-value-heads"),
        ("global_batch_size", micro_batch_each, "--micro-batch-size x number of processes"),
    )
    corpus.check_vocab_size(args)


def main(world: World) -> int:
    args = parse_arguments(world)
    launch.check_packages(PACKAGES)
    text = corpus.load_for_all(args, world)

    from llama_training import train  # transformers takes seconds to import: after the checks

    return train(args, world, text)


if __name__ == "__main__":
    launch.run(main, for_megatron=False)
