"""A call in the form that an op takes: tensors, numbers and strings; and an op's outputs in the form of ours.

Dynamo turns our records into these arguments while it traces, and the op turns them back while it runs. Every
argument is checked there, by the code that checks it without compilation.

[*] any leading shape of N tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_entropy.execution import Execution
from mcore_entropy.functional.arguments import TokenArguments, checked_execution
from mcore_entropy.functional.autograd import own_output
from mcore_entropy.functional.chunked import TokenResults
from mcore_entropy.functional.problem import Keywords, Problem
from mcore_entropy.parallel import GroupArgument, TensorParallelGroup
from mcore_entropy.statistics import Normalizer, Wanted

# A CUDA graph cannot hold the host sync that leaving rows out costs. Older torch has no such tag.
OP_OPTIONS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)


class Call(NamedTuple):
    """The arguments that every op takes, in the order of `CALL_SCHEMA`.

    A number that a program may change is one of its own, since dynamo may make it symbolic.

    Attributes:
        temperature: of all tokens where `temperature_per_token` is None.
        group: name of the process group, None for an unsharded vocabulary.
        log_probs: whether there is a target. The results then have log_probs first.
        metrics: their names, separated by commas.
    """

    target: Tensor | None
    mask: Tensor | None
    temperature_per_token: Tensor | None
    temperature: float
    ignore_index: int
    vocab_size: int | None
    vocab_start_index: int | None
    chunk_size: int | None
    group: str | None
    log_probs: bool
    entropy: bool
    metrics: str
    backend: str
    workspace_mib: int | None
    logits_budget_mib: int
    compact_rows: bool
    deterministic: bool

    def resolved_group(self) -> TensorParallelGroup:
        return TensorParallelGroup.named(self.group)

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics.split(",")) if self.metrics else ()

    def keywords(self) -> Keywords:
        """What `call_of` was given."""
        names = self.metric_names()
        wanted = Wanted.checked(self.entropy, names) if self.log_probs else Wanted(False, self.entropy)
        return Keywords(
            wanted=wanted,
            target=self.target,
            mask=self.mask,
            temperature=(
                self.temperature if self.temperature_per_token is None else self.temperature_per_token
            ),
            ignore_index=self.ignore_index,
            vocab_size=self.vocab_size,
            vocab_start_index=self.vocab_start_index,
            chunk_size=self.chunk_size,
            execution=Execution(
                self.backend,
                self.workspace_mib,
                self.logits_budget_mib,
                self.compact_rows,
                self.deterministic,
            ),
        )


CALL_SCHEMA = (
    "Tensor? target, Tensor? mask, Tensor? temperature_per_token, float temperature, SymInt ignore_index, "
    "SymInt? vocab_size, SymInt? vocab_start_index, SymInt? chunk_size, str? group, bool log_probs, "
    "bool entropy, str metrics, str backend, SymInt? workspace_mib, SymInt logits_budget_mib, "
    "bool compact_rows, bool deterministic"
)


def call_of(tp_group: GroupArgument, keywords: Keywords) -> Call:
    """A call's keywords as arguments of an op; dynamo traces this."""
    execution = checked_execution(keywords.execution)
    temperature = keywords.temperature
    per_token = isinstance(temperature, Tensor)
    return Call(
        target=keywords.target,
        mask=keywords.mask,
        temperature_per_token=temperature if isinstance(temperature, Tensor) else None,
        temperature=1.0 if per_token else temperature,  # type: ignore[arg-type] # not a tensor
        ignore_index=keywords.ignore_index,
        vocab_size=keywords.vocab_size,
        vocab_start_index=keywords.vocab_start_index,
        chunk_size=keywords.chunk_size,
        group=TensorParallelGroup.resolve(tp_group).name,
        log_probs=keywords.wanted.target,
        entropy=keywords.wanted.entropy,
        metrics=",".join(keywords.wanted.metrics),
        backend=execution.backend,
        workspace_mib=execution.workspace_mib,
        logits_budget_mib=execution.logits_budget_mib,
        compact_rows=execution.compact_rows,
        deterministic=execution.deterministic,
    )


class Forward(Protocol):
    """What both forms' forward gives."""

    @property
    def problem(self) -> Problem: ...
    @property
    def tokens(self) -> TokenArguments: ...
    @property
    def results(self) -> TokenResults: ...


def outputs_of_op(forward: Forward) -> list[Tensor]:
    """log_probs [*], entropy [*] and the metrics [*], as far as they are wanted, then what a backward needs.

    That is, [N] each, the normalizer's maximum and ln S, and the entropy again: autograd saves it, and a
    caller may change his own in place.
    """
    problem, results = forward.problem, forward.results
    values = [results.log_probs, results.entropy, *results.metrics.values()]
    outputs = [own_output(problem, value) for value in values]
    saved = (results.normalizer.maximum, results.normalizer.log_sum, results.entropy)
    return [output for output in (*outputs, *saved) if output is not None]


def fake_outputs(call: Call, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Those of `outputs_of_op` without their values."""
    results = call.log_probs + call.entropy + len(call.metric_names())
    saved = 2 + call.entropy
    sizes = [shape] * results + [(math.prod(shape),)] * saved
    return [like.new_empty(size, dtype=dtype) for size in sizes]


def results_of(call: Call, outputs: list[Tensor]) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
    """log_probs, entropy and the metrics out of an op's outputs; dynamo traces this."""
    log_probs = outputs[0] if call.log_probs else None
    entropy = outputs[1 if call.log_probs else 0] if call.entropy else None
    first = call.log_probs + call.entropy
    names = call.metric_names()
    return log_probs, entropy, dict(zip(names, outputs[first : first + len(names)], strict=True))


def save_call(ctx: Any, inputs: tuple[Tensor | None, ...], call: Call, outputs: list[Tensor]) -> None:
    """Save all that `restore_call` gives back."""
    saved = 2 + call.entropy
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*outputs[call.log_probs + call.entropy :])
    ctx.call = call._replace(target=None, mask=None, temperature_per_token=None)
    maximum, log_sum, *entropy = outputs[-saved:]
    ctx.save_for_backward(
        *inputs,
        call.target,
        call.mask,
        call.temperature_per_token,
        maximum,
        log_sum,
        entropy[0] if entropy else None,
    )


class Upstream(NamedTuple):
    """What a backward op takes after the call: what the forward left for it [N], upstream gradients [*]."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor | None
    grad_log_probs: Tensor | None
    grad_entropy: Tensor | None

    def results(self) -> TokenResults:
        return TokenResults(Normalizer(self.maximum, self.log_sum), None, self.entropy, {})


UPSTREAM_SCHEMA = (
    "Tensor maximum, Tensor log_sum, Tensor? entropy_per_token, Tensor? grad_log_probs, Tensor? grad_entropy"
)


def restore_call(
    ctx: Any, saved: tuple[Any, ...], grads: tuple[Tensor | None, ...]
) -> tuple[list[Any], Call, Upstream] | None:
    """The inputs that `save_call` saved, the call and what came upstream; None if no gradient did."""
    *inputs, target, mask, temperature_per_token, maximum, log_sum, entropy = saved
    call: Call = ctx.call
    grad_log_probs = grads[0] if call.log_probs else None
    grad_entropy = grads[call.log_probs] if call.entropy else None
    if grad_log_probs is None and grad_entropy is None:
        return None
    call = call._replace(target=target, mask=mask, temperature_per_token=temperature_per_token)
    return inputs, call, Upstream(maximum, log_sum, entropy, grad_log_probs, grad_entropy)
