"""Optimizers by their JSON names: the class, the numbers that it gets, and refusals that name the fix."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from ds_hf.config import load_config
from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad, FusedAdagrad
from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam
from ds_hf.engine.optim.build import build_optimizer, optimizer_names
from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion
from ds_hf.engine.optim.muon import MuonWithAuxAdam
from ds_hf.errors import ConfigError


def make_params(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes or ((3, 2), (4,))]


@pytest.mark.parametrize(
    ("name", "params", "cls", "decoupled"),
    [
        ("AdamW", {}, FusedAdam, True),
        ("adamw", {"adam_w_mode": True}, FusedAdam, True),
        ("Adam", {}, FusedAdam, True),
        ("ADAM", {"adam_w_mode": False}, FusedAdam, False),
        ("AdamW", {"adam_w_mode": False}, FusedAdam, True),
        ("Adam", {"fp32_optimizer_states": False, "adam_w_mode": False}, DeepSpeedCPUAdam, False),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, None),
        ("Adam", {"torch_adam": True, "adam_w_mode": False, "foreach": True}, torch.optim.Adam, None),
        ("AdamW", {"torch_adam": False}, FusedAdam, True),
        ("Lion", {}, FusedLion, None),
        ("lion", {"fp32_optimizer_states": True}, DeepSpeedCPULion, None),
        ("Adagrad", {}, FusedAdagrad, None),
        ("adagrad", {"lr_decay": 0.1}, FusedAdagrad, None),
        ("Adagrad", {"fp32_optimizer_states": True}, FusedAdagrad, None),
        ("sgd", {"momentum": 0.9}, torch.optim.SGD, None),
        ("RMSprop", {}, torch.optim.RMSprop, None),
        ("rmsPROP", {}, torch.optim.RMSprop, None),
        ("Adafactor", {}, torch.optim.Adafactor, None),
        ("nadam", {}, torch.optim.NAdam, None),
    ],
)
def test_class_of_each_name(name: str, params: dict[str, Any], cls: type, decoupled: bool | None) -> None:
    given = {"lr": 0.02, **params}
    kept = dict(given)
    optimizer = build_optimizer(name, given, [{"params": make_params()}])
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert getattr(optimizer, "adam_w_mode", None) is decoupled
    assert given == kept


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("AdamW", {}, DeepSpeedCPUAdam),
        ("Adam", {"adam_w_mode": False}, DeepSpeedCPUAdam),
        ("Adam", {"set_grad_none": False}, FusedAdam),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
        ("Lion", {}, DeepSpeedCPULion),
        ("Adagrad", {}, DeepSpeedCPUAdagrad),
        ("Adagrad", {"lr_decay": 0.1}, FusedAdagrad),
        ("SGD", {"lr": 0.1}, torch.optim.SGD),
    ],
)
def test_offloaded_optimizers_have_the_names_for_the_cpu(name: str, params: dict[str, Any], cls: type) -> None:
    optimizer = build_optimizer(name, params, [{"params": make_params()}], offloaded=True)
    assert type(optimizer) is cls
    assert getattr(optimizer, "adam_w_mode", True) is params.get("adam_w_mode", True)


def test_json_lists_become_tuples_and_groups_keep_their_options() -> None:
    first, second = make_params()
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": [second], "lr": 0.5}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1, "betas": [0, 0.99], "eps": 1e-6, "weight_decay": 0.01}, groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert all(group["betas"] == (0.0, 0.99) for group in optimizer.param_groups)
    assert isinstance(build_optimizer("Adam", {"torch_adam": True, "betas": [0, 0.9]}, [first]), torch.optim.AdamW)


def test_adam_by_name_decays_decoupled_and_adam_w_mode_false_does_not() -> None:
    results = {}
    for mode in (True, False):
        (param,) = make_params((1,))
        optimizer = build_optimizer("Adam", {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": mode}, [param])
        param.grad = torch.ones(1)
        optimizer.step()
        results[mode] = param.item()
    assert results[True] == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-6)
    assert results[False] == pytest.approx(1 - 0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("LBFGS", "several times"),
        ("SparseAdam", "dense"),
        ("AdmW", "did you mean adamw?"),
        ("Optimizer", "known: "),
    ],
)
def test_refused_types_name_an_alternative(name: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, {"lr": 0.1}, make_params((2, 2), (3,), ()))
    assert caught.value.faults[0].pointer == "/optimizer/type"
    assert caught.value.faults[0].fix
    assert word in str(caught.value)


def test_muon_takes_matrices_and_adam_the_rest() -> None:
    optimizer = build_optimizer(
        "muon", {"lr": 0.1, "adam_lr": 0.01, "betas": [0.5, 1e-1]}, make_params((2, 2), (3,), ())
    )
    assert type(optimizer) is MuonWithAuxAdam
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (True, 0.1, 1),
        (False, 0.01, 2),
    ]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.1)


@pytest.mark.parametrize(
    ("name", "params", "pointers", "words"),
    [
        ("AdamW", {"lr": "auto", "weight_decay": "auto"}, ["lr", "weight_decay"], ["auto"]),
        ("AdamW", {"learning_rate": 1, "beta": 2}, ["learning_rate", "beta"], ["did you mean betas?", "accepted: lr,"]),
        ("SGD", {"lr": 0.1, "betas": [0.9, 0.9]}, ["betas"], ["SGD has no such parameter", "momentum"]),
        ("AdamW", {"max_grad_norm": 1.0}, ["max_grad_norm"], ['"gradient_clipping"']),
        ("AdamW", {"foreach": True}, ["foreach"], ["accepted"]),
        ("AdamW", {"amsgrad": True}, [""], ["amsgrad"]),
        ("Muon", {"nesterov": False}, ["nesterov"], ["Muon has no such parameter", "muon_lr"]),
        ("Muon", {"momentum": 2.0}, [""], ["momentum must be in [0, 1)"]),
        ("AdamW", {"lr": -1}, [""], ["lr"]),
        ("SGD", {"lr": "big"}, ["lr"], ["SGD takes a number, not str"]),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": "abc"}, ["dampening"], ["SGD takes a number, not str"]),
        ("SGD", {"lr": 0.1, "nesterov": "no"}, ["nesterov"], ["SGD takes true or false, not str"]),
    ],
)
def test_wrong_params(name: str, params: dict[str, Any], pointers: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, params, make_params())
    expected = [f"/optimizer/params/{key}" if key else "/optimizer/params" for key in pointers]
    assert [fault.pointer for fault in caught.value.faults] == expected
    for word in words:
        assert word in str(caught.value)


def test_every_offered_name_builds() -> None:
    names = optimizer_names()
    assert {"Adam", "AdamW", "Lion", "Adagrad", "SGD", "Adafactor", "Muon"} <= set(names)
    assert not {"LBFGS", "SparseAdam"} & set(names)
    for name in names:
        assert build_optimizer(name, {}, make_params((2, 2))).param_groups


def test_a_switch_without_effect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.build.warn_once", told.append)
    build_optimizer("AdamW", {"adam_w_mode": False}, make_params())
    assert len(told) == 1
    assert "adam_w_mode" in told[0]


def mup_like(impl: type[torch.optim.Optimizer]) -> Any:
    """As mup's functions: a group for each width, its rate divided by it."""

    def make(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        split = [
            {**group, "params": [p], "lr": options["lr"] / p.infshape} for group in groups for p in group["params"]
        ]
        return impl(split, **options)

    return make


@pytest.mark.parametrize(
    ("name", "impl"),
    [("MuAdam", torch.optim.Adam), ("muadamw", torch.optim.AdamW), ("MuSGD", torch.optim.SGD)],
)
def test_optimizers_of_mup(name: str, impl: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"comes from the package mup(.|\n)*pip install mup"):
        build_optimizer(name, {"lr": 0.1}, [{"params": list(model.parameters())}])
    functions = {key: mup_like(cls) for key, cls in (("MuAdam", torch.optim.Adam), ("MuSGD", torch.optim.SGD))}
    fake = types.SimpleNamespace(**functions, MuAdamW=mup_like(torch.optim.AdamW))
    monkeypatch.setitem(sys.modules, "mup", fake)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"2 parameters have no base shape(.|\n)*set_base_shapes"):
        build_optimizer(name, {"lr": 0.1}, [{"params": list(model.parameters())}])
    model.weight.infshape, model.bias.infshape = 4, 1  # type: ignore[assignment]
    optimizer = build_optimizer(name, {"lr": 0.1, "weight_decay": 0.5}, [{"params": list(model.parameters())}])
    assert type(optimizer) is impl
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]
    with pytest.raises(ConfigError, match="no such parameter"):
        build_optimizer(name, {"lr": 0.1, "width": 3}, [{"params": list(model.parameters())}])
    config = load_config({"train_batch_size": 1, "optimizer": {"type": name, "params": {"lr": 0.1}}}, world_size=1)
    assert config.warnings == ()
    with pytest.raises(ConfigError, match="takes no argument"):
        load_config({"train_batch_size": 1, "optimizer": {"type": name, "params": {"rate": 1}}}, world_size=1)
