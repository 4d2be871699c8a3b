"""What the tests of real scripts share: a tiny model on disk, configurations, and the comparison of two histories."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.interpreter import python

# How the Trainer without DeepSpeed is told to run where the tests run.
PLAIN = () if torch.cuda.is_available() else ("--use_cpu", "--ddp_backend=gloo")
SCRIPTS = Path(__file__).parent / "scripts"
# Processes of a test: two gloo processes where there is no accelerator, else one for each of at most two devices.
WORLD = min(torch.cuda.device_count(), 2) if torch.cuda.is_available() else 2
HISTORY_KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss")

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def save_tiny_model(folder: Path, vocabulary: int = 128) -> Path:
    """A Llama of 32 x 2 layers whose head is not tied, the same on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a configuration file."""
    path.write_text(json.dumps(content))
    return path


def read_json(path: Path) -> Any:
    """Read the report of a script."""
    return json.loads(path.read_text())


def steps(report: Mapping[str, Any]) -> list[dict[str, float]]:
    """The logged steps and evaluations of a Trainer, without times."""
    rows = [{key: row[key] for key in ("step", *HISTORY_KEYS) if key in row} for row in report["history"]]
    return [row for row in rows if len(row) > 1]


def largest_difference(ours: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
    """Largest absolute difference of any number; the rows and their keys must be the same."""
    assert [sorted(row) for row in ours] == [sorted(row) for row in reference]
    pairs = [(a[key], b[key]) for a, b in zip(ours, reference, strict=True) for key in b]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) for a, b in pairs if a is not None)


def run_user_code(fn: Callable[..., Any], *args: Any, world_size: int = WORLD, timeout: float = 100.0) -> list[Any]:
    """Call ``fn`` on every rank as torchrun would start a script: environment set, no process group made.

    Much faster than a script (the libraries are imported already); what each rank returned, by rank. ``timeout`` is
    what suffices on a quiet machine: what hangs ends after ``PATIENCE`` times as long, see ``tests.helpers.patience``.
    """
    return run_distributed(fn, world_size, *args, timeout=timeout, backend=None)


def run_python(script: Path, *args: str) -> str:
    """Run a script in one process, without any launcher; returns what it printed."""
    done = python(script, *args)
    if done.returncode != 0:
        raise ScriptFailure(done.stdout + done.stderr)
    return done.stdout + done.stderr


class ScriptFailure(AssertionError):
    """A script ended with an error; the text is all it printed."""
