"""The names by which DeepSpeed users ask an engine about itself."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.engine.zero.access import safe_get_full_grad
from ds_hf.errors import ConfigError
from ds_hf.log import logger
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches

NAP = 0.02  # seconds


def batch_sizes() -> dict[str, object]:
    engine, *_ = initialize(
        model=TinyLM(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.9]}},
            "zero_optimization": {"stage": 2},
        },
    )
    found: dict[str, object] = {
        "info": engine.get_batch_info(),
        "ranks": (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size),
        "lr": engine.get_lr(),
        "mom": engine.get_mom(),
        "stage": engine.zero_optimization_stage(),
        "clipping": engine.gradient_clipping(),
        "names": (engine.optimizer_name(), engine.scheduler_name()),
        "dtype": engine.dtype,
    }
    engine.set_train_batch_size(4)
    found["smaller"] = engine.get_batch_info()
    engine.backward(engine(token_batches(2, 8)))
    engine.step()
    found["steps"] = engine.global_steps
    engine.set_train_micro_batch_size(5)
    found["micro"] = engine.get_batch_info()
    with pytest.raises(ValueError, match=r"not a multiple of 10 \(micro-batch 5 x 2 processes\)"):
        engine.set_train_batch_size(12)
    with pytest.raises(ValueError, match="at least 1"):
        engine.set_train_micro_batch_size(0)
    for wrong in ("10", 10.5, True, None, float("inf")):
        for change in (engine.set_train_batch_size, engine.set_train_micro_batch_size):
            with pytest.raises(ValueError, match="a whole number of samples"):
                change(wrong)  # type: ignore[arg-type]
    engine.set_train_batch_size(10.0)  # type: ignore[arg-type]
    assert [type(size) for size in engine.get_batch_info()] == [int] * 3
    with pytest.raises(AttributeError, match="neither the engine nor TinyLM"):
        _ = engine.no_such_thing
    found["through"] = engine.embedding is engine.module.embedding
    engine.destroy()
    return found


def test_answers() -> None:
    for rank, found in enumerate(run_distributed(batch_sizes, 2)):
        assert found == {
            "info": (12, 2, 3),
            "ranks": (rank, rank, 2, 2),
            "lr": [0.25],
            "mom": [(0.8, 0.9)],
            "stage": 2,
            "clipping": 0.5,
            "names": ("AdamW", None),
            "dtype": torch.float32,
            "smaller": (4, 2, 1),
            "steps": 1,
            "micro": (10, 5, 1),
            "through": True,
        }


def printed_lines(**more: Any) -> None:
    config = {"train_batch_size": 2, "steps_per_print": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine, *_ = initialize(model=TinyLM(), config={**config, **more})
    for _ in range(4):
        time.sleep(NAP)
        engine.backward(engine(token_batches(2, 8)))
        engine.step()
    engine.destroy()


def test_steps_per_print(capfd: pytest.CaptureFixture[str]) -> None:
    printed_lines()
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    assert "lr [0.5], grad norm " in lines[0]
    for line in lines:
        said = re.fullmatch(r".* skipped 0, loss scale 1, (\S+) samples/s, (\S+) tokens/s, MFU (\S+)%", line)
        assert said, line
        assert 0 < float(said[1]) < 2 / NAP
        assert float(said[2]) == pytest.approx(8 * float(said[1]), rel=1e-3)
        assert 0 <= float(said[3]) < 100


def test_steps_per_print_without_throughput(capfd: pytest.CaptureFixture[str]) -> None:
    printed_lines(timers={"throughput": {"enabled": False}})
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(", ")[-1] for line in lines] == ["loss scale 1"] * 2


def _settings_and_loader() -> dict[str, object]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "prescale_gradients": True,
        "checkpoint": {"tag_validation": "Fail"},
        "flops_profiler": {"profile_step": 4, "top_modules": 2, "recompute_fwd_factor": 0.5},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1234, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = initialize(model=TinyLM(), config=config)
    engine.train()
    engine.backward(engine(token_batches(2, 8)))
    engine.empty_partition_cache()
    offload = engine.zero_offload_optimizer()
    assert offload is not None
    return {
        "communication": engine.communication_data_type,
        "params": (engine.optimizer_params(), engine.scheduler_params()),
        "bucket": engine.zero_reduce_bucket_size(),
        "offload": (
            offload.device,
            engine.zero_offload_param(),
            engine.zero_cpu_offload(),
            engine.zero_has_nvme_offload(),
        ),
        "tags": (engine.checkpoint_tag_validation_enabled(), engine.checkpoint_tag_validation_fail()),
        "flops": (
            engine.flops_profiler_profile_step(),
            engine.flops_profiler_module_depth(),
            engine.flops_profiler_top_modules(),
            engine.flops_profiler_detailed(),
            engine.flops_profiler_output_file(),
            engine.flops_profiler_recompute_fwd_factor(),
        ),
        "scaled": (engine.postscale_gradients(), engine.gradient_predivide_factor()),
        "groups": (engine.mp_world_size, engine.seq_dp_world_size, torch.distributed.get_world_size(engine.dp_group)),
        "rest": [p.numel() for unit in engine.units if unit.sharded for p in unit.params if p.dim() > 1 and p.numel()],
        "batches": [batch.tolist() for batch in engine.deepspeed_io(list(range(8)), route="eval")],
    }


def test_settings_by_their_old_names() -> None:
    seen: list[int] = []
    for found in run_distributed(_settings_and_loader, 2):
        seen += [item for batch in found.pop("batches") for item in batch]
        assert found == {
            "communication": torch.float32,
            "params": ({"lr": 0.25}, {"warmup_num_steps": 7}),
            "bucket": 1234,
            "offload": ("cpu", None, True, False),
            "tags": (True, True),
            "flops": (4, -1, 2, True, None, 0.5),
            "scaled": (False, 1.0),
            "groups": (1, 2, 2),
            "rest": [],
        }
    assert sorted(seen) == list(range(8))


def _levels() -> list[object]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    logger.setLevel(logging.WARNING)
    found: list[object] = []
    for level in ({}, {"log_level": "error"}):
        engine, *_ = initialize(model=TinyLM(), config={**config, **level})
        found += [engine.log_level(), logger.level]
    with pytest.raises(ConfigError, match="log_level"):
        initialize(model=TinyLM(), config={**config, "log_level": "loud"})
    return found


def test_log_level_of_the_configuration() -> None:
    assert run_distributed(_levels, 1) == [[None, logging.WARNING, "ERROR", logging.ERROR]]


class Group:
    """What Megatron gives: all processes are data-parallel."""

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_world_size(self) -> int:
        return 1


def settings_and_reductions() -> None:
    mpu, hooked = Group(), []
    engine, optimizer, *_ = initialize(
        model=nn.Linear(4, 1, bias=False),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "prescale_gradients": True,
            "communication_data_type": "fp32",
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 77,
                "offload_optimizer": {"device": "cpu"},
            },
        },
    )
    found = {
        "mpu": engine.mpu is mpu,
        "group": engine.data_parallel_group is dist.group.WORLD,
        "sizes": (engine.mp_world_size, engine.checkpoint_mp_rank, engine.seq_dp_world_size),
        "zero": (engine.zero_prefetch_bucket_size(), engine._config.overlaps_communication, engine.zero_cpu_offload()),
        "offload": (engine.zero_offload_optimizer().device, engine.zero_offload_param()),
        "gradients": engine.postscale_gradients(),
        "params": (engine.optimizer_params(), engine.scheduler_params()),
        "config": (engine._config.zero_config.stage, engine._config.gradient_clipping, engine._config.world_size),
        "autocast": (engine.torch_autocast_enabled(), engine.torch_autocast_dtype()),
        "inner": engine.basic_optimizer is optimizer.optimizer,
    }
    assert found == {
        "mpu": True,
        "group": True,
        "sizes": (1, 0, 2),
        "zero": (77, True, True),
        "offload": ("cpu", None),
        "gradients": False,
        "params": ({"lr": 0.5}, None),
        "config": (3, 1.0, 2),
        "autocast": (False, None),
        "inner": True,
    }
    timer = engine.tput_timer
    timer.stop()
    assert (timer.batch_size, timer.micro_step_count, timer.initialized) == (3, 0, False)
    timer.start()
    timer.stop(global_step=True)
    assert (timer.micro_step_count, timer.global_step_count, timer.started, timer.initialized) == (1, 1, False, True)
    engine.set_all_reduce_hook(lambda gradient: hooked.append(gradient.mul_(2).clone()))
    engine.backward(engine(torch.ones(1, 4)).sum(), scale_wrt_gas=False)
    engine.allreduce_gradients()
    gradient = safe_get_full_grad(engine.module.weight)
    assert gradient is not None
    assert gradient.flatten().tolist() == [2.0] * 4
    assert len(hooked) == 1
    engine.module.weight.all_gather()
    engine.empty_partition_cache()
    assert engine.module.weight.numel() == 0


def test_settings_and_reductions() -> None:
    run_distributed(settings_and_reductions, 2, timeout=60)
