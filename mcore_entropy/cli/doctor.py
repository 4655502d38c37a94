"""What `mcore-entropy doctor` finds: a line in words each, and what to do where something is wrong."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mcore_entropy
from mcore_entropy.backends import select, why_not_triton
from mcore_entropy.execution import Execution
from mcore_entropy.self_check import run_checks


class State(str, Enum):
    """Fine; not there or unusual, which may well be meant; or something to mend."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    state: State
    text: str


def findings() -> list[Finding]:
    """Everything, in the report's order; takes a few seconds, most of them for importing Megatron."""
    return [*_versions(), *_devices(), *_megatron(), *_switches(), *_self_test()]


# What installs a package, and what for.
_PACKAGES = {
    "triton": "pip install 'mcore-entropy[triton]', for NVIDIA GPUs",
    "megatron-core": "pip install 'mcore-entropy[megatron]', for EntropyAwareOutputLayer",
    "transformer-engine": "for Megatron's Transformer Engine layers alone",
    "transformers": "pip install 'mcore-entropy[hf]', for swap_lm_head",
    "torch-npu": "for Ascend NPUs alone",
    "verl": "for verl's users alone",
}


def _versions() -> Iterator[Finding]:
    section = "Versions"
    yield Finding(section, "mcore-entropy", State.OK, mcore_entropy.__version__)
    yield Finding(section, "python", State.OK, platform.python_version())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding(section, "torch", State.OK, f"{torch.__version__}, built with {build}")
    for package, purpose in _PACKAGES.items():
        try:
            yield Finding(section, package, State.OK, version(package))
        except PackageNotFoundError:
            yield Finding(section, package, State.NOTE, f"not installed ({purpose})")


def _devices() -> Iterator[Finding]:
    """Each kind of device: whether torch can use it, and which backend its tensors get."""
    yield _backend_of(torch.device("cpu"), platform.processor() or platform.machine())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield _backend_of(
                torch.device("cuda", index), f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    elif Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        reason = "the driver does not answer it" if torch.version.cuda else "it is built without CUDA"
        yield Finding(
            "Devices",
            "cuda",
            State.WRONG,
            f"there is an NVIDIA GPU, and torch cannot use it: {reason}; check nvidia-smi, and install a "
            "CUDA build of torch that this driver can run",
        )
    yield from _npu()


def _backend_of(device: torch.device, description: str) -> Finding:
    try:
        chosen = select(Execution(), device, torch.bfloat16).name
    except Exception as error:  # whatever importing triton raises where it is broken
        return Finding(
            "Devices",
            str(device),
            State.WRONG,
            f"{description}: its backend cannot be imported: {type(error).__name__}: {error}; reinstall "
            "triton, or pass Execution(backend='torch')",
        )
    if device.type == "cuda" and chosen == "torch":
        reason = why_not_triton(device, torch.bfloat16)
        return Finding(
            "Devices", str(device), State.NOTE, f"{description}: backend torch; not triton: {reason}"
        )
    return Finding("Devices", str(device), State.OK, f"{description}: backend {chosen}")


def _npu() -> Iterator[Finding]:
    from mcore_entropy.adapters.npu import found

    here = found()
    if here.usable:
        yield _backend_of(torch.device("npu", 0), here.device)
        yield Finding("Devices", "npu_fused", State.OK, here.fused_cross_entropy)
    elif not here.torch_npu.startswith("not installed"):
        yield Finding(
            "Devices",
            "npu",
            State.WRONG,
            f"torch-npu {here.torch_npu}; {here.device}. Install Ascend's driver and CANN and source its "
            "set_env.sh, install the torch-npu of torch's version, or uninstall torch-npu",
        )
    elif Path("/dev/davinci_manager").exists():
        yield Finding(
            "Devices",
            "npu",
            State.WRONG,
            "there is an Ascend NPU, and torch-npu is not installed; install the one of torch's version",
        )


def _megatron() -> Iterator[Finding]:
    section = "Megatron"
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        yield Finding(section, "megatron-core", State.NOTE, "not installed, nothing to swap")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of everything optional that is not there
            model = importlib.import_module("megatron.core.models.gpt").GPTModel
    except Exception as error:  # what its imports raise depends on what is missing
        yield Finding(
            section,
            "import",
            State.WRONG,
            f"megatron-core {installed} is installed and cannot be imported: {type(error).__name__}: "
            f"{error}; pip install 'mcore-entropy[megatron]' installs what it needs",
        )
        return
    missing = [name for name in ("_postprocess", "compute_language_model_loss") if not hasattr(model, name)]
    if missing:
        yield Finding(
            section,
            "swap_output_layer",
            State.WRONG,
            f"GPTModel of megatron-core {installed} has no {' and no '.join(missing)}; 0.13 and newer have",
        )
    else:
        yield Finding(
            section, "swap_output_layer", State.OK, "GPTModel has what the swap hooks into (_postprocess)"
        )
    has_processor = "output_processor" in inspect.signature(model.forward).parameters
    yield Finding(
        section,
        "output_processor",
        State.OK if has_processor else State.NOTE,
        "GPTModel takes one"
        if has_processor
        else "GPTModel takes none before 0.18; Megatron-RL's patches need it, nothing else does",
    )


# Ours, and what others' variables change in our results or speed.
_OURS = {"MCORE_ENTROPY_CHECKS": "all ranks' arguments are compared, which costs time (docs/faults.md)"}
_OTHERS = {
    "TRITON_INTERPRET": "1 runs Triton's kernels in its interpreter on the CPU, for tests: far too slow",
    "TORCHDYNAMO_DISABLE": "1 switches torch.compile off",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in products of fp32, 1 asks for it",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 computes products of fp32 in TF32",
    "CUBLAS_WORKSPACE_CONFIG": "torch's deterministic algorithms want :4096:8 or :16:8",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch sees",
    "CUDA_LAUNCH_BLOCKING": "1 makes every kernel wait, for debugging",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0 keeps torch from importing torch-npu by itself",
}


def _switches() -> Iterator[Finding]:
    section = "Environment"
    quiet = True
    for name, value in sorted(os.environ.items()):
        if (name, value) == ("TORCH_DEVICE_BACKEND_AUTOLOAD", "1"):
            continue  # the default, which torch-npu sets by itself once it is imported
        if name in _OTHERS:
            finding = Finding(section, name, State.NOTE, f"{value!r}: {_OTHERS[name]}")
        elif name in _OURS and value in ("0", "1"):
            text = _OURS[name] if value == "1" else "off"
            finding = Finding(section, name, State.OK, f"{value!r}: {text}")
        elif name in _OURS:
            finding = Finding(section, name, State.WRONG, f"expected 0 or 1, got {value!r}, which is off")
        elif name.startswith("MCORE_ENTROPY_") and not name.startswith("MCORE_ENTROPY_TEST_"):
            finding = Finding(
                section, name, State.WRONG, f"nothing reads it; known are {', '.join(sorted(_OURS))}"
            )
        else:
            continue
        quiet = False
        yield finding
    if quiet:
        yield Finding(section, "variables", State.OK, "none set that changes anything here")


def _self_test() -> Iterator[Finding]:
    """Values and gradients on the CPU and on the first accelerator, against dense fp64."""
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices.append(torch.device(accelerator.type, 0))
    for device in devices:
        started = time.perf_counter()
        results = list(run_checks(device, ["auto"], [torch.float32, torch.bfloat16], runs=2))
        seconds = time.perf_counter() - started
        failed = [result for result in results if not result.passed]
        for result in failed:
            yield Finding(
                "Self-test",
                str(device),
                State.WRONG,
                f"{result.name}: {result.detail}; please report it with this whole output",
            )
        if not failed:
            yield Finding(
                "Self-test",
                str(device),
                State.OK,
                f"log-prob, entropy and gradients agree with dense fp64 in {len(results)} checks, "
                f"{seconds:.1f} s",
            )
