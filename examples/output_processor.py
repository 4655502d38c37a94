"""A GPTModel called with an `output_processor` of one's own, which asks the head for log-probs and entropy.

    torchrun --nproc-per-node 2 examples/output_processor.py --sequence-parallel

megatron-core 0.18 and newer: GPTModel.forward takes a function that gets the last hidden states and the
output layer, and whose result is the model's. Here that function is `log_probs_and_entropy`, and its context
is what a rollout left beside its tokens: which of them count, and the temperature at which each was drawn.
All processes are tensor-parallel ranks, on GPUs where there is one for each, otherwise on CPUs.

What you should see: log-prob and entropy of the first tokens beside those from gathered logits in fp64, zeros
where a token does not count, and how far all values and gradients are from the dense ones: rounding.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from typing import Any

import gpt
import launch
import torch
from launch import UserMistake, World
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mcore_entropy import EntropyConfig, swap_output_layer

SHAPE = dict(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=512, seq_length=32)
SEQUENCES, SHOWN = 4, 8
VALUES = ("log-prob", "entropy")
# The largest difference allowed: of a value, in nats; of a gradient, as a share of its largest entry. Both
# are fp32 rounding of sums of a few hundred terms, which the layers below pass on.
VALUE_TOLERANCE = GRADIENT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Rollout:
    """What came with the tokens, each [b, s] as the labels are."""

    temperature: Tensor
    response_mask: Tensor


def log_probs_and_entropy(
    *,
    hidden_states: Tensor,  # [s, b, H], or this rank's part of s under sequence parallelism
    output_layer: Any,
    output_weight: Tensor | None,  # the embedding's where the weights are tied
    labels: Tensor,  # [b, s]
    context: Rollout,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The `output_processor`: log-prob and entropy, [b, s] each. The head works in [s, b]."""
    statistics, _bias = output_layer(
        hidden_states,
        weight=output_weight,
        target=labels.transpose(0, 1),
        mask=context.response_mask.transpose(0, 1),
        temperature=context.temperature.transpose(0, 1),
    )
    return statistics.log_probs.transpose(0, 1), statistics.entropy.transpose(0, 1)


def with_processor(model: GPTModel, inputs: gpt.ModelInputs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    return model(
        inputs.tokens,
        inputs.position_ids,
        inputs.attention_mask,
        labels=inputs.labels,
        output_processor=log_probs_and_entropy,
        output_processor_context=rollout,
    )


def dense(model: GPTModel, inputs: gpt.ModelInputs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """The truth: every rank gathers the logits and takes a log_softmax of them in fp64."""
    logits = model(inputs.tokens, inputs.position_ids, inputs.attention_mask)  # [b, s, V/tp]
    logits = gather_from_tensor_model_parallel_region(logits).double()
    log_p = (logits / rollout.temperature.unsqueeze(-1)).log_softmax(-1)
    log_probs = log_p.gather(-1, inputs.labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    prompt = ~rollout.response_mask
    return log_probs.masked_fill(prompt, 0), entropy.masked_fill(prompt, 0)


def values_and_gradients(model: GPTModel, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Gradients are of a loss that has both in it: minus the log-prob, minus an entropy bonus."""
    log_probs, entropy = results
    model.zero_grad()
    (-log_probs - 0.1 * entropy).mean().backward()
    values = dict(zip(VALUES, (log_probs.detach(), entropy.detach()), strict=True))
    return values | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def draw(args: argparse.Namespace, device: torch.device) -> tuple[gpt.ModelInputs, Rollout]:
    """Tokens, temperatures between 0.5 and 1.5, and prompts of a few tokens that do not count."""
    torch.manual_seed(args.seed)
    rows = torch.randint(args.vocab_size, (SEQUENCES, args.seq_length + 1))
    temperature = 0.5 + torch.rand(SEQUENCES, args.seq_length)
    prompt_lengths = torch.randint(1, SHOWN // 2, (SEQUENCES, 1))
    response_mask = torch.arange(args.seq_length) >= prompt_lengths
    inputs = gpt.ModelInputs.from_rows(rows, end_of_text=-1, device=device)
    return inputs, Rollout(temperature.to(device), response_mask.to(device))


def compare(args: argparse.Namespace, world: World) -> int:
    model = gpt.build_model(args, gpt.transformer_config(args), world)
    with torch.no_grad():  # Megatron's initial weights predict every token alike: make it prefer some
        for name, parameter in model.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter.mul_(5)
    inputs, rollout = draw(args, world.device)
    swap_output_layer(model, EntropyConfig())

    ours = values_and_gradients(model, with_processor(model, inputs, rollout))
    truth = values_and_gradients(model, dense(model, inputs, rollout))

    world.say("token  temperature  log-prob  (dense fp64)  entropy  (dense fp64)")
    for place in range(SHOWN):
        token, temperature = inputs.labels[0, place], rollout.temperature[0, place]
        columns = [f"{token:5d}  {temperature:11.3f}"]
        for name in VALUES:
            columns.append(f"{ours[name][0, place]:8.4f}  {truth[name][0, place]:12.7f}")
        world.say("  ".join(columns))
    differences = {name: _largest(ours[name] - truth[name]) for name in truth}
    shares = {name: differences[name] / _largest(truth[name]) for name in truth if name not in VALUES}
    value, gradient = max(differences[name] for name in VALUES), max(shares, key=shares.__getitem__)
    passed = value <= VALUE_TOLERANCE and shares[gradient] <= GRADIENT_TOLERANCE
    world.say(
        f"TP {world.size}: values within {value:.1e} nats of the dense ones, every gradient within "
        f"{shares[gradient]:.1e} of its largest entry ({gradient}). {'PASSED' if passed else 'FAILED'}"
    )
    return 0 if passed else 1


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def main(world: World) -> int:
    parser = launch.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    parser.set_defaults(**SHAPE, tensor_model_parallel_size=world.size, bf16=False, seed=1234)
    args = parser.parse_args()
    if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
        raise UserMistake("output_processor needs megatron-core 0.18 or newer.")
    with launch.megatron(world, args.tensor_model_parallel_size, args.seed):
        return compare(args, world)


if __name__ == "__main__":
    launch.run(main)
