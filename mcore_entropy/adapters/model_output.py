"""A Hugging Face model's own output class with the statistics of a swapped head as further fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mcore_entropy.statistics import METRICS, TokenStatistics

_FIELDS = ("log_probs", "entropy", *METRICS)


def output_with_statistics(output: Any, loss: Tensor, statistics: TokenStatistics) -> Any:
    """`output` without its logits, with loss and statistics."""
    stock: Any = type(output)
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    fields.update(loss=loss, logits=None, log_probs=statistics.log_probs, entropy=statistics.entropy)
    return _class_with_statistics(stock)(**fields, **statistics.metrics)


_classes: dict[Any, Any] = {}  # not functools.cache, which torch.compile warns about


def _class_with_statistics(stock: Any) -> Any:
    if stock not in _classes:
        _classes[stock] = _made_class(stock)
    return _classes[stock]


def _made_class(stock: Any) -> Any:
    # Keys set on a stock output would be lost: FSDP and DDP take outputs apart and make them again by fields.
    return dataclasses.make_dataclass(
        f"{stock.__name__}AndStatistics",
        [(name, "Tensor | None", dataclasses.field(default=None)) for name in _FIELDS],
        bases=(stock,),
        namespace={"__reduce__": _reduce, "__module__": stock.__module__, "__doc__": stock.__doc__},
    )


def _reduce(output: Any) -> tuple[Any, ...]:
    stock = type(output).__mro__[1]
    return _rebuilt, (
        stock,
        {field.name: getattr(output, field.name) for field in dataclasses.fields(output)},
    )


def _rebuilt(stock: Any, fields: dict[str, Any]) -> Any:
    """What `_reduce` took apart: the class is made at run time, and pickle does not find it by its name."""
    return _class_with_statistics(stock)(**fields)
