"""States divided inside hosts, as users ask for them: the Trainer with keys of the file, accelerate's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import ParallelismConfig

from ds_hf.errors import ConfigError
from tests.compat.accelerate_user import LR, MICRO, Regressor, fresh_start, loader, train
from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import config, history, make_trainer

STEPS, HOSTS, INNER = 4, 2, 2
WORLD = HOSTS * INNER
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="four gloo processes")


def trained(folder: Path, zero: dict[str, int], **more: Any) -> tuple[list[dict[str, float]], int | None]:
    trainer = make_trainer(folder, config(3, zero=zero), gradient_accumulation_steps=2, **more)
    trainer.train(resume_from_checkpoint=more.pop("resume", None))
    return history(trainer), trainer.model_wrapped.mesh.shape.inner


def trained_each(folder: Path) -> list[Any]:
    return [
        trained(folder, {}),
        trained(folder, {"zero_hpz_partition_size": INNER}),
        trained(folder, {"mics_shard_size": INNER}),
        trained(folder, {}, parallelism_config=ParallelismConfig(dp_replicate_size=HOSTS, dp_shard_size=INNER)),
    ]


def test_the_trainer(tmp_path: Path) -> None:
    for plain, second, inside, hybrid in run_user_code(trained_each, tmp_path, world_size=WORLD):
        assert [found[1] for found in (plain, second, inside, hybrid)] == [None, INNER, INNER, INNER]
        assert len(plain[0]) == STEPS
        assert second[0] == plain[0]
        assert largest_difference(inside[0], plain[0]) < 1e-4
        assert hybrid[0] == inside[0]


def with_sizes(stage: int, sizes: dict[str, int] | None) -> tuple[list[dict[str, Any]], int | None]:
    """The loop of accelerate's documentation."""
    fresh_start()
    content = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": stage}}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content),
        parallelism_config=None if sizes is None else ParallelismConfig(**sizes),
    )
    model, batches = Regressor(), loader(STEPS * MICRO * accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    rows = train(accelerator, model, optimizer, None, batches)
    return rows, model.mesh.shape.inner  # type: ignore[union-attr,return-value]


def with_sizes_each() -> list[Any]:
    found = [
        with_sizes(stage, sizes)
        for stage in (1, 3)
        for sizes in (None, {"dp_replicate_size": HOSTS, "dp_shard_size": INNER}, {"dp_shard_size": WORLD})
    ]
    with pytest.raises(ConfigError, match="ZeRO stage 0 divides nothing"):
        with_sizes(0, {"dp_replicate_size": HOSTS, "dp_shard_size": INNER})
    fresh_start()
    return found


def test_a_parallelism_config_of_accelerate() -> None:
    for rank in run_user_code(with_sizes_each, world_size=WORLD):
        for plain, hybrid, sharded in (rank[:3], rank[3:]):
            assert [found[1] for found in (plain, hybrid, sharded)] == [None, INNER, None]
            assert len(plain[0]) == STEPS
            assert sharded[0] == plain[0]
            assert largest_difference(hybrid[0], plain[0]) < 1e-5
