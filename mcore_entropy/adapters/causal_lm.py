"""A Hugging Face causal LM whose head was swapped: its class, its forward with labels, and the way back.

The class of the model and that of its head change, and the model gets what a swap knows as an attribute,
which holds no model: a copy has one of its own. With labels the model's own forward runs, without them;
where it calls its head, the head computes the statistics. What the model then does to "logits" is done to a
copy that nobody looks at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from mcore_entropy.adapters.foreign_parallelism import foreign_parallelism
from mcore_entropy.adapters.fsdp import check_output_dtypes
from mcore_entropy.adapters.labelled_call import causal_lm_loss, head_call, no_call, one_call_of
from mcore_entropy.adapters.lm_head import entropy_aware_head
from mcore_entropy.adapters.model_output import output_with_statistics
from mcore_entropy.config import EntropyConfig
from mcore_entropy.statistics import LogitTransform
from mcore_entropy.swap_handle import SWAP, Request

_STOCK = "_mcore_entropy_stock"  # the attribute of a swapped class


class CausalLMSwap:
    """What a swap knows about a model, without a reference to it."""

    def __init__(
        self,
        head_name: str,
        stock_head_class: type[nn.Module],
        transform: LogitTransform,
        config: EntropyConfig,
    ) -> None:
        self.config = config
        self.request: Request | None = None
        self.head_name = head_name
        self.stock_head_class = stock_head_class
        self._transform = transform

    def __getstate__(self) -> dict[str, Any]:
        """A copy made inside a request has none: its block ends for the original alone."""
        return {**vars(self), "request": None}

    def forward(
        self, model: Any, stock_forward: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """`stock_forward(model, *args, **keywords)`, unless there are labels; see `swap_lm_head`."""
        if keywords.get("labels") is None:
            with no_call():
                return stock_forward(model, *args, **keywords)
        check_loss_function(model)
        return_dict = keywords.pop("return_dict", None)
        num_items = keywords.pop("num_items_in_batch", None)
        request = self.request or Request(None, None, None)
        request.used = True
        call = head_call(
            keywords.pop("labels"),
            keywords.pop("shift_labels", None),
            keywords.pop("ignore_index", self.config.ignore_index),
            keywords.get("logits_to_keep", 0),
            request,
            self._transform,
            self.config,
        )
        head = self._checked_head(model)
        check_output_dtypes(model, head)
        with one_call_of(head, call) as received:
            output = stock_forward(model, *args, **keywords, return_dict=True)
        statistics = call.named(received[0])
        loss = causal_lm_loss(call, statistics, num_items, self.config.entropy_coeff)
        auxiliary = getattr(output, "aux_loss", None)
        if isinstance(auxiliary, Tensor):  # of a router, which the model adds to a loss of its own alone
            loss = loss + model.router_aux_loss_coef * auxiliary.to(loss.device)
        output = output_with_statistics(output, loss, statistics)
        if model.config.return_dict if return_dict is None else return_dict:
            return output
        return output.to_tuple()

    def _checked_head(self, model: Any) -> nn.Module:
        """What stands in the head's place: our head, or a wrapper of it."""
        module: nn.Module = model.get_submodule(self.head_name)
        head = entropy_aware_head(module)
        if head is None:
            raise RuntimeError(
                f"{self.head_name}: expected the head that was swapped, got {type(module).__module__}."
                f"{type(module).__qualname__}; it was replaced or wrapped (LoRA, resize_token_embeddings) "
                "after the swap: swap again"
            )
        parallelism = foreign_parallelism(head)
        if parallelism is not None:
            raise RuntimeError(
                f"{self.head_name}: expected results that nothing brings into another layout, got a head "
                f"under {parallelism}; shard it with mcore_entropy.adapters.dtensor.parallelize_lm_head"
            )
        return module


class SwappedCausalLM:
    """One model whose head is ours, for the handle."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._swap: CausalLMSwap = vars(model)[SWAP]

    @staticmethod
    def swapped(
        model: Any,
        head_name: str,
        head_class: type[nn.Module],
        transform: LogitTransform,
        config: EntropyConfig,
    ) -> SwappedCausalLM:
        """Swap the classes of `model` and of its head."""
        head = model.get_submodule(head_name)
        setattr(model, SWAP, CausalLMSwap(head_name, type(head), transform, config))
        head.__class__ = head_class
        model.__class__ = _swapped_class(_stock_class(model))
        return SwappedCausalLM(model)

    @property
    def config(self) -> EntropyConfig:
        return self._swap.config

    @property
    def request(self) -> Request | None:
        return self._swap.request

    @request.setter
    def request(self, request: Request | None) -> None:
        self._swap.request = request

    @property
    def in_place(self) -> bool:
        return vars(self._model).get(SWAP) is self._swap

    @property
    def head_was_replaced(self) -> bool:
        return entropy_aware_head(self._model.get_submodule(self._swap.head_name)) is None

    def restore(self) -> None:
        """Put the stock classes back; that of the model alone where the head is another's by now.

        Raises:
            RuntimeError: something has wrapped the model or its head since, and would be lost.
        """
        if not self.in_place:
            return  # done before, perhaps by another handle of the same swap
        model, stock = self._model, _stock_class(self._model)
        head = model.get_submodule(self._swap.head_name)
        ours = entropy_aware_head(head)
        wrapped = ours is not None and ours is not head
        if type(model) is not _swapped_class(stock) or wrapped or "forward" in {*vars(model), *vars(head)}:
            raise RuntimeError(
                "restore: expected the model and its head as the swap left them, got "
                f"{type(model).__name__} and {type(head).__name__}, wrapped or with a forward that something "
                "else has put on them; undo that first"
            )
        if ours is not None:
            head.__class__ = self._swap.stock_head_class
        model.__class__ = stock
        delattr(model, SWAP)


def check_loss_function(model: Any) -> None:
    """Raise ValueError unless the model's loss is the mean cross entropy that the statistics give."""
    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", model.loss_function)
        raise ValueError(
            f"loss_function: expected transformers' ForCausalLMLoss, which the statistics replace, got "
            f"{name}; without labels the model gives logits, and with them log_probs for a loss of your own"
        )


def _names_by_position(method: Callable[..., Any]) -> tuple[str, ...]:
    """What the arguments of a method are called that may be given by position, without self."""
    _, *parameters = inspect.signature(method).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _by_keyword(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by keyword; as they are where that cannot be, which the callee judges."""
    by_position = dict(zip(names, args, strict=False))
    if len(args) > len(names) or by_position.keys() & kwargs.keys():
        return args, kwargs
    return (), {**by_position, **kwargs}


@functools.cache
def _swapped_class(stock: Any) -> Any:
    """`stock` with our forward, under its own name, by which transformers knows a model and saves it."""

    names = _names_by_position(stock.forward)  # once: `generate` calls the forward for every token

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        swap: CausalLMSwap | None = vars(self).get(SWAP)
        if swap is None:  # a model that was made from this class, not swapped
            return stock.forward(self, *args, **kwargs)
        return swap.forward(self, stock.forward, *_by_keyword(names, args, kwargs))

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super(swapped_class, self).__reduce_ex__(protocol)
        return _new, (stock,), *state

    swapped_class: Any = type(
        stock.__name__,
        (stock,),
        {
            "forward": forward,
            _STOCK: stock,
            "__reduce_ex__": reduce,
            "__module__": stock.__module__,
            "__doc__": stock.__doc__,
        },
    )
    return swapped_class


def _stock_class(model: Any) -> Any:
    return vars(type(model)).get(_STOCK, type(model))


def _new(stock: Any) -> Any:
    """An instance of the swapped class, which pickle does not find by its name, before its state is set."""
    swapped = _swapped_class(stock)
    return swapped.__new__(swapped)
