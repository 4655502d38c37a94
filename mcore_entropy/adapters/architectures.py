"""What each Hugging Face causal LM does to its logits after the head, and the proof that it is so.

A model's code between its head and its loss is Python that nothing here can read, so each architecture is
named, with the transform its config asks for. When a model is swapped, that code runs once on logits that
are known, and its result is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mcore_entropy.functional.linear import fused_head
from mcore_entropy.functional.linear_passes import LinearOptions
from mcore_entropy.functional.problem import Keywords
from mcore_entropy.parallel import TensorParallelGroup
from mcore_entropy.statistics import LogitTransform, Wanted

TransformOf = Callable[[Any], LogitTransform]


def _none(_: Any) -> LogitTransform:
    return LogitTransform()


def _final_softcap(config: Any) -> LogitTransform:
    return LogitTransform(softcap=config.final_logit_softcapping)


def _times_logit_scale(config: Any) -> LogitTransform:
    return LogitTransform(scale=config.logit_scale)


def _over_logits_scaling(config: Any) -> LogitTransform:
    return LogitTransform(scale=1 / config.logits_scaling)


_TRANSFORMS: dict[str, TransformOf] = {
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Ernie4_5ForCausalLM",
            "FalconForCausalLM",
            "GemmaForCausalLM",
            "GlmForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
            "GPT2LMHeadModel",
            "GPTNeoXForCausalLM",
            "GptOssForCausalLM",
            "HeliumForCausalLM",
            "LlamaForCausalLM",
            "MiniCPM3ForCausalLM",  # it divides the hidden states, before the head
            "MinistralForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "OlmoForCausalLM",
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "OlmoeForCausalLM",
            "PhiForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "StableLmForCausalLM",
            "Starcoder2ForCausalLM",
        ),
        _none,
    ),
    **dict.fromkeys(
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "NanoChatForCausalLM", "VaultGemmaForCausalLM"),
        _final_softcap,
    ),
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), _times_logit_scale),
    **dict.fromkeys(
        ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _over_logits_scaling
    ),
    "FalconH1ForCausalLM": lambda config: LogitTransform(scale=config.lm_head_multiplier),
    "HyperCLOVAXForCausalLM": lambda config: LogitTransform(scale=config.logits_scaling),
    "RecurrentGemmaForCausalLM": lambda config: LogitTransform(softcap=config.logits_soft_cap),
}


def register_architecture(name: str, transform_of: TransformOf) -> None:
    """Make a Hugging Face architecture known to `swap_lm_head`, or an already known one anew.

    Args:
        name: the name of the model's class, such as ``"LlamaForCausalLM"``.
        transform_of: from the model's config, what its forward does to the logits after the head;
            ``lambda config: LogitTransform()`` for nothing. Each swap checks it.
    """
    _TRANSFORMS[name] = transform_of


def known_architectures() -> tuple[str, ...]:
    """The names of the classes that `swap_lm_head` takes."""
    return tuple(sorted(_TRANSFORMS))


def transform_of_model(model: Any, head_name: str) -> LogitTransform:
    """What the model does to its logits after the head, checked against the model's own forward.

    Raises:
        ValueError: the architecture is not known; or its forward does something else.
    """
    architecture = type(model).__name__
    transform_of = _TRANSFORMS.get(architecture)
    if transform_of is None:
        raise ValueError(
            f"model: expected an architecture whose logits are known here, got {architecture}; see in its "
            "forward what happens to the logits between head and loss, and say so: mcore_entropy.adapters."
            f'huggingface.register_architecture("{architecture}", lambda config: LogitTransform()) is '
            "for nothing at all"
        )
    transform = transform_of(model.config)
    _check_transform(model, head_name, transform)
    return transform


def _check_transform(model: Any, head_name: str, transform: LogitTransform) -> None:
    """Compare log-probs of `model(...).logits` with those of the head's product and our transform.

    The model's own forward runs, with logits in the place of the head's that are large enough to tell a
    softcap from none, and with its transformer left out: neither weights nor a device are needed.
    """
    architecture = type(model).__name__
    base = model.base_model
    if base is model:
        raise ValueError(
            f"model: expected {architecture} to have its transformer as the submodule "
            f"{model.base_model_prefix!r}, got none"
        )
    head = model.get_submodule(head_name)
    columns, width = head.weight.shape
    # On the CPU whatever the default device is; in fp64, which autocast leaves alone.
    known: dict[str, Any] = dict(device="cpu", dtype=torch.float64)
    hidden = torch.tensor([[[0.5], [-2.0], [60.0]]], **known)
    weight = torch.linspace(-1.0, 1.0, columns, **known).unsqueeze(-1)
    raw_logits = hidden @ weight.t()
    of_transformer = _OnlyHidden(torch.zeros(*hidden.shape[:-1], width, **known))
    with torch.no_grad(), _answering(base, of_transformer), _answering(head, raw_logits):
        try:
            logits: Tensor = model(
                input_ids=torch.zeros(hidden.shape[:-1], dtype=torch.long, device="cpu"),
                use_cache=False,
                return_dict=True,
            ).logits
        except Exception as error:
            raise ValueError(
                f"model: expected {architecture}'s forward to be its transformer, its head and what follows, "
                f"got {type(error).__name__}: {error}"
            ) from error
    if logits.shape != raw_logits.shape:
        raise ValueError(
            f"model: expected {architecture} to give the logits of its head, "
            f"{tuple(raw_logits.shape)}, got {tuple(logits.shape)}"
        )
    target = torch.tensor([[0, columns // 3, columns - 1]], device="cpu")
    options = LinearOptions(transform, tp_group=TensorParallelGroup.single_rank())
    ours = fused_head(hidden, weight, None, options, Keywords(target=target, wanted=Wanted())).log_probs
    theirs = logits.double().log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    error_allowed = 1e-5 * (1.0 + logits.double().abs().amax(-1))
    if not bool(((ours - theirs).abs() <= error_allowed).all()):
        raise ValueError(
            f"model: expected {architecture} to do {transform} to its logits, as registered, got other "
            f"log-probs of its forward: {theirs.flatten().tolist()} for {ours.flatten().tolist()}; register "
            "what it does with mcore_entropy.adapters.huggingface.register_architecture"
        )


class _OnlyHidden:
    """What a transformer gives: hidden states, and None for all else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _answering(module: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module's forward give `answer`, whatever it is asked."""
    own = vars(module).get("forward")
    module.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
