"""Log-probability and entropy of DTensors: a vocabulary sharded over one dimension of a device mesh.

[*] any leading shape of tokens, V global vocabulary, H hidden size. Shards may be uneven or empty: where a
rank's columns start comes from the DTensor. The vocabulary is never gathered, save by
`column_parallel_logits`, which is asked for whole logits.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mcore_entropy.adapters.column_parallel import ColumnParallelHead
from mcore_entropy.adapters.sharding import VocabularyOnMesh, checked_dtensor, known_placements, local_part
from mcore_entropy.execution import Execution
from mcore_entropy.functional.agreement import errors_on_every_rank
from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.logits import entropy_of_logits, statistics_of_logits
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, TokenStatistics, Wanted


def dtensor_entropy(
    logits: DTensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    execution: Execution | None = None,
) -> Tensor:
    """Entropy of every token's next-token distribution: `dtensor_log_probs_and_entropy` without a target.

    Returns:
        Entropy in nats of this rank's tokens, a plain tensor, fp32 (fp64 for fp64 logits).
    """
    vocabulary, local, per_token = _local_logits(logits, {"mask": mask, "temperature": temperature})
    return entropy_of_logits(
        local,
        per_token["mask"],
        per_token["temperature"],
        vocabulary.vocab_size(vocab_size),
        vocabulary.start,
        vocabulary.group,
        chunk_size,
        execution,
    )


def dtensor_log_probs_and_entropy(
    logits: DTensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    entropy: bool = True,
    metrics: tuple[str, ...] = (),
    execution: Execution | None = None,
) -> TokenStatistics:
    """Log-probability of each token's target, and entropy, of logits that are a DTensor.

    Args:
        logits: raw logits [*, V], bf16, fp16, fp32 or fp64; never changed. At most one mesh dimension shards
            V, evenly or not: `Shard(-1)`. The others are Replicate, or Shard of a token dimension. With V on
            no mesh dimension every rank computes its own tokens alone.
        target: global vocabulary index of each token's target, [*], an integer dtype: a plain tensor of this
            rank's tokens, or a DTensor on logits' mesh whose token dimensions are sharded as those of logits
            are. So are mask, bool [*], and a tensor temperature.
        vocab_size: columns at or beyond it have p = 0; None counts every column.
        ignore_index, chunk_size, entropy, metrics, execution: as in `vocab_parallel_log_probs_and_entropy`.

    Returns:
        TokenStatistics of this rank's tokens, plain tensors, fp32 (fp64 for fp64 logits), the same on every
        rank of the vocabulary's mesh dimension.

    Raises:
        ValueError: an argument or a placement does not fit (Partial, _StridedShard, two mesh dimensions that
            shard the vocabulary, shards that are not cut as DTensor cuts them); before any collective.

    Gradient: for logits, a DTensor of their placements. Collectives, over the vocabulary's mesh dimension
    alone, and what is saved for backward: as in `vocab_parallel_log_probs_and_entropy`; none in backward.
    """
    given = {"target": target, "mask": mask, "temperature": temperature}
    vocabulary, local, per_token = _local_logits(logits, given)
    with errors_on_every_rank(TensorParallelGroup.resolve(vocabulary.group)):
        keywords = Keywords(
            **per_token,
            ignore_index=ignore_index,
            vocab_size=vocabulary.vocab_size(vocab_size),
            vocab_start_index=vocabulary.start,
            chunk_size=chunk_size,
            execution=execution,
            wanted=Wanted.checked(entropy, metrics),
        )
    return statistics_of_logits(local, vocabulary.group, keywords)


def dtensor_linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: DTensor,
    target: Tensor,
    *,
    bias: DTensor | None = None,
    transform: LogitTransform | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
    tp_mesh: DeviceMesh | None = None,
    entropy: bool = True,
    metrics: tuple[str, ...] = (),
    execution: Execution | None = None,
) -> TokenStatistics:
    """Log-probability of each token's target, and entropy, of a column-parallel head of DTensors.

    Args:
        hidden: hidden states [*, H]: a plain tensor, the same on every tensor-parallel rank, where weight's
            mesh has one dimension; or a DTensor on weight's mesh: on the tensor-parallel dimension Replicate,
            or Shard of a token dimension (sequence parallel), which is gathered first; on others either.
        weight: [V, H], Shard(0) on the tensor-parallel dimension of its mesh, evenly or not, Replicate on
            others, in hidden's dtype (autocast casts both). That dimension is called "tp", or is `tp_mesh`.
        target: as in `dtensor_log_probs_and_entropy`, for the tokens of hidden that this rank has once it is
            gathered; so are mask and a tensor temperature.
        bias: [V], with weight's placements on its mesh.
        tp_mesh: the one-dimensional mesh of the tensor-parallel ranks, for a mesh without such a name.
        transform, ignore_index, chunk_size, entropy, metrics, execution: as in
            `linear_log_probs_and_entropy`.
        vocab_size: columns at or beyond it have p = 0; None counts every column.

    Returns:
        TokenStatistics of this rank's tokens, plain tensors, the same on every tensor-parallel rank.

    Raises:
        ValueError: an argument or a placement does not fit; before any collective but the gather of hidden.
            A weight that is sharded over anything but the tensor-parallel ranks is refused: FSDP's parameters
            outside FSDP's forward are, and their gradients would be wrong without a word.

    Gradients: hidden gets the complete one, in its placements; weight and bias one in theirs, but Partial on
    a mesh dimension that shards hidden's tokens. Collectives and what is saved: as in
    `linear_log_probs_and_entropy`; a sharded hidden costs one all-gather more, and it is the gathered one
    that is saved.
    """
    head = ColumnParallelHead.of(hidden, weight, bias, tp_mesh)
    given = {"target": target, "mask": mask, "temperature": temperature}
    vocabulary = head.vocabulary
    with errors_on_every_rank(TensorParallelGroup.resolve(vocabulary.group)):
        keywords = Keywords(
            **{n: vocabulary.local_tokens(n, value, head.tokens) for n, value in given.items()},  # type: ignore[arg-type] # checked below
            ignore_index=ignore_index,
            vocab_size=vocabulary.vocab_size(vocab_size),
            vocab_start_index=vocabulary.start,
            chunk_size=chunk_size,
            execution=execution,
            wanted=Wanted.checked(entropy, metrics),
        )
    options = LinearOptions(transform, tp_group=vocabulary.group)
    return fused_head(*head.local_operands(), options, keywords)


def column_parallel_logits(
    hidden: Tensor, weight: DTensor, bias: DTensor | None = None, *, tp_mesh: DeviceMesh | None = None
) -> Tensor:
    """The head's whole logits [*, V] of this rank's tokens, a plain tensor on every tensor-parallel rank.

    What the unsharded head would give, in hidden's dtype; the arguments and errors are those of
    `dtensor_linear_log_probs_and_entropy`. Every tensor-parallel rank has to use the logits alike: it
    is their gradient on this rank that each rank takes its columns of. Gradients: hidden's is complete.

    Collectives: an all-gather of the logits in forward, an all-reduce of hidden's gradient in backward.
    """
    head = ColumnParallelHead.of(hidden, weight, bias, tp_mesh)
    logits = F.linear(head.hidden_on_mesh(), head.weight, head.bias)
    assert isinstance(logits, DTensor)
    return local_part(logits.redistribute(placements=head.tokens), head.tokens)


def parallelize_lm_head(head: nn.Linear, tp_mesh: DeviceMesh, *, model: nn.Module | None = None) -> None:
    """Make a head column-parallel, in place: weight and bias become DTensor parameters, Shard(0) on tp_mesh.

    No hooks: the forward of the head has to know what to do with a DTensor, as the functions of this module
    do. The first rank's values count, as with torch's `parallelize_module`: every rank has to call.

    Args:
        head: with weight [V, H], the same on every rank, of which each keeps its rows.
        tp_mesh: one dimension, called "tp" unless later calls name the mesh.
        model: where to look for a module that shares the head's weight. A head cannot tell: without `model`
            a tied embedding silently keeps the old weight.

    Raises:
        ValueError: no nn.Linear, a mesh of several dimensions, parameters that are DTensors already, or, in
            `model`, a tied weight: shard the embedding's parameter, then give it to the head.

    Collectives: a scatter for each parameter.
    """
    if not isinstance(head, nn.Linear):
        raise ValueError(f"head: expected an nn.Linear, got {type(head).__name__}")
    if not isinstance(tp_mesh, DeviceMesh) or tp_mesh.ndim != 1:
        raise ValueError(f'tp_mesh: expected a mesh of one dimension, as mesh["tp"] gives, got {tp_mesh!r}')
    parameters = dict(head.named_parameters(recurse=False))
    if any(isinstance(p, DTensor) for p in parameters.values()):
        raise ValueError(
            "head: expected plain parameters, got DTensors; a tp_plan or parallelize_module sharded it before"
        )
    for name, module in () if model is None else model.named_modules():
        if module is not head and any(p is head.weight for p in module.parameters(recurse=False)):
            raise ValueError(
                f"head: expected a weight of its own, got the one of {name!r}; tied weights have to stay one "
                "parameter: shard that of the embedding (RowwiseParallel), then set head.weight to it"
            )
    for name, parameter in parameters.items():
        sharded = distribute_tensor(parameter.detach(), tp_mesh, [Shard(0)])
        head.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _local_logits(logits: object, given: dict[str, Any]) -> tuple[VocabularyOnMesh, Tensor, dict[str, Any]]:
    """The vocabulary, this rank's logits, and its part of what is given per token."""
    hint = "a plain shard goes to mcore_entropy.vocab_parallel_log_probs_and_entropy with its tp_group"
    checked = checked_dtensor("logits", logits, hint)
    placements = known_placements("logits", checked)
    if checked.dim() == 0:
        raise ValueError("logits: expected shape [*, V], got a number")
    vocabulary = VocabularyOnMesh.of("logits", checked, placements, checked.dim() - 1)
    tokens = vocabulary.replicated(placements)
    per_token = {name: vocabulary.local_tokens(name, value, tokens) for name, value in given.items()}
    return vocabulary, local_part(checked, placements), per_token
