"""What the patches of Megatron-LM's scripts (patches/megatron_lm) put around the scripts' own functions.

Beside these they use `entropy_loss_func` and `swap_from_args`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from mcore_entropy.megatron.arguments import add_entropy_args
from mcore_entropy.megatron.swap import swap_from_args

Result = TypeVar("Result")


def with_entropy_args(parse: Callable[..., Result]) -> Callable[..., Result]:
    """`parse` that adds the arguments of `add_entropy_args` after those of its ``extra_args_provider``.

    Args:
        parse: what takes an ``extra_args_provider`` by keyword: Megatron-LM's ``pretrain`` up to 0.17, its
            ``parse_and_validate_args`` from 0.18.
    """

    def parse_with_entropy(
        *positional: Any,
        extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
        **keywords: Any,
    ) -> Result:
        def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_entropy_args(parser)

        return parse(*positional, extra_args_provider=both, **keywords)

    return parse_with_entropy


def with_entropy_head(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A builder like Megatron-LM's ``gpt_builder(args, ...)``, whose model goes through `swap_from_args`."""

    def build_with_entropy_head(args: argparse.Namespace, *positional: Any, **keywords: Any) -> nn.Module:
        model = build(args, *positional, **keywords)
        swap_from_args(model, args)
        return model

    return build_with_entropy_head
