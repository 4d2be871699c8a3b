"""DeepSpeed's layer of experts, divided over processes, against plain torch on one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_distributed
from tests.helpers.moe_layer import Net, Plain, batch, fill

STEPS, ACCUMULATION = 2, 2
GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **GATHERS},
        **more,
    }


def tokens_of(rank: int) -> int:
    return 10 + 3 * rank  # processes need not have equally many


def engine_of(sizes: tuple[int, int, int], stage: int, **more: Any) -> Any:
    model = Net(sizes).double()
    fill(model)
    return deepspeed.initialize(model=model, config=config(stage, **more))[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    rank, world, norms = dist.get_rank(), dist.get_world_size(), []
    for step in range(first, first + steps):
        for micro in range(ACCUMULATION):
            x = batch((step * ACCUMULATION + micro) * world + rank, tokens_of(rank))
            engine.backward(engine(x))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def plain_training(
    world: int, steps: int, clip: float = 0.0, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and norms of all micro-batches on one process."""
    model, norms = Net((1, 1, 1), Plain).double().to(device), []
    fill(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            for rank in range(world):
                loss = model(batch((step * ACCUMULATION + micro) * world + rank, tokens_of(rank)).to(device))
                (loss / ACCUMULATION / world).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def farthest(engine: Any, wanted: dict[str, torch.Tensor]) -> float:
    """How far a weight of this process is off."""
    named = dict(engine.module.named_parameters())
    assert set(named) <= set(wanted)
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return max(float((param.detach() - wanted[name]).abs().max()) for name, param in named.items())


def trained(sizes: tuple[int, int, int], stages: tuple[int, ...]) -> list[Any]:
    torch.set_num_threads(1)
    found = []
    for clip in (0.0, 0.05):
        wanted, norms = plain_training(dist.get_world_size(), STEPS, clip)
        for stage in stages if clip else stages[:1]:
            engine = engine_of(sizes, stage, gradient_clipping=clip)
            got = train(engine, 0, STEPS)
            apart = max(abs(a - b) / b for a, b in zip(got, norms, strict=True))
            found.append((stage, clip, farthest(engine, wanted), apart))
            engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, (2, 2, 2)),
        pytest.param(4, (2, 2, 2), marks=pytest.mark.slow),
        pytest.param(4, (4, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_weights_and_norms_are_those_of_one_process(world: int, sizes: tuple[int, int, int]) -> None:
    for found in run_distributed(trained, world, sizes, (0, 1, 2, 3), timeout=120):
        for stage, clip, weights, norms in found:  # norms are taken in fp32
            assert max(norms / 1e-6, weights / (1e-8 if clip else 1e-12)) <= 1, (stage, clip, weights, norms)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumed(folder: str, through: tuple[tuple[tuple[int, int, int], int], ...]) -> list[Any]:
    """Train two steps without a pause; and with one, in which files go ``through`` other divisions and stages."""
    torch.set_num_threads(1)
    sizes, stage = through[0]
    engine = engine_of(sizes, stage)
    train(engine, 0, 1)
    engine.save_checkpoint(f"{folder}/0")
    train(engine, 1, 1)
    wanted = whole(engine)
    engine.destroy()
    for number, (sizes, stage) in enumerate(through[1:]):
        engine = engine_of(sizes, stage)
        assert engine.load_checkpoint(f"{folder}/{number}")[0]
        engine.save_checkpoint(f"{folder}/{number + 1}")
        engine.destroy()
    engine = engine_of(*through[0])
    engine.load_checkpoint(f"{folder}/{len(through) - 1}")
    train(engine, 1, 1)
    return [wanted, whole(engine)]


def whole(engine: Any) -> dict[str, torch.Tensor]:
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


@pytest.mark.parametrize(
    ("world", "through"),
    [
        (2, (((2, 2, 2), 2), ((1, 2, 1), 3), ((1, 1, 1), 1))),
        pytest.param(4, (((2, 4, 2), 3), ((4, 2, 1), 0), ((1, 1, 4), 2)), marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_from_any_division_to_any_other(world: int, through: Any, tmp_path: Path) -> None:
    for wanted, got in run_distributed(resumed, world, str(tmp_path), through, timeout=120):
        assert wanted.keys() == got.keys()
        assert all(torch.equal(got[name], value) for name, value in wanted.items())
    whole_names = {name for name, _ in Net((1, 1, 1)).named_parameters()}
    deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "0"), str(tmp_path / "fp32"))
    state = torch.load(tmp_path / "fp32" / "pytorch_model.bin")
    assert set(state) == whole_names


def saved_whole(folder: str, stage: int) -> dict[str, torch.Tensor]:
    engine = engine_of((2, 2, 2), stage)
    engine.save_16bit_model(folder, "weights.bin")
    return whole(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_put_together(stage: int, tmp_path: Path) -> None:
    parts = run_distributed(saved_whole, 2, str(tmp_path), stage)
    state = torch.load(tmp_path / "weights.bin")
    assert set(state) == {name for name, _ in Net((1, 1, 1)).named_parameters()}
    assert all(torch.equal(state[name], value) for part in parts for name, value in part.items())


# -- groups, and what is refused ---------------------------------------------------------------------------------------


def groups_of(sizes: tuple[int, int, int]) -> dict[str, Any]:
    from deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups

    with deepspeed.zero.Init(config_dict_or_path=config(3), enabled=sizes[0] > 1):
        model = Net(sizes)
    given = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}, max_group_size=400
    )
    assert has_moe_layers(model) == (True, 4)
    engine = deepspeed.initialize(model=model, model_parameters=given, config=config(3))[0]
    loss = engine(batch(dist.get_rank()).float())
    engine.backward(loss)
    engine.step()
    found = {
        name: (groups._get_expert_parallel_group_ranks(name), groups._get_expert_data_parallel_group_ranks(name))
        for name in groups._get_expert_parallel_group_dict()
    }
    assert dist.get_world_size(groups._get_max_expert_parallel_group()) == groups._get_max_expert_size()
    names = [(group["name"], group.get("moe", False), group["weight_decay"]) for group in given]
    deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config(1))
    assert not groups._get_expert_parallel_group_dict()  # the functions answer for the engine that was made last
    return {"found": found, "names": list(dict.fromkeys(names)), "largest": max(len(g["params"]) for g in given[1:])}


def test_groups_have_deepspeeds_names_and_parameter_groups_train_under_init() -> None:
    for rank, said in enumerate(run_distributed(groups_of, 2, (2, 1, 2))):
        assert said["found"] == {"ep_size_1": ([rank], [0, 1]), "ep_size_2": ([0, 1], [rank])}
        assert said["names"] == [("all", False, 0.1), ("ep_size_2", True, 0.1), ("ep_size_1", True, 0.1)]


def refusal(case: str) -> str:
    model: Any = Net((2, 2, 2))
    mpu = None
    if case == "marks":
        model = torch.nn.Linear(4, 4)
        model.weight.allreduce, model.weight.group_name = False, "ep_size_2"
    elif case == "size":
        model = Net((4, 1, 1))
    elif case == "no engine":
        with pytest.raises(ValueError) as error:
            model(batch(0).float())
        return str(error.value)
    more = {"tensor_parallel": {"autotp_size": 2}} if case == "tensor" else {}
    with pytest.raises(ValueError) as error:
        deepspeed.initialize(model=model, mpu=mpu, config=config(1, **more))
    return str(error.value)


def refusals() -> dict[str, str]:
    return {case: refusal(case) for case in ("marks", "size", "tensor", "no engine")}


def test_what_cannot_be_is_refused_before_training() -> None:
    expert = torch.nn.Linear(4, 4)
    for settings, said in (
        ({"num_experts": 3, "ep_size": 2}, "3 experts cannot be divided over ep_size 2"),
        ({"enable_expert_tensor_parallelism": True}, "leave it out"),
        ({"expert": torch.nn.Tanh()}, "without parameters"),
    ):
        with pytest.raises(ValueError, match=said):
            deepspeed.moe.layer.MoE(4, **{"expert": expert, **settings})
    for said in run_distributed(refusals, 2):
        assert "weight is marked as an expert of some processes" in said["marks"]
        assert "MoE(ep_size=...) 4 does not divide the 2 processes" in said["size"]
        assert "tensor_parallel.autotp_size is 2 and experts are divided over 2" in said["tensor"]
        assert "deepspeed.initialize() makes known" in said["no engine"]


# -- what processes tell each other of parameters that have other names there ------------------------------------------


def told() -> str:
    from ds_hf.engine.parallel import likeness

    likeness.warn_once = lambda text, **_: pytest.fail(text)
    model = Net((2, 2, 2)).double()
    fill(model)
    model = copy.deepcopy(model)  # torch copies parameters without marks
    engine = deepspeed.initialize(model=model, config=config(1, gradient_clipping=0.0, ds_hf={"nonfinite": "error"}))[0]
    train(engine, 0, 3)
    wanted, _ = plain_training(2, 3)
    assert farthest(engine, wanted) < 1e-12
    if dist.get_rank() == 1:
        expert = engine.module.blocks[0].moe.deepspeed_moe.experts.deepspeed_experts[0]
        expert[0].weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(RuntimeError) as error:
        train(engine, 3, 1)
    with pytest.raises(RuntimeError, match="has experts of its own as modules"):
        list(engine.named_weights())
    return str(error.value)


def test_the_expert_whose_gradient_is_not_finite_is_named() -> None:
    for said in run_distributed(told, 2):
        assert "not finite is 'blocks.0.moe.deepspeed_moe.experts.deepspeed_experts.2.0.weight'" in said


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_runs_without_values(k: int) -> None:
    for drops in (True, False):
        with torch.device("meta"):
            layer = deepspeed.moe.layer.MoE(8, torch.nn.Linear(8, 8), 4, 2, k, drop_tokens=drops)
        result, aux, _ = layer(torch.empty(2, 3, 8, device="meta"))
        (result.sum() + aux).backward()
        assert (result.shape, result.is_meta) == ((2, 3, 8), True)
