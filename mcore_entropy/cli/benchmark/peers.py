"""Other projects' fused heads, where they are installed: an adapter each, checked as every head is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist
from torch import Tensor

from mcore_entropy.cli.benchmark.heads import Head, Results
from mcore_entropy.cli.benchmark.problem import IGNORED, Inputs, Problem
from mcore_entropy.cli.benchmark.ranks import Group


@dataclass(frozen=True)
class Peer:
    """A package and what it has.

    Attributes:
        package: what pip installs.
        tensor_parallel: it can take a shard of the vocabulary.
        on_cpu: it runs there.
    """

    package: str
    head: Head
    tensor_parallel: bool
    on_cpu: bool


def peers(problem: Problem) -> Iterator[tuple[Head, str | None]]:
    """Each, and why it cannot take part, or None."""
    for peer in _PEERS:
        try:
            version(peer.package)
        except PackageNotFoundError:
            yield peer.head, "not installed"
            continue
        if problem.ranks > 1 and not peer.tensor_parallel:
            yield peer.head, "it takes no shard of a vocabulary"
        elif problem.device.type == "cpu" and not peer.on_cpu:
            yield peer.head, "it needs a GPU"
        else:
            yield peer.head, None


def liger(inputs: Inputs, group: Group) -> Results:
    """liger-kernel from 0.8.5: log-prob and entropy for each token, and a form for shards."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    target = inputs.ignoring_target()
    if group is None:
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            inputs.hidden, inputs.weight, target, 1.0, IGNORED, 1, True
        )
    else:
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            inputs.hidden, inputs.weight, target, group, 1.0, IGNORED, 1, True
        )
    return -nll, entropy


def liger_loss(inputs: Inputs, _group: Group) -> Results:
    """What most of liger-kernel's users call: the mean loss, whose gradient its forward computes."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return (loss(inputs.weight, inputs.hidden, inputs.ignoring_target()),)


def cut_cross_entropy(inputs: Inputs, _group: Group) -> Results:
    from cut_cross_entropy import linear_cross_entropy

    implementation = "torch_compile" if inputs.hidden.device.type == "cpu" else "cce"
    nll = linear_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.ignoring_target(),
        ignore_index=IGNORED,
        reduction="none",
        impl=implementation,
    )
    return (inputs.masked(-nll.float()),)


def verl(inputs: Inputs, group: Group) -> Results:
    """Its caller sums the hidden gradient over the ranks, and so does a hook here."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden = inputs.hidden
    if group is not None:
        hidden = hidden.view_as(hidden)

        def summed(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient

        hidden.register_hook(summed)
    log_probs, entropy = linear_cross_entropy(hidden, inputs.weight, inputs.target, 1.0, "none", group)
    return inputs.masked(log_probs), inputs.masked(entropy)


_PEERS = (
    Peer("liger-kernel", Head("liger-kernel", liger), tensor_parallel=True, on_cpu=True),
    Peer(
        "liger-kernel",
        Head("liger-kernel-loss", liger_loss, ("loss",)),
        tensor_parallel=False,
        on_cpu=False,
    ),
    Peer(
        "cut-cross-entropy",
        Head("cut-cross-entropy", cut_cross_entropy, ("log_probs",)),
        tensor_parallel=False,
        on_cpu=True,
    ),
    Peer("verl", Head("verl", verl), tensor_parallel=True, on_cpu=False),
)
