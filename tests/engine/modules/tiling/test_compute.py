"""Functions in tiles: values and gradients of the whole, with what is alive of one tile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import initialize
from ds_hf.engine.modules.tiling.compute import bounds, compute_tiles, computed_tiles
from ds_hf.engine.zero.gather import GatheredParameters
from tests.helpers.distributed import run_distributed
from tests.helpers.live_bytes import LiveBytes

WIDTH, VOCAB, LENGTH = 32, 50, 25


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width, bias=False), drop

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate(x)) * self.up(x)
        return self.down(F.dropout(inner, self.drop, self.training))


def mlp(**more: Any) -> MLP:
    torch.manual_seed(0)
    return MLP(**more)


def numbers(module: nn.Module, x: Tensor, fn: Any) -> list[Tensor]:
    """Output, the input's gradient and those of the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    y = fn(x * 1.0)
    after = torch.rand(1)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), after, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def test_bounds_are_those_of_chunk() -> None:
    for length in range(1, 12):
        for tiles in range(1, 15):
            chunks = [len(chunk) for chunk in torch.arange(length).chunk(tiles)]
            assert [end - start for start, end in bounds(length, tiles)] == chunks
    assert bounds(0, 3) == [(0, 0)]


@pytest.mark.parametrize("shape", [(1, LENGTH, WIDTH), (3, LENGTH, WIDTH), (LENGTH, WIDTH)], ids=str)
@pytest.mark.parametrize("given", [None, "all", "some"])
def test_mlp(shape: tuple[int, ...], given: str | None) -> None:
    module, x = mlp(), torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    weights = {None: None, "all": list(module.parameters()), "some": [module.up.weight]}[given]
    plain = numbers(module, x, module)
    for tiles in (1, 2, 4, 100):
        close(numbers(module, x, lambda x, n=tiles: TiledMLP.apply(MLP.forward, module, x, n, weights)), plain)


def test_weights_that_are_frozen_and_inputs_that_need_none() -> None:
    module, x = mlp(), torch.randn(2, LENGTH, WIDTH)
    module.up.weight.requires_grad_(False)
    close(numbers(module, x, lambda x: TiledMLP.apply(MLP.forward, module, x, 4, None)), numbers(module, x, module))
    assert module.up.weight.grad is None
    module.zero_grad()
    TiledMLP.apply(MLP.forward, module, x, 4, None).sum().backward()
    ours = module.down.weight.grad
    module.zero_grad()
    module(x).sum().backward()
    assert ours is not None
    assert module.down.weight.grad is not None
    close([ours], [module.down.weight.grad])
    with torch.no_grad():
        close([TiledMLP.apply(MLP.forward, module, x, 4, None)], [module(x)])


def test_dropout_and_autocast_are_drawn_again() -> None:
    """The tiles of backward are those of forward: the gradient is that of the function that was computed."""
    module = mlp(drop=0.5).double()
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64)

    def tiled(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return TiledMLP.apply(MLP.forward, module, x, 3, None)

    assert torch.autograd.gradcheck(tiled, (x.requires_grad_(),), fast_mode=True)
    module = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = module(x.float())
        loss = TiledMLP.apply(MLP.forward, module, x.float(), 3, None)
    assert loss.dtype == plain.dtype == torch.bfloat16
    loss.float().sum().backward()  # outside of the autocast


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_inside_checkpointing_tiles_run_as_often_as_the_whole(reentrant: bool) -> None:
    module, x, calls = mlp(), torch.randn(2, LENGTH, WIDTH), []

    def counted(self: MLP, x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return MLP.forward(self, x)

    def block(x: Tensor) -> Tensor:
        return x + TiledMLP.apply(counted, module, x.tanh(), 5, None)

    plain = numbers(module, x, lambda x: x + module(x.tanh()))
    close(numbers(module, x, lambda x: checkpoint(block, x, use_reentrant=reentrant)), plain)
    assert len(calls) == (3 if reentrant else 2) * 5  # the reentrant kind runs blocks to their end


def test_backward_twice() -> None:
    module, x = mlp(), torch.randn(1, LENGTH, WIDTH, requires_grad=True)
    loss = TiledMLP.apply(MLP.forward, module, x * 1.0, 4, None).square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    close([x.grad], [2 * once])


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_sequence_tiled_compute(reduction: str | None) -> None:
    """Two tensors cut, one passed to every tile; all of them get their gradient."""
    module = mlp()
    torch.manual_seed(2)
    x, scale, shift = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, 1), torch.randn(WIDTH)
    tensors = [t.requires_grad_() for t in (x, scale, shift)]

    def fn(x: Tensor, scale: Tensor, shift: Tensor, module: nn.Module, power: int) -> Tensor:
        return module(x * scale + shift) ** power

    def run(tiles: int | None) -> list[Tensor]:
        for tensor in [*tensors, *module.parameters()]:
            tensor.grad = None
        if tiles is None:
            y = fn(x, scale, shift, module, 2)
            y = y if reduction is None else getattr(y, reduction)()
        else:
            split, passed = {"x": x, "scale": scale}, {"shift": shift, "module": module, "power": 2}
            y = sequence_tiled_compute(fn, LENGTH, tiles, split, passed, "x", list(module.parameters()), 1, reduction)
        y.sum().backward()
        return [y.detach(), *(t.grad for t in [*tensors, *module.parameters()])]  # type: ignore[misc]

    for tiles in (1, 4, LENGTH):
        close(run(tiles), run(None), 2e-6)
    with pytest.raises(ValueError, match="valid values are: none/mean/sum"):
        SequenceTiledCompute.apply(fn, LENGTH, 2, ["x"], [], "x", None, 1, "median", x)


def test_outputs_without_dims_are_stacked_and_others_have_to_fit() -> None:
    net, x = mlp(), torch.randn(2, 12, WIDTH, requires_grad=True)

    def tiled(fn: Any, dim: int) -> Tensor:
        return sequence_tiled_compute(fn, 12, 3, {"x": x}, {}, "x", list(net.parameters()), dim)

    def square(x: Tensor) -> Tensor:
        return net(x).square().mean()

    (found,) = torch.autograd.grad(tiled(square, 1), x)  # DeepSpeed's default for the dim
    (wanted,) = torch.autograd.grad(square(x), x)
    close([found], [wanted])
    with pytest.raises(ValueError, match=r"a tile of 4 positions gave an output of shape \(2, 4, \d+\).*along dim 2"):
        tiled(net, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tiled_fused_logits_loss(reduction: str, masked: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB)
    x, y = torch.randn(2, 24, WIDTH), torch.randint(0, VOCAB, (2, 24))
    mask = (torch.rand(2, 24) > 0.3) if masked else None

    def loss_fn(self: Any, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(head(x), y, reduction="none")
        if mask is not None:
            losses = losses * mask
        return losses.mean() if reduction == "mean" else losses.sum()

    def run(tiles: int | None, given: Any = None) -> list[Tensor]:
        head.zero_grad()
        leaf = x.clone().requires_grad_()
        if tiles is None:
            flat = None if mask is None else mask.flatten()
            loss = loss_fn(head, leaf.flatten(0, 1), y.flatten(), flat)
        else:
            loss = TiledFusedLogitsLoss.apply(loss_fn, head, leaf, y, mask, tiles, given, reduction)
        (loss * 3).backward()
        return [loss.detach(), leaf.grad, head.weight.grad, head.bias.grad]  # type: ignore[list-item]

    for tiles in (1, 4, 48):
        for given in (None, [head.weight], [head.weight, head.bias]):
            close(run(tiles, given), run(None), 2e-6)
    with torch.no_grad():
        TiledFusedLogitsLoss.apply(loss_fn, head, x, y, mask, 4, None, reduction)
    for arguments in ((x, y[:1], None), (x, y, torch.ones(2, 3)), (x[0, :, 0], y, None)):
        with pytest.raises(ValueError, match="must"):
            TiledFusedLogitsLoss.apply(loss_fn, head, *arguments, 4, None, reduction)


def test_weights_are_summed_in_fp32() -> None:
    """64 tiles whose gradients are 1 and then 1/256 each: in bf16 the small ones would all be lost."""
    linear = nn.Linear(1, 1, bias=False).bfloat16()
    x = torch.full((1, 65, 1), 1 / 256, dtype=torch.bfloat16)
    x[0, 0] = 1
    TiledMLP.apply(lambda self, x: self(x), linear, x, 65, None).sum().backward()
    assert float(linear.weight.grad) == 1.25  # type: ignore[arg-type]


def test_live_bytes() -> None:
    """Of 8 tiles: what an MLP keeps for backward is its input, and in backward one tile's own."""
    module, x = mlp(width=16), torch.randn(1, 4096, 16)
    peaks = {}
    for name, fn in (("plain", module), ("tiles", lambda x: TiledMLP.apply(MLP.forward, module, x, 8, None))):
        live = LiveBytes()
        with live:
            y = fn((x * 1.0).requires_grad_())
            kept = live.now()
            y.sum().backward()
            del y
        gc.collect()
        peaks[name] = (kept, live.peak)
        module.zero_grad()
    unit = x.numel() * 4
    assert peaks["plain"][0] >= (2 + 4 * 4) * unit
    assert peaks["tiles"][0] <= 2.2 * unit
    assert peaks["tiles"][1] <= 4 * unit + 8 * 4 * unit / 8 + unit


# -- under ZeRO -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two MLPs one after another and a head of its own unit (2**20 elements), in tiles or whole."""

    def __init__(self, way: str, checkpointing: bool) -> None:
        super().__init__()
        self.way, self.checkpointing = way, checkpointing
        self.blocks = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2**20 // WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        if self.way == "whole":
            return self.loss(x.flatten(0, 1), y.flatten())
        if self.way == "generic":
            shards = 2 + torch.distributed.get_rank()  # tiles need not be as many on all processes
            return sequence_tiled_compute(
                lambda x, y: self.loss(x.flatten(0, 1), y.flatten()) * y.numel(),
                x.shape[1], shards, {"x": x, "y": y}, {}, "x", [self.head.weight], 0, "sum",
            ) / y.numel()  # fmt: skip
        given = None if self.way == "no weights" else [self.head.weight]
        return TiledFusedLogitsLoss.apply(type(self).loss, self, x, y, None, 4, given, "mean")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), y)


def tile_blocks(model: Model) -> None:
    for block in model.blocks:
        block.forward = lambda x, block=block: TiledMLP.apply(MLP.forward, block, x, 4, None)


def trained(stage: int) -> dict[str, Any]:
    """Losses, gradient norms and a weight after two steps, of each way."""
    found = {}
    for way in ("whole", "fused", "no weights", "generic"):
        for checkpointing in (False, True):
            torch.manual_seed(0)
            model = Model(way, checkpointing)
            if way != "whole":
                tile_blocks(model)
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": stage},
            }
            engine = initialize(model=model, config=config)[0]
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            logged = []
            for _ in range(4):
                x = torch.randn(2, 24, WIDTH, generator=generator)
                y = torch.randint(0, 1000, (2, 24), generator=generator)
                loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                logged.append(loss.item())
            with GatheredParameters(list(model.parameters())):
                weights = [model.blocks[0].up.weight.clone(), model.head.weight[:1000].clone()]
            logged.append(float(engine.get_global_grad_norm()))
            engine.destroy()
            found[f"{way} {checkpointing}"] = (logged, [w.detach() for w in weights])
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])  # 1 has the gradients of 0 and the updates of 2
def test_under_zero_with_two_processes(stage: int) -> None:
    for found in run_distributed(trained, 2, stage, timeout=100):
        logged, weights = found.pop("whole False")
        for way, (ours, our_weights) in found.items():
            assert ours == pytest.approx(logged, rel=2e-6), way
            for a, b in zip(our_weights, weights, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def test_without_values_a_few_tiles_stand_for_all() -> None:
    cuts = bounds(100, 50)
    assert len(computed_tiles(cuts, torch.empty(1))) == 50
    assert computed_tiles(cuts, torch.empty(1, device="meta")) == [
        (0, (0, 2)),
        (1, (2, 4)),
        (2, (4, 6)),
        (49, (98, 100)),
    ]
    layer, calls = nn.Linear(8, 8, device="meta"), list[int]()

    def counting(parts: list[Tensor], _: list[Tensor]) -> Tensor:
        calls.append(parts[0].shape[0])
        return layer(parts[0])  # type: ignore[no-any-return]

    x = torch.empty(100, 8, device="meta", requires_grad=True)
    output = compute_tiles(counting, [x], [], [*layer.parameters()], cuts=cuts, dim=0, join=0)
    output.sum().backward()
    assert output.shape == (100, 8)
    assert x.grad is not None
    assert x.grad.shape == (100, 8)
    assert calls == [2] * 8  # forward, and again in backward
