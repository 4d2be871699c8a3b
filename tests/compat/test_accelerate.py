"""An unmodified accelerate script under ``accelerate launch --use_deepspeed``, against the same script without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.compat.common import SCRIPTS, WORLD, largest_difference, read_json, write_json
from tests.helpers.distributed import free_port
from tests.helpers.interpreter import python, torchrun

SCRIPT = SCRIPTS / "accelerate_script.py"
# How the reference, which has no DeepSpeed, runs where the tests run.
PLAIN_FLAGS = () if torch.cuda.is_available() else ("--cpu",)
TOLERANCE = 1e-5
ACCUMULATION = 2
PASS = 16 // WORLD  # micro-batches of each process in one pass over the data

BASE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
}
FROM_JSON = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-3, "warmup_num_steps": "auto"},
    },
}


def arguments(model: Path, folder: Path) -> list[str]:
    return [
        f"--model_path={model}",
        f"--report={folder / 'report.json'}",
        f"--output_dir={folder / 'out'}",
        f"--accumulation={ACCUMULATION}",
    ]


def launch(model: Path, folder: Path, *options: str) -> dict[str, Any]:
    """``accelerate launch``; the processes that it starts are new ones."""
    command = ["-m", "accelerate.commands.launch", "--use_deepspeed", f"--num_processes={WORLD}"]
    command += [f"--main_process_port={free_port()}", "--mixed_precision=no", *options, str(SCRIPT)]
    done = python(*command, *arguments(model, folder))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report: dict[str, Any] = read_json(folder / "report.json")
    return report


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("reference")
    torchrun(SCRIPT, *PLAIN_FLAGS, *arguments(tiny_model, folder), world_size=WORLD)
    return read_json(folder / "report.json"), folder / "out" / "final"


@pytest.mark.feature("accelerate", "accelerate launch --deepspeed_config_file")
@pytest.mark.parametrize(
    ("zero", "more"),
    [
        pytest.param({"stage": 2}, FROM_JSON, id="stage2-DummyOptim-DummyScheduler", marks=pytest.mark.slow),
        pytest.param({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, {}, id="stage3-torch-AdamW"),
    ],
)
def test_script_with_a_config_file(
    zero: dict[str, Any],
    more: dict[str, Any],
    reference: tuple[dict[str, Any], Path],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    config = write_json(tmp_path / "ds.json", {**BASE, **more, "zero_optimization": zero})
    ours = launch(tiny_model, tmp_path, f"--deepspeed_config_file={config}")
    theirs, weights = reference
    assert ours["processes"] == WORLD
    assert ours["type"] == "DistributedType.DEEPSPEED"
    assert len(ours["history"]) == 2 * PASS
    assert largest_difference(ours["history"], theirs["history"]) <= TOLERANCE
    # load_state went back to the end of the first pass: the second pass repeats to the bit
    assert ours["again"] == ours["history"][PASS:]
    assert weight_difference(tmp_path / "out" / "final", weights) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.feature("accelerate", "accelerate launch with flags alone")
def test_script_with_launch_flags_alone(
    reference: tuple[dict[str, Any], Path], tiny_model: Path, tmp_path: Path
) -> None:
    ours = launch(
        tiny_model,
        tmp_path,
        "--zero_stage=1",
        f"--gradient_accumulation_steps={ACCUMULATION}",
        "--gradient_clipping=0.5",
    )
    assert largest_difference(ours["history"], reference[0]["history"]) <= TOLERANCE
    assert ours["again"] == ours["history"][PASS:]


def weight_difference(ours: Path, theirs: Path) -> float:
    """Largest absolute difference of any weight of two saved models."""
    left, right = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (ours, theirs))
    assert left.keys() == right.keys()
    differences = [torch.max(torch.abs(left[name] - right[name])) for name in right]
    return float(torch.stack(differences).max())
