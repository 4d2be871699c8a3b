"""Trains a small Llama from scratch on Python source code: an ordinary HuggingFace Trainer script.

The text is the standard library of the Python that runs it, split by file into training and held-out text, so nothing
is downloaded. One process, or several:

    python examples/train_lm.py --output_dir out
    torchrun --nproc-per-node 2 examples/train_lm.py --output_dir out --deepspeed examples/ds_config_zero2.json
"""

from __future__ import annotations

import logging
import math
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END_OF_TEXT = "<|endoftext|>"
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings", "pydoc_data", "lib2to3"}
HELD_OUT_EVERY = 20


@dataclass
class ModelArguments:
    """The shape of the model."""

    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the byte-level BPE vocabulary."})
    hidden_size: int = field(default=192, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Number of decoder blocks."})
    num_attention_heads: int = field(default=4, metadata={"help": "Attention heads; must divide the width."})


@dataclass
class DataArguments:
    """The text."""

    block_size: int = field(default=128, metadata={"help": "Tokens in one training sequence."})
    max_eval_blocks: int = field(default=128, metadata={"help": "Held-out sequences used for each evaluation."})
    prompt: str = field(default="    def __init__(self", metadata={"help": "What the trained model continues."})


class TableCallback(TrainerCallback):
    """Prints a line for each log on the main process, and times the steps without the evaluations between them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.started = 0.0

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        where = f"step {state.global_step:>4}/{state.max_steps}"
        if "loss" in logs:
            took = f"{self.seconds / max(self.steps, 1):.2f} s/step"
            print(
                f"{where}   loss {float(logs['loss']):7.4f}   lr {float(logs['learning_rate']):.1e}   {took}",
                flush=True,
            )
        elif "eval_loss" in logs:
            print(f"{where}   held-out loss {float(logs['eval_loss']):7.4f}", flush=True)


def source_files(held_out: bool) -> list[Path]:
    """Files of the standard library; a checksum of the name decides which are held out, on every machine alike."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    names = [name for name in names if not NOT_PROSE.intersection(name.parts)]
    return [root / name for name in names if (zlib.crc32(name.as_posix().encode()) % HELD_OUT_EVERY == 0) == held_out]


def read_texts(files: list[str]) -> Iterator[dict[str, str]]:
    """One row a file."""
    for file in files:
        yield {"text": Path(file).read_text(encoding="utf-8", errors="replace")}


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on the training files, unless ``folder`` has one already."""
    if (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (row["text"] for row in read_texts([str(file) for file in source_files(held_out=False)]))
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    ).save_pretrained(folder)


def make_dataset(held_out: bool, tokenizer: Any, block_size: int, cache: Path) -> datasets.Dataset:
    """Blocks of ``block_size`` tokens; cached in ``cache``, so that one process makes them and the others read them."""

    def to_blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens: list[int] = []
        for text in rows["text"]:
            tokens += tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    files = [str(file) for file in source_files(held_out)]
    texts = datasets.Dataset.from_generator(read_texts, gen_kwargs={"files": files}, cache_dir=str(cache))
    return texts.map(to_blocks, batched=True, batch_size=100, remove_columns=["text"])


def make_model(model_args: ModelArguments, block_size: int, tokenizer: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        intermediate_size=model_args.hidden_size * 8 // 3,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=model_args.num_attention_heads,
        max_position_embeddings=4 * block_size,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def continue_prompt(trainer: Trainer, tokenizer: Any, prompt: str) -> str:
    """What the model makes of ``prompt``; every process takes part, since each may hold only a part of the model."""
    set_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(trainer.args.device)
    trainer.model.eval()
    with torch.no_grad():
        output = trainer.model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=20)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def held_out_losses(trainer: Trainer) -> dict[int, float]:
    """Step and loss of every evaluation, those before a resume included."""
    return {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}


def print_report(trainer: Trainer, timer: TableCallback, tokens_per_step: int, resumed_at: int) -> None:
    print("\n  step   held-out loss   perplexity")
    for step, loss in sorted(held_out_losses(trainer).items()):
        note = "   (before training)" if step == 0 else "   (resumed here)" if step == resumed_at else ""
        print(f"  {step:>4}   {loss:13.4f}   {math.exp(min(loss, 50.0)):10.1f}{note}")
    tokens = timer.steps * tokens_per_step
    print(f"\n  {tokens:,} tokens in {timer.seconds:.1f} s of training: {tokens / timer.seconds:,.0f} tokens/s", end="")
    print(f" on {trainer.args.world_size} process{'es' if trainer.args.world_size > 1 else ''}")


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="lm_output",
        max_steps=160,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=20,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=80,
        save_steps=80,
        save_total_limit=2,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    if training_args.process_index > 0:
        logging.disable(logging.WARNING)
    set_seed(training_args.seed)

    folder = Path(training_args.output_dir)
    with training_args.main_process_first(desc="the data"):
        make_tokenizer(folder / "tokenizer", model_args.vocab_size)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        train = make_dataset(False, tokenizer, data_args.block_size, folder / "cache")
        held_out = make_dataset(True, tokenizer, data_args.block_size, folder / "cache")
    held_out = held_out.select(range(min(data_args.max_eval_blocks, len(held_out))))
    model = make_model(model_args, data_args.block_size, tokenizer)

    timer = TableCallback()
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if trainer.is_world_process_zero():
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        print(f"model: {numel / 1e6:.2f} M parameters; text: {len(train) * data_args.block_size:,} tokens", flush=True)

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.state.global_step not in held_out_losses(trainer):
        trainer.evaluate()
    trainer.save_model()
    sample = continue_prompt(trainer, tokenizer, data_args.prompt)
    if trainer.is_world_process_zero():
        per_step = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
        resumed_at = trainer.state.global_step - timer.steps
        print_report(trainer, timer, per_step * data_args.block_size, resumed_at)
        print("\n  The model continues:\n")
        print("\n".join(f"    {line}" for line in sample.splitlines()), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
