"""The names that transformers, accelerate, peft and trl take from ``deepspeed``, and sentences for those that lack."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed import _missing
from packaging.version import Version

NAMES = """
deepspeed: initialize init_distributed add_config_arguments DeepSpeedEngine zero comm ops runtime utils accelerator
deepspeed: DeepSpeedConfig DeepSpeedConfigError OnDevice checkpointing profiling dist get_accelerator logger log_dist
deepspeed: __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__ version
deepspeed.comm: init_distributed is_initialized get_rank get_world_size get_local_rank barrier broadcast all_reduce
deepspeed.comm: all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single reduce reduce_scatter
deepspeed.comm: reduce_scatter_tensor gather scatter send recv isend irecv new_group get_world_group get_global_rank
deepspeed.comm: broadcast_object_list monitored_barrier ReduceOp ProcessGroup destroy_process_group is_available
deepspeed.comm: all_gather_coalesced all_reduce_coalesced batch_isend_irecv P2POp get_all_ranks_from_group
deepspeed.comm: inference_all_reduce initialize_mesh_device allgather_fn reduce_scatter_fn has_reduce_scatter_tensor
deepspeed.comm: get_world_size_from_launcher get_world_rank_from_launcher get_local_rank_from_launcher
deepspeed.comm.comm: is_initialized init_distributed all_reduce
deepspeed.accelerator: get_accelerator DeepSpeedAccelerator
deepspeed.accelerator.abstract_accelerator: DeepSpeedAccelerator
deepspeed.accelerator.real_accelerator: get_accelerator
deepspeed.checkpointing: configure is_configured checkpoint reset model_parallel_cuda_manual_seed get_cuda_rng_tracker
deepspeed.checkpointing: partition_activations_in_checkpoint set_num_layers non_reentrant_checkpoint
deepspeed: init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config inference
deepspeed.inference: config engine
deepspeed.inference.config: DeepSpeedInferenceConfig
deepspeed.inference.engine: InferenceEngine
deepspeed.zero: unwrap_model_for_generation
deepspeed.zero: Init GatheredParameters register_external_parameter unregister_external_parameter TiledLinear
deepspeed.runtime: ZeROOptimizer DeepSpeedOptimizer
deepspeed.runtime.activation_checkpointing.checkpointing: checkpoint CudaRNGStatesTracker
deepspeed.runtime.activation_checkpointing.offload_activations: CheckpointHiddenStatesOffload
deepspeed.runtime.activation_checkpointing.offload_activations: get_checkpoint_hidden_states_offloading_ctx_manager
deepspeed.runtime.activation_checkpointing.offload_activations: CheckpointActivationOffloadStats
deepspeed.runtime.activation_checkpointing.offload_activations: patch_gradient_checkpointing_layer_marker
deepspeed.runtime.base_optimizer: ZeROOptimizer DeepSpeedOptimizer
deepspeed.runtime.bf16_optimizer: BF16_Optimizer
deepspeed.runtime.fp16.fused_optimizer: FP16_Optimizer
deepspeed.runtime.fp16.unfused_optimizer: FP16_UnfusedOptimizer
deepspeed.runtime.chunked_cross_entropy: chunked_cross_entropy ChunkedCausalLMLoss install_chunked_causal_lm_loss
deepspeed.runtime.chunked_cross_entropy: BACKENDS triton_backend_available
deepspeed.runtime.sequence_parallel.ulysses_sp: sequence_tiled_compute SequenceTiledCompute TiledMLP
deepspeed.runtime.sequence_parallel.ulysses_sp: TiledFusedLogitsLoss
deepspeed.runtime.checkpoint_engine: CheckpointCommitInfo TorchCheckpointEngine
deepspeed.runtime.checkpoint_engine.checkpoint_engine: CheckpointCommitInfo CheckpointEngine
deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine: TorchCheckpointEngine
deepspeed.runtime.config: ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER TORCH_ADAM_PARAM
deepspeed.runtime.config: DeepSpeedConfig DeepSpeedConfigError
deepspeed.runtime.torch_autocast: init_autocast_params is_autocast_initialized get_autocast_dtype autocast_if_enabled
deepspeed.runtime.torch_autocast: has_comm_dtype get_comm_dtype get_all_comm_dtypes sort_dtypes
deepspeed.runtime.torch_autocast: get_default_autocast_lower_precision_modules LOWER_PRECISION_SAFE_MODULES
deepspeed.runtime.utils: see_memory_usage memory_status clip_grad_norm_ get_global_norm CheckOverflow set_random_seed
deepspeed.runtime.utils: PartitionedTensor
deepspeed.runtime.utils: partition_uniform partition_balanced get_weight_norm has_inf_or_nan noop_decorator empty_cache
deepspeed.runtime.zero: Init GatheredParameters register_external_parameter partition_parameters ZeroParamStatus
deepspeed.runtime.zero.partition_parameters: zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator
deepspeed.runtime.zero.partition_parameters: Init GatheredParameters register_external_parameter ZeroParamStatus
deepspeed.runtime.zero.partition_parameters: partitioned_param_data_shape
deepspeed.runtime.zero.leaf_module_config: DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES
deepspeed.runtime.zero.config: DeepSpeedZeroConfig ZeroStageEnum OffloadDeviceEnum
deepspeed.runtime.zero.config: DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum DeepSpeedZeroOffloadOptimizerConfig
deepspeed.runtime.zero.offload_states: get_state_devices
deepspeed.runtime.swap_tensor: MIN_SWAPPABLE_BYTES
deepspeed.runtime.zero.muon.muon_optimizer: MuonWithAuxAdam muon_update adam_update
deepspeed.runtime.zero.muon.original_muon: Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam
deepspeed.runtime.zero.muon.original_muon: muon_update adam_update zeropower_via_newtonschulz5 ns_compute_dtype
deepspeed.runtime.zero.muon.original_muon: zeropower_via_gram_newtonschulz
deepspeed.runtime.zero.utils: is_zero_param is_zero_supported_optimizer ZeRORuntimeException
deepspeed.runtime.zero.tiling: TiledLinear TiledLinearReturnBias
deepspeed.runtime.zenflow.zenflow_config: ZenFlowConfig
deepspeed.runtime.zero.stage3: estimate_zero3_model_states_mem_needs_all_live DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.stage3: estimate_zero3_model_states_mem_needs_all_cold
deepspeed.runtime.zero.stage_1_and_2: estimate_zero2_model_states_mem_needs_all_live DeepSpeedZeroOptimizer
deepspeed.runtime.lr_schedules: LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR
deepspeed.runtime.lr_schedules: add_tuning_arguments get_config_from_args get_lr_from_config override_params
deepspeed.runtime.lr_schedules: override_1cycle_params override_lr_range_test_params override_warmupLR_params
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.dataloader: RepeatingLoader DeepSpeedDataLoader
deepspeed.runtime.fp16.loss_scaler: DynamicLossScaler LossScaler CreateLossScaler INITIAL_LOSS_SCALE SCALE_WINDOW
deepspeed.runtime.fp16.loss_scaler: DELAYED_SHIFT CONSECUTIVE_HYSTERESIS MIN_LOSS_SCALE
deepspeed.runtime.fp16.onebit: OnebitAdam OnebitLamb ZeroOneAdam
deepspeed.runtime.fp16.onebit.adam: OnebitAdam
deepspeed.runtime.fp16.onebit.lamb: OnebitLamb
deepspeed.runtime.fp16.onebit.zoadam: ZeroOneAdam
deepspeed.compression: init_compression redundancy_clean compression_scheduler
deepspeed.compression.compress: init_compression redundancy_clean student_initialization
deepspeed.compression.scheduler: compression_scheduler
deepspeed.compression.basic_layer: LinearLayer_Compress Embedding_Compress Conv2dLayer_Compress BNLayer_Compress
deepspeed.compression.basic_layer: ColumnParallelLinear_Compress RowParallelLinear_Compress QuantAct
deepspeed.compression.utils: TopKBinarizer SymQuantizer AsymQuantizer TernaryQuantizer BinaryQuantizer
deepspeed.compression.helper: convert_conv1d_to_linear recursive_getattr recursive_setattr
deepspeed.elasticity: compute_elastic_config elasticity_enabled ensure_immutable_elastic_config ELASTICITY ENABLED
deepspeed.elasticity: config constants elasticity utils is_torch_elastic_compatible ENABLED_DEFAULT
deepspeed.elasticity.config: ElasticityConfig ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize
deepspeed.elasticity.constants: ELASTICITY ENABLED IGNORE_NON_ELASTIC_BATCH_INFO MODEL_PARALLEL_SIZE NUM_GPUS_PER_NODE
deepspeed.elasticity.constants: DEEPSPEED_ELASTICITY_CONFIG LATEST_ELASTICITY_VERSION MAX_ACCEPTABLE_BATCH_SIZE
deepspeed.elasticity.constants: MICRO_BATCHES MIN_GPUS MAX_GPUS MIN_TIME PREFER_LARGER_BATCH VERSION VERSION_DEFAULT
deepspeed.elasticity.elasticity: compute_elastic_config elasticity_enabled ensure_immutable_elastic_config HCN_LIST
deepspeed.elasticity.elasticity: get_valid_gpus get_candidate_batch_sizes get_best_candidates
deepspeed.elasticity.utils: is_torch_elastic_compatible
deepspeed.runtime.comm.compressed: CompressedBackend
deepspeed.runtime.comm.nccl: NcclBackend
deepspeed.runtime.comm.mpi: MpiBackend
deepspeed.env_report: main cli_main
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME
deepspeed.ops: adam adagrad lion aio op_builder sparse_attention __compatible_ops__
deepspeed.ops.sparse_attention: SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig
deepspeed.ops.sparse_attention: BigBirdSparsityConfig BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig
deepspeed.ops.sparse_attention: SparseSelfAttention BertSparseSelfAttention SparseAttentionUtils
deepspeed.ops.sparse_attention.matmul: MatMul
deepspeed.ops.sparse_attention.softmax: Softmax
deepspeed.ops.sparse_attention.sparsity_config: SparsityConfig FixedSparsityConfig
deepspeed.ops.sparse_attention.sparse_self_attention: SparseSelfAttention
deepspeed.ops.sparse_attention.bert_sparse_self_attention: BertSparseSelfAttention
deepspeed.ops.sparse_attention.sparse_attention_utils: SparseAttentionUtils
deepspeed.runtime.config: get_sparse_attention
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adam.cpu_adam: DeepSpeedCPUAdam
deepspeed.ops.adam.fused_adam: FusedAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.ops.lamb: FusedLamb
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops.op_builder: CPUAdamBuilder FusedAdamBuilder FusedLambBuilder AsyncIOBuilder UtilsBuilder InferenceBuilder
deepspeed.ops.op_builder.all_ops: ALL_OPS
deepspeed.ops.op_builder.builder: OpBuilder
deepspeed.profiling.flops_profiler: get_model_profile FlopsProfiler
deepspeed.profiling.flops_profiler.profiler: get_model_profile FlopsProfiler number_to_string
deepspeed.checkpoint.utils: clone_tensors_for_torch_save get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank
deepspeed.checkpoint: DeepSpeedCheckpoint ZeROCheckpoint SubparamShape enable_universal_checkpoint merge_state
deepspeed.checkpoint: get_layer_ckpt_name_for_rank get_model_3d_descriptor model_3d_desc reshape_meg_2d_parallel PARAM
deepspeed.checkpoint.constants: UNIVERSAL_CHECKPOINT_INFO PARAM CAT_DIM VOCAB_TENSOR SUB_PARAM_SHAPE PARAM_N_SUB_PARAMS
deepspeed.checkpoint.constants: UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE
deepspeed.checkpoint.deepspeed_checkpoint: DeepSpeedCheckpoint ARGS_KEY ITERATION_KEY
deepspeed.checkpoint.ds_to_universal: main parse_arguments merge_tp_slices extract_zero_shards dp_index_to_str
deepspeed.checkpoint.reshape_3d_utils: model_3d_desc get_model_3d_descriptor
deepspeed.checkpoint.reshape_meg_2d: meg_2d_parallel_map reshape_meg_2d_parallel
deepspeed.checkpoint.reshape_utils: merge_state get_zero_files get_files_with_prefix partition_data
deepspeed.checkpoint.universal_checkpoint: SubparamShape enable_universal_checkpoint load_hp_checkpoint_state
deepspeed.checkpoint.zero_checkpoint: ZeROCheckpoint
deepspeed.monitor.monitor: Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor CometMonitor
deepspeed.monitor.config: DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig WandbConfig CSVConfig CometConfig
deepspeed.monitor.csv_monitor: csvMonitor Monitor
deepspeed.monitor.tensorboard: TensorBoardMonitor check_tb_availability
deepspeed.monitor.wandb: WandbMonitor check_wandb_availability
deepspeed.monitor.comet: CometMonitor EventsLogScheduler check_comet_availability
deepspeed.monitor.utils: check_tb_availability check_wandb_availability check_comet_availability
deepspeed.utils: logger log_dist groups zero_to_fp32 RepeatingLoader is_initialized OnDevice instrument_w_nvtx
deepspeed.utils: set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter
deepspeed.utils: safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
deepspeed.utils: safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
deepspeed.utils: safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
deepspeed.utils: safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
deepspeed.moe.sharded_moe: MOELayer TopKGate dist top1gating top2gating topkgating
deepspeed.utils.groups: _get_sequence_parallel_world_size _get_sequence_parallel_rank _get_data_parallel_group
deepspeed.utils.groups: get_data_parallel_world_size get_data_parallel_rank get_model_parallel_world_size
deepspeed.utils.logging: logger log_dist print_json_dist set_log_level_from_string
deepspeed.utils.zero_to_fp32: convert_zero_checkpoint_to_state_dict to_torch_tensor
deepspeed.utils.zero_to_torch: main
deepspeed.utils.nvtx: instrument_w_nvtx
deepspeed.utils.init_on_device: OnDevice
deepspeed.utils: safe_update_full_grad_vectorized set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix
deepspeed.utils.torch: required_torch_version
deepspeed.utils.timer: SynchronizedWallClockTimer ThroughputTimer FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER
deepspeed.utils.timer: BACKWARD_MICRO_TIMER BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER
deepspeed.utils.timer: BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER
deepspeed.utils.timer: STEP_MICRO_TIMER STEP_GLOBAL_TIMER
deepspeed.utils.zero_to_fp32: load_state_dict_from_zero_checkpoint get_fp32_state_dict_from_zero_checkpoint
"""
ROWS = [(line.split(":")[0], name) for line in NAMES.strip().splitlines() for name in line.split(":")[1].split()]


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.feature("deepspeed names", "the names that scripts import, under DeepSpeed's modules")
@pytest.mark.parametrize(("module", "name"), ROWS, ids=[f"{module}.{name}" for module, name in ROWS])
def test_name_exists(module: str, name: str) -> None:
    parent, _, child = module.rpartition(".")
    shortcuts = {"deepspeed.zero": deepspeed.zero, "deepspeed.checkpointing": deepspeed.checkpointing}
    found = shortcuts.get(module) or importlib.import_module(module)
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


@pytest.mark.feature("deepspeed names", "a name that ds_hf lacks says so, and what to take instead")
def test_absent_attribute_says_so_and_stays_absent() -> None:
    assert not hasattr(deepspeed, "DeepSpeedTransformerLayer")
    with pytest.raises(
        AttributeError, match=r"ds_hf does not provide deepspeed\.DeepSpeedTransformerLayer \(yet\), which DeepSpeed"
    ):
        _ = deepspeed.DeepSpeedTransformerLayer
    with pytest.raises(AttributeError, match=r"partition_parameters\.AllGatherHandle \(yet\), which DeepSpeed has"):
        _ = deepspeed.runtime.zero.partition_parameters.AllGatherHandle
    with pytest.raises(AttributeError, match=r"there is no deepspeed\.initialise in .* mean deepspeed\.initialize\?"):
        _ = deepspeed.initialise  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"there is no deepspeed\.runtime\.utils\.set_randm_seed"):
        _ = deepspeed.runtime.utils.set_randm_seed


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import deepspeed.inference.v2", r"Take deepspeed\.init_inference, to serve many requests vLLM"),
        ("from deepspeed import DeepSpeedTransformerLayer", r"Take the model of transformers"),
        ("import deepspeed.moe.ep_router", r"Take a mixture-of-experts model of transformers"),
        ("from deepspeed.runtime.zero import MiCS_Init", r"Take deepspeed\.zero\.Init"),
        ("from deepspeed.runtime.zero.mics import MiCS_Init", r"Take deepspeed\.zero\.Init"),
        ("from deepspeed.sequence.fpdt_layer import FPDT_Attention", r"which DeepSpeed has"),
        ("from deepspeed.runtime.engine import see_memory_usage", r"here is deepspeed\.\S*see_memory_usage"),
    ],
)
def test_absent_import_says_so(statement: str, said: str) -> None:
    with pytest.raises(ImportError, match=rf"ds_hf does not provide deepspeed\.\S+ \(yet\).*{said}"):
        exec(statement, {})


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "from deepspeed.runtime.engine import DeepSpeedEngin",
            r"did you mean deepspeed\.runtime\.engine\.DeepSpeedEngine",
        ),
        ("from deepspeed.utils.logging import loger", r"did you mean deepspeed\.utils\.logging\.logger"),
        ("import deepspeed.util", r"did you mean deepspeed\.utils"),
    ],
)
def test_a_misspelt_import_names_the_nearest(statement: str, said: str) -> None:
    with pytest.raises(ImportError, match=rf"there is no deepspeed\.\S+ in DeepSpeed or in ds_hf.*{said}"):
        exec(statement, {})


@pytest.mark.parametrize(
    ("module", "name", "known", "near"),
    [
        ("deepspeed.runtime.config", "TRAIN_BATCH_SIZE", True, ""),  # from constants, by a star
        ("deepspeed.runtime.constants", "GRADIENT_CLIPPING_DEFAULT", True, ""),
        ("deepspeed.runtime.zero.config", "ZERO_OPTIMIZATION", True, ""),
        ("deepspeed.runtime.zero.stage3", "_resolve_grad_dtype", False, ""),
        ("deepspeed.runtime.zero.partition_parameters", "_init_external_params", True, ""),
        ("deepspeed.utils.groups", "_get_expert_parallel_group", True, ""),
        ("deepspeed.utils.groups", "_get_data_parallel_group", True, "deepspeed.utils.groups.get_data_parallel_group"),
        ("deepspeed.inference.v2.config_v2", "DeepSpeedTPConfig", True, ""),
        ("deepspeed.ops.op_builder.cpu.builder", "CPUOpBuilder", True, ""),
        ("deepspeed.zero", "gatheredparameters", False, "GatheredParameters"),
        ("deepspeed.zero", "GatherdParameters", False, "GatheredParameters"),
        ("deepspeed.utils", "zero_gradients", False, ""),
    ],
)
def test_the_message_knows_all_names_and_offers_near_ones_alone(module: str, name: str, known: bool, near: str) -> None:
    text = _missing.explain(module, name)
    assert ("which DeepSpeed has" in text) == known
    assert ("in DeepSpeed or in ds_hf" in text) == (not known)
    offered = "did you mean" in text or "The nearest thing here" in text
    assert offered == bool(near)
    assert near in text


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


def test_scripts_ask_the_accelerator_for_its_name() -> None:
    assert deepspeed.get_accelerator()._name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_constants_of_schedules_are_the_keys_of_the_json() -> None:
    schedules = deepspeed.runtime.lr_schedules
    names = [schedules.LR_RANGE_TEST, schedules.ONE_CYCLE, schedules.WARMUP_LR, schedules.WARMUP_DECAY_LR]
    assert sorted([*names, schedules.WARMUP_COSINE_LR]) == sorted(schedules.VALID_LR_SCHEDULES)
    for name in schedules.VALID_LR_SCHEDULES:
        accepted = set(inspect.signature(getattr(schedules, name)).parameters) - {"optimizer", "mode"}
        accepted -= {"last_batch_iteration"}
        assert accepted <= {value for key, value in vars(schedules).items() if key.isupper() and isinstance(value, str)}


def test_required_torch_version() -> None:
    required = deepspeed.utils.torch.required_torch_version
    assert required(min_version=1.8)
    assert required(min_version="2.0.1")
    assert not required(min_version=99)
    assert not required(max_version=1.13)
    assert required(max_version=torch.__version__.split("+")[0])
    assert required(min_version=1.5, max_version=99)
    assert not required(min_version=1.5, max_version=1.13)
    with pytest.raises(ValueError, match="or both"):
        required()


def test_optimizers_take_what_accelerate_gives_them() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    groups = torch.optim.AdamW([weights], lr=0.1, weight_decay=0.5).param_groups
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.1, weight_decay=0.0, adamw_mode=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    weights.grad = torch.ones(3)
    optimizer.step()
    # decoupled decay of the group (0.1 x 0.5), then Adam's first step (the learning rate itself)
    assert weights.tolist() == pytest.approx([0.85, 0.85, 0.85], abs=1e-6)


@pytest.mark.feature("deepspeed names", "deepspeed.ops: builders and __compatible_ops__ answer what is here")
def test_builders_answer_what_is_here() -> None:
    ops = deepspeed.ops
    assert ops.__compatible_ops__[ops.aio.AsyncIOBuilder.NAME] is True
    assert ops.aio.AsyncIOBuilder().load().aio_handle(queue_depth=4).get_queue_depth() == 4
    builder = ops.op_builder.CPUAdamBuilder()
    assert builder.is_compatible()
    assert builder.NAME == "cpu_adam"
    assert builder.load().DeepSpeedCPUAdam is ops.adam.DeepSpeedCPUAdam
    quantizer = ops.op_builder.all_ops.ALL_OPS["quantizer"]
    assert isinstance(quantizer, ops.op_builder.OpBuilder)
    assert not quantizer.is_compatible()
    with pytest.raises(RuntimeError, match="quantizer of DeepSpeed is not in ds_hf"):
        quantizer.load()
    assert {name: one.is_compatible() for name, one in ops.op_builder.all_ops.ALL_OPS.items()} == ops.__compatible_ops__
