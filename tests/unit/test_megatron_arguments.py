"""The Megatron argument group: what it parses to, and what it refuses. Needs no megatron-core."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from mcore_entropy import EntropyConfig, Execution
from mcore_entropy.megatron.arguments import add_entropy_args, config_from_args

ON = "--entropy-aware-output-layer"


def parsed(*arguments: str) -> EntropyConfig | None:
    parser = argparse.ArgumentParser()
    assert add_entropy_args(parser) is parser
    return config_from_args(parser.parse_args(arguments))


# Every argument, given as a user would, and the field it becomes.
ARGUMENTS = {
    "--entropy-coeff 0.01": {"entropy_coeff": 0.01},
    "--entropy-temperature 0.7": {"temperature": 0.7},
    "--entropy-chunk-size 512": {"chunk_size": 512},
    "--entropy-head logits": {"head": "logits"},
    "--entropy-logits-budget-mib 64": {"execution": Execution(logits_budget_mib=64)},
    "--entropy-metrics varentropy max_prob": {"metrics": ("varentropy", "max_prob")},
    "--entropy-log-interval 10": {"log_interval": 10},
}


def test_nothing_asked_for_is_the_stock_head() -> None:
    assert parsed() is None


def test_on_without_more_is_the_default_config() -> None:
    assert parsed(ON) == EntropyConfig()


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_each_argument_reaches_the_config(argument: str) -> None:
    assert parsed(ON, *argument.split()) == dataclasses.replace(EntropyConfig(), **ARGUMENTS[argument])


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_without_the_layer_an_argument_is_refused_by_name(argument: str) -> None:
    name = argument.split()[0]
    with pytest.raises(ValueError, match=f"{name}: expected {ON} with it"):
        parsed(*argument.split())


def test_every_argument_is_in_this_file() -> None:
    defaults = vars(add_entropy_args(argparse.ArgumentParser()).parse_args([]))
    named = {argument.split()[0].lstrip("-").replace("-", "_") for argument in (*ARGUMENTS, ON)}
    assert set(defaults) == named


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--entropy-temperature 0", "temperature"),
        ("--entropy-temperature nan", "temperature"),
        ("--entropy-coeff inf", "entropy_coeff"),
        ("--entropy-chunk-size 0", "chunk_size"),
        ("--entropy-log-interval 0", "log_interval"),
        ("--entropy-logits-budget-mib -1", "logits_budget_mib"),
        ("--entropy-metrics perplexity", "metrics"),
        ("--entropy-head logits --entropy-logits-budget-mib 1", "logits_budget_mib"),
    ],
)
def test_bad_and_contradictory_values_are_refused_by_name(arguments: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        parsed(ON, *arguments.split())


@pytest.mark.parametrize("head", ["eager", None, 1])
def test_unknown_head(head: object) -> None:
    with pytest.raises(ValueError, match="head: expected one of"):
        EntropyConfig(head=head)  # type: ignore[arg-type]


def test_a_coefficient_needs_the_entropy() -> None:
    with pytest.raises(ValueError, match="entropy_coeff: expected 0 with entropy=False"):
        EntropyConfig(entropy=False, entropy_coeff=0.1)
