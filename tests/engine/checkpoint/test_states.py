"""States of optimizers of other libraries: codes with the scales of their blocks, dtypes and names of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hf
from ds_hf.errors import CheckpointError
from tests.helpers.distributed import run_distributed


class Packed(Tensor):
    """Codes of 8 bits and a scale, which look like numbers, as torchao has them. A scale that is asked for again is
    another one, and nothing is computed with them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: Tensor) -> Packed:
        scale = values.abs().max() * 1.01
        return cls((values / scale * 127).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, *_: Any) -> Packed:
        return cls(inner["codes"], inner["scale"])

    def dequantize(self) -> Tensor:
        return self.codes.float() / 127 * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of packed values")


class PackedMomentum(torch.optim.Optimizer):
    """Momentum in such tensors."""

    def __init__(self, params: Any, mng: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                before = self.state[param].get("exp_avg")
                before = before.dequantize() if isinstance(before, Packed) else 0 if before is None else before
                momentum = param.grad + 0.9 * before
                self.state[param]["exp_avg"] = Packed.of(momentum)
                param -= 0.1 * momentum


class AdamW(torch.optim.Optimizer):
    """Momentum that is kept as bitsandbytes keeps it, whose class has this name too: in 8 bits with a scale a block
    where a tensor is large, else in bf16, or in fp32 where the manager says so."""

    def __init__(self, params: Any, mng: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mng = mng or SimpleNamespace(pid2config={}, module_weight_config_triple=[])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                wide = id(param) in self.mng.pid2config
                momentum = param.grad + 0.9 * _momentum(state, param)
                state["step"] = state.get("step", 0) + 1
                if param.numel() < 16 or wide:
                    state["state1"] = momentum.to(torch.float32 if wide else torch.bfloat16)
                else:
                    state["absmax1"] = momentum.abs().reshape(-1, 4).amax(1)
                    codes = momentum.reshape(-1, 4) / state["absmax1"][:, None].clamp_min(1e-12) * 127 + 128
                    state["state1"] = codes.round().to(torch.uint8).view(param.shape)
                param -= group["lr"] * momentum


def _momentum(state: dict[str, Any], param: Tensor) -> Tensor:
    if not state:
        return torch.zeros_like(param)
    if state["state1"].is_floating_point():
        return state["state1"].float()
    return ((state["state1"].float().view(-1, 4) - 128) / 127 * state["absmax1"][:, None]).view(param.shape)


class Projector:
    """As GaLore's and APOLLO's: an object among the states of a parameter, with tensors of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.basis = rank, [torch.empty(0)]

    def __call__(self, gradient: Tensor) -> Tensor:
        if not self.basis[0].numel():
            self.basis = [torch.linalg.qr(gradient.reshape(len(gradient), -1))[0][:, : self.rank]]
        return self.basis[0].t() @ gradient


class Counted(Projector):
    """One that its class has to make."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a checkpoint runs no code")


class LowRank(torch.optim.Optimizer):
    """Momentum in the space of the first gradients."""

    kind: type[Projector] = Projector

    def __init__(self, params: Any, mng: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if "projector" not in state:
                state["projector"] = self.kind(2)
            low = state["projector"](param.grad.float())
            state["exp_avg"] = low + 0.9 * state.get("exp_avg", torch.zeros_like(low))
            param -= 0.1 * state["projector"].basis[0] @ state["exp_avg"]


class OfCode(LowRank):
    kind = Counted


def _engine(stage: int, mng: Any = None, kind: Any = AdamW) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    if mng is not None:
        mng.module_weight_config_triple.append((model[1], "weight", {"optim_bits": 32}))
    file = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    return ds_hf.initialize(model=model, optimizer=kind(model.parameters(), mng), config=file)[0]


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "later"), [(0, 0), (2, 3), (3, 1)])
def test_a_run_with_coded_states_goes_on_as_if_it_had_not_stopped(stage: int, later: int, tmp_path: Path) -> None:
    """Codes that are loaded as numbers of fp32 would be momenta of 0 to 255."""
    engine = _engine(stage)
    _train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    expected = _train(engine, range(3, 6))
    engine.destroy()
    engine = _engine(later)
    engine.load_checkpoint(tmp_path)
    kept = {str(state["state1"].dtype) for state in engine.optimizer.state.values()}
    got = _train(engine, range(3, 6))
    engine.destroy()
    assert got == expected
    assert kept == {"torch.uint8", "torch.bfloat16"}


def test_objects_among_the_states_go_on(tmp_path: Path) -> None:
    engine = _engine(0, kind=LowRank)
    _train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    bases = [state["projector"].basis[0] for state in engine.optimizer.state.values()]
    expected = _train(engine, range(3, 6))
    engine.destroy()
    engine = _engine(0, kind=LowRank)
    engine.load_checkpoint(tmp_path)
    again = [state["projector"] for state in engine.optimizer.state.values()]
    assert [(type(each), each.rank) for each in again] == [(Projector, 2)] * 5
    assert all(torch.equal(each.basis[0], basis) for each, basis in zip(again, bases, strict=True))
    assert _train(engine, range(3, 6)) == expected
    engine.destroy()


def test_objects_of_a_class_that_is_gone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(0, kind=LowRank)
    _train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    monkeypatch.setattr(LowRank, "kind", Counted)
    monkeypatch.delitem(globals(), "Projector")
    engine = _engine(0, kind=LowRank)
    with pytest.raises(
        CheckpointError, match=r"has a tests\.\S+\.Projector, which the package of LowRank does not have here"
    ):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def test_objects_whose_class_makes_them_are_refused(tmp_path: Path) -> None:
    engine = _engine(0, kind=OfCode)
    _train(engine, range(1))
    with pytest.raises(
        CheckpointError, match=r"\['projector'\] is a tests\.\S+\.Counted, which a checkpoint cannot hold"
    ):
        engine.save_checkpoint(tmp_path)
    engine.destroy()


def test_a_parameter_with_settings_of_its_own_keeps_them() -> None:
    """The Trainer asks bitsandbytes' manager for embeddings in 32 bits, by the module that has them."""
    mng = SimpleNamespace(pid2config={}, module_weight_config_triple=[])
    engine = _engine(2, mng)
    _train(engine, range(2))
    kept = [state["state1"] for state in engine.optimizer.state.values()]
    engine.destroy()
    assert [value.shape for value in kept if value.dtype is torch.float32] == [(8, 8)]


@pytest.mark.parametrize(("stage", "later"), [(0, 0), (2, 3)])
def test_packed_moments_stay_packed(stage: int, later: int, tmp_path: Path) -> None:
    engine = _engine(stage, kind=PackedMomentum)
    _train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    expected = _train(engine, range(3, 6))
    engine.destroy()
    engine = _engine(later, kind=PackedMomentum)
    engine.load_checkpoint(tmp_path)
    kept = {type(state["exp_avg"]) for state in engine.optimizer.state.values()}
    got = _train(engine, range(3, 6))
    engine.destroy()
    assert got == expected
    assert kept == {Packed}


def test_other_pieces_take_packed_moments_as_numbers(tmp_path: Path) -> None:
    """At stage 0 two processes hold everything, and each writes a part that need not be whole rows."""
    saved = run_distributed(_save_packed, 2, tmp_path)[0]
    found = run_distributed(_load_packed, 2, tmp_path)
    assert [[*first, *second] for first, second in zip(*found, strict=True)] == saved


def _save_packed(folder: Path) -> list[list[float]]:
    engine = _engine(0, kind=PackedMomentum)
    _train(engine, range(2))
    engine.save_checkpoint(folder)
    return _moments(engine)


def _load_packed(folder: Path) -> list[list[float]]:
    engine = _engine(2, kind=PackedMomentum)
    engine.load_checkpoint(folder)
    return _moments(engine)


def _moments(engine: Any) -> list[list[float]]:
    """What this process has of each buffer, one after the other."""
    values: dict[str, list[float]] = {}
    for segments in engine.optimizer.segments.values():
        for segment in segments:
            value = engine.optimizer.state[segment.param]["exp_avg"]
            value = value.dequantize() if isinstance(value, Packed) else value
            values.setdefault(segment.gradient.buffer.labels.name, []).extend(value.reshape(-1).tolist())
    engine.destroy()
    return list(values.values())
