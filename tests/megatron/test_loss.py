"""`EntropyLoss` beside its formula written out in fp64, and inside Megatron's schedule."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_entropy import EntropyConfig, TokenStatistics
from mcore_entropy.megatron.arguments import add_entropy_args
from mcore_entropy.megatron.loss import EntropyLoss, entropy_loss_func, masked_token_sum
from tests.megatron.parity import assert_as_near_as, errors, swap
from tests.megatron.test_head_parity import stock_step, truth
from tests.megatron.tiny_gpt import Batch, Step, TinyGPT, build, gather, model_parallel, needs_megatron, train
from tests.ranks import run_ranks

SHAPE = (2, 5)


def statistics(**options: Any) -> TokenStatistics:
    generator = torch.Generator().manual_seed(0)
    log_probs = (-torch.rand(SHAPE, generator=generator)).requires_grad_()
    entropy = torch.rand(SHAPE, generator=generator).requires_grad_()
    metrics = {"varentropy": torch.rand(SHAPE, generator=generator)}
    return TokenStatistics(**{"log_probs": log_probs, "entropy": entropy, "metrics": metrics, **options})


MASK = torch.tensor([[1.0, 1, 0, 1, 1], [0, 1, 1, 1, 0]])


@pytest.mark.parametrize("coefficient", [0.0, 0.3, -0.2])
def test_value_report_and_gradient(coefficient: float) -> None:
    output = statistics()
    loss, tokens, report = EntropyLoss(EntropyConfig(entropy_coeff=coefficient))(MASK, output)
    assert output.entropy is not None
    minus_log_probs, entropy = -output.log_probs.double(), output.entropy.double()
    right = ((minus_log_probs - coefficient * entropy) * MASK).sum()
    torch.testing.assert_close(loss.double(), right, rtol=1e-6, atol=0)
    assert tokens.item() == MASK.sum() and tokens.dtype == torch.int
    expected = {
        "lm loss": minus_log_probs, "entropy": entropy, "varentropy": output.metrics["varentropy"].double()
    }  # fmt: skip
    assert list(report) == list(expected)
    for name, per_token in expected.items():
        assert not report[name].requires_grad
        pair = torch.stack([(per_token * MASK).sum(), MASK.sum().double()])
        torch.testing.assert_close(report[name].double(), pair, rtol=1e-6, atol=0)
    loss.backward()
    assert torch.equal(output.log_probs.grad, -MASK)
    if coefficient:
        torch.testing.assert_close(output.entropy.grad, -coefficient * MASK)
    else:
        assert output.entropy.grad is None, "at 0 the entropy must keep no graph"


def test_a_token_that_does_not_count_may_hold_anything() -> None:
    output = statistics()
    assert output.entropy is not None
    spoilt = TokenStatistics(
        *(torch.where(MASK > 0, value, torch.nan) for value in (output.log_probs, output.entropy))
    )
    loss, _, report = EntropyLoss(EntropyConfig(entropy_coeff=0.5))(MASK, spoilt)
    whole = EntropyLoss(EntropyConfig(entropy_coeff=0.5))(MASK, output)
    assert torch.equal(loss, whole[0])
    assert all(torch.equal(report[name], whole[2][name]) for name in ("lm loss", "entropy"))
    loss.backward()
    assert torch.equal(output.log_probs.grad, -MASK)
    torch.testing.assert_close(output.entropy.grad, -0.5 * MASK)


def test_megatrons_own_loss_gets_the_log_prob_and_its_arguments() -> None:
    seen = []

    def stock(loss_mask: Tensor, output: Tensor, model: object = None) -> tuple[Any, ...]:
        seen.append((output, model))
        return masked_token_sum(loss_mask, output)

    output = statistics()
    loss = EntropyLoss(EntropyConfig(), stock)
    loss(MASK, output, model="the model")
    assert torch.equal(seen[0][0], -output.log_probs * MASK) and seen[0][1] == "the model"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="log_interval: expected 1 where nothing tells the iteration"):
        EntropyLoss(EntropyConfig(log_interval=2))
    with pytest.raises(ValueError, match="loss_func: expected"):
        EntropyLoss(EntropyConfig(), lambda mask, losses: (losses.sum(), {}))(MASK, statistics())
    with pytest.raises(ValueError, match="entropy: expected it in the model's output"):
        EntropyLoss(EntropyConfig(entropy_coeff=1.0))(MASK, statistics(entropy=None, metrics={}))
    with pytest.raises(ValueError, match="metrics: expected \\['max_prob'\\]"):
        EntropyLoss(EntropyConfig(metrics=("max_prob", "varentropy")))(MASK, statistics())
    with pytest.raises(ValueError, match="output: expected TokenStatistics, got Tensor; the model's head"):
        EntropyLoss(EntropyConfig())(MASK, torch.ones(SHAPE))
    with pytest.raises(ValueError, match=r"loss_mask: expected a number for each of \(2, 5\) tokens"):
        EntropyLoss(EntropyConfig())(MASK[:1, :1], statistics())
    with pytest.raises(ValueError, match=r"loss_func: expected .* got Tensor"):
        EntropyLoss(EntropyConfig(), lambda mask, losses: losses.sum())(MASK, statistics())
    with pytest.raises(ValueError, match=r"loss_func: expected no report of \['entropy'\]"):
        EntropyLoss(EntropyConfig(), lambda mask, losses: (losses.sum(), 1, {"entropy": 0}))(
            MASK, statistics()
        )


def test_log_interval_repeats_the_last_measured_report() -> None:
    """Two micro-batches an iteration: their sums must be those of the last measured iteration."""
    now = 0
    loss = EntropyLoss(EntropyConfig(log_interval=3), iteration=lambda: now)

    def reported(level: float, tokens: Tensor = MASK) -> list[float]:
        outputs = [statistics(entropy=torch.full(SHAPE, level + part)) for part in (0.0, 1.0)]
        pairs = torch.stack([loss(tokens, output)[2]["entropy"] for output in outputs])
        return pairs.sum(0).tolist()

    count = 2 * MASK.sum().item()
    measured = {4: 4, 5: 4, 6: 6, 7: 6, 8: 6, 9: 9}  # 4: the first one seen
    for iteration, measured_level in measured.items():
        now = iteration
        right = [(measured_level + 0.5) * count, count]
        assert reported(float(iteration)) == pytest.approx(right), f"iteration {iteration}"
        with torch.no_grad():  # an evaluation in between reports itself and disturbs nothing
            assert reported(100.0, torch.ones(SHAPE)) == pytest.approx([100.5 * 20, 20])


def test_from_arguments_only_when_called() -> None:
    asked = []

    def arguments() -> argparse.Namespace:
        asked.append(True)
        given = ["--entropy-aware-output-layer", "--entropy-coeff", "0.5", "--entropy-log-interval", "2"]
        return argparse.Namespace(
            **vars(add_entropy_args(argparse.ArgumentParser()).parse_args(given)), curr_iteration=4
        )

    loss_func = entropy_loss_func(masked_token_sum, arguments)
    assert not asked, "Megatron has no arguments yet when its script is read"
    output = statistics()
    right = EntropyLoss(EntropyConfig(entropy_coeff=0.5))(MASK, output)
    assert torch.equal(loss_func(MASK, output)[0], right[0])


def test_arguments_without_the_head_are_the_stock_loss_and_the_other_way_round_refused() -> None:
    off = entropy_loss_func(masked_token_sum, argparse.Namespace)  # a namespace that knows none of ours
    assert off(MASK, torch.ones(SHAPE))[0] == MASK.sum()
    args = add_entropy_args(argparse.ArgumentParser()).parse_args(["--entropy-aware-output-layer"])
    with pytest.raises(ValueError, match="the model's head is not swapped"):
        entropy_loss_func(masked_token_sum, lambda: args)(MASK, torch.ones(SHAPE))


def test_log_interval_follows_the_iterations_that_megatron_shows() -> None:
    """Iteration n of the log lines has curr_iteration n - 1; 4 and 8 are to be measured, and the first."""
    given = ["--entropy-aware-output-layer", "--entropy-log-interval", "4"]
    args = add_entropy_args(argparse.ArgumentParser()).parse_args(given)
    loss_func = entropy_loss_func(masked_token_sum, lambda: args)
    shown = {}
    for number in range(2, 10):
        args.curr_iteration = number - 1
        sums, count = loss_func(MASK, statistics(entropy=torch.full(SHAPE, float(number))))[2]["entropy"]
        shown[number] = (sums / count).item()
    assert shown == {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4, 8: 8, 9: 8}


def per_token_mean(step: Step) -> Step:
    """Reports [sum, count] as means."""
    return Step(
        [{name: pair[0] / pair[1] for name, pair in report.items()} for report in step.losses], step.gradients
    )


def loss_step(options: TinyGPT, config: EntropyConfig) -> Step:
    with model_parallel(options):
        model = build(options, prepare=functools.partial(swap, config=config))
        loss = EntropyLoss(config)

        def loss_function(output: TokenStatistics, batch: Batch) -> tuple[Any, ...]:
            return loss(batch.loss_mask, output)

        return per_token_mean(gather(model, train(model, loss_function=loss_function)))


@needs_megatron
@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize(
    "options",
    [
        TinyGPT(),
        TinyGPT(tensor_parallel=2, sequence_parallel=True, tied=True),
        TinyGPT(tensor_parallel=2, pipeline_parallel=2),
    ],
    ids=["one-rank", "tp2-sp-tied", "tp2-pp2"],
)
def test_in_megatrons_schedule(options: TinyGPT, head: str) -> None:
    """Megatron divides each micro-batch's sum by its tokens: the mean that the truth writes out."""
    config = EntropyConfig(entropy_coeff=0.3, head=head)  # type: ignore[arg-type]
    ranks = options.tensor_parallel * options.pipeline_parallel
    step = run_ranks(ranks, loss_step, options, config)[0]
    losses = [
        {"loss": report["lm loss"] - 0.3 * report["entropy"], "entropy": report["entropy"]}
        for report in step.losses
    ]
    ours = errors(Step(losses, step.gradients), truth(options.tied, 0.3))
    stock = errors(run_ranks(ranks, stock_step, options)[0], truth(options.tied, 0.0))
    assert_as_near_as(stock, ours)
