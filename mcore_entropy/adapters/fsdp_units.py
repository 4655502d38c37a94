"""Which modules of a model FSDP shards as units of their own: their part in it, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Units:
    """A model's embedding, its decoder layers and its head; what is left belongs to the root.

    Embedding and head may be None: a critic has no head, and models that are not Hugging Face's do not tell.
    """

    embedding: nn.Module | None
    layers: tuple[nn.Module, ...]
    head: nn.Module | None

    @staticmethod
    def of(model: nn.Module, layer_classes: Iterable[type[nn.Module]] | None = None) -> Units:
        """The units of `model`; decoder layers by class, or None for those a Hugging Face model names.

        Raises:
            ValueError: no decoder layers were found.
        """
        core: Any = model
        if hasattr(core, "get_base_model"):  # PEFT's wrapper
            core = core.get_base_model()
        layers = _outermost(core, _class_names(core, layer_classes))
        if not layers:
            raise ValueError(
                f"layer_classes: expected the classes of {type(core).__name__}'s decoder layers, got "
                f"{layer_classes}, and none in it; Hugging Face models name theirs in _no_split_modules"
            )
        return Units(_part(core, "get_input_embeddings"), layers, _part(core, "get_output_embeddings"))

    @property
    def tied(self) -> bool:
        """Whether head and embedding have one weight, and so have to be of one unit."""
        if self.embedding is None or self.head is None:
            return False
        return self.embedding.weight is self.head.weight

    @property
    def in_order(self) -> list[nn.Module]:
        """As the forward runs through them."""
        return [unit for unit in (self.embedding, *self.layers, self.head) if unit is not None]


def _class_names(model: Any, layer_classes: Iterable[type[nn.Module]] | None) -> set[str]:
    if layer_classes is not None:
        return {layer_class.__name__ for layer_class in layer_classes}
    return set(getattr(model, "_no_split_modules", None) or ())


def _outermost(model: nn.Module, class_names: set[str]) -> tuple[nn.Module, ...]:
    """Modules of these classes, or of classes that FSDP made of them, that are in no other."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and any(base.__name__ in class_names for base in type(module).__mro__):
            found.append(module)
            inside.update(module.modules())
    return tuple(found)


def _part(model: Any, method: str) -> nn.Module | None:
    """What a Hugging Face model's `method` gives, None where it has no such part."""
    part = getattr(model, method, lambda: None)()
    return part if isinstance(part, nn.Module) else None
