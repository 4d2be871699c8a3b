"""TRL: its trainers and its own ``sft`` script train at stages 2 and 3 as without DeepSpeed, whole models and LoRA."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.compat.common import (
    AUTO_BATCH,
    PLAIN,
    WORLD,
    largest_difference,
    run_user_code,
    save_tiny_model,
    write_json,
)
from tests.compat.trainer_code import config
from tests.compat.trl_code import chunked, fit, fit_everywhere, forced, prepare, run_sft
from tests.helpers.distributed import run_torchrun

SLOW = pytest.mark.slow
TOLERANCE = 1e-5


def feature(name: str, pain: str = "") -> Any:
    return pytest.mark.feature("TRL", name, pain=pain)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and data."""
    return prepare(save_tiny_model(tmp_path_factory.mktemp("trl_model")))


FULL_AND_LORA = pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])


def check(
    logged: dict[int | None, list[dict[str, float]]], folder: Path, lora: bool, tolerance: float = TOLERANCE
) -> None:
    """The numbers of every stage are those without DeepSpeed, and the saved tensors too."""
    plain = logged.pop(None)
    assert len(plain) == 2
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    expected = load_file(folder / "None" / file)
    for stage, ours in logged.items():
        assert largest_difference(ours, plain) <= tolerance, f"stage {stage}: {ours} instead of {plain}"
        saved = load_file(folder / str(stage) / file)
        assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in expected.items()}
        worst = max(float((saved[name] - value).abs().max()) for name, value in expected.items())
        assert worst <= 10 * TOLERANCE, f"stage {stage}"


@feature("`SFTTrainer` at stages 2 and 3, full and LoRA")
@pytest.mark.parametrize("lora", [pytest.param(False, marks=SLOW), True], ids=["full", "lora"])
def test_sft_trainer(model: Path, tmp_path: Path, lora: bool) -> None:
    check(run_user_code(fit_everywhere, "sft", str(model), str(tmp_path), (2, 3), lora)[0], tmp_path, lora)


@feature(
    "`SFTTrainer` with LoRA under a large frozen head: no product of the head is computed twice after the first step"
)
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=SLOW)])
def test_logits_that_are_read(model: Path, tmp_path: Path, stage: int) -> None:
    ours, plain, chunked_losses, made = run_user_code(chunked, str(model), str(tmp_path), stage)[0]
    assert chunked_losses == made <= 1  # TRL read logits in each step once; 1.16 has a loss of its own, and reads none
    assert len(ours) == 2
    assert largest_difference(ours, plain) <= TOLERANCE


@feature("what TRL forces on adapters at stage 3 is undone: reentrant checkpointing, 16-bit adapters without masters")
@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=SLOW)])
def test_what_is_forced_is_undone(model: Path, tmp_path: Path, keep: bool) -> None:
    for reentrant, dtypes, losses in run_user_code(forced, str(model), str(tmp_path), keep):
        assert keep or reentrant == {False}  # transformers 5.23 does not hear of what TRL asks for, others do
        assert dtypes == {torch.bfloat16 if keep else torch.float32}
        assert len(losses) == 2


def shared_layers(model: str, folder: str, tensor: int) -> list[dict[str, float]]:
    """What is logged with so many processes to a layer, all of which read the same samples."""
    deepspeed = config(1, tensor_parallel={"autotp_size": tensor}) if tensor > 1 else None
    return fit("sft", model, f"{folder}/{tensor}", deepspeed, False, {})


@SLOW
@feature("`SFTTrainer` with `tensor_parallel.autotp_size`: it looks at the logits of a training step")
def test_sft_over_shared_layers(model: Path, tmp_path: Path) -> None:
    plain = run_user_code(shared_layers, str(model), str(tmp_path), 1, world_size=1)[0]
    assert len(plain) == 2
    assert all("entropy" in row for row in plain)
    for found in run_user_code(shared_layers, str(model), str(tmp_path), 2, world_size=2):
        assert largest_difference(found, plain) <= 1e-4


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("dpo", {}, marks=feature("`DPOTrainer` with its reference model")),
        pytest.param(
            "dpo", {"precompute_ref_log_probs": True}, marks=feature("`DPOTrainer(precompute_ref_log_probs=True)`")
        ),
        pytest.param("reward", {}, marks=feature("`RewardTrainer`")),
        pytest.param("grpo", {}, marks=feature("`GRPOTrainer`: generation, reference model", pain="P11")),
        pytest.param(
            "grpo",
            {"ds3_gather_for_generation": False},
            marks=feature("`GRPOTrainer(ds3_gather_for_generation=False)`", pain="P11"),
        ),
    ],
    ids=["dpo", "dpo-precomputed", "reward", "grpo", "grpo-layerwise"],
)
@FULL_AND_LORA
@SLOW
def test_other_trainers(model: Path, tmp_path: Path, kind: str, more: dict[str, Any], lora: bool) -> None:
    logged = run_user_code(fit_everywhere, kind, str(model), str(tmp_path), (2, 3), lora, more)[0]
    check(logged, tmp_path, lora)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gkd", marks=feature("`GKDTrainer`: two engines, the student's own answers and the data's")),
        pytest.param("distillation", marks=feature("`DistillationTrainer`: two engines, the student's own answers")),
    ],
)
@FULL_AND_LORA
@SLOW
def test_distillation(model: Path, tmp_path: Path, kind: str, lora: bool) -> None:
    check(run_user_code(fit_everywhere, kind, str(model), str(tmp_path), (0, 2, 3), lora)[0], tmp_path, lora)


@feature("`OnlineDPOTrainer`: generation, reference model", pain="P11")
@FULL_AND_LORA
@SLOW
def test_online_dpo(model: Path, tmp_path: Path, lora: bool) -> None:
    check(run_user_code(fit_everywhere, "online_dpo", str(model), str(tmp_path), (2, 3), lora)[0], tmp_path, lora)


@pytest.fixture(scope="module")
def large_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose head, of 2 ** 21 elements, is a unit of its own; TRL's losses read its weight and never call it."""
    return prepare(save_tiny_model(tmp_path_factory.mktemp("large_head"), vocabulary=65536))


@feature("`SFTTrainer`, `DPOTrainer`, `GRPOTrainer`, `DistillationTrainer` with a large untied head, which losses read")
@pytest.mark.parametrize(
    ("kind", "lora", "stages", "more"),
    [
        pytest.param("sft", False, [3], {}, id="sft", marks=SLOW),
        pytest.param("sft", True, [3], {"gradient_checkpointing": False}, id="sft-lora", marks=SLOW),
        pytest.param("dpo", False, [2, 3], {}, id="dpo", marks=SLOW),
        pytest.param("dpo", True, [3], {}, id="dpo-lora", marks=SLOW),
        pytest.param("grpo", False, [3], {}, id="grpo", marks=SLOW),
        pytest.param("gkd", False, [3], {}, id="gkd", marks=SLOW),
        pytest.param("distillation", False, [3], {}, id="distillation", marks=SLOW),
        pytest.param("distillation", True, [3], {}, id="distillation-lora", marks=SLOW),
    ],
)
def test_large_head(
    large_head: Path, tmp_path: Path, kind: str, lora: bool, stages: list[int], more: dict[str, Any]
) -> None:
    logged = run_user_code(fit_everywhere, kind, str(large_head), str(tmp_path), stages, lora, more)[0]
    check(logged, tmp_path, lora, tolerance=5e-5)  # torch's norm adds two million squares up in fp32


def sft_arguments(model: Path, folder: Path, *more: str) -> list[str]:
    """Arguments of the script."""
    arguments = (
        f"--model_name_or_path={model} --dataset_name={model / 'sft'} --output_dir={folder} "
        "--per_device_train_batch_size=2 --gradient_accumulation_steps=2 --max_steps=3 --learning_rate=1e-2 "
        "--logging_steps=1 --report_to=none --disable_tqdm=True --save_steps=3 --bf16=False --dtype=float32 --seed=3"
    ).split()
    return [*arguments, *more]


def sft_logged(folder: Path) -> list[dict[str, float]]:
    """What the script logged."""
    history = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    rows = [{key: row[key] for key in ("loss", "grad_norm", "learning_rate") if key in row} for row in history]
    return [row for row in rows if "loss" in row]


@SLOW
@pytest.mark.timeout(300)
@feature("TRL's own `sft` script under torchrun, full and `--use_peft`")
@pytest.mark.parametrize(
    ("stage", "lora"),
    [
        (2, False),
        (2, True),
        (3, False),
        (3, True),
    ],
)
def test_sft_script(model: Path, tmp_path: Path, stage: int, lora: bool) -> None:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    ds = write_json(tmp_path / "ds.json", {**AUTO_BATCH, "zero_optimization": zero})
    peft = ("--use_peft", "--lora_r=4", "--lora_target_modules", "q_proj", "v_proj") if lora else ()
    package = importlib.util.find_spec("trl")
    assert package is not None
    assert package.submodule_search_locations is not None
    script = Path(package.submodule_search_locations[0]) / "scripts" / "sft.py"
    arguments = sft_arguments(model, tmp_path / "ours", f"--deepspeed={ds}", *peft)
    run_torchrun(script, *arguments, world_size=WORLD, timeout=110)
    run_user_code(run_sft, sft_arguments(model, tmp_path / "plain", *PLAIN, *peft))
    ours, plain = sft_logged(tmp_path / "ours"), sft_logged(tmp_path / "plain")
    assert len(ours) == 3
    assert largest_difference(ours, plain) <= TOLERANCE
    if lora:
        saved = load_file(tmp_path / "ours" / "adapter_model.safetensors")
        assert len(saved) == 8
        assert all("lora_" in name and value.numel() for name, value in saved.items())
    else:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
        for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict().items():
            assert torch.allclose(value, theirs[name], atol=10 * TOLERANCE), name
