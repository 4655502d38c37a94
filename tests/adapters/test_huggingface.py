"""A swapped Hugging Face model: what its labels do, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="needs transformers: pip install 'mcore-entropy[hf]'")

import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mcore_entropy as me
from mcore_entropy.adapters.huggingface import swap_lm_head
from mcore_entropy.adapters.lm_head import EntropyAwareLMHead
from tests.adapters.dense import batch, gradients, largest_error
from tests.adapters.tiny_models import VOCABULARY, tiny_model
from tests.comparison import assert_same_bits
from tests.reference import eager_linear, truth_linear
from tests.unit.cases import compare_gradient, compare_values, head_gradients, largest_terms, out_dtype

IDS, LABELS = batch()
NEXT = F.pad(LABELS, (0, 1), value=-100)[:, 1:]


def swapped(
    architecture: str = "LlamaForCausalLM", config: me.EntropyConfig | None = None, **sizes: Any
) -> Any:
    model = tiny_model(architecture, **sizes)
    swap_lm_head(model, config or me.EntropyConfig())
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
def test_head_against_fp64(architecture: str, dtype: torch.dtype) -> None:
    """Statistics, and the gradient of the hidden states, of what the model gave its head."""
    model = swapped(architecture, tie_word_embeddings=False).to(dtype)
    transform = model._mcore_entropy_swap._transform
    given: list[Tensor] = []

    def remember(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        given.append(args[0])

    model.lm_head.register_forward_pre_hook(remember)
    output = model(input_ids=IDS, labels=LABELS)
    (hidden,) = given
    weight = model.lm_head.weight
    upstream = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(2))
    ((output.log_probs * upstream[0]).sum() + (output.entropy * upstream[1]).sum()).backward()
    options = dict(
        scale=transform.scale, softcap=transform.softcap, grad_log_probs=upstream[0], grad_entropy=upstream[1]
    )
    operands = (hidden.detach(), weight.detach())
    truth = truth_linear(*operands, NEXT, **options)
    eager = eager_linear(*operands, NEXT, **options)
    eager_values = eager_linear(*(x.to(out_dtype(dtype)) for x in operands), NEXT, **options)
    for name in ("log_probs", "entropy"):
        value = getattr(output, name)
        assert value.dtype == torch.float32
        compare_values(value.detach(), getattr(truth, name), getattr(eager_values, name), name)
    how = head_gradients(dtype, largest_terms(*operands, None, options))
    compare_gradient("hidden", hidden.grad, truth, eager, **how)
    compare_gradient("weight", weight.grad, truth, eager, **how)


def test_without_labels_everything_is_stock() -> None:
    stock, model = tiny_model("Gemma2ForCausalLM"), swapped("Gemma2ForCausalLM")
    ours, theirs = model(input_ids=IDS), stock(input_ids=IDS)
    assert type(ours) is type(theirs)
    assert_same_bits(ours.logits, theirs.logits)
    assert_same_bits(model(IDS, logits_to_keep=2).logits, stock(IDS, logits_to_keep=2).logits)
    found, expected = (m.generate(IDS, max_new_tokens=4, do_sample=False) for m in (model, stock))
    assert found.shape == (2, 13) and found.tolist() == expected.tolist()


def test_the_output_is_the_models_own() -> None:
    model = swapped(config=me.EntropyConfig(metrics=("max_prob", "varentropy")))
    output = model(input_ids=IDS, labels=LABELS, output_hidden_states=True)
    assert isinstance(output, transformers.modeling_outputs.CausalLMOutputWithPast)
    assert len(output.hidden_states) == 3
    assert "logits" not in output and {"loss", "log_probs", "entropy", "max_prob"} <= output.keys()
    assert not output.max_prob.requires_grad and output.entropy.requires_grad
    again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output)
    assert_same_bits(again.entropy, output.entropy)
    as_tuple = model(input_ids=IDS, labels=LABELS, return_dict=False, use_cache=False)
    assert isinstance(as_tuple, tuple)
    assert [value.shape for value in as_tuple] == [(), *[(2, 9)] * 4]
    assert_same_bits(as_tuple[0], output.loss)


def test_only_the_entropy_asked_for() -> None:
    model = swapped(config=me.EntropyConfig(entropy=False))
    output = model(input_ids=IDS, labels=LABELS)
    assert output.entropy is None and output.log_probs.shape == (2, 9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(labels=LABELS),
        dict(labels=LABELS, num_items_in_batch=7),
        dict(labels=LABELS, num_items_in_batch=torch.tensor(7)),
        dict(labels=LABELS, shift_labels=LABELS.roll(2, 1)),
        dict(labels=LABELS.masked_fill(LABELS == -100, 3), ignore_index=3),
    ],
    ids=["labels", "items", "items as a tensor", "shift_labels", "ignore_index"],
)
def test_loss_is_the_models_own(arguments: dict[str, Any], tied: bool) -> None:
    stock = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied)
    model = swapped(tie_word_embeddings=tied)
    ours, theirs = model(input_ids=IDS, **arguments).loss, stock(input_ids=IDS, **arguments).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert largest_error(gradients(model, ours), gradients(stock, theirs)) <= 1e-6


def test_labels_by_position() -> None:
    stock, model = tiny_model("LlamaForCausalLM"), swapped()
    names = list(transformers.LlamaForCausalLM.forward.__wrapped__.__annotations__)
    before = [None] * (names.index("labels") - 1)
    torch.testing.assert_close(
        model(IDS, *before, LABELS).loss, stock(IDS, *before, LABELS).loss, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "keep",
    [3, torch.tensor([1, 4, 8]), torch.tensor([[0, 2], [5, 7]]), torch.arange(18).view(2, 9) % 3 == 0],
    ids=["last", "positions", "positions of each sequence", "mask"],
)
def test_logits_to_keep(keep: int | Tensor) -> None:
    model = swapped()
    output = model(input_ids=IDS, labels=LABELS, logits_to_keep=keep)
    if isinstance(keep, int):
        places = torch.arange(9)[-keep:].expand(2, -1)
    elif keep.dtype == torch.bool:
        places = None
    else:
        places = keep.expand(2, -1)
    all_of_them = model(input_ids=IDS, labels=LABELS)
    for name in ("log_probs", "entropy"):
        whole = getattr(all_of_them, name)
        expected = whole[keep] if places is None else whole.gather(1, places)
        torch.testing.assert_close(getattr(output, name), expected, rtol=1e-6, atol=1e-6)
    target = NEXT[keep] if places is None else NEXT.gather(1, places)
    expected_loss = -output.log_probs.sum() / (target != -100).sum()
    torch.testing.assert_close(output.loss, expected_loss, rtol=1e-6, atol=0)


def test_requests_are_in_the_places_of_the_labels() -> None:
    model, stock = tiny_model("LlamaForCausalLM").double(), tiny_model("LlamaForCausalLM").double()
    handle = swap_lm_head(model, me.EntropyConfig())
    mask = torch.arange(18).view(2, 9) % 4 != 2
    temperature = torch.linspace(0.5, 2.0, 18, dtype=torch.float64).view(2, 9)
    with handle.request(mask=mask, temperature=temperature):
        output = model(input_ids=IDS, labels=LABELS)
    of_next = F.pad(temperature, (0, 1), value=1.0)[:, 1:]
    counted = F.pad(mask, (0, 1))[:, 1:]
    log_p = (stock(input_ids=IDS).logits / of_next[..., None]).log_softmax(-1)
    picked = log_p.gather(-1, NEXT.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(counted & (NEXT != -100), picked, 0.0)
    torch.testing.assert_close(output.log_probs, expected, rtol=0, atol=1e-12)
    entropy = torch.where(counted, -(log_p.exp() * log_p).sum(-1), 0.0)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-12)
    loss = -expected.sum() / (counted & (NEXT != -100)).sum()
    torch.testing.assert_close(output.loss, loss, rtol=1e-12, atol=0)
    with handle.request(entropy=False, temperature=0.5):
        output = model(input_ids=IDS, labels=LABELS)
    assert output.entropy is None
    with pytest.raises(RuntimeError, match="called with labels inside the block"), handle.request(mask=mask):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match=r"mask: expected shape \[b, s\]"), handle.request(mask=mask[:, 1:]):
        model(input_ids=IDS, labels=LABELS)


# --------------------------------------------------------------------------- copies, files, and back


def test_a_copy_is_a_swapped_model_of_its_own() -> None:
    model = swapped()
    before = model(input_ids=IDS, labels=LABELS).log_probs
    reference = copy.deepcopy(model)
    reference_handle = swap_lm_head(reference, me.EntropyConfig())
    with torch.no_grad():
        reference.lm_head.weight.zero_()
        reference.model.embed_tokens.weight.zero_()
    flat = reference(input_ids=IDS, labels=LABELS).entropy
    torch.testing.assert_close(flat, torch.full_like(flat, torch.tensor(97.0).log().item()))
    assert_same_bits(model(input_ids=IDS, labels=LABELS).log_probs, before)
    with reference_handle.request(entropy=False):
        assert reference(input_ids=IDS, labels=LABELS).entropy is None
        assert model(input_ids=IDS, labels=LABELS).entropy is not None
    reference_handle.restore()
    assert type(reference.lm_head) is nn.Linear
    assert_same_bits(model(input_ids=IDS, labels=LABELS).log_probs, before)


@pytest.mark.parametrize("through", [pickle, torch])
def test_pickled(through: Any) -> None:
    model = swapped()
    file = io.BytesIO()
    if through is torch:
        torch.save(model, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        again = pickle.loads(pickle.dumps(model))
    ours, expected = (m(input_ids=IDS, labels=LABELS).log_probs for m in (again, model))
    assert_same_bits(ours, expected)
    swap_lm_head(again, me.EntropyConfig()).restore()
    assert type(again) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("tied", [False, True])
def test_saved_as_the_stock_model(tied: bool, tmp_path: Path) -> None:
    model = swapped(tie_word_embeddings=tied)
    assert model.state_dict().keys() == tiny_model("LlamaForCausalLM").state_dict().keys()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert_same_bits(again(IDS).logits, model(IDS).logits)
    from_class = type(model).from_pretrained(tmp_path)
    assert_same_bits(from_class(IDS).logits, model(IDS).logits)
    swap_lm_head(from_class, me.EntropyConfig())
    assert_same_bits(from_class(IDS, labels=LABELS).entropy, model(IDS, labels=LABELS).entropy)


def test_restore() -> None:
    model, stock = tiny_model("LlamaForCausalLM"), tiny_model("LlamaForCausalLM")
    handle = swap_lm_head(model, me.EntropyConfig())
    assert type(model.lm_head) is EntropyAwareLMHead
    handle.restore()
    handle.restore()
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is nn.Linear
    assert vars(model).keys() == vars(stock).keys()
    assert_same_bits(model(IDS, labels=LABELS).loss, stock(IDS, labels=LABELS).loss)
    with pytest.raises(RuntimeError, match="stock head was restored"), handle.request():
        pass
    swap_lm_head(model, me.EntropyConfig(temperature=2.0))
    assert model(IDS, labels=LABELS).logits is None


def test_swapping_again_changes_nothing() -> None:
    model = swapped()
    first = swap_lm_head(model, me.EntropyConfig())
    first.restore()
    assert type(model) is transformers.LlamaForCausalLM
    model = swapped()
    with pytest.raises(ValueError, match="config: expected the one this model was swapped with"):
        swap_lm_head(model, me.EntropyConfig(temperature=2.0))


def test_a_copy_made_inside_a_request_has_none() -> None:
    model = tiny_model("LlamaForCausalLM")
    handle = swap_lm_head(model, me.EntropyConfig())
    expected = model(input_ids=IDS, labels=LABELS).log_probs
    with handle.request(temperature=3.0):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(input_ids=IDS, labels=LABELS)
    for other in copies:
        assert_same_bits(other(input_ids=IDS, labels=LABELS).log_probs, expected)


def test_a_shallow_copy_runs_itself() -> None:
    """As torch.nn.DataParallel's replicas do."""
    model = swapped()
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.lm_head = copy.deepcopy(model.lm_head)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    loss = other(input_ids=IDS, labels=LABELS).loss
    torch.testing.assert_close(loss, torch.tensor(97.0).log())


def test_threads_and_calls_inside_calls() -> None:
    model = swapped()
    labels_of = {False: LABELS, True: LABELS.roll(1, 1)}
    expected = {other: model(IDS, labels=labels).loss.item() for other, labels in labels_of.items()}
    assert expected[False] != expected[True]
    wrong: list[Any] = []

    def with_labels(other: bool) -> None:
        for _ in range(40):
            loss = model(IDS, labels=labels_of[other]).loss.item()
            if loss != expected[other]:
                wrong.append(loss)

    def without_labels() -> None:
        for _ in range(40):
            shape = model(IDS).logits.shape
            if shape != (2, 9, VOCABULARY):
                wrong.append(shape)

    threads = [threading.Thread(target=with_labels, args=(other,)) for other in (False, True)]
    threads.append(threading.Thread(target=without_labels))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    inner: list[Any] = []
    model.model.layers[0].register_forward_hook(
        lambda *_: inner.append(model(IDS).logits.shape) if not inner and inner.append(None) is None else None
    )
    assert model(IDS, labels=LABELS).loss.item() == expected[False]
    assert inner[1:] == [(2, 9, VOCABULARY)]


# --------------------------------------------------------------------------- what wraps models


def test_a_frozen_head_pays_no_weight_gradient() -> None:
    model = swapped()
    model.lm_head.weight.requires_grad_(False)
    found = gradients(model, model(IDS, labels=LABELS).loss)
    stock = tiny_model("LlamaForCausalLM")
    stock.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in found
    assert largest_error(found, gradients(stock, stock(IDS, labels=LABELS).loss)) <= 1e-6


def test_gradient_checkpointing() -> None:
    model, plain = swapped(), swapped()
    expected = gradients(plain, plain(IDS, labels=LABELS).loss)
    model.train()
    model.gradient_checkpointing_enable()
    assert largest_error(gradients(model, model(IDS, labels=LABELS, use_cache=False).loss), expected) <= 1e-6
    model.gradient_checkpointing_disable()
    model.lm_head = checkpoint_wrapper(model.lm_head)
    found = gradients(model, model(IDS, labels=LABELS).loss)
    without_wrapper = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in found.items()}
    assert largest_error(without_wrapper, expected) <= 1e-6
    model = swapped()
    loss = checkpoint(lambda: model(IDS, labels=LABELS).loss, use_reentrant=False)
    assert largest_error(gradients(model, loss), expected) <= 1e-6


def test_autocast() -> None:
    """As the stock model under autocast, but without its rounding of the logits."""
    model, stock = swapped(), tiny_model("LlamaForCausalLM")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = model(IDS, labels=LABELS)
        with_logits = stock(IDS, labels=LABELS)
    assert ours.log_probs.dtype == ours.loss.dtype == torch.float32
    truth = stock.double()(IDS, labels=LABELS).loss
    assert abs(float(ours.loss) - float(truth)) <= abs(float(with_logits.loss) - float(truth)) + 2e-2
    found = gradients(model, ours.loss)
    assert all(value.dtype == torch.float32 for value in found.values())


def test_compiled() -> None:
    model = swapped()
    expected = gradients(model, model(IDS, labels=LABELS).loss)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(IDS, labels=LABELS).loss
    assert largest_error(gradients(model, loss), expected) <= 1e-6


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = swapped()
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    output = prepared(IDS, labels=LABELS)
    assert output.logits is None and output.log_probs.dtype == torch.float32
    torch.testing.assert_close(output.loss, swapped()(IDS, labels=LABELS).loss, rtol=2e-2, atol=0)
    with pytest.raises(ValueError, match=r"something has put on the instance \(accelerate"):
        swap_lm_head(
            accelerate.Accelerator(cpu=True).prepare_model(tiny_model("LlamaForCausalLM")), me.EntropyConfig()
        )


def test_trainer(tmp_path: Path) -> None:
    """Its own loop, with gradient accumulation, takes the same steps with both heads."""
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, LABELS, strict=True)] * 4
    trained = []
    for model in (swapped(), tiny_model("LlamaForCausalLM")):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, use_cpu=True, report_to=[], save_strategy="no",
            learning_rate=0.1, optim="sgd", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        trained.append({name: p.detach().clone() for name, p in model.named_parameters()})
    start = dict(tiny_model("LlamaForCausalLM").named_parameters())
    assert not torch.equal(trained[0]["lm_head.weight"], start["lm_head.weight"])
    assert largest_error(*trained) <= 1e-6


# --------------------------------------------------------------------------- what is refused


def llama() -> Any:
    return tiny_model("LlamaForCausalLM")


def _sequence_classifier() -> Any:
    return transformers.LlamaForSequenceClassification(tiny_model("LlamaForCausalLM").config)


def _with_another_head() -> Any:
    model = tiny_model("LlamaForCausalLM")

    class Scaled(nn.Linear):
        pass

    model.lm_head.__class__ = Scaled
    return model


def _with_another_loss() -> Any:
    model = tiny_model("LlamaForCausalLM")
    model.loss_function = lambda **_: None
    return model


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, "model: expected a causal LM of transformers, got a Linear"),
        (_sequence_classifier, {}, "LlamaForSequenceClassification to have an output embedding"),
        (_with_another_head, {}, "head: expected exactly a torch.nn.Linear.*Scaled"),
        (_with_another_loss, {}, "loss_function: expected transformers' ForCausalLMLoss.*<lambda>"),
        (lambda: torch.compile(llama()), {}, "nothing wraps yet, got a OptimizedModule"),
        (llama, {"head": "logits"}, "head: expected 'fused'"),
        (llama, {"log_interval": 2}, "log_interval: expected 1"),
        (llama, {"transform": me.LogitTransform()}, "transform: expected None"),
    ],
)  # fmt: skip
def test_refused(make: Callable[[], Any], config: dict[str, Any], message: str) -> None:
    model = make()
    kind = type(model)
    with pytest.raises(ValueError, match=message):
        swap_lm_head(model, me.EntropyConfig(**config))
    assert type(model) is kind


def test_a_loss_or_a_head_of_later() -> None:
    model = swapped()
    model.resize_token_embeddings(128)
    with pytest.raises(RuntimeError, match=r"lm_head: expected the head that was swapped, got torch\.nn"):
        model(IDS, labels=LABELS)
    assert model(IDS).logits.shape == (2, 9, 128)
    handle = swap_lm_head(model, me.EntropyConfig())
    assert model(IDS, labels=LABELS).entropy.max() <= torch.tensor(128.0).log()
    model.resize_token_embeddings(64 + 40)
    handle.restore()
    assert type(model) is transformers.LlamaForCausalLM
    model = swapped()
    model.loss_function = lambda **_: None
    with pytest.raises(ValueError, match="loss_function: expected transformers' ForCausalLMLoss"):
        model(IDS, labels=LABELS)
