"""LoRA on the experts' own parameters (PEFT's ``target_parameters``), through the engine: against plain PEFT on one
process, at all stages, divided and not; adapters that are switched while training; and what is saved and loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hf
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import ConfigError, DsHfError
from tests.contract.test_expert_parallel import CLIP, EPS, config, farthest, run
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import batches_of, build, loss_of

STEPS = 4
NEAR = 1e-9  # of fp64
KIND = "qwen3_moe"


def adapted(dtype: torch.dtype, kind: str = KIND, **lora: Any) -> Any:
    """A model with two adapters, the same on all processes; the first one is active."""
    from peft import LoraConfig, get_peft_model

    targets = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    options = {"target_modules": ["q_proj"], "target_parameters": targets, **lora}
    model: Any = build(kind, experts="eager" if dtype is torch.float64 else "grouped_mm").to(dtype)
    model = get_peft_model(model, LoraConfig(**{"r": 3, **options}), autocast_adapter_dtype=False)
    model.add_adapter("other", LoraConfig(**{**options, "r": 4, "use_rslora": True}), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def switched(model: Any, step: int) -> None:
    """The adapters of a step: one, the other, both."""
    model.base_model.set_adapter((["default"], ["default"], ["other"], ["default", "other"])[step])


@functools.cache
def reference(dtype: torch.dtype, accumulation: int, data: int, kind: str = KIND, switches: bool = False) -> Any:
    """Plain PEFT on one process."""
    model = adapted(dtype, kind)
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora_" in n], **EPS)
    losses, norms = [], []
    for step, batches in enumerate(batches_of(STEPS, accumulation, data)):
        if switches:
            switched(model, step)
        for ids in batches:
            loss = loss_of(model, ids)
            losses.append(float(loss))
            (loss / len(batches)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def train(dtype: torch.dtype, size: int, stage: int, accumulation: int, kind: str = KIND, **more: Any) -> Any:
    torch.set_num_threads(1)
    model, content = adapted(dtype, kind), config(size or 1, stage, accumulation, **more)
    if not size:
        del content["expert_parallel"]  # PEFT's own way
    engine, *_ = ds_hf.initialize(model=model, config=content)
    found = run(engine, accumulation, STEPS)
    found["weights"] = {name: value.cpu() for name, value in engine.named_weights()}
    found["whole"] = consolidated_state_dict(engine, exclude_frozen_parameters=True)
    found["cut"] = [name for name, param in model.named_parameters() if cut_of(param) is not None]
    engine.destroy()
    return found


def check(found: Any, rank: int, world: int, wanted: Any, near: float, accumulation: int) -> None:
    losses = wanted["losses"][rank::world]
    assert found["losses"] == pytest.approx(losses, rel=near)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=max(near, 1e-6))
    assert farthest(found["weights"], wanted["weights"]) < near
    if rank == 0:
        assert farthest(found["whole"], {n: v for n, v in wanted["weights"].items() if "lora_" in n}) < near


def cells(dtype: torch.dtype, size: int, each: list[tuple[int, int]], kind: str) -> list[Any]:
    return [train(dtype, size, stage, accumulation, kind) for stage, accumulation in each]


@pytest.mark.parametrize(
    ("world", "size", "dtype", "each", "kind"),
    [
        (2, 2, torch.float32, [(1, 1), (3, 2)], "qwen3_moe"),
        pytest.param(2, 0, torch.float32, [(3, 1)], "qwen3_moe", marks=pytest.mark.slow),
        pytest.param(2, 2, torch.float32, [(0, 2), (2, 1)], "qwen3_moe", marks=pytest.mark.slow),
        pytest.param(2, 1, torch.float32, [(1, 2), (3, 1)], "qwen3_moe", marks=pytest.mark.slow),
        pytest.param(4, 2, torch.float64, [(1, 1), (3, 2)], "gpt_oss", marks=pytest.mark.slow),
        pytest.param(4, 4, torch.float64, [(0, 1), (2, 2), (3, 1)], "mixtral", marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_peft_does(
    world: int, size: int, dtype: torch.dtype, each: list[tuple[int, int]], kind: str
) -> None:
    ranks = run_distributed(cells, world, dtype, size, each, kind, timeout=200)
    for index, (_, accumulation) in enumerate(each):
        wanted = reference(dtype, accumulation, world, kind)
        for rank, found in enumerate(ranks):
            check(found[index], rank, world, wanted, NEAR if dtype is torch.float64 else 1e-5, accumulation)
            assert any("lora_A.default" in name for name in found[index]["cut"]) == (size > 1)


# -- adapters that change, checkpoints ---------------------------------------------------------------------------------


def switching(size: int, stage: int, recomputes: bool) -> Any:
    """Steps with one adapter, the other, and both; in between one without any, and a merge that is undone."""
    torch.set_num_threads(1)
    model = adapted(torch.float64)
    if recomputes:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage))
    losses, norms = [], []
    for step, batches in enumerate(batches_of(STEPS, 1, dist.get_world_size())):
        switched(model, step)
        ids = batches[dist.get_rank()].to(engine.device)
        with torch.no_grad():
            before = loss_of(engine, ids)
            with model.disable_adapter():
                assert not torch.equal(loss_of(engine, ids), before)
            if stage < 3:
                model.merge_adapter()
                assert float(loss_of(engine, ids)) == pytest.approx(float(before), rel=1e-9)
                model.unmerge_adapter()
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
    return {"losses": losses, "norms": norms, "weights": {n: v.cpu() for n, v in engine.named_weights()}}


@pytest.mark.parametrize(
    ("size", "stage", "recomputes"),
    [(2, 3, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, True), (1, 3, False)))],
)
def test_adapters_are_switched_while_training(size: int, stage: int, recomputes: bool) -> None:
    wanted = reference(torch.float64, 1, 2, switches=True)
    for rank, found in enumerate(run_distributed(switching, 2, size, stage, recomputes, timeout=100)):
        assert found["losses"] == pytest.approx(wanted["losses"][rank::2], rel=NEAR)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert farthest(found["weights"], wanted["weights"]) < 1e-6  # merging rounds


def saved(folder: str, size: int, stage: int) -> Any:
    torch.set_num_threads(1)
    model = adapted(torch.float64)
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage))
    run(engine, steps=2)
    engine.save_checkpoint(folder, "saved")
    state = consolidated_state_dict(engine, exclude_frozen_parameters=True)
    if state is not None:
        model.save_pretrained(folder, state_dict=state)
    return {"next": run(engine, steps=1, first=2)["losses"], "state": state}


def loaded(folder: str, size: int, stage: int) -> Any:
    torch.set_num_threads(1)
    model = adapted(torch.float64)
    for name, param in model.named_parameters():
        if "lora_" in name:
            nn.init.zeros_(param)
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage))
    engine.load_checkpoint(folder, "saved")
    state = consolidated_state_dict(engine, exclude_frozen_parameters=True)
    return {"next": run(engine, steps=1, first=2)["losses"], "state": state}


@pytest.mark.parametrize("source", [(2, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_any_division_loads_what_any_other_saved(source: tuple[int, int], tmp_path: Path) -> None:
    from peft import PeftModel

    wanted = run_distributed(saved, 2, str(tmp_path), *source, timeout=100)
    for size, stage in ((1, 1), (2, 0), (2, 3)):
        found = run_distributed(loaded, 2, str(tmp_path), size, stage, timeout=100)
        for one, other in zip(found, wanted, strict=True):
            assert one["next"] == pytest.approx(other["next"], rel=1e-9)
        assert all(torch.equal(found[0]["state"][name], value) for name, value in wanted[0]["state"].items())
    plain = PeftModel.from_pretrained(build("qwen3_moe").double(), tmp_path, torch_dtype=torch.float64)
    states: dict[str, Tensor] = {n: p for n, p in plain.named_parameters() if "lora_" in n}
    assert states
    for name, value in states.items():
        torch.testing.assert_close(value.double(), wanted[0]["state"][name])


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused() -> list[str]:
    """What is said of an adapter of biases, and of one that comes after the experts were divided."""
    biased = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj_bias"]
    with pytest.raises(ConfigError) as first:
        ds_hf.initialize(model=adapted(torch.float32, "gpt_oss", target_parameters=biased), config=config(2, 1))
    model = adapted(torch.float32)
    engine, *_ = ds_hf.initialize(model=model, config=config(2, 1))
    engine.destroy()
    with pytest.raises(DsHfError) as second:
        model.add_adapter("third", model.peft_config["default"])
    with pytest.raises(ConfigError) as third:
        ds_hf.initialize(model=model, config=config(2, 1))
    return [str(first.value), str(second.value), str(third.value)]


def test_what_cannot_be() -> None:
    for biased, came, later in run_distributed(refused, 2, timeout=60):
        assert "adapts down_proj_bias, and only LoRA of the experts' stacked weights" in biased
        assert "the adapter 'third' came to model.layers.0.mlp.experts, which processes divide" in came
        assert "the adapter third was added to" in later
