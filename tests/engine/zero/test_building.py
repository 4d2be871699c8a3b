"""Constructors under zero.Init that write, copy or read what they have built: as without Init."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from ds_hf import initialize
from ds_hf.engine.zero import building
from ds_hf.engine.zero.buffer import FlatBuffer, home_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from tests.helpers.distributed import run_distributed

D = 16
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.build()

    def build(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.b(self.a(x).tanh()).pow(2).mean())


class Writes(Base):
    def build(self) -> None:
        nn.init.zeros_(self.b.weight)
        with torch.no_grad():
            self.a.weight[2:4] = 2.0
            self.b.weight[0].copy_(torch.arange(16.0) / 16)
            self.b.bias.mul_(3)
        self.a.bias.data.fill_(0.5)
        self.a.weight.data = self.a.weight.data + torch.eye(D)


class Loads(Base):
    def build(self) -> None:
        self.a.load_state_dict(self.b.state_dict())
        self.b.load_state_dict({name: value * 2 for name, value in self.a.state_dict().items()}, assign=True)


class Swaps(Base):
    """Holds on to values in whose place it puts others."""

    def build(self) -> None:
        kept = self.a.weight.data
        self.a.weight.data = self.b.weight.data
        self.b.weight.data = kept
        self.register_buffer("before", self.a.bias.detach())
        self.a.bias.data = self.a.bias.data * 2
        self.b.bias.data = self.before[:]  # type: ignore[index]


class Replaces(Base):
    def build(self) -> None:
        self.b.weight = nn.Parameter(self.a.weight)
        self.a.weight = nn.Parameter(self.a.weight.detach() * 2)
        self.a.bias = self.b.bias
        nn.init.ones_(self.a.bias)


class Normed(Base):
    def build(self) -> None:
        self.a = nn.utils.weight_norm(self.a)
        self.b = parametrizations.orthogonal(parametrizations.weight_norm(self.b, "bias", dim=None))
        prune.l1_unstructured(self.a, "bias", 0.5)


class Reads(Base):
    def build(self) -> None:
        self.std = self.a.weight.std().item()
        self.shapes = [tuple(p.shape) for p in self.parameters()], sum(p.numel() for p in self.parameters())
        self.register_buffer("mean", self.b.weight.mean(0))
        self.b.weight.data /= self.b.weight.norm()
        with torch.no_grad():
            width = self.a(torch.ones(2, D)).shape[1]
            self.a.bias -= self.a(torch.ones(1, D))[0]
        self.c = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.c(x).sum()


class Copies(Base):
    def build(self) -> None:
        nn.init.ones_(self.a.bias)
        self.ema = copy.deepcopy(self.a).requires_grad_(False)
        self.clones = nn.ModuleList([copy.deepcopy(self.b) for _ in range(3)])
        nn.init.zeros_(self.clones[1].weight)  # type: ignore[arg-type]
        self.a.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for clone in self.clones:
            x = x + clone(self.ema(x))
        return super().forward(x)


class Casts(Base):
    def build(self) -> None:
        self.b.double()
        self.z = nn.LazyLinear(3)
        self.z(torch.zeros(1, D))
        nn.init.ones_(self.z.weight)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.b(self.a(x).double()).float().pow(2).mean() + self.z(x).mean())


class Attends(nn.Module):
    """torch's transformers copy their layers, and initialise parameters of their children."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(D, 2, 1, 2, 32, 0.0, batch_first=True)
        self.reads = nn.LSTM(D, D, 2)
        for param in self.reads.parameters():
            nn.init.normal_(param, 0.0, 0.3)
        self.copied = copy.deepcopy(self.reads)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.copied(self.reads(self.model(x[None], x[None]))[0])[0].pow(2).mean())


MODELS: tuple[type[nn.Module], ...] = (Writes, Loads, Swaps, Replaces, Normed, Reads, Copies, Casts, Attends)


def differences(cls: type[nn.Module]) -> list[Any]:
    """Of ``cls`` built under Init and trained two steps, from itself without."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    plain = cls()
    torch.manual_seed(5 + rank)  # rank 0's values count
    with Init(config_dict_or_path=CONFIG):
        model = cls()
    found: list[Any] = [
        name for name, param in model.named_parameters() if home_of(param) is None or not hasattr(param, "ds_id")
    ]
    pairs = list(zip(model.named_parameters(), plain.named_parameters(), strict=True))
    with GatheredParameters(list(model.parameters())):
        for (name, param), (expected, value) in pairs:
            like = (name, param.shape, param.dtype, param.requires_grad)
            if like != (expected, value.shape, value.dtype, value.requires_grad) or not torch.equal(param, value):
                found.append((name, expected))
    buffers = dict(model.named_buffers())
    found += [name for name, value in plain.named_buffers() if rank == 0 and not torch.equal(buffers[name], value)]
    for name in ("std", "shapes") if rank == 0 else ():
        if getattr(model, name, None) != getattr(plain, name, None):
            found.append(name)
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    engine, *_ = initialize(model=model, config=CONFIG)
    for step in range(2):
        data = torch.randn(world, 4, D, generator=torch.Generator().manual_seed(step))
        losses = [plain(x) for x in data]
        optimizer.zero_grad()
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        optimizer.step()
        loss = engine(data[rank])
        engine.backward(loss)
        engine.step()
        if abs(loss.item() - losses[rank].item()) > 1e-5:
            found.append((step, loss.item(), losses[rank].item()))
    engine.destroy()
    return found


def all_differences() -> dict[str, list[Any]]:
    return {cls.__name__: found for cls in MODELS if (found := differences(cls))}


@pytest.mark.parametrize("world", [1, 2])
def test_constructors_work_on_their_children_as_without_init(world: int) -> None:
    assert run_distributed(all_differences, world, timeout=100) == [{}] * world


class Deep(nn.Module):
    """Goes through all of its parameters, and copies a layer many times."""

    def __init__(self, held: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(12)])
        self.copies = nn.ModuleList([copy.deepcopy(self.layers[0]) for _ in range(12)])
        for param in self.parameters():
            param.data.fill_(1.0)
            buffers: list[FlatBuffer] = [p._ds_home.buffer for p in self.parameters()]  # type: ignore[attr-defined]
            held.append(sum(buffer.full.untyped_storage().nbytes() for buffer in buffers))


def most_held(room: int) -> tuple[int, bool]:
    building.ROOM_NBYTES = room
    held: list[int] = []
    with Init(config_dict_or_path=CONFIG):
        model = Deep(held)
    names = [type(param).__name__ for param in model.parameters()]
    with GatheredParameters(list(model.parameters())):
        ones = all(bool((param == 1).all()) for param in model.parameters())
    return max(held), ones and set(names) == {"Released"}


def test_a_constructor_that_touches_everything_does_not_hold_everything() -> None:
    one = 64 * 64 * 4
    for held, right in run_distributed(most_held, 2, 3 * one, timeout=60):
        assert held <= 4 * one  # without room for three: 24
        assert right


def held_computed_weights() -> bool:
    with Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(parametrizations.orthogonal(nn.Linear(D, D)))
        copied = copy.deepcopy(model)
        original = cast(parametrize.ParametrizationList, copied[0].parametrizations["weight"]).original  # type: ignore[index]
        cast(Tensor, original).data.mul_(1.0)
    if dist.get_rank() == 0:
        return bool(torch.equal(cast(Tensor, copied[0].weight), cast(Tensor, model[0].weight)))
    return True


def test_weights_that_parametrizations_compute_can_be_read_by_one_rank_after_init() -> None:
    assert run_distributed(held_computed_weights, 2, timeout=60) == [True, True]


def load_inside_init(folder: str) -> tuple[bool, bool]:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    torch.manual_seed(0)
    plain = BertModel(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with Init(config_dict_or_path=CONFIG):
        model = BertModel.from_pretrained(folder)
    sharded = all(param.numel() == 0 and hasattr(param, "ds_id") for param in model.parameters())
    with GatheredParameters(list(model.parameters())):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return sharded, all(torch.equal(param, value) for param, value in pairs)


def test_from_pretrained_inside_init_loads_and_shards(tmp_path: Path) -> None:
    assert run_distributed(load_inside_init, 2, str(tmp_path), timeout=60) == [(True, True)] * 2
