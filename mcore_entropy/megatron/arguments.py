"""The command-line arguments that make an `EntropyConfig`."""

from __future__ import annotations

import argparse
from typing import get_args

from mcore_entropy.config import EntropyConfig, Head
from mcore_entropy.execution import Execution

_TURNS_ON = "entropy_aware_output_layer"


def add_entropy_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The argument group "entropy", as Megatron's ``extra_args_provider`` adds one; gives the parser back.

    `config_from_args` makes an `EntropyConfig` of what was parsed.
    """
    group = parser.add_argument_group(title="entropy")
    group.add_argument(
        "--entropy-aware-output-layer",
        action="store_true",
        help="Exact log-probability and entropy from the output layer, which is swapped for one that never "
        "has logits in memory. Every other argument of this group needs it.",
    )
    group.add_argument(
        "--entropy-coeff",
        type=float,
        default=0.0,
        help="The loss is minus the log-probability minus this times the entropy; at 0 the entropy is only "
        "reported.",
    )
    group.add_argument("--entropy-temperature", type=float, default=1.0, help="Logits are divided by it.")
    group.add_argument(
        "--entropy-chunk-size",
        type=int,
        default=None,
        help="Tokens of one reduction over the tensor-parallel group.",
    )
    group.add_argument(
        "--entropy-head",
        choices=get_args(Head),
        default="fused",
        help="fused: no logits in memory. logits: from those of Megatron's own output layer.",
    )
    group.add_argument(
        "--entropy-logits-budget-mib",
        type=int,
        default=0,
        help="MiB of logits that the fused head may keep for its backward instead of computing them again.",
    )
    group.add_argument(
        "--entropy-metrics",
        nargs="+",
        default=[],
        metavar="METRIC",
        help='Further means to report, out of "sum_pi_squared", "varentropy", "max_prob".',
    )
    group.add_argument(
        "--entropy-log-interval",
        type=int,
        default=1,
        help="Entropy and metrics are reported anew every so many iterations, and repeated in between, so "
        "that a mean over Megatron's own --log-interval lags behind.",
    )
    return parser


def entropy_head_wanted(args: argparse.Namespace) -> bool:
    """Whether the arguments of `add_entropy_args`, if they were added at all, ask for the swapped head."""
    return bool(getattr(args, _TURNS_ON, False))


def config_from_args(args: argparse.Namespace) -> EntropyConfig | None:
    """What the arguments of `add_entropy_args` ask for; None where the output layer is to stay Megatron's.

    Raises:
        ValueError: an argument is out of its range, contradicts another, or would be ignored.
    """
    if not entropy_head_wanted(args):
        defaults = add_entropy_args(argparse.ArgumentParser()).parse_args([])
        for name, default in vars(defaults).items():
            if getattr(args, name, default) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected --{_TURNS_ON.replace('_', '-')} with it, without "
                    "which it would be ignored"
                )
        return None
    return EntropyConfig(
        temperature=args.entropy_temperature,
        chunk_size=args.entropy_chunk_size,
        metrics=tuple(args.entropy_metrics),
        execution=Execution(logits_budget_mib=args.entropy_logits_budget_mib),
        head=args.entropy_head,
        entropy_coeff=args.entropy_coeff,
        log_interval=args.entropy_log_interval,
    )
