"""What is right, in fp64, and how far a head is from it.

Statistics of every row; hidden's gradient of some rows and the weight's of some columns, which together see
every row and every column. The vocabulary is read in blocks, so that nothing of N·V exists in fp64, and each
rank reads its own shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_entropy.cli.benchmark.problem import Inputs
from mcore_entropy.cli.benchmark.ranks import Group

_SAMPLE = 256  # rows and columns whose gradients are compared
_BLOCK_BYTES = 256 * 2**20  # of fp64 logits

# The largest error allowed, as a share of the largest number for values; of a row's norm for gradients. Heads
# that round logits to half precision, eager's among them, are right, and ours is judged no better here.
VALUES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GRADIENTS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass
class Truth:
    """In fp64, [N] each; log_probs and entropy are 0 where a token does not count, which counted says."""

    inputs: Inputs
    lse: Tensor
    log_probs: Tensor
    entropy: Tensor
    counted: Tensor

    @staticmethod
    def of(inputs: Inputs, group: Group) -> Truth:
        """Collective over the group."""
        hidden = _double(inputs.hidden)
        lse = hidden.new_full((hidden.shape[0],), -torch.inf)
        mean, z_target = torch.zeros_like(lse), torch.zeros_like(lse)  # mean: E[z] over the columns read
        target = inputs.target.to(hidden.device) - inputs.start
        block = max(_BLOCK_BYTES // (8 * hidden.shape[0]), 1)
        for first in range(0, inputs.weight.shape[0], block):
            z = hidden @ _double(inputs.weight[first : first + block]).t()
            lse, mean = _joined(lse, mean, z.logsumexp(1), (z.softmax(1) * z).sum(1))
            here = (target >= first) & (target < first + z.shape[1])
            index = (target - first).clamp(0, z.shape[1] - 1)[:, None]
            z_target += torch.where(here, z.gather(1, index)[:, 0], 0.0)
        for other_lse, other_mean, other_z in _of_other_ranks(torch.stack((lse, mean, z_target)), group):
            lse, mean = _joined(lse, mean, other_lse, other_mean)
            z_target = z_target + other_z
        counted = inputs.counted().to(hidden.device)
        return Truth(inputs, lse, (z_target - lse) * counted, (lse - mean) * counted, counted)

    def loss(self) -> Tensor:
        """The mean of -log_prob over the tokens that count."""
        return -self.log_probs.sum() / self.counted.sum()

    def errors(self, gives: tuple[str, ...], results: tuple[Tensor, ...], group: Group) -> dict[str, float]:
        """Of results and of the gradients in the inputs' `grad`; infinite where something is not a number.

        Collective over the group.
        """
        errors = {}
        for name, result in zip(gives, results, strict=True):
            right = self.loss() if name == "loss" else getattr(self, name)
            errors[name] = _number((_double(result) - right).abs().max() / right.abs().max())
        hidden, weight = self.inputs.hidden.grad, self.inputs.weight.grad
        if hidden is None or weight is None:
            raise RuntimeError("no gradient of hidden or of weight came back")
        rows, columns = (_sample(len(gradient), gradient.device) for gradient in (hidden, weight))
        right = self._hidden_gradient(gives, rows, group)
        errors["hidden gradient"] = _row_error(_double(hidden[rows]), right)
        right = self._weight_gradient(gives, columns)
        errors["weight gradient"] = _row_error(_double(weight[columns]), right)
        return errors

    def _upstream(self, gives: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Of log-prob and entropy, [N], 0 for what the head does not give."""
        log_probs, entropy = (_double(gradient) * self.counted for gradient in self.inputs.upstream)
        if "loss" in gives:
            log_probs = -self.counted / self.counted.sum()
        return log_probs, entropy if "entropy" in gives else torch.zeros_like(entropy)

    def _gradient_of_logits(self, gives: tuple[str, ...], z: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        log_p = z - self.lse[rows, None]
        up_log_probs, up_entropy = (gradient[rows, None] for gradient in self._upstream(gives))
        onehot = self.inputs.target.to(z.device)[rows, None] == columns + self.inputs.start
        p = log_p.exp()
        return up_log_probs * (onehot.double() - p) - up_entropy * p * (log_p + self.entropy[rows, None])

    def _hidden_gradient(self, gives: tuple[str, ...], rows: Tensor, group: Group) -> Tensor:
        rows = rows.to(self.lse.device)
        hidden = _double(self.inputs.hidden)[rows]
        total = torch.zeros_like(hidden)
        block = max(_BLOCK_BYTES // (8 * len(rows)), 1)
        for first in range(0, self.inputs.weight.shape[0], block):
            weight = _double(self.inputs.weight[first : first + block])
            columns = torch.arange(first, first + len(weight), device=total.device)
            total += self._gradient_of_logits(gives, hidden @ weight.t(), rows, columns) @ weight
        for other in _of_other_ranks(total, group):
            total = total + other
        return total

    def _weight_gradient(self, gives: tuple[str, ...], columns: Tensor) -> Tensor:
        columns = columns.to(self.lse.device)
        hidden, weight = _double(self.inputs.hidden), _double(self.inputs.weight[columns])
        rows = torch.arange(len(hidden), device=hidden.device)
        return self._gradient_of_logits(gives, hidden @ weight.t(), rows, columns).t() @ hidden


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """Which of the errors is larger than allowed, in words, or None."""
    for name, error in errors.items():
        allowed = (GRADIENTS if name.endswith("gradient") else VALUES)[dtype]
        if not error <= allowed:
            return f"wrong: {name.replace('_', '-')} is off by {error:.1e} of fp64, allowed {allowed:.0e}"
    return None


def _double(tensor: Tensor) -> Tensor:
    """In fp64, on the CPU where the device has none."""
    tensor = tensor.detach()
    return (tensor if tensor.device.type in ("cpu", "cuda", "xpu") else tensor.cpu()).double()


def _joined(lse: Tensor, mean: Tensor, other_lse: Tensor, other_mean: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp and mean of z over two sets of columns together."""
    both = torch.logaddexp(lse, other_lse)
    return both, (lse - both).exp() * mean + (other_lse - both).exp() * other_mean


def _of_other_ranks(own: Tensor, group: Group) -> list[Tensor]:
    if group is None:
        return []
    everyone: list[Tensor] = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return [tensor for rank, tensor in enumerate(everyone) if rank != dist.get_rank(group)]


def _sample(size: int, device: torch.device) -> Tensor:
    """Indices over the whole range, both ends among them."""
    return torch.linspace(0, size - 1, min(size, _SAMPLE), device=device, dtype=torch.float64).round().long()


def _row_error(found: Tensor, right: Tensor) -> float:
    """The largest error of a row, as a share of its norm, or of the median norm where that is more."""
    norms = right.norm(dim=1)
    middle = norms[norms > 0].median() if bool((norms > 0).any()) else norms.new_ones(())
    return _number(((found - right).norm(dim=1) / norms.clamp(min=middle)).max())


def _number(error: Tensor) -> float:
    return float(error.nan_to_num(nan=torch.inf))
