"""The names that transformers, accelerate, peft and trl take from ``deepspeed``, and sentences for those that lack."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from packaging.version import Version

NAMES = """
deepspeed: initialize init_distributed add_config_arguments DeepSpeedEngine zero comm ops runtime utils accelerator
deepspeed.comm: init_distributed is_initialized get_rank get_world_size get_local_rank barrier broadcast all_reduce
deepspeed.comm.comm: is_initialized init_distributed
deepspeed.accelerator: get_accelerator
deepspeed.zero: Init GatheredParameters register_external_parameter
deepspeed.runtime.zero: Init GatheredParameters register_external_parameter partition_parameters
deepspeed.runtime.zero.partition_parameters: zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator
deepspeed.runtime.zero.partition_parameters: Init GatheredParameters register_external_parameter ZeroParamStatus
deepspeed.runtime.zero.stage3: estimate_zero3_model_states_mem_needs_all_live
deepspeed.runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs_all_live
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.dataloader: RepeatingLoader
deepspeed.runtime.fp16.loss_scaler: DynamicLossScaler
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME
deepspeed.ops: adam adagrad lion aio __compatible_ops__
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.utils: logger log_dist groups zero_to_fp32 RepeatingLoader is_initialized
deepspeed.utils: set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter
deepspeed.utils: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
deepspeed.utils: safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
deepspeed.utils: safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
deepspeed.utils: safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
deepspeed.utils.groups: _get_sequence_parallel_world_size _get_sequence_parallel_rank _get_data_parallel_group
deepspeed.utils.zero_to_fp32: load_state_dict_from_zero_checkpoint get_fp32_state_dict_from_zero_checkpoint
"""
ROWS = [(line.split(":")[0], name) for line in NAMES.strip().splitlines() for name in line.split(":")[1].split()]


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("module", "name"), ROWS, ids=[f"{module}.{name}" for module, name in ROWS])
def test_name_exists(module: str, name: str) -> None:
    parent, _, child = module.rpartition(".")
    found = deepspeed.zero if module == "deepspeed.zero" else importlib.import_module(module)
    assert getattr(found, name) is not None
    if parent:
        assert getattr(importlib.import_module(parent), child) is found


def test_distribution_is_found_as_transformers_and_accelerate_look_for_it() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert Path(str(spec.origin)).parts[-4:] == ("ds_hf", "compat", "deepspeed", "__init__.py")
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.8+ds.hf"
    assert Version(deepspeed.__version__) >= Version("0.18.2")
    from accelerate.utils import is_deepspeed_available as in_accelerate
    from transformers.integrations import is_deepspeed_available as in_transformers

    assert in_accelerate()
    assert in_transformers()


def test_everything_is_reachable_after_a_bare_import() -> None:
    code = (
        "import deepspeed; print(deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES, deepspeed.runtime.engine.__name__)"
    )
    expected = "['LRRangeTest', 'OneCycle', 'WarmupLR', 'WarmupDecayLR', 'WarmupCosineLR'] deepspeed.runtime.engine"
    assert in_new_process(code) == expected


def test_importing_initializes_nothing_and_leaves_the_heavy_libraries_alone() -> None:
    code = (
        "import deepspeed, sys, torch.distributed as dist; print(dist.is_initialized(), torch.cuda.is_initialized(), "
        "[name for name in ('transformers', 'accelerate', 'optuna', 'datasets') if name in sys.modules])"
    )
    assert in_new_process(f"import torch; {code}") == "False False []"


def test_same_objects_under_all_names() -> None:
    import ds_hf
    from ds_hf.engine.zero import init

    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is ds_hf.Engine
    assert deepspeed.initialize is ds_hf.initialize
    assert deepspeed.zero is deepspeed.runtime.zero
    assert deepspeed.zero.Init is init.Init
    assert deepspeed.utils.logger is logging.getLogger("ds_hf")


def test_absent_attribute_says_so_and_stays_absent() -> None:
    assert not hasattr(deepspeed, "init_inference")
    with pytest.raises(AttributeError, match=r"ds_hf does not provide deepspeed\.init_inference \(yet\)"):
        _ = deepspeed.init_inference
    with pytest.raises(AttributeError, match=r"ds_hf does not provide deepspeed\.utils\.OnDevice"):
        _ = deepspeed.utils.OnDevice
    with pytest.raises(AttributeError, match=r"deepspeed\.runtime\.zero\.partition_parameters\.AllGatherHandle"):
        _ = deepspeed.runtime.zero.partition_parameters.AllGatherHandle


@pytest.mark.parametrize(
    "statement",
    [
        "from deepspeed import PipelineModule",
        "import deepspeed.moe.layer",
        "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF",
    ],
)
def test_absent_import_says_so(statement: str) -> None:
    with pytest.raises(ImportError, match=r"ds_hf does not provide deepspeed\.\S+ \(yet\)"):
        exec(statement, {})


def test_arange_wrapper_is_replaced_where_zero_init_looks_for_it() -> None:
    """transformers swaps this name in the module while zero.Init starts (prevent_arange_dtype_change)."""
    from ds_hf.engine.zero import init

    module = deepspeed.runtime.zero.partition_parameters
    original = module.zero_wrapper_for_fp_tensor_constructor
    assert original is init.zero_wrapper_for_fp_tensor_constructor
    assert module._orig_torch_arange is torch.arange

    def replacement(fn, *args, **kwargs):  # type: ignore[no-untyped-def]
        return fn

    try:
        module.zero_wrapper_for_fp_tensor_constructor = replacement  # type: ignore[assignment]
        assert init.zero_wrapper_for_fp_tensor_constructor is replacement
    finally:
        module.zero_wrapper_for_fp_tensor_constructor = original
    assert init.zero_wrapper_for_fp_tensor_constructor is original


def test_accelerator_answers_for_this_machine() -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert accelerator.current_device_name() == expected
    assert accelerator.device_count() >= 1
    assert accelerator.communication_backend_name() == ("nccl" if torch.cuda.is_available() else "gloo")
    assert deepspeed.get_accelerator() is accelerator


def test_optimizers_take_what_accelerate_gives_them() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    groups = torch.optim.AdamW([weights], lr=0.1, weight_decay=0.5).param_groups
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.1, weight_decay=0.0, adamw_mode=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    weights.grad = torch.ones(3)
    optimizer.step()
    # decoupled decay of the group (0.1 x 0.5), then Adam's first step (the learning rate itself)
    assert weights.tolist() == pytest.approx([0.85, 0.85, 0.85], abs=1e-6)


def test_nvme_is_reported_as_absent() -> None:
    assert deepspeed.ops.__compatible_ops__[deepspeed.ops.aio.AsyncIOBuilder.NAME] is False
