"""How to see that another library made a head tensor-parallel, and changes the layout of what it returns."""

from __future__ import annotations

from torch import nn


def foreign_parallelism(head: nn.Module) -> str | None:
    """What brings the results of `head` into another layout, in words for an error; None if nothing does.

    A head that returns per-token statistics cannot stay under it: these rules take whatever the head
    returns for columns of logits. Its parameters are DTensors, Shard(0), that
    `mcore_entropy.adapters.dtensor` can compute with once the rule is gone:

    - transformers' tensor parallelism (`tp_plan="auto"`) puts a closure into the instance,
      `vars(head)["forward"]`, which hides the forward of whatever class the head gets; deleting it takes the
      rule away, and setting it again restores it.
    - torch's `parallelize_module` registers a forward pre-hook and a forward hook (`distribute_module`).
    """
    forward = vars(head).get("forward")
    if forward is not None and getattr(head, "_is_hooked", False):
        return f"transformers' tensor parallelism ({_origin(forward)}, in the instance's forward)"
    for hook in head._forward_hooks.values():
        if getattr(hook, "__module__", None) == "torch.distributed.tensor._api":
            return f"torch's parallelize_module ({_origin(hook)}, a forward hook)"
    return None


def _origin(function: object) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
