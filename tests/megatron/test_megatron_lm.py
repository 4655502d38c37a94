"""What the patches put around functions of Megatron-LM's scripts, on stand-ins of those functions."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mcore_entropy.megatron.arguments import add_entropy_args
from tests.megatron.tiny_gpt import TinyGPT, build, model_parallel, needs_megatron
from tests.ranks import run_ranks

pytestmark = needs_megatron

ON = "--entropy-aware-output-layer"


def parse(
    given: list[str], *, extra_args_provider: Any = None, args_defaults: dict[str, str]
) -> argparse.Namespace:
    """In the form of Megatron-LM's own."""
    parser = argparse.ArgumentParser()
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    parser.set_defaults(**args_defaults)
    return parser.parse_args(given)


def add_other_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--other", type=int)
    return parser


def test_arguments_come_after_those_of_the_script() -> None:
    from mcore_entropy.megatron.megatron_lm import with_entropy_args

    with_ours = with_entropy_args(parse)
    defaults = {"tokenizer": "some"}
    both = with_ours([ON, "--other", "3"], extra_args_provider=add_other_args, args_defaults=defaults)
    assert both.other == 3 and both.entropy_aware_output_layer and both.tokenizer == "some"
    alone = with_ours([ON], extra_args_provider=None, args_defaults={})
    assert alone.entropy_aware_output_layer


def heads(options: TinyGPT) -> list[str]:
    """The class of the head that a builder's model gets, without and with the argument."""
    from mcore_entropy.megatron.megatron_lm import with_entropy_head

    names = []
    for given in ([], [ON]):
        args = add_entropy_args(argparse.ArgumentParser()).parse_args(given)
        with model_parallel(options):

            def builder(args: argparse.Namespace, pre_process: bool, *, config: str) -> Any:
                assert pre_process and config == "the config"
                return build(options).core

            model = with_entropy_head(builder)(args, True, config="the config")
            names.append(type(model.output_layer).__name__)
    return names


def test_builder_swaps_the_head_if_asked() -> None:
    assert run_ranks(1, heads, TinyGPT())[0] == ["ColumnParallelLinear", "EntropyAwareOutputLayer"]


@pytest.mark.parametrize("name", ["logits_save_dir", "logits_load_dir", "modelopt_enabled"])
def test_what_takes_the_logits_is_refused_by_name(name: str) -> None:
    from mcore_entropy.megatron.swap import swap_from_args

    args = add_entropy_args(argparse.ArgumentParser()).parse_args([ON])
    setattr(args, name, "folder")
    with pytest.raises(ValueError, match=f"{name}: expected it off"):
        swap_from_args([], args)
    off = add_entropy_args(argparse.ArgumentParser()).parse_args([])
    setattr(off, name, "folder")
    assert swap_from_args([], off) == []
