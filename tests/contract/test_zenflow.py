"""ZenFlow against the same rule in plain torch, in one process: important columns in each step, the rest by means."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from ds_hf import Engine, initialize
from ds_hf.engine.optim.adam import FusedAdam
from ds_hf.engine.zero.gather import GatheredParameters
from tests.contract.test_parity import ADAMW, CLIP, MICRO, NextTokenLM, batches, model
from tests.contract.test_sequence_parity import losses as losses_of_sequences
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines

Run = tuple[list[float], dict[str, Tensor]]
CPU = {"device": "cpu"}
EVERY = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 4, "update_interval": 2}


class PlainZenFlow:
    """The rule. ``params`` take the values; masters are copies. ``options``: of each parameter."""

    def __init__(self, params: list[Tensor], section: dict[str, Any], options: list[dict[str, Any]]) -> None:
        self.params, self.section, self.options = params, section, options
        self.host = [param.detach().to(_wide(param.dtype)).clone() for param in params]
        self.adam = self._adam(self.host)
        self.masks: list[Tensor] | None = None
        self.late: list[Tensor] | None = None
        self.rounds = 0

    def step(self, grads: Sequence[Tensor | None], sizes: list[Tensor], share: float = 1.0) -> None:
        """``grads``: ``None`` of what is frozen; ``sizes``: what the columns are ranked by, in the shape of each
        gradient; ``share`` of the learning rates."""
        self.rounds += 1
        self.share = share
        if self.masks is None:
            self._host_step(grads)
            self._land(self.host)
            if self.rounds >= self.section.get("full_warm_up_rounds", 0):
                self._choose(sizes)
            return
        self.since += 1
        chooses = self.since % self.section["select_interval"] == 0
        every = self.section["update_interval"]
        updates = chooses or (self.due if every == "auto" else self.since % every == 0)
        if updates and self.late is not None:
            self._land(self.late)
            self.late = None
        for chosen, grad, mask in zip(self.chosen, grads, self.masks, strict=True):
            chosen.grad = None if grad is None else grad[mask]
        self._step(self.chosen_adam)
        self._land(None)
        for waiting, grad in zip(self.waiting, grads, strict=True):
            waiting += [] if grad is None else [grad]
        self.steps += 1
        if every == "auto":
            self._weigh([grad for grad in grads if grad is not None])
        if updates:
            self._host_step(self._means())
            self._wait_for_nothing()
            if self.section.get("overlap_step") and not chooses:
                self.late = [host.clone() for host in self.host]
            else:
                self._land(self.host)
        if chooses:
            self._choose(sizes)

    def end(self) -> None:
        """What a checkpoint does: everything is updated, columns are forgotten."""
        if self.masks is not None:
            if self.late is not None:
                self._land(self.late)
                self.late = None
            if self.steps:
                self._host_step(self._means())
                self._land(self.host)
            self._to_host()
            self.masks = None

    def _means(self) -> list[Tensor | None]:
        return [sum(waiting) / len(waiting) if waiting else None for waiting in self.waiting]

    def _host_step(self, grads: Sequence[Tensor | None]) -> None:
        for host, grad in zip(self.host, grads, strict=True):
            host.grad = None if grad is None else grad.clone()
        self._step(self.adam)

    def _adam(self, values: list[Tensor]) -> torch.optim.AdamW:
        each = [{"params": [value], **own} for value, own in zip(values, self.options, strict=True)]
        return torch.optim.AdamW(each, **ADAMW)  # type: ignore[arg-type]

    def _step(self, adam: torch.optim.AdamW) -> None:
        for group, own in zip(adam.param_groups, self.options, strict=True):
            group["lr"] = self.share * own.get("lr", ADAMW["lr"])
        adam.step()

    def _land(self, values: list[Tensor] | None) -> None:
        with torch.no_grad():
            for index, param in enumerate(self.params):
                if values is not None:
                    param.copy_(values[index])
                if self.masks is not None:
                    param[self.masks[index]] = self.chosen[index].to(param.dtype)

    def _to_host(self) -> None:
        if self.masks is not None:
            for host, mask, chosen in zip(self.host, self.masks, self.chosen, strict=True):
                host[mask] = chosen

    def _choose(self, sizes: list[Tensor]) -> None:
        self._to_host()
        self.masks = [mask_of(size, self.section["topk_ratio"]) for size in sizes]
        self.chosen = [host[mask].clone() for host, mask in zip(self.host, self.masks, strict=True)]
        self.chosen_adam = self._adam(self.chosen)
        self.since = 0
        self._wait_for_nothing()

    def _wait_for_nothing(self) -> None:
        self.waiting: list[list[Tensor]] = [[] for _ in self.host]
        self.steps = 0
        self.due, self.gathered = False, [(0.0, 0.0) for host in self.host]

    def _weigh(self, grads: list[Tensor]) -> None:
        """Whether the columns that wait have gathered as much as chosen ones get in a step, matrix by matrix."""
        assert self.masks is not None
        presses = []
        for index, (grad, mask) in enumerate(zip(grads, self.masks, strict=True)):
            if grad.dim() > 1:
                of = [grad[part].abs().mean().item() for part in (~mask, mask)]
                before = self.gathered[index]
                self.gathered[index] = now = (before[0] + of[0], before[1] + of[1])
                presses.append(now[0] >= now[1] / self.steps)
        self.due = sum(presses) / len(presses) >= self.section.get("auto_ratio", 0.99)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def mask_of(size: Tensor, share: float) -> Tensor:
    """The elements in the columns of the largest sums; all of what has none."""
    if size.dim() < 2:
        return torch.ones_like(size, dtype=torch.bool)
    sums = size.flatten(1).sum(0)
    columns = torch.zeros(len(sums), dtype=torch.bool, device=sums.device)
    columns[sums.topk(max(1, int(len(sums) * share))).indices] = True
    return columns.expand(len(size), -1).reshape(size.shape)


def plain(
    section: dict[str, Any],
    accumulation: int,
    world: int,
    clip: float,
    ends: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    scales: list[float] | None = None,
    device: str = "cpu",
    options: Callable[[Tensor], dict[str, Any]] = lambda param: {},
    halved_every: int = 1000,
    of_sums: bool = False,
) -> Run:
    """Losses and final weights.

    Args:
        of_sums: columns are ranked by the sums over micro-batches, not by each of them.
        ends: steps after which a checkpoint is written.
        scales: the loss scale of each step, 0 where it is skipped.
        options: of a parameter, as in its group.
        halved_every: steps after which learning rates are.
    """
    trained = model().to(device, _wide(dtype))
    rule = PlainZenFlow(list(trained.parameters()), section, list(map(options, trained.parameters())))
    params = rule.params = list(trained.to(dtype).parameters())
    losses = []
    for number, step in enumerate(batches(accumulation, world)):
        grads, sizes = ([torch.zeros_like(param, dtype=_wide(dtype)) for param in params] for _ in range(2))
        total = 0.0
        for micro in step:
            loss = sum(trained(ids.to(device)) for ids in micro) / (accumulation * world)
            total += loss.item()
            scale = scales[number] or 1.0 if scales is not None else 1.0
            for index, grad in enumerate(torch.autograd.grad(loss * scale, params)):
                grads[index] += grad.to(_wide(dtype)) / scale
                sizes[index] += grad.to(_wide(dtype)).abs()
        losses.append(total)
        if scales is not None and not scales[number]:
            continue
        if of_sums:
            sizes = [grad.abs() for grad in grads]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
        rule.step([grad * factor for grad in grads], sizes, 0.5 ** (number // halved_every))
        if number + 1 in ends:
            rule.end()
    return losses, {name: param.detach().to(_wide(dtype)).cpu() for name, param in trained.named_parameters()}


def engine_of(section: dict[str, Any], stage: int, accumulation: int = 1, **more: Any) -> Engine:
    zero = {"stage": stage, "offload_optimizer": CPU, "zenflow": section, **more.pop("zero", {})}
    made = more.pop("model", None) or model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": zero,
        **more,
    }
    return initialize(model=made, config=config)[0]


def steps(engine: Engine, accumulation: int = 1, first: int = 0, last: int | None = None) -> list[float]:
    """Mean losses over the processes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in batches(accumulation, world)[first:last]:
        total = torch.zeros((), device=engine.device)
        for micro in step:
            loss = engine(micro[rank].to(engine.device))
            total += loss.detach().float() / (accumulation * world)
            engine.backward(loss)
            engine.step()
        torch.distributed.all_reduce(total)
        losses.append(total.item())
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    engine._finish_update()
    with GatheredParameters(engine.module.parameters()):
        return {name: param.detach().float().cpu() for name, param in engine.module.named_parameters()}


def assert_like(found: Run, expected: Run, loss: float = 1e-6, weight: float = 2e-5, once: float = 0.0) -> None:
    """A gradient that is nothing but rounding moves an element by the learning rate once columns are chosen anew; what
    is updated at the wrong time differs by 1e-2.

    Args:
        once: by which an element of each parameter may be off: on other machines, with other products of 16 bits, it
            may go the other way in a step.
    """
    assert found[0] == pytest.approx(expected[0], rel=loss)
    for name, value in expected[1].items():
        off, size = (found[1][name] - value).norm().item(), value.norm().item()
        assert off < weight * size + once, f"{name}: {off:.2e} of {size:.2e}"


CELLS = [
    # stage, accumulation, clip, what of the section
    (1, 1, 0.0, {}),
    (1, 4, 0.0, {"overlap_step": True}),
    (2, 1, CLIP, {"overlap_step": True, "full_warm_up_rounds": 3}),
    (2, 4, 0.0, {"offload": True}),
    (3, 1, CLIP, {"overlap_step": True, "offload": True, "update_interval": 3, "select_interval": 7}),
    (3, 1, 0.0, {"update_interval": 1, "select_interval": 100}),
    (3, 4, CLIP, {"overlap_step": True, "select_interval": 5}),
    (2, 1, 0.0, {"update_interval": "auto", "auto_ratio": 0.5, "select_interval": 8}),
]


def cells() -> None:
    world = torch.distributed.get_world_size()
    for stage, accumulation, clip, own in CELLS:
        section = {**EVERY, **own}
        engine = engine_of(section, stage, accumulation, gradient_clipping=clip)
        found = steps(engine, accumulation), weights(engine)
        engine.destroy()
        assert_like(found, plain(section, accumulation, world, clip, of_sums=stage == 1))


@pytest.mark.parametrize("world", [1, 2])
def test_against_plain_torch(world: int) -> None:
    run_distributed(cells, world, timeout=100)


def options_of(param: Tensor) -> dict[str, Any]:
    return {"weight_decay": 0.1} if param.dim() > 1 else {"lr": 3e-3}


def other_places_and_optimizers() -> None:
    """Parameters in host memory; an optimizer of the script, with groups, whose rates a schedule changes."""
    section = {**EVERY, "overlap_step": True}
    engine = engine_of(section, 3, zero={"offload_param": CPU})
    assert_like((steps(engine), weights(engine)), plain(section, 1, torch.distributed.get_world_size(), 0.0))
    engine.destroy()

    expected = plain(section, 1, torch.distributed.get_world_size(), 0.0, options=options_of, halved_every=3)
    for own in (True, False):
        made = model()
        kinds = [[p for p in made.parameters() if (p.dim() > 1) is matrices] for matrices in (True, False)]
        groups = [{"params": params, **options_of(params[0])} for params in kinds]
        optimizer = FusedAdam(groups, **ADAMW) if own else torch.optim.AdamW(groups, **ADAMW)  # type: ignore[arg-type]
        engine, _, _, schedule = initialize(
            model=made,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
            config={
                "train_micro_batch_size_per_gpu": MICRO,
                "gradient_clipping": 0.0,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {"stage": 2, "offload_optimizer": CPU, "zenflow": section},
            },
        )
        assert_like((steps(engine), weights(engine)), expected)
        assert schedule.get_last_lr() == pytest.approx([1e-3 / 8, 3e-3 / 8])
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_other_places_and_optimizers(world: int) -> None:
    run_distributed(other_places_and_optimizers, world, timeout=60)


def test_processes_that_share_sequences() -> None:
    tree = {"zero_optimization": {"stage": 2, "offload_optimizer": CPU, "zenflow": {**EVERY, "overlap_step": True}}}
    (expected,) = run_distributed(losses_of_sequences, 1, 1, tree, timeout=60)
    for found in run_distributed(losses_of_sequences, 2, 2, tree, timeout=60):
        assert found == pytest.approx(expected, rel=1e-4)


def narrow_cells() -> None:
    for dtype, section in [
        ("bf16", EVERY),
        ("fp16", {**EVERY, "overlap_step": True, "full_warm_up_rounds": 2}),
        ("fp16", {**EVERY, "offload": True}),
    ]:
        own = {"enabled": True, **({"initial_scale_power": 17, "hysteresis": 1} if dtype == "fp16" else {})}
        engine = engine_of(section, 2, gradient_clipping=CLIP, **{dtype: own})
        losses, scales = [], []
        for number in range(len(batches(1, 1))):
            scale = engine.optimizer.loss_scaler.scale
            losses += steps(engine, first=number, last=number + 1)
            scales.append(scale if engine.was_step_applied() else 0.0)
        assert (0.0 in scales) == (dtype == "fp16")
        assert sum(map(bool, scales)) > 5
        found = losses, weights(engine)
        engine.destroy()
        like, weight = (torch.bfloat16, 5e-3) if dtype == "bf16" else (torch.float16, 3e-3)
        assert_like(found, plain(section, 1, 1, CLIP, dtype=like, scales=scales), 2e-3, weight, once=2 * ADAMW["lr"])


def test_narrow_parameters_and_steps_that_overflow() -> None:
    run_distributed(narrow_cells, 1, timeout=60)


HALF = 6  # within an interval, and while an update is under way
PARTLY = {**EVERY, "overlap_step": True, "full_warm_up_rounds": 3, "select_interval": 5, "update_interval": 2}


def save(folder: str) -> None:
    engine = engine_of(PARTLY, 2)
    losses = steps(engine, last=HALF)
    engine.save_checkpoint(folder)
    losses += steps(engine, first=HALF)
    found = losses, weights(engine)
    engine.destroy()
    assert_like(found, plain(PARTLY, 1, torch.distributed.get_world_size(), 0.0, ends=(HALF,)))


def resume(folder: str, stage: int) -> None:
    """On any number of processes: all get what two processes get."""
    engine = engine_of(PARTLY, stage)
    trained = batches(1, 2)
    engine.load_checkpoint(folder)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for (micro,) in trained[HALF:]:
        loss = engine(micro[rank]) if world == 2 else engine(torch.cat(list(micro)))
        engine.backward(loss)
        engine.step()
    found: Run = [], weights(engine)
    engine.destroy()
    assert_like(found, ([], plain(PARTLY, 1, 2, 0.0, ends=(HALF,))[1]))


def test_a_checkpoint_ends_an_interval_and_continues_on_any_number_of_processes(tmp_path: Path) -> None:
    run_distributed(save, 2, str(tmp_path), timeout=60)
    run_distributed(resume, 2, str(tmp_path), 3, timeout=60)
    run_distributed(resume, 1, str(tmp_path), 1, timeout=60)


def without_zenflow(folder: str) -> None:
    """What ZenFlow has saved is what plain offload saves, and the other way round."""
    engine = engine_of(PARTLY, 2)
    steps(engine, last=HALF)
    engine.save_checkpoint(folder)
    expected = weights(engine)
    engine.destroy()
    other = engine_of(PARTLY, 3, zero={"zenflow": None})
    other.load_checkpoint(folder)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())
    steps(other, first=HALF)
    other.save_checkpoint(folder)
    expected = weights(other)
    other.destroy()
    engine = engine_of(PARTLY, 1)
    engine.load_checkpoint(folder)
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
    steps(engine, first=HALF)
    engine.destroy()


def test_checkpoints_go_to_and_from_plain_offload(tmp_path: Path) -> None:
    run_distributed(without_zenflow, 2, str(tmp_path), timeout=60)


def written_masters() -> None:
    """What is written between steps is kept, chosen or not, and what is read is the newest."""
    import deepspeed

    for section in ({**EVERY, "overlap_step": True}, {**EVERY, "offload": True}):
        engine = engine_of({**section, "select_interval": 50}, 2)
        steps(engine, last=4)
        param = engine.module.blocks[0].up.weight
        now = deepspeed.utils.safe_get_full_fp32_param(param)
        if not section.get("overlap_step"):
            assert torch.equal(now, param.detach())
        deepspeed.utils.safe_set_full_fp32_param(param, now + 1.0)
        assert torch.equal(param.detach(), now + 1.0)
        steps(engine, first=4, last=8)
        weights(engine)
        moved = (param.detach() - now - 1.0).abs().max().item()
        assert 0 < moved < 0.02, moved
        engine.destroy()


def test_masters_that_are_written() -> None:
    run_distributed(written_masters, 2, timeout=60)


def frozen_for_a_while() -> None:
    engine = engine_of({**EVERY, "overlap_step": True, "select_interval": 50}, 2)
    steps(engine, last=4)
    block = engine.module.blocks[0]
    for param in block.parameters():
        param.requires_grad_(False)
    steps(engine, first=4, last=7)  # an update with the mean of the fourth step and of the fifth comes two steps later
    before = block.up.weight.detach().clone()
    steps(engine, first=7, last=9)
    assert torch.equal(block.up.weight.detach(), before)
    for param in block.parameters():
        param.requires_grad_(True)
    steps(engine, first=9)
    engine._finish_update()
    assert not torch.equal(block.up.weight.detach(), before)
    engine.destroy()


def test_parameters_that_are_frozen_for_a_while() -> None:
    run_distributed(frozen_for_a_while, 2, timeout=60)


def frozen_in_turns(number: int) -> set[str]:
    """In a part of a buffer, which may lie in the shard of one process alone, and always when all is updated."""
    return {"blocks.0.up.weight"} if number and number % 2 == 0 else set()


def frozen_first(number: int) -> set[str]:
    names = {name for name, _ in model().named_parameters() if name.startswith("blocks.1.")}
    return names if number < 4 else set()


def one_that_begins_at_zero(number: int) -> set[str]:
    return set()


def like_adapters() -> NextTokenLM:
    made = model()
    torch.nn.init.zeros_(made.blocks[0].down.weight)  # so ``up`` has no gradient in the first step
    return made


# Which parameters are frozen in a step; what is updated by a rule of its own, and from which step on; warm-up of that.
CHANGES: list[tuple[Callable[[int], set[str]], Callable[[], NextTokenLM], str, int, dict[str, Any]]] = [
    (frozen_in_turns, model, "none", 0, {}),
    (frozen_first, model, "blocks.1.", 4, {}),
    (one_that_begins_at_zero, like_adapters, "blocks.0.", 0, {"update_interval": 1, "full_warm_up_rounds": 2}),
]


def parameters_that_come_and_go() -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for frozen, make, own, begins, more in CHANGES:
        section = {**EVERY, "select_interval": 50, **more}
        engine = engine_of({**section, "full_warm_up_rounds": 0}, 2, model=make())
        trained = make()
        named = dict(trained.named_parameters())
        rules = []
        for mine, first, warm_up in ((False, 0, 0), (True, begins, more.get("full_warm_up_rounds", 0))):
            part = {name: param for name, param in named.items() if name.startswith(own) is mine}
            if part:
                rule = PlainZenFlow(
                    list(part.values()), {**section, "full_warm_up_rounds": warm_up}, [{} for _ in part]
                )
                rules.append((part, rule, first))
        for number, (micro,) in enumerate(batches(1, world)):
            for name, param in engine.module.named_parameters():
                param.requires_grad_(name not in frozen(number))
            engine.backward(engine(micro[rank]))
            engine.step()
            loss = sum(trained(ids) for ids in micro) / world
            grads = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
            for part, rule, first in rules:
                if number >= first:
                    given = [None if name in frozen(number) else grads[name] for name in part]
                    rule.step(given, [grads[name].abs() for name in part])
        found = [], weights(engine)
        engine.destroy()
        assert_like(found, ([], {name: param.detach() for name, param in named.items()}))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_come_and_go(world: int) -> None:
    run_distributed(parameters_that_come_and_go, world, timeout=60)


def written_between_steps() -> list[bool]:
    """What the next update takes back is told, on CPUs in fp32 too."""
    lines = Lines()
    logging.getLogger("ds_hf").addHandler(lines)
    found = []
    engine = engine_of(EVERY, 2)
    for number in range(4):
        steps(engine, first=number, last=number + 1)
        found.append(any("was written" in text for text in lines.texts))
        if number == 2:
            with torch.no_grad():
                engine.module.blocks[0].up.weight.mul_(0.5)
    engine.destroy()
    return found


def test_a_write_that_is_taken_back_is_told() -> None:
    assert run_distributed(written_between_steps, 1, timeout=30) == [[False, False, False, True]]


def fine_tuned() -> list[float]:
    """Losses on held-out text: before, by plain offload, by ZenFlow."""
    from benchmarks import zenflow

    section = zenflow.zenflow(select_interval=40)
    of, other = zenflow.text(held_out=False), zenflow.text(held_out=True)
    learnt = zenflow.model(1)
    zenflow.train(learnt, None, of, 101, 400, 1.0)
    begun = {name: value.float().clone() for name, value in learnt.state_dict().items()}
    found = [zenflow.held_out_loss(learnt, other)]
    for each in (None, section):
        made = zenflow.model(1)
        made.load_state_dict(begun)
        zenflow.train(made, each, of, 1, 80, zenflow.FINE)
        found.append(zenflow.held_out_loss(made, other))
    return found


@pytest.mark.slow
def test_fine_tuning_learns_what_plain_offload_does() -> None:
    ((before, plainly, putting_off),) = run_distributed(fine_tuned, 1, timeout=100)
    assert plainly < before
    assert putting_off < before - 0.5 * (before - plainly)
    assert putting_off < 1.005 * plainly


def looked_at(folder: str) -> None:
    """States that go away and come back, weights that are saved, masters that are read: training is the same to the
    bit, also while an update is under way whose parameters come later."""
    for stage, more in ((1, {}), (2, {"overlap_step": True}), (3, {"overlap_step": True, "select_interval": 5})):
        found = []
        for looks in (False, True):
            engine = engine_of({**EVERY, **more}, stage, zero={"stage3_gather_16bit_weights_on_model_save": True})
            losses = []
            for number in range(len(batches(1, 1))):
                losses += steps(engine, first=number, last=number + 1)
                if looks:
                    engine.offload_states(pin_memory=False)
                    engine.reload_states()
                    engine.save_16bit_model(folder, f"{number}.bin")
                    deepspeed.utils.safe_get_full_fp32_param(engine.module.blocks[0].up.weight)
            found.append((losses, weights(engine)))
            engine.destroy()
        (losses, values), (expected, others) = found
        assert losses == expected
        assert all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.parametrize("world", [1, 2])
def test_who_looks_changes_nothing(tmp_path: Path, world: int) -> None:
    run_distributed(looked_at, world, str(tmp_path), timeout=60)


def chosen_states_are_named() -> None:
    """What the device keeps of chosen columns goes with ``offload_states``, by the names of all others."""
    engine = engine_of({**EVERY, "select_interval": 50}, 2)
    steps(engine, last=3)
    (chosen, *_) = engine.optimizer.store._chosen.values()
    by_name = {name: {t.data_ptr() for t in found} for name, found in engine._states_by_name().items()}
    assert chosen.block.values.data_ptr() in by_name["hp_params"]
    assert chosen.last.data_ptr() in by_name["hp_params"]
    assert chosen.positions.data_ptr() in by_name["optim_states"]
    moments = [t for state in chosen.state.values() for t in state.values() if t.dim()]
    assert moments
    assert {t.data_ptr() for t in moments} <= by_name["optim_states"]
    engine.destroy()


def test_states_of_chosen_columns_are_offloaded_with_the_others() -> None:
    run_distributed(chosen_states_are_named, 1, timeout=30)


SHARES = [{"topk_ratio": 1}, {"topk_ratio": 0}]


def shares() -> None:
    for own in SHARES:
        section = {**EVERY, **own}
        engine = engine_of(section, 2)
        found = steps(engine), weights(engine)
        engine.destroy()
        assert_like(found, plain(section, 1, 1, 0.0))


def test_all_columns_and_one_of_each_matrix() -> None:
    run_distributed(shares, 1, timeout=30)


def in_double_precision() -> None:
    for stage, own in ((2, {}), (3, {"overlap_step": True, "offload": True})):
        section = {**EVERY, **own}
        engine = engine_of(section, stage, 2, model=model().double())
        steps(engine, 2)
        engine._finish_update()
        with GatheredParameters(list(engine.module.parameters())):
            found = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        engine.destroy()
        for name, value in plain(section, 2, 1, 0.0, dtype=torch.float64)[1].items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_double_precision_is_not_given_up() -> None:
    run_distributed(in_double_precision, 1, timeout=60)
