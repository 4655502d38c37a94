"""Arguments that other implementations took wrongly: an error that names them here, or the right number.

N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_entropy as me
from mcore_entropy.adapters import verl as adapter
from tests import reference as ref
from tests.unit.cases import check_linear, check_logits, leaf, make_linear, make_logits, make_target

N, H, V = 24, 32, 517


def jagged(values: Tensor, *offsets: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets))


@pytest.mark.parametrize("everything_jagged", [False, True])
def test_a_jagged_temperature_of_one_token(everything_jagged: bool) -> None:
    """Symptom: torch's own error about a view; one value was taken for everybody's, and cannot be reshaped.
    Report: found here, in the adapter for verl."""
    hidden, weight, _ = make_linear(torch.float64, rows=1)
    labels, one = make_target((1,), V), jagged(torch.tensor([0.7]), 0, 1)
    given = (jagged(hidden, 0, 1), jagged(labels, 0, 1)) if everything_jagged else (hidden, labels)
    log_probs, entropy = adapter.linear_cross_entropy(given[0], weight, given[1], one)
    truth = ref.truth_linear(hidden, weight, labels, temperature=torch.tensor([0.7]))
    torch.testing.assert_close([log_probs, entropy], [truth.log_probs, truth.entropy], rtol=1e-12, atol=0)
    hidden, weight, _ = make_linear(torch.float64, rows=3)
    with pytest.raises(ValueError, match=r"temperature: expected one value a token, .* \(3,\)"):
        adapter.linear_cross_entropy(hidden, weight, make_target((3,), V), one)


OTHER_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}
OTHER_KINDS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "logits": lambda kind: me.vocab_parallel_entropy(kind(torch.randn(2, 5))),
    "hidden": lambda kind: me.linear_log_probs_and_entropy(
        kind(torch.randn(2, 3)), torch.randn(5, 3), torch.zeros(2, dtype=torch.long)
    ),
    "weight": lambda kind: adapter.linear_cross_entropy(
        torch.randn(2, 3), kind(torch.randn(5, 3)), torch.zeros(2, dtype=torch.long)
    ),
    "labels": lambda kind: adapter.linear_cross_entropy(
        torch.randn(2, 3), torch.randn(5, 3), kind(torch.zeros(1, 2, dtype=torch.long))
    ),
    "temperature": lambda kind: adapter.linear_cross_entropy(
        torch.randn(1, 3), torch.randn(5, 3), torch.zeros(1, dtype=torch.long), kind(torch.ones(1, 1))
    ),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse invariant).*:UserWarning")
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
@pytest.mark.parametrize("argument", OTHER_KINDS)
def test_tensors_that_are_not_dense(argument: str, layout: str) -> None:
    """Symptom: torch's own errors about storages and strides, from deep inside.
    Report: found here, beside the one before."""
    with pytest.raises(ValueError, match=f"{argument}: expected a dense tensor"):
        OTHER_KINDS[argument](OTHER_LAYOUTS[layout])


@pytest.mark.parametrize("shape", [(N,), (4, 6), (6, 4), (1, N)], ids=str)
def test_chunks_of_every_layout(shape: tuple[int, ...]) -> None:
    """Symptom: [N, V] logits raise, [s, b, V] ones are not cut at all: chunks are cut from dimension 1.
    Report: verl#6446."""
    x, target = make_logits(V, torch.float32).reshape(*shape, V), make_target(shape, V)
    with pytest.raises(IndexError, match="too many indices"):  # what dimension 1 means for [N, V]
        torch.zeros(N, V)[:, 0:5, :]
    for chunk_size in (1, 5, N - 1, N, N + 1):  # the last chunk: of one token, of all, of the rest
        _, entropy, _ = check_logits("entropy in chunks", x, target, chunk_size=chunk_size)
        assert entropy.shape == shape
        check_logits("log-probs and entropy", x, target, chunk_size=chunk_size)


@pytest.mark.parametrize("shape", [(N,), (4, 6), (2, 3, 4)], ids=str)
def test_results_have_the_shape_of_the_tokens(shape: tuple[int, ...]) -> None:
    """Symptom: results come flat, [N], and the padded path fails on them with an IndexError.
    Report: verl#6846."""
    hidden, weight, _ = make_linear(torch.float32)
    statistics, gradients = check_linear(hidden.reshape(*shape, H), weight, make_target(shape, V))
    assert statistics.log_probs.shape == statistics.entropy.shape == shape
    assert gradients["hidden"].shape == (*shape, H)


def test_a_temperature_of_another_shape_is_named() -> None:
    """Symptom: logits and temperature do not fit, or broadcast to every token of the other axis.
    Report: verl#5957."""
    logits, temperature = torch.randn(4, 4, V), torch.tensor([0.5, 1.0, 2.0, 4.0])
    faulty = logits / temperature[:, None]  # runs: [4, 1] against [4, V]
    assert not torch.equal(faulty, logits / temperature[:, None, None])
    with pytest.raises(ValueError, match=r"temperature: expected shape \(4, 4\), one value a token"):
        me.vocab_parallel_entropy(logits, temperature=temperature)


def test_labels_in_another_order_than_the_hidden_states() -> None:
    """Symptom: [s, b] tokens get the labels of other tokens of [b, s]; the numbers look plausible.
    Report: verl's fused forward, more than one sequence in a batch (no thread known)."""
    hidden, weight, _ = make_linear(torch.float32)
    labels = make_target((4, 6), V)  # [b, s]; hidden is [s, b, H]
    right = ref.truth_linear(hidden, weight, labels.t().reshape(-1)).log_probs
    wrong = ref.truth_linear(hidden, weight, labels.reshape(-1)).log_probs
    assert (right - wrong).abs().max() > 1
    for call in (
        lambda labels: me.linear_log_probs_and_entropy(hidden.view(6, 4, H), weight, labels).log_probs,
        lambda labels: adapter.linear_cross_entropy(hidden.view(6, 4, H), weight, labels)[0],
    ):
        with pytest.raises(
            ValueError, match=r"transpose .*Megatron's labels are \[b, s\]|transpose the labels"
        ):
            call(labels)
        torch.testing.assert_close(call(labels.t()).double().reshape(-1), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", [-1, V, V + 3])
def test_a_label_outside_the_vocabulary(label: int) -> None:
    """Symptom: uninitialised memory as the log-prob, a read out of bounds, or a fault of the hardware.
    Report: verl's fused head and torch_npu's documentation (no thread known)."""
    hidden, weight, _ = make_linear(torch.float32)
    target = make_target((N,), V)
    target[3] = label
    calls: list[Callable[[], Any]] = [
        lambda: me.vocab_parallel_log_probs_and_entropy(make_logits(V, torch.float32), target),
        lambda: me.linear_log_probs_and_entropy(hidden, weight, target),
        lambda: adapter.linear_cross_entropy(hidden, weight, target),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"target: expected values in \[0, {V}\) .* got {label} at token 3"
        ):
            call()


def test_label_minus_100() -> None:
    """Symptom: a masked label has a log-prob or, its term alone left out, the whole softmax's gradient.
    Report: Megatron-LM#6706, Megatron-LM#7520."""
    hidden, weight, _ = make_linear(torch.float64)
    target = make_target((N,), V)
    target[::3] = -100
    faulty = -torch.softmax(hidden @ weight.t(), -1)[::3] @ weight
    assert faulty.abs().max() > 1
    statistics, gradients = check_linear(hidden, weight, target, upstream=(torch.ones(N), torch.zeros(N)))
    assert not statistics.log_probs[::3].any() and not gradients["hidden"][::3].any()
    assert statistics.entropy is not None and bool((statistics.entropy > 0).all())


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Symptom: row times stride passes 32 bits, and another row's memory is read.
    Report: no thread known; what 64-bit address arithmetic is asked for."""
    far = 2**32 + 64
    # A sparse file: only the pages of the two rows exist.
    storage = torch.from_file(str(tmp_path / "logits"), True, far + V, dtype=torch.bfloat16)
    x = storage.as_strided((2, V), (far, 1))
    rows = make_logits(V, torch.bfloat16, rows=2)
    x.copy_(rows)
    assert torch.tensor(far).int() == 64  # where 32 bits would read
    ours = me.vocab_parallel_log_probs_and_entropy(x, torch.tensor([1, 2]))
    truth = ref.truth_logits(rows, torch.tensor([1, 2]))
    assert ours.entropy is not None
    torch.testing.assert_close(ours.entropy.double(), truth.entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.log_probs.double(), truth.log_probs, rtol=1e-5, atol=1e-5)


def test_sums_over_all_tokens_as_the_loss() -> None:
    """Symptom: `.sum().backward()` sends a gradient of stride 0, and an assertion of contiguity fails.
    Report: SkyRL#1886."""
    hidden, weight, _ = make_linear(torch.float64)
    target = make_target((N,), V)
    ones = torch.ones(N)
    truth = ref.truth_linear(hidden, weight, target, grad_log_probs=ones, grad_entropy=ones)
    strides: list[tuple[int, ...]] = []
    for call in (me.linear_log_probs_and_entropy, adapter.linear_cross_entropy_statistics):
        h, w = leaf(hidden), leaf(weight)
        statistics = call(h, w, target)
        assert statistics.entropy is not None
        statistics.log_probs.register_hook(lambda gradient: strides.append(gradient.stride()))
        (statistics.log_probs.sum() + statistics.entropy.sum()).backward()
        torch.testing.assert_close(h.grad, truth.gradients["hidden"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(w.grad, truth.gradients["weight"], rtol=1e-9, atol=1e-12)
    assert strides == [(0,), (0,)]  # as the reports have it
