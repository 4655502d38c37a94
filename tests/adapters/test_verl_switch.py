"""The switch of verl: where it lands, what it names and lists, and that it can be undone.

On a package of a few lines with verl's module names, whose functions can be told apart; and on verl itself,
where that is installed. That its engines then compute the right numbers: test_verl_fsdp.py and, on two ranks,
tests/megatron/test_verl_engine.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_entropy.adapters import verl as adapter
from mcore_entropy.adapters import verl_switch
from mcore_entropy.adapters.verl_replacements import REPLACEMENTS
from mcore_entropy.adapters.verl_switch import switch_module, switch_verl
from tests.adapters.verl_cases import NEEDS_VERL

FUSED = "verl.models.mcore.model_forward_fused"
KERNEL = "verl.utils.kernel.linear_cross_entropy"
WHOLE = "verl.utils.torch_functional"
FSDP = "verl.workers.engine.fsdp.transformer_impl"
MEGATRON = "verl.workers.engine.megatron.transformer_impl"


def source_of(module: str) -> list[str]:
    """One line, or class, for each name that the switch replaces there."""
    methods: dict[str, list[str]] = {}
    lines = []
    for replacement in REPLACEMENTS:
        if replacement.module == module:
            *owner, name = replacement.name.split(".")
            if owner:
                methods.setdefault(owner[0], []).append(name)
            elif (module, name) == (FUSED, "linear_cross_entropy"):
                lines.append(f"from {KERNEL} import linear_cross_entropy")
            else:
                lines.append(f"def {name}(*_): return 'stock'")
    for owner_name, names in methods.items():
        lines.append(f"class {owner_name}:")
        lines += [f"    def {name}(self, *_): return 'stock'" for name in names]
    return lines


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, not imported yet, in the place of a verl that may be installed."""
    for module in {replacement.module for replacement in REPLACEMENTS}:
        path = tmp_path / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(source_of(module)) + "\n")
    (tmp_path / "verl" / "__init__.py").write_text("__version__ = '0.9.1'\n")
    (tmp_path / "verl" / "early.py").write_text(f"from {WHOLE} import logprobs_from_logits as mine\n")
    (tmp_path / "verl" / "late.py").write_text(f"from {WHOLE} import logprobs_from_logits\n")
    (tmp_path / "recipe.py").write_text(f"from {WHOLE} import entropy_from_logits\n")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if verl_switch._in_verl(name)}
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    if verl_switch._active is not None:
        verl_switch._active.restore()
    for name in [name for name in sys.modules if verl_switch._in_verl(name) or name == "recipe"]:
        del sys.modules[name]
    sys.modules.update(kept)


def attribute(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = vars(found)[part]
    return found


def everything() -> dict[str, Any]:
    return {f"{r.module}.{r.name}": attribute(r.module, r.name) for r in REPLACEMENTS}


def test_lands_where_names_are_used_and_is_undone(fake: Path) -> None:
    early = importlib.import_module("verl.early")
    stock = everything()
    handle = switch_verl()
    assert early.mine is adapter.logprobs_from_logits
    assert f"{WHOLE}.logprobs_from_logits" in handle.patched and "verl.early.mine" in handle.patched
    ours = everything()
    assert [name for name in stock if ours[name] is stock[name]] == []
    assert all(value.__module__.startswith("mcore_entropy.") for value in ours.values())
    late = importlib.import_module("verl.late")
    assert late.logprobs_from_logits is adapter.logprobs_from_logits
    handle.restore()
    assert everything() == stock
    assert early.mine is late.logprobs_from_logits is stock[f"{WHOLE}.logprobs_from_logits"]
    handle.restore()  # nothing left to do
    assert everything() == stock


def test_one_name_two_meanings(fake: Path) -> None:
    """Megatron's forward gathers in the head; elsewhere the name keeps verl's contract, of a partial sum."""
    from mcore_entropy.adapters import verl_fsdp, verl_megatron

    switch_verl()
    assert attribute(FUSED, "linear_cross_entropy") is verl_megatron.gathering_linear_cross_entropy
    assert attribute(KERNEL, "linear_cross_entropy") is verl_fsdp.linear_cross_entropy


def test_twice_is_once_and_can_be_done_again(fake: Path) -> None:
    handle = switch_verl()
    ours = everything()
    assert switch_verl() is handle and everything() == ours
    handle.restore()
    again = switch_verl()
    assert again is not handle and again.patched == handle.patched


def test_what_is_made_from_stocks_calls_stocks(fake: Path) -> None:
    switch_verl()
    assert attribute(MEGATRON, "_resolve_fused_temperature")(0.7) == "stock"


def test_holders_outside_of_verl_are_listed(fake: Path) -> None:
    recipe = importlib.import_module("recipe")
    stock = recipe.entropy_from_logits
    handle = switch_verl()
    assert recipe.entropy_from_logits is stock
    assert "recipe.entropy_from_logits: outside of verl" in handle.unpatched


def test_modules_whose_packages_are_missing_are_listed(fake: Path) -> None:
    path = fake / (MEGATRON.replace(".", "/") + ".py")
    path.write_text("import a_package_that_is_not_installed\n" + path.read_text())
    handle = switch_verl()
    assert f"{MEGATRON}: No module named 'a_package_that_is_not_installed'" in handle.unpatched
    assert attribute(FSDP, "FSDPEngineWithLMHead.prepare_model_inputs").__module__.startswith(
        "mcore_entropy."
    )


def test_missing_names_are_named_and_nothing_is_replaced(fake: Path) -> None:
    for module, name in ((WHOLE, "logprobs_from_logits"), (FSDP, "prepare_model_outputs")):
        path = fake / (module.replace(".", "/") + ".py")
        path.write_text(path.read_text().replace(f"def {name}(", f"def {name}_renamed("))
    expected = (
        rf"expected {WHOLE}.logprobs_from_logits, {FSDP}.FSDPEngineWithLMHead.prepare_model_outputs, got none"
    )
    with pytest.raises(ValueError, match=expected):
        switch_verl()
    assert attribute(WHOLE, "entropy_from_logits")() == "stock"


def test_a_missing_module_is_named(fake: Path) -> None:
    (fake / (KERNEL.replace(".", "/") + ".py")).unlink()
    (fake / (FUSED.replace(".", "/") + ".py")).write_text("")
    with pytest.raises(ValueError, match=rf"verl: expected the module {KERNEL}, got none"):
        switch_verl()


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0", ""])
def test_other_versions_are_refused(version: str, fake: Path) -> None:
    (fake / "verl" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    with pytest.raises(ValueError, match=rf"expected one of the versions 0\.9\.0, 0\.9\.1, got {version};"):
        switch_verl()


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="pip install verl"):
        switch_verl()


def test_what_goes_wrong_half_way_leaves_stock(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {replacement.module for replacement in REPLACEMENTS}:
        importlib.import_module(module)
    before = everything()
    calls = 0
    land = verl_switch._land

    def fails_at_the_fifth(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return land(*args)

    monkeypatch.setattr(verl_switch, "_land", fails_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        switch_verl()
    assert everything() == before
    monkeypatch.undo()
    assert switch_verl().patched


def test_restore_refuses_to_drop_someone_elses(fake: Path) -> None:
    handle = switch_verl()
    module = importlib.import_module(WHOLE)
    ours, module.entropy_from_logits = module.entropy_from_logits, "theirs"  # type: ignore[attr-defined]
    before = everything()
    with pytest.raises(RuntimeError, match=rf"something else in {WHOLE}.entropy_from_logits$"):
        handle.restore()
    assert everything() == before
    module.entropy_from_logits = ours  # type: ignore[attr-defined]


PATCHED = "from mcore_entropy.adapters.verl_switch import switch_module\nswitch_module(__name__)\n"


def test_a_patched_verl_needs_no_switch_and_keeps_ours(fake: Path) -> None:
    """What the patches do: every module replaces its own names at its end."""
    for module in {replacement.module for replacement in REPLACEMENTS}:
        path = fake / (module.replace(".", "/") + ".py")
        path.write_text(path.read_text() + PATCHED)
    early = importlib.import_module("verl.early")
    patched = everything()
    assert all(value.__module__.startswith("mcore_entropy.") for value in patched.values())
    assert early.mine is adapter.logprobs_from_logits
    handle = switch_verl()
    assert everything() == patched
    handle.restore()
    assert everything() == patched


def test_switch_module_names_what_is_missing(fake: Path) -> None:
    path = fake / (WHOLE.replace(".", "/") + ".py")
    path.write_text(path.read_text().replace("def entropy_from_logits(", "def renamed("))
    importlib.import_module(WHOLE)
    with pytest.raises(ValueError, match=rf"expected {WHOLE}.entropy_from_logits, got none"):
        switch_module(WHOLE)


# --- verl itself ---


def test_by_verls_own_hook_for_external_modules() -> None:
    """In a process of its own: `import verl` alone, and the engines hold ours."""
    pytest.importorskip("verl", reason=NEEDS_VERL)
    program = """
import verl
from verl.workers.engine.fsdp import transformer_impl as fsdp
from verl.utils import torch_functional
from mcore_entropy.adapters import verl as adapter
assert fsdp.logprobs_from_logits is torch_functional.logprobs_from_logits is adapter.logprobs_from_logits
assert fsdp.FSDPEngineWithLMHead.prepare_model_inputs.__module__ == "mcore_entropy.adapters.verl_fsdp"
"""
    hook = {"VERL_USE_EXTERNAL_MODULES": "mcore_entropy.adapters.verl_external"}
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **hook}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_no_module_of_verl_keeps_a_function_of_stock() -> None:
    pytest.importorskip("verl", reason=NEEDS_VERL)
    modules = {replacement.module for replacement in REPLACEMENTS}
    for module in (*modules, "verl.models.mcore.model_forward_1f1b_overlap", "verl.trainer.ppo.core_algos"):
        with contextlib.suppress(ModuleNotFoundError):  # Megatron-core
            importlib.import_module(module)
    stock = [
        vars(sys.modules[each.module])[each.name]
        for each in REPLACEMENTS
        # Megatron's gather is other modules' too, which do not call our head.
        if each.module in sys.modules and "." not in each.name and not each.name.startswith("gather_")
    ]
    assert len(stock) >= 6

    def holders() -> list[str]:
        return [
            f"{name}.{attribute}"
            for name, module in sys.modules.items()
            if verl_switch._in_verl(name)
            for attribute, value in vars(module).items()
            if any(value is one for one in stock)
        ]

    before = holders()
    handle = switch_verl()
    try:
        assert len(before) > len(stock) and holders() == []
    finally:
        handle.restore()
    assert holders() == before
