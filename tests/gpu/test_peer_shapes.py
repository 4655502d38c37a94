"""The fused head at the shapes that peers test with, against fp64 on the GPU.

Legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mcore_entropy as me

# (N, H, V): verl's, Megatron's development branch's, Gemma's
VERL = [
    (1937, 3584, 152064),
    (2169, 896, 151936),
    (1530, 2048, 32256),
    (1388, 4096, 102400),
    (8192, 4096, 102400),
]
MEGATRON = [(80, 64, 125), (1024, 4096, 152064), (4096, 8192, 152063)]
GEMMA = [(8192, 2304, 256000)]

# Largest error of a value, and the error's norm relative to the gradient's: the tile and the result are each
# rounded to bf16, at 1.65e-3 on average. Where a few numbers are most of the gradient, chance makes it more,
# up to half a unit in the last place each.
VALUE, GRADIENT, GRADIENT_OF_FEW = 1e-4, 2.6e-3, 2.0**-8


def truth(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: tuple[Tensor, Tensor], temperature: float
) -> dict[str, Tensor]:
    """In fp64, 1024 rows at a time."""
    w = weight.double()
    found: dict[str, list[Tensor]] = {"log_probs": [], "entropy": [], "hidden": []}
    weight_gradient = torch.zeros_like(w)
    for rows in torch.arange(hidden.shape[0], device=hidden.device).split(1024):
        h, y = hidden[rows].double(), target[rows, None]
        log_p = torch.log_softmax(h @ w.t() / temperature, -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        g_lp, g_h = (g[rows].double()[:, None] for g in upstream)
        dz = -p * (g_lp + g_h * (log_p + entropy[:, None]))
        dz = dz.scatter_add_(1, y, g_lp) / temperature
        found["log_probs"].append(log_p.gather(1, y)[:, 0])
        found["entropy"].append(entropy)
        found["hidden"].append(dz @ w)
        weight_gradient.addmm_(dz.t(), h)
        del log_p, p, dz
    return {name: torch.cat(parts) for name, parts in found.items()} | {"weight": weight_gradient}


@pytest.mark.parametrize("budget", [0, 2**20], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    ("shape", "temperature"),
    [(s, 1.5) for s in VERL] + [(s, 1.0) for s in MEGATRON + GEMMA],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_bf16(shape: tuple[int, int, int], temperature: float, budget: int) -> None:
    tokens, hidden_size, vocab = shape
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(vocab, hidden_size, device="cuda") * 2.0 * hidden_size**-0.5
    weight = weight.bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    upstream = torch.randn(tokens, device="cuda"), torch.randn(tokens, device="cuda") * 0.1
    expected = truth(hidden.detach(), weight.detach(), target, upstream, temperature)
    execution = me.Execution(backend="triton", logits_budget_mib=budget)
    result = me.linear_log_probs_and_entropy(
        hidden, weight, target, temperature=temperature, execution=execution
    )
    torch.autograd.backward([result.log_probs, result.entropy], upstream)
    assert (result.log_probs - expected["log_probs"]).abs().max() < VALUE
    assert (result.entropy - expected["entropy"]).abs().max() < VALUE
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        error = (leaf.grad.double() - expected[name]).norm() / expected[name].norm()
        assert error < (GRADIENT if tokens * vocab > 10**6 else GRADIENT_OF_FEW), name
