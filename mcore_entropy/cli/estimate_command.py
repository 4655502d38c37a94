"""`mcore-entropy estimate`: its options and its tables; what it computes is in cli/estimate."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_entropy.cli.estimate.cards import CARDS, card_of
from mcore_entropy.cli.estimate.model_shape import ModelShape, read_shape
from mcore_entropy.cli.estimate.report import GIB, MIB, Estimate
from mcore_entropy.cli.estimate.report import estimate as estimated
from mcore_entropy.cli.estimate.workload import DTYPES, Workload

_MODEL, _WORK, _CARD = "Model", "Work of one rank", "Card"


class Dtype(str, Enum):
    """The names in `DTYPES`."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class BackendName(str, Enum):
    """The names in `BACKENDS`."""

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"
    NPU = "npu"


def estimate(
    config: Annotated[
        Path | None,
        typer.Option(help="Hugging Face config.json, or its folder.", rich_help_panel=_MODEL),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(help="Width of a hidden state, H.", rich_help_panel=_MODEL)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of all ranks together, V.", rich_help_panel=_MODEL)
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of hidden states and weight; bf16 unless the config says another.", rich_help_panel=_MODEL
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of a micro-batch, before any is sharded.", rich_help_panel=_WORK)
    ] = 8192,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Ranks that share the vocabulary.", rich_help_panel=_WORK)
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Each of them holds a part of the hidden states.", rich_help_panel=_WORK)
    ] = False,
    masked: Annotated[
        float, typer.Option(help="Share of the tokens that a mask leaves out.", rich_help_panel=_WORK)
    ] = 0.0,
    entropy: Annotated[
        bool, typer.Option(help="Log-probs and entropy, or log-probs alone.", rich_help_panel=_WORK)
    ] = True,
    main_grad: Annotated[
        bool,
        typer.Option(
            help="The weight's gradient is added to Megatron's fp32 main_grad.", rich_help_panel=_WORK
        ),
    ] = False,
    card: Annotated[
        str,
        typer.Option(
            "--card",
            "--device-memory",
            help=f"{', '.join(CARDS)}, cpu (this machine), or a number of GiB.",
            rich_help_panel=_CARD,
        ),
    ] = "H100-80",
    reserved: Annotated[
        float | None,
        typer.Option(
            help="GiB that the rest of the model takes. Given, logits are kept in what is left, which saves "
            "a product.",
            rich_help_panel=_CARD,
        ),
    ] = None,
    backend: Annotated[
        BackendName, typer.Option(help="Of the fused head.", rich_help_panel=_CARD)
    ] = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what memory and how many operations a model's head takes on one rank, forward and backward, and
    which settings to use.

    Three ways to log-probs and entropy: eager (all logits in fp32), chunked
    (logits in the model's dtype, their statistics computed again in backward),
    and the fused head of this library. The peak is what exists beyond weight and
    hidden states, their gradients included. Nothing is run; no GPU is needed.

    mcore-entropy estimate --config ./Qwen2.5-7B --tokens 16384 --card H100-80
    """
    try:
        shape = _shape(config, hidden_size, vocab_size)
        work = Workload(
            tokens,
            shape.hidden_size,
            shape.vocab_size,
            DTYPES[(dtype.value if dtype else shape.dtype) or "bf16"],
            tensor_parallel_size,
            sequence_parallel,
            masked,
            entropy,
            main_grad,
        )
        result = estimated(work, card_of(card), backend.value, reserved)
    except ValueError as error:
        typer.echo(f"mcore-entropy estimate: {_as_option(str(error))}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        _print(result)


def _as_option(message: str) -> str:
    """The message about a value, which begins with its name, with the name of its option."""
    name, colon, rest = message.partition(":")
    option = {"tensor_parallel": "tensor_parallel_size"}.get(name, name).replace("_", "-")
    return f"--{option}{colon}{rest}"


def _shape(config: Path | None, hidden_size: int | None, vocab_size: int | None) -> ModelShape:
    """What the config says, with what the command line says instead."""
    if hidden_size is not None and vocab_size is not None and config is None:
        return ModelShape(hidden_size, vocab_size, None)
    if config is None:
        missing = "hidden_size" if hidden_size is None else "vocab_size"
        raise ValueError(f"{missing}: expected it, or --config with a model's config.json, got neither")
    found = read_shape(config)
    return ModelShape(
        found.hidden_size if hidden_size is None else hidden_size,
        found.vocab_size if vocab_size is None else vocab_size,
        found.dtype,
    )


def _print(result: Estimate) -> None:
    console = Console(highlight=False)
    work, card = result.work, result.card
    shard = f", {work.columns} columns a rank" if work.tensor_parallel > 1 else ""
    console.print(
        f"N = {work.tokens} tokens, H = {work.hidden_size}, V = {work.vocab_size}{shard}, "
        f"{str(work.dtype).removeprefix('torch.')}; "
        f"weight and hidden states {result.resident / GIB:.2f} GiB"
        + (f", reserved {result.reserved_gib:g} GiB" if result.reserved_gib else "")
        + "\n"
    )
    table = Table(box=None, pad_edge=False)
    for heading in (
        "path",
        "peak, MiB",
        "with the rest, GiB",
        "TFLOP in products",
        f"{card.name}, {card.gib:g} GiB",
    ):
        table.add_column(heading, justify="left" if heading == "path" else "right")
    for head in result.heads:
        fits = "[green]fits[/]" if result.fits(head) else "[red]does not fit[/]"
        table.add_row(
            head.name,
            f"{head.peak.bytes / MIB:.0f}",
            f"{result.total(head) / GIB:.1f}",
            f"{head.flops / 1e12:.2f}",
            fits,
        )
    console.print(table)
    console.print("\nWhat is alive at the peak, MiB")
    parts = Table(box=None, pad_edge=False, show_header=False)
    parts.add_column()
    parts.add_column(justify="right")
    parts.add_column()
    for head in result.heads:
        for number, part in enumerate(sorted(head.peak.parts, key=lambda part: -part.bytes)):
            label = head.name if number == 0 else ""
            parts.add_row(label, f"{part.bytes / MIB:.1f}", escape(part.name))
    console.print(parts)
    _print_settings(console, result)


def _print_settings(console: Console, result: Estimate) -> None:
    settings = result.settings
    execution = settings.execution
    console.print(f"\n{settings.why}", soft_wrap=True)
    if settings.path == "none":
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("path", settings.path),
        ("chunk_size", settings.chunk_size),
        ("workspace_mib", execution.workspace_mib),
        ("logits_budget_mib", execution.logits_budget_mib),
        ("compact_rows", execution.compact_rows),
    ):
        table.add_row(name, f"{value}" + (" (the default)" if value is None else ""))
    console.print(table)
