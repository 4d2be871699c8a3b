"""Gradients that users write, clear and scale themselves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import Engine, initialize
from ds_hf.engine.zero.access import safe_get_full_grad, safe_set_full_grad
from ds_hf.engine.zero.at_rest import Noticed, Released
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError
from ds_hf.log import forget_said, logger
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config, full_weights

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def make(stage: int, **more: Any) -> Engine:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return initialize(model=model, config=base_config(stage, optimizer=SGD, **more))[0]


def written_by_hand() -> None:
    """``param.grad = ...; engine.step()`` without any backward; also with a loss scale, which they carry."""
    for stage in (0, 1, 2):
        engine = make(stage)
        engine.module.weight.grad = torch.tensor([[1.0, 2.0, 3.0]]) * (1 + dist.get_rank())
        engine.step()
        mean = (1 + dist.get_world_size()) / 2
        assert engine.module.weight.tolist() == [[-1.0 * mean, -2.0 * mean, -3.0 * mean]]
        assert engine.module.weight.grad is None
    engine = make(0, fp16={"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2, "hysteresis": 1})
    for value, scale in ((float("inf"), 2.0), (2.0, 2.0), (2.0, 2.0), (2.0, 4.0)):
        engine.module.weight.grad = torch.full((1, 3), value, dtype=torch.float16)
        engine.step()
        assert engine.loss_scale() == scale
    assert engine.module.weight.tolist() == [[-3.0] * 3]


@pytest.mark.parametrize("world", [1, 2])
def test_written_by_hand(world: int) -> None:
    run_distributed(written_by_hand, world, timeout=60)


def two_backwards() -> None:
    """Two losses of one forward: ``zero_grad()`` between them keeps their gradients apart."""
    for stage in (0, 1, 2, 3):
        for by_hand in (False, True):
            engine = make(stage)
            output = engine(torch.tensor([[1.0, 2.0, 4.0]]))
            found = []
            for factor, keep in ((1.0, True), (10.0, False)):
                engine.zero_grad()
                if by_hand:
                    engine.scale((output * factor).sum(), retain_graph=keep).backward(retain_graph=keep)
                else:
                    engine.backward((output * factor).sum(), retain_graph=keep)
                gradient = safe_get_full_grad(engine.module.weight)
                assert gradient is not None
                found.append(gradient.flatten().tolist())
            assert found == [[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]]


def test_two_backwards() -> None:
    run_distributed(two_backwards, 2, timeout=60)


def hooks_added_late(stage: int) -> None:
    """Hooks on gradients that are registered after ``initialize`` find the gradient, of a unit's last parameter too,
    and change it as torch's do; one from before is called until its handle removes it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for param in model.parameters():
        nn.init.ones_(param)
    early: list[float] = []
    late: list[str] = []
    handle = model[1].bias.register_post_accumulate_grad_hook(lambda param: early.append(param.grad.item()))
    engine = initialize(model=model, config=base_config(stage, optimizer=SGD, gradient_clipping=0))[0]

    def double(name: str, param: torch.Tensor) -> None:
        late.append(name)
        assert param.grad is not None
        param.grad.mul_(2)

    for name, param in engine.module.named_parameters():
        param.register_post_accumulate_grad_hook(partial(double, name))
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        handle.remove()
    assert sorted(late) == sorted(["0.weight", "0.bias", "1.weight", "1.bias"] * 2)
    assert early == [1.0]
    assert dict(engine.named_weights())["1.bias"].tolist() == [1.0 - 2 * 2.0]


def hooks_added_late_at_each_stage() -> None:
    for stage in (0, 1, 2, 3):
        hooks_added_late(stage)


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_added_late(world: int) -> None:
    run_distributed(hooks_added_late_at_each_stage, world, timeout=60)


# -- .grad where every rank has the whole gradient ------------------------------------------------------------------


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(index: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + rank))


def reference_gradients(model: nn.Module, micros: int, ranks: range, scale: float = 1.0) -> list[torch.Tensor]:
    """Of the mean over micro-batches, and over ``ranks``, with a loss scale."""
    model.zero_grad()
    for index in range(micros):
        for rank in ranks:
            loss = model(batch(index, rank).to(next(model.parameters()).dtype)).float().square().mean()
            (loss * scale / micros / len(ranks)).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def seen(precision: str) -> None:
    """After each backward ``.grad`` is torch's: this rank's sum, at the boundary the mean over the ranks; no copy."""
    world, rank = dist.get_world_size(), dist.get_rank()
    more: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    scale = 1.0
    if precision == "fp16":
        scale = 8.0
        more["fp16"]["loss_scale"] = scale
    tolerance = {"fp32": 1e-6, "fp16": 3e-3, "bf16": 3e-2}[precision]
    for by_hand in (False, True):
        model = two_layers()
        plain = copy.deepcopy(model)
        config = base_config(0, optimizer=SGD, gradient_accumulation_steps=2, **more)
        engine = initialize(model=model, config=config)[0]
        plain.to(next(model.parameters()).dtype)
        for index in range(2):
            loss = engine(batch(index, rank)).float().square().mean()
            engine.scale(loss).backward() if by_hand else engine.backward(loss)  # type: ignore[no-untyped-call]
            whole = index == 1
            found = [param.grad for param in model.parameters()]
            ranks = range(world) if whole else range(rank, rank + 1)
            wanted = reference_gradients(plain, index + 1, ranks, scale * (index + 1) / 2)
            for param, got, want in zip(model.parameters(), found, wanted, strict=True):
                assert got is not None
                assert got.dtype == param.dtype
                assert got.shape == param.shape
                torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance * scale)
                full = safe_get_full_grad(param) if whole else None
                if full is not None:
                    torch.testing.assert_close(full, got.float() / scale, rtol=0, atol=0)
            (buffer,) = engine.reducer.buffers
            held = buffer.partial if buffer.has_partial else buffer.owned
            assert held is not None
            assert {g.untyped_storage().data_ptr() for g in found if g is not None} == {
                held.untyped_storage().data_ptr()
            }
            engine.step()
        assert [param.grad for param in model.parameters()] == [None] * 4
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_seen_as_torch_gives_it(precision: str, world: int) -> None:
    run_distributed(seen, world, precision, timeout=60)


def stepped(change: Callable[[list[nn.Parameter]], None], micros: int) -> tuple[nn.Module, nn.Module]:
    """An engine at stage 0 and plain SGD over the mean, after a step with gradients that ``change`` changed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = two_layers()
    plain = copy.deepcopy(model)
    engine = initialize(model=model, config=base_config(0, optimizer=SGD, gradient_accumulation_steps=micros))[0]
    for index in range(micros):
        engine.backward(engine(batch(index, rank)).square().mean())
        if index == micros - 1:
            change(list(model.parameters()))
        engine.step()
    reference_gradients(plain, micros, range(world))
    change(list(plain.parameters()))
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    return model, plain


def halve(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(0.5)


def replace(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad.sign() * 0.1


def drop_one(params: list[nn.Parameter]) -> None:
    params[1].grad = None


def drop_all(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def zero(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.zero_()


def clip(params: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.01)
    torch.nn.utils.clip_grad_value_(params, 0.005)


def changed() -> None:
    for change in (halve, replace, drop_one, drop_all, zero, clip):
        for micros in (1, 2):
            model, plain = stepped(change, micros)
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
                assert mine.grad is None


@pytest.mark.parametrize("world", [1, 2])
def test_changed_between_backward_and_step(world: int) -> None:
    run_distributed(changed, world, timeout=60)


def changed_between_backwards() -> None:
    """What is left in ``.grad`` is what the next backward adds to; ``engine.zero_grad()`` keeps sums, as ever."""
    rank = dist.get_rank()
    for zeroed in (False, True):
        model = two_layers()
        plain = copy.deepcopy(model)
        engine = initialize(model=model, config=base_config(0, optimizer=SGD, gradient_accumulation_steps=2))[0]
        engine.backward(engine(batch(0, rank)).square().mean())
        if zeroed:
            engine.zero_grad()
            assert all(param.grad is None for param in model.parameters())
        else:
            halve(list(model.parameters()))
        engine.step()
        with torch.no_grad():
            engine(batch(5, rank))
        engine.backward(engine(batch(1, rank)).square().mean())
        for index, factor in ((0, 1.0 if zeroed else 0.5), (1, 1.0)):
            for other in range(dist.get_world_size()):
                (plain(batch(index, other)).square().mean() * factor / 2 / dist.get_world_size()).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        engine.destroy()
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_changed_between_backwards(world: int) -> None:
    run_distributed(changed_between_backwards, world, timeout=60)


def set_through_the_name() -> None:
    model = two_layers()
    engine = initialize(model=model, config=base_config(0, optimizer=SGD))[0]
    engine.backward(engine(batch(0, 0)).square().mean())
    first = model[0].weight  # type: ignore[index]
    safe_set_full_grad(first, torch.ones(4, 4))
    assert first.grad.tolist() == [[1.0] * 4] * 4
    first.grad = torch.full((4, 4), 2.0)
    found = safe_get_full_grad(first)
    assert found is not None
    assert found.tolist() == [[2.0] * 4] * 4
    before = first.detach().clone()
    engine.step()
    assert torch.equal(first, before - 2.0)


@pytest.mark.parametrize("world", [1, 2])
def test_names_of_deepspeed_beside_it(world: int) -> None:
    run_distributed(set_through_the_name, world, timeout=60)


def assigned_where_sharded() -> None:
    """It would be added to what was reduced already: said, with what to do instead."""
    for stage in (1, 2):
        engine = initialize(model=two_layers(), config=base_config(stage, optimizer=SGD))[0]
        engine.backward(engine(batch(0, dist.get_rank())).square().mean())
        param = next(engine.module.parameters())
        assert param.grad is None
        param.grad = torch.ones(4, 4)
        with pytest.raises(DsHfError, match="safe_set_full_grad"):
            engine.step()
    engine = initialize(model=two_layers(), config=base_config(3, optimizer=SGD))[0]
    engine.backward(engine(batch(0, dist.get_rank())).square().mean())
    with pytest.raises(RuntimeError, match="size"):  # torch's: the parameter is not there
        next(engine.module.parameters()).grad = torch.ones(4, 4)


@pytest.mark.parametrize("world", [1, 2])
def test_assigned_where_it_is_sharded(world: int) -> None:
    run_distributed(assigned_where_sharded, world, timeout=60)


# -- what torch does to gradients that are elsewhere ------------------------------------------------------------------


def clipped_by_torch() -> None:
    """Right at stage 0; told once elsewhere, with what to write, which is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for stage, clips in ((0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (1, 0.1), (3, 0.1)):
        forget_said()
        logger.addHandler(lines := Lines())
        model = two_layers()
        plain, params = copy.deepcopy(model), list(model.parameters())
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        engine = initialize(model=model, config=base_config(stage, optimizer=SGD, gradient_clipping=clips))[0]
        for index in range(3):
            engine.backward(engine(batch(index, rank)).square().mean())
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            engine.step()
            sum(plain(batch(index, other)).square().mean() / world for other in range(world)).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        logger.removeHandler(lines)
        told = [text for text in lines.texts if "clip_grad_norm_() changes nothing" in text]
        assert len(told) == (stage > 0 and not clips and rank == 0), (stage, lines.texts)
        assert any("returns 0 between" in text for text in lines.texts) == (stage > 0 and clips > 0 and rank == 0)
        assert all("2.weight" in text or "0.weight" in text for text in told)
        assert all('"gradient_clipping": 0.1' in text for text in told)
        if not stage or clips:
            with GatheredParameters(params):
                for mine, theirs in zip(params, plain.parameters(), strict=True):
                    torch.testing.assert_close(mine.data, theirs.data, rtol=1e-5, atol=1e-6)
        engine.destroy()


def zeroed_by_the_module() -> None:
    """Right at stage 0; elsewhere the step is made, and that is told; what is said then helps."""
    for stage in (0, 1, 2, 3):
        forget_said()
        logger.addHandler(lines := Lines())
        model = two_layers()
        engine = initialize(model=model, config=base_config(stage, optimizer=SGD))[0]
        before = [value.clone() for value in full_weights(model).values()]
        engine.backward(engine(batch(0, dist.get_rank())).square().mean())
        model.zero_grad()
        told = any("engine.optimizer.zero_grad()" in text for text in lines.texts)
        assert told == (stage > 0 and dist.get_rank() == 0), (stage, lines.texts)
        engine.optimizer.zero_grad()
        engine.step()
        logger.removeHandler(lines)
        assert all(map(torch.equal, full_weights(model).values(), before)), stage
        engine.destroy()


def test_zeroed_by_the_module() -> None:
    run_distributed(zeroed_by_the_module, 2, timeout=60)


@pytest.mark.parametrize("world", [1, 2])
def test_clipped_by_torch(world: int) -> None:
    run_distributed(clipped_by_torch, world, timeout=60)


def kinds_of(model: nn.Module) -> list[type]:
    """Classes of the parameters; those that notice reads in turns count as what they are otherwise."""
    return [Released if type(param) is Noticed else type(param) for param in model.parameters()]


def clipped_late() -> None:
    """Also where it begins long after the first steps, of all parameters or of some: at one of the steps at
    which one parameter is looked at."""
    for stage, some in ((1, False), (3, True)):
        forget_said()
        logger.addHandler(lines := Lines(logging.WARNING))
        model = two_layers()
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = initialize(model=model, config=base_config(stage, optimizer=SGD, zero_optimization=zero))[0]
        engine.reducer.watch.EVERY = 2
        for index in range(13):
            engine.backward(engine(batch(index, dist.get_rank())).square().mean())
            if index > 4:
                torch.nn.utils.clip_grad_norm_(list(model.parameters())[-2:] if some else model.parameters(), 0.1)
            engine.step()
            assert index > 4 or not lines.texts, lines.texts
            assert set(kinds_of(model)) <= {nn.Parameter, Released}
        logger.removeHandler(lines)
        told = sum("clip_grad_norm_() changes nothing" in text for text in lines.texts)
        assert told == (dist.get_rank() == 0), (stage, lines.texts)
        engine.destroy()


def test_clipped_late() -> None:
    run_distributed(clipped_late, 2, timeout=30)


def looked_for() -> None:
    """By a script's own hand; a copy made meanwhile is an ordinary one, and after the step parameters are as before."""
    for stage in (1, 3):
        forget_said()
        logger.addHandler(lines := Lines())
        model = two_layers()
        engine = initialize(model=model, config=base_config(stage, optimizer=SGD))[0]
        kinds = kinds_of(model)
        engine.backward(engine(batch(0, dist.get_rank())).square().mean())
        assert not lines.texts or "`.grad` is None" not in str(lines.texts)
        with GatheredParameters(list(model.parameters())):
            copied = copy.deepcopy(model)
        assert [type(param) for param in copied.parameters()] == [nn.Parameter] * 4
        engine.step()
        assert kinds_of(model) == kinds == [nn.Parameter if stage < 3 else Released] * 4
        engine.backward(engine(batch(0, dist.get_rank())).square().mean())
        assert [param.grad for param in model.parameters()] == [None] * 4
        logger.removeHandler(lines)
        assert ("`.grad` is None between backward() and step()" in str(lines.texts)) == (dist.get_rank() == 0)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_looked_for(world: int) -> None:
    run_distributed(looked_for, world, timeout=60)


# -- parameters without a gradient ------------------------------------------------------------------------------------


class Branches(nn.Module):
    """``sometimes`` is in the loss of some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


def without_gradients(stage: int, decay: float, frozen: bool) -> list[str]:
    """Three steps, the second without a part: as torch with gradients of zero, frozen meanwhile as torch without."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forget_said()
    logger.addHandler(lines := Lines())
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=decay)
    wanted = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": decay}}
    engine = initialize(model=model, config=base_config(stage, optimizer=wanted))[0]
    for index in range(3):
        both = index != 1
        if frozen:
            model.sometimes.requires_grad_(both)
        engine.backward(engine(batch(index, rank), both).square().mean())
        engine.step()
        optimizer.zero_grad()
        sum(plain(batch(index, other), both).square().mean() / world for other in range(world)).backward()  # type: ignore[union-attr]
        for param in () if frozen else plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
    logger.removeHandler(lines)
    with GatheredParameters(list(model.parameters())):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.data, theirs.data, rtol=1e-4, atol=1e-5)
    engine.destroy()
    return [text for text in lines.texts if "no gradient in this step" in text]


class Layers(nn.Module):
    """A list of layers is blocks: each is a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.blocks[0](x)
        return first


def a_unit_without_gradients(stage: int) -> None:
    """What is told is what happens: one process passes over it, as torch does; several decay it."""
    forget_said()
    logger.addHandler(lines := Lines())
    model = Layers()
    before = model.blocks[1].weight.detach().clone()
    wanted = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    engine = initialize(model=model, config=base_config(stage, optimizer=wanted))[0]
    engine.backward(engine(batch(0, dist.get_rank())).square().mean())
    engine.step()
    logger.removeHandler(lines)
    alone = dist.get_world_size() == 1
    with GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(model.blocks[1].weight.data, before if alone else before * 0.99)
    engine.destroy()
    told = [text for each in every(lines.texts) for text in each if "no gradient in this step" in text]
    assert bool(told) != alone


def a_loss_of_old_weights(stage: int) -> None:
    """Two losses and a step between their backwards, where torch raises; and both backwards before it."""
    forget_said()
    logger.addHandler(lines := Lines(logging.WARNING))
    config = base_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}) | {"gradient_accumulation_steps": 2}
    engine = initialize(model=Branches(), config=config)[0]
    for index in range(3):
        first, second = (engine(batch(index, rank), True).square().mean() for rank in (0, 1))
        for loss in (first, second):
            engine.backward(loss)
            if index == 2:
                engine.set_gradient_accumulation_boundary(True)
            engine.step()
        told = [text for each in every(lines.texts) for text in each if "computed before the last step" in text]
        assert len(told) == (index == 2), (index, lines.texts)
    logger.removeHandler(lines)
    engine.destroy()


def parts_without_gradients() -> None:
    for stage in (0, 2, 3):
        a_unit_without_gradients(stage)
    for stage in (0, 3):
        a_loss_of_old_weights(stage)
    for stage in (0, 1, 3):
        for decay in (0.0, 0.1):
            told = [text for each in every(without_gradients(stage, decay, False)) for text in each]
            assert "sometimes.weight" in told[0]
            assert not any("always" in text for text in told)
            assert len(told) <= dist.get_world_size()
            assert not without_gradients(stage, decay, True)


def steps_without_backward(stage: int) -> None:
    """As in torch they leave everything as it is, on any number of processes, and count."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    wanted = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    engine = initialize(model=model, config=base_config(stage, optimizer=wanted))[0]
    for index, trains in enumerate((False, True, False, False, True)):
        optimizer.zero_grad()
        if trains:
            engine.backward(engine(batch(index, rank), True).square().mean())
            sum(plain(batch(index, r), True).square().mean() / world for r in range(world)).backward()  # type: ignore[union-attr]
        engine.step()
        optimizer.step()
    assert engine.global_steps == 5
    with GatheredParameters(list(model.parameters())):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.data, theirs.data, rtol=1e-5, atol=1e-6)
    engine.destroy()


class Negative(nn.Linear):
    """Gradients of -0, which are gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * -0.0).sum()


def one_process_without_backward(stage: int) -> None:
    """Another's gradients count, of whatever sign its zeros are, also where each process updates a part."""
    model = Negative(8, 8, bias=False)
    nn.init.ones_(model.weight)
    wanted = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    engine = initialize(model=model, config=base_config(stage, optimizer=wanted))[0]
    for mine in (True, dist.get_rank() == 0):
        if mine:
            engine.backward(engine(batch(0, 0)))
        engine.step()
    torch.testing.assert_close(model.weight.data, torch.full((8, 8), 0.99**2))
    engine.destroy()


def changes(config: dict[str, Any], plan: str) -> list[bool]:
    """Whether weights changed in each step: in ``b`` both processes have a backward, in ``1`` the first, in ``-`` none.
    Both processes have the same weights then."""
    model = two_layers()
    engine = initialize(model=model, config=config)[0]
    last, found = full_weights(model), []
    for index, who in enumerate(plan):
        if who == "b" or (who == "1" and dist.get_rank() == 0):
            engine.backward(engine(batch(index, dist.get_rank())).square().mean())
        engine.step()
        now = full_weights(model)
        found.append(any(not torch.equal(now[name], last[name]) for name in now))
        last = now
    for tensor in last.values():
        other = tensor.clone()
        dist.broadcast(other, 0)
        assert torch.equal(tensor, other)
    engine.destroy()
    return found


def steps_of_what_is_rounded() -> None:
    """Sums in blocks show when no process has a gradient; optimizers that send momenta in one bit cannot, and warn."""
    decays = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    for stage, more in ((2, {}), (3, {}), (3, {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4}})):
        config = base_config(stage, optimizer=decays)
        config["zero_optimization"].update(zero_quantized_gradients=True, **more)
        plan = "-b--b-" if stage == 3 else "-b-1b-"
        assert changes(config, plan) == [who != "-" for who in plan], (stage, more)
    decays = {"type": "OneBitAdam", "params": {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 2}}
    forget_said()
    logger.addHandler(lines := Lines(logging.WARNING))
    assert changes(base_config(0, optimizer=decays), "-b-bb") == [False, True, False, True, True]
    assert not any("without any backward" in text for text in lines.texts)
    assert changes(base_config(0, optimizer=decays), "bbb-") == [True] * 4
    assert sum("engine.step() without any backward" in text for text in lines.texts) == 1
    logger.removeHandler(lines)


def whole_steps_without_gradients() -> None:
    for stage in (0, 1, 2, 3):
        steps_without_backward(stage)
    for stage in (0, 1, 2):
        one_process_without_backward(stage)


def every(mine: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_from_before_a_step_that_was_skipped(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its weights are those of now; not after the next step, which is applied."""
    forget_said()
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    engine = make(stage, fp16=fp16)
    x = torch.ones(1, 3, dtype=torch.float16)
    losses = [engine(x).sum() for _ in range(4)]
    for index, factor in enumerate((float("inf"), float("inf"), 1.0, 1.0)):
        assert "computed before the last step" not in caplog.text, index
        engine.backward(losses[index] * factor)
        engine.step()
    assert engine.skipped_steps == 2
    assert "computed before the last step" in caplog.text
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_parts_without_gradients(world: int) -> None:
    run_distributed(parts_without_gradients, world, timeout=60)


def test_steps_without_any_backward() -> None:
    run_distributed(whole_steps_without_gradients, 2, timeout=60)


def test_steps_without_any_backward_of_what_is_rounded() -> None:
    run_distributed(steps_of_what_is_rounded, 2, timeout=60)
