"""The Triton backend: NVIDIA GPUs from compute capability 8.0 on, and Triton's interpreter on the CPU.

The default workspace is 256 MiB, 4096 columns of 32768 tokens; the fused head's backward takes what an fp32
sum of hidden's gradient [N, H] leaves of 512 MiB if that is more: wider tiles are fewer passes over that sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_entropy.backends.interface import (
    GradientTiles,
    KeptLogits,
    KeptRows,
    LogitRows,
    RowGradients,
    RowInputs,
    TokenSelection,
)
from mcore_entropy.backends.triton import head_statistics, rows, sizes, wide
from mcore_entropy.backends.triton.head_gradient import HeadGradientTiles
from mcore_entropy.execution import Execution
from mcore_entropy.products import HALF
from mcore_entropy.statistics import PartialStatistics, Wanted


class TritonBackend:
    """See `mcore_entropy.backends.interface.Backend`.

    Triton launches on the current device, so a forward makes the tensors' device the current one; in a
    backward, autograd has done that.
    """

    name = "triton"

    def check(self, execution: Execution, dtype: torch.dtype) -> None:
        if execution.logits_budget_mib != 0 and dtype not in HALF:
            raise ValueError(
                "execution.logits_budget_mib: expected 0 for fp32 tensors, whose logits in fp16 would cost "
                f"the gradient its accuracy, got {execution.logits_budget_mib}"
            )

    def logits_statistics(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
    ) -> PartialStatistics:
        with torch.cuda.device_of(logits.whole):
            return rows.logits_statistics(logits, tokens, inputs, wanted)

    def logits_gradient(
        self,
        logits: LogitRows,
        tokens: TokenSelection,
        inputs: RowInputs,
        gradients: RowGradients,
        out: Tensor,
        execution: Execution,
    ) -> None:
        rows.logits_gradient(logits, tokens, inputs, gradients, out)

    def linear_statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        wanted: Wanted,
        execution: Execution,
        keep: KeptLogits | None = None,
    ) -> PartialStatistics:
        if not weight.shape[0]:  # a shard that is all padding
            like = torch.empty(0, dtype=torch.float32, device=hidden.device)
            return PartialStatistics.empty(hidden.shape[0], wanted, like)
        with torch.cuda.device_of(hidden):
            if hidden.dtype in HALF:
                return head_statistics.linear_statistics(hidden, weight, bias, inputs, wanted, keep)
            workspace = sizes.wide_workspace(execution)
            return wide.linear_statistics(hidden, weight, bias, inputs, wanted, workspace)

    def kept_logits(self, tokens: int, columns: int, like: Tensor, execution: Execution) -> KeptLogits | None:
        return head_statistics.kept_logits(tokens, columns, like, execution.logits_budget_mib * 2**20)

    def most_rows(self, like: Tensor, execution: Execution) -> int:
        return sizes.most_rows(like.element_size(), execution)

    def linear_gradient_tiles(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: RowInputs,
        gradients: RowGradients,
        execution: Execution,
        tokens: int,
        kept: KeptRows | None = None,
    ) -> GradientTiles:
        if hidden.dtype not in HALF:
            workspace = sizes.wide_workspace(execution)
            return wide.WideGradientTiles(hidden, weight, bias, inputs, gradients, workspace)
        workspace = sizes.gradient_workspace(execution, tokens, hidden.shape[1])
        return HeadGradientTiles(hidden, weight, bias, inputs, gradients, kept, workspace)
