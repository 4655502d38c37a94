"""verl's functions replaced by ours while it runs, where they are used, and put back.

    from mcore_entropy.adapters.verl_switch import switch_verl

    handle = switch_verl()  # in every process, before the engines are built
    handle.unpatched        # what keeps verl's own, and why
    handle.restore()

Modules that did `from ... import name` hold a function themselves: each loaded module of verl that holds a
replaced one is given ours; those imported later find ours in the module that defines it. What each of verl's
options means then, engine by engine: docs/migrating_from_verl.md.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

VERSIONS = ("0.9.0", "0.9.1")  # whose call sites were read, and run in tests
_OURS = "mcore_entropy."


@dataclass(frozen=True)
class Replacement:
    """One name of verl.

    Attributes:
        module: the module that defines it, or uses it under its own name.
        name: of a function or class there, or "Class.method".
        ours: where ours is, "module:name".
        made_from_stock: whether ours is a function that takes stock's and returns what replaces it.
    """

    module: str
    name: str
    ours: str
    made_from_stock: bool = False

    def made(self, stock: Any) -> Any:
        module, name = self.ours.split(":")
        found = getattr(importlib.import_module(f"mcore_entropy.adapters.{module}"), name)
        return found(stock) if self.made_from_stock else found


_FUSED = "verl.models.mcore.model_forward_fused"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_SHARDED = "verl.utils.megatron.tensor_parallel"
_WHOLE = "verl.utils.torch_functional"
# Names that one module alone uses in another sense than the rest of verl, and that other modules keep.
_LOCAL = (
    Replacement(_FUSED, "gather_from_sequence_parallel_region", "verl_megatron:gathered_by_the_head"),
    Replacement(_FUSED, "linear_cross_entropy", "verl_megatron:gathering_linear_cross_entropy"),
)
_EVERYWHERE = (
    Replacement(_FUSED, "fused_output_processor", "verl_megatron:fused_output_processor"),
    Replacement(_FUSED, "fused_forward_model_engine", "verl_megatron:fused_forward_model_engine_on", True),
    Replacement(_MEGATRON, "_resolve_fused_temperature", "verl_megatron:resolve_fused_temperature_on", True),
    Replacement(
        _MEGATRON,
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "verl_megatron:lm_head_logits_processor_on",
        True,
    ),
    Replacement(_MEGATRON, "MegatronEngineWithLMHead.forward_step", "verl_megatron:forward_step_on", True),
    Replacement(_SHARDED, "vocab_parallel_entropy", "verl:vocab_parallel_entropy"),
    Replacement(
        _SHARDED, "vocab_parallel_entropy_with_chunking", "verl:vocab_parallel_entropy_with_chunking"
    ),
    Replacement(
        _SHARDED, "vocab_parallel_log_probs_from_logits", "verl:vocab_parallel_log_probs_from_logits"
    ),
    Replacement(_SHARDED, "vocab_parallel_sum_pi_squared", "verl:vocab_parallel_sum_pi_squared"),
    Replacement(
        "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy", "verl_fsdp:linear_cross_entropy"
    ),
    Replacement(
        "verl.utils.experimental.torch_functional", "FusedLinearForPPO", "verl_fsdp:FusedLinearForPPO"
    ),
    Replacement(_WHOLE, "entropy_from_logits", "verl:entropy_from_logits"),
    Replacement(_WHOLE, "entropy_from_logits_with_chunking", "verl:entropy_from_logits_with_chunking"),
    Replacement(_WHOLE, "logprobs_from_logits", "verl:logprobs_from_logits"),
    Replacement(_WHOLE, "calculate_sum_pi_squared_from_logits", "verl_fsdp:sum_pi_squared_of_logits"),
    Replacement(
        _FSDP, "FSDPEngineWithLMHead.prepare_model_inputs", "verl_fsdp:prepare_model_inputs_on", True
    ),
    Replacement(
        _FSDP, "FSDPEngineWithLMHead.prepare_model_outputs", "verl_fsdp:prepare_model_outputs_on", True
    ),
)
# What computes the same and stays verl's, or another library's.
_LEFT = (
    "verl.workers.engine.veomni: fused kernels are VeOmni's own",
    "verl.workers.engine.automodel: fused kernels are NeMo Automodel's own",
    "verl.models.mcore.model_forward_1f1b_overlap: calls linear_cross_entropy after a gather of its own, and "
    "leaves the hidden gradient partial without sequence parallelism; no engine calls it",
)
REPLACEMENTS = _LOCAL + _EVERYWHERE  # the local ones first: they hide what the others would find there


@dataclass(frozen=True)
class _Place:
    """An attribute of a module or class."""

    owner: Any
    attribute: str

    def read(self) -> Any:
        return vars(self.owner).get(self.attribute)

    def write(self, value: Any) -> None:
        setattr(self.owner, self.attribute, value)


@dataclass(frozen=True)
class _Landed:
    """A replacement that is in place."""

    place: _Place
    stock: Any
    ours: Any


class VerlHandle:
    """What `switch_verl` did.

    Attributes:
        patched: the places that are ours now, as "module.name".
        unpatched: what keeps verl's own, one line each: "module: reason".
    """

    def __init__(self, landed: list[_Landed], patched: list[str], unpatched: list[str]) -> None:
        self._landed = landed
        self.patched = tuple(patched)
        self.unpatched = tuple(unpatched)

    def restore(self) -> None:
        """Put verl's own back everywhere, in modules that were imported after the switch too.

        Doing it twice does nothing. Models and engines that were built meanwhile keep the functions that they
        took then.

        Raises:
            RuntimeError: something else has replaced what the switch put in place, and would be lost; nothing
                is changed then.
        """
        global _active
        taken = [landed.place for landed in self._landed if landed.place.read() is not landed.ours]
        if taken:
            names = ", ".join(_name_of(place) for place in taken)
            raise RuntimeError(f"restore: expected ours in place, got something else in {names}")
        for landed in reversed(self._landed):
            for place in (landed.place, *_holders(landed.ours)):
                place.write(landed.stock)
        self._landed = []
        if _active is self:
            _active = None


_active: VerlHandle | None = None


def switch_verl() -> VerlHandle:
    """Replace verl's log-prob and entropy functions, in this process. A second call returns the same handle.

    Call it before verl builds its engines and models: an FSDP engine takes its entropy function when it is
    built. Modules of verl that can be imported here are imported.

    Raises:
        ImportError: verl is not installed.
        ValueError: a version of verl whose call sites are not known, or that lacks a name to replace, which
            is named; nothing is replaced then.
    """
    global _active
    if _active is not None:
        return _active
    _check_version()
    unpatched = list(_LEFT)
    found: list[tuple[Replacement, _Place]] = []
    missing: list[str] = []
    # First, as it imports its engines in an order that matters: MindSpeed's patches Megatron before its use.
    _imported("verl.workers.engine", unpatched)
    for module_name, replacements in _by_module().items():
        module = _imported(module_name, unpatched)
        if module is None:
            continue
        for replacement in replacements:
            place = _place_of(module, replacement.name)
            if place is None:
                missing.append(f"{module_name}.{replacement.name}")
            else:
                found.append((replacement, place))
    if missing:
        raise ValueError(
            f"verl: expected {', '.join(missing)}, got none; another version of verl, or a change to it"
        )
    landed: list[_Landed] = []
    patched: list[str] = []
    for replacement, place in sorted(found, key=lambda pair: REPLACEMENTS.index(pair[0])):
        patched.append(_name_of(place))
        if _is_ours(place.read()):  # a patched verl's, see patches/README.md
            continue
        stock = place.read()
        ours = _land(replacement, place)
        landed.append(_Landed(place, stock, ours))
        if replacement not in _LOCAL:
            for holder in _holders(stock):
                holder.write(ours)
                patched.append(_name_of(holder))
            unpatched += [f"{name}: outside of verl" for name in _foreign_holders(stock)]
    _active = VerlHandle(landed, patched, unpatched)
    return _active


def switch_module(name: str) -> None:
    """Replace the names that one module of verl defines: what the patches of verl call at that module's end.

    Nothing is searched for holders: whoever imports from the module comes later, and gets ours.
    """
    module = sys.modules[name]
    for replacement in _by_module().get(name, ()):
        place = _place_of(module, replacement.name)
        if place is None:
            raise ValueError(f"verl: expected {name}.{replacement.name}, got none; another version of verl")
        _land(replacement, place)


def _land(replacement: Replacement, place: _Place) -> Any:
    ours = replacement.made(place.read())
    place.write(ours)
    return ours


def _check_version() -> None:
    try:
        verl = importlib.import_module("verl")
    except ImportError as error:
        raise ImportError("switch_verl() needs verl: pip install verl") from error
    version = getattr(verl, "__version__", None)
    if version not in VERSIONS:
        raise ValueError(
            f"verl: expected one of the versions {', '.join(VERSIONS)}, got {version}; the call sites of "
            "others are not known, and a replacement might not land"
        )


def _by_module() -> dict[str, list[Replacement]]:
    by_module: dict[str, list[Replacement]] = {}
    for replacement in REPLACEMENTS:
        by_module.setdefault(replacement.module, []).append(replacement)
    return by_module


def _imported(name: str, unpatched: list[str]) -> ModuleType | None:
    """The module; None, and a line in `unpatched`, where a package that it needs is not installed.

    Raises:
        ValueError: verl has no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(
                f"verl: expected the module {name}, got none; another version of verl"
            ) from error
        unpatched.append(f"{name}: {error}")
    except ImportError as error:
        unpatched.append(f"{name}: {error}")
    return None


def _place_of(module: ModuleType, name: str) -> _Place | None:
    *classes, attribute = name.split(".")
    owner: Any = module
    for class_name in classes:
        owner = vars(owner).get(class_name)
        if owner is None:
            return None
    return _Place(owner, attribute) if attribute in vars(owner) else None


def _name_of(place: _Place) -> str:
    owner = place.owner
    prefix = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    return f"{prefix}.{place.attribute}"


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(_OURS)


def _holders(value: Any) -> list[_Place]:
    """Where modules of verl hold this very object."""
    return [place for name, place in _held(value) if _in_verl(name)]


def _foreign_holders(value: Any) -> list[str]:
    """Where other modules hold it."""
    return [_name_of(place) for name, place in _held(value) if not _in_verl(name)]


def _held(value: Any) -> list[tuple[str, _Place]]:
    return [
        (name, _Place(module, attribute))
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for attribute, held in list(vars(module).items())
        if held is value
    ]


def _in_verl(name: str) -> bool:
    return name == "verl" or name.startswith("verl.")
