"""`mcore-entropy estimate` as a user meets it: mistakes, JSON, settings; and peaks recorded on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mcore_entropy as me
from mcore_entropy.cli.app import app
from mcore_entropy.cli.estimate.cards import CARDS, card_of, tiles_of
from mcore_entropy.cli.estimate.fused_head import fused
from mcore_entropy.cli.estimate.logits_heads import eager
from mcore_entropy.cli.estimate.report import MIB, estimate
from mcore_entropy.cli.estimate.workload import Head, Workload, largest

SHAPE = ("--hidden-size", "2048", "--vocab-size", "151936")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def path_of(report: Any, name: str) -> Any:
    (path,) = [path for path in report["paths"] if path["path"] == name]
    return path


def write(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder / "config.json")


# --- recorded on an H200 --------------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parent / "data" / "h200_peaks.json").read_text())


def recorded(kind: str) -> list[Any]:
    return [
        pytest.param(peak, id="x".join(str(peak[key]) for key in ("tokens", "hidden_size", "vocab_size")))
        for peak in RECORDED[kind]["peaks"]
    ]


def recorded_work(peak: dict[str, int]) -> Workload:
    dtype = getattr(torch, RECORDED["dtype"])
    return Workload(peak["tokens"], peak["hidden_size"], peak["vocab_size"], dtype)


def fused_on_h200(work: Workload) -> Head:
    execution = me.Execution()
    return fused(work, tiles_of("auto", card_of(RECORDED["card"]), work, execution), execution)


@pytest.mark.parametrize("peak", recorded("head"))
def test_recorded_peaks_of_the_whole_head(peak: dict[str, int]) -> None:
    work = recorded_work(peak)
    assert eager(work).peak.bytes / MIB == pytest.approx(peak["eager"], rel=0.05)
    assert fused_on_h200(work).peak.bytes / MIB == pytest.approx(peak["fused"], rel=0.05)


@pytest.mark.parametrize("peak", recorded("workspace"))
def test_recorded_workspaces(peak: dict[str, int]) -> None:
    """Beyond results and gradients. They were measured without what autograd gets for main_grad."""
    work = recorded_work(peak)
    results = work.tokens * 2 * 4
    for name, gradients in (
        ("step", work.hidden_bytes + work.weight_bytes),
        ("main_grad", work.hidden_bytes),
    ):
        head = fused_on_h200(replace(work, main_grad=name == "main_grad"))
        passes = largest([one for one in head.moments if one.name.startswith("pass")])
        assert (passes.bytes - gradients - results) / MIB == pytest.approx(peak[name], rel=0.05)
    (forward,) = [one for one in fused_on_h200(work).moments if one.name == "forward"]
    assert (forward.bytes - results) / MIB == pytest.approx(peak["forward"], rel=0.05)


# --- operations -----------------------------------------------------------------------------------


def test_operations_of_the_products() -> None:
    """6 N H V with logits, 8 without; half of the tokens masked is half for the fused head alone."""
    product = 2 * 8192 * 2048 * 151936
    whole, half = as_json(*SHAPE), as_json(*SHAPE, "--masked", "0.5")
    assert [path["flops"] for path in whole["paths"]] == [3 * product, 3 * product, 4 * product]
    assert [path["flops"] for path in half["paths"]] == [3 * product, 3 * product, 2 * product]
    sharded = as_json(*SHAPE, "--tensor-parallel-size", "4")
    assert path_of(sharded, "fused")["flops"] == product


# --- cards and settings ---------------------------------------------------------------------------


def test_fits_on_one_card_and_not_on_another() -> None:
    arguments = (*SHAPE, "--tokens", "32768")
    fits = {card: [path["fits"] for path in as_json(*arguments, "--card", card)["paths"]] for card in CARDS}
    assert fits["H200"] == [True, True, True]
    assert fits["A100-80"] == [False, True, True]
    assert fits["4090"] == [False, False, True]


def test_a_number_of_gib_is_a_limit() -> None:
    peak = path_of(as_json(*SHAPE), "fused")["total_bytes"] / 2**30
    assert as_json(*SHAPE, "--card", f"{peak * 1.01}")["settings"]["workspace_mib"] is None
    smaller = as_json(*SHAPE, "--device-memory", f"{peak * 0.9}")
    assert smaller["settings"]["workspace_mib"] is not None and path_of(smaller, "fused")["fits"]
    nothing = as_json(*SHAPE, "--card", "1")
    assert nothing["settings"]["path"] == "none" and not path_of(nothing, "fused")["fits"]
    assert "does not fit" in nothing["settings"]["why"]


def test_logits_are_kept_only_in_memory_that_is_known_to_be_free() -> None:
    unknown = as_json(*SHAPE)
    assert unknown["settings"]["logits_budget_mib"] == 0
    known = as_json(*SHAPE, "--reserved", "60")
    whole = 8192 * 151936 * 2 / MIB
    assert known["settings"]["logits_budget_mib"] == pytest.approx(whole, rel=0.02)
    assert path_of(known, "fused")["flops"] == path_of(known, "eager")["flops"]
    assert path_of(known, "fused")["parts"]["kept logits"] <= known["settings"]["logits_budget_mib"] * MIB
    some = as_json(*SHAPE, "--reserved", "77")
    assert 0 < some["settings"]["logits_budget_mib"] < whole
    assert path_of(some, "fused")["fits"]
    for no_budget in (("--dtype", "fp32"), ("--backend", "torch"), ("--card", "910B", "--reserved", "1")):
        assert as_json(*SHAPE, "--reserved", "1", *no_budget)["settings"]["logits_budget_mib"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("card", CARDS)
def test_settings_are_the_librarys(card: str, dtype: torch.dtype) -> None:
    """Whatever is advised can be passed, and is what the figures are of."""
    work = Workload(16384, 2048, 128256, dtype, tensor_parallel=4, sequence_parallel=True, masked=0.3)
    result = estimate(work, card_of(card), reserved_gib=CARDS[card].gib - 4)
    assert result.settings.path == "fused"
    execution = result.settings.execution
    again = fused(
        work, tiles_of("auto", card_of(card), work, execution), execution, result.settings.chunk_size
    )
    assert again == result.heads[-1]
    assert result.fits(again)


# --- a model's config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "vocab_size": 1000, "torch_dtype": "float16"}, (64, 1000, "float16")),
        ({"n_embd": 64, "vocab_size": 1000}, (64, 1000, "bfloat16")),
        (
            {"hidden_size": 1, "text_config": {"hidden_size": 64, "vocab_size": 1000, "dtype": "float32"}},
            (64, 1000, "float32"),
        ),
        (
            {"dtype": "bfloat16", "vocab_size": 1000, "text_config": {"hidden_size": 64}},
            (64, 1000, "bfloat16"),
        ),
    ],
)
def test_shape_from_a_config(config: dict[str, Any], expected: tuple[int, int, str], tmp_path: Path) -> None:
    write(tmp_path, config)
    for path in (tmp_path, tmp_path / "config.json"):
        head = as_json("--config", str(path))["head"]
        assert (head["hidden_size"], head["vocab_size"], head["dtype"]) == expected


def test_the_command_line_wins_over_a_config(tmp_path: Path) -> None:
    path = write(tmp_path, {"hidden_size": 64, "vocab_size": 1000, "dtype": "float32"})
    head = as_json("--config", path, "--vocab-size", "2000", "--dtype", "fp16")["head"]
    assert (head["hidden_size"], head["vocab_size"], head["dtype"]) == (64, 2000, "float16")


# --- mistakes -------------------------------------------------------------------------------------

CONFIGS = {
    "not JSON": ("{", "is not JSON"),
    "a list": ([1], "expected a JSON object"),
    "nothing": ({}, "has no hidden_size or n_embd or d_model"),
    "no vocabulary": ({"hidden_size": 3}, "has no vocab_size"),
    "a string": ({"hidden_size": "3", "vocab_size": 9}, "expected a positive hidden_size"),
    "another dtype": ({"hidden_size": 3, "vocab_size": 9, "dtype": "int8"}, "give --dtype"),
}


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return str(result.stderr)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_bad_config_is_one_sentence(kind: str, tmp_path: Path) -> None:
    config, message = CONFIGS[kind]
    assert message in refused("--config", write(tmp_path, config))


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    assert "--config: cannot read" in refused("--config", str(tmp_path / "no"))
    assert "--config: cannot read" in refused("--config", str(tmp_path))  # a folder without one
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refused("--config", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--hidden-size: expected it, or --config"),
        (("--hidden-size", "64"), "--vocab-size: expected it, or --config"),
        ((*SHAPE, "--tokens", "-1"), "--tokens: expected at least 1, got -1"),
        (("--hidden-size", "0", "--vocab-size", "9"), "--hidden-size: expected at least 1, got 0"),
        ((*SHAPE, "--tensor-parallel-size", "0"), "--tensor-parallel-size: expected at least 1, got 0"),
        ((*SHAPE, "--masked", "1.5"), "--masked: expected a share between 0 and 1, got 1.5"),
        ((*SHAPE, "--masked", "nan"), "--masked: expected a share between 0 and 1, got nan"),
        ((*SHAPE, "--card", "H300"), "--card: expected one of H200"),
        ((*SHAPE, "--card", "-4"), "--card: expected one of H200"),
        ((*SHAPE, "--reserved", "-1"), "--reserved: expected 0 GiB or more, got -1"),
        ((*SHAPE, "--reserved", "nan"), "--reserved: expected 0 GiB or more, got nan"),
        ((*SHAPE, "--backend", "triton", "--card", "910B"), "--backend: triton runs on NVIDIA GPUs"),
        ((*SHAPE, "--backend", "npu"), "--backend: npu runs on Ascend NPUs"),
        (
            (*SHAPE, "--tokens", "7", "--tensor-parallel-size", "2", "--sequence-parallel"),
            "--tokens: expected a multiple of tensor_parallel_size = 2",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_options_that_do_not_parse() -> None:
    for arguments in ((*SHAPE, "--dtype", "fp8"), (*SHAPE, "--tokens", "many")):
        result = run(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output


# --- the tables -----------------------------------------------------------------------------------


def test_the_table_has_what_the_json_has() -> None:
    printed = run(*SHAPE, "--tokens", "16384", "--card", "4090").stdout
    report = as_json(*SHAPE, "--tokens", "16384", "--card", "4090")
    for path in report["paths"]:
        (line,) = [line for line in printed.splitlines() if line.startswith(path["path"]) and "fit" in line]
        assert f"{path['peak_bytes'] / MIB:.0f}" in line
        assert ("does not fit" in line) is not path["fits"]
        for name in path["parts"]:
            assert name in printed
    assert "workspace_mib      None (the default)" in printed


def test_help_names_every_option() -> None:
    text = run("--help").stdout
    for option in ("--config", "--tokens", "--masked", "--card", "--device-memory", "--json", "H100-80"):
        assert option in text
