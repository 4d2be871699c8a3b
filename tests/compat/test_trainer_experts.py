"""The Trainer and accelerate with divided experts: the logged numbers of whole ones, resuming, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from ds_hf.errors import DsHfError
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config, history, make_trainer, start_afresh
from tests.helpers.experts import loss_of


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, router_aux_loss_coef=0.5, max_position_embeddings=64))


def trained(folder: str, stage: int, size: int, resume: bool) -> dict[str, Any]:
    experts = {"expert_parallel": {"enabled": True, "autoep_size": size}} if size > 1 else {}
    trainer = make_trainer(
        folder,
        config(stage, **experts),
        trainer_arguments={"model": mixture()},
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    trainer.save_model(f"{folder}/model")
    rows = history(trainer)
    return {"rows": rows, "evaluated": trainer.evaluate()["eval_loss"]}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_trainer_logs_the_numbers_of_whole_experts(stage: int, tmp_path: Path) -> None:
    whole, divided = (
        run_user_code(trained, str(tmp_path / str(size)), stage, size, False, world_size=2)[0] for size in (1, 2)
    )
    for one, other in zip(divided["rows"], whole["rows"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert divided["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / str(size) / "model").state_dict() for size in (1, 2)]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)
    again = run_user_code(trained, str(tmp_path / "2"), stage, 2, True, world_size=2)[0]
    assert again["rows"][-1]["loss"] == divided["rows"][-1]["loss"]


def adapted(folder: str, stage: int, size: int, resume: bool, bits: int | None) -> list[dict[str, Any]]:
    """LoRA of attention and of the experts, which rest in blocks."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model = get_peft_model(mixture(), LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))
    more: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": size}}
    if bits is not None:
        more["weight_quantization"] = {"post_init_quant": {"experts": {"num_bits": bits}}}
    trainer = make_trainer(
        folder, config(stage, **more), trainer_arguments={"model": model}, save_strategy="steps", save_steps=2
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    trainer.save_model(f"{folder}/model")
    return history(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bits"), [(3, 4), (1, None)])
def test_the_trainer_saves_whole_adapters_of_divided_experts(stage: int, bits: int | None, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole, divided = (
        run_user_code(adapted, str(tmp_path / str(size)), stage, size, False, bits, world_size=2)[0] for size in (1, 2)
    )
    for one, other in zip(divided, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    first, second = (load_file(tmp_path / str(size) / "model" / "adapter_model.safetensors") for size in (1, 2))
    assert first.keys() == second.keys()
    assert len([name for name in first if ".experts." in name]) == 8
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-5)
    for size in (1, 2):  # resumed by this size and, from its files, by the other
        (tmp_path / f"from-{size}").symlink_to(tmp_path / str(size))
        again = run_user_code(adapted, str(tmp_path / f"from-{size}"), stage, 3 - size, True, bits, world_size=2)[0]
        assert again[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-5)


def exported(folder: str, stage: int) -> None:
    start_afresh()
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))
    engine = accelerator.prepare(mixture())  # at stage 3 under zero.Init
    accelerator.backward(loss_of(engine, torch.arange(3, 19).view(2, 8)))
    bare = accelerator.unwrap_model(engine)
    with pytest.raises(DsHfError, match="has, as if it were the whole"):
        bare.save_pretrained(f"{folder}/parts")
    engine.export_pretrained(f"{folder}/exported")
    state = accelerator.get_state_dict(engine)
    bare.save_pretrained(f"{folder}/saved", state_dict=state, is_main_process=accelerator.is_main_process)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_models_for_the_hub(stage: int, tmp_path: Path) -> None:
    run_user_code(exported, str(tmp_path), stage, world_size=2)
    found = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("exported", "saved")]
    own = mixture().state_dict()
    assert {name: value.shape for name, value in found[0].items()} == {n: v.shape for n, v in own.items()}
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
        assert not torch.equal(value, own[name]) or "norm" in name or "embed" in name
