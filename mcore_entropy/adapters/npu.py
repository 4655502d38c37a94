"""Ascend NPUs: what is found on this machine, and a check that a person with one can run and send back.

    python -m mcore_entropy.adapters.npu                  # what is found
    python -m mcore_entropy.adapters.npu --self-check     # and whether it computes right, with a JSON report

Nothing here is needed to compute: tensors on an NPU find the npu backend by their device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mcore_entropy.backends.npu.cross_entropy import why_not_fused
from mcore_entropy.self_check import Result, run_checks


@dataclass(frozen=True)
class Found:
    """What this machine has of Ascend's software, in words.

    Attributes:
        torch_npu: its version, or why it cannot be used.
        device: the first NPU's name, or why there is none.
        fused_cross_entropy: "available", or why the operator cannot be called.
        settings: environment variables that change how it computes or starts.
    """

    python: str
    torch: str
    torch_npu: str
    usable: bool
    device: str
    fused_cross_entropy: str
    settings: dict[str, str]


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SETTINGS = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "ASCEND_HOME_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    # What MindSpeed's deterministic mode sets:
    "HCCL_DETERMINISTIC",
    "LCCL_DETERMINISTIC",
    "CLOSE_MATMUL_K_SHIFT",
    "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATB_LLM_LCOC_ENABLE",
)


def found() -> Found:
    """Look for torch-npu and a device, and survive whatever importing it does without a driver."""
    torch_npu, obstacle = _torch_npu()
    device = obstacle or _device()
    usable = not device.startswith("none")
    return Found(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_npu=torch_npu,
        usable=usable,
        device=device,
        fused_cross_entropy=why_not_fused() or "available",
        settings={name: os.environ[name] for name in _SETTINGS if name in os.environ},
    )


def _torch_npu() -> tuple[str, str | None]:
    """Its version, with what keeps it from being used in words, and again in short."""
    try:
        installed = version("torch-npu")
    except PackageNotFoundError:
        return "not installed: pip install torch-npu, of torch's version", "none: torch-npu is not installed"
    if importlib.util.find_spec("torch_npu") is None:
        return f"{installed}, but its module is missing", "none: torch-npu is broken"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        # Without Ascend's driver and CANN its libraries are missing, beside another torch its names; each
        # release says it otherwise.
        text = f"{installed}, which cannot be imported: {type(error).__name__}: {error}"
        if _release(installed) != _release(torch.__version__):
            text += f"; it is for torch {_release(installed)}, and torch is {torch.__version__}"
        return text, "none: torch-npu cannot be imported"
    return installed, None


def _release(installed: str) -> str:
    """2.13 of 2.13.0+cpu: what torch-npu shares with the torch that it is built for."""
    return ".".join(installed.split(".")[:2])


def _device() -> str:
    npu = getattr(torch, "npu", None)
    try:
        if npu is None or not npu.is_available():
            return "none: torch.npu.is_available() is false, as where CANN's set_env.sh was not sourced"
        return str(npu.get_device_name(0))
    except Exception as error:  # the driver's, in whatever form: the first call that touches the device
        return f"none: the first NPU cannot be used: {type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where a check fails, or there is nothing to check on."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_entropy.adapters.npu",
        description="What is found of Ascend's software; with --self-check, whether it computes right.",
    )
    parser.add_argument("--self-check", action="store_true", help="compare with fp64 on the CPU, and report")
    parser.add_argument("--device", default="npu", help="npu, npu:1, ...; cpu rehearses (%(default)s)")
    parser.add_argument(
        "--report", type=Path, default=Path("mcore_entropy_npu.json"), help="the JSON to send (%(default)s)"
    )
    args = parser.parse_args(arguments)
    here = found()
    for name, value in asdict(here).items():
        print(f"{name.replace('_', ' ')}: {value}")
    if not args.self_check:
        return 0 if here.usable else 1
    kind = args.device.partition(":")[0]
    if kind not in ("npu", "cpu"):
        parser.error(f"--device: expected npu, npu:1 and so on, or cpu, got {args.device}")
    if kind == "npu" and not here.usable:
        print("There is no NPU to check; --device cpu rehearses the checks.")
        return 1
    # The operator has no form for the CPU, whatever torch-npu is installed.
    backends = ["npu"] if kind == "cpu" or why_not_fused() else ["npu", "npu_fused"]
    results = []
    for result in run_checks(torch.device(args.device), backends, _DTYPES, runs=20):
        # One by one: on an NPU the next one may hang, or end the process.
        print(result.line(), flush=True)
        results.append(result)
        try:
            _write(args.report, {"device": args.device, "found": asdict(here)}, results)
        except OSError as error:
            print(f"The report cannot be written: {error}; --report names another place.")
            return 1
    passed = sum(result.passed for result in results)
    print(f"{passed} of {len(results)} checks passed.")
    print("This was a rehearsal." if kind == "cpu" else f"Please send {args.report} to the project.")
    return 0 if passed == len(results) else 1


def _write(path: Path, machine: dict[str, Any], results: list[Result]) -> None:
    report = {**machine, "checks": [asdict(result) for result in results]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
