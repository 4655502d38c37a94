"""Megatron-core on the CPU with gloo, for development machines and tests.

    torch.distributed.init_process_group("gloo")
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model = GPTModel(config, get_gpt_layer_local_spec(), ...)
        get_forward_backward_func()(...)

Megatron names CUDA outright in many places. Inside the context those places reach the CPU; nothing
is changed before it is entered, and everything is put back when it is left. Line numbers below are
megatron-core 0.19.2's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["megatron_on_cpu"]


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-core on the CPU inside the context, also on a machine that has CUDA.

    Replaced inside, and restored on leaving, by an exception too:

    - ``torch.cuda.current_device``, ``current_stream``, ``synchronize``: those of ``torch.cpu``;
    - ``torch.cuda.manual_seed``, ``get_rng_state``, ``set_rng_state`` and Megatron's own RNG-state
      helpers: the CPU generator, so that the RNG tracker's forks steer CPU dropout and init;
    - ``Tensor.cuda``: ``Tensor.cpu``; ``Tensor.type()`` calls a CPU tensor ``torch.cuda.*Tensor``;
    - ``torch`` as a few Megatron modules see it: ``tensor``, ``zeros`` and ``ones`` with
      ``device="cuda"`` make CPU tensors (``torch`` itself keeps its functions);
    - Megatron's default causal mask, its router's product in Transformer Engine, and
      ``WrappedTorchNorm``, which refuses sequence parallelism.

    Build, train and destroy inside one context: the replacements are process-wide (autograd's
    threads see them), so they must enclose the backward and the optimizer step, and Megatron keeps
    CPU buffers until ``destroy_model_parallel``. Nesting is free: the outermost context counts.
    Enter and leave it from one thread, and do not start compiling CUDA code with ``torch.compile``
    in a process that compiled inside first, as its table of known functions is built once.

    Runs on megatron-core 0.13 to 0.19 (docs/compatibility.md): GPTModel from
    ``get_gpt_layer_local_spec`` with tensor, sequence, pipeline (interleaved too) and expert
    parallelism (the "allgather" dispatcher), multi-token prediction, tied weights, Float16Module,
    DistributedDataParallel, ``get_megatron_optimizer`` (plain and distributed) with clipping. Context
    parallelism only where no attention runs: Megatron's own needs Transformer Engine there.
    Not covered: TransformerEngine and apex kernels (layers, norms and Adam that Megatron takes from
    them where they are installed), overlapped gradient reduction over several optimizer instances,
    ``config.autocast_dtype``, CUDA graphs, Megatron-FSDP.

    Raises:
        ImportError: megatron-core is not installed.
    """
    current_device: Any = torch.cuda.current_device
    if current_device is torch.cpu.current_device:  # inside already
        yield
        return
    replacements = _replacements()
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set one attribute; on leaving put the very same object back, or none where it was inherited."""
    own = vars(owner)
    inherited = name not in own
    original = None if inherited else own[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _replacements() -> list[tuple[Any, str, Any]]:
    """Everything that the context replaces, as (owner, attribute name, value)."""
    try:
        import megatron.core.utils as core_utils
        from megatron.core.fusions import fused_softmax
        from megatron.core.optimizer import clip_grads, grad_scaler, optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import data, random
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
    except ImportError as error:
        raise ImportError(
            "megatron_on_cpu() needs megatron-core: pip install megatron-core psutil."
        ) from error

    torch_on_cpu = _torch_on_cpu()
    return [
        # device=torch.cuda.current_device() all over: rotary_pos_embedding.py:162,
        # mappings.py:95, layers.py:647, p2p_communication.py:342, param_and_grad_buffer.py:1186.
        (torch.cuda, "current_device", torch.cpu.current_device),
        # param_and_grad_buffer.py:632, waiting for CUDA graphs before a gradient reduction.
        (torch.cuda, "current_stream", torch.cpu.current_stream),
        # p2p_communication.py:419, after every batch of sends and receives.
        (torch.cuda, "synchronize", torch.cpu.synchronize),
        # tensor_parallel/random.py:303-306 and :490, adding a state and seeding the tracker.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", _get_rng_state),
        # rerun_state_machine.py:992. Its partner above is replaced, so this one has to be too.
        (torch.cuda, "set_rng_state", _set_rng_state),
        # random.py:104-172, the tracker's fork and recomputation: default_generators of CUDA.
        (random, "_get_cuda_rng_state", _get_rng_state),
        (random, "_set_cuda_rng_state", _set_rng_state),
        # language_module.py:307 (tied weights over pipeline stages), rope_utils.py:64,
        # data.py:84, utils.py:946, grad_scaler.py:163.
        (torch.Tensor, "cuda", _tensor_cuda),
        # clip_grads.py:174, optimizer.py:1009 and :1028, distrib_optimizer.py:401 compare the type
        # of gradients and parameters with "torch.cuda.FloatTensor" and the like.
        (torch.Tensor, "type", _tensor_type),
        # Literal device="cuda": schedules.py:749, 1121, 2292 (count of tokens);
        # optimizer.py:315-702 and :1249; clip_grads.py:96-231; grad_scaler.py:20-117;
        # tensor_parallel/data.py:37; utils.py:1332.
        (schedules, "torch", torch_on_cpu),
        (optimizer, "torch", torch_on_cpu),
        (clip_grads, "torch", torch_on_cpu),
        (grad_scaler, "torch", torch_on_cpu),
        (data, "torch", torch_on_cpu),
        (core_utils, "torch", torch_on_cpu),
        # transformer/utils.py:39: torch.ones(device="cuda"), where no attention mask is given.
        (fused_softmax, "get_default_causal_mask", _causal_mask),
        # moe_utils.py:1326, the router's product; 0.16.1 asks for it by a name that it leaves undefined
        # where there is no Transformer Engine.
        (moe_utils, "te_general_gemm", None),
        # torch_norm.py:50 asserts that sequence parallelism is off.
        (WrappedTorchNorm, "__new__", _norm_under_sequence_parallelism(WrappedTorchNorm.__new__)),
    ]


def _get_rng_state(*_device: Any, **_how: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_device: Any, **_how: Any) -> None:
    torch.set_rng_state(new_state)


def _tensor_cuda(self: torch.Tensor, *_device: Any, **_how: Any) -> torch.Tensor:
    return self.cpu()


_tensor_type_of_torch = torch.Tensor.type


def _tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return _tensor_type_of_torch(self, *args, **kwargs)
    name: str = _tensor_type_of_torch(self)
    return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)


def _causal_mask(sq: int) -> torch.Tensor:
    return torch.ones(sq, sq, dtype=torch.bool).triu(diagonal=1)


def _torch_on_cpu() -> types.ModuleType:
    """`torch` for modules that ask for ``device="cuda"``.

    A view for those modules only. Replacing `torch.zeros` itself would outlast the context: torch
    keeps tables of its own functions that are built on first use (torch.compile, torch.device).
    """

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                device = "cpu"
            return factory(*args, device=device, **kwargs)

        return make

    view = types.ModuleType("torch")
    for name in ("tensor", "zeros", "ones"):
        setattr(view, name, on_cpu(getattr(torch, name)))
    vars(view)["__getattr__"] = functools.partial(getattr, torch)
    return view


def _norm_under_sequence_parallelism(new: Callable[..., torch.nn.Module]) -> staticmethod[..., Any]:
    """`WrappedTorchNorm.__new__` that makes the norm under sequence parallelism as well.

    A norm over the hidden dimension is right on a shard of the sequence. What it lacks is the mark
    of Megatron's fused norms by which finalize_model_grads sums its gradients over the ranks.
    """

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        whole_sequence = copy.copy(config)
        whole_sequence.sequence_parallel = False
        norm = new(cls, whole_sequence, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    return staticmethod(make)
