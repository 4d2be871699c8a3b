"""Model parallelism beside ZeRO: 2 data-parallel x 2 model-parallel processes against plain torch in one process.

The model is divided by hand, as users of ``mpu=`` do; the one process sums in the same parts. fp32 weights agree to
1e-6 relative and gradient norms to 1e-5; fp64 gradients to 1e-12; bf16 losses stay within 1 %. Every element of the
model's states has the owners it should.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

from ds_hf import initialize
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.cut import cut_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.contract.test_parity import ADAMW, CLIP, MICRO, batches, model
from tests.helpers.distributed import run_distributed
from tests.helpers.megatron import Mpu, OldMpu, divide, gathered_weights, in_parts
from tests.helpers.parity import full_weights

DATA, TENSOR = 2, 2
STAGES = (0, 1, 2, 3)


def config(stage: int, accumulation: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(stage: int, accumulation: int, clip: float, steps: int = 10, **more: Any) -> dict[str, Any]:
    """One rank's run: losses, norms, and the whole weights, gathered over both axes."""
    mpu = Mpu(TENSOR)
    trained = divide(model(), mpu)
    given = OldMpu(mpu) if stage % 2 else mpu
    engine, *_ = initialize(model=trained, mpu=given, config=config(stage, accumulation, clip, **more))
    losses, norms = [], []
    for step in batches(accumulation, DATA)[:steps]:
        total = 0.0
        for micro in step:
            loss = engine(micro[mpu.get_data_parallel_rank()])
            total += float(loss.detach()) / accumulation
            engine.backward(loss)
            engine.step()
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    local = full_weights(trained)
    whole = gathered_weights(local, mpu)
    unmarked = {name: value for name, value in local.items() if cut_of(trained.get_parameter(name)) is None}
    mean = torch.tensor(losses)
    dist.all_reduce(mean, group=mpu.get_data_parallel_group())
    engine.destroy()
    return {"losses": (mean / DATA).tolist(), "norms": norms, "weights": whole, "unmarked": unmarked}


def check_parity(found: list[dict[str, Any]], accumulation: int, clip: float, steps: int = 10) -> None:
    losses, norms, weights = reference(accumulation, clip, steps)
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert one["norms"] == pytest.approx(norms, rel=1e-5)
        assert one["norms"] == found[0]["norms"]  # one number on every process
        for name, value in weights.items():
            assert float((one["weights"][name] - value).norm() / value.norm()) < 1e-6, name


@functools.cache
def reference(
    accumulation: int, clip: float, steps: int = 10, data: int = DATA, tensor: int = TENSOR
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of plain torch in one process."""
    trained = in_parts(model(), tensor)
    optimizer = torch.optim.AdamW(trained.parameters(), **ADAMW)
    losses, norms = [], []
    for step in batches(accumulation, data)[:steps]:
        optimizer.zero_grad()
        total = 0.0
        for ids in (ids for micro in step for ids in micro):
            loss = trained(ids) / (accumulation * data)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.parameters(), clip or 1e9)))
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: param.detach() for name, param in trained.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_divided_model_trains_as_the_whole(stage: int) -> None:
    check_parity(run_distributed(train, DATA * TENSOR, stage, 2, CLIP, 3), 2, CLIP, 3)


def train_cells(stage: int) -> dict[tuple[int, float], dict[str, Any]]:
    return {cell: train(stage, *cell) for cell in product((1, 4), (0.0, CLIP))}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_matrix_in_fp32(stage: int) -> None:
    ranks = run_distributed(train_cells, DATA * TENSOR, stage, timeout=240)
    for cell in product((1, 4), (0.0, CLIP)):
        check_parity([rank[cell] for rank in ranks], *cell)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_losses_in_bf16(stage: int) -> None:
    losses, _, _ = reference(4, CLIP)
    for found in run_distributed(train, DATA * TENSOR, stage, 4, CLIP, bf16={"enabled": True}, timeout=120):
        assert found["losses"] == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
def test_four_parts_and_one_data_parallel_process() -> None:
    _, _, weights = reference(1, CLIP, data=1, tensor=4)
    for found in run_distributed(train_mp4, 4, timeout=120):
        for name, value in weights.items():
            assert float((found[name] - value).norm() / value.norm()) < 1e-6, name


def train_mp4() -> dict[str, torch.Tensor]:
    mpu = Mpu(4)
    trained = divide(model(), mpu)
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(1, 1, CLIP))
    for step in batches(1, 1):
        engine.backward(engine(step[0, 0]))
        engine.step()
    return gathered_weights(full_weights(trained), mpu)


# -- who owns what ------------------------------------------------------------------------------------------------


def owned_elements(stage: int) -> tuple[Counter[tuple[str, int]], dict[str, int], dict[str, tuple[int, ...]]]:
    """How often this process owns each element of each whole parameter; how many owners each parameter should have;
    and the shapes of the whole parameters."""
    mpu = Mpu(TENSOR)
    trained = divide(model(), mpu)
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(stage))
    assert engine.optimizer is not None
    names = {id(param): name for name, param in trained.named_parameters()}
    counts: Counter[tuple[str, int]] = Counter()
    owners: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for buffer in engine.optimizer.masters:
        whole = engine.optimizer.policy.whole
        for fragment in buffer.layout.fragments(buffer.axis.rank, whole=whole):
            param = buffer.params[fragment.slot.index]
            cut, name = cut_of(param), names[id(param)]
            shape = fragment.slot.shape if cut is None else cut.whole
            places = torch.arange(shape.numel()).view(shape)
            local = (places if cut is None else cut.take(places)).flatten()
            mine = local[fragment.start : fragment.start + fragment.numel].tolist()
            counts.update((name, place) for place in mine)
            owners[name] = buffer.replicas.owners(whole=whole, shards=buffer.axis)
            shapes[name] = tuple(shape)
    engine.destroy()
    return counts, owners, shapes


def owner_maps() -> dict[int, Any]:
    return {stage: owned_elements(stage) for stage in STAGES}


def test_every_element_has_the_owners_it_should() -> None:
    ranks = run_distributed(owner_maps, DATA * TENSOR)
    plain = {name: tuple(param.shape) for name, param in model().named_parameters()}
    for stage in STAGES:
        counts: Counter[tuple[str, int]] = Counter()
        for rank in ranks:
            counts.update(rank[stage][0])
        for _, owners, shapes in (rank[stage] for rank in ranks):
            for name, number in owners.items():
                assert shapes[name] == plain[name]
                cut = ".up." in name or ".down." in name
                whole = DATA if stage == 0 else 1
                assert number == whole * (1 if cut else TENSOR)
        owners = {name: number for rank in ranks for name, number in rank[stage][1].items()}
        assert set(owners) == set(plain)
        for name, shape in plain.items():
            numel = torch.Size(shape).numel()
            assert {counts[name, place] for place in range(numel)} == {owners[name]}, (stage, name)
        assert len(counts) == sum(torch.Size(shape).numel() for shape in plain.values())  # and nothing else


# -- gradients, overflow, drift -----------------------------------------------------------------------------------


def test_gradients_in_fp64() -> None:
    plain = model().double()
    for ids in batches(1, DATA)[0, 0]:
        (double_loss(plain, ids) / DATA).backward()
    for found in run_distributed(gradients_in_fp64, DATA * TENSOR):
        for name, param in plain.named_parameters():
            assert param.grad is not None
            assert float((found[name] - param.grad).norm() / param.grad.norm()) < 1e-12, name


def gradients_in_fp64() -> dict[str, torch.Tensor]:
    mpu = Mpu(TENSOR)
    trained = divide(model().double(), mpu)
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(0))
    engine.backward(double_loss(engine.module, batches(1, DATA)[0, 0, mpu.get_data_parallel_rank()]))
    found = {name: param.grad for name, param in trained.named_parameters() if param.grad is not None}
    whole = gathered_weights(found, mpu)
    engine.destroy()
    return whole


def double_loss(trained: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(trained.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def overflow_on_one_part(stage: int) -> list[tuple[bool, float, bool]]:
    """Per step: whether it was applied, the loss scale after it, whether the weights stayed."""
    mpu = Mpu(TENSOR)
    trained = divide(model(), mpu)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(stage, 1, CLIP, fp16=fp16))
    assert engine.optimizer is not None
    found = []
    hit = dist.get_rank() == 3  # one part of one replica
    for number, step in enumerate(batches(1, DATA)[:3]):
        before = full_weights(trained)
        loss = engine(step[0, mpu.get_data_parallel_rank()])
        if number == 1 and hit:
            block = trained.blocks[0]
            loss = loss + (block.up.bias.float() * float("inf")).sum() if stage < 3 else loss * float("inf")
        engine.backward(loss)
        engine.step()
        after = full_weights(trained)
        same = all(torch.equal(value, after[name]) for name, value in before.items())
        found.append((engine.was_step_applied(), engine.optimizer.loss_scaler.scale, same))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_an_overflow_in_one_part_skips_everywhere(stage: int) -> None:
    for found in run_distributed(overflow_on_one_part, DATA * TENSOR, stage):
        assert found == [(True, 256.0, False), (False, 128.0, True), (True, 128.0, False)]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_whole_parameters_of_a_divided_model_do_not_drift(stage: int) -> None:
    """Nothing averages them over the model-parallel group, so both parts have to make the same updates, to the bit."""
    steps = 20
    ranks = run_distributed(train_twenty, DATA * TENSOR, stage, steps)
    for one in ranks[1:]:
        for name, value in ranks[0].items():
            assert torch.equal(one[name], value), name


def train_twenty(stage: int, steps: int) -> dict[str, torch.Tensor]:
    mpu = Mpu(TENSOR)
    trained = divide(model(), mpu)
    engine, *_ = initialize(model=trained, mpu=mpu, config=config(stage, 1, CLIP, bf16={"enabled": True}))
    data = batches(1, DATA)
    for number in range(steps):
        engine.backward(engine(data[number % len(data), 0, mpu.get_data_parallel_rank()]))
        engine.step()
    weights = full_weights(trained)
    found = {name: value for name, value in weights.items() if cut_of(trained.get_parameter(name)) is None}
    assert len(found) == 9  # the tied embedding, norms
    engine.destroy()
    return found


# -- what initialize makes of an mpu ------------------------------------------------------------------------------


def sizes() -> dict[str, Any]:
    mpu = Mpu(TENSOR)
    data = [{"tokens": torch.full((4,), float(index))} for index in range(8)]
    engine, _, loader, _ = initialize(
        model=divide(model(), mpu), mpu=mpu, config=config(2, 3), training_data=data, collate_fn=first_of_each
    )
    found = {
        "shape": engine.mesh.shape,
        "triple": engine.get_batch_info(),
        "dp": (engine.dp_world_size, engine.axis.rank),
        "mp": engine.mp_world_size,
        "world": engine.world_size,
        "groups": (
            groups.get_data_parallel_group() is mpu.get_data_parallel_group(),
            groups.get_data_parallel_rank(),
            groups.get_tensor_model_parallel_world_size(),
            groups.get_tensor_model_parallel_rank(),
        ),
        "samples": list(loader),
    }
    assert engine.checkpoint_mp_rank == groups.get_tensor_model_parallel_rank()
    engine.set_train_batch_size(DATA * MICRO * 5)
    found["steps"] = engine.get_batch_info()[2]
    engine.destroy()
    return found


def first_of_each(samples: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(sample["tokens"][0]) for sample in samples]


def test_sizes_that_follow_from_the_mesh() -> None:
    ranks = run_distributed(sizes, DATA * TENSOR)
    for rank, found in enumerate(ranks):
        assert found["shape"] == MeshShape(data=DATA, tensor=TENSOR)
        assert found["triple"] == (DATA * MICRO * 3, MICRO, 3)
        assert found["dp"] == (DATA, rank // TENSOR)
        assert (found["mp"], found["world"], found["steps"]) == (TENSOR, 4, 5)
        assert found["groups"] == (True, rank // TENSOR, TENSOR, rank % TENSOR)
    assert ranks[0]["samples"] == ranks[1]["samples"]
    assert ranks[2]["samples"] == ranks[3]["samples"]
    seen = sorted(i for rank in (ranks[0], ranks[2]) for batch in rank["samples"] for i in batch)
    assert seen == list(range(8))


def refusals() -> dict[str, str]:
    mpu = Mpu(TENSOR)
    found = {}

    def attempt(name: str, given: Any, trained: Any = None, **more: Any) -> None:
        try:
            initialize(model=trained or divide(model(), mpu), mpu=given, config=config(1, **more))
        except ConfigError as error:
            found[name] = str(error)

    other = OldMpu(mpu)
    if dist.get_rank() < 2:  # some ranks see no fault by themselves
        other.get_model_parallel_group = mpu.get_data_parallel_group
    attempt("same groups", other)
    other = OldMpu(mpu)
    other.get_model_parallel_rank = lambda: 1 - mpu.get_tensor_model_parallel_rank()
    attempt("rank", other)
    other = OldMpu(mpu)
    del other.get_model_parallel_group
    attempt("no group", other)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    other = OldMpu(mpu)
    other.get_model_parallel_group = lambda: crossed
    other.get_model_parallel_rank = lambda: dist.get_rank(crossed)
    attempt("no grid", other)
    other = OldMpu(mpu)
    other.get_data_parallel_world_size = lambda: 4
    attempt("sizes", other)
    attempt("batch", mpu, train_batch_size=3 * MICRO)
    bad = divide(model(), mpu)
    bad.blocks[0].up.weight.partition_dim = 5
    attempt("dimension", mpu, bad)
    attempt("lamb", mpu, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})
    uneven = divide(model(), mpu)
    rows = 8 + mpu.get_tensor_model_parallel_rank()
    uneven.extra = torch.nn.Linear(rows, 1)
    attempt("uneven", mpu, uneven)
    marked = divide(model(), mpu)
    marked.norm.weight.sequence_parallel = True
    attempt("sequence", mpu, marked)
    with Init(config_dict_or_path=config(3)):
        built = model()
    attempt("zero.Init", mpu, built)
    return found


def test_bad_groups_and_marks_are_refused_on_every_rank() -> None:
    for found in run_distributed(refusals, DATA * TENSOR):
        assert (
            "rank 0: its data-parallel group [0, 2] and its model-parallel group [0, 2] share" in found["same groups"]
        )
        assert "mpu.get_model_parallel_rank() is 1, and its place in the group [0, 1] is 0" in found["rank"]
        assert "it has no get_tensor_model_parallel_group()" in found["no group"]
        assert "do not cross in one grid" in found["no grid"]
        assert "and there are 4 processes" in found["sizes"]
        assert "data 2 x tensor 2" in found["sizes"]
        assert "data-parallel size 2: 4 processes" in found["batch"]
        assert "blocks.0.up.weight: partition_dim is 5, and the parameter has shape (64, 32)" in found["dimension"]
        assert "norm.weight is marked sequence_parallel" in found["sequence"]
        assert "extra.weight has another size on other processes of the model-parallel group" in found["uneven"]
        assert "FusedLamb looks at whole parameters, of which the model-parallel processes" in found["lamb"]
        assert "built under zero.Init on 4 processes" in found["zero.Init"]
        assert "Give zero.Init the same mpu=" in found["zero.Init"]


def forgotten_marks() -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    mpu = Mpu(TENSOR)
    for stage in (1, 3):
        trained = divide(model(), mpu)
        del trained.blocks[1].up.weight.tensor_model_parallel
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            trained.norm.bias += mpu.get_tensor_model_parallel_rank()
        engine, *_ = initialize(model=trained, mpu=mpu, config=config(stage))
        engine.destroy()
    return [line for line in told if "differ over the model-parallel group" in line]


def test_forgotten_marks_are_named() -> None:
    told = run_distributed(forgotten_marks, DATA * TENSOR)[0]  # one rank speaks for all
    assert len(told) == 1  # of two engines: the same warning once
    assert told[0].startswith("blocks.1.up.weight, norm.bias differ over the model-parallel group")


def under_init() -> tuple[bool, float]:
    """A part that is built under zero.Init(mpu=...) keeps its own values, not those of the first part."""
    mpu = Mpu(TENSOR)
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    with Init(config_dict_or_path=config(3), mpu=mpu):
        layer = torch.nn.Linear(8, 6)
    for param in layer.parameters():
        param.tensor_model_parallel = True  # type: ignore[attr-defined]
    home = home_of(layer.weight)
    assert home is not None
    assert home.buffer.axis.world_size == DATA
    first = mpu.get_data_parallel_group()
    with GatheredParameters([layer.weight], modifier_rank=dist.get_global_rank(first, 0)):
        layer.weight.data.fill_(float(tensor_rank))
    engine, *_ = initialize(model=layer, mpu=mpu, config=config(3))
    value = full_weights(engine.module)["weight"]
    engine.destroy()
    return bool((value == tensor_rank).all()), float(value[0, 0])


def test_zero_init_shards_over_the_data_parallel_group() -> None:
    assert [found for found, _ in run_distributed(under_init, DATA * TENSOR)] == [True] * 4
