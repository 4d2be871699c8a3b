"""LAMB and Muon, which look at whole parameters, give the same however parameters are cut between ranks.

Their references run in one process over whole parameters, with the classes that tests/engine/optim holds to the rules.
Sizes are odd, so that matrices straddle the ends of shards; the tests say how many do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.optim.muon import MuonWithAuxAdam
from ds_hf.engine.optim.muon_groups import mark_matrices, muon_of_json
from ds_hf.engine.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config, train_both

STAGES, WORLDS, VOCAB = (0, 1, 2, 3), (1, 2, 3), 19
CLIP = 0.2  # below the gradient norms of this model, so that it acts in every step
LAMB = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4, "max_coeff": 3.0}  # Adam's eps: rounding of gradients near zero
MUON = {"lr": 0.02, "weight_decay": 0.1, "adam_lr": 0.01, "eps": 1e-4}
RULES = {"Lamb": LAMB, "Muon": MUON}


class Odd(TinyLM):
    """With a convolution, a stack of matrices and a number beside TinyLM's matrices of 13 and 52 rows."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB, width=13, depth=2, tied=False)
        self.conv = nn.Conv2d(1, 5, (3, 3), padding=1, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 5, 7) * 0.3)
        self.gain_of_all = nn.Parameter(torch.tensor(1.1))

    def forward(self, tokens: Tensor) -> Tensor:
        picture = self.embedding.weight[:4].reshape(1, 1, 4, 13)
        extra = self.conv(picture).square().mean() + (self.stack @ self.stack.mT).square().mean()
        return super().forward(tokens) * self.gain_of_all + 0.1 * extra


def model() -> Odd:
    torch.manual_seed(1)
    return Odd()


def alone(kind: str, trained: nn.Module) -> FusedLamb | MuonWithAuxAdam:
    """The optimizer of the configuration, over the whole parameters of ``trained``."""
    if kind == "Lamb":
        return FusedLamb(trained.parameters(), **LAMB)  # type: ignore[arg-type]
    mark_matrices(trained)
    return muon_of_json(trained.parameters(), **MUON)  # type: ignore[arg-type]


def config(kind: str, stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    more = {"gradient_clipping": CLIP, **more}
    if dtype != "fp32":
        more[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    return base_config(stage, optimizer={"type": kind, "params": RULES[kind]}, **more)


def call(engine: Any, batch: Tensor) -> Tensor:
    return engine(batch)


# -- fp32: against the same training in one process ----------------------------------------------------------------


def end_to_end(kind: str) -> dict[str, float]:
    worst = {}
    for stage in STAGES:
        print("case", kind, stage)
        tokens = token_batches(3, 2, dist.get_world_size(), 2, 6, vocab=VOCAB)
        outcome = train_both(
            model(), call, tokens, config(kind, stage), reference_optimizer=lambda m: alone(kind, m), same=kind
        )
        worst[f"{kind}-{stage}"] = outcome.worst
    return worst


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", RULES)
def test_fp32_training_is_that_of_one_process(kind: str, world: int) -> None:
    """1e-5 for both: gradients agree to 1e-7, and Newton-Schulz multiplies errors by 485 at most (3.4445 ** 5), in
    the smallest singular directions, of an update that is itself 2 % of the weights."""
    for worst in run_distributed(end_to_end, world, kind, timeout=100):
        assert not {case: error for case, error in worst.items() if not error < 1e-5}


# -- 16 bits: against the optimizer alone, fed the engine's gradients -------------------------------------------------


def masters(engine: Any) -> dict[str, Tensor]:
    return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}


def fed(kind: str, stage: int, dtype: str) -> dict[str, float]:
    """Largest errors of masters (as a share of how far they moved), of momenta and of the 16-bit parameters."""
    engine, *_ = initialize(model=model(), config=config(kind, stage, dtype, gradient_accumulation_steps=2))
    twin = model()
    names = [name for name, _ in twin.named_parameters()]
    with torch.no_grad():
        for name, value in masters(engine).items():
            twin.get_parameter(name).copy_(value)
    start, optimizer = masters(engine), alone(kind, twin)
    clipped = 0
    for step in token_batches(3, 2, dist.get_world_size(), 2, 6, vocab=VOCAB):
        for micro in step:
            engine.backward(engine(micro[dist.get_rank()]))
            if engine.is_gradient_accumulation_boundary():
                for name, param in engine.module.named_parameters():
                    twin.get_parameter(name).grad = safe_get_full_grad(param).clone()
            engine.step()
        clipped += float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP)) > CLIP
        optimizer.step()
    assert clipped == 3
    assert engine.skipped_steps == 0
    found = masters(engine)
    errors = {"masters": 0.0, "momenta": 0.0, "parameters": 0.0}
    key = "exp_avg" if kind == "Lamb" else "momentum_buffer"
    for name in names:
        param, other = engine.module.get_parameter(name), twin.get_parameter(name)
        moved = (other.detach() - start[name]).norm()
        errors["masters"] = max(errors["masters"], float((found[name] - other.detach()).norm() / moved))
        kept = optimizer.state[other].get(key)
        if kept is not None and kept.dim():
            mine = safe_get_full_optimizer_state(param, key)
            errors["momenta"] = max(errors["momenta"], float((mine - kept).norm() / kept.norm()))
        with GatheredParameters([param]):
            wrong = (param.detach() != found[name].to(param.dtype)).sum()
        errors["parameters"] = max(errors["parameters"], float(wrong))
    engine.destroy()
    return errors


def fed_at_all_stages(dtype: str) -> dict[tuple[str, int], dict[str, float]]:
    return {(kind, stage): fed(kind, stage, dtype) for kind in RULES for stage in STAGES}


# With three processes pieces are placed as in fp32 above.
@pytest.mark.parametrize(
    ("world", "dtype"), [(1, "bf16"), (2, "bf16"), *(pytest.param(n, "fp16", marks=pytest.mark.slow) for n in WORLDS)]
)
def test_sixteen_bit_training_is_the_optimizer_alone(world: int, dtype: str) -> None:
    """LAMB and momenta agree as fp32 does. Muon's updates of matrices that straddle shards travel in fp16: rounding of
    2^-12 of an entry, 485 times as much in the smallest singular directions, which are a small part of an update;
    1 % of it in all. A misplaced piece makes 50."""
    for result in run_distributed(fed_at_all_stages, world, dtype, timeout=100):
        for (kind, stage), errors in result.items():
            travels = kind == "Muon" and world > 1 and stage > 0
            assert errors["masters"] < (0.01 if travels else 1e-4), (kind, stage, errors)
            assert errors["momenta"] < 1e-5, (kind, stage, errors)
            assert errors["parameters"] == 0, (kind, stage, errors)


# -- what is communicated --------------------------------------------------------------------------------------------


def collectives_of_a_step(kind: str, stage: int) -> list[tuple[str, str, int, str]]:
    """Everything issued in the second ``engine.step()``."""
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    more = {} if kind in RULES else {"optimizer": adam, "gradient_clipping": CLIP, "bf16": {"enabled": True}}
    content = config(kind, stage, "bf16") if kind in RULES else base_config(stage, **more)
    engine, *_ = initialize(model=model(), config=content)
    log, seen = engine.axis.log, []
    for step in token_batches(2, dist.get_world_size(), 2, 6, vocab=VOCAB):
        engine.backward(engine(step[dist.get_rank()]))
        before = log.count
        engine.step()
        seen = list(log.entries)[len(log.entries) - (log.count - before) :]
    engine.destroy()
    return seen


def counted() -> dict[tuple[str, int], list[tuple[str, str, int, str]]]:
    return {(kind, stage): collectives_of_a_step(kind, stage) for kind in ("AdamW", *RULES) for stage in STAGES}


def layouts() -> list[tuple[int, int]]:
    """Elements of each unit's matrices, and of all their pieces that a rank sends, at most."""
    engine, *_ = initialize(model=model(), config=config("Muon", 3))
    assert engine.optimizer is not None
    found = []
    for gradient, indices in engine.optimizer._apply.groups.items():
        layout, cut = gradient.buffer.layout, [0] * dist.get_world_size()
        muon = {s.index for s in layout.slots if engine.optimizer.param_groups[indices[s.index]]["use_muon"]}
        for rank in range(dist.get_world_size()):
            parts = [f for f in layout.fragments(rank) if f.slot.index in muon and f.numel < f.slot.numel]
            cut[rank] = sum(f.numel for f in parts)
        found.append((sum(layout.slots[i].numel for i in muon), max(cut)))
    engine.destroy()
    return found


def test_collectives_of_a_step() -> None:
    """LAMB: one small all-reduce more than AdamW. Muon: one all-gather for each unit with a matrix that is cut, of no
    more than the pieces of those. Nothing more where the states are replicated."""
    world = 3
    cuts = [(numel, cut) for numel, cut in run_distributed(layouts, world, timeout=60)[0] if cut]
    assert len(cuts) >= 2  # else the matrices of this model do not straddle, and nothing here is tested
    for result in run_distributed(counted, world, timeout=100):
        for stage in STAGES:
            base = sorted(result["AdamW", stage])
            lamb = [entry for entry in result["Lamb", stage] if entry[1] == "LAMB's norms"]
            muon = [entry for entry in result["Muon", stage] if entry[1] == "Muon's updates"]
            assert sorted(e for e in result["Lamb", stage] if e not in lamb) == base
            assert len(result["Muon", stage]) - len(muon) == len(base)
            assert [entry[0] for entry in lamb] == ([] if stage == 0 else ["all-reduce"])
            parameters = len(list(model().parameters()))
            assert all(entry[2:] == (2 * parameters, "float32") for entry in lamb)
            assert [entry[0] for entry in muon] == ([] if stage == 0 else ["all-gather"] * len(cuts))
            if stage:
                assert sorted((entry[2], entry[3]) for entry in muon) == sorted((cut + 2, "float16") for _, cut in cuts)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def everything(engine: Any) -> dict[str, Tensor]:
    """Masters and moments, whole; moments that a parameter's rule does not have are zeros or absent."""
    found = {name: value.cpu() for name, value in masters(engine).items()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = safe_get_full_optimizer_state(param, key)
            if value is not None and value.any():
                found[f"{name}/{key}"] = value.clone()
    return found


def steps_of(engine: Any, first: int, last: int) -> list[float]:
    """Every rank gets the same batch: worlds of all sizes see the same gradients."""
    losses = []
    for batch in token_batches(8, 2, 6, vocab=VOCAB)[first:last]:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def save(folder: Path, kind: str, stage: int, dtype: str) -> tuple[dict[str, Tensor], list[float]]:
    engine, *_ = initialize(model=model(), config=config(kind, stage, dtype))
    steps_of(engine, 0, 3)
    engine.save_checkpoint(folder)
    found = everything(engine)
    losses = steps_of(engine, 3, 6)
    engine.destroy()
    return found, losses


def resume(folder: Path, kind: str, stage: int, dtype: str) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(5)
    engine, *_ = initialize(model=Odd(), config=config(kind, stage, dtype))
    steps_of(engine, 6, 7)
    assert engine.load_checkpoint(folder)[0] is not None
    found = everything(engine)
    states = [set(state) for state in engine.optimizer.state.values()]
    assert all("momentum_buffer" not in state or len(state) == 1 for state in states)
    losses = steps_of(engine, 3, 6)
    engine.destroy()
    return found, losses


def each(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*arguments) for arguments in calls]


@pytest.mark.parametrize(("from_world", "to_world"), [(3, 2), (1, 3), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_checkpoints_load_at_another_world_size(tmp_path: Path, from_world: int, to_world: int) -> None:
    cells = [(kind, stage, dtype) for kind in RULES for stage, dtype in ((1, "fp32"), (3, "bf16"))]
    folders = [tmp_path / f"{kind}-{stage}" for kind, stage, _ in cells]
    to = [(kind, {1: 3, 3: 0}[stage], dtype) for kind, stage, dtype in cells]
    saves = [(folder, *cell) for folder, cell in zip(folders, cells, strict=True)]
    loads = [(folder, *cell) for folder, cell in zip(folders, to, strict=True)]
    saved = run_distributed(each, from_world, save, saves, timeout=60)[0]
    loaded = run_distributed(each, to_world, resume, loads, timeout=60)[0]
    for (states, losses), (found, after), (kind, _, dtype) in zip(saved, loaded, cells, strict=True):
        assert states.keys() == found.keys()
        assert ("stack/momentum_buffer" in states) == (kind == "Muon")
        assert "norm.weight/exp_avg" in states
        assert all(torch.equal(states[key], found[key]) for key in states)
        assert after == pytest.approx(losses, rel=1e-5 if dtype == "fp32" else 1e-2)


def consolidated(folder: Path, kind: str) -> None:
    engine, *_ = initialize(model=model(), config=config(kind, 3, "bf16"))
    steps_of(engine, 0, 2)
    engine.save_checkpoint(folder)
    torch.save(masters(engine), folder / f"rank{dist.get_rank()}.pt")
    engine.destroy()


def test_zero_to_fp32_gives_the_masters(tmp_path: Path) -> None:
    run_distributed(consolidated, 2, tmp_path, "Muon", timeout=60)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, value in torch.load(tmp_path / "rank0.pt").items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


# -- the rest of the engine ------------------------------------------------------------------------------------------


def hooks_and_access(kind: str) -> dict[str, Any]:
    """Hooks see the step and do not change it; moments can be written without making others."""
    engine, *_ = initialize(model=model(), config=config(kind, 3))
    plain, *_ = initialize(model=model(), config=config(kind, 3))
    calls: list[str] = []
    assert engine.optimizer is not None
    engine.optimizer.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    engine.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    steps_of(engine, 0, 2)
    steps_of(plain, 0, 2)
    others = masters(plain)
    same = all(torch.equal(value, others[name]) for name, value in masters(engine).items())
    key = "exp_avg" if kind == "Lamb" else "momentum_buffer"
    safe_set_full_optimizer_state(engine.module.stack, torch.full((3, 5, 7), 0.5), key)
    half = safe_get_full_optimizer_state(engine.module.stack, key)
    kinds = {tuple(sorted(state)) for state in engine.optimizer.state.values()}
    for made in (engine, plain):
        made.destroy()
    return {"calls": calls, "half": bool((half == 0.5).all()), "kinds": kinds, "same": same}


@pytest.mark.parametrize("kind", RULES)
def test_hooks_and_access(kind: str) -> None:
    results = run_distributed(hooks_and_access, 2, kind, timeout=60)
    expected = {("exp_avg", "exp_avg_sq", "step"), *([("momentum_buffer",)] if kind == "Muon" else [])}
    assert set().union(*(result["kinds"] for result in results)) == expected
    for result in results:
        assert result["calls"] == ["before", "after"] * 2
        assert result["same"]
        assert result["half"]


def narrow(kind: str) -> list[Any]:
    """Losses with fp32 states, then with bf16 masters, then with bf16 moments too; each with the dtypes found."""
    found: list[Any] = []
    for more in ({}, {"bf16_master_weights_and_grads": True}, {"bf16_optimizer_states": True}):
        content = config(kind, 2, "bf16")
        content["bf16"].update(more, **({"bf16_master_weights_and_grads": True} if more else {}))
        engine, *_ = initialize(model=model(), config=content)
        losses = steps_of(engine, 0, 6)
        assert engine.optimizer is not None
        found.append((losses, {m.dtype for m in engine.optimizer.masters.values()}, engine.optimizer.moment_dtypes))
        engine.destroy()
    return found


def test_bf16_masters() -> None:
    (usual, *_), (masters_too, *_), (all_of_it, master, moments) = run_distributed(narrow, 2, "Muon", timeout=60)[0]
    assert masters_too == pytest.approx(usual, rel=0.02)
    assert all_of_it == pytest.approx(usual, rel=0.02)
    assert master == moments == {torch.bfloat16}


def rounded(stochastic: bool) -> float:
    """How far Muon moves weights in 20 steps too small for bf16, as a share of what fp32 would move them."""
    optimizer = {"type": "Muon", "params": {"lr": 1e-5, "momentum": 0.0}}
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True}
    content = base_config(1, optimizer=optimizer, bf16=bf16, ds_hf={"stochastic_rounding": stochastic})
    model = nn.Sequential(nn.Linear(40, 40, bias=False))
    nn.init.constant_(model[0].weight, 0.5)
    engine, *_ = initialize(model=model, config=content)
    direction = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(3)))[0].bfloat16()
    for _ in range(20):
        engine.backward((engine(torch.eye(40).bfloat16()).mT * direction).sum())
        engine.step()
    moved = safe_get_full_fp32_param(engine.module[0].weight).float() - 0.5
    engine.destroy()
    # an orthogonal matrix of Frobenius norm 1 has 40 singular values of 0.158, which the iteration takes to one value
    return float(-(moved * direction).sum() / direction.float().square().sum()) / (20 * 1e-5)


def test_stochastic_rounding_of_matrices() -> None:
    assert run_distributed(rounded, 2, False, timeout=60) == [0.0, 0.0]
    first, second = run_distributed(rounded, 2, True, timeout=60)
    assert first == second
    assert 0.5 < first < 1.4


def under_init() -> set[str]:
    """A model whose parameters are sharded already, and report as empty, when Muon asks for their shapes."""
    with Init(config_dict_or_path=config("Muon", 3)):
        made = model()
    engine, *_ = initialize(model=made, config=config("Muon", 3))
    steps_of(engine, 0, 1)
    marked = {name for name, param in made.named_parameters() if param.use_muon}
    engine.destroy()
    return marked


def test_matrices_are_found_under_zero_init() -> None:
    blocks = {f"blocks.{i}.{part}.weight" for i in range(2) for part in ("up", "down")}
    for marked in run_distributed(under_init, 2, timeout=60):
        assert marked == {*blocks, "conv.weight", "stack", "head.weight"}


def no_false_alarm() -> list[str]:
    import ds_hf.engine.builder as builder

    told: list[str] = []
    builder.warn_once = told.append  # type: ignore[assignment]
    for kind in RULES:
        initialize(model=model(), config=config(kind, 2))[0].destroy()
    return told


def test_nobody_is_warned_that_pieces_are_not_whole() -> None:
    assert not [text for text in run_distributed(no_false_alarm, 2, timeout=60)[0] if "whole tensors" in text]


def misplaced() -> float:
    """A run whose Muon forgets to ask the other ranks."""
    MuonWithAuxAdam._exchanged = lambda self, unit, updates: {  # type: ignore[method-assign]
        slot: torch.cat([update, torch.zeros(unit.layout.slots[slot].numel - update.numel())])
        for slot, update in updates.items()
    }
    return end_to_end("Muon")["Muon-2"]


def test_the_comparison_can_fail() -> None:
    assert min(run_distributed(misplaced, 2, timeout=60)) > 1e-3


def given_muon(stage: int) -> str:
    layer = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Muon(layer.parameters(), lr=1e-3)
    content = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError) as error:
        initialize(model=layer, optimizer=optimizer, config=content)
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_muon_is_refused_where_it_gets_pieces(stage: int) -> None:
    for said in run_distributed(given_muon, 2, stage, timeout=60):
        assert '"type": "Muon"' in said
