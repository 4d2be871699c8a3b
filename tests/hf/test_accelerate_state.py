"""The backend on a machine without an accelerator, and configurations given to accelerate itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from accelerate.utils.deepspeed import HfDeepSpeedConfig, map_pytorch_optim_to_deepspeed
from transformers.integrations import HfDeepSpeedConfig as TransformersConfig

from ds_hf.config.plan import plan_states
from ds_hf.errors import ConfigError
from ds_hf.hf.source import checked_config
from tests.helpers.distributed import free_port, run_distributed
from tests.helpers.logs import Lines
from tests.helpers.patience import patient

GIVEN = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {},
    "NAdam": {},
    "Adagrad": {},
    "AdamW": {"amsgrad": True},
    "Adam": {"decoupled_weight_decay": True},
}

CPU_ONLY = pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")


def state(launched: bool, deepspeed: bool) -> tuple[str | None, int, int]:
    import os

    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(deepspeed).lower()
    if not launched:
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    found = PartialState()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody goes while a peer is still connecting
    return found.backend, found.num_processes, found.process_index


@CPU_ONLY
def test_every_process_knows_the_others() -> None:
    assert run_distributed(state, 2, True, True, backend=None) == [("gloo", 2, 0), ("gloo", 2, 1)]


@CPU_ONLY
def test_the_backend_is_only_named_for_deepspeed_under_a_launcher() -> None:
    assert run_distributed(state, 1, False, True, backend=None) == [(None, 1, 0)]
    assert run_distributed(state, 1, True, False, backend=None) == [(None, 1, 0)]


def on_the_cpu(by_argument: bool) -> str:
    said = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(said)
    if not by_argument:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    given = {"cpu": True} if by_argument else {}
    accelerator = Accelerator(**given, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    return f"{accelerator.distributed_type.value} {' '.join(said.texts)}"


@pytest.mark.parametrize(
    ("by_argument", "why"), [(True, "Accelerator is given cpu=True"), (False, "ACCELERATE_USE_CPU")]
)
def test_it_is_told_where_accelerate_leaves_deepspeed_out(by_argument: bool, why: str) -> None:
    (found,) = run_distributed(on_the_cpu, 1, by_argument, backend=None)
    assert "DEEPSPEED" not in found
    assert f"leaves DeepSpeed out where {why}" in found


def loop() -> list[str]:
    """A scheduler that was not prepared is stepped after the optimizer, in a loop that accumulates."""
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in told]


def test_torch_does_not_say_that_the_optimizer_was_not_stepped() -> None:
    (told,) = run_distributed(loop, 1, backend=None, timeout=60)
    assert not [text for text in told if "lr_scheduler.step()" in text]


@pytest.mark.parametrize("config_class", [HfDeepSpeedConfig, TransformersConfig])
def test_presets_and_checks(config_class: type[HfDeepSpeedConfig]) -> None:
    config = config_class("zero3")
    assert config.is_zero3()
    assert config.get_value("train_batch_size") == "auto"
    assert config_class(config_file_or_dict='{"zero_optimization": {"stage": 2} /* two */}').is_zero2()
    with pytest.raises(ConfigError, match="stge"):
        config_class({"zero_optimization": {"stge": 3}})


@pytest.mark.parametrize("config_class", [HfDeepSpeedConfig, TransformersConfig])
def test_auto_is_the_trainers(config_class: type[HfDeepSpeedConfig]) -> None:
    """`accelerate launch --deepspeed_config_file auto` trained with a stage that nobody had chosen."""
    with pytest.raises(ConfigError, match="chosen by the Trainer alone"):
        config_class("auto")
    with pytest.raises(ConfigError, match="chosen by the Trainer alone"):
        DeepSpeedPlugin(hf_ds_config="auto")


def test_what_accelerate_writes_itself_is_accepted() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="none", gradient_accumulation_steps=2)
    assert plugin.deepspeed_config["zero_optimization"]["offload_param"] == {"device": "none", "nvme_path": None}
    plugin.set_mixed_precision("bf16")
    assert HfDeepSpeedConfig(plugin.deepspeed_config).get_value("bf16.enabled") is True
    plugin.set_deepspeed_weakref()


def test_parameter_offload_below_stage_3_stays_in_the_file_without_effect() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu", offload_param_device="cpu")
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "nvme_path": None}
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}})
    assert config.is_zero2()
    assert plan_states(checked_config(config.config)).parameters.device == "device"


def test_keys_with_dots_are_ignored_as_trl_expects() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 1024})
    assert config.is_zero3()


def kept_on_this_rank(selected: int) -> list[bool]:
    """Of an engine of each stage: whether ``no_sync()`` suspends it, of an Accelerator whose plugin has this stage."""
    from ds_hf import initialize

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=selected))
    found = []
    for stage in (0, 1, 2, 3):
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        model = torch.nn.Linear(2, 2)
        engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)
        with accelerator.no_sync(engine):
            found.append(engine.reducer.suspended)
        engine.destroy()
    return found


def test_no_sync_asks_each_model_for_its_stage() -> None:
    """accelerate asks the selected plugin: with two models of stages 1 and 3, ``accumulate()`` was an error."""
    assert run_distributed(kept_on_this_rank, 2, 1, backend=None) == [[True, True, False, False]] * 2


@pytest.mark.parametrize("name", GIVEN)
def test_states_in_host_memory_are_of_the_optimizer_that_was_given(name: str) -> None:
    """accelerate makes an Adam of each of them, or fails."""
    given = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2))], lr=0.5, **GIVEN[name])
    assert map_pytorch_optim_to_deepspeed(given) is given


def test_adam_gets_the_class_for_host_memory() -> None:
    for kind, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        found = map_pytorch_optim_to_deepspeed(kind([torch.nn.Parameter(torch.ones(2))], lr=0.5, betas=(0.5, 0.6)))
        assert type(found).__name__ == "DeepSpeedCPUAdam"
        assert (found.param_groups[0]["betas"], found.param_groups[0]["lr"]) == ((0.5, 0.6), 0.5)
        assert found.adam_w_mode == decoupled


class OfBitsandbytes(torch.optim.Optimizer):
    """What accelerate sees of an optimizer of bitsandbytes, whose classes are told apart by their names of a rule."""

    def __init__(self, rule: str, param: torch.nn.Parameter, betas: tuple[float, ...], eps: float) -> None:
        self.optimizer_name = rule
        super().__init__([param], {"lr": 0.1, "betas": betas, "eps": eps, "weight_decay": 0.2, "alpha": 0.0})


OfBitsandbytes.__module__ = "bitsandbytes.optim.optimizer"


def lion(param: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Chen et al. 2023, with the numbers of the test below."""
    momentum = torch.zeros_like(param)
    for grad in grads:
        param = param * (1 - 0.1 * 0.2) - 0.1 * (0.6 * momentum + 0.4 * grad).sign()
        momentum = 0.7 * momentum + 0.3 * grad
    return param


@pytest.mark.parametrize("rule", ["adam", "lion", "adagrad"])
def test_rules_of_bitsandbytes_are_kept_in_host_memory(rule: str) -> None:
    """accelerate made an Adam with L2 decay of its 8-bit AdamW, and failed with Lion."""
    torch.manual_seed(0)
    start, grads = torch.randn(5), list(torch.randn(3, 5))
    param, plain = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    betas = (0.0, 0.0) if rule == "adagrad" else (0.6, 0.7)
    found = map_pytorch_optim_to_deepspeed(OfBitsandbytes(rule, param, betas, 1e-3))
    reference: torch.optim.Optimizer = torch.optim.AdamW([plain], lr=0.1, betas=(0.6, 0.7), eps=1e-3, weight_decay=0.2)
    if rule == "adagrad":
        reference = torch.optim.Adagrad([plain], lr=0.1, eps=1e-3, weight_decay=0.2)
    for grad in grads:
        param.grad, plain.grad = grad.clone(), grad.clone()
        found.step()
        reference.step()
    expected = lion(start, grads) if rule == "lion" else plain.detach()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["momentum", "rmsprop", "ademamix", "lamb", "lars"])
def test_other_rules_of_bitsandbytes_stay(rule: str) -> None:
    """accelerate makes an Adam of each, whose betas are other numbers there: a beta2 of 0 of RMSprop's momentum."""
    given = OfBitsandbytes(rule, torch.nn.Parameter(torch.ones(2)), (0.9, 0.0), 1e-8)
    assert map_pytorch_optim_to_deepspeed(given) is given


OF_A_STEP = """
import sys

import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import TrainingArguments

config = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": {"stage": 1}}
if sys.argv[1] == "trainer":
    arguments = TrainingArguments(sys.argv[2], deepspeed=config, report_to="none")
    arguments.device  # what asks accelerate for its state
    found = arguments.world_size, arguments.process_index, arguments.hf_deepspeed_config.config["train_batch_size"]
else:
    state = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    found = state.num_processes, state.process_index, 0
print("found", *found)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("client", ["trainer", "accelerate"])
def test_srun_with_a_task_for_each_process(client: str, tmp_path: Path) -> None:
    """Slurm's variables, and no RANK: accelerate took each task for a run of its own, which wrote over the others'."""
    told = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "ACCELERATE_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        told.pop(name, None)
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_STEP_NUM_TASKS": "2"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", OF_A_STEP, client, str(tmp_path)],
            env={**told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [task.communicate(timeout=patient(60))[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    for rank, text in enumerate(said):
        assert f"found 2 {rank} {16 if client == 'trainer' else 0}" in text
