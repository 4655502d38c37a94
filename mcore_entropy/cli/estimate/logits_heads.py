"""The two forms that hold logits: eager, and logits in the model's dtype with the statistics chunk by chunk.

Both as people write them (docs/decisions/0013-estimate.md has their code, tests/cli/heads.py runs it). Memory
counts in tensors of logits: autograd keeps or makes so many of a shard's [N, V / R] in fp32 at its peak.
"""

from __future__ import annotations

from mcore_entropy.cli.estimate.workload import FP32, Head, Moment, Workload, moment

CHUNK_OF_LOGITS = 2048
_PER_TOKEN = 64  # bytes of targets, results and their gradients
# By whether the entropy is asked for, and whether the vocabulary is sharded.
_TENSORS = {
    # One rank: log p and p, which are saved, and the gradients of log p, p and their product.
    (True, False): 5,
    (False, False): 3,  # log p, its gradient from the gather, the gradient for the logits
    # A shard has no log_softmax of its own: the logits less the maximum and their exponentials are saved.
    (True, True): 6,
    (False, True): 4,
}


def eager(work: Workload) -> Head:
    """`F.linear`, fp32, log_softmax, log-probs and entropy, differentiated by autograd."""
    tensors = _TENSORS[work.entropy, work.tensor_parallel > 1]
    statistics = moment(
        "statistics",
        {
            "fp32 tensors of all logits": tensors * _logits(work) * FP32,
            "gathered hidden": _gathered(work),
            "per token": work.tokens * _PER_TOKEN,
        },
    )
    return Head("eager", (statistics, _products(work)), 3 * work.product_flops(work.tokens))


def chunked(work: Workload) -> Head:
    """`F.linear`, then the statistics of 2048 tokens at a time, checkpointed: computed again in backward."""
    rows = min(CHUNK_OF_LOGITS, work.tokens)
    itemsize = work.dtype.itemsize
    logits = _logits(work) * itemsize
    tensors = _TENSORS[work.entropy, work.tensor_parallel > 1]
    common = {
        "logits": logits,
        "gathered hidden": _gathered(work),
        "per token": work.tokens * _PER_TOKEN,
    }
    last_chunk = moment(
        "the last chunk",
        {
            **common,
            "gradient of the logits": (work.tokens - rows) * work.columns * itemsize,
            "fp32 tensors of a chunk": tensors * rows * work.columns * FP32,
        },
    )
    # The chunks' gradients are put together: they, and the whole.
    together = moment("the chunks' gradients together", {**common, "gradient of the logits": 2 * logits})
    moments = (
        (last_chunk, _products(work)) if rows == work.tokens else (last_chunk, together, _products(work))
    )
    return Head("chunked", moments, 3 * work.product_flops(work.tokens))


def _logits(work: Workload) -> int:
    return work.tokens * work.columns


def _gathered(work: Workload) -> int:
    return work.hidden_bytes * work.sections if work.sections > 1 else 0


def _products(work: Workload) -> Moment:
    return moment(
        "products of the gradients",
        {
            "gradient of the logits": _logits(work) * work.dtype.itemsize,
            "gradient of hidden": work.hidden_bytes + _gathered(work),
            "gradient of weight": work.weight_bytes,
            "gathered hidden": _gathered(work),
            "per token": work.tokens * _PER_TOKEN,
        },
    )
