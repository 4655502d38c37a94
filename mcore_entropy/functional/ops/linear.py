"""The fused head's ops: a whole forward or backward on this rank, with its collectives.

[*, H] hidden states, under sequence parallelism over R ranks [s/R, ..., H]; weight [V/tp, H], bias [V/tp].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_entropy.functional.arguments import checked_transform
from mcore_entropy.functional.autograd import first_derivative_only, without_autocast
from mcore_entropy.functional.linear_passes import (
    HeadOperands,
    LinearForward,
    LinearOptions,
    Needed,
    backward_linear,
    forward_linear,
    hidden_gradient,
    resolve_linear,
)
from mcore_entropy.functional.main_grad import WeightGradient, main_grad_of
from mcore_entropy.functional.ops.call import (
    CALL_SCHEMA,
    OP_OPTIONS,
    UPSTREAM_SCHEMA,
    Call,
    Upstream,
    call_of,
    fake_outputs,
    outputs_of_op,
    restore_call,
    results_of,
    save_call,
)
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.statistics import LogitTransform, TokenStatistics, statistics_dtype


class Head(NamedTuple):
    """The arguments that the fused head's ops take beside the call's, in the order of `HEAD_SCHEMA`.

    Attributes:
        main_grad: [V/tp, H], where the weight's gradient goes instead of to autograd; backward adds to it.
        scale, softcap: the `LogitTransform`.
        placeholder: whether autograd gets zeros for the weight, so that Megatron's hooks run.
        partial_hidden: as in `LinearOptions`.
    """

    main_grad: Tensor | None
    scale: float
    softcap: float | None
    sequence_parallel: bool
    autocast_dtype: torch.dtype | None
    placeholder: bool
    partial_hidden: bool = False

    def options(self) -> LinearOptions:
        return LinearOptions(
            transform=LogitTransform(self.scale, self.softcap),
            sequence_parallel=self.sequence_parallel,
            autocast_dtype=self.autocast_dtype,
            partial_hidden=self.partial_hidden,
        )


_OPERANDS_SCHEMA = "Tensor hidden, Tensor weight, Tensor? bias"
_HEAD_SCHEMA = (
    "Tensor{}? main_grad, float scale, float? softcap, bool sequence_parallel, ScalarType? autocast_dtype, "
    "bool placeholder, bool partial_hidden"
)
_NEEDED_SCHEMA = "bool needs_hidden, bool needs_weight, bool needs_bias"


def linear_statistics_op(
    operands: HeadOperands, options: LinearOptions, keywords: Keywords
) -> TokenStatistics:
    """Statistics [*] through the op; dynamo traces this."""
    transform = checked_transform(options.transform)
    weight = operands.weight
    main_grad = main_grad_of(weight) if options.accumulate_into_main_grad else None
    head = Head(
        main_grad,
        transform.scale,
        transform.softcap,
        options.sequence_parallel,
        options.autocast_dtype,
        main_grad is not None and hasattr(weight, "grad_added_to_main_grad"),
        options.partial_hidden,
    )
    call = call_of(options.tp_group, keywords)
    if not options.trained:
        call = call._replace(logits_budget_mib=0)  # nothing to keep logits for
    log_probs, entropy, metrics = results_of(call, linear_forward(*operands, *head, *call))
    assert log_probs is not None
    return TokenStatistics(log_probs, entropy, metrics)


@torch.library.custom_op(
    "mcore_entropy::linear_forward",
    mutates_args=(),
    schema=f"({_OPERANDS_SCHEMA}, {_HEAD_SCHEMA.format('')}, {CALL_SCHEMA}) -> Tensor[]",
    **OP_OPTIONS,
)
@without_autocast
def linear_forward(*arguments: Any) -> list[Tensor]:
    """See `outputs_of_op`."""
    operands, head, call, _ = _sorted(arguments)
    if call.logits_budget_mib:
        raise ValueError(
            f"execution.logits_budget_mib: expected 0 under torch.compile, got {call.logits_budget_mib}; how "
            "many logits are kept depends on the mask's values, and a compiled graph has no room for that"
        )
    return outputs_of_op(forward_linear(operands, call.resolved_group(), head.options(), call.keywords()))


@linear_forward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    operands, head, call, _ = _sorted(arguments)
    hidden = operands.hidden
    shape = tuple(hidden.shape[:-1])
    if shape and head.sequence_parallel:
        shape = (shape[0] * call.resolved_group().size, *shape[1:])
    return fake_outputs(call, shape, hidden, statistics_dtype(head.autocast_dtype or hidden.dtype))


@torch.library.custom_op(
    "mcore_entropy::linear_backward",
    mutates_args=("main_grad",),
    schema=(
        f"({_OPERANDS_SCHEMA}, {_HEAD_SCHEMA.format('(a!)')}, {CALL_SCHEMA}, {UPSTREAM_SCHEMA}, "
        f"{_NEEDED_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
    **OP_OPTIONS,
)
@without_autocast
def linear_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for hidden, weight and bias; a tensor of no element for one that autograd does not get."""
    operands, head, call, rest = _sorted(arguments)
    upstream, needed = _backward_arguments(rest)
    options = head.options()
    problem, tokens = resolve_linear(operands, call.resolved_group(), options, call.keywords())
    forward = LinearForward(problem, tokens, upstream.results(), operands.cast(options.autocast_dtype))
    gradients = backward_linear(
        forward,
        needed,
        operands.hidden.dtype,
        WeightGradient(operands.weight, head.main_grad),
        upstream.grad_log_probs,
        upstream.grad_entropy,
    )
    if needed.weight and head.placeholder:
        zeros = torch.zeros_like(operands.weight, memory_format=torch.contiguous_format)
        gradients = gradients._replace(weight=zeros)
    hidden, weight, bias = (
        operands.hidden.new_empty(0) if gradient is None else gradient for gradient in gradients
    )
    return hidden, weight, bias


@linear_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, head, _, rest = _sorted(arguments)
    _, needed = _backward_arguments(rest)
    hidden, weight, bias = operands
    nothing = hidden.new_empty
    of_weight = _weight_reaches_autograd(head, needed)
    assert bias is not None or not needed.bias
    return (
        hidden_gradient(operands.cast(head.autocast_dtype), hidden.dtype) if needed.hidden else nothing(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else nothing(0),
        torch.empty_like(bias) if needed.bias else nothing(0),  # type: ignore[arg-type] # there is one
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands, head, call, _ = _sorted(inputs)
    ctx.head = head._replace(main_grad=None)
    save_call(ctx, (*operands, head.main_grad), call, output)


@first_derivative_only
def _backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * len(Head._fields + Call._fields)
    restored = restore_call(ctx, saved, grads)
    if restored is None:
        return None, None, None, *nothing
    (*operands, main_grad), call, upstream = restored
    needed = Needed(*ctx.needs_input_grad[:3])
    head: Head = ctx.head._replace(main_grad=main_grad)
    hidden, weight, bias = linear_backward(*operands, *head, *call, *upstream, *needed)
    return (
        hidden if needed.hidden else None,
        weight if _weight_reaches_autograd(head, needed) else None,
        bias if needed.bias else None,
        *nothing,
    )


linear_forward.register_autograd(lambda ctx, grads: _backward(ctx, *grads), setup_context=_setup_context)


def _weight_reaches_autograd(head: Head, needed: Needed) -> bool:
    return needed.weight and (head.main_grad is None or head.placeholder)


def _sorted(arguments: tuple[Any, ...]) -> tuple[HeadOperands, Head, Call, tuple[Any, ...]]:
    """An op's arguments in their records, and those that only a backward has."""
    head = len(HeadOperands._fields)
    call = head + len(Head._fields)
    rest = call + len(Call._fields)
    return (
        HeadOperands(*arguments[:head]),
        Head(*arguments[head:call]),
        Call(*arguments[call:rest]),
        arguments[rest:],
    )


def _backward_arguments(rest: tuple[Any, ...]) -> tuple[Upstream, Needed]:
    return Upstream(*rest[: len(Upstream._fields)]), Needed(*rest[len(Upstream._fields) :])
