"""Teaches a small Megatron-core GPT by GRPO to write numbers as sums, and watches its entropy.

    torchrun --nproc-per-node 2 examples/grpo_gpt.py --tensor-model-parallel-size 2 --target-entropy 0.6

A short supervised warm-up on generated problems comes first. Then every iteration samples a group of answers
to each prompt ("12=" may be answered by "3+9", "2+2+8", ...), rewards the right ones by 1, and updates the
policy by the clipped loss of GRPO, with a KL term to the frozen model of the warm-up and an entropy bonus.
swap_output_layer gives log-probs and entropies of the answers' tokens alone, exact over the sharded
vocabulary; the old policy's and the reference's log-probs come without a graph and without entropy.
Runs on GPUs (NCCL) where there is one for each process, otherwise on CPUs (gloo). Number of processes =
tensor-parallel x data-parallel size.

What you should see: the reward rises. Without a bonus the entropy falls and falls: the policy ends up
with one or two right answers to each prompt. With --target-entropy the reward rises too, and the answers stay
different. docs/grpo.md has the picture.

The folder --save gets plot.png, metrics.jsonl, tensorboard/ and a torch_dist checkpoint.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import launch
import sums
from launch import UserMistake, World

PACKAGES = {"mcore_entropy": "mcore-entropy", "megatron": "megatron-core"}
PACKAGES |= {name: name for name in ("tensorboard", "tqdm", "matplotlib", "psutil")}  # psutil: checkpoints


def parse_arguments(world: World) -> argparse.Namespace:
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("parallelism")
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="%(default)s")
    group = parser.add_argument_group("entropy")
    add = group.add_argument
    add("--entropy-coeff", type=float, default=0.0, metavar="C", help="the loss has -C * entropy (0)")
    add(
        "--target-entropy",
        type=float,
        metavar="NATS",
        help="adapt the coefficient from C on: a step up below this mean entropy of a token, a step down "
        "above it, never below 0",
    )
    add("--entropy-coeff-step", type=float, metavar="X", help="that step (0.002)")
    add(
        "--compare-stock",
        type=int,
        nargs="?",
        const=10,
        metavar="K",
        help="at the first and every K-th iteration (10) compute log-probs and entropies from the stock "
        "logits too, print how far they differ, and exit with 1 if it is more than rounding",
    )
    group = parser.add_argument_group("policy optimization")
    add = group.add_argument
    add("--prompts", type=int, default=32, metavar="N", help="of an iteration, on all ranks (%(default)s)")
    add("--group-size", type=int, default=16, metavar="N", help="answers to a prompt (%(default)s)")
    add("--updates", type=int, default=2, metavar="N", help="of an iteration, each on its part (%(default)s)")
    add("--loss", choices=["token-mean", "sequence-mean"], default="token-mean", help="%(default)s")
    add(
        "--clip-ratio",
        type=float,
        nargs="+",
        default=[0.2],
        metavar="X",
        help="the ratio's bounds are 1 - X and 1 + X; two numbers are the lower and the upper one (0.2)",
    )
    add("--kl-coeff", type=float, default=0.0, metavar="C", help="the loss has C * KL to the reference (0)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of answers and log-probs (%(default)s)")
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=int, default=2, metavar="N", help="%(default)s")
    add("--hidden-size", type=int, default=64, metavar="N", help="%(default)s")
    add("--num-attention-heads", type=int, default=4, metavar="N", help="%(default)s")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--warmup-iters", type=int, default=250, metavar="N", help="of supervised learning (%(default)s)")
    add("--warmup-lr", type=float, metavar="LR", help="0.003")
    add("--train-iters", type=int, default=300, metavar="N", help="of GRPO (%(default)s)")
    add("--lr", type=float, default=5e-4, help="of GRPO, constant after its warm-up (%(default)s)")
    add("--lr-warmup-iters", type=int, default=20, metavar="N", help="%(default)s")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="%(default)s")
    add("--clip-grad", type=float, default=1.0, metavar="NORM", help="%(default)s")
    add("--seed", type=int, default=1234, metavar="N", help="%(default)s")
    add("--log-interval", type=int, default=10, metavar="N", help="without a progress bar (%(default)s)")
    add("--save", type=Path, default=Path("runs/grpo_gpt"), metavar="DIR", help="%(default)s")
    # What the model and its optimizer take beside that.
    parser.set_defaults(vocab_size=sums.VOCABULARY, seq_length=sums.LENGTH)
    parser.set_defaults(bf16=False, sequence_parallel=False, untie_embeddings_and_output_weights=False)
    args = parser.parse_args()
    check_arguments(args, world)
    return args


def check_arguments(args: argparse.Namespace, world: World) -> None:
    """Finds what is wrong before anything slow happens, and sets the sizes that follow from others."""
    launch.check_counts(args)
    launch.check_finite(args)
    if args.target_entropy is None and args.entropy_coeff_step is not None:
        raise UserMistake("--entropy-coeff-step is for --target-entropy, and does nothing without it.")
    if not args.warmup_iters and args.warmup_lr is not None:
        raise UserMistake("--warmup-lr does nothing with --warmup-iters 0.")
    args.entropy_coeff_step = 2e-3 if args.entropy_coeff_step is None else args.entropy_coeff_step
    args.warmup_lr = 3e-3 if args.warmup_lr is None else args.warmup_lr
    launch.check_above_zero(args, "lr", "warmup_lr", "temperature", "clip_grad", "entropy_coeff_step")
    for name in ("warmup_iters", "lr_warmup_iters", "kl_coeff", "weight_decay", "target_entropy"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise UserMistake(f"{launch.option(name)} must not be negative, not {value:g}.")
    if args.target_entropy is not None and args.entropy_coeff < 0:
        raise UserMistake("--entropy-coeff must not be negative with --target-entropy, which adapts it.")
    uniform = math.log(args.vocab_size)
    if args.target_entropy is not None and args.target_entropy > uniform:
        raise UserMistake(
            f"--target-entropy {args.target_entropy:g} is above ln V = {uniform:.2f}, the largest there is."
        )
    if len(args.clip_ratio) > 2 or not all(0 < bound < math.inf for bound in args.clip_ratio):
        given = " ".join(f"{bound:g}" for bound in args.clip_ratio)
        raise UserMistake(f"--clip-ratio takes one or two numbers above 0, such as 0.2 0.28, not {given}.")
    if args.clip_ratio[0] >= 1:
        raise UserMistake(
            f"--clip-ratio {args.clip_ratio[0]:g}: the lower bound of the ratio, 1 minus it, must be above 0."
        )
    if args.group_size < 2:
        raise UserMistake("--group-size must be at least 2: advantages are over others of the group.")
    launch.check_tensor_parallel_size(args, world)
    launch.check_multiples(
        args,
        ("vocab_size", args.tensor_model_parallel_size, "the tensor-parallel size"),
        ("num_attention_heads", args.tensor_model_parallel_size, "the tensor-parallel size"),
        ("hidden_size", 2 * args.num_attention_heads, "twice --num-attention-heads (rotary halves)"),
        ("prompts", args.updates * args.data_parallel_size, "--updates x data-parallel size"),
    )


def main(world: World) -> int:
    args = parse_arguments(world)
    launch.check_packages(PACKAGES)
    world.from_rank_zero(lambda: launch.make_folder(args.save, "save"))

    from grpo_training import train  # Megatron takes seconds to import: after the checks

    with launch.megatron(world, args.tensor_model_parallel_size, args.seed):
        return train(args, world)


if __name__ == "__main__":
    launch.run(main)
