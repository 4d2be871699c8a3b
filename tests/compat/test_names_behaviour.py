"""What the names of ``deepspeed`` do: collectives, checkpointing, tools, as scripts use them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.utils import (
    CheckOverflow,
    clip_grad_norm_,
    get_global_norm,
    get_weight_norm,
    partition_balanced,
    partition_uniform,
)
from torch import nn

from tests.compat.accelerate_user import Regressor, loss_of, plain_batches
from tests.compat.common import WORLD, run_user_code, write_json


def collectives() -> dict[str, Any]:
    """Every collective of deepspeed.comm, with numbers that tell the ranks apart."""
    import deepspeed.comm as dist

    deepspeed.init_distributed()
    device = deepspeed.get_accelerator().current_device_name()
    rank, world = dist.get_rank(), dist.get_world_size()

    def mine(numel: int = 2) -> torch.Tensor:
        return torch.full((numel,), float(rank + 1), device=device)

    found: dict[str, Any] = {"rank": rank, "world": world, "local": dist.get_local_rank()}
    reduced = mine()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    found["all_reduce"] = reduced.tolist()
    gathered = torch.empty(2 * world, device=device)
    dist.all_gather_into_tensor(gathered, mine())
    found["all_gather_into_tensor"] = gathered.tolist()
    numbers = torch.zeros(dist.get_world_size(), device=gathered.device)
    dist.all_gather_into_tensor(numbers, mine()[0])  # which has no dimension
    assert numbers.tolist() == gathered[:: mine().numel()].tolist()
    listed = [torch.empty(2, device=device) for _ in range(world)]
    dist.all_gather(listed, mine())
    found["all_gather"] = [part.tolist() for part in listed]
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, mine(2 * world))
    found["reduce_scatter_tensor"] = scattered.tolist()
    exchanged = torch.empty(world, device=device)
    dist.all_to_all_single(exchanged, mine(world))
    found["all_to_all_single"] = exchanged.tolist()
    sent = mine()
    dist.broadcast(sent, src=world - 1)
    found["broadcast"] = sent.tolist()
    objects: list[Any] = [{"from": rank}]
    dist.broadcast_object_list(objects, src=0)
    found["broadcast_object_list"] = objects
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, rank)
    found["all_gather_object"] = everybody
    pair = [mine(), mine()]
    dist.all_reduce_coalesced(pair)
    found["all_reduce_coalesced"] = [part.tolist() for part in pair]
    outputs = [torch.empty(world, device=device) for _ in range(2)]
    dist.all_gather_coalesced(outputs, [mine(1), mine(1)], async_op=True).wait()
    found["all_gather_coalesced"] = [part.tolist() for part in outputs]
    found["inference_all_reduce"] = dist.inference_all_reduce(mine()).tolist()
    group = dist.new_group(list(range(world)))
    found["group"] = dist.get_all_ranks_from_group(group)
    found["mesh"] = dist.initialize_mesh_device((world,), ("data_parallel",)).size()
    if world > 1:
        message = mine()
        if rank == 0:
            dist.send(message, dst=1)
        elif rank == 1:
            dist.recv(message, src=0)
        found["recv"] = message.tolist()
    dist.barrier(prof=True, log_name="end", debug="here")
    named = torch.empty(2 * world, device=device)
    dist.all_gather_into_tensor(output_tensor=named, tensor=mine(), prof=False)
    dist.reduce_scatter_tensor(output_tensor=scattered, tensor=named, debug="here")
    dist.all_to_all_single(exchanged, tensor=mine(world), log_name="here")
    found["by DeepSpeed's names"] = [named.tolist(), scattered.tolist(), exchanged.tolist()]
    return found


@pytest.mark.feature("deepspeed names", "deepspeed.comm: collectives on torch's default group")
def test_collectives_of_deepspeed_comm() -> None:
    total = float(sum(range(1, WORLD + 1)))
    for rank, found in enumerate(run_user_code(collectives)):
        each = [float(other + 1) for other in range(WORLD)]
        assert (found["rank"], found["world"], found["local"]) == (rank, WORLD, rank)
        assert found["all_reduce"] == [total, total]
        assert found["all_gather_into_tensor"] == [value for value in each for _ in range(2)]
        assert found["all_gather"] == [[value, value] for value in each]
        assert found["reduce_scatter_tensor"] == [total, total]
        assert found["all_to_all_single"] == each
        assert found["broadcast"] == [float(WORLD)] * 2
        assert found["broadcast_object_list"] == [{"from": 0}]
        assert found["all_gather_object"] == list(range(WORLD))
        assert found["all_reduce_coalesced"] == [[total, total]] * 2
        assert found["all_gather_coalesced"] == [each, each]
        assert found["inference_all_reduce"] == [total, total]
        assert found["group"] == list(range(WORLD))
        assert found["mesh"] == WORLD
        gathered = [value for value in each for _ in range(2)]
        assert found["by DeepSpeed's names"] == [gathered, [WORLD * (rank + 1.0)] * 2, each]
        if WORLD > 1:
            assert found["recv"] == [1.0 if rank in (0, 1) else rank + 1.0] * 2


class Dropping(nn.Module):
    """A block with dropout: a recomputation that draws other numbers gives other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x, 0.5)


def gradient(checkpointed: bool, settings: dict[str, Any]) -> tuple[list[float], float, list[int]]:
    """Gradient of two blocks; the next random number; how often each ran."""
    device = deepspeed.get_accelerator().current_device_name()
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(None, **settings)
    assert checkpointing.is_configured()
    torch.manual_seed(5)
    blocks = nn.ModuleList(Dropping() for _ in range(2)).to(device)
    checkpointing.model_parallel_cuda_manual_seed(11)
    calls = [0, 0]

    def run(index: int, x: torch.Tensor) -> torch.Tensor:
        calls[index] += 1
        return blocks[index](x)

    x = torch.ones(64, 8, device=device, requires_grad=True)
    for index in range(2):
        x = checkpointing.checkpoint(run, index, x) if checkpointed else run(index, x)
    x.square().mean().backward()
    after = float(torch.rand(1, device=device))
    return blocks[0].linear.weight.grad.flatten().tolist(), after, calls


@pytest.mark.feature("deepspeed names", "deepspeed.checkpointing: recomputation with the same random numbers")
@pytest.mark.parametrize("settings", [{}, {"checkpoint_in_cpu": True}, {"synchronize": True, "profile": True}], ids=str)
def test_checkpointing_gives_the_gradient_without_it(settings: dict[str, Any]) -> None:
    plain, after, _ = gradient(False, {})
    ours, ours_after, calls = gradient(True, settings)
    assert ours == plain
    assert ours_after == after
    assert calls == [2, 2]


def test_checkpointing_reads_the_section_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    section = {"partition_activations": True, "cpu_checkpointing": True, "profile": True}
    file = tmp_path / "ds.json"
    write_json(file, {"train_batch_size": 1, "activation_checkpointing": section})
    from ds_hf.deepspeed_api.activation_checkpointing import ActivationCheckpointing

    class Parallel:
        def __init__(self, size: int) -> None:
            self.size = size

        def get_model_parallel_world_size(self) -> int:
            return self.size

    one = ActivationCheckpointing()
    assert not one.is_configured()
    one.configure(Parallel(1), deepspeed_config=str(file), profile=False)
    assert (one.in_host_memory, one.profile, one.is_configured()) == (True, False, True)
    with pytest.raises(ValueError, match="partition_activations over 2 model-parallel ranks is not supported yet"):
        one.configure(Parallel(2), deepspeed_config=str(file))


def test_the_tracker_keeps_its_states_apart() -> None:
    tracker = deepspeed.runtime.activation_checkpointing.checkpointing.CudaRNGStatesTracker()
    device = deepspeed.get_accelerator().current_device_name()
    tracker.add("a", 3)
    torch.manual_seed(1)
    before = deepspeed.get_accelerator().get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(2, device=device).tolist()
    assert torch.equal(deepspeed.get_accelerator().get_rng_state(), before)
    with tracker.fork("a"):
        second = torch.rand(2, device=device).tolist()
    deepspeed.get_accelerator().manual_seed(3)
    assert torch.rand(2, device=device).tolist() == first
    assert second != first
    with pytest.raises(ValueError, match="seed 3 already belongs"):
        tracker.add("b", 3)
    with pytest.raises(KeyError, match="no state 'c'"), tracker.fork("c"):
        pass


def kinds() -> dict[int, tuple[bool, ...]]:
    from deepspeed.runtime import DeepSpeedOptimizer, ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    found = {}
    for stage in (0, 1, 2, 3):
        model = Regressor()
        _, optimizer, _, _ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            },
        )
        classes = (DeepSpeedOptimizer, ZeROOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
        found[stage] = tuple(isinstance(optimizer, one) for one in classes)
        assert not isinstance(optimizer, FP16_Optimizer)  # no 16-bit parameters
    assert not isinstance(torch.optim.AdamW(model.parameters()), DeepSpeedOptimizer)
    for name in ("fp16", "bf16"):
        for stage in (0, 2):
            config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
            config |= {name: {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
            engine, optimizer, *_ = deepspeed.initialize(model=Regressor(), config=config)
            whole = isinstance(optimizer, FP16_Optimizer), isinstance(optimizer, BF16_Optimizer)
            assert whole == ((stage == 0), (stage == 0 and name == "bf16"))
            assert {flat.dtype for flat in optimizer.fp32_groups_flat} == {torch.float32}
            assert Path(engine._get_optimizer_ckpt_name("a", "b", 0)).parent == Path("a/b")
    lamb = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "optimizer": {"type": "Lamb", "params": {}}}
    _, optimizer, *_ = deepspeed.initialize(model=Regressor(), config=lamb)
    assert isinstance(optimizer, FP16_UnfusedOptimizer)
    assert not isinstance(optimizer, FP16_Optimizer)
    assert [id(p) for group in optimizer.fp32_groups for p in group] == [id(p) for p in optimizer.fp32_groups_flat]
    return found


@pytest.mark.feature("deepspeed names", "isinstance(engine.optimizer, DeepSpeedZeroOptimizer...) by stage")
def test_isinstance_tells_the_stage_of_an_optimizer() -> None:
    found = run_user_code(kinds)[0]
    assert found == {
        0: (True, False, False, False),
        1: (True, True, True, False),
        2: (True, True, True, False),
        3: (True, True, False, True),
    }


def test_deepspeed_config_by_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    types = deepspeed.DeepSpeedConfig({"train_batch_size": 2, "data_types": {"buffer_dtype": "bf16"}})
    assert (types.param_dtype, types.buffer_dtype) == (None, torch.bfloat16)
    config = deepspeed.DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        }
    )
    assert (config.train_micro_batch_size_per_gpu, config.world_size, config.zero_optimization_stage) == (2, 2, 3)
    assert (config.zero_enabled, config.bfloat16_enabled, config.fp16_enabled) == (True, True, False)
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 0.5})
    assert config.zero_config.stage == deepspeed.runtime.zero.config.ZeroStageEnum.weights
    with pytest.raises(AttributeError, match="no attribute 'zero_config_'"):
        _ = config.zero_config_
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="train_batch_sise"):
        deepspeed.DeepSpeedConfig({"train_batch_sise": 8})


@pytest.mark.feature("deepspeed names", "deepspeed.profiling.flops_profiler: get_model_profile and FlopsProfiler")
def test_flops_of_a_linear_layer(tmp_path: Path) -> None:
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    macs = 8 * (16 * 32 + 32 * 4)
    params = 16 * 32 + 32 + 32 * 4 + 4
    report = tmp_path / "profile.txt"
    found = get_model_profile(model, input_shape=(8, 16), as_string=False, output_file=str(report))
    assert found == (2 * macs + 8 * (32 + 4), macs, params)  # the biases are added
    assert "flops profile" in report.read_text()
    assert get_model_profile(model, args=[torch.ones(8, 16)], print_profile=False) == (
        "10.53 K",
        "5.12 KMACs",
        "676 ",
    )
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(8, 16)).sum().backward()
    profiler.stop_profile()
    # backward: the gradient of every weight, and of the input of the second layer
    assert profiler.get_total_macs() == 2 * macs + 8 * 32 * 4
    assert profiler.get_total_duration() > 0
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


@pytest.mark.parametrize(("splits", "bias"), [((1, 1), True), ((3, 2), True), ((2, 3), False)])
def test_tiled_linear_is_the_whole_layer(splits: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(10, 7, bias=bias)
    tiled = deepspeed.zero.TiledLinear(10, 7, bias=bias, in_splits=splits[0], out_splits=splits[1], init_linear=whole)
    x = torch.randn(4, 10)
    torch.testing.assert_close(tiled(x), whole(x), rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())
    with pytest.raises(RuntimeError, match="in_splits is 11"):
        deepspeed.zero.TiledLinear(10, 7, in_splits=11)


def test_on_device_builds_on_meta_in_a_dtype() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16):
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    assert nn.Linear(2, 2).weight.dtype == torch.float32
    with deepspeed.OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_norms_overflow_and_partitions() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(12))]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    assert not CheckOverflow([params]).check()
    assert float(clip_grad_norm_(params, 1.0)) == pytest.approx(8.0)
    assert get_global_norm([float(param.grad.norm()) for param in params if param.grad is not None]) == pytest.approx(
        1.0
    )
    params[1].grad = torch.tensor([float("inf")] * 12)
    assert CheckOverflow([params]).check()
    # what DeepSpeed 0.19.8 gives
    assert partition_uniform(10, 3) == [0, 4, 7, 10]
    assert partition_uniform(9, 3) == [0, 3, 6, 9]
    assert partition_balanced([1, 1, 1, 1, 8], 2) == [0, 4, 5]
    assert partition_balanced([4, 1, 1, 1, 1, 4], 3) == [0, 1, 5, 6]


def norms_with_experts() -> tuple[float, float, float]:
    """One dense parameter and an expert, whose gradient and weight are larger on the second process."""
    deepspeed.init_distributed()
    params = [nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0 + 8 * deepspeed.comm.get_rank()]))]
    params[1].allreduce = False  # type: ignore[attr-defined]
    weights = get_weight_norm(params)
    for param in params:
        param.grad = param.detach().clone()
    norm = float(clip_grad_norm_(params, 1.0))
    assert params[0].grad is not None
    return weights, norm, float(params[0].grad)


def test_norms_with_experts_are_the_mean_of_all_processes() -> None:
    mean = (5 + 153**0.5) / 2  # as in DeepSpeed's TestClipGradNorm: the same on all of them
    for weights, norm, clipped in run_user_code(norms_with_experts):
        assert (weights, norm) == (pytest.approx(mean), pytest.approx(mean))
        assert clipped == pytest.approx(3 / mean, rel=1e-5)


def clip_of_an_engine() -> str:
    model = Regressor()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(loss_of(engine, plain_batches(1, 2)[0]))
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(model.parameters(), 1.0)
    return str(caught.value)


def test_clipping_by_hand_what_an_engine_clips_is_refused() -> None:
    assert "set gradient_clipping in the configuration" in run_user_code(clip_of_an_engine)[0]


def test_timers_and_messages(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from deepspeed.utils import instrument_w_nvtx, logger, see_memory_usage
    from deepspeed.utils.logging import print_json_dist, set_log_level_from_string
    from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

    timers = SynchronizedWallClockTimer()
    timers("forward").start()
    timers("forward").stop(record=True)
    assert timers("forward").elapsed(reset=False) > 0
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="steps_per_output"):
            ThroughputTimer(steps_per_output=wrong)  # type: ignore[arg-type]
    speed = ThroughputTimer(batch_size=4, start_step=0)
    for _ in range(3):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0
    level = logger.level
    logger.addHandler(caplog.handler)
    try:
        set_log_level_from_string("info")
        timers.log(["forward", "never started"])
        see_memory_usage("silent")
        see_memory_usage("after the model", force=True)
        deepspeed.utils.log_dist("hello", ranks=[0])
        deepspeed.utils.log_dist("not here", ranks=[7])
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    text = caplog.text
    assert "time (ms) | forward: " in text
    assert "never started" not in text
    assert "after the model" in text
    assert "silent" not in text
    assert "hello" in text
    assert "not here" not in text
    with pytest.raises(ValueError, match="'loud' is not a logging level"):
        set_log_level_from_string("loud")
    print_json_dist({"a": 1}, path=tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == '{"a": 1, "rank": 0}'
    assert instrument_w_nvtx(len)("abc") == 3
    assert logging.getLogger("ds_hf") is logger


@pytest.mark.feature("deepspeed names", "get_accelerator(): device, memory, streams, events, random states, dtypes")
def test_the_surface_of_the_accelerator() -> None:
    here = deepspeed.get_accelerator()
    device = here.current_device_name()
    assert here.device_name() in device
    assert here.on_accelerator(torch.ones(1, device=device))
    assert torch.bfloat16 in here.supported_dtypes() or not here.is_bf16_supported()
    state = here.get_rng_state()
    first = torch.rand(3, device=device)
    here.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device), first)
    start, end = here.Event(enable_timing=True), here.Event(enable_timing=True)
    with here.stream(here.Stream()):
        start.record()
        torch.ones(8, device=device).sum()
        end.record()
    here.synchronize()
    assert start.elapsed_time(end) >= 0
    assert 0 < here.memory_allocated() + 1 <= here.total_memory()
    assert here.memory_cached() == pytest.approx(here.memory_reserved(), rel=0.2)
    here.empty_cache()
    here.reset_max_memory_cached()
    assert here.FloatTensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert here.HalfTensor(2, 3).shape == (2, 3)
    assert here.LongTensor([1]).device.type == here.device_name().partition(":")[0]
    assert here.create_op_builder("CPUAdamBuilder").is_compatible()
    assert here.get_op_builder("NoSuchBuilder") is None
    assert here.default_generator(0) is not None
    assert here.lazy_call(lambda: None) is None
    assert not hasattr(here, "no_such_thing")
    for name in ("use_host_timers", "resolves_data_dependency", "handles_memory_backpressure", "is_triton_supported"):
        assert isinstance(getattr(here, name)(), bool)


def test_whether_a_parameter_is_sharded() -> None:
    from deepspeed.runtime.zero.utils import is_zero_param, is_zero_supported_optimizer

    assert not is_zero_param(nn.Parameter(torch.ones(1)))
    assert is_zero_supported_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_zero_section_alone() -> None:
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.config import (
        DeepSpeedZeroConfig,
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    assert DeepSpeedZeroConfig(reduce_bucket_size=1).reduce_bucket_size == 1
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        DeepSpeedZeroConfig(reduce_bucket_size=0)
    assert DeepSpeedZeroConfig(stage3_prefetch_bucket_size=12345).prefetch_bucket_size == 12345
    assert DeepSpeedZeroConfig(leaf_module={"classes": "a.B", "names": ["c"]}).leaf_module.classes == ["a.B"]
    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in (0, 1, 2, 3)] == [False, False, False, True]
    flow = DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu"}, zenflow={"topk_ratio": 0.3}).zenflow
    assert isinstance(flow, ZenFlowConfig)
    assert flow.topk_ratio == 0.3
    plain = DeepSpeedZeroConfig(offload_param=None)
    assert (plain.stage, plain.offload_param, plain.offload_optimizer) == (0, None, None)
    assert isinstance(DeepSpeedZeroConfig(cpu_offload_param=True).offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline
    with pytest.raises(AttributeError, match="no setting 'nothing'"):
        _ = plain.nothing


def test_loss_scalers_by_dtype() -> None:
    from deepspeed.runtime.fp16 import loss_scaler

    args = {loss_scaler.INITIAL_LOSS_SCALE: 1024.0, loss_scaler.SCALE_WINDOW: 2, loss_scaler.DELAYED_SHIFT: 1}
    scaler = loss_scaler.CreateLossScaler(torch.float16, 0, True, args)
    assert isinstance(scaler, loss_scaler.DynamicLossScaler)
    scaler.update_scale(True)
    assert (scaler.cur_scale, scaler.loss_scale) == (512.0, 512.0)
    assert loss_scaler.CreateLossScaler(torch.float16, 128.0, False, None).loss_scale == 128.0
    assert loss_scaler.CreateLossScaler(torch.bfloat16, 128.0, True, args).loss_scale == 1.0
    with pytest.raises(ValueError, match=r"dynamic_loss_args\['init_scale'\] must be finite"):
        loss_scaler.CreateLossScaler(torch.float16, 0, True, {loss_scaler.INITIAL_LOSS_SCALE: float("inf")})
