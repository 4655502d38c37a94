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

import torch

from mcore_entropy.backends.npu.cross_entropy import why_not_fused
from mcore_entropy.self_check import run_checks


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
    usable = obstacle is None and not device.startswith("none")
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
    """Its version, with what keeps it from being used in words, and again alone."""
    try:
        installed = version("torch-npu")
    except PackageNotFoundError:
        return "not installed: pip install torch-npu, of torch's version", "none: torch-npu is not installed"
    if importlib.util.find_spec("torch_npu") is None:
        return f"{installed}, but its module is missing", "none: torch-npu is broken"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        # Without Ascend's driver and CANN its libraries are missing, and each release says it otherwise.
        return (
            f"{installed}, which cannot be imported: {error}",
            f"none: torch-npu cannot be imported ({error})",
        )
    return installed, None


def _device() -> str:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return "none: torch.npu.is_available() is false; is CANN's set_env.sh sourced?"
    return str(npu.get_device_name(0))


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where a check fails, or there is nothing to check on."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_entropy.adapters.npu",
        description="What is found of Ascend's software; with --self-check, whether it computes right.",
    )
    parser.add_argument("--self-check", action="store_true", help="compare with fp64 on the CPU, and report")
    parser.add_argument("--device", default="npu", help="cpu rehearses the checks (%(default)s)")
    parser.add_argument(
        "--report", type=Path, default=Path("mcore_entropy_npu.json"), help="the JSON to send (%(default)s)"
    )
    args = parser.parse_args(arguments)
    here = found()
    for name, value in asdict(here).items():
        print(f"{name.replace('_', ' ')}: {value}")
    if not args.self_check:
        return 0 if here.usable else 1
    if args.device == "npu" and not here.usable:
        print("There is no NPU to check; --device cpu rehearses the checks.")
        return 1
    backends = ["npu"] if why_not_fused() else ["npu", "npu_fused"]
    results = run_checks(torch.device(args.device), backends, _DTYPES, runs=20)
    for result in results:
        print(result.line())
    report = {"found": asdict(here), "checks": [asdict(result) for result in results]}
    args.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    passed = sum(result.passed for result in results)
    print(f"{passed} of {len(results)} checks passed. Please send {args.report} to the project.")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
