"""Which modules of a model FSDP shards as units of their own: their part in it, and the order they run in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Units:
    """A model's embedding, its decoder layers and its head; what is left belongs to the root.

    Embedding and head may be None: a critic has no head, models that are not Hugging Face's do not tell, and
    a weight that a third module has too is the root's.
    """

    embedding: nn.Module | None
    layers: tuple[nn.Module, ...]
    head: nn.Module | None

    @staticmethod
    def of(model: nn.Module, layer_classes: Iterable[type[nn.Module]] | None = None) -> Units:
        """The units of `model`; decoder layers by class, or None for those a Hugging Face model names.

        The Hugging Face model may be anywhere in `model`: in PEFT's wrapper, in one with a value head.

        Raises:
            ValueError: no decoder layers were found.
        """
        embedding = _part(model, "get_input_embeddings")
        head = _part(model, "get_output_embeddings") or _entropy_aware(model)
        ends = {end for end in (embedding, head) if end is not None}
        layers = _outermost(model, _class_names(model, layer_classes), besides=ends)
        if not layers:
            raise ValueError(
                f"layer_classes: expected the classes of {type(model).__name__}'s decoder layers, got "
                f"{layer_classes}, and none in it; Hugging Face models name theirs in _no_split_modules"
            )
        if embedding is head or _shared_with_others(model, ends):
            embedding = head = None
        return Units(embedding, layers, head)

    @property
    def tied(self) -> bool:
        """Whether head and embedding have a parameter in common, and so have to be of one unit."""
        if self.embedding is None or self.head is None:
            return False
        return not set(self.embedding.parameters()).isdisjoint(self.head.parameters())

    @property
    def in_order(self) -> list[nn.Module]:
        """As the forward runs through them."""
        return [unit for unit in (self.embedding, *self.layers, self.head) if unit is not None]


def _class_names(model: nn.Module, layer_classes: Iterable[type[nn.Module]] | None) -> set[str]:
    if layer_classes is not None:
        return {layer_class.__name__ for layer_class in layer_classes}
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _outermost(model: nn.Module, class_names: set[str], besides: set[nn.Module]) -> tuple[nn.Module, ...]:
    """Modules of these classes, or of classes that FSDP made of them, that are in no other and hold no end.

    Some models name the module around their embedding, which has a unit of its own.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        named = any(base.__name__ in class_names for base in type(module).__mro__)
        if named and module not in inside and besides.isdisjoint(module.modules()):
            found.append(module)
            inside.update(module.modules())
    return tuple(found)


def _part(model: nn.Module, method: str) -> nn.Module | None:
    """What a Hugging Face model's `method` gives, None where no model in `model` has such a part."""
    for module in model.modules():
        try:
            part = getattr(module, method, lambda: None)()
        except NotImplementedError:  # transformers' word for "none that I know of"
            continue
        if isinstance(part, nn.Module):
            return part
    return None


def _entropy_aware(model: nn.Module) -> nn.Module | None:
    """Our head, in a model that is not Hugging Face's."""
    return next(entropy_aware_heads(model), None)


def entropy_aware_heads(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that may give statistics: their classes say so, whatever wraps them or was made of them."""
    return (module for module in model.modules() if getattr(type(module), "gives_statistics", False))


def _shared_with_others(model: nn.Module, ends: set[nn.Module]) -> bool:
    """Whether a parameter of the ends is one of a module in neither, as an encoder-decoder's embedding is."""
    parameters = {parameter for end in ends for parameter in end.parameters()}
    inside = {module for end in ends for module in end.modules()}
    return any(
        not parameters.isdisjoint(module.parameters(recurse=False))
        for module in model.modules()
        if module not in inside
    )
