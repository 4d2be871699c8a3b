"""User code that the Trainer tests share: a tiny model, counting sequences, one ``Trainer`` with or without DeepSpeed.

``fit`` is a user's script as a function; ``histories`` runs it without DeepSpeed and at every stage, one after another
in the same processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from tests.compat.common import AUTO_BATCH, largest_difference, steps
from tests.compat.scripts.trainer_script import Sentences

STAGES = (0, 1, 2, 3)
TOLERANCE = 5e-5 if torch.cuda.is_available() else 1e-5  # of losses near 5; sums on a GPU have no fixed order
# The Trainer without DeepSpeed, where the tests run.
PLAIN_ARGUMENTS: dict[str, Any] = {} if torch.cuda.is_available() else {"use_cpu": True, "ddp_backend": "gloo"}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "max_steps": 4,
    "seed": 3,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
}


def config(stage: int, **more: Any) -> dict[str, Any]:
    """The JSON of a stage, with ``zero={...}`` added to its ZeRO section and the rest to the top."""
    zero: dict[str, Any] = {"stage": stage, **more.pop("zero", {})}
    if stage == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    return {**AUTO_BATCH, "zero_optimization": zero, **more}


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """32 x 2 layers, a vocabulary of 128, the same weights on every call."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def start_afresh() -> None:
    """What the next script of a user would find: accelerate remembers its first settings for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def _own(deepspeed: Mapping[str, Any] | str) -> dict[str, Any] | str:
    return deepspeed if isinstance(deepspeed, str) else dict(deepspeed)


def arguments(folder: str | Path, deepspeed: Mapping[str, Any] | str | None = None, **more: Any) -> TrainingArguments:
    """TrainingArguments for a run in ``folder``."""
    start_afresh()
    place: dict[str, Any] = PLAIN_ARGUMENTS if deepspeed is None else {"deepspeed": _own(deepspeed)}
    kind = Seq2SeqTrainingArguments if "predict_with_generate" in more else TrainingArguments
    return kind(output_dir=str(folder), **{**ARGUMENTS, **place, **more})


def make_trainer(
    folder: str | Path,
    deepspeed: Mapping[str, Any] | str | None = None,
    *,
    samples: int = 60,
    trainer_class: type[Trainer] = Trainer,
    trainer_arguments: Mapping[str, Any] | None = None,
    **more: Any,
) -> Trainer:
    """A Trainer over ``samples`` sequences; ``trainer_arguments`` go to it, the rest to its TrainingArguments."""
    args = arguments(folder, deepspeed, **more)
    given: dict[str, Any] = {
        "train_dataset": Sentences(samples, seed=1),
        "eval_dataset": Sentences(12, seed=2),
        **(trainer_arguments or {}),
    }
    if "model" not in given and "model_init" not in given:
        given["model"] = tiny_llama()
    return trainer_class(args=args, **given)


def history(trainer: Trainer) -> list[dict[str, float]]:
    """Logged numbers of each step and evaluation."""
    return steps({"history": trainer.state.log_history})


def fit(folder: str | Path, deepspeed: Mapping[str, Any] | str | None = None, **more: Any) -> list[dict[str, float]]:
    """Train and return what was logged."""
    trainer = make_trainer(folder, deepspeed, **more)
    trainer.train()
    return history(trainer)


def histories(
    folder: str | Path, stages: Sequence[int] = STAGES, more: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, float]], dict[int, list[dict[str, float]]]]:
    """What was logged without DeepSpeed, and at each stage."""
    plain = fit(folder, **(more or {}))
    return plain, {stage: fit(folder, config(stage), **(more or {})) for stage in stages}


def assert_equal_histories(result: Any, tolerance: float = TOLERANCE) -> None:
    """Every stage logged what the run without DeepSpeed did."""
    plain, by_stage = result
    assert plain
    for stage, ours in by_stage.items():
        assert largest_difference(ours, plain) <= tolerance, f"stage {stage}: {ours} instead of {plain}"
