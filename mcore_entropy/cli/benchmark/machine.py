"""What the numbers were measured on, and how much memory is left there."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "verl")


def describe(device: torch.device) -> dict[str, str]:
    """Device, versions and date, in the order in which a reader wants them."""
    if device.type == "cpu":
        name = f"{_cpu()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    else:
        name = torch.get_device_module(device).get_device_name(device)
    found = {"device": name, "mcore-entropy": version("mcore-entropy"), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """Of the CPU's memory, as Linux and the container's limit have it; no limit where neither says."""
    return min(_free_in_system(), _free_in_container())


def _free_in_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return sys.maxsize


def _free_in_container() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no version 2 of cgroups, or "max"
        return sys.maxsize
