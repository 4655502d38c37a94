"""How a result is computed, never what: the options every public function takes as ``execution``."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class Execution:
    """Frozen options of one call; the same on every rank of the group.

    Args:
        backend: ``"auto"`` chooses by the tensor's device and dtype: ``"triton"`` on an NVIDIA GPU of compute
            capability 8.0 or newer, ``"npu"`` on an Ascend NPU, ``"torch"`` otherwise and for fp64. A name
            insists on that backend. ``"npu_fused"`` has Ascend's operator ``npu_cross_entropy_loss`` compute
            the softmax of each tile in forward.
        workspace_mib: bound in MiB on the tiles of logits, or of their gradient, that exist at once, whatever
            the number of tokens and the vocabulary; None is 256, on the CPU 12, in the backward of a
            half-precision head on Triton up to 512 together with hidden's sum. On top comes an fp32 sum for
            hidden's gradient, of a chunk [n, H] or, where there is no fp32 memory for the weight's gradient
            either and N is below V/tp, of all tokens [N, H]; else one for the weight's, [V/tp, H].
        logits_budget_mib: MiB of logits that the fused head may keep for its backward instead of computing
            them again; 0 keeps none. A backend that cannot keep logits refuses any other value, and so
            does a compiled model in training.
        compact_rows: leave masked rows, and in backward rows without an upstream gradient, out of the
            products. It costs one host sync in a forward with a mask and one in backward; False
            computes them all and costs none.
        deterministic: bring the sums of more than two ranks together in rank order, from one all-gather
            instead of two all-reduces, so that their last digits do not depend on the order in which the
            network adds. torch's deterministic algorithms ask for the same without this option, and a
            swapped head sets it in Megatron's ``deterministic_mode``.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> Execution(workspace_mib=64).backend
        'auto'
    """

    backend: str = "auto"
    workspace_mib: int | None = None
    logits_budget_mib: int = 0
    compact_rows: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str):
            raise ValueError(f"Execution: expected a backend name, got {self.backend!r}")
        for name in ("workspace_mib", "logits_budget_mib"):
            value = getattr(self, name)
            if value is None and name == "workspace_mib":
                continue
            lowest = 1 if name == "workspace_mib" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ValueError(f"Execution: expected {name} of at least {lowest} MiB, got {value!r}")
        for name in ("compact_rows", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Execution: expected {name} True or False, got {getattr(self, name)!r}")

    def workspace_bytes(self, default_mib: int) -> int:
        """The bound in bytes, or the backend's default."""
        return (self.workspace_mib or default_mib) * _MIB
