"""Frozen experts that rest in 4 or 8 bits while adapters train, through the engine: against plain PEFT on one process
with the rounded weights, at all stages, divided and not; what rests, what is kept for backward, and what is saved."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_hf
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict
from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.modules.quantized.layers import is_quantized, values_of_blocks
from ds_hf.engine.modules.quantized.stacks import quantize_experts
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import CheckpointError, ConfigError, DsHfError
from tests.contract.test_expert_adapters import CLIP, EPS, adapted
from tests.contract.test_expert_parallel import config, farthest, run
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import batches_of, build, loss_of, section

STEPS = 2
NEAR = 1e-9  # of fp64
FOUR = {"weight_quantization": {"post_init_quant": {"experts": {"num_bits": 4}}}}


def rounded(kind: str) -> Any:
    """The model with the weights that blocks of 4 bits stand for."""
    model, blocks = adapted(torch.float64, kind), adapted(torch.float64, kind)
    quantize_experts(blocks, lambda name, module: WeightFormat(4), ExpertParallelSection())
    readable = values_of_blocks(blocks)
    for param, other in zip(model.parameters(), blocks.parameters(), strict=True):
        param.data.copy_(readable(other, other))
    return model


@functools.cache
def reference(kind: str, accumulation: int, data: int) -> dict[str, Any]:
    """Plain PEFT on one process."""
    model = rounded(kind)
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora_" in n], **EPS)
    losses, norms = [], []
    for batches in batches_of(STEPS, accumulation, data):
        for ids in batches:
            loss = loss_of(model, ids)
            losses.append(loss.item())
            (loss / len(batches)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def prepared(kind: str, size: int | None, stage: int, accumulation: int = 1, **more: Any) -> Any:
    torch.set_num_threads(1)
    content = config(size or 1, stage, accumulation, **{**FOUR, **more})
    if size is None:
        del content["expert_parallel"]
    return ds_hf.initialize(model=adapted(torch.float64, kind), config=content)[0]


def cells(kind: str, each: list[tuple[int | None, int, int]]) -> list[Any]:
    found = []
    for size, stage, accumulation in each:
        engine = prepared(kind, size, stage, accumulation)
        if stage == 3:
            engine.module.enable_input_require_grads()
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        packed = [p for p in engine.module.parameters() if is_packed(p)]
        assert len(packed) == 4
        found.append(run(engine, accumulation, STEPS))
        found[-1]["weights"] = {name: value.cpu() for name, value in engine.named_weights()}
        found[-1]["whole"] = consolidated_state_dict(engine) or {}
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "kind", "each"),
    [
        (2, "mixtral", [(2, 1, 2), (1, 3, 1), (2, 3, 1)]),
        pytest.param(2, "gpt_oss", [(None, 0, 1), (None, 3, 2), (2, 2, 1), (2, 0, 1)], marks=pytest.mark.slow),
        pytest.param(4, "qwen3_moe", [(2, 1, 1), (2, 3, 2), (4, 3, 1)], marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_peft_does_on_rounded_weights(world: int, kind: str, each: list[Any]) -> None:
    ranks = run_distributed(cells, world, kind, each, timeout=200)
    for index, (_, _, accumulation) in enumerate(each):
        wanted = reference(kind, accumulation, world)
        for rank, found in enumerate(ranks):
            one = found[index]
            assert one["losses"] == pytest.approx(wanted["losses"][rank::world], rel=NEAR)
            assert one["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
            assert farthest(one["weights"], wanted["weights"]) < NEAR
            assert rank or farthest(one["whole"], wanted["weights"]) < NEAR


# -- 16 bits, memory ---------------------------------------------------------------------------------------------------


def narrow(size: int, stage: int, compile: str | bool) -> Any:
    """Losses, the bytes of experts that rest here, and the largest tensor that a forward keeps."""
    torch.set_num_threads(1)
    model = adapted(torch.bfloat16, "mixtral")
    more = {"bf16": {"enabled": True}, "ds_hf": {"compile": compile}, **FOUR}
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage, **more))
    buffers = {id(b): b for unit in engine.units for b in unit.buffers if b.dtype is torch.uint8}
    resting = sum(b.shard.numel() for b in buffers.values())
    if stage < 3:
        resting = sum(p.nbytes for p in model.parameters() if is_packed(p))
    losses = run(engine, steps=STEPS)["losses"]
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.dtype is not torch.uint8:
            kept.append(tensor.numel() if tensor.dtype is not torch.int8 else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(engine, batches_of(1, 1, 1)[0][0].to(engine.device))
    engine.destroy()
    return {"losses": losses, "resting": resting, "kept": max(kept)}


@pytest.mark.parametrize(
    ("size", "stage", "compile"), [(1, 3, False), pytest.param(2, 2, "blocks", marks=pytest.mark.slow)]
)
def test_what_rests_and_what_is_kept(size: int, stage: int, compile: Any) -> None:
    found = run_distributed(narrow, 2, size, stage, compile, timeout=200)
    experts = [p for n, p in build("mixtral").named_parameters() if ".experts." in n]
    wanted = reference("mixtral", 1, 2)
    for rank, each in enumerate(found):
        assert each["losses"] == pytest.approx(wanted["losses"][rank::2], rel=0.05)
        # rows of 32 and 48 numbers, each with a scale of 4 bytes: at most 5/8 of a byte an element, rounded up
        share = 2 if size == 2 or stage == 3 else 1
        assert each["resting"] <= sum(p.numel() for p in experts) * 0.63 / share
        assert each["kept"] < min(p.numel() for p in experts)


def evaluated(mesh: dict[str, Any], stage: int) -> Any:
    """Of an engine without an optimizer (ZeRO-Inference): what it gives, and what its blocks stand for."""
    torch.set_num_threads(1)
    content = {name: value for name, value in config(2, stage, **FOUR).items() if name not in ("optimizer", *MESHES)}
    if stage == 3:
        content["zero_optimization"]["offload_param"] = {"device": "cpu"}
    model = build("mixtral").double()
    engine, *_ = ds_hf.initialize(model=model, config={**content, **mesh})
    assert [p.dtype for n, p in model.named_parameters() if ".experts." in n] == [torch.int8] * 4
    with torch.no_grad():
        logits = engine(input_ids=batches_of(1, 1, 1)[0][0].to(engine.device), use_cache=False).logits
    found = logits.cpu(), {name: value.cpu() for name, value in engine.named_weights()}
    engine.destroy()
    return found


MESHES = ("expert_parallel", "tensor_parallel")


@pytest.mark.parametrize(
    ("mesh", "stage"), [({"expert_parallel": section(2)}, 3), ({"tensor_parallel": {"autotp_size": 2}}, 0)]
)
def test_without_an_optimizer(mesh: dict[str, Any], stage: int) -> None:
    plain = build("mixtral").double()
    blocks = build("mixtral").double()
    quantize_experts(blocks, lambda name, module: WeightFormat(4), ExpertParallelSection(), trains=False)
    readable = values_of_blocks(blocks)
    for logits, weights in run_distributed(evaluated, 2, mesh, stage, timeout=60):
        if "expert_parallel" in mesh:  # parts of matrices have blocks of their own
            assert all(torch.equal(weights[name], readable(p, p)) for name, p in blocks.named_parameters())
        plain.load_state_dict(weights)
        wanted = plain(input_ids=batches_of(1, 1, 1)[0][0], use_cache=False).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-9)


# -- files -------------------------------------------------------------------------------------------------------------


def saved(folder: str) -> Any:
    engine = prepared("qwen3_moe", 2, 3)
    run(engine, steps=1)
    engine.save_checkpoint(folder, "saved")
    with pytest.raises(CheckpointError, match=r"save_16bit_model\(\) writes what they stand for"):
        engine.export_pretrained(folder)
    whole = consolidated_state_dict(engine)
    return {"whole": whole, "next": run(engine, steps=1, first=1)["losses"]}


def loaded(folder: str, size: int, stage: int) -> Any:
    torch.set_num_threads(1)
    model = adapted(torch.float64, "qwen3_moe")
    for param in model.parameters():
        nn.init.zeros_(param)
    engine, *_ = ds_hf.initialize(model=model, config=config(size, stage, **FOUR))
    engine.load_checkpoint(folder, "saved")
    found: dict[str, Any] = {"whole": consolidated_state_dict(engine)}
    bare = {name: value.clone() for name, value in model.state_dict().items()}
    found["next"] = run(engine, steps=1, first=1)["losses"]
    engine.destroy()
    other = {"weight_quantization": {"post_init_quant": {"experts": {"num_bits": 4, "group_size": 128}}}}
    engine, *_ = ds_hf.initialize(model=adapted(torch.float64, "qwen3_moe"), config=config(size, stage, **other))
    with pytest.raises(CheckpointError, match=r"'group_size': 64.*and here it is in blocks of.*'group_size': 128"):
        engine.load_checkpoint(folder, "saved")
    if size == 1 and stage < 3:
        found["bare"] = bare
    return found


def test_any_division_loads_what_any_other_saved(tmp_path: Path) -> None:
    wanted = run_distributed(saved, 2, str(tmp_path), timeout=100)
    values = dict(rounded("qwen3_moe").named_parameters())
    with pytest.raises(CheckpointError, match=r"blocks of 8 or 4 bits, and not weights"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "saved")
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "saved", exclude_frozen_parameters=True)
    assert any("experts.base_layer.lora_B.default" in name for name in trained)
    for size, stage in ((1, 1), (2, 2)):
        found = run_distributed(loaded, 2, str(tmp_path), size, stage, timeout=100)
        for one, other in zip(found, wanted, strict=True):
            assert one["next"] == pytest.approx(other["next"], rel=1e-9)
        for name, value in wanted[0]["whole"].items():
            assert torch.equal(found[0]["whole"][name], value)
            assert ".experts." not in name or "lora_" in name or torch.equal(value, values[name])
            assert size == 2 or torch.equal(found[0]["bare"][name], value)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused() -> dict[str, str]:
    said = {}

    def told(model: Any, **more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            ds_hf.initialize(model=model, config=config(1, 1, **{**FOUR, **more}))
        return str(error.value)

    trains = adapted(torch.float32, "mixtral")
    for name, param in trains.named_parameters():
        param.requires_grad_(param.requires_grad or name.endswith("gate_up_proj"))
    said["trains"] = told(trains)
    said["all"] = told(build("mixtral"))
    nothing = {"weight_quantization": {"post_init_quant": {"expertz": {"num_bits": 4}}}}
    said["name"] = told(adapted(torch.float32, "mixtral"), **nothing)
    model = adapted(torch.float32, "mixtral")
    engine, *_ = ds_hf.initialize(model=model, config=config(1, 1, **FOUR))
    with pytest.raises(DsHfError) as error:
        model.merge_adapter()
    said["merge"] = str(error.value)
    engine.destroy()
    again, *_ = ds_hf.initialize(model=model, config=config(1, 1, **FOUR))  # in blocks already
    assert any(is_quantized(module) for module in model.modules())
    run(again, steps=1)
    return said


def test_what_cannot_be() -> None:
    (said,) = run_distributed(refused, 1, timeout=60)
    assert "gate_up_proj is to rest in 8 or 4 bits, and it trains" in said["trains"]
    assert "trains all of them" in said["all"]
    assert "expertz" in said["name"]
    assert "cannot be merged: its base is kept in 8 or 4 bits" in said["merge"]


def all_of_it() -> Any:
    """``zero_quantized_nontrainable_weights`` takes experts too; named ones have the bits that are given."""
    more = {"zero_optimization": {"stage": 2, "zero_quantized_nontrainable_weights": True}}
    engine = prepared("mixtral", None, 2, **more)
    experts = [p for n, p in engine.module.named_parameters() if ".experts." in n and is_packed(p)]
    others = [p for n, p in engine.module.named_parameters() if ".experts." not in n and is_packed(p)]
    losses = run(engine, steps=STEPS)["losses"]
    assert dist.get_world_size() == 1
    return {"bits": [sum(p.numel() for p in group) for group in (experts, others)], "losses": losses}


def test_beside_other_frozen_weights() -> None:
    (found,) = run_distributed(all_of_it, 1, timeout=60)
    named = list(build("mixtral").named_parameters())
    experts = sum(p.numel() for n, p in named if ".experts." in n)
    assert found["bits"][0] < 0.63 * experts
    assert found["bits"][1] > 0
    assert found["losses"] == pytest.approx(reference("mixtral", 1, 1)["losses"], rel=0.2)
