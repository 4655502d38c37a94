"""What every example is held against: see `check`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.properties.case import Case
from tests.properties.tensors import Whole, build, dtype_of, out_dtype
from tests.properties.truth import ULP, Truth, truth_of


def _where(wrong: Tensor, ours: Tensor, truth: Tensor, allowed: Tensor, name: str) -> str:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    numbers = (f"{float(x[index]):.9g}" for x in (ours.double(), truth, allowed))
    return f"{name} at {index}: ours {{}}, truth {{}}, allowed error {{}}".format(*numbers)


def assert_close(ours: Tensor, truth: Tensor, size: Tensor, compared: Tensor, case: Case, name: str) -> None:
    """|ours - truth| is at most `ULP` times `size` units in the last place, and one rounding to ours' dtype.

    `compared` is a bool of the same shape. A number that ours' dtype does not hold is an infinity in it.
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    dtype = out_dtype(case)
    unit, own = torch.finfo(dtype).eps, torch.finfo(ours.dtype)
    allowed = ULP[dtype] * unit * size + own.tiny * own.eps
    if ours.dtype != dtype:
        allowed = allowed + own.eps / 2 * (truth.abs() + allowed)
    error = (ours.double() - truth).abs()
    beyond = truth.abs() + allowed >= own.max * (1 - own.eps)
    overflow = beyond & ours.isinf() & (ours.double().sign() == truth.sign())
    # Not `error <= allowed`: NaN has to be wrong as well. -inf is equal to itself.
    right = (error <= allowed) | (ours.double() == truth) | overflow
    wrong = compared & ~right
    assert not bool(wrong.any()), _where(wrong, ours, truth, allowed, name)


def check(case: Case, by_rank: list[dict[str, Tensor]]) -> None:
    """The answers of all ranks are the truth, and the same; special rows are what they have to be."""
    whole = build(case)
    truth = truth_of(case, whole)
    values = {name: x for name, x in by_rank[0].items() if not name.startswith("d ")}
    for rank, other in enumerate(by_rank):
        for name, value in values.items():
            same = (other[name] == value) | (other[name].isnan() & value.isnan())
            assert bool(same.all()), f"{name} differs on ranks 0 and {rank}"
    for name, value in values.items():
        _check_value(case, truth, name, value)
    if "log_probs" in values:
        ignored = whole.target.long() == case.ignore_index
        assert not values["log_probs"][ignored].any(), "log_probs of an ignored target"
    gradients = {name.removeprefix("d ") for name in by_rank[0] if name.startswith("d ")}
    for name in gradients:
        gradient = assembled(case, name, [answer[f"d {name}"] for answer in by_rank])
        _check_gradient(case, whole, truth, name, gradient)


def _check_value(case: Case, truth: Truth, name: str, value: Tensor) -> None:
    assert value.dtype == out_dtype(case), f"{name}: {value.dtype}"
    assert value.shape == case.lead, f"{name}: {tuple(value.shape)}"
    nan = value.isnan()
    # An ignored target's log-prob is 0 in a bad row too; the other numbers of the row are NaN.
    expected_nan = truth.values[name].isnan()
    where = (nan & truth.determined) != expected_nan
    assert not bool(where.any()), f"{name}: NaN, or none, in rows {where.nonzero()[:5].tolist()}"
    assert not value[~truth.kept].any(), f"{name} of a masked row"
    assert_close(
        value,
        truth.values[name],
        truth.value_sizes[name],
        truth.kept & ~truth.bad & truth.determined,
        case,
        name,
    )
    fine = value[truth.kept & ~nan]
    if name == "entropy":
        most = torch.tensor(math.log(truth.counted), dtype=value.dtype)
        outside = fine[(fine < 0) | (fine > most)]
        assert not len(outside), f"entropy outside [0, ln V = {most}]: {outside[:5].tolist()}"
    elif name == "log_probs":
        assert bool((fine <= ULP[value.dtype] * torch.finfo(value.dtype).eps).all()), "log_probs above 0"
    else:
        assert bool((fine >= 0).all()), name


def assembled(case: Case, name: str, parts: list[Tensor]) -> Tensor:
    """A gradient of the whole from those of the ranks."""
    if name == "logits":
        return torch.cat(parts, -1)
    if name != "hidden":
        return torch.cat(parts, 0)
    if case.sequence_parallel and len(parts) > 1:
        return torch.cat(parts, 0)
    for rank, other in enumerate(parts):
        same = (other == parts[0]) | (other.isnan() & parts[0].isnan())
        assert bool(same.all()), f"gradient of hidden differs on ranks 0 and {rank}"
    return parts[0]


def _check_gradient(case: Case, whole: Whole, truth: Truth, name: str, gradient: Tensor) -> None:
    assert gradient.shape == whole.inputs[name].shape, f"gradient of {name}: {tuple(gradient.shape)}"
    assert gradient.dtype == whole.inputs[name].dtype, f"gradient of {name}: {gradient.dtype}"
    label = f"gradient of {name}"
    poisoned = truth.bad & truth.live
    if name in ("logits", "hidden"):
        assert not gradient[~truth.live].any(), f"{label}: a row without an upstream gradient"
        counted = gradient
        if name == "logits":
            counted = gradient[..., : truth.counted]
            assert not gradient[..., truth.counted :].any(), f"{label}: columns that do not count"
        assert bool(counted[poisoned].isnan().all()), f"{label}: a bad row without NaN"
        assert bool(counted[~truth.bad].isfinite().all()) or dtype_of(case.dtype).itemsize == 2, (
            f"{label}: not finite"
        )
        rows = (truth.live & ~truth.bad & truth.determined)[..., None].expand(counted.shape)
        assert_close(counted, truth.gradients[name], truth.gradient_sizes[name], rows, case, label)
        return
    assert not gradient[truth.counted :].any(), f"{label}: rows that do not count"
    counted = gradient[: truth.counted]
    if bool(poisoned.any()):
        assert bool(counted.isnan().all()), f"{label}: a bad row is part of its sum"
    elif bool((truth.determined | ~truth.live).all()):
        everything = torch.ones_like(counted, dtype=torch.bool)
        assert_close(counted, truth.gradients[name], truth.gradient_sizes[name], everything, case, label)
