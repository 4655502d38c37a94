"""Pre-trains a small Megatron-core GPT on real text and watches the entropy of its predictions fall.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel

The vocabulary is sharded over the tensor-parallel ranks; swap_output_layer gives the log-probability and the
entropy of every token without ever holding [tokens, vocabulary]. Runs on GPUs (NCCL) where there is one for
each process, otherwise on CPUs (gloo). Number of processes = tensor-parallel x data-parallel size.

What you should see: loss and entropy both start at ln V, where every token is equally likely. The loss falls
first (which tokens are frequent is soon learnt), the entropy follows, and then they fall together: the model
is about as uncertain as it is wrong. --entropy-coeff 0.5 holds the entropy up.

The folder --save gets plot.png, metrics.jsonl, tokenizer.json and a torch_dist checkpoint, which a GPTModel
of the same shape loads with or without the entropy-aware head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import corpus
import launch
from launch import UserMistake, World

PACKAGES = {"mcore_entropy": "mcore-entropy", "megatron": "megatron-core"}
PACKAGES |= {name: name for name in ("tokenizers", "tqdm", "matplotlib", "psutil")}  # psutil: checkpoints


def parse_arguments(world: World) -> argparse.Namespace:
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("parallelism")
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="%(default)s")
    add("--sequence-parallel", action="store_true", help="shard activations along the sequence as well")
    group = parser.add_argument_group("entropy")
    add = group.add_argument
    add("--entropy-coeff", type=float, default=0.0, metavar="C", help="loss = mean(-log_prob - C * entropy)")
    add("--chunk-size", type=int, metavar="TOKENS", help="tokens of one reduction (the library's default)")
    add(
        "--compare-stock",
        action="store_true",
        help="run each step with the stock head too, print how far loss and gradients differ, "
        "and exit with 1 if it is more than rounding",
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
    add("--num-attention-heads", type=int, default=4, metavar="N", help="%(default)s")
    add("--seq-length", type=int, default=128, metavar="N", help="%(default)s")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--bf16", action="store_true")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--train-iters", type=int, default=200, metavar="N", help="%(default)s")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="sequences at a time (%(default)s)")
    add("--global-batch-size", type=int, metavar="N", help="sequences an iteration (one micro-batch a rank)")
    add("--lr", type=float, default=5e-3, help="%(default)s")
    add("--lr-warmup-iters", type=int, default=40, metavar="N", help="%(default)s")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="%(default)s")
    add("--clip-grad", type=float, default=1.0, metavar="NORM", help="%(default)s")
    add("--seed", type=int, default=1234, metavar="N", help="%(default)s")
    add("--log-interval", type=int, default=10, metavar="N", help="without a progress bar (%(default)s)")
    add("--save", type=Path, default=Path("runs/pretrain_gpt"), metavar="DIR", help="%(default)s")
    args = parser.parse_args()
    check_arguments(args, world)
    return args


def check_arguments(args: argparse.Namespace, world: World) -> None:
    """Finds what is wrong before anything slow happens, and sets the sizes that follow from others."""
    launch.check_counts(args)
    launch.check_above_zero(args, "max_data_mib", "lr")
    tp = args.tensor_model_parallel_size
    launch.check_tensor_parallel_size(args, world)
    if args.sequence_parallel and tp == 1:
        raise UserMistake("--sequence-parallel needs a --tensor-model-parallel-size above 1.")
    one_micro_batch_each = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or one_micro_batch_each
    launch.check_multiples(
        args,
        ("vocab_size", tp, "the tensor-parallel size"),
        ("num_attention_heads", tp, "the tensor-parallel size"),
        ("seq_length", tp if args.sequence_parallel else 1, "the tensor-parallel size"),
        ("hidden_size", 2 * args.num_attention_heads, "twice --num-attention-heads (rotary halves)"),
        ("global_batch_size", one_micro_batch_each, "--micro-batch-size x data-parallel size"),
    )
    corpus.check_vocab_size(args)


def main(world: World) -> int:
    args = parse_arguments(world)
    launch.check_packages(PACKAGES)
    text = corpus.load_for_all(args, world)

    from training import train  # Megatron takes seconds to import: after the checks

    with launch.megatron(world, args.tensor_model_parallel_size, args.seed):
        return train(args, world, text)


if __name__ == "__main__":
    launch.run(main)
