"""FSDP around a model with or without an entropy-aware head: units, mixed precision and prefetching.

The order is: swap the head, wrap the model, make the optimizer. FSDP gathers a weight for the time of a
module's forward; the swapped head works in its own, so it can be a unit of its own like any other layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from mcore_entropy.adapters.fsdp_units import Units, entropy_aware_heads


def wrap_fsdp2(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    layer_classes: Iterable[type[nn.Module]] | None = None,
) -> nn.Module:
    """`fully_shard` each decoder layer, embedding, head, and the rest as the root, in place.

    Tied embedding and head are one unit; with a weight that a third module has too, both belong to the root.
    Models without a head (critics, reward models) are sharded the same way. The head's backward follows its
    forward: ``model.lm_head.set_reshard_after_forward(False)`` saves gathering it twice, but leaves it
    gathered, and its parameters plain tensors, after a forward alone.

    Args:
        model: swapped already if it is to be; a Hugging Face model, or a wrapper of one (PEFT's, with a value
            head), or any module with `layer_classes`.
        mesh, mp_policy, offload_policy: as for `fully_shard`.
        reshard_after_forward: as for `fully_shard`, for the root as well: by itself torch leaves a root
            gathered after its forward, and loading a state dict after a forward alone fails.
        forward_prefetch, backward_prefetch: as for `set_prefetch`.
        layer_classes: classes of the decoder layers; None for those that a Hugging Face model names.

    Returns:
        The model.

    Raises:
        ValueError: no decoder layers were found; a prefetch depth is not possible; or the model has an
            entropy-aware head and `mp_policy` would cast its results to half precision.
    """
    _check_depths(forward_prefetch, backward_prefetch)
    units = Units.of(model, layer_classes)
    policy = mp_policy or MixedPrecisionPolicy()
    if any(entropy_aware_heads(model)):
        _check_output_dtype(policy.output_dtype)
    options: dict[str, Any] = dict(
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload_policy or OffloadPolicy(),
        reshard_after_forward=reshard_after_forward,
    )
    ends = [unit for unit in (units.embedding, units.head) if unit is not None]
    for unit in (*([ends] if units.tied else ends), *units.layers, model):
        fully_shard(unit, **options)
    _prefetch_fsdp2(model, units, forward_prefetch, backward_prefetch)
    return model


def wrap_fsdp1(
    model: nn.Module,
    *,
    forward_prefetch: bool = True,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    use_orig_params: bool = True,
    layer_classes: Iterable[type[nn.Module]] | None = None,
    **fsdp: Any,
) -> FullyShardedDataParallel:
    """`FullyShardedDataParallel` of each decoder layer, of embedding and head, and of the rest as the root.

    A tied pair of embedding and head belongs to the root, which stays gathered until the end of its backward.

    Args:
        model, layer_classes: as for `wrap_fsdp2`.
        forward_prefetch, backward_prefetch, use_orig_params, fsdp: as for `FullyShardedDataParallel`. Its
            mixed precision casts inputs and weights; the head's results stay fp32.

    Raises:
        ValueError: no decoder layers were found.
    """
    units = Units.of(model, layer_classes)
    if not torch.accelerator.is_available():
        fsdp.setdefault("device_id", torch.device("cpu"))  # without it FSDP1 insists on an accelerator
    own = set(units.layers if units.tied else units.in_order)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in own),
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        use_orig_params=use_orig_params,
        **fsdp,
    )


def set_prefetch(
    model: nn.Module,
    *,
    forward: int = 1,
    backward: int = 1,
    layer_classes: Iterable[type[nn.Module]] | None = None,
) -> None:
    """How many units ahead a wrapped model gathers weights, the head among them.

    Whoever wrapped it, and with a head of ours, another or none; between steps, also after the first. Each
    unit gathers the next `forward` ones in forward (the last layers the head), and the previous `backward`
    ones in backward (the head the last layers). FSDP1 gathers ahead from the second step on: the first shows
    it the order.

    Args:
        model: wrapped by FSDP1 or FSDP2.
        forward: 0 for none. FSDP1 knows 0 and 1.
        backward: 0 for what torch does by itself: FSDP2 gathers the unit that ran before, FSDP1 none. FSDP1
            knows 0 and 1.
        layer_classes: as for `wrap_fsdp2`; FSDP1 needs none.

    Raises:
        ValueError: the model is not wrapped, a depth is not possible, or no decoder layers were found.
    """
    _check_depths(forward, backward)
    of_fsdp1 = FullyShardedDataParallel.fsdp_modules(model)
    if not of_fsdp1:
        _prefetch_fsdp2(model, Units.of(model, layer_classes), forward, backward)
        return
    if max(forward, backward) > 1:
        raise ValueError(
            "forward, backward: expected 0 or 1, as FSDP1 gathers no more than one unit ahead, got "
            f"{forward} and {backward}; FSDP2 does"
        )
    wrapped: Any
    for wrapped in of_fsdp1:
        wrapped.forward_prefetch = bool(forward)
        wrapped.backward_prefetch = BackwardPrefetch.BACKWARD_PRE if backward else None


def _check_depths(forward: int, backward: int) -> None:
    for name, depth in (("forward", forward), ("backward", backward)):
        if type(depth) is not int or depth < 0:
            raise ValueError(f"{name}: expected a number of units, 0 or more, got {depth!r}")


def _prefetch_fsdp2(model: nn.Module, units: Units, forward: int, backward: int) -> None:
    chain: list[Any] = [unit for unit in units.in_order if isinstance(unit, FSDPModule)]
    if not chain:
        raise ValueError(
            f"model: expected one wrapped by FSDP, got a {type(model).__name__} whose layers are not"
        )
    for place, unit in enumerate(chain):
        # A tied head is of the embedding's unit: what is set last, for the head, is what its backward begins.
        if unit is not units.head or not units.tied:
            unit.set_modules_to_forward_prefetch(chain[place + 1 : place + 1 + forward])
        unit.set_modules_to_backward_prefetch(chain[max(place - backward, 0) : place][::-1])


def check_output_dtypes(model: nn.Module, head: nn.Module) -> None:
    """For who wrapped by other means: raise ValueError if FSDP2 casts what the head or the model gives.

    Called in the model's forward, it sees the root as well, if that is a wrapper around the model.
    """
    any_unit = next(_states_of(model.modules()), None)
    root = getattr(getattr(any_unit, "_state_ctx", None), "iter_forward_root", None)  # every unit knows it
    for state in (*_states_of((model, head)), root):
        _check_output_dtype(getattr(getattr(state, "_mp_policy", None), "output_dtype", None))


def _states_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """FSDP2's states of those that are its units: private, and the only place where torch keeps a policy."""
    return (module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))


def _check_output_dtype(output_dtype: torch.dtype | None) -> None:
    if output_dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            "output_dtype: expected None or torch.float32 in the mixed-precision policy of the head and of "
            f"the model, got {output_dtype}, to which FSDP would cast log-probs and entropy; param_dtype "
            "alone has the layers compute in half precision"
        )
