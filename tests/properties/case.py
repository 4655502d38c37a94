"""One call of the library, described in full by a `Case` that prints as its own reproduction.

A case names kinds of rows, layouts and options; the numbers themselves come from its seed (see tensors.py).
That keeps an example small enough to shrink, and lets every rank build the same tensors. Here and in
tensors.py hypothesis is not imported: the ranks do not draw.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of one public function, and the backward after it.

    Attributes:
        form: "entropy", "chunks", "both" (given logits) or "linear" (the fused head).
        lead: leading shape, of the whole sequence.
        shards: columns of each rank.
        explicit_shards: vocab_start_index and vocab_size are passed.
        rows, targets: kinds, row by row, in a circle.
        layout: strides of the logits or hidden; `other_layout` of weight, target, mask and temperature.
        mask, upstream, bias: how they are made, "none" for no such argument.
        upstream: of log_probs and of entropy.
        trained: the inputs that need a gradient.
        workspace: Execution.workspace_mib.
    """

    form: str
    lead: tuple[int, ...]
    shards: tuple[int, ...]
    seed: int = 0
    dtype: str = "float32"
    vocab_size: int | None = None
    explicit_shards: bool = False
    rows: tuple[str, ...] = ("plain",)
    targets: tuple[str, ...] = ("any",)
    target_dtype: str = "int64"
    ignore_index: int = -100
    layout: str = "contiguous"
    other_layout: str = "contiguous"
    temperature: float | str = 1.0
    mask: str = "none"
    upstream: tuple[str, str] = ("random", "random")
    upstream_scale: float = 1.0
    entropy: bool = True
    metrics: tuple[str, ...] = ()
    chunk_size: int | None = None
    workspace: int | None = None
    compact_rows: bool = True
    trained: tuple[str, ...] = ("logits", "hidden", "weight", "bias")
    # the head alone
    width: int = 4
    bias: str = "none"
    bias_dtype: str | None = None
    scale: float = 1.0
    softcap: float | None = None
    autocast: bool = False
    sequence_parallel: bool = False

    @property
    def columns(self) -> int:
        return sum(self.shards)

    @property
    def counted(self) -> int:
        """Columns that count."""
        return self.vocab_size or self.columns
