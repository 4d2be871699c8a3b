"""Checkpoints of a model, an optimizer or a precision that is not quite the one that loads: what fits is taken exactly.

What does not fit is an error that says what to do, before anything is changed.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ds_hf.config import load_config
from ds_hf.engine.zero.access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ds_hf.errors import CheckpointError
from tests.engine.checkpoint.simulated import run_threads
from tests.engine.checkpoint.workload import Block, Model, config, differences, engine_of, states, train

KEYS = ("exp_avg", "exp_avg_sq")


def wider(layers: int) -> Model:
    """The model with another number of layers."""
    torch.manual_seed(5)
    model = Model()
    model.blocks = nn.ModuleList(Block(0.0) for _ in range(layers))
    return model


def on_ranks(world_size: int, function: Callable[..., Any], make: Callable[[], nn.Module], *arguments: Any) -> Any:
    """``function(model, *arguments)`` on each rank, over its own model; rank 0's result."""
    models = [make() for _ in range(world_size)]
    return run_threads([partial(function, model, *arguments) for model in models])[0]


def save(model: nn.Module, content: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    with engine_of(content, model) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder, **options)
        return states(engine)


def load(model: nn.Module, content: dict[str, Any], folder: Path, **options: Any) -> tuple[Any, Any, list[float]]:
    """States before and after loading, and the losses that follow."""
    with engine_of(content, model) as engine:
        train(engine, 1, 60)
        before = states(engine)
        try:
            engine.load_checkpoint(folder, **options)
        except CheckpointError as error:
            assert differences(before, states(engine)) == []
            return str(error), None, []
        return before, states(engine), train(engine, 2, 3)


@pytest.mark.parametrize(("layers", "missing"), [(3, "missing in the checkpoint: .*blocks.2"), (1, "not in the model")])
def test_a_layer_more_or_less(tmp_path: Path, layers: int, missing: str) -> None:
    saved = on_ranks(3, save, partial(wider, 2), config(3), tmp_path)
    message, _, _ = on_ranks(2, load, partial(wider, layers), config(3), tmp_path)
    assert re.search(missing, message)
    assert "load_module_strict=False" in message
    options = {"load_module_strict": False}
    before, after, losses = on_ranks(2, partial(load, **options), partial(wider, layers), config(3), tmp_path)
    shared = [key for key in saved if key in after and "." in key and not key.startswith(("blocks.2", "groups"))]
    assert len([key for key in shared if key.endswith("/exp_avg")]) == 1 + 4 * min(layers, 2)
    assert [key for key in shared if not torch.equal(saved[key], after[key])] == []
    for key in (key for key in after if key.startswith("blocks.2") and key.endswith(KEYS)):
        assert after[key].abs().max() == 0, "a layer that is new has no moments"
    assert all(torch.equal(before[key], after[key]) for key in after if key.startswith("blocks.2") and "/" not in key)
    assert len(losses) == 2


def test_a_model_that_shares_no_name_is_refused_without_strictness_too(tmp_path: Path) -> None:
    """As that of a whole training under PEFT's names, which the Trainer loads so."""
    on_ranks(1, save, Model, config(2), tmp_path)
    given = partial(load, load_module_strict=False)
    message, _, _ = on_ranks(1, given, lambda: nn.Sequential(OrderedDict(base=Model())), config(2), tmp_path)
    assert "is of another model, of which nothing is in this one; missing in the checkpoint: base." in message
    assert "not in the model: " in message


@pytest.mark.parametrize("strict", [True, False])
def test_another_vocabulary(tmp_path: Path, strict: bool) -> None:
    def make(tokens: int) -> Model:
        torch.manual_seed(1)
        model = Model()
        model.embedding = nn.Embedding(tokens, 6)
        model.head = nn.Linear(6, tokens, bias=False)
        model.head.weight = model.embedding.weight
        model.frozen = nn.Parameter(torch.zeros(tokens), requires_grad=False)
        return model

    on_ranks(2, save, partial(make, 11), config(2), tmp_path)
    message, _, _ = on_ranks(3, partial(load, load_module_strict=strict), partial(make, 13), config(3), tmp_path)
    assert "embedding.weight: [13, 6] in the model, [11, 6] in the checkpoint" in message
    assert "resize_token_embeddings" in message


def test_weights_only_at_another_layout(tmp_path: Path) -> None:
    saved = on_ranks(3, save, Model, config(3, "bf16"), tmp_path)
    before, after, _ = on_ranks(2, partial(load, load_module_only=True), Model, config(1, "bf16"), tmp_path)
    for key in saved:
        if key.endswith(KEYS) or key in ("counters", "steps", "scheduler", "groups"):
            assert differences({key: before[key]}, {key: after[key]}) == [], key
        else:
            assert differences({key: saved[key]}, {key: after[key]}) == [], key


@pytest.mark.parametrize(("source", "target"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp16", "fp32"), ("fp32", "bf16")])
def test_another_precision(tmp_path: Path, source: str, target: str) -> None:
    """Masters and moments are fp32 in all; a loss scaler of another kind starts anew."""
    saved = on_ranks(3, save, Model, config(3, source), tmp_path)
    before, after, losses = on_ranks(2, load, Model, config(2, target), tmp_path)
    exact = [key for key in saved if "/" in key] + ["steps", "scheduler", "counters"]
    assert len(exact) == 3 * 10 + 3
    assert differences({key: saved[key] for key in exact}, {key: after[key] for key in exact}) == []
    assert after["loss scaler"] == before["loss scaler"]
    assert all(value == value for value in losses)


def _optimized(kind: str) -> dict[str, Any]:
    return {**config(2), "optimizer": {"type": kind, "params": {"lr": 1e-2}}}


@pytest.mark.parametrize(
    ("source", "target"), [("AdamW", "Lion"), ("Lion", "AdamW"), ("Lamb", "Muon"), ("AdamW", "SGD")]
)
def test_another_optimizer(tmp_path: Path, source: str, target: str) -> None:
    with engine_of(_optimized(source), Model(), model_parameters=None) as engine:
        train(engine, 4)
        engine.save_checkpoint(tmp_path)
    with engine_of(_optimized(target), Model(), model_parameters=None) as engine:
        train(engine, 1, 60)
        before = [param.detach().clone() for param in engine.module.parameters()]
        message = (
            r"was saved with the optimizer \w+, .*: train with (\w+).*load_optimizer_states=False|parameter groups"
        )
        with pytest.raises(CheckpointError, match=message) as failure:
            engine.load_checkpoint(tmp_path)
        if found := re.search(message, str(failure.value))[1]:  # type: ignore[index]
            load_config({"optimizer": {"type": found}, "train_batch_size": 1})  # a file can name it
        assert all(map(torch.equal, before, engine.module.parameters()))
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert not all(map(torch.equal, before, engine.module.parameters()))
        train(engine, 1)


def test_another_implementation_of_the_same_rule(tmp_path: Path) -> None:
    """Offload, torch_adam and the like choose other classes."""
    with engine_of(_optimized("AdamW"), Model(), model_parameters=None) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = states(engine)
    others: list[dict[str, Any]] = [
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "fp32_optimizer_states": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    ]
    seen = set()
    for other in others:
        with engine_of({**_optimized("AdamW"), **other}, Model(), model_parameters=None, seed=3) as engine:
            engine.load_checkpoint(tmp_path)
            seen.add(type(engine.optimizer.optimizer).__name__)
            found = states(engine)
            keys = [key for key in expected if "/" in key]
            assert len(keys) == 30
            assert differences({key: expected[key] for key in keys}, {key: found[key] for key in keys}) == []
            train(engine, 1, 2)
    assert len(seen) >= 2


def test_an_unknown_rule_is_let_through_with_a_warning(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        pass

    class Theirs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    plain = {key: value for key, value in config(2).items() if key not in ("optimizer", "scheduler")}
    with engine_of(plain, Model(), optimizer=Theirs) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    with engine_of(plain, Model(), optimizer=lambda groups: Mine(groups, lr=0.1)) as engine:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_hf").addHandler(handler)
        engine.load_checkpoint(tmp_path)
        logging.getLogger("ds_hf").removeHandler(handler)
    assert any("was saved with the optimizer Theirs, and this one is Mine" in record for record in records)


class _AdamWOfBlocks(torch.optim.Optimizer):
    """As another library has an AdamW, whose states have names of their own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("state1", torch.zeros_like(param))


_AdamWOfBlocks.__module__ = "bitsandbytes.optim.adamw"
_AdamWOfBlocks.__name__ = "AdamW"


@pytest.mark.parametrize("first", [torch.optim.AdamW, _AdamWOfBlocks])
def test_states_of_another_librarys_optimizer_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, first: Callable[..., Any]
) -> None:
    """Of the same name: it began anew without a word, or ended in a KeyError."""
    monkeypatch.setattr(logging.getLogger("ds_hf"), "propagate", True)
    plain = {key: value for key, value in config(2).items() if key not in ("optimizer", "scheduler")}
    with engine_of(plain, Model(), optimizer=first) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    said: dict[Any, list[str]] = {}
    for later in (torch.optim.AdamW, _AdamWOfBlocks):
        caplog.clear()
        with engine_of(plain, Model(), optimizer=later) as engine:
            try:
                engine.load_checkpoint(tmp_path)
            except CheckpointError as error:  # of states that ours lack
                said[later] = [str(error)]
            else:
                said[later] = [text for text in caplog.messages if " of bitsandbytes" in text]
    assert said.pop(first) == []
    ((other,),) = said.values()
    assert "was saved with AdamW of torch, and this one is AdamW of bitsandbytes" in other or "without its exp" in other


@pytest.mark.parametrize("value", ["1e-2", [0.1], None])
def test_options_of_another_kind(tmp_path: Path, value: Any) -> None:
    with engine_of(config(2)) as engine:
        train(engine, 1)
        group = engine.optimizer.param_groups[0]
        group["weight_decay"], kept = value, group["weight_decay"]
        engine.save_checkpoint(tmp_path)
        group["weight_decay"] = kept
        if value is None:
            engine.load_checkpoint(tmp_path)
            return
        before = states(engine)
        with pytest.raises(CheckpointError, match="option 'weight_decay' of parameter group 0"):
            engine.load_checkpoint(tmp_path)
        assert differences(before, states(engine)) == []


def _adapter(seed: int) -> Model:
    """A frozen base and a small part that trains."""
    torch.manual_seed(seed)
    model = Model(tied=False)
    for param in model.parameters():
        param.requires_grad_(False)
    model.blocks[0].linear.weight.requires_grad_(True)
    model.blocks[1].norm.bias.requires_grad_(True)
    return model


def test_adapters_alone_at_another_layout(tmp_path: Path) -> None:
    saved = on_ranks(
        3, partial(save, exclude_frozen_parameters=True), partial(_adapter, 0), config(3, "bf16"), tmp_path
    )
    before, after, _ = on_ranks(2, load, partial(_adapter, 9), config(2, "bf16"), tmp_path)
    trained = ["blocks.0.linear.weight", "blocks.1.norm.bias"]
    for name in trained:
        for key in (name, f"{name}/master", f"{name}/exp_avg", f"{name}/exp_avg_sq"):
            assert torch.equal(saved[key], after[key])
            assert not torch.equal(before[key], after[key])
    for key in ("embedding.weight", "head.weight", "frozen"):
        assert torch.equal(before[key], after[key])
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert nbytes < 3 * 4 * (36 + 6 + 200) + 6000, "padding and headers"


def test_a_parameter_that_was_frozen_trains_now(tmp_path: Path) -> None:
    on_ranks(2, save, partial(_adapter, 0), config(2), tmp_path)

    def thawed() -> Model:
        model = _adapter(4)
        model.head.weight.requires_grad_(True)
        return model

    def run(model: nn.Module) -> tuple[Any, ...]:
        with engine_of(config(3), model) as engine:
            engine.load_checkpoint(tmp_path)
            head = engine.module.head.weight
            before = safe_get_full_fp32_param(head)
            train(engine, 1, 3)
            return before, safe_get_full_fp32_param(head), safe_get_full_optimizer_state(head, "exp_avg")

    torch.manual_seed(0)
    base = _adapter(0).head.weight.detach()
    before, after, moment = run_threads([partial(run, thawed()) for _ in range(3)])[0]
    assert torch.equal(before, base)
    assert not torch.equal(after, base)
    assert moment.abs().max() > 0


def _lora(alpha: float = 6.0, merged: bool = False, seed: int = 4) -> Any:
    torch.manual_seed(seed)
    model: Any = get_peft_model(Model(tied=False), LoraConfig(r=3, lora_alpha=alpha, target_modules=["linear"]))  # type: ignore[arg-type]
    if merged:
        model.merge_adapter()
    return model


def test_adapters_of_another_scaling_or_merged_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ds_hf"), "propagate", True)
    with engine_of(config(1), _lora()) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
    said = []
    for model in (_lora(), _lora(alpha=48.0), _lora(merged=True)):
        caplog.clear()
        with engine_of(config(1), model) as engine:
            engine.load_checkpoint(tmp_path)
        said.append([text for text in caplog.messages if "adapter" in text])
    alike, scaled, merged = said
    assert alike == []
    assert len(scaled) == len(merged) == 1
    assert "blocks.0.linear.default and 1 others were trained with a scaling of 2 and have one of 16 here" in scaled[0]
    assert "merged into the weights of base_model.model.blocks.0.linear and 1 other layers" in merged[0]
    manifest = json.loads((tmp_path / "global_step2" / "manifest.json").read_text())
    assert set(manifest["scalings"].values()) == {2.0}


@pytest.mark.parametrize(("stage", "after"), [(0, 3), (3, 1), (3, 3)])
def test_adapters_over_another_base_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stage: int, after: int
) -> None:
    """The base is in no checkpoint; of the same one in 16 bits nothing is said."""
    monkeypatch.setattr(logging.getLogger("ds_hf"), "propagate", True)

    def told(seed: int, content: dict[str, Any]) -> list[str]:
        caplog.clear()
        given = partial(load, load_module_strict=False, load_module_only=True)
        assert on_ranks(2, given, partial(_lora, seed=seed), content, tmp_path)[1] is not None
        return [text for text in caplog.messages if "the frozen weights are not those" in text]

    def leave_out(model: Any, content: dict[str, Any], folder: Path) -> None:
        with engine_of(content, model) as engine:
            train(engine, 3)
            engine.save_checkpoint(folder, exclude_frozen_parameters=True)

    on_ranks(3, leave_out, _lora, config(stage), tmp_path)
    assert told(4, config(after)) == []
    assert told(4, config(after, "bf16")) == []
    (other,) = told(5, config(after))
    assert "What is loaded is another model" in other
    manifest = json.loads((tmp_path / "global_step3" / "manifest.json").read_text())
    expected = dict(_lora().named_parameters())
    assert "base_model.model.embedding.weight" in manifest["frozen"]
    for name, values in manifest["frozen"].items():
        assert values == expected[name].flatten()[:4].tolist()
