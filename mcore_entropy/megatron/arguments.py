"""What a swapped head is told once: `EntropyConfig`, and the command-line arguments that make one."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from mcore_entropy.execution import Execution
from mcore_entropy.functional.arguments import checked_chunk_size, checked_temperature_number
from mcore_entropy.statistics import LogitTransform, Wanted

Head = Literal["fused", "logits"]

_TURNS_ON = "entropy_aware_output_layer"


@dataclass(frozen=True)
class EntropyConfig:
    """How an `EntropyAwareOutputLayer` computes its statistics; immutable, every field has a default.

    Args:
        entropy: compute the entropy as well as the log-prob, unless a request says otherwise.
        temperature: the logits are divided by it, unless a request says otherwise; positive and finite.
        chunk_size: tokens of one reduction over the tensor-parallel group; None means 8192 on a GPU and
            2048 on the CPU for the fused head, all tokens for head="logits".
        vocab_size: columns of the vocabulary that count, so that Megatron's padding has p = 0. None counts
            the padding too, as Megatron's own loss does.
        ignore_index: a label of this value gives log-prob 0 and no gradient.
        metrics: detached extras out of ``"sum_pi_squared"``, ``"varentropy"``, ``"max_prob"``.
        transform: what the model does to its logits after the head.
        execution: how to compute it.
        head: ``"fused"`` never has logits in memory and never rounds them to half precision; ``"logits"``
            takes those of Megatron's own layer, in its dtype and with its memory.
        entropy_coeff: what the loss of `mcore_entropy.megatron.loss` takes off, times the entropy.
        log_interval: that loss reports entropy and metrics anew every so many iterations.

    Raises:
        ValueError: a field is out of its range, or contradicts another.
    """

    entropy: bool = True
    temperature: float = 1.0
    chunk_size: int | None = None
    vocab_size: int | None = None
    ignore_index: int = -100
    metrics: tuple[str, ...] = ()
    transform: LogitTransform | None = None
    execution: Execution = field(default_factory=Execution)
    head: Head = "fused"
    entropy_coeff: float = 0.0
    log_interval: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", Wanted.checked(self.entropy, self.metrics).metrics)
        checked_temperature_number(self.temperature)
        checked_chunk_size(self.chunk_size, default=1)
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size <= 0):
            raise ValueError(f"vocab_size: expected a positive int or None, got {self.vocab_size!r}")
        if type(self.ignore_index) is not int:
            raise ValueError(f"ignore_index: expected an int, got {self.ignore_index!r}")
        if self.transform is not None and not isinstance(self.transform, LogitTransform):
            raise ValueError(f"transform: expected a LogitTransform or None, got {self.transform!r}")
        if not isinstance(self.execution, Execution):
            raise ValueError(f"execution: expected an Execution, got {self.execution!r}")
        if self.head not in get_args(Head):
            raise ValueError(f"head: expected one of {get_args(Head)}, got {self.head!r}")
        if self.head == "logits" and self.execution.logits_budget_mib:
            raise ValueError(
                "logits_budget_mib: expected 0 with head='logits', which keeps all of Megatron's logits "
                f"anyway, got {self.execution.logits_budget_mib}"
            )
        if self.head == "logits" and self.transform is not None and self.transform.softcap is not None:
            raise ValueError("transform: expected no softcap with head='logits', got one; use head='fused'")
        if type(self.log_interval) is not int or self.log_interval < 1:
            raise ValueError(f"log_interval: expected a positive int, got {self.log_interval!r}")
        number = isinstance(self.entropy_coeff, int | float) and not isinstance(self.entropy_coeff, bool)
        if not number or not math.isfinite(self.entropy_coeff):
            raise ValueError(f"entropy_coeff: expected a finite number, got {self.entropy_coeff!r}")
        if self.entropy_coeff and not self.entropy:
            raise ValueError(f"entropy_coeff: expected 0 with entropy=False, got {self.entropy_coeff}")


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
