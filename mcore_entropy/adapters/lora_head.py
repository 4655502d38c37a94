"""`EntropyAwareLoraHead`: a head with LoRA adapters of PEFT that can give statistics instead of logits.

[*, H] hidden states, V vocabulary, r the adapters' ranks together. Low-rank logits are a product of their
own: with hidden states and weight put side by side, the sum of both is one product again::

    low = scaling * dropout(hidden) @ A^T        hidden @ W^T + low @ B^T = [hidden, low] @ [W, B]^T
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from peft.tuners import lora
from torch import Tensor

from mcore_entropy.adapters.lm_head import HeadCall


class EntropyAwareLoraHead(lora.Linear):
    """PEFT's LoRA around an `nn.Linear` head; with a `HeadCall`, statistics come instead of logits.

    They are those of the adapters that are active, computed in the dtype of the wrapped weight: adapters kept
    in fp32 around a bf16 weight are cast, as autocast would. Beside the head's own needs there is a copy
    [V, H + r] of its weight, kept for backward, and a gradient of that size.
    """

    gives_statistics: ClassVar[bool] = True

    def forward(self, x: Tensor, *args: Any, call: HeadCall | None = None, **kwargs: Any) -> Tensor:
        """Logits [*, V] as the parent's; with a call [*, k] for its `named`.

        Raises:
            ValueError: with a call, if an active adapter is more than plain LoRA (DoRA and other variants),
                or adapters are chosen per sample.
        """
        if call is None:
            logits: Tensor = super().forward(x, *args, **kwargs)
            return logits
        if args or kwargs:
            raise ValueError(f"head: expected no more than hidden states, got {args} and {kwargs} as well")
        weight, bias = self.base_layer.weight, self.base_layer.bias
        hidden, weights = [x], [weight]
        for name in self._adapters_to_add():
            low_rank = self.lora_A[name](self.lora_dropout[name](x.to(self.lora_A[name].weight.dtype)))
            hidden.append((low_rank * self.scaling[name]).to(x.dtype))
            weights.append(self.lora_B[name].weight.to(weight.dtype))
            if self.lora_B[name].bias is not None:
                own = self.lora_B[name].bias * self.scaling[name]
                bias = own if bias is None else bias + own
        return call.statistics(torch.cat(hidden, dim=-1), torch.cat(weights, dim=-1), bias)

    def _adapters_to_add(self) -> list[str]:
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return []
        if self.merged:
            return []
        names = [name for name in self.active_adapters if name in self.lora_A]
        for name in names:
            if name in self.lora_variant:
                raise ValueError(
                    f"head: expected plain LoRA, got the adapter {name!r} with "
                    f"{type(self.lora_variant[name]).__name__}; leave the head out of target_modules"
                )
        return names
