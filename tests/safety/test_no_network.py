"""Importing every module, a step of training, the doctor: no connection, no file, torch left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What Python runs before a program, from a folder on its path: addresses other than this host's raise.
SITE = """
import socket

LOCAL = ("localhost", "127.0.0.1", "::1", "", None)

def refused(place):
    raise RuntimeError(f"NETWORK: {place}")

def guarded(method):
    def call(self, address, *rest):
        if self.family != socket.AF_UNIX and address[0] not in LOCAL:
            refused(address)
        return method(self, address, *rest)
    return call

class Guarded(socket.socket):
    connect = guarded(socket.socket.connect)
    connect_ex = guarded(socket.socket.connect_ex)

def getaddrinfo(host, *rest, _stock=socket.getaddrinfo, **keywords):
    if host not in (*LOCAL, socket.gethostname()):
        refused(host)
    return _stock(host, *rest, **keywords)

socket.socket, socket.getaddrinfo = Guarded, getaddrinfo
socket.gethostbyname = lambda host: getaddrinfo(host, None)[0][4][0]
"""

IMPORTS = """
import importlib, pkgutil, random, sys, threading, warnings
warnings.simplefilter("ignore")
import torch

def state():
    return {
        "functions": [
            (owner.__name__, name, id(vars(owner)[name]))
            for owner in (torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.autograd.Function,
                          torch.distributed, torch.nn.Linear)
            for name in sorted(vars(owner))
            if callable(vars(owner)[name])
        ],
        "dtype": torch.get_default_dtype(), "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": torch.is_grad_enabled(), "random": torch.random.get_rng_state().tolist(),
        "python's random": random.getstate(), "excepthook": id(sys.excepthook),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
                   torch.backends.cudnn.benchmark),
        "group": torch.distributed.is_initialized(),
        "running": [thread.name for thread in threading.enumerate()],
    }

# These come with libraries of others, which are loaded first: what they change is not ours.
for name in OTHERS:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
before = state()
import mcore_entropy
imported, left = [], {}
for module in pkgutil.walk_packages(mcore_entropy.__path__, "mcore_entropy."):
    if module.name.endswith(("__main__", "verl_external")):
        continue  # they are programs, or the switch itself
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ImportError as error:
        left[module.name] = str(error)
after = state()
changed = [key for key in before if before[key] != after[key]]
assert not changed, changed
assert len(imported) > 60, imported
print(len(imported), "imported;", left)
"""
OTHERS = (
    *(
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "numpy",
        "triton",
        "peft",
    ),
    *(
        "transformers",
        "transformers.modeling_utils",
        "transformers.modeling_outputs",
        "typer",
        "rich.console",
    ),
    *("megatron.core.models.gpt", "megatron.core.models.mamba", "megatron.core.optimizer"),
)

STEP = """
import torch
import mcore_entropy as me

logits = torch.randn(3, 7, requires_grad=True)
me.vocab_parallel_entropy_with_chunking(logits, 2).sum().backward()
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
found = me.linear_log_probs_and_entropy(hidden, weight, torch.tensor([0, 6, 3]))
(found.log_probs + found.entropy).sum().backward()
assert hidden.grad.isfinite().all() and weight.grad.isfinite().all() and logits.grad.isfinite().all()
"""


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that has no network, and a home where it may not write."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    home = tmp_path / "home"
    home.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_", "MCORE_ENTROPY_", "TRITON_", "XDG_", "COVERAGE_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    path = [str(tmp_path / "site"), str(ROOT)]
    # Written or not is looked up afterwards: permissions do not bind root.
    return kept | {
        "PYTHONPATH": os.pathsep.join(path),
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(program: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    home = Path(environment["HOME"])
    home.chmod(0o555)
    result = subprocess.run(
        [sys.executable, *program], env=environment, cwd=home, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NETWORK" not in result.stdout + result.stderr
    return result


def written(environment: dict[str, str]) -> list[str]:
    home = Path(environment["HOME"])
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())


def test_importing_every_module_changes_nothing(offline: dict[str, str]) -> None:
    others = f"OTHERS = {OTHERS!r}\n"
    result = run(["-c", others + IMPORTS], offline)
    assert "imported;" in result.stdout
    assert written(offline) == []


def test_a_step_of_training_connects_to_nobody_and_writes_nothing(offline: dict[str, str]) -> None:
    run(["-c", STEP], offline)
    assert written(offline) == []


def test_the_doctor_connects_to_nobody(offline: dict[str, str]) -> None:
    assert "self-test" in run(["-m", "mcore_entropy.cli", "doctor"], offline).stdout.lower()


@pytest.mark.parametrize(
    "call",
    [
        "socket.create_connection(('192.0.2.1', 80), 1)",
        "socket.getaddrinfo('example.invalid', 80)",
        "urllib.request.urlopen('http://example.invalid/')",
    ],
)
def test_the_guard_holds(call: str, offline: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="NETWORK"):
        run(["-c", f"import socket, urllib.request\n{call}"], offline)
