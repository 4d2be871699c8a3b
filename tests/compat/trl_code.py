"""User code that the TRL tests share: trainers on a tiny Llama with a tokenizer of a hundred words.

``fit`` is a user's script as a function; ``fit_everywhere`` runs it without DeepSpeed and at the given stages, one
after another in the same processes.
"""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl
from datasets import load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.scripts import sft

from ds_hf.engine.modules.tiling import models as room
from ds_hf.engine.modules.tiling.logits import DeferredHead, DeferredLogits
from tests.compat.trainer_code import PLAIN_ARGUMENTS, config, start_afresh

WORDS = 100
MODEL_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
NUMBERS = ("loss", "grad_norm", "learning_rate", "reward", "rewards/margins", "kl", "entropy", "objective/scores")


def save_tokenizer(folder: Path) -> None:
    """Words w0 ... w99, with a template for conversations."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(WORDS))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def save_data(folder: Path, columns: Sequence[str], count: int = 32) -> Path:
    """A folder with one JSON file of counting sentences, as ``load_dataset(folder)`` takes it."""
    generator = random.Random(0)

    def sentence() -> str:
        start, length = generator.randrange(WORDS), generator.randrange(5, 9)
        return " ".join(f"w{(start + index) % WORDS}" for index in range(length))

    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{column: sentence() for column in columns} for _ in range(count)]
    if tuple(columns) == ("user", "assistant"):  # what a conversation is made of
        rows = [{"messages": [{"role": role, "content": text} for role, text in row.items()]} for row in rows]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def distinct_words(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward of a completion."""
    return [float(len(set(completion.split()))) for completion in completions]


TRAINERS: dict[str, tuple[Any, Any, tuple[str, ...], dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, ("text",), {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, ("prompt", "chosen", "rejected"), {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, ("chosen", "rejected"), {}),
    "grpo": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        ("prompt",),
        {"num_generations": 2, "max_completion_length": 6, "beta": 0.1},
    ),
    "online_dpo": (
        OnlineDPOTrainer,
        OnlineDPOConfig,
        ("prompt",),
        {"max_new_tokens": 6, "beta": 0.1, "model_init_kwargs": {"device_map": None}},
    ),
    "gkd": (GKDTrainer, GKDConfig, ("user", "assistant"), {"max_new_tokens": 6, "max_length": 32, "lmbda": 0.5}),
    "distillation": (trl.DistillationTrainer, trl.DistillationConfig, ("prompt",), {"max_completion_length": 6}),
}
TAUGHT = ("gkd", "distillation")  # these have a teacher, of three layers and another width


def fit(
    kind: str, model: str, folder: str, deepspeed: Mapping[str, Any] | None, lora: bool, more: Mapping[str, Any]
) -> list[dict[str, float]]:
    """Train with TRL, save, and return what was logged."""
    start_afresh()
    trainer_class, config_class, _, own = TRAINERS[kind]
    place: dict[str, Any] = PLAIN_ARGUMENTS if deepspeed is None else {"deepspeed": dict(deepspeed)}
    args = config_class(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        bf16=False,
        seed=3,
        **{**place, **own, **more},
    )
    data = load_dataset("json", data_files=str(Path(model) / kind / "train.jsonl"), split="train")
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if lora else None
    rewards: dict[str, Any] = {"reward_funcs": distinct_words} if kind in ("grpo", "online_dpo") else {}
    if kind == "online_dpo":
        rewards["processing_class"] = AutoTokenizer.from_pretrained(model, padding_side="left")
        if not lora:  # a copy of a model that is divided already is refused by TRL
            rewards["ref_model"] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if kind in TAUGHT:
        rewards["teacher_model"] = AutoModelForCausalLM.from_pretrained(f"{model}/teacher", dtype=torch.float32)
    if kind == "gkd":
        random.seed(3)  # it tosses whether the student or the data say what comes next
        rewards["processing_class"] = AutoTokenizer.from_pretrained(model, padding_side="left")
    start = f"{model}/scored" if kind == "reward" else model
    trainer = trainer_class(model=start, args=args, train_dataset=data, peft_config=adapters, **rewards)
    trainer.train()
    trainer.save_model()
    rows = [{key: row[key] for key in NUMBERS if key in row} for row in trainer.state.log_history]
    return [row for row in rows if "loss" in row]


def chunked(model: str, folder: str, stage: int) -> tuple[list[dict[str, float]], list[dict[str, float]], int, int]:
    """LoRA under a head that counts as large: what is logged, the same without DeepSpeed, how many losses were chunked
    and how many logits were computed besides."""
    room._LARGE_VOCABULARY = 1
    counts, call, make = Counter[str](), DeferredHead.__call__, DeferredLogits._make

    def counted(name: str, method: Any) -> Any:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        return run

    with (
        patch.object(DeferredHead, "__call__", counted("chunked", call)),
        patch.object(DeferredLogits, "_make", counted("made", make)),
    ):
        ours = fit("sft", model, f"{folder}/ours", config(stage), True, {})
    return ours, fit("sft", model, f"{folder}/plain", None, True, {}), counts["chunked"], counts["made"]


def forced(model: str, folder: str, keep: bool) -> tuple[set[bool], set[torch.dtype], list[float]]:
    """Of checkpointed LoRA on a bf16 base at stage 3: whether checkpointing is reentrant, the dtypes of the adapters
    that train, and the losses."""
    start_afresh()
    section = {"zero_optimization": {"stage": 3}, "ds_hf": {"trl_workarounds": keep}}
    args = trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=True,
        model_init_kwargs={"dtype": torch.bfloat16},
        deepspeed={"train_micro_batch_size_per_gpu": "auto", **section},
    )
    data = load_dataset("json", data_files=str(Path(model) / "sft" / "train.jsonl"), split="train")
    trainer: Any = trl.SFTTrainer(
        model=model, args=args, train_dataset=data, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    trainer.train()
    functions = [module.__dict__.get("_gradient_checkpointing_func") for module in trainer.model.modules()]
    reentrant = {bool(function.keywords["use_reentrant"]) for function in functions if function is not None}
    dtypes = {param.dtype for param in trainer.model.parameters() if param.requires_grad}
    return reentrant, dtypes, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def fit_everywhere(
    kind: str, model: str, folder: str, stages: Sequence[int], lora: bool, more: Mapping[str, Any] | None = None
) -> dict[int | None, list[dict[str, float]]]:
    """What was logged without DeepSpeed, under ``None``, and at each stage; each run saves in a folder of its own."""
    logged: dict[int | None, list[dict[str, float]]] = {}
    for stage in (None, *stages):
        # "auto" as in Hugging Face's documentation: a reference model is made before the Trainer fills these in.
        sizes = dict.fromkeys(MODEL_SIZES, "auto") if stage == 3 else {}
        deepspeed = None if stage is None else config(stage, zero=sizes)
        logged[stage] = fit(kind, model, f"{folder}/{stage}", deepspeed, lora, more or {})
        gc.collect()  # the arguments of a run keep transformers building models under zero.Init
    return logged


def prepare(model: Path) -> Path:
    """Give the folder of a model its tokenizer, the data of each trainer, and a reward model in ``scored``.

    A head made as the model is loaded is drawn on the device where stage 3 builds it: other numbers on a GPU.
    """
    save_tokenizer(model)
    torch.manual_seed(2)
    scored = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scored.save_pretrained(model / "scored")
    save_tokenizer(model / "scored")
    sizes = AutoConfig.from_pretrained(model)
    sizes.update({"num_hidden_layers": 3, "hidden_size": 2 * sizes.hidden_size})
    AutoModelForCausalLM.from_config(sizes).save_pretrained(model / "teacher")
    for kind, (_, _, columns, _) in TRAINERS.items():
        save_data(model / kind, columns)
    return model


def run_sft(arguments: Sequence[str]) -> None:
    """TRL's ``sft`` script in this process, as far as the saved model."""
    # The group's end, which the script brings about, may hang in gloo's threads where DistributedDataParallel ran.
    Trainer.end = lambda self: None  # type: ignore[method-assign]
    parser = sft.make_parser()
    sft.main(*parser.parse_args_and_config(list(arguments), fail_with_unknown_args=False))
