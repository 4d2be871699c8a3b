"""accelerate with divided sequences: a loop of one's own, and ``accelerate launch --parallelism_config_sp_size``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import ParallelismConfig
from torch.utils.data import DataLoader

from tests.compat.accelerate_user import fresh_start
from tests.compat.common import SCRIPTS, read_json, run_user_code
from tests.compat.scripts.accelerate_sequence import build, samples, train
from tests.helpers.distributed import free_port
from tests.helpers.patience import PATIENCE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes")


def expected(accumulation: int = 1) -> dict[str, Any]:
    """The same in torch alone: batch after batch in one process."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, norms = [], []
    for index, row in enumerate(samples()):
        loss = net(**{key: value[None] for key, value in row.items()}).loss
        (loss / accumulation).backward()
        losses.append(float(loss.detach()))
        if (index + 1) % accumulation == 0 or index == 7:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def divided(stage: int, accumulation: int) -> dict[str, Any]:
    fresh_start()
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content),
        parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
    )
    return train(accelerator)


def test_a_loop_of_ones_own() -> None:
    """Also with accumulation: accelerate sees the last batch of the loader once, and two micro-batches come of it."""
    for stage, accumulation in [(3, 2)]:
        wanted = expected(accumulation)
        for found in run_user_code(divided, stage, accumulation, world_size=2):
            assert found["size"] == 2
            assert found["steps"] == 8 // accumulation
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--use_deepspeed", "--zero_stage=2", "--gradient_accumulation_steps=1", "--gradient_clipping=1e9"]
    sizes = ["--use_parallelism_config", "--parallelism_config_sp_size=2", "--parallelism_config_sp_backend=deepspeed"]
    place = ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", f"--main_process_port={free_port()}"]
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", *flags, *sizes, *place]
    script = SCRIPTS / "accelerate_sequence.py"
    done = subprocess.run(
        [*command, str(script), str(report)], capture_output=True, text=True, check=False, timeout=120 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted, found = expected(), read_json(report)
    assert found["size"] == 2
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)


def gathered(samples: int, batch: int) -> tuple[list[int], list[int]]:
    """How often the tokens of each sample are gathered in one pass, and its first part as an object."""
    fresh_start()
    file = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": 1}}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file),
        parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
    )
    net = build()
    rows = [{"input_ids": torch.arange(8), "sample": torch.full((8,), index)} for index in range(samples)]
    loader = DataLoader(rows, batch_size=batch)  # type: ignore[arg-type]
    *_, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    tokens, objects = [], []
    for found in loader:
        tokens.append(accelerator.gather_for_metrics(found["sample"]))
        objects += accelerator.gather_for_metrics(found["sample"][:, 0].tolist(), use_gather_object=True)
    return torch.cat(tokens).flatten().bincount().tolist(), torch.tensor(objects).bincount().tolist()


@pytest.mark.parametrize(("processes", "samples", "batch"), [(2, 7, 2), (4, 9, 2)])
def test_metrics_count_each_sample_once(processes: int, samples: int, batch: int) -> None:
    for tokens, objects in run_user_code(gathered, samples, batch, world_size=processes):
        assert tokens == [8] * samples
        assert objects == [2] * samples  # one of each part
