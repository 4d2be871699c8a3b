"""What ``make demo`` runs: a configuration is tuned for three minutes, and a small Llama is trained with what came out.

The start is what many have: a ZeRO stage 3 file with "auto" in it, two samples at a time, four times a step. Of the
file only the stage may change (``--tune``); the global batch stays, only its division is free. Then the training runs
with the tuned file, or with the user's own where the search found nothing faster, is stopped, and goes on from its
checkpoint. All figures at the end are read from what the search and the Trainer wrote.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path("demo_output")
MODEL, SEARCH = OUT / "model", OUT / "autotuning"
PROCESSES, STEPS, MORE_STEPS = 2, 100, 120
VOCABULARY, TOKENS = 2048, 128  # of the tokenizer, and of a sample
SCRIPT = [
    "examples/train_lm.py", "--output_dir", str(MODEL), "--vocab_size", str(VOCABULARY), "--block_size", str(TOKENS),
    "--hidden_size", "128", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4",
    "--max_steps", str(STEPS), "--save_steps", str(STEPS), "--eval_steps", str(STEPS),
    "--deepspeed", "examples/ds_config_zero3.json",
]  # fmt: skip
ANEW = ["--forget", "--output", str(SEARCH)]  # each time as for the first
TUNE = ["--budget", "3m", "--tune", "zero_optimization.stage", "-n", str(PROCESSES), *ANEW]
TORCHRUN = ["torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]


def main() -> None:
    start = time.monotonic()
    title("1/4  The text: the standard library of this Python, cut into tokens")
    prepare()
    title("2/4  Three minutes of autotuning: the script is started with several settings, for a few steps each")
    run("ds_hf.cli", "autotune", *TUNE, *SCRIPT)
    found = json.loads((SEARCH / "ds_config.tuned.reasons.json").read_text())
    if found["kept_yours"]:
        title("3/4  Nothing is faster by more than the noise: training with the file as it was")
        words = [*TORCHRUN, *SCRIPT]
    else:
        title(f"3/4  Training with {SEARCH}/ds_config.tuned.json")
        launcher, *rest = shlex.split((SEARCH / "command.txt").read_text())
        assert launcher == "torchrun"
        words = ["torch.distributed.run", *rest]
    run(*words)
    title(f"4/4  The same command again, from its checkpoint to step {MORE_STEPS}")
    run(*words, "--max_steps", str(MORE_STEPS), "--resume_from_checkpoint", str(MODEL / f"checkpoint-{STEPS}"))
    title(f"What came out, after {time.monotonic() - start:.0f} s")
    show(found)


def title(text: str) -> None:
    print(f"\n== {text} ==", flush=True)


def run(module: str, *words: str) -> None:
    """Run a module of this Python; what fails ends the demo with its exit code."""
    code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
    if code:
        sys.exit(code)


def prepare() -> None:
    """Makes what the script finds in its folder later, so that the search does not spend its time on it."""
    import datasets  # these take some seconds, so only after the first title
    from train_lm import PreTrainedTokenizerFast, make_dataset, make_tokenizer

    datasets.disable_progress_bars()
    folder = MODEL / "tokenizer"
    make_tokenizer(folder, VOCABULARY)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    train, held_out = (make_dataset(part, tokenizer, TOKENS, MODEL / "cache") for part in (False, True))
    print(f"{len(train) * TOKENS:,} tokens to train on, {len(held_out) * TOKENS:,} held out", flush=True)


def show(found: dict[str, Any]) -> None:
    """Both speeds, the held-out loss, and where everything lies."""
    batch = json.loads((SEARCH / "ds_config.tuned.json").read_text())["train_batch_size"]
    if found["kept_yours"]:
        print(f"  your file       {found['own'] * TOKENS:,.0f} tokens/s; nothing was significantly faster: it was kept")
    else:
        print(f"  your file       {found['own'] * TOKENS:,.0f} tokens/s")
        low, high = found["gain_interval"]
        sure = f"{found['gain']:.2f} x" if found["gain_is_certain"] else f"{low:.1f} to {high:.1f} x"
        gain = (
            sure if found["confirmed"] else f"faster by single launches, NOT confirmed ({found['why_not_confirmed']})"
        )
        print(f"  tuned file      {found['value'] * TOKENS:,.0f} tokens/s: {gain}, at the same global batch")
        seconds = (found["own_seconds"], found["confirmed_seconds"])
        if all(seconds):
            before, after = (f"{batch * TOKENS / each:,.0f}" for each in seconds)
            print(f"                  (in the engine; the whole script, data and logs: {before} and {after} tokens/s)")
    for warning in found["warnings"]:
        print(f"                  {warning}")
    log = json.loads((MODEL / f"checkpoint-{MORE_STEPS}" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    print(f"  held-out loss   {losses[0]:.2f} before training, {losses[-1]:.2f} after {MORE_STEPS} steps")
    print(f"  report          {SEARCH / 'report.html'}  (reasons, every launch, plots; opens without a network)")
    print(f"  model           {MODEL}/  (with its tokenizer and checkpoints)")


if __name__ == "__main__":
    main()
