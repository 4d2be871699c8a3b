"""Small blocks that are communicated several together: which, and that training does not change by it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.zero import planning
from ds_hf.engine.zero.buffer import BufferState
from ds_hf.engine.zero.planning import join_small, make_units
from ds_hf.engine.zero.unit import Unit
from tests.helpers.distributed import run_distributed
from tests.helpers.models import Block, Checkpointing, TinyLM, token_batches
from tests.helpers.parity import base_config, full_weights, sgd, train_both

DEPTH = 12  # blocks: four units of three


def names(units: list[Unit]) -> list[tuple[str, int]]:
    return [(unit.name, 1 + len(unit.joined)) for unit in units if unit.name]


def blocks(depth: int, width: int = 16) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block(width) for _ in range(depth)), "head": nn.Linear(4, 4)})


# -- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "sizes"), [(7, [1] * 7), (8, [2] * 4), (12, [3] * 4), (13, [3] * 4 + [1])])
def test_four_units_remain(depth: int, sizes: list[int]) -> None:
    units = join_small(make_units(blocks(depth)), None)
    assert [size for _, size in names(units)] == sizes
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    assert [name for name, _ in names(units)] == [f"blocks.{start}" for start in starts]
    assert [len(unit.params) for unit in units if unit.name] == [5 * size for size in sizes]


def test_sizes_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks(24)
    numel = sum(p.numel() for p in model["blocks"][0].parameters())  # type: ignore[index]
    monkeypatch.setattr(planning, "JOINED_NBYTES", 3 * 2 * numel)
    assert {size for _, size in names(join_small(make_units(model), torch.bfloat16))} == {3}
    assert {size for _, size in names(join_small(make_units(model), None))} == {1}  # fp32: twice as much
    assert {size for _, size in names(join_small(make_units(model), torch.bfloat16, 4 * numel))} == {2}
    assert {size for _, size in names(join_small(make_units(model), torch.bfloat16, numel))} == {1}


def test_others_stay_alone() -> None:
    model = blocks(8)
    model["blocks"][3].__dict__["_z3_leaf"] = True  # type: ignore[index]
    assert {size for _, size in names(join_small(make_units(model), None))} == {1}, "runs of three and of four"
    two = nn.ModuleDict({"a": blocks(8), "b": blocks(8)})
    assert [size for _, size in names(join_small(make_units(two), None))] == [2] * 8
    assert [n for n, _ in names(join_small(make_units(two), None))][4] == "b.blocks.0"


# -- training ---------------------------------------------------------------------------------------------------------


class Stack(TinyLM):
    """Leaves blocks out: every step the last ones, or one in the middle."""

    left_out: tuple[int, ...] = ()

    def logits(self, tokens: Tensor) -> Tensor:
        kept = self.blocks
        self.blocks = nn.ModuleList(b for index, b in enumerate(kept) if index not in self.left_out)
        try:
            return super().logits(tokens)
        finally:
            self.blocks = kept


def config_of(stage: int, *, joins: bool = True, **more: Any) -> dict[str, Any]:
    config = base_config(stage, ds_hf={"join_blocks": joins}, optimizer=None, gradient_clipping=0.5)
    config["zero_optimization"].update(more)
    return config


def parity(stage: int, accumulation: int, checkpointing: Checkpointing, left_out: tuple[int, ...] = ()) -> float:
    torch.manual_seed(1)
    model = Stack(depth=DEPTH, checkpointing=checkpointing)
    model.left_out = left_out
    data = token_batches(3, accumulation, dist.get_world_size(), 2, 6)
    return train_both(
        model,
        lambda module, batch: module(batch),
        [[list(micro) for micro in step] for step in data],
        config_of(stage),
        reference_optimizer=sgd,
        optimizer=sgd(model),
    ).worst


def all_parities() -> None:
    for stage in (0, 1, 2, 3):
        for case in ((1, None), (2, None), (2, "reentrant"), (1, "nonreentrant")):
            assert parity(stage, *case) < 2e-5, (stage, case)  # type: ignore[arg-type]
        for left_out in ((11,), (9, 10, 11), (0,), (4,), (3, 4, 5)):
            assert parity(stage, 1, None, left_out) < 2e-5, (stage, left_out)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_training_equals_torch(world: int) -> None:
    run_distributed(all_parities, world, timeout=200)


class Ways(TinyLM):
    """Blocks that are not simply one after another."""

    way = ""

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.gain
        if self.way == "side by side":
            return self.head(self.norm(x + torch.stack([block(x) for block in self.blocks]).mean(0)))
        states = [x]
        for index, block in enumerate([*self.blocks, *self.blocks] if self.way == "twice" else self.blocks):
            states.append(block(states[-1].detach() if self.way == "cut" and index == 4 else states[-1]))
        if self.way in ("all states", "cut"):
            return self.head(self.norm(torch.stack(states).mean(0)))
        return self.head(self.norm(states[3] if self.way == "stops early" else states[-1]))


def other_ways() -> None:
    for way in ("side by side", "all states", "cut", "twice", "stops early"):
        for frozen in ("", "embedding", "but biases", "but one block"):
            torch.manual_seed(1)
            model = Ways(depth=DEPTH, tied=False)
            model.way = way
            for name, param in model.named_parameters():
                param.requires_grad_(
                    {"": True, "embedding": "embedding" not in name, "but biases": "up.bias" in name}.get(
                        frozen, "blocks.2." in name
                    )
                )
            data = token_batches(3, 1, dist.get_world_size(), 2, 6)
            worst = train_both(
                model,
                lambda module, batch: module(batch),
                [[list(micro) for micro in step] for step in data],
                config_of(3),
                reference_optimizer=sgd,
                optimizer=sgd(model),
            ).worst
            assert worst < 2e-5, (way, frozen, worst)


def test_blocks_are_called_in_other_ways() -> None:
    run_distributed(other_ways, 2, timeout=100)


def make(stage: int, joins: bool, checkpointing: Checkpointing = None, **more: Any) -> Engine:
    torch.manual_seed(1)
    config = {**config_of(stage, joins=joins), "optimizer": {"type": "SGD", "params": {"lr": 0.05}}, **more}
    return initialize(model=TinyLM(depth=DEPTH, tied=False, checkpointing=checkpointing), config=config)[0]


def step(engine: Engine, seed: int) -> float:
    loss = engine(token_batches(2, 6, seed=seed).to(engine.device))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def collectives_of_a_step(engine: Engine) -> Counter[str]:
    before = engine.axis.log.count
    step(engine, 9)
    return Counter(entry[0] for entry in list(engine.axis.log.entries)[before - engine.axis.log.count :])


def fewer_collectives() -> None:
    for stage in (1, 2, 3):
        counts, losses, weights = [], [], []
        for joins in (False, True):
            engine = make(stage, joins)
            losses.append([step(engine, seed) for seed in range(3)])
            counts.append(collectives_of_a_step(engine))
            weights.append(full_weights(engine.module))
            engine.destroy()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value)
        alone, joined = counts
        assert alone["reduce-scatter"] == 1 + DEPTH
        assert joined["reduce-scatter"] == 1 + 4
        # at stage 3 every unit twice, but for the root and the last one, which stay
        gathers = (2 * DEPTH, 2 * 4) if stage == 3 else (1 + DEPTH, 1 + 4)
        assert (alone["all-gather"], joined["all-gather"]) == gathers, stage


def test_a_step_has_fewer_collectives() -> None:
    run_distributed(fewer_collectives, 2, timeout=100)


def sums_of_checkpointed_blocks() -> None:
    checkpointings: tuple[Checkpointing, ...] = ("nonreentrant", "reentrant")
    for checkpointing in checkpointings:
        for micro_batches in (1, 2):
            engine = make(3, True, checkpointing, gradient_accumulation_steps=micro_batches)
            for seed in range(2 * micro_batches):
                step(engine, seed)
            counts = collectives_of_a_step(engine)
            assert counts["reduce-scatter"] == 1 + 4, (checkpointing, micro_batches, counts)
            engine.destroy()


def test_checkpointed_blocks_are_summed_once_a_unit() -> None:
    """Each recomputed block ends a call of its own; the gradients travel when that of the first block is over."""
    run_distributed(sums_of_checkpointed_blocks, 2, timeout=60)


def gathered(engine: Engine) -> list[str]:
    return [u.name for u in engine.units if any(b.state is not BufferState.RELEASED for b in u.buffers if b.sharded)]


def memory_comes_back() -> None:
    engine = make(3, True)
    most: list[int] = []
    for unit in engine.units:
        for module in unit.modules:
            module.register_forward_pre_hook(lambda *_: most.append(sum(name != "" for name in gathered(engine))))
    for seed in range(3):
        step(engine, seed)
        assert gathered(engine) == []
    assert max(most) == 2, "the unit in use and the next"
    in_backward: list[int] = []
    for block in engine.module.blocks:
        block.norm.weight.register_post_accumulate_grad_hook(lambda _: in_backward.append(len(gathered(engine))))
    step(engine, 3)
    assert len(in_backward) == DEPTH
    assert max(in_backward) == 3, "the root, the unit in use and the one before"
    with torch.no_grad():
        engine(token_batches(2, 6).to(engine.device))
    assert gathered(engine) == []
    # a forward that ends early, and blocks that are called by themselves
    model = engine.module
    kept = model.blocks
    for end in (4, DEPTH - 1):
        model.blocks = kept[:end]
        with torch.no_grad():
            engine(token_batches(2, 6).to(engine.device))
        assert gathered(engine) == []
    model.blocks = kept
    hidden = torch.zeros(2, 6, 32, device=engine.device)
    with torch.no_grad():
        for index in (0, 4, 8):
            kept[index](hidden)
            assert len(gathered(engine)) <= 2  # and the one ahead
        engine(token_batches(2, 6).to(engine.device))
    assert gathered(engine) == []
    step(engine, 7)
    assert gathered(engine) == []
    engine.destroy()


def test_memory_comes_back() -> None:
    run_distributed(memory_comes_back, 2, timeout=60)


def frozen_blocks() -> None:
    """As adapters have it: most weights do not train, and the first inputs need no gradient."""
    found = []
    for joins in (False, True):
        torch.manual_seed(1)
        model = TinyLM(depth=DEPTH, tied=False)
        for name, param in model.named_parameters():
            param.requires_grad_("up.bias" in name or name == "head.weight")
        config = {**config_of(3, joins=joins), "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine = initialize(model=model, config=config)[0]
        found.append([step(engine, seed) for seed in range(4)])
        assert gathered(engine) == []
        engine.destroy()
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_frozen_blocks_join_too() -> None:
    run_distributed(frozen_blocks, 2, timeout=60)


def resume(folder: str) -> None:
    """Checkpoints do not depend on it."""
    for before, after in ((True, False), (False, True)):
        engine = make(3, before)
        for seed in range(2):
            step(engine, seed)
        engine.save_checkpoint(folder, tag=str(before))
        expected = [step(engine, seed) for seed in (2, 3)]
        other = make(3, after)
        other.load_checkpoint(folder, tag=str(before))
        assert [step(other, seed) for seed in (2, 3)] == pytest.approx(expected, rel=1e-5)
        engine.destroy()
        other.destroy()


def test_checkpoints_go_both_ways(tmp_path: Any) -> None:
    run_distributed(resume, 2, str(tmp_path), timeout=60)


def compiled() -> int:
    engine = make(2, True)
    engine.compile(backend="eager")
    step(engine, 0)
    modules = engine.compile_report().modules
    engine.destroy()
    return modules


def test_every_block_is_compiled() -> None:
    (modules,) = run_distributed(compiled, 1, timeout=60)
    assert modules == DEPTH
