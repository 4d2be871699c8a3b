"""Random models, optimizers and layouts for the elastic property test, and everything of an engine that must come back.

A model's loss touches every parameter by itself, so any set of shapes trains. Gradients depend on the step alone, not
on the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import ds_hf
from ds_hf.engine.checkpoint.live import flat_buffers
from ds_hf.engine.checkpoint.states import kinds, pieces
from ds_hf.engine.zero.access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ds_hf.engine.zero.gather import GatheredParameters

PRECISIONS = ("fp32", "bf16", "fp16", "bf16 masters", "bf16 masters and moments")
JSON_OPTIMIZERS = ("AdamW", "Lion", "Lamb", "Muon", "Adagrad")
TORCH_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "torch AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "RMSprop centered": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, centered=True, momentum=0.5),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-2),
}
OPTIMIZERS = (*JSON_OPTIMIZERS, *TORCH_OPTIMIZERS)


@dataclass(frozen=True)
class Value:
    """One parameter."""

    shape: tuple[int, ...]
    trainable: bool
    group: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Shape:
    """What a model is made of: parameters by module, and whether the last module's first is the first module's."""

    parts: tuple[tuple[Value, ...], ...]
    tied: bool
    buffers: int
    optimizer: str


@dataclass(frozen=True)
class Cell:
    """How an engine lays the model's states out."""

    world_size: int
    stage: int
    offload: bool
    precision: str


class Part(nn.Module):
    def __init__(self, values: tuple[Value, ...], buffers: int, generator: torch.Generator) -> None:
        super().__init__()
        for index, value in enumerate(values):
            start = torch.randn(value.shape, generator=generator).to(value.dtype)
            self.register_parameter(f"p{index}", nn.Parameter(start, requires_grad=value.trainable))
        for index in range(buffers):
            dtype = (torch.float32, torch.int64, torch.bool)[index % 3]
            self.register_buffer(f"b{index}", torch.randint(0, 2, (index, 2), generator=generator).to(dtype))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.randn(3, generator=generator), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + sum((p.float() * (x.detach() + i)).sin().sum() for i, p in enumerate(self.parameters()))


class RandomModel(nn.Module):
    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ModuleList(Part(values, shape.buffers, generator) for values in shape.parts)
        if shape.tied:
            self.parts[-1].register_parameter("again", self.parts[0].p0)
        self.group_of = {
            id(self.parts[i].get_parameter(f"p{j}")): v.group
            for i, vs in enumerate(shape.parts)
            for j, v in enumerate(vs)
        }

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for part in self.parts:
            total = total + part(x)
        return total


def engine_config(shape: Shape, cell: Cell) -> dict[str, Any]:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": cell.stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
    }
    if cell.offload:
        content["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if cell.stage == 3:
            content["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if shape.optimizer in JSON_OPTIMIZERS:
        content["optimizer"] = {"type": shape.optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1}}
    if cell.precision == "fp16":
        content["fp16"] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}
    elif cell.precision.startswith("bf16"):
        narrow = cell.precision != "bf16"
        moments = cell.precision.endswith("moments")
        content["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": narrow, "bf16_optimizer_states": moments}
    return content


def build_engine(shape: Shape, cell: Cell, model: RandomModel) -> Any:
    """The engine of one rank over its own copy of the model."""
    groups: dict[int, list[nn.Parameter]] = {}
    for param in model.parameters():
        if param.requires_grad:
            groups.setdefault(model.group_of[id(param)], []).append(param)
    given = [{"params": params, "weight_decay": 0.01 * (number + 1)} for number, params in sorted(groups.items())]
    arguments: dict[str, Any] = {"model_parameters": given}
    if shape.optimizer in TORCH_OPTIMIZERS:
        arguments["optimizer"] = TORCH_OPTIMIZERS[shape.optimizer]
    return ds_hf.initialize(model=model, config=engine_config(shape, cell), **arguments)[0]


def train_steps(engine: Any, steps: int, start: int = 0) -> None:
    for number in range(start, start + steps):
        loss = engine(torch.tensor(0.5 + 0.25 * number))
        engine.backward(loss)
        engine.step()


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint must bring back, whole, by name. Collective."""
    found: dict[str, Any] = {}
    moments = sorted(set().union(*_gathered(engine, engine.optimizer.moments())))
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        with GatheredParameters([param]):
            found[name] = param.detach().clone()
        if param.requires_grad:
            found[f"{name}/master"] = safe_get_full_fp32_param(param)
            for key in moments:
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(param, key)
    for name, value in engine.module.named_buffers():
        if not name.endswith("scratch"):
            found[name] = value.clone()
    scalars: dict[str, Any] = {}
    for part in _gathered(engine, _scalars(engine)):
        scalars.update(part)
    found.update(scalars)
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
    options = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    found["groups"] = [{k: v for k, v in group.items() if k != "roundings"} for group in options]
    found["roundings of each rank"] = _gathered(engine, _roundings(engine))
    scaler = engine.optimizer.loss_scaler.state_dict()  # how it moves is the configuration's, and the stage's
    found["loss scaler"] = {key: value for key, value in scaler.items() if key != "settings"}
    found["scheduler"] = engine.lr_scheduler.state_dict()
    return found


def _roundings(engine: Any) -> dict[int, int]:
    """How often this rank has rounded in each group of which it owns a part."""
    groups = engine.optimizer.param_groups
    return {i: group.get("roundings", 0) for i, group in enumerate(groups) if any(p.numel() for p in group["params"])}


def _scalars(engine: Any) -> dict[str, Any]:
    return {
        f"{piece.name}/{key} (scalar)": value.item() if isinstance(value, Tensor) else value
        for buffer in flat_buffers(engine)
        if engine.optimizer.master(buffer) is not None
        for piece in pieces(engine, buffer)
        for key, value in kinds(engine.optimizer, piece.segment).scalars.items()
    }


def _gathered(engine: Any, value: Any) -> list[Any]:
    if engine.axis.world_size == 1:
        return [value]
    values: list[Any] = [None] * engine.axis.world_size
    torch.distributed.all_gather_object(values, value)
    return values


# -- strategies -----------------------------------------------------------------------------------------------------

_DIMS = st.integers(1, 9)
_SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 40)),
    st.tuples(_DIMS, _DIMS),
    st.tuples(_DIMS, _DIMS, st.integers(1, 3)),
    st.just((33, 17)),
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Models with at least one trainable parameter."""
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    if optimizer == "Lamb":  # its operator takes gradients of one dtype
        dtypes = st.just(torch.float32)
    elif optimizer == "Muon":
        dtypes = st.sampled_from([torch.float32, torch.bfloat16])
    values = st.builds(Value, _SHAPES, st.booleans() | st.just(True), st.integers(0, 2), dtypes)
    parts = draw(st.lists(st.lists(values, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple))
    first = Value(draw(st.tuples(_DIMS, _DIMS)), True, 0, torch.float32)
    parts = ((first, *parts[0]), *parts[1:])
    return Shape(parts, len(parts) > 1 and draw(st.booleans()), draw(st.integers(0, 3)), optimizer)


def cells(precision: str) -> st.SearchStrategy[Cell]:
    """Layouts that a configuration may ask for."""
    sharded = st.builds(Cell, st.integers(1, 8), st.integers(1, 3), st.booleans(), st.just(precision))
    if "masters" in precision:
        return sharded
    return sharded | st.builds(Cell, st.integers(1, 8), st.just(0), st.just(False), st.just(precision))
