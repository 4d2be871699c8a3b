"""zero.Init, GatheredParameters, external parameters and leaves."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from ds_hf import initialize
from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.zero.external import register_external_parameter, unregister_external_parameter
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init, ZeroParamStatus
from ds_hf.engine.zero.leaf import (
    get_z3_leaf_modules,
    mark_leaves,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)
from ds_hf.engine.zero.planning import make_units
from ds_hf.errors import ConfigError
from tests.engine.zero.zoo import WIDTH, Layer, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.models import TinyLM
from tests.helpers.parity import base_config, full_weights, sgd, train_both

SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


def built(**kwargs: Any) -> TinyLM:
    torch.manual_seed(1 + dist.get_rank())  # rank 0's values count
    with Init(**kwargs):
        return TinyLM()


def construction() -> None:
    torch.manual_seed(1)
    expected = dict(TinyLM().named_parameters())
    names = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn", "rand")
    before = {name: getattr(torch, name) for name in names}
    inits = {cls: cls.__dict__.get("__init__") for cls in (TinyLM, nn.Linear, nn.Module, nn.Embedding)}
    model = built(config_dict_or_path=AUTO)
    assert {name: getattr(torch, name) for name in names} == before
    assert {cls: cls.__dict__.get("__init__") for cls in inits} == inits
    assert model.head.weight is model.embedding.weight
    for name, param in model.named_parameters():
        assert (tuple(param.shape), param.numel()) == ((0,), 0), name
        assert param.ds_shape == expected[name].shape
        assert param.ds_numel == expected[name].numel()
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert param.dtype == torch.float32
    assert len({param.ds_id for param in model.parameters()}) == len(list(model.parameters()))
    for name, value in full_weights(model).items():
        assert torch.equal(value, expected[name]), name
    # the state dict has the keys, with placeholders
    state = model.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items() if key != "gain"} == dict.fromkeys(
        (key for key in state if key != "gain"), (0,)
    )


def held(model: nn.Module) -> int:
    """Bytes of the shards."""
    return sum(p._ds_home.buffer.shard.untyped_storage().nbytes() for p in set(model.parameters()))  # type: ignore[attr-defined]


def dtypes_and_bytes() -> None:
    world = dist.get_world_size()
    total = sum(p.numel() for p in TinyLM().parameters())
    for kwargs, dtype in [
        ({"config_dict_or_path": {**AUTO, "bf16": {"enabled": True}}}, torch.bfloat16),
        ({"config": {**AUTO, "fp16": {"enabled": True}}}, torch.float16),
        ({"dtype": torch.float16}, torch.float16),
        ({}, torch.float32),
        ({"config": AUTO}, torch.float32),
    ]:
        model = built(**kwargs)
        width = 4 if dtype is torch.float32 else 2
        assert {p.dtype for p in model.parameters()} == {dtype}
        padding = 16 * world * len(list(model.parameters()))
        assert total * width // world <= held(model) <= (total + padding) * width // world
        if kwargs:
            assert model.gain.dtype == dtype
        with Init(**kwargs):
            assert (torch.arange(0.0, 400.0)[257], torch.arange(0.0, 2.0).dtype) == (257.0, torch.float32)


def odd_uses() -> None:
    with Init(enabled=False):
        assert nn.Linear(2, 2).weight.numel() == 4
    with Init():
        with Init():  # a second one inside changes nothing
            inner = nn.Linear(3, 3)

        class Late(nn.Module):  # defined inside the context
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(5, 3))

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, self.weight)

        late = Late()
        assert torch.arange(3).dtype == torch.int64
    assert (inner.weight.numel(), late.weight.numel()) == (0, 0)
    assert nn.Linear(2, 2).weight.numel() == 4
    assert Late().weight.numel() == 15
    with GatheredParameters(late.weight):
        assert torch.equal(late.weight, torch.ones(5, 3))
    constructor = torch.zeros
    with pytest.raises(ZeroDivisionError), Init():
        1 / 0  # noqa: B018
    assert torch.zeros is constructor
    assert nn.Linear(2, 2).weight.numel() == 4
    converted = Stack()
    wanted = copy.deepcopy(converted)
    Init(module=converted)
    assert all(p.numel() == 0 for p in converted.parameters())
    assert all(torch.equal(v, dict(wanted.named_parameters())[k]) for k, v in full_weights(converted).items()) or (
        dist.get_rank() > 0
    )
    with pytest.raises(TypeError, match="nonsense"):
        Init(nonsense=1)
    assert get_accelerator() is not None


def training() -> None:
    """Built sharded, with a part added outside and one tied, trains as an ordinary model, at stage 3 and at 1."""
    for stage in (3, 1):
        torch.manual_seed(4)
        plain = Stack()
        with Init():
            model = Stack()
        with GatheredParameters(model.parameters(), modifier_rank=0):
            if dist.get_rank() == 0:
                model.load_state_dict(plain.state_dict())
        model.outlet = nn.Linear(WIDTH, 2)
        with torch.no_grad():
            model.outlet.weight.fill_(0.3)
            model.outlet.bias.fill_(0.1)
        plain.outlet = copy.deepcopy(model.outlet)
        engine, *_ = initialize(model=model, config=base_config(stage, optimizer=SGD))
        optimizer = sgd(plain)
        world = dist.get_world_size()
        for index in range(3):
            data = torch.randn(world, 4, WIDTH, generator=torch.Generator().manual_seed(index))
            optimizer.zero_grad()
            for share in data:
                (mean_square(plain(share)) / world).backward()
            optimizer.step()
            engine.backward(mean_square(engine(data[dist.get_rank()])))
            engine.step()
        for name, value in full_weights(model).items():
            torch.testing.assert_close(value, dict(plain.named_parameters())[name], rtol=1e-5, atol=1e-6)
        assert hasattr(model.inlet.weight, "ds_id") == (stage == 3)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_init(world: int) -> None:
    run_distributed(init_scenarios, world, timeout=100)


def init_scenarios() -> None:
    for scenario in (construction, dtypes_and_bytes, odd_uses, training):
        print("case", scenario.__name__)
        scenario()


# -- GatheredParameters ----------------------------------------------------------------------------------------------


def reading_and_writing(bf16: bool) -> None:
    torch.manual_seed(2)
    model = Stack()
    more: dict[str, Any] = {"bf16": {"enabled": True}} if bf16 else {}
    engine, *_ = initialize(model=model, config=base_config(3, optimizer=SGD, **more))
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    before = full_weights(model)["blocks.0.up.weight"]
    world = dist.get_world_size()
    if world > 1:
        with GatheredParameters([weight]):  # for reading: changes are lost
            weight.data.add_(1.0)
        assert torch.equal(full_weights(model)["blocks.0.up.weight"], before)
    mixed = [weight, torch.ones(2), nn.Parameter(torch.ones(2)), *model.buffers(), None]
    with GatheredParameters(mixed, modifier_rank=world - 1):
        assert weight.shape == before.shape
        with torch.no_grad():
            weight.fill_(float(dist.get_rank()))
        with GatheredParameters(model.parameters()):  # nested, over the same and more
            assert bias.shape == (2 * WIDTH + 1,)
        assert weight.shape == before.shape  # the inner end does not release it
    assert weight.numel() == 0
    assert torch.equal(full_weights(model)["blocks.0.up.weight"], torch.full_like(before, float(world - 1)))
    with GatheredParameters((p for p in (weight, bias)), modifier_rank=0):
        weight.data = torch.full(before.shape, 0.25 + dist.get_rank(), dtype=weight.dtype)
        bias.data.zero_()
    after = full_weights(model)
    assert torch.equal(after["blocks.0.up.weight"], torch.full_like(before, 0.25))
    assert not after["blocks.0.up.bias"].any()
    with pytest.raises(ZeroDivisionError), GatheredParameters(weight, modifier_rank=0):
        1 / 0  # noqa: B018
    assert weight.numel() == 0
    with GatheredParameters([]), GatheredParameters(model, enabled=False):
        assert weight.numel() == 0
    # the masters follow: a step with zero gradient keeps what was written
    engine.backward(mean_square(engine(torch.zeros(2, WIDTH, dtype=weight.dtype))) * 0.0)
    engine.step()
    assert torch.equal(full_weights(model)["blocks.0.up.weight"], torch.full_like(before, 0.25))
    # inside forward, around modules that run
    with GatheredParameters(model.parameters()):
        engine(torch.zeros(2, WIDTH, dtype=weight.dtype)).sum().backward()
        assert weight.shape == before.shape
    assert weight.numel() == 0
    engine.destroy()


class PeeksInside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with GatheredParameters(self.blocks[1].parameters()):
            x = x * self.blocks[1].up.weight.detach().sum().cos()
            return super().forward(x)


class Borrows(Stack):
    """The last layer uses a weight of a block, by registration."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.reader.lend(self.blocks[0].down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.reader(x))


class Reader(nn.Module):
    def lend(self, weight: nn.Parameter) -> None:
        self.__dict__["borrowed"] = weight
        register_external_parameter(self, weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.borrowed.t()).tanh(), self.borrowed)


def in_forward() -> list[float]:
    data = torch.randn(2, 2, dist.get_world_size(), 4, WIDTH, generator=torch.Generator().manual_seed(3))
    errors = []
    for make in (PeeksInside, Borrows):
        torch.manual_seed(5)
        outcome = train_both(
            make(), lambda m, x: mean_square(m(x)), data, base_config(3, optimizer=SGD), reference_optimizer=sgd
        )
        errors.append(outcome.worst)
    return errors


def unregistering() -> None:
    reader, weight = Reader(), nn.Parameter(torch.ones(2))
    reader.lend(weight)
    unregister_external_parameter(reader, weight)
    with pytest.raises(RuntimeError, match="not registered"):
        unregister_external_parameter(reader, weight)
    with pytest.raises(RuntimeError, match=r"nn\.Parameter"):
        register_external_parameter(reader, torch.ones(2))  # type: ignore[arg-type]


def gathered_scenarios() -> list[float]:
    for bf16 in (False, True):
        reading_and_writing(bf16)
    unregistering()
    return in_forward()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathered_and_external_parameters(world: int) -> None:
    for errors in run_distributed(gathered_scenarios, world, timeout=100):
        assert max(errors) < 1e-5


# -- leaves ----------------------------------------------------------------------------------------------------------


def test_leaves() -> None:
    model = Stack()
    assert len(set_z3_leaf_modules(model, [nn.ModuleList])) == 1
    assert [unit.name for unit in make_units(model)] == [""]  # a list is not called: the model itself gathers it
    assert get_z3_leaf_modules(model) == [model.blocks]
    unset_z3_leaf_modules(model, ["ModuleList"])
    assert [unit.name for unit in make_units(model)] == ["", "blocks.0", "blocks.1", "blocks.2"]
    for change in (set_z3_leaf_modules, unset_z3_leaf_modules, set_z3_leaf_modules_by_name):
        with pytest.raises(ValueError, match="Missing"):
            change(model, ["Missing"])
    assert set_z3_leaf_modules_by_name(model, ["blocks.0", "no"]) == ([model.blocks[0]], ["no"])
    assert set_z3_leaf_modules_by_suffix(model, [".2"]) == ([model.blocks[2]], [])
    assert get_z3_leaf_modules(model) == [model.blocks[0], model.blocks[2]]
    assert len(set_z3_leaf_modules(model, [f"{Layer.__module__}.Layer"])) == 3


def test_leaves_of_a_file_that_are_not_there_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    assert mark_leaves(model, ["Missing"], ["blocks.0"], [".2"]) == [model.blocks[0], model.blocks[2]]
    assert not caplog.messages
    assert mark_leaves(model, [], ["blocks.0", "blocks.9"], ["mlp"]) == [model.blocks[0]]
    assert "no module of Stack is called blocks.9, mlp, or ends in it" in caplog.text


def skipped_initialisation() -> None:
    """``torch.nn.utils.skip_init`` makes modules on the meta device first; also modules of modules."""

    class Pair(nn.Module):
        def __init__(self, width: int, device: Any = None) -> None:
            super().__init__()
            self.first = nn.Linear(width, width, device=device)
            self.others = nn.ModuleList([nn.Linear(width, width, device=device)])

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.others[0](self.first(x)))

    with Init(config_dict_or_path=AUTO):
        model = nn.Sequential(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH), nn.utils.skip_init(Pair, WIDTH))
    for param in model.parameters():
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        assert param.ds_shape in ((WIDTH, WIDTH), (WIDTH,))
    with GatheredParameters(model.parameters(), modifier_rank=0):
        for param in model.parameters():
            nn.init.ones_(param)
    engine, *_ = initialize(model=model, config=base_config(3, optimizer=SGD))
    engine.backward(mean_square(engine(torch.zeros(1, WIDTH))))
    engine.step()
    assert all(torch.isfinite(value).all() for value in full_weights(model).values())


def test_skipped_initialisation() -> None:
    run_distributed(skipped_initialisation, 2, timeout=60)


class Parent(nn.Module):
    """Initialises its children in its own constructor, each rank otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1)
        self.apply(self.fill)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 1.0 + dist.get_rank())


def names_of_parameters() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    with Init(config_dict_or_path=AUTO):
        model = Parent()
    weight = model.linear.weight
    assert weight.ds_tensor.tolist() == [1.0] * -(-12 // world)  # rank 0's
    assert [weight.aligned_size(), weight.padding_size()] == [-(-12 // world) * world, -(-12 // world) * world - 12]
    assert weight.ds_summary()["ds_shape"] == (1, 12)
    with pytest.raises(AttributeError):
        _ = nn.Linear(1, 1).weight.ds_tensor
    weight.all_gather()
    assert (weight.ds_status, weight.numel()) == (ZeroParamStatus.AVAILABLE, 12)
    weight.partition()
    assert (weight.ds_status, weight.numel()) == (ZeroParamStatus.NOT_AVAILABLE, 0)
    with torch.no_grad():
        weight.ds_tensor.fill_(float(rank))
    weight.all_gather_coalesced([weight, model.linear.bias]).wait()
    part = -(-12 // world)
    assert weight.flatten().tolist() == [float(index // part) for index in range(12)]
    weight.partition([weight, model.linear.bias])
    engine, *_ = initialize(model=model, config=base_config(3, optimizer=SGD))
    parts = [torch.zeros(12) for _ in range(world)]
    mine = torch.zeros(12)
    mine[: weight.partition_numel()] = weight.ds_tensor
    dist.all_gather(parts, mine)
    assert sum(part.sum().item() for part in parts) == sum(index // -(-12 // world) for index in range(12))
    engine.destroy()
    with GatheredParameters(model.parameters()):
        assert weight.numel() == 12
    off = {**AUTO, "zero_optimization": {"stage": 3, "override_module_apply": False}}
    apply = nn.Module.apply
    with Init(config_dict_or_path=AUTO):
        assert nn.Module.apply is not apply
    with Init(config_dict_or_path=off):
        assert nn.Module.apply is apply
    assert nn.Module.apply is apply


@pytest.mark.parametrize("world", [1, 2])
def test_names_of_parameters(world: int) -> None:
    run_distributed(names_of_parameters, world, timeout=60)


def test_parts_in_files_have_no_values(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    zero = {"stage": 3, "offload_param": nvme}
    engine, *_ = initialize(model=model, config={**base_config(3, optimizer=SGD), "zero_optimization": zero})
    part = model.weight.ds_tensor
    assert part.numel() == model.weight.ds_numel
    assert part.isnan().all()
    assert part.untyped_storage().nbytes() == part.element_size()
    with pytest.raises(RuntimeError), torch.no_grad():
        part.add_(1.0)
    engine.destroy()


def _meta_contexts() -> None:
    with Init():
        with torch.device("meta"):
            empty = nn.Linear(4, 4)
        assert empty.weight.is_meta
    with torch.device("meta"):  # torch keeps what its contexts replace: nothing of Init's
        assert nn.Linear(4, 4).weight.is_meta
        assert torch.empty(0).is_meta
    assert empty.weight.is_meta  # nothing put values there, so it has none
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match="meta device"):
        initialize(model=empty, config=config)


def _built_for_another_file() -> list[list[str]]:
    """What is said of parts that transformers made as the configuration of an earlier Trainer asks."""
    lines, said = Lines(logging.WARNING), []
    logging.getLogger("ds_hf").addHandler(lines)
    for stage in (3, 1):
        lines.texts.clear()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with Init(config_dict_or_path=AUTO):
            model[0] = nn.Linear(4, 4)
        engine, *_ = initialize(model=model, config=base_config(stage, optimizer=SGD))
        engine.destroy()
        said.append([text for text in lines.texts if "built in parts" in text])
    return said


def test_parts_that_were_built_for_another_file_are_told() -> None:
    none, (told,) = run_distributed(_built_for_another_file, 1, timeout=30)[0]
    assert none == []
    assert told.startswith("2 parameters of the model were built in parts")
    assert "after its own TrainingArguments" in told


def test_meta_contexts_work_as_ever() -> None:
    run_distributed(_meta_contexts, 1, timeout=30)


def _checked_transformers_model() -> None:
    """Initialization nests a block that reads around one that writes."""
    checked = {"stage": 3, "enable_sanity_checks": True}
    with Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": checked}):
        model = BertModel(
            BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        )
    with GatheredParameters(list(model.parameters())):
        assert model.embeddings.LayerNorm.weight.eq(1).all()


def test_what_an_inner_block_keeps_is_not_lost() -> None:
    run_distributed(_checked_transformers_model, 2, timeout=30)
