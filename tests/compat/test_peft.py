"""PEFT: adapters train under the Trainer and plain accelerate as without DeepSpeed, and their files hold only them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoModelForCausalLM

from tests.compat.common import largest_difference, run_user_code
from tests.compat.peft_code import (
    STAGES,
    adalora_everywhere,
    assert_as_without_deepspeed,
    fit_and_resume,
    fit_everywhere,
    fit_quantized,
    load_adapter,
    merge_live,
    mixed_dtypes_everywhere,
    place,
    save_and_load_state,
    saved_adapter,
)

SLOW = pytest.mark.slow


def feature(name: str, pain: str = "") -> Any:
    return pytest.mark.feature("PEFT", name, pain=pain)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("lora", marks=feature("LoRA at every stage, numbers as without DeepSpeed", "P12")),
        pytest.param("modules_to_save", marks=[feature("`modules_to_save`", "P12"), SLOW]),
        pytest.param("dora", marks=[feature("DoRA"), SLOW]),
        pytest.param("lora on all linear layers, with dropout", marks=[feature('`"all-linear"`, dropout'), SLOW]),
        pytest.param("rslora", marks=[feature("rsLoRA"), SLOW]),
        pytest.param("target embeddings", marks=[feature("LoRA of the embedding"), SLOW]),
        pytest.param("trainable tokens", marks=[feature("`trainable_token_indices`"), SLOW]),
        pytest.param("ia3", marks=[feature("IA3"), SLOW]),
        pytest.param("prompt tuning", marks=[feature("prompt tuning"), SLOW]),
        pytest.param("p-tuning", marks=[feature("p-tuning"), SLOW]),
        pytest.param("prefix tuning", marks=[feature("prefix tuning"), SLOW]),
    ],
)
def test_adapters_train_and_save_as_without_deepspeed(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    logged = run_user_code(fit_everywhere, str(tiny_model), str(tmp_path), kind, STAGES)[0]
    assert_as_without_deepspeed(logged, tmp_path)


CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "input_gradients": True,
    "ddp_find_unused_parameters": False,  # DistributedDataParallel cannot do both
}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            CHECKPOINTING, marks=[feature("`gradient_checkpointing` with `enable_input_require_grads`"), SLOW]
        ),
        pytest.param({"gradient_checkpointing": True}, marks=[feature("`gradient_checkpointing`"), SLOW]),
        pytest.param({"model_first": True}, marks=[feature("base built before the arguments", "P15"), SLOW]),
        pytest.param({"gradient_accumulation_steps": 2}, marks=[feature("accumulation"), SLOW]),
    ],
    ids=["reentrant", "checkpointing", "model first", "accumulation"],
)
def test_lora_trains_as_without_deepspeed(tiny_model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    logged = run_user_code(fit_everywhere, str(tiny_model), str(tmp_path), "lora", STAGES, more)[0]
    assert_as_without_deepspeed(logged, tmp_path)


@feature("bf16 base with fp32 adapters, plain accelerate")
@pytest.mark.parametrize(("fused", "tolerance"), [(False, 1e-5), (True, 3e-4)])  # bf16 sums are rounded less often
def test_dtypes_of_base_and_adapters_may_differ(tiny_model: Path, fused: bool, tolerance: float) -> None:
    for losses in run_user_code(mixed_dtypes_everywhere, str(tiny_model), fused):
        plain = losses.pop(None)
        assert len(plain) == len(set(plain)) == 4
        assert all(ours == pytest.approx(plain, abs=tolerance) for ours in losses.values()), (plain, losses)


@feature("checkpoints hold only what trains, whole; `zero_to_fp32` of them", "P12 P17 P19")
@feature("a resumed run goes on exactly", "P12 P22")
def test_checkpoints_hold_the_adapter_only_and_resume_exactly(tiny_model: Path, tmp_path: Path) -> None:
    logged = run_user_code(fit_and_resume, str(tiny_model), str(tmp_path))[0]
    base = sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    for stage, (whole, resumed) in logged.items():
        assert resumed == whole, f"stage {stage}"
        checkpoint = place(tmp_path, stage) / "checkpoint-2"
        adapter = saved_adapter(checkpoint)
        numel = sum(value.numel() for value in adapter.values())
        assert len(adapter) == 8  # A and B of two projections in two layers
        assert all(value.numel() for value in adapter.values())
        assert (checkpoint / "adapter_model.safetensors").stat().st_size < 4 * numel + 2000
        # fp32 weights and two moments, some padding and the headers; the base alone would be more
        state = sum(path.stat().st_size for path in (checkpoint / "global_step2").glob("*.safetensors"))
        assert 12 * numel <= state < 12 * numel + 6000 < 4 * base
        manifest = json.loads((checkpoint / "global_step2" / "manifest.json").read_text())
        assert {name.replace(".default", "") for name in manifest["parameters"]} == set(adapter)
        assert not list(checkpoint.glob("model*.safetensors"))
        consolidated = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
        assert {name.replace(".default", "") for name in consolidated} == set(adapter)
        assert all(torch.equal(consolidated[n.replace(".weight", ".default.weight")], v) for n, v in adapter.items())


@feature("the adapter loads on the base alone", "P12 P19")
@feature("`merge_adapter`, `merge_and_unload` on gathered weights")
def test_merged_weights_of_a_live_run_are_those_of_the_saved_adapter(tiny_model: Path, tmp_path: Path) -> None:
    live = run_user_code(merge_live, str(tiny_model), str(tmp_path))[0]
    alone = load_adapter(tiny_model, tmp_path).merge_and_unload().state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert live.keys() == alone.keys() == base.keys()
    assert max(float((live[name] - alone[name]).abs().max()) for name in alone) <= 1e-6
    changed = {name for name in base if not torch.equal(base[name], alone[name])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qv"}


@feature("`save_state` and strict `load_state` without the frozen base", "P12 P17")
@pytest.mark.parametrize("stage", [pytest.param(2, marks=SLOW), 3])
def test_strict_load_of_a_state_without_frozen_weights(tiny_model: Path, tmp_path: Path, stage: int) -> None:
    for uninterrupted, resumed in run_user_code(save_and_load_state, str(tiny_model), str(tmp_path), stage):
        assert resumed == uninterrupted
    saved = json.loads((tmp_path / "pytorch_model" / "manifest.json").read_text())["parameters"]
    assert len(saved) == 8
    assert all("lora_" in name for name in saved)


@SLOW
@feature("two adapters, one trains; both are saved whole", "P12")
def test_the_adapter_that_does_not_train_is_saved_too(tiny_model: Path, tmp_path: Path) -> None:
    more = {"second_adapter": True}
    logged = run_user_code(fit_everywhere, str(tiny_model), str(tmp_path), "lora", (2, 3), more)[0]
    assert_as_without_deepspeed(logged, tmp_path)
    plain = saved_adapter(place(tmp_path, None) / "second")
    for stage in (2, 3):
        second = saved_adapter(place(tmp_path, stage) / "second")
        assert second.keys() == plain.keys()
        assert len(second) == 8
        assert all(torch.equal(second[name], plain[name]) for name in plain)
    both = load_adapter(tiny_model, place(tmp_path, 3))
    both.load_adapter(str(place(tmp_path, 3) / "second"), "second")
    assert set(both.peft_config) == {"default", "second"}


@feature("4- and 8-bit bases (bitsandbytes, torchao) at every stage; stage 3 shards 4-bit and torchao weights", "P38")
@pytest.mark.parametrize(
    "kind",
    [
        "bitsandbytes 4 bits",
        pytest.param("bitsandbytes 4 bits, bf16 storage", marks=SLOW),
        pytest.param("bitsandbytes 8 bits", marks=SLOW),
        "torchao int8",
    ],
)
def test_quantized_bases_train_as_without_deepspeed(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind.split()[0])  # neither is among the development tools: tests/engine/zero/test_packed.py is
    for found in run_user_code(fit_quantized, str(tiny_model), str(tmp_path), kind):
        plain, _ = found.get(None, found[0])
        adapter = saved_adapter(place(tmp_path, 0))
        assert plain[-1]["loss"] != plain[0]["loss"]
        for stage in STAGES:
            ours, held = found[stage]
            assert largest_difference(ours, plain) <= 1e-5, f"stage {stage}"
            saved = saved_adapter(place(tmp_path, stage))
            assert max(float((saved[name] - value).abs().max()) for name, value in adapter.items()) <= 1e-4
            assert (held == 0) == (stage == 3 and kind != "bitsandbytes 8 bits")


@SLOW
@feature("AdaLoRA in a loop of one's own (`safe_get_full_grad`), stages 0 to 2")
def test_adalora_allocates_as_without_deepspeed(tiny_model: Path) -> None:
    for losses in run_user_code(adalora_everywhere, str(tiny_model), (0, 1, 2)):
        plain = losses.pop(None)
        assert len(set(plain)) == 8
        assert all(ours == pytest.approx(plain, abs=1e-5) for ours in losses.values()), (plain, losses)
