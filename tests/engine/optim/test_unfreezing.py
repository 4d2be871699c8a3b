"""Parameters that are unfrozen after ``initialize``, frozen again and unfrozen again train as in plain torch.

The reference is one process of torch that sees all ranks' data: what is frozen has no ``.grad`` and is passed over.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.optim.muon_groups import mark_matrices, muon_of_json
from ds_hf.engine.parallel.pipeline.specs import LayerSpec
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import DsHfError
from ds_hf.log import forget_said, logger
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config, full_weights, train_both, weight_error

RULES: dict[str, tuple[dict[str, Any], Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = {
    "AdamW": (
        {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4},
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4),
    ),
    "RMSprop": ({"lr": 1e-3, "eps": 1e-2}, lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-2)),
    "Lamb": (
        {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4},
        lambda params: FusedLamb(params, lr=0.02, weight_decay=0.1, eps=1e-4),
    ),
    "Muon": (
        {"lr": 0.02, "adam_lr": 0.01, "eps": 1e-4},
        lambda params: muon_of_json(params, lr=0.02, adam_lr=0.01, eps=1e-4),
    ),
    "SGD": (
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    ),
}
# What trains at each step: blocks that begin frozen, a matrix beside a bias that trains, a norm in the middle of a
# buffer that is frozen for a while, and everything at the end.
FROZEN_AT_FIRST = ("blocks.0", "blocks.1.fc.weight", "first.weight")
STEPS: tuple[tuple[str, ...], ...] = (
    FROZEN_AT_FIRST,
    FROZEN_AT_FIRST,
    ("first.weight",),
    ("first.weight",),
    ("blocks.0", "blocks.2.norm", "last"),
    ("blocks.0", "blocks.2.norm", "last"),
    (),
    ("blocks.1", "blocks.2"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.norm(self.fc(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def freeze(model: nn.Module, frozen: tuple[str, ...]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen) if frozen else True)


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


class Plain:
    """Plain torch over the data of all ranks."""

    def __init__(self, rule: str, micro_batches: int, clip: float) -> None:
        self.model = Net()
        freeze(self.model, FROZEN_AT_FIRST)
        mark_matrices(self.model)
        self.optimizer = RULES[rule][1](self.model.parameters())
        self.micro_batches, self.clip = micro_batches, clip

    def step(self, step: int) -> tuple[float, float]:
        """The mean loss of this rank, and the norm."""
        freeze(self.model, STEPS[step])
        self.optimizer.zero_grad()
        world, mine = dist.get_world_size(), 0.0
        for micro in range(self.micro_batches):
            for rank in range(world):
                loss = self.model(batch(step, micro, rank)) / self.micro_batches
                mine += loss.item() if rank == dist.get_rank() else 0.0
                (loss / world).backward()
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, self.clip or float("inf"))
        self.optimizer.step()
        return mine, norm.item()


def engine_of(
    stage: int,
    rule: str,
    micro_batches: int,
    clip: float = 0.0,
    frozen: tuple[str, ...] = FROZEN_AT_FIRST,
    **more: Any,
) -> Engine:
    model = Net()
    freeze(model, frozen)
    config = base_config(stage, optimizer={"type": rule, "params": RULES[rule][0]}, gradient_clipping=clip)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    config.update(gradient_accumulation_steps=micro_batches, zero_optimization=zero, **more)
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def engine_step(engine: Engine, step: int, micro_batches: int, *, own_loop: bool = False) -> tuple[float, float]:
    freeze(engine.module, STEPS[step])
    mean = 0.0
    for micro in range(micro_batches):
        loss = (engine.module if own_loop else engine)(batch(step, micro, dist.get_rank()).to(engine.device))
        mean += loss.item() / micro_batches
        if own_loop:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return mean, norm


def as_plain(stage: int, rule: str, micro_batches: int, clip: float, own_loop: bool, more: dict[str, Any]) -> None:
    rel, atol = (5e-2, 0.1) if more.keys() & {"bf16", "fp16"} else (1e-4, 2e-5)
    plain, engine = Plain(rule, micro_batches, clip), engine_of(stage, rule, micro_batches, clip, **copy.deepcopy(more))
    for step, frozen in enumerate(STEPS):
        with GatheredParameters(list(engine.module.parameters())):
            kept = {n: p.detach().clone() for n, p in engine.module.named_parameters() if n.startswith(frozen or "-")}
        expected = plain.step(step)
        found = engine_step(engine, step, micro_batches, own_loop=own_loop)
        assert found == pytest.approx(expected, rel=rel), (step, found, expected)
        assert (error := weight_error(engine.module, plain.model)) < atol, (step, error)
        with GatheredParameters(list(engine.module.parameters())):
            now = dict(engine.module.named_parameters())
            assert all(torch.equal(now[name], value) for name, value in kept.items()), step
        assert all(param.grad is None for param in engine.module.parameters())
    engine.destroy()


def _cases(cases: list[tuple[int, str, int, float, bool, dict[str, Any]]]) -> None:
    for case in cases:
        try:
            as_plain(*case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


SOME: list[tuple[int, str, int, float, bool, dict[str, Any]]] = [
    (0, "AdamW", 3, 0.3, False, {}),
    (1, "SGD", 1, 0.0, True, {}),
    (2, "AdamW", 1, 0.3, True, {}),
    (3, "AdamW", 3, 0.0, True, {}),
    (3, "SGD", 1, 0.3, False, {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}),
    (2, "AdamW", 3, 0.3, False, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
]


@pytest.mark.parametrize("world", [1, 2])
def test_as_plain_torch(world: int) -> None:
    run_distributed(_cases, world, SOME, timeout=60)


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OTHERS: list[tuple[int, str, int, float, bool, dict[str, Any]]] = [
    (3, "RMSprop", 1, 0.3, False, {}),
    (2, "Muon", 3, 0.3, False, {}),
    (0, "AdamW", 3, 0.3, False, BF16),
    (2, "AdamW", 1, 0.3, False, FP16),
]
FURTHER: list[tuple[int, str, int, float, bool, dict[str, Any]]] = [
    (1, "SGD", 1, 0.0, False, BF16),
    (3, "AdamW", 1, 0.3, False, {**BF16, "ds_hf": {"split_masters": True}}),
    (2, "AdamW", 3, 0.0, False, {**BF16, "zero": OFFLOAD}),
    (3, "Muon", 1, 0.0, False, {**FP16, "zero": OFFLOAD}),
    (1, "RMSprop", 1, 0.0, False, {"zero": OFFLOAD}),
    (0, "Lamb", 1, 0.3, False, {}),
    (3, "Lamb", 1, 0.0, False, {}),
    (0, "Muon", 1, 0.0, False, {}),
    (3, "Muon", 1, 0.0, False, {"zero": OFFLOAD}),
    (3, "AdamW", 1, 0.3, False, {"zero": {"zero_hpz_partition_size": 2}}),
    (3, "AdamW", 1, 0.3, False, {"zero": {"stage3_param_persistence_threshold": 20}}),
    (2, "AdamW", 3, 0.3, False, {"zero": OFFLOAD, "ds_hf": {"offload": {"stream": 0.5}}}),
]


def test_other_rules_and_places() -> None:
    run_distributed(_cases, 2, OTHERS, timeout=60)


@pytest.mark.parametrize("params", ["none", "cpu", "nvme"])
def test_states_in_files(params: str, tmp_path: Path) -> None:
    at = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    zero: dict[str, Any] = {"offload_optimizer": at}
    if params != "none":
        zero["offload_param"] = at if params == "nvme" else {"device": "cpu"}
    case = (3, "AdamW", 1, 0.3, False, {"zero": zero})
    run_distributed(_cases, 2, [case], timeout=60)


@pytest.mark.slow
def test_as_plain_torch_everywhere() -> None:
    every = [
        (stage, rule, micro_batches, clip, own_loop, more)
        for stage in range(4)
        for rule in RULES
        for micro_batches, clip, own_loop in ((1, 0.3, stage % 2 == 0), (3, 0.0, stage % 2 == 1))
        for more in (({}, {"zero": OFFLOAD}) if stage else ({},))
    ]
    run_distributed(_cases, 2, every + FURTHER, timeout=600)


def in_turns_inside_a_step() -> None:
    """What counts is what was frozen when the model was called: torch steps what has a gradient, frozen by now or not.
    Two parts in turns, micro-batch by micro-batch and step by step, as the two players of a game."""
    for stage, own_loop in ((0, False), (1, True), (2, False), (3, True)):
        plain, engine = Plain("SGD", 2, 0.0), engine_of(stage, "SGD", 2)
        players = ("blocks.0", "blocks.2", "first"), ("blocks.1", "last")
        for step in range(4):
            plain.optimizer.zero_grad()
            for micro in range(2):
                now = players[(step + micro) % 2] if step != 1 else players[0]
                freeze(plain.model, now)
                freeze(engine.module, now)
                for rank in range(2):
                    (plain.model(batch(step, micro, rank)) / 4).backward()
                loss = (engine.module if own_loop else engine)(batch(step, micro, dist.get_rank()).to(engine.device))
                loss.backward() if own_loop else engine.backward(loss)
                if micro:
                    freeze(plain.model, ("",) if step % 2 else ())
                    freeze(engine.module, ("",) if step % 2 else ())
                engine.step()
            plain.optimizer.step()
            assert weight_error(engine.module, plain.model) < 2e-5, (stage, step)
        engine.destroy()


def test_in_turns_inside_a_step() -> None:
    run_distributed(in_turns_inside_a_step, 2, timeout=30)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save_all(folder: str, stage: int, steps: int, trained_alone: bool) -> None:
    """``folder/middle`` after so many steps; the weights at the end beside it."""
    engine = engine_of(stage, "AdamW", 1)
    for step in range(len(STEPS)):
        engine_step(engine, step, 1)
        if step + 1 == steps:
            engine.save_checkpoint(folder, tag="middle", exclude_frozen_parameters=trained_alone)
    weights = full_weights(engine.module)
    if dist.get_rank() == 0:
        torch.save(weights, Path(folder) / "end.pt")
    engine.destroy()


def resume_all(folder: str, steps: int, cases: list[tuple[int, bool, dict[str, Any]]]) -> None:
    """In a fresh engine where parameters are as at first, or as they were when it was saved."""
    expected = torch.load(Path(folder) / "end.pt")
    for stage, unfrozen, zero in cases:
        engine = engine_of(stage, "AdamW", 1, frozen=STEPS[steps - 1] if unfrozen else FROZEN_AT_FIRST, zero=zero)
        engine.load_checkpoint(folder, tag="middle")
        for step in range(steps, len(STEPS)):
            engine_step(engine, step, 1)
        for name, found in full_weights(engine.module).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, msg=f"{name}, {stage}, {unfrozen}")
        engine.destroy()


@pytest.mark.parametrize(("stage", "steps", "trained_alone"), [(0, 4, False), (3, 6, False), (3, 6, True)])
def test_resuming(stage: int, steps: int, trained_alone: bool, tmp_path: Path) -> None:
    """After some were unfrozen, and after some of those were frozen again: these have trained, and are saved."""
    cases = [(stage, False, {}), (3 - stage, True, {}), (2, False, {"offload_optimizer": {"device": "cpu"}})]
    run_distributed(save_all, 2, str(tmp_path), stage, steps, trained_alone, timeout=30)
    run_distributed(resume_all, 2, str(tmp_path), steps, cases, timeout=60)


def _in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The second is frozen as a whole at first."""
    freeze(model, FROZEN_AT_FIRST)
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if n.startswith("blocks.0") == frozen]} for frozen in (False, True)]


def _engine_in_two_groups(stage: int, micro_batches: int) -> Engine:
    config = base_config(stage, optimizer={"type": "AdamW", "params": RULES["AdamW"][0]})
    config.update(gradient_accumulation_steps=micro_batches, checkpoint={"load_universal": True})
    model = Net()
    return initialize(model=model, model_parameters=_in_two_groups(model), config=config)[0]


def save_universal(folder: str, stage: int, steps: int) -> None:
    engine = _engine_in_two_groups(stage, 1)
    for step in range(steps):
        engine_step(engine, step, 1)
    engine.save_checkpoint(folder, tag="ours")
    engine.destroy()


def resume_universal(folder: str, stage: int, steps: int) -> None:
    """One process, which takes the batches of both ranks one after the other."""
    plain, engine = Net(), _engine_in_two_groups(stage, 2)
    optimizer = RULES["AdamW"][1](_in_two_groups(plain))  # type: ignore[arg-type]
    engine.load_checkpoint(folder, tag="universal")
    for step, frozen in enumerate(STEPS):
        freeze(plain, frozen)
        optimizer.zero_grad()
        for rank in range(2):
            (plain(batch(step, 0, rank)) / 2).backward()
        optimizer.step()
        if step >= steps:
            freeze(engine.module, frozen)
            for rank in range(2):
                engine.backward(engine(batch(step, 0, rank)))
                engine.step()
    found = full_weights(engine.module)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    engine.destroy()


@pytest.mark.parametrize(("stage", "other", "steps"), [(3, 1, 2), pytest.param(1, 3, 4, marks=pytest.mark.slow)])
def test_a_universal_folder_at_another_world_size(stage: int, other: int, steps: int, tmp_path: Path) -> None:
    """Written while a whole group, and parts of another, had no states yet, and after they were unfrozen."""
    run_distributed(save_universal, 2, str(tmp_path), stage, steps, timeout=30)
    write_universal(open_source(tmp_path / "ours"), tmp_path / "universal")
    run_distributed(resume_universal, 1, str(tmp_path), other, steps, timeout=30)


def stages_in_turns(folder: str) -> None:
    """A pipeline of which one stage is frozen at first, against plain torch; saved when it trains, loaded frozen."""
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(6)]
    for frozen in (("0.", "1."), ("2.", "3.")):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        optimizer = RULES["AdamW"][1](plain.parameters())
        settings = base_config(1, optimizer={"type": "AdamW", "params": RULES["AdamW"][0]})
        settings |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}

        def built(plain: nn.Module = plain, frozen: tuple[str, ...] = frozen, settings: Any = settings) -> Any:
            layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
            model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
            model.load_state_dict({n: v for n, v in plain.state_dict().items() if n in model.state_dict()})
            freeze(model, frozen)
            engine = initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]
            engine.compile(backend="aot_eager")  # torch 2.11's code goes on taking for frozen what was
            return engine

        engine = built()
        for step, pair in enumerate(pairs):
            if step == 2:
                engine.module.requires_grad_(True)
            if step == 4:
                engine.save_checkpoint(folder, tag=frozen[0])
                engine.destroy()
                engine = built()
                engine.load_checkpoint(folder, tag=frozen[0])
                engine.module.requires_grad_(True)
            freeze(plain, frozen if step < 2 else ())
            loss = nn.functional.mse_loss(plain(pair[0]), pair[1])
            assert float(engine.train_batch(iter([pair]))) == pytest.approx(loss.item(), abs=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param, plain.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name)
        engine.destroy()


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    run_distributed(stages_in_turns, 2, str(tmp_path), timeout=60)


# -- what else may happen ---------------------------------------------------------------------------------------------


def unlisted() -> None:
    """A part that no group has: told once, by name; trained it is not, and nothing stays in ``.grad``."""
    for stage in range(4):
        forget_said()
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        model = Net()
        freeze(model, ("blocks",))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        listed = [param for param in model.parameters() if param.requires_grad]
        engine = initialize(model=model, model_parameters=listed, config=base_config(stage, zero_optimization=zero))[0]
        before = full_weights(model)
        for step in range(3):
            freeze(model, ("blocks.0", "blocks.1") if step else ("blocks",))
            engine.backward(engine(batch(step, 0, 0)))
            engine.step()
        engine(batch(3, 0, 0))
        assert all(param.grad is None for param in model.parameters())
        after = full_weights(model)
        assert [torch.equal(before[name], after[name]) for name in ("blocks.2.fc.weight", "last.weight")] == [
            True,
            False,
        ]
        told = [text for text in said if "no parameter group" in text]
        assert [("blocks.2" in text, "5 more" in text) for text in told] == [(True, True)] * (dist.get_rank() == 0), (
            said
        )
        logger.removeHandler(handler)
        engine.destroy()


def test_unlisted() -> None:
    run_distributed(unlisted, 2, timeout=30)


def put_in_later() -> None:
    """What no engine knows is told by name, once, whatever way it came into the model; other models are not."""
    from peft import LoraConfig, get_peft_model

    for stage in (0, 3):
        forget_said()
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        engine = engine_of(stage, "AdamW", 1)
        model: Any = engine.module
        other = Net()
        other.last = nn.Linear(6, 1)
        model.blocks[0].extra = nn.Linear(6, 6).requires_grad_(False)
        model.second = model.first  # what the engine knows
        engine_step(engine, 0, 1)
        assert not any("put into the model" in text for text in said), said
        model.blocks[0].extra.requires_grad_(True)
        model.last.weight = nn.Parameter(torch.randn(1, 6))
        for _ in range(2):
            engine(batch(0, 0, 0))
        get_peft_model(model, LoraConfig(r=2, target_modules=["fc"]))
        engine(batch(0, 0, 0))
        told = [text.partition(":")[0] for text in said if "put into the model after initialize()" in text]
        assert told[0] == "blocks.0.extra.weight, blocks.0.extra.bias, last.weight", said
        assert "lora_A" in told[1], said
        assert len(told) == 2, said
        model._modules["last"] = nn.Linear(6, 1)  # which no hook of torch sees: looked for now and then
        for step in range(3):
            engine_step(engine, step, 1)
        assert any("last.bias" in text for text in said if "put into the model after" in text), said
        logger.removeHandler(handler)
        engine.destroy()


def test_put_in_later() -> None:
    run_distributed(put_in_later, 1, timeout=30)


def refused() -> None:
    """One-bit momenta have to be those of all parameters; contexts that keep old memory gathered must be left."""
    model = Net()
    freeze(model, ("blocks.1",))
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
    config = base_config(0, optimizer=one_bit)
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine(batch(0, 0, 0))
    freeze(model, ())
    with pytest.raises(DsHfError, match=r"blocks\.1\.fc\.weight was unfrozen after initialize\(\): OnebitAdam"):
        engine(batch(0, 0, 0))
    engine.destroy()
    engine = engine_of(3, "AdamW", 1)
    freeze(engine.module, ())
    with (
        GatheredParameters([engine.module.first.weight]),
        pytest.raises(DsHfError, match=r"first\.weight was unfrozen.*inside a GatheredParameters"),
    ):
        engine(batch(0, 0, 0))
    assert engine_step(engine, 6, 1)[1] > 0
    engine.destroy()


def test_refused() -> None:
    run_distributed(refused, 1, timeout=30)


def takes_what_trains_only() -> None:
    """What is listed and stays frozen has no master, gradient or moment, and is told of in no collective."""
    for stage in range(4):
        engines = [engine_of(stage, "AdamW", 1)]
        model = Net()
        freeze(model, FROZEN_AT_FIRST)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        optimizer = {"type": "AdamW", "params": RULES["AdamW"][0]}
        config = base_config(stage, optimizer=optimizer, zero_optimization=zero)
        trained = [param for param in model.parameters() if param.requires_grad]
        engines.append(initialize(model=model, model_parameters=trained, config=config)[0])
        sizes = []
        for engine in engines:
            freeze(engine.module, FROZEN_AT_FIRST)
            engine.backward(engine(batch(0, 0, 0)))
            gradients = [gradient.nbytes for gradient in engine.reducer.buffers]
            engine.step()
            buffers = [buffer.nbytes for unit in engine.units for buffer in unit.buffers]
            assert engine.optimizer is not None
            sizes.append((engine.optimizer.nbytes, gradients, buffers))
            engine.destroy()
        assert sizes[0] == sizes[1], stage


def test_what_stays_frozen_costs_nothing() -> None:
    run_distributed(takes_what_trains_only, 2, timeout=30)


def moved_out_leaves_nothing() -> None:
    """After all were unfrozen there is as much as where all trained from the first step."""
    for stage in (0, 3):
        sizes = []
        for frozen in (FROZEN_AT_FIRST, ()):
            engine = engine_of(stage, "AdamW", 1, frozen=frozen)
            freeze(engine.module, ())
            engine.backward(engine(batch(0, 0, 0)))
            engine.step()
            buffers = [buffer for unit in engine.units for buffer in unit.buffers]
            assert not any(buffer.frozen for buffer in buffers)
            sizes.append(sum(slot.numel for buffer in buffers for slot in buffer.layout.slots))
            engine.destroy()
        assert sizes[0] == sizes[1] == sum(param.numel() for param in Net().parameters())


def test_moved_out() -> None:
    run_distributed(moved_out_leaves_nothing, 1, timeout=30)


def adapters_in_turns(cases: list[tuple[int, dict[str, Any]]]) -> None:
    """PEFT's ``set_adapter`` freezes one adapter and unfreezes the other."""
    from peft import LoraConfig, get_peft_model

    for stage, more in cases:
        config = LoraConfig(r=2, target_modules=["fc"], init_lora_weights=False)
        model = get_peft_model(Net(), config, "first")  # type: ignore[arg-type]
        model.add_adapter("second", config)
        model.set_adapter("first")
        data = [[[batch(step, 0, rank) for rank in range(dist.get_world_size())]] for step in range(7)]
        outcome = train_both(
            model,
            lambda engine, x: engine(x),
            data,
            base_config(stage, optimizer={"type": "AdamW", "params": RULES["AdamW"][0]}, **more),
            reference_optimizer=lambda model: RULES["AdamW"][1](model.parameters()),
            each_step=lambda model, step: cast(Any, model).set_adapter("second" if step in (2, 3, 6) else "first"),
            model_parameters=model.parameters(),
        )
        assert outcome.worst < 1e-4, (stage, outcome)


class TakesZero(torch.optim.AdamW):
    """A parameter without a gradient has one of zero."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param) if param.grad is None and param.requires_grad else param.grad
        return super().step(closure)


def adapters_that_stay_trainable(cases: list[int]) -> None:
    """A script that lets the other adapter stay trainable: its moments go on moving it, as DeepSpeed's do, which is
    said. Plain PEFT passes over it."""
    from peft import LoraConfig, get_peft_model

    def switch(model: nn.Module, step: int) -> None:
        cast(Any, model).set_adapter("second" if step % 2 else "first")
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)

    lines = Lines()
    logger.addHandler(lines)
    for stage in cases:
        forget_said()
        config = LoraConfig(r=2, target_modules=["fc"], init_lora_weights=False)
        model = get_peft_model(Net(), config, "first")  # type: ignore[arg-type]
        model.add_adapter("second", config)
        switch(model, 0)
        outcome = train_both(
            model,
            lambda engine, x: engine(x),
            [[[batch(step, 0, rank) for rank in range(dist.get_world_size())]] for step in range(6)],
            base_config(stage, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}),
            reference_optimizer=lambda model: TakesZero(model.parameters(), lr=1e-2, weight_decay=0.0),
            each_step=switch,
            model_parameters=[param for name, param in model.named_parameters() if "lora_" in name],
        )
        assert outcome.worst < 1e-4, (stage, outcome)
    said = sum("as PEFT's set_adapter() does" in text for text in lines.texts)
    assert said == (len(cases) if dist.get_rank() == 0 else said)


def test_adapters_that_stay_trainable() -> None:
    run_distributed(adapters_that_stay_trainable, 2, [0, 3], timeout=60)


def test_adapters_in_turns() -> None:
    cpu = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    whole = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    run_distributed(adapters_in_turns, 2, [(0, {}), (2, cpu), (3, whole)], timeout=60)


def groups_of_their_own() -> None:
    """A group that is frozen as a whole at first keeps its place and its rate, whatever makes the optimizer."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first = {"params": list(cast(Net, model).first.parameters()), "lr": 0.1}
        return [first, {"params": [p for n, p in model.named_parameters() if not n.startswith("first")]}]

    def function(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    def finished(model: nn.Module) -> torch.optim.Optimizer:
        return function(groups(model))

    finished.takes_model = True  # type: ignore[attr-defined]
    data = [[[batch(step, 0, rank) for rank in range(dist.get_world_size())]] for step in range(5)]
    sgd = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    for stage, optimizer in ((2, None), (3, function), (1, finished), (0, function)):
        model = Net()
        freeze(model, ("first",))
        outcome = train_both(
            model,
            lambda engine, x: engine(x),
            data,
            base_config(stage, optimizer=None if optimizer else sgd),
            reference_optimizer=lambda model: function(groups(model)),
            optimizer=optimizer,
            each_step=lambda model, step: freeze(model, ("first",) if step < 2 else ()),
            model_parameters=None if optimizer is finished else groups(model),
        )
        assert outcome.worst < 1e-4, (stage, outcome)


def test_groups_of_their_own() -> None:
    run_distributed(groups_of_their_own, 2, timeout=30)


class Two(nn.Module):
    """An encoder that two models share, under a head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x))).square().mean()


def shared_with_another_engine() -> None:
    """A part in another engine's buffer is unfrozen by the one that lists it; the other one sees the steps."""
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        encoder = nn.Linear(5, 6).requires_grad_(False)
        actor, critic = Two(encoder), Two(encoder)
        theirs = copy.deepcopy((actor, critic))
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        sgd = {"type": "SGD", "params": {"lr": 0.05}}
        config = base_config(stage, optimizer=sgd, zero_optimization=zero)
        other = initialize(model=critic, model_parameters=critic.head.parameters(), config=config)[0]
        engine = initialize(model=actor, model_parameters=actor.parameters(), config=config)[0]
        plain = torch.optim.SGD([*theirs[0].parameters(), *theirs[1].head.parameters()], lr=0.05)
        for step in range(4):
            trains = step in (1, 2)
            for each, mine in ((theirs[1], other), (theirs[0], engine)):
                encoder.requires_grad_(trains and mine is engine)
                theirs[0].encoder.requires_grad_(trains and mine is engine)
                plain.zero_grad()
                sum(each(batch(step, 0, rank)) for rank in range(2)).div(2).backward()  # type: ignore[union-attr]
                plain.step()
                mine.backward(mine(batch(step, 0, dist.get_rank())))
                mine.step()
            assert weight_error(actor, theirs[0]) < 1e-5, (stage, step)
            assert weight_error(critic, theirs[1]) < 1e-5, (stage, step)
        engine.destroy()
        other.destroy()


def test_shared_with_another_engine() -> None:
    run_distributed(shared_with_another_engine, 2, timeout=30)
