"""verl's functions by verl's names, with its signatures, argument order and result shapes.

[*] any leading shape of N tokens, H hidden size, V global vocabulary over tp ranks. The names of logits on a
sharded vocabulary use Megatron's tensor-parallel group where Megatron is initialised; the `..._from_logits`
names and `linear_cross_entropy` without a group have the whole vocabulary on every rank. Logits are never
changed, in forward or backward: no call needs a clone before it, and their order is free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.adapters.entropy_from_logits import entropy_from_logits, entropy_from_logits_with_chunking
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.arguments import FLOATS, check_bool, check_strided, check_tensor
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.logits import (
    statistics_of_logits,
    vocab_parallel_entropy,
    vocab_parallel_entropy_with_chunking,
    vocab_parallel_log_probs_and_entropy,
)
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import GroupArgument, TensorParallelGroup, checks_enabled
from mcore_entropy.statistics import TokenStatistics, Wanted

# Four of them exist already: verl's arguments come first in them, what is ours is keyword-only.
__all__ = [
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "linear_cross_entropy",
    "linear_cross_entropy_statistics",
    "logprobs_from_logits",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
    "vocab_parallel_sum_pi_squared",
]


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label.

    Args:
        logits: this rank's columns [*, V/tp], as in `vocab_parallel_entropy`.
        labels: global vocabulary indices [*], an integer dtype. -100 gives 0 and no gradient; other values
            outside the vocabulary are a ValueError on the CPU and NaN on an accelerator.

    Returns:
        [*], fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument does not fit; before any collective.

    Collectives and what is saved for backward: see `vocab_parallel_log_probs_and_entropy`.
    """
    return vocab_parallel_log_probs_and_entropy(logits, labels, entropy=False).log_probs


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    """Sum of p squared of each token's distribution, [*], fp32 (fp64 for fp64 logits); detached.

    Args:
        vocab_parallel_logits: this rank's columns [*, V/tp].

    Raises:
        ValueError: an argument does not fit; before any collective.

    Collectives: one MAX all-reduce of N and one SUM all-reduce of 3 N numbers.
    """
    return sum_pi_squared_over(None, vocab_parallel_logits)


def sum_pi_squared_over(tp_group: GroupArgument, logits: Tensor) -> Tensor:
    """`vocab_parallel_sum_pi_squared` over the ranks of a group, or on a single one."""
    with errors_on_every_rank(TensorParallelGroup.resolve(tp_group)):
        check_tensor("vocab_parallel_logits", logits, FLOATS, None)
    logits = logits.detach()
    no_labels = torch.full(logits.shape[:-1], Keywords.ignore_index, device=logits.device)
    keywords = Keywords(target=no_labels, wanted=Wanted(entropy=False, metrics=("sum_pi_squared",)))
    return statistics_of_logits(logits, tp_group, keywords).metrics["sum_pi_squared"]


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of each label, on a vocabulary that is not sharded, whatever groups Megatron has.

    Args:
        logits: [*, V], bf16, fp16, fp32 or fp64, any strides.
        labels: [*], as in `vocab_parallel_log_probs_from_logits`.
        inplace_backward: permission to overwrite the logits with their gradient. True is no order to: they
            stay as they are, and so True and False give the same, at the same cost.

    Returns:
        [*], fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument does not fit.

    Saved for backward: the logits and labels by reference, and two numbers a token.
    """
    check_bool("inplace_backward", inplace_backward)
    keywords = Keywords(target=labels, wanted=Wanted(entropy=False))
    return statistics_of_logits(logits, TensorParallelGroup.single_rank(), keywords).log_probs


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
    *,
    calculate_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and entropy, of the logits hidden @ weight^T / temperature.

    The first result is the log-probability, minus the cross entropy. Arguments, gradients, errors,
    collectives and what is saved for backward: `linear_cross_entropy_statistics`.

    Args:
        reduction: "none", "sum" or "mean", of the log-probabilities alone; over all N tokens, those with the
            label -100 too. The mean of no tokens is NaN, as torch's.
        calculate_entropy: False leaves the entropy out: it costs nothing, and the result's is None.

    Returns:
        The log-probabilities [N], or a number if they are reduced, and the entropy [N]; fp32 (fp64 for fp64
        input), the same on every rank of the group.
    """
    with errors_on_every_rank(_group(dist_process_group)):
        if not isinstance(reduction, str) or reduction.lower() not in _REDUCTIONS:
            raise ValueError(f"reduction: expected 'none', 'sum' or 'mean', got {reduction!r}")
    statistics = linear_cross_entropy_statistics(
        hidden, weight, labels, temperature, dist_process_group, calculate_entropy=calculate_entropy
    )
    return _REDUCTIONS[reduction.lower()](statistics.log_probs), statistics.entropy


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "sum": torch.sum,
    "mean": torch.mean,
}


def linear_cross_entropy_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    dist_process_group: dist.ProcessGroup | None = None,
    *,
    calculate_entropy: bool = True,
    calculate_sum_pi_squared: bool = False,
) -> TokenStatistics:
    """`linear_cross_entropy` with the sum of p squared, which verl's pair of results has no place for.

    Args:
        hidden: [*, H] of two dimensions or more, the same on every rank of the group and of the full
            sequence: with sequence parallelism the caller has gathered it. Or jagged, [b, j, H].
        weight: this rank's rows of the head's weight, [V/tp, H], in hidden's dtype; or [H, V/tp], as verl's
            first release had it, where the shapes tell them apart (a square one is [V/tp, H]). The latter
            may be copied, tile by tile.
        labels: global vocabulary indices in the order of hidden's tokens: in its shape, or packed as [N] or
            [1, N], or jagged, [b, j], of hidden's sequences where that is jagged. -100 and values out of
            range: see `vocab_parallel_log_probs_from_logits`.
        temperature: the logits are divided by it: a positive number, or one per token in a shape that labels
            may have, of which one not above 0 gives NaN.
        dist_process_group: the group the vocabulary is sharded over; None, with Megatron too, means that
            weight is the whole vocabulary's.
        calculate_entropy: False leaves the entropy out.
        calculate_sum_pi_squared: True adds the metric ``"sum_pi_squared"``, detached.

    Returns:
        TokenStatistics of shape [N].

    Raises:
        ValueError: an argument does not fit; before any collective.

    Gradients: under tensor parallelism hidden's is **this rank's part** of the sum over the group, as verl's
    is: the backward of verl's sequence-parallel gather adds the parts up, and a complete gradient would come
    out tp times too large. A caller without that gather has to add them up himself, or calls
    `mcore_entropy.linear_log_probs_and_entropy`, whose gradient is complete, with sequence parallelism too
    (there gather and call are one). The part is accumulated in fp32 and rounded to hidden's dtype before the
    caller's sum, so that in half precision the sum has tp roundings, where the complete gradient has one.
    weight's is that of this rank's rows.

    Collectives: those of `mcore_entropy.linear_log_probs_and_entropy` in forward, none in backward. Saved for
    backward: hidden, weight, labels by reference where they are contiguous, a tensor temperature, and three
    numbers a token.
    """
    group = _group(dist_process_group)
    with errors_on_every_rank(group):
        check_bool("calculate_entropy", calculate_entropy)
        check_bool("calculate_sum_pi_squared", calculate_sum_pi_squared)
        _check_same_sequences(hidden, labels=labels, temperature=temperature)
        hidden = _packed("hidden", hidden)
        check_tensor("hidden", hidden, FLOATS, None)
        if hidden.dim() < 2:
            raise ValueError(f"hidden: expected shape [*, H] with tokens, got {tuple(hidden.shape)}")
        tokens = hidden.shape[:-1]
        labels = _in_order("labels", labels, tokens)
        if isinstance(temperature, Tensor):
            # A nested one holds a value a token, however few; a dense one with one value is everybody's.
            one = not temperature.is_nested and temperature.numel() == 1
            temperature = _packed("temperature", temperature)
            temperature = temperature.reshape(()) if one else _in_order("temperature", temperature, tokens)
    metrics = ("sum_pi_squared",) if calculate_sum_pi_squared else ()
    wanted = Wanted(entropy=calculate_entropy, metrics=metrics)
    return fused_head(
        hidden.flatten(0, -2),
        _rows_of_vocabulary(weight, hidden.shape[-1]),
        None,
        LinearOptions(tp_group=group, partial_hidden=True),
        Keywords(target=labels, temperature=temperature, wanted=wanted),
    )


def _group(dist_process_group: dist.ProcessGroup | None) -> TensorParallelGroup:
    """verl's None is an unsharded vocabulary."""
    if dist_process_group is None:
        return TensorParallelGroup.single_rank()
    return TensorParallelGroup.resolve(dist_process_group)


def _check_same_sequences(hidden: Tensor, **others: object) -> None:
    """Raise ValueError unless jagged arguments have hidden's sequences: tokens are paired by their order.

    Lengths on an accelerator are compared with ``MCORE_ENTROPY_CHECKS=1`` alone: it costs a host sync.
    """
    of_hidden = _offsets(hidden)
    for name, other in others.items():
        of_other = _offsets(other)
        if of_hidden is None or of_other is None:
            continue
        same = of_hidden.shape == of_other.shape
        if same and (of_hidden.device.type == "cpu" or checks_enabled()):
            same = of_hidden.tolist() == of_other.tolist()
        if not same:
            raise ValueError(
                f"{name}: expected the sequences of hidden, of lengths {of_hidden.diff().tolist()}, got "
                f"{of_other.diff().tolist()}"
            )


def _offsets(value: object) -> Tensor | None:
    """Where a jagged tensor's sequences begin; None for others."""
    if not isinstance(value, Tensor) or not value.is_nested or value.layout != torch.jagged:
        return None
    offsets: Tensor = value.offsets()  # type: ignore[attr-defined]
    return offsets


def _packed(name: str, value: Tensor) -> Tensor:
    """A jagged tensor's rows, one sequence after the other; dense ones as they are.

    Raises:
        ValueError: a nested tensor whose rows do not lie like that, or a tensor of another layout.
    """
    if not isinstance(value, Tensor) or not value.is_nested:
        check_strided(name, value)
        return value
    if value.layout != torch.jagged or not value.is_contiguous():
        raise ValueError(
            f"{name}: expected a dense tensor or a contiguous nested one of layout torch.jagged, got one of "
            f"layout {value.layout}, contiguous: {value.is_contiguous()}; make it with "
            "torch.nested.nested_tensor_from_jagged, without lengths"
        )
    return value.values()


def _in_order(name: str, value: Tensor, tokens: torch.Size) -> Tensor:
    """One value a token, [N], if its order is that of hidden's tokens.

    Raises:
        ValueError: another number of tokens, or two dimensions of tokens that are not hidden's.
    """
    value = _packed(name, value)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    own, of_hidden = ([size for size in shape if size != 1] for shape in (value.shape, tokens))
    if value.numel() != tokens.numel() or (len(own) > 1 and len(of_hidden) > 1 and own != of_hidden):
        raise ValueError(
            f"{name}: expected one value a token, packed or in the shape {tuple(tokens)} of hidden's tokens, "
            f"got {tuple(value.shape)}; Megatron's labels are [b, s], its hidden states [s, b, H]: transpose "
            "the labels"
        )
    return value.reshape(-1)


def _rows_of_vocabulary(weight: Tensor, width: int) -> Tensor:
    """weight as [V/tp, H]; what is no dense matrix as it is, for the head to refuse."""
    dense = isinstance(weight, Tensor) and not weight.is_nested
    if dense and weight.dim() == 2 and weight.shape[1] != width == weight.shape[0]:
        return weight.t()
    return weight
