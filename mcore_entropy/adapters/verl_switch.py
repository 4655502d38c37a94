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

from mcore_entropy.adapters.verl_replacements import LEFT, LOCAL, REPLACEMENTS, VERSIONS, Replacement

_OURS = "mcore_entropy."


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
        self.unpatched = tuple(dict.fromkeys(unpatched))  # a module may be loaded by two names

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
    unpatched = list(LEFT)
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
    handle = VerlHandle(landed, patched, unpatched)
    try:
        for replacement, place in sorted(found, key=lambda pair: REPLACEMENTS.index(pair[0])):
            _replace(replacement, place, landed, patched, unpatched)
    except BaseException:  # half of verl's and half of ours would be neither's
        handle.restore()
        raise
    _active = VerlHandle(landed, patched, unpatched)
    return _active


def _replace(
    replacement: Replacement,
    place: _Place,
    landed: list[_Landed],
    patched: list[str],
    unpatched: list[str],
) -> None:
    """Put ours in the place and in every holder of stock's, and note what was done."""
    patched.append(_name_of(place))
    if _is_ours(place.read()):  # a patched verl's, see patches/README.md
        return
    stock = place.read()
    ours = _land(replacement, place)
    landed.append(_Landed(place, stock, ours))
    if replacement in LOCAL:
        return
    for holder in _holders(stock):
        holder.write(ours)
        patched.append(_name_of(holder))
    unpatched += [f"{name}: outside of verl" for name in _foreign_holders(stock)]


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
