"""The shapes that verl's tests of its fused head have, scaled down for a CPU, and the fp64 truth of a case.

N tokens, H hidden size, V vocabulary (of all ranks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests import reference as ref
from tests.unit.cases import compare_gradient, compare_values, head_gradients, largest_terms, out_dtype

# (N, H, V): verl's are 1937 × 3584 × 152064, 2169 × 896 × 151936, 1530 × 2048 × 32256, 1388 × 4096 × 102400
# and 8192 × 4096 × 102400; here N and H are a sixteenth, V a 64th. Odd numbers of tokens stay odd.
SHAPES = [(121, 224, 2376), (135, 56, 2374), (96, 128, 504), (87, 256, 1600), (512, 256, 1600)]
TEMPERATURE = 1.5  # theirs

NEEDS_VERL = "needs verl's own package: make verl has it"


@dataclass(frozen=True)
class Given:
    """hidden [N, H], weight [V, H], labels [N]; upstream: gradients of log-probs and entropy, [N] each."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: tuple[Tensor, Tensor]
    temperature: float | Tensor = TEMPERATURE

    @staticmethod
    def of(shape: tuple[int, int, int], dtype: torch.dtype) -> Given:
        """Uniform as verl's tests draw them. Every third token gets no gradient, as clipped tokens do."""
        tokens, width, columns = shape
        generator = torch.Generator().manual_seed(0)

        def uniform(*size: int) -> Tensor:
            return torch.rand(*size, generator=generator) - 0.5

        labels = torch.randint(0, columns, (tokens,), generator=generator)
        of_entropy, of_log_probs = uniform(tokens), 2 * uniform(tokens)
        for gradient in (of_entropy, of_log_probs):
            gradient[::3] = 0
        hidden, weight = uniform(tokens, width).to(dtype), uniform(columns, width).to(dtype)
        out = out_dtype(dtype)
        return Given(hidden, weight, labels, (of_log_probs.to(out), of_entropy.to(out)))

    def compare(self, log_probs: Tensor, entropy: Tensor, gradients: dict[str, Tensor]) -> None:
        """With the truth, by eager's error. `gradients` of "hidden" [N, H] and "weight" [V, H]."""
        options = dict(
            temperature=self.temperature, grad_log_probs=self.upstream[0], grad_entropy=self.upstream[1]
        )
        inputs = self.hidden, self.weight
        truth = ref.truth_linear(*inputs, self.labels, **options)
        eager = ref.eager_linear(*inputs, self.labels, **options)
        # The logits are never rounded to half precision, so the values are as good as eager's in fp32.
        values = ref.eager_linear(*(x.to(log_probs.dtype) for x in inputs), self.labels, **options)
        compare_values(log_probs, truth.log_probs, values.log_probs, "log_probs")
        compare_values(entropy, truth.entropy, values.entropy, "entropy")
        how = head_gradients(self.hidden.dtype, largest_terms(*inputs, None, options))
        for name, gradient in gradients.items():
            compare_gradient(name, gradient, truth, eager, **how)
