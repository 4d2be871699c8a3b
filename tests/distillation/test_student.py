"""A student's engine beside a teacher's: the numbers are those of torch on one process, at every stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from ds_hf import initialize
from ds_hf.distillation import Recipe, distill, spread, teacher_engine
from ds_hf.errors import ConfigError
from ds_hf.log import forget_said
from tests.compression.common import logged
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

LR, STEPS, MICRO = 2.0**-5, 2, 2
Batch = dict[str, Tensor]


def llama(layers: int, width: int, seed: int, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, attn_implementation="eager", **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def student() -> LlamaForCausalLM:
    return llama(2, 32, 1)


def teacher() -> LlamaForCausalLM:
    return llama(4, 64, 2).requires_grad_(False).eval()


def batch(number: int) -> Batch:
    """Two sequences; the first is padded, and of the second the beginning is ignored."""
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(number))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 7:], labels[0, 7:], labels[1, : number % 4] = 0, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


RECIPES = {
    "logits": {"temperature": 2.0},
    "all": {"logits": 0.5, "labels": 0.25, "hidden": 0.5, "attention": 0.125, "temperature": 3.0, "beta": 0.5},
}


def formula(model: Any, given: Batch, theirs: Any, recipe: Recipe, projections: Any) -> Tensor:
    """The loss, by torch and one position after another."""
    needs = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        other = theirs(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **needs)
    own = model(**given, **needs)
    rows = [(b, t) for b in range(2) for t in range(8) if given["labels"][b, t + 1] != -100]
    total = recipe.labels * own.loss
    for b, t in rows:
        ours, aim = (F.log_softmax(each.logits[b, t] / recipe.temperature, -1) for each in (own, other))
        if recipe.beta == 0:
            divergence = (aim.exp() * (aim - ours)).sum()
        else:
            mixed = ((1 - recipe.beta) * ours.exp() + recipe.beta * aim.exp()).log()
            divergence = recipe.beta * (aim.exp() * (aim - mixed)).sum()
            divergence = divergence + (1 - recipe.beta) * (ours.exp() * (ours - mixed)).sum()
        total = total + recipe.logits * divergence * recipe.temperature**2 / len(rows)
        for one, another in ((0, 1), (1, 3)) if recipe.hidden else ():
            state = projections[one](own.hidden_states[one + 1][b, t])
            distance = F.mse_loss(state, other.hidden_states[another + 1][b, t])
            total = total + recipe.hidden * distance / len(rows) / 2
            maps = own.attentions[one][b, :, t], other.attentions[another][b, :, t]
            total = total + recipe.attention * (maps[0] - maps[1]).square().sum(-1).mean() / len(rows) / 2
    return total


def by_torch(recipe: Recipe, world: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by step and sample, and the weights in the end."""
    model, theirs = student(), teacher()
    distilled = distill(model, theirs, recipe)  # makes the projections; its hooks are not used
    for handle in distilled._handles:
        handle.remove()
    projections = model._modules.get("distillation")
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        found = []
        for part in range(MICRO * world):
            loss = formula(model, batch(step * MICRO * world + part), theirs, recipe, projections)
            (loss / (MICRO * world)).backward()
            found.append(loss.item())
        losses.append(found)
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param -= LR * param.grad
    return losses, {name: param.detach().cpu() for name, param in model.named_parameters()}


def by_engines(fields: dict[str, Any], cells: list[tuple[int, Any]]) -> list[Any]:
    found = []
    for stage, aim in cells:
        model, theirs = student(), teacher()
        before = {name: value.cpu().clone() for name, value in theirs.state_dict().items()}
        of = theirs if aim is None else teacher_engine(theirs, **aim)
        handle = distill(model, of, **fields)
        sgd = {"type": "SGD", "params": {"lr": LR}}
        config = base_config(stage, optimizer=sgd, gradient_accumulation_steps=MICRO)
        engine = initialize(model=model, config=config)[0]
        rank, world = engine.axis.rank, engine.axis.world_size
        losses = []
        for step in range(STEPS):
            for part in range(MICRO):
                loss = engine(**batch((step * MICRO + part) * world + rank)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        assert set(handle.parts) == {name for name in ("logits", "labels", "hidden", "attention")
                                     if getattr(handle.recipe, name)}  # fmt: skip
        weights = full_weights(engine.module)
        after = full_weights(theirs)
        assert all(torch.equal(value, before[name]) for name, value in after.items() if "bits" not in (aim or {}))
        assert not any(name.startswith("teacher") or value.shape == (64, 64) for name, value in weights.items())
        engine.destroy()
        found.append((losses, weights))
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_at_every_stage_are_torch_on_one(name: str) -> None:
    check(name, by_engines)


def check(name: str, train: Callable[..., list[Any]], within: float = 2e-5, backend: str = "gloo") -> None:
    """The teacher is a module, whole, divided, and in host memory."""
    losses, weights = by_torch(Recipe(**RECIPES[name]), 2)
    in_memory = {"stage": 3, "offload": True, "dtype": "fp32"}
    cells = [(0, None), (1, {"dtype": "fp32"}), (2, {"stage": 3, "dtype": "fp32"}), (3, {"stage": 3, "dtype": "fp32"}),
             (3, in_memory)]  # fmt: skip
    for rank, found in enumerate(run_distributed(train, 2, RECIPES[name], cells, timeout=150, backend=backend)):
        for cell, (ours, values) in zip(cells, found, strict=True):
            expected = [step[part * 2 + rank] for step in losses for part in range(MICRO)]
            assert ours == pytest.approx(expected, rel=within), cell
            assert set(values) == set(weights)
            for key, value in values.items():
                torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-5, msg=f"{cell} {key}")


@pytest.mark.parametrize("bits", [8, 4])
def test_a_teacher_in_few_bits_is_near(bits: int) -> None:
    whole, packed = ({"stage": 0, "dtype": "fp32"}, {"stage": 3, "bits": bits, "dtype": "fp32"})
    (ours, _), (theirs, _) = by_engines({"temperature": 2.0}, [(2, whole), (2, packed)])
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel={8: 0.03, 4: 0.4}[bits])


# -- a student ---------------------------------------------------------------------------------------------------------


def test_items_of_a_whole_step_count() -> None:
    """As the Trainer passes them."""
    model = student()
    handle = distill(model, teacher(), temperature=2.0)
    given = batch(1)
    counted = int((given["labels"][:, 1:] != -100).sum())
    alone = model(**given).loss
    shared = model(**given, num_items_in_batch=torch.tensor(4 * counted)).loss
    assert shared.item() == pytest.approx(alone.item() / 4, rel=1e-5)
    assert handle.parts["logits"].item() == shared.item()


def test_items_of_classes_are_sequences() -> None:
    """States are a mean over positions, with items as without."""
    given, model = batch(1), classifier(1).train()
    given["labels"] = torch.tensor([0, 2])
    handle = distill(model, classifier(2).eval(), hidden=1.0)
    model(**given)
    alone = {name: part.item() for name, part in handle.parts.items()}
    model(**given, num_items_in_batch=torch.tensor(8))
    assert {name: part.item() * 4 for name, part in handle.parts.items()} == pytest.approx(alone, rel=1e-5)


def test_labels_that_are_shifted_already_count() -> None:
    model, given = student(), batch(1)
    distill(model, teacher(), hidden=1.0, attention=0.5)
    expected = model(**given).loss.item()
    given["shift_labels"] = F.pad(given.pop("labels")[:, 1:], (0, 1), value=-100)
    assert model(**given).loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_student_that_does_not_learn_is_as_it_was() -> None:
    model, given = student(), batch(1)
    with torch.no_grad():
        expected = model(**given)
    handle = distill(model, teacher(), **RECIPES["all"])
    with torch.no_grad():
        found = model.train()(**given)
    assert found.loss.item() == expected.loss.item()
    assert found.hidden_states is None
    found = model.eval()(**given)
    assert found.loss.item() == expected.loss.item()
    assert handle.parts == {}
    positional = model.train()(given["input_ids"], given["attention_mask"], labels=given["labels"])
    assert positional.loss.item() == model(**given).loss.item() != expected.loss.item()
    handle.remove()
    assert not hasattr(model, "distillation")
    assert model(**given).loss.item() == expected.loss.item()
    assert set(model.state_dict()) == set(student().state_dict())


def test_without_labels_all_but_padding_counts() -> None:
    model = student()
    distill(model, teacher())
    given = batch(0)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    expected = model(**{**given, "labels": labels}).loss.item()
    assert model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).loss.item() == pytest.approx(
        expected
    )


def test_masked_language_models_are_not_shifted() -> None:
    sizes = {
        "vocab_size": 64,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16, **sizes))
    theirs = BertForMaskedLM(BertConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=32, **sizes)).eval()
    handle = distill(model, theirs)
    given = batch(3)
    loss = model(**given).loss
    counted = given["labels"] != -100
    with torch.no_grad():
        aim = F.log_softmax(theirs(given["input_ids"], given["attention_mask"]).logits[counted], -1)
    ours = F.log_softmax(model(given["input_ids"], given["attention_mask"]).logits[counted], -1)
    torch.testing.assert_close(loss, F.kl_div(ours, aim, reduction="batchmean", log_target=True))
    assert handle.shift is False


def test_a_given_projection_is_not_trained() -> None:
    model = student()
    matrix = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    handle = distill(model, teacher(), logits=0.0, hidden=1.0, projection=matrix, layers={1: 2}, hidden_kind="cosine")
    given = batch(0)
    loss = model(**given).loss
    with torch.no_grad():
        aim = teacher()(given["input_ids"], given["attention_mask"], output_hidden_states=True).hidden_states[3]
        own = model.eval()(given["input_ids"], given["attention_mask"], output_hidden_states=True).hidden_states[2]
    rows = torch.zeros_like(given["labels"], dtype=torch.bool)
    rows[:, :-1] = given["labels"][:, 1:] != -100
    expected = 1 - F.cosine_similarity(own[rows] @ matrix.T, aim[rows], dim=-1).mean()
    torch.testing.assert_close(loss, expected)
    assert not hasattr(model, "distillation")
    assert handle.layers == {1: 2}


def test_adapters_learn() -> None:
    peft = pytest.importorskip("peft")
    given, found = batch(0), []
    for stage in (0, 3):
        torch.manual_seed(5)
        model = peft.get_peft_model(student(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        handle = distill(model, teacher(), temperature=2.0)
        sgd = {"type": "SGD", "params": {"lr": LR}}
        engine = initialize(model=model, config=base_config(stage, optimizer=sgd))[0]
        for _ in range(2):
            loss = engine(**given).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.destroy()
        handle.remove()
    assert found[:2] == pytest.approx(found[2:], rel=1e-6)
    assert found[1] < found[0]


def test_layers_are_spread() -> None:
    assert spread(6, 12) == {0: 1, 1: 3, 2: 5, 3: 7, 4: 9, 5: 11}
    assert spread(2, 5) == {0: 1, 1: 4}
    assert spread(3, 3) == {0: 0, 1: 1, 2: 2}


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    """With its projections; and the student alone is read by transformers."""

    def made() -> tuple[Any, Any]:
        model = student()
        handle = distill(model, teacher(), hidden=1.0)
        adam = {"type": "AdamW", "params": {"lr": 1e-2}}
        return initialize(model=model, config=base_config(3, optimizer=adam))[0], handle

    def train(engine: Any, numbers: list[int]) -> Iterator[float]:
        for number in numbers:
            loss = engine(**batch(number)).loss
            engine.backward(loss)
            engine.step()
            yield loss.item()

    engine, _ = made()
    list(train(engine, [0, 1]))
    engine.save_checkpoint(tmp_path / "saved")
    expected = list(train(engine, [2, 3]))
    again, handle = made()
    again.load_checkpoint(tmp_path / "saved")
    assert list(train(again, [2, 3])) == expected
    weights = full_weights(again.module)
    again.export_pretrained(tmp_path / "student")
    again.destroy()
    handle.remove()
    read = LlamaForCausalLM.from_pretrained(tmp_path / "student")
    assert all(torch.equal(value, weights[name]) for name, value in read.state_dict().items())
    assert "distillation.0.weight" in weights
    assert json.loads((tmp_path / "student/config.json").read_text())["num_hidden_layers"] == 2


# -- what is told ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_before_training() -> None:
    other = llama(4, 64, 2)
    other.resize_token_embeddings(70)
    sdpa = LlamaForCausalLM(LlamaConfig(**{**student().config.to_dict(), "attn_implementation": "sdpa"}))
    sdpa.set_attn_implementation("sdpa")
    trains = initialize(model=teacher().requires_grad_(True), config=base_config(0))[0]
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        (r"the student has 64 tokens and the teacher 70.*resize_token_embeddings", student(), other, {}),
        (r"layer 4 of the teacher, which has 0 to 3", student(), teacher(), {"hidden": 1.0, "layers": {0: 4}}),
        (r"layer 2 of the student, which has 0 to 1", student(), teacher(), {"hidden": 1.0, "layers": {2: 3}}),
        (r"layers=\{\}: no layer learns", student(), teacher(), {"hidden": 1.0, "layers": {}}),
        (r"4 layers cannot be spread over 2", llama(4, 32, 1), llama(2, 32, 1), {"hidden": 1.0}),
        (r'attn_implementation="eager" alone, and the student has', sdpa, teacher(), {"attention": 1.0}),
        (r"by one of \[64, 32\]", student(), teacher(), {"hidden": 1.0, "projection": torch.ones(32, 64)}),
        (r"nothing of the teacher is learned", student(), teacher(), {"logits": 0.0, "labels": 1.0}),
        (r"logits=-1.0: a weight is", student(), teacher(), {"logits": -1.0}),
        (r"temperature=0: it is more than 0", student(), teacher(), {"temperature": 0}),
        (r"beta=2: it is between 0", student(), teacher(), {"beta": 2}),
        (r"the teacher's engine trains", student(), trains, {}),
        (r"the student is no model of transformers", nn.Linear(2, 2), teacher(), {}),
    ]
    for said, model, theirs, fields in cases:
        with pytest.raises(ConfigError, match=said):
            distill(model, theirs, **fields)
    model = student()
    with pytest.raises(ConfigError, match="its own teacher"):
        distill(model, model)
    distill(model, teacher())
    with pytest.raises(ConfigError, match="distilled already"):
        distill(model, teacher())
    with pytest.raises(ConfigError, match="a recipe, or its fields"):
        distill(student(), teacher(), Recipe(), beta=1.0)
    with pytest.raises(ConfigError, match="stage=3, offload=True"):
        teacher_engine(teacher(), offload=True)
    late = student()
    engine = initialize(model=late, config=base_config(2))[0]
    distill(late, teacher(), hidden=1.0)
    with pytest.raises(ConfigError, match=r"call distill\(\) before initialize"):
        engine(**batch(0))
    peft = pytest.importorskip("peft")
    first = student()
    distill(first, teacher(), hidden=1.0)
    adapted = peft.get_peft_model(first, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="something has frozen them: with PEFT call distill"):
        adapted(**batch(0))
    labels = student()
    distill(labels, teacher(), labels=1.0)
    with pytest.raises(ValueError, match="pass labels"):
        labels(input_ids=batch(0)["input_ids"])


def beside_divided_sequences() -> list[str]:
    """What a student says whose sequences are divided, and one beside it whose sequences are not."""
    said = []
    for size in (2, 1):
        learner = student()
        learner.set_attn_implementation("sdpa")
        distill(learner, teacher())
        engine = initialize(model=learner, config=base_config(1, sequence_parallel_size=size))[0]
        try:
            engine(**batch(0))
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_teacher_is_given_no_part_of_a_sequence() -> None:
    for divided, other in run_distributed(beside_divided_sequences, 2):
        assert "distill without Ulysses" in divided
        assert other == ""


def test_a_loss_that_nothing_is_trained_by_is_told() -> None:
    """As with the Trainer's label smoothing, which makes a loss of its own of the logits."""
    model, given = student(), batch(0)
    distill(model, teacher())
    forget_said()
    with logged() as lines:
        for _ in range(20):  # several forwards for one backward are no fault
            (model(**given).loss + model(**given).loss).backward()
        assert not lines
        for _ in range(17):
            model(**given).logits.sum().backward()
    assert "learns nothing from the teacher" in lines[0]


def test_a_balance_of_experts_that_is_left_out_is_told() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=2, output_router_logits=True, **sizes)
    model, told = MixtralForCausalLM(config), []
    for labels in (0.5, 0.0):
        forget_said()
        handle = distill(model, teacher(), labels=labels)
        with logged() as lines:
            model(**batch(0))
        told.append(any("experts are not balanced" in line for line in lines))
        handle.remove()
    assert told == [False, True]


def classifier(seed: int, classes: int = 3) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=classes, **sizes, **off))


def test_classes_of_padded_sequences_count_once_a_sequence() -> None:
    given, small, large = batch(1), classifier(1), classifier(2).eval()
    given["labels"] = torch.tensor([0, 2])
    with torch.no_grad():
        ours, aim = small(**given).logits.log_softmax(-1), large(**given).logits.log_softmax(-1)
    expected = (aim.exp() * (aim - ours)).sum(-1).mean()
    distill(small, large)
    assert small.train()(**given).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ConfigError, match="3 classes and the teacher 4"):
        distill(classifier(1), classifier(2, 4))


@pytest.mark.parametrize("field", ["hidden_kind", "attention_kind", "projection"])
def test_a_kind_that_is_not_there_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}='other'"):
        Recipe(**{field: "other"})
