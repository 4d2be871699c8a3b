"""Quantized frozen weights: exact at every stage, sharded byte for byte where parameters are, refused if they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import ds_hf
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.checkpoint import contents
from ds_hf.engine.checkpoint.live import flat_buffers
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.cut import cut_of, even_cut, set_cut
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.packed import PackedBuffer, check_packed, is_packed, move_packed, packed_parts
from ds_hf.engine.zero.replicas import divide_over_experts, expert_processes
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WIDTH = 24


class Wrapped(Tensor):
    """Like torchao's weights: int8 values and a scale a row, which act as a floating-point tensor."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["values"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.values.to(x.dtype) * weight.scale, *rest)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(func)


class Closed(Tensor):
    """A quantized tensor that nobody can look into."""


class PackedParameter(nn.Parameter):
    """Like bitsandbytes' ``Params4bit``: packed bytes, here in a dtype that claims to be a number."""

    quant_state: Any


def wrapped(weight: Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True) / 127
    # column-major: strides are part of what has to come back
    values = (weight / scale).round().to(torch.int8).t().contiguous().t()
    return nn.Parameter(Wrapped(values, scale), requires_grad=False)


def packed(weight: Tensor) -> nn.Parameter:
    """Every bit pattern of bf16 occurs, NaNs with a payload among them."""
    data = weight.to(torch.bfloat16).contiguous().view(torch.uint8).clone()
    data[0, :8] = torch.tensor([1, 127, 255, 127, 3, 255, 129, 255], dtype=torch.uint8)
    parameter = PackedParameter(data.view(torch.bfloat16), requires_grad=False)
    parameter.quant_state = "scales"
    return parameter


def integers(weight: Tensor) -> nn.Parameter:
    return nn.Parameter((weight * 100).round().to(torch.int16), requires_grad=False)


QUANTIZERS: dict[str, Callable[[Tensor], nn.Parameter]] = {"wrapped": wrapped, "packed": packed, "integers": integers}


class Block(nn.Module):
    """A frozen quantized matrix with an adapter beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = QUANTIZERS[kind](torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.kind == "packed":
            weight = weight.view(torch.int16).to(x.dtype) / 2**15
        elif self.kind == "integers":
            weight = weight.to(x.dtype) / 100
        return x + torch.tanh(F.linear(x, weight)) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model(kind)


def parts_of(model: nn.Module) -> list[Tensor]:
    return [part for param in model.parameters() if is_packed(param) for _, part in packed_parts(param)]


def raw(part: Tensor) -> bytes:
    return part.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def batches(device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(4, dist.get_world_size(), 3, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)


def reference(kind: str) -> list[float]:
    """Mean losses over all processes' batches, in one process."""
    model = build(kind)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        **more,
    }


def train(stage: int, kind: str, folder: str) -> None:
    before = [(raw(part), part.shape, part.stride(), part.dtype) for part in parts_of(build(kind))]
    model = build(kind)
    engine, *_ = ds_hf.initialize(model=model, config=settings(stage))
    buffers = [b for unit in engine.units for b in unit.buffers if isinstance(b, PackedBuffer)]
    if stage == 3:
        total = sum(len(content) for content, *_ in before)
        assert len(buffers) == 3
        world = dist.get_world_size()
        padding = 32 * len(before) + 16 * world * len(buffers)
        assert total // world <= sum(buffer.shard.numel() for buffer in buffers) <= (total + padding) // world
        if world > 1:
            assert all(part.numel() == 0 for part in parts_of(model))
            assert all(buffer.full.untyped_storage().nbytes() == 0 for buffer in buffers)
    else:
        assert not buffers
    expected = reference(kind)
    for batch, value in zip(batches(engine.device), expected, strict=True):
        loss = engine(batch[dist.get_rank()]).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert mean.item() / dist.get_world_size() == pytest.approx(value, rel=1e-5)
    with GatheredParameters(model.parameters()):
        after = [(raw(part), part.shape, part.stride(), part.dtype) for part in parts_of(model)]
        assert after == before
    # whole, and in a model with other bytes
    engine.save_checkpoint(folder)
    other = build(kind, seed=9)
    again, *_ = ds_hf.initialize(model=other, config=settings(stage))
    assert again.load_checkpoint(folder)[0] is not None
    with GatheredParameters(other.parameters()):
        assert [raw(part) for part in parts_of(other)] == [content for content, *_ in before]


@STAGES
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_training_is_exact_and_the_bytes_stay_the_same(stage: int, kind: str, tmp_path: Path) -> None:
    run_distributed(train, 2, stage, kind, str(tmp_path))


def train_at_16_bits(stage: int) -> None:
    before = [raw(part) for part in parts_of(build("packed"))]
    model = build("packed")
    engine, *_ = ds_hf.initialize(model=model, config=settings(stage, bf16={"enabled": True}))
    engine.backward(engine(batches(engine.device)[0, dist.get_rank()]).square().mean())
    engine.step()
    with GatheredParameters(model.parameters()):
        assert [raw(part) for part in parts_of(model)] == before
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}


@STAGES
def test_packed_bytes_are_never_cast(stage: int) -> None:
    run_distributed(train_at_16_bits, 2, stage)


def refused(stage: int) -> None:
    model = build("wrapped")
    block = model.blocks[1]
    block.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Closed), requires_grad=False)
    with pytest.raises(ds_hf.ConfigError, match=r"blocks\.1\.weight is a Closed, .* use ZeRO stage 2"):
        ds_hf.initialize(model=model, config=settings(stage))


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    run_distributed(refused, 1, 3)


def refused_training(stage: int) -> None:
    model = build("wrapped")
    model.blocks[2].weight.requires_grad_(True)
    with pytest.raises(ds_hf.ConfigError, match=r"blocks\.2\.weight is a Wrapped and requires a gradient"):
        ds_hf.initialize(model=model, config=settings(stage))


@pytest.mark.parametrize("stage", [2, 3])
def test_quantized_weights_that_train_are_refused_by_name(stage: int) -> None:
    run_distributed(refused_training, 1, stage)


class Fp8(nn.Module):
    """A frozen weight and its scales in fp8, beside a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(-8.0, 8.0).repeat(4).view(8, 8).to(torch.float8_e4m3fn)
        self.frozen = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 0.5).to(torch.float8_e5m2))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.frozen.to(x.dtype)).sum()


def fp8(stage: int, folder: str) -> None:
    model = Fp8()
    expected = model.frozen.detach().clone()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = ds_hf.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    assert model.scale.dtype == torch.float8_e5m2
    with GatheredParameters(model.parameters()):
        assert model.layer.weight.dtype == torch.bfloat16
        assert model.frozen.dtype == torch.float8_e4m3fn
        assert torch.equal(model.frozen.view(torch.uint8), expected.view(torch.uint8))
    engine.save_checkpoint(folder)
    engine.destroy()
    for other in (1, 3):
        model = Fp8()
        model.frozen.data = torch.zeros_like(expected)
        engine, *_ = ds_hf.initialize(model=model, config={**config, "zero_optimization": {"stage": other}})
        engine.load_checkpoint(folder)
        with GatheredParameters(model.parameters()):
            assert torch.equal(model.frozen.view(torch.uint8), expected.view(torch.uint8)), other
        engine.destroy()


@STAGES
def test_fp8_stays_as_it_is(stage: int, tmp_path: Path) -> None:
    run_distributed(fp8, 2, stage, str(tmp_path), timeout=60)


def _frozen_values() -> dict[str, Tensor]:
    """One parameter of each dtype that is packed as bytes; some are transposed, expanded, or have no elements."""
    numbers = torch.arange(-18, 17).view(5, 7)
    values = {str(dtype): numbers.to(dtype) * 3 for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}
    values |= {"uint8": numbers.abs().to(torch.uint8) + 99, "bool": numbers % 3 == 0}
    values |= {"fp8": numbers.to(torch.float8_e4m3fn), "complex": torch.complex(numbers + 0.5, numbers * 2.0)}
    columns = {"fp8_columns": values["fp8"].t().contiguous().t(), "int_columns": numbers.int().t().contiguous().t()}
    others = {
        "scalar": numbers[0, 0],
        "expanded": numbers[:1].expand(5, 7),
        "nothing": numbers[:0],
        "no_bools": numbers[:0] > 0,
    }
    others["expanded_floats"] = numbers[:1].float().expand(5, 7)
    return {name.replace(".", "_"): value for name, value in {**values, **columns, **others}.items()}


class Kinds(nn.Module):
    def __init__(self, *, empty: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, value in _frozen_values().items():
            start = torch.zeros_like(value[:1]).expand(5, 7) if "expanded" in name else torch.zeros_like(value)
            setattr(self, name, nn.Parameter(start if empty else value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def _kinds_engine(stage: int, *, empty: bool) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    return ds_hf.initialize(model=Kinds(empty=empty), config=config)[0]


def _check_kinds(found: dict[str, Tensor], *, widened: bool = False) -> None:
    for name, value in _frozen_values().items():
        value = value.float() if widened and value.is_floating_point() else value
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        both = (torch.atleast_1d(each.detach()).contiguous().view(torch.uint8) for each in (found[name], value))
        assert torch.equal(*both), name


def save_kinds(stage: int, folder: str) -> None:
    engine = _kinds_engine(stage, empty=False)
    engine.save_checkpoint(folder)
    engine.export_pretrained(f"{folder}/whole")
    if stage == 3:  # as older versions did, where fp8 and integers were bytes of the flat buffer in the order in memory
        for name in ("form_of", "order_of", "piece_of"):
            setattr(PackedBuffer, name, getattr(FlatBuffer, name))
        contents._own_entries = lambda e, b, report: contents._value_entry(e, flat_buffers(e).index(b), b, report)  # type: ignore[assignment]
        engine.save_checkpoint(f"{folder}/old")


def load_kinds(stage: int, folders: list[str]) -> None:
    for folder in folders:
        engine = _kinds_engine(stage, empty=True)
        engine.load_checkpoint(folder)
        with GatheredParameters(engine.module.parameters()):
            _check_kinds(dict(engine.module.named_parameters()))
        engine.destroy()


def test_frozen_values_of_every_dtype_are_the_same_at_every_stage(tmp_path: Path) -> None:
    """Older versions wrote those of stage 3 as bytes, which only stage 3 could read."""
    folders = [str(tmp_path / str(stage)) for stage in (1, 3)]
    for folder, stage, processes in zip(folders, (1, 3), (1, 3), strict=True):
        run_distributed(save_kinds, processes, stage, folder, timeout=60)
        _check_kinds(get_fp32_state_dict_from_zero_checkpoint(folder), widened=True)
        _check_kinds(load_file(f"{folder}/whole/model.safetensors"))
    run_distributed(load_kinds, 2, 3, [*folders, f"{folders[1]}/old"], timeout=60)
    run_distributed(load_kinds, 1, 1, folders, timeout=60)


def test_complex_parameters_are_refused_as_such() -> None:
    model = nn.Linear(2, 2)
    model.spectrum = nn.Parameter(torch.zeros(3, dtype=torch.cfloat))
    with pytest.raises(ConfigError, match=r"spectrum is torch.complex64.*torch\.view_as_real"):
        check_packed(model, sharded=False)


@pytest.mark.parametrize("kind", ["packed", "integers"])
def test_what_is_written_on_a_parameter_stays_when_it_moves(kind: str) -> None:
    """Its place in a whole one, and over how many processes experts are divided: on a GPU ``param.to`` gives another
    parameter, and weights by name were this process's experts alone."""
    model = nn.Module()
    model.weight = model.tied = QUANTIZERS[kind](torch.randn(4, 16))
    set_cut(model.weight, even_cut((4, 16), 0, 1, 2))
    divide_over_experts(model.weight, 2)
    before = model.weight
    move_packed(model, torch.device("meta"), sharded=False)
    assert model.weight is model.tied is not before
    assert (cut_of(model.weight), expert_processes(model.weight)) == (cut_of(before), 2)
