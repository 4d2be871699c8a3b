"""Layers that multiply in fp8: their products are those of what was cast, at every stage, and nothing is left behind.

The products are emulated here; ``tests/gpu/test_fp8.py`` has the GPU's own.
"""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import Engine, GatheredParameters, initialize
from ds_hf.config.load import load_config
from ds_hf.config.types.training import DsHfFp8Section
from ds_hf.engine.modules import fp8 as fp8_room
from ds_hf.engine.modules.fp8 import E4M3, E5M2, Fp8Linear, cast, multiply
from ds_hf.engine.zero.cut import even_cut, set_cut
from ds_hf.errors import ConfigError
from ds_hf.log import forget_said
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

WIDTH = 32
RECIPES = ["tensorwise", "rowwise"]
OWN = {"smallest": 0, "emulate": True}


class Block(nn.Module):
    """With an odd number of tokens, and layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 16)  # by its name a router
        self.narrow = nn.Linear(WIDTH, 10)
        self.checkpointed: bool | None = None  # reentrant or not

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.checkpointed)  # type: ignore[no-any-return]

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.outer(torch.tanh(self.inner(x)))
        return x + self.gate(x).mean(-1, keepdim=True) + self.narrow(x).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def make(stage: int, model: nn.Module | None = None, fp8: Any = None, **more: Any) -> Engine:
    """Under autocast: parameters, gradients and their reductions are fp32, and only products are not."""
    torch.manual_seed(3)
    model = model or Model()
    more = {"torch_autocast": {"enabled": True, "dtype": "bf16"}, **more}
    own = {"fp8": OWN if fp8 is None else {**OWN, **fp8}} if fp8 is not False else {}
    sgd = {"type": "SGD", "params": {"lr": 0.05}}
    return initialize(model=model, config=base_config(stage, optimizer=sgd, ds_hf=own, **more))[0]


def batch(number: int) -> Tensor:
    return torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(number))


def train(engine: Engine, batches: list[int]) -> list[float]:
    losses = []
    for number in batches:
        loss = engine(batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_side_is_nearly_what_it_was(dtype: torch.dtype, rows: bool) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1, 3, 0, 1e4])[:, None]
    side = cast(x, dtype, rows=rows)
    back = side.values.float() * side.scale
    if rows:
        assert side.scale.shape == (5, 1)
        assert torch.equal(torch.exp2(torch.log2(side.scale).round()), side.scale), "powers of two"
    else:
        assert side.scale.shape == ()
        assert side.values.float().abs().max() == torch.finfo(dtype).max
    worst = 2.0 ** -(4 if dtype is E4M3 else 3)  # half of the last place, relatively
    of = x.abs().amax(1, keepdim=True) if rows else x.abs().max()
    assert bool(((back - x).abs() <= x.abs() * worst * 1.001 + of * 2.0**-16).all())
    assert not back[3].any()


def test_a_side_with_inf_or_nan_is_not_finite() -> None:
    for value in (float("inf"), float("nan")):
        side = cast(torch.tensor([[1.0, value]]), E4M3)
        assert not (side.values.float() * side.scale).isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_what_was_cast(recipe: str) -> None:
    engine = make(0, fp8={"recipe": recipe})
    layer = engine.module.blocks[0].inner  # type: ignore[union-attr,index]
    assert isinstance(layer, Fp8Linear)
    x = torch.randn(21, WIDTH).bfloat16().requires_grad_()
    grad = torch.randn(21, 3 * WIDTH).bfloat16() * 1e-5
    found = layer(x)
    assert found.dtype is torch.bfloat16
    grads = torch.autograd.grad(found, [x, layer.weight, layer.bias], grad)
    rows = recipe == "rowwise"

    def held(y: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        side = cast(y, dtype, rows=rows)
        return side.values.double() * side.scale.double()

    kind = E4M3 if rows else E5M2
    weight = layer.weight.detach()
    expected = held(x.detach()) @ held(weight).t() + layer.bias.detach().bfloat16().double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    by_column = held(weight.t().contiguous()).t() if rows else held(weight)
    torch.testing.assert_close(grads[0].double(), held(grad, kind) @ by_column, rtol=1e-2, atol=1e-8)
    turned = [held(y.t().contiguous(), k) if rows else held(y, k).t() for y, k in ((grad, kind), (x.detach(), E4M3))]
    torch.testing.assert_close(grads[1].double(), turned[0] @ turned[1].t(), rtol=1e-2, atol=1e-7)
    torch.testing.assert_close(grads[2].double(), grad.double().sum(0), rtol=1e-2, atol=1e-7)


def test_multiply_takes_one_scale_beside_rows() -> None:
    a, b = torch.randn(4, 16), torch.randn(16, 16)
    found = multiply(cast(a, E4M3, rows=True), cast(b, E4M3, rows=True), torch.float32, emulated=True)
    torch.testing.assert_close(found, a @ b.t(), rtol=0.3, atol=0.5)


# -- training ----------------------------------------------------------------------------------------------------------


def at_stage(stage: int, recipe: str, **zero: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Each process has every second batch."""
    engine = make(stage, fp8={"recipe": recipe}, zero_optimization={"stage": stage, **zero})
    rank, count = engine.axis.rank, engine.axis.world_size
    losses = train(engine, [number for number in range(8) if number % count == rank])
    weights = full_weights(engine.module)
    kinds = [name for name, module in engine.module.named_modules() if isinstance(module, Fp8Linear)]
    engine.destroy()
    assert not any(isinstance(module, Fp8Linear) for module in engine.module.modules())
    return losses, weights, kinds


@pytest.mark.parametrize(("recipe", "stages"), [("tensorwise", range(4)), ("rowwise", [3])])
def test_two_processes_are_one_that_accumulates(recipe: str, stages: Iterable[int]) -> None:
    alone = make(0, fp8={"recipe": recipe}, gradient_accumulation_steps=2)
    losses = train(alone, list(range(8)))
    expected = full_weights(alone.module)
    plain = make(0, fp8=False, gradient_accumulation_steps=2)
    assert train(plain, list(range(8))) != losses
    for stage in stages:
        for rank, (found, weights, kinds) in enumerate(run_distributed(at_stage, 2, stage, recipe)):
            assert found == pytest.approx(losses[rank::2], rel=1e-6)
            assert kinds == [f"blocks.{block}.{name}" for block in range(2) for name in ("inner", "outer")]
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def packed() -> tuple[list[float], dict[str, Tensor], list[str]]:
    return at_stage(3, "tensorwise", zero_quantized_weights=True)


def test_weights_that_travel_in_8_bits_are_cast_from_what_arrives() -> None:
    expected = run_distributed(at_stage, 2, 3, "tensorwise")
    found = run_distributed(packed, 2)
    for (losses, weights, kinds), (exact, whole, layers) in zip(found, expected, strict=True):
        assert kinds == layers
        assert losses != exact
        assert losses == pytest.approx(exact, rel=1e-2)
        for name, value in weights.items():
            assert torch.equal(value, found[0][1][name])
            torch.testing.assert_close(value, whole[name], rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_blocks_share_their_code(recipe: str) -> None:
    model = Model(3)
    again = copy.deepcopy(model)
    expected = train(make(2, model, fp8={"recipe": recipe}), [0, 1, 2])
    torch._dynamo.reset()
    engine = make(2, again, fp8={"recipe": recipe})
    engine.compile(backend="aot_eager")
    assert train(engine, [0, 1, 2]) == pytest.approx(expected, rel=1e-4)  # what was cast is rounded again
    report = engine.compile_report()
    assert (report.graphs, report.breaks) == (2, {}), "the first block's input has no gradient"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_are_cast_alike(reentrant: bool) -> None:
    torch.manual_seed(5)
    model = Model()
    for block in model.blocks:
        block.checkpointed = reentrant  # type: ignore[assignment]
    again = copy.deepcopy(model)
    for block in again.blocks:
        block.checkpointed = None  # type: ignore[assignment]
    one, other = make(3, model), make(3, again)
    x = batch(0).requires_grad_()
    losses = []
    for engine in (one, other):
        for number in range(3):
            loss = engine(batch(number).requires_grad_())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    del x


def test_in_evaluation_layers_have_their_weights_as_they_are() -> None:
    engine, plain = make(2), make(2, fp8=False)
    engine.eval()
    plain.eval()
    with torch.no_grad():
        assert engine(batch(0)).item() == plain(batch(0)).item()
    engine.train()
    plain.train()
    with torch.no_grad():
        assert engine(batch(0)).item() != plain(batch(0)).item()


# -- kept copies -------------------------------------------------------------------------------------------------------


def writes(engine: Engine) -> None:
    """What is written from outside, in the middle of a step."""
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        for param in engine.module.parameters():
            param.data.mul_(1.5)


def test_copies_that_are_kept_are_those_of_each_micro_batch(tmp_path: Any) -> None:
    found = []
    for keeps in (True, False):
        engine = make(1, fp8={"keep_weights": keeps}, gradient_accumulation_steps=3)
        layers = [module for module in engine.module.modules() if isinstance(module, Fp8Linear)]
        losses = train(engine, [0, 1, 2, 3])
        assert all((layer._ds_kept is not None) == keeps for layer in layers)
        engine.save_checkpoint(str(tmp_path / str(keeps)))
        writes(engine)
        losses += train(engine, [4])
        with torch.no_grad():
            for layer in layers:
                layer.weight.mul_(0.5)
        losses += train(engine, [5, 6])
        engine.load_checkpoint(str(tmp_path / str(keeps)))
        losses += train(engine, [7, 8, 9, 10])
        engine.eval()
        losses.append(engine(batch(11)).item())
        found.append(losses)
        engine.destroy()
        assert not any(name.startswith("_ds_") and name != "_ds_home" for layer in layers for name in vars(layer))
    assert found[0] == found[1]


def _without_gradients(engine: Engine) -> list[float]:
    with torch.no_grad():
        return [engine(batch(20)).item()]


def _by_parts(engine: Engine) -> list[float]:
    losses = []
    for number in (20, 21):
        x = batch(number)
        with torch.autocast("cpu", torch.bfloat16):
            for block in engine.module.blocks:  # type: ignore[union-attr]
                x = block(x)
            loss = engine.module.head(x).float().square().mean()  # type: ignore[operator]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _two_forwards(engine: Engine) -> list[float]:
    loss = engine(batch(20)) + engine(batch(21))
    engine.backward(loss)
    engine.step()
    return [loss.item()]


@pytest.mark.parametrize("call", [_without_gradients, _by_parts, _two_forwards])
@pytest.mark.parametrize("stage", [0, 2])
def test_copies_that_are_kept_serve_every_kind_of_call(stage: int, call: Callable[[Engine], list[float]]) -> None:
    found = []
    for keeps in (True, False):
        engine = make(stage, fp8={"keep_weights": keeps}, gradient_accumulation_steps=2)
        losses = []
        for number in range(3):  # before, between and after steps
            losses += train(engine, [2 * number, 2 * number + 1])
            losses += call(engine)
        found.append(losses)
    assert found[0] == found[1]


def test_a_second_engine_takes_the_layers_over() -> None:
    first = make(1, gradient_accumulation_steps=2)
    train(first, [0, 1])
    plain = copy.deepcopy(first.module)
    second = make(1, first.module, gradient_accumulation_steps=2)
    first.destroy()
    assert train(second, [0, 1, 2]) == train(make(1, plain, gradient_accumulation_steps=2), [0, 1, 2])
    assert any(isinstance(module, Fp8Linear) for module in second.module.modules())
    second.destroy()
    assert not any(isinstance(module, Fp8Linear) for module in second.module.modules())


def test_calls_after_a_step_never_see_the_copies_of_before() -> None:
    """Of the whole model without gradients, as for the old policy of GRPO, and of a part of it."""
    found = []
    for keeps in (True, False):
        engine = make(1, fp8={"keep_weights": keeps}, gradient_accumulation_steps=2)
        train(engine, [0, 1])
        part = engine.module.blocks[1]  # type: ignore[union-attr,index]
        with torch.autocast("cpu", torch.bfloat16):
            values = [part(batch(2)).float().sum().item()]
        with torch.no_grad():
            values.append(engine(batch(3)).item())
            engine.module.blocks[0].inner.weight.data.mul_(0.5)  # type: ignore[union-attr,index]
            values.append(engine(batch(3)).item())
        values += train(engine, [4, 5, 6])
        found.append(values)
    assert found[0] == found[1]


def test_a_step_makes_one_copy_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    copies = fp8_room._copies_into
    monkeypatch.setattr(fp8_room, "_copies_into", lambda *args: made.append(None) or copies(*args))
    train(make(2, fp8={}, gradient_accumulation_steps=3), list(range(6)))
    assert len(made) == 2 * 4


def test_auto_keeps_where_micro_batches_share_a_step() -> None:
    for stage, steps, keeps in ((0, 1, False), (2, 2, True), (3, 2, False)):
        engine = make(stage, gradient_accumulation_steps=steps)
        train(engine, [0])
        layer = engine.module.blocks[0].inner  # type: ignore[union-attr,index]
        # one process at stage 3 has its shards whole, and gives them back all the same
        assert (layer._ds_kept is not None) == keeps, (stage, steps)


# -- which layers ------------------------------------------------------------------------------------------------------


def test_layers_that_stay_are_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    model = Model(3)
    model.blocks[2].inner.weight.requires_grad_(False)  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO):
        engine = make(1, model, fp8={"exclude": [r"blocks\.1\."]})
    told = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("fp8, "))
    assert told.startswith("fp8, tensorwise: 3 linear layers; in 16 bits: ")
    for part in ("4 excluded", "2 a router", "2 a size is no multiple of 16", "1 the head", "1 frozen"):
        assert part in told
    engine.destroy()


def test_none_left_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no linear layer of Model can multiply in it \(.*smaller than 4_194_304"):
        make(0, fp8={"smallest": 4194304})


def test_divided_layers_are_told_as_such() -> None:
    model = Model()
    for block in model.blocks:
        for layer in (block.inner, block.outer):  # type: ignore[union-attr]
            set_cut(layer.weight, even_cut(layer.weight.shape, 0, 0, 2))  # type: ignore[union-attr]
    section = DsHfFp8Section(smallest=0)
    reasons = Counter(why for _, why in fp8_room._linear_layers(model, section))
    assert reasons["divided over processes (autotp_size)"] == 4


def test_a_device_without_products_computes_as_before(caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    expected = train(make(2, fp8=False), [0, 1])
    with caplog.at_level(logging.WARNING):
        engine = make(2, fp8={"emulate": False})
    assert "fp8 is left out, layers compute in 16 bits: cpu has no products of 8 bits" in caplog.text
    assert train(engine, [0, 1]) == expected


def test_copies_and_pickles_are_ordinary_layers() -> None:
    engine = make(0, gradient_accumulation_steps=2)
    train(engine, [0])
    layer = engine.module.blocks[0].inner  # type: ignore[union-attr,index]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is nn.Linear
        assert not {"_ds_kept", "_ds_by_rows", "_ds_emulated"} & set(vars(other))
        torch.testing.assert_close(other.weight, layer.weight)


def test_nothing_is_computed_of_no_tokens() -> None:
    engine = make(0)
    layer = engine.module.blocks[0].inner  # type: ignore[union-attr,index]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.zeros(2, 0, WIDTH))
    assert found.shape == (2, 0, 3 * WIDTH)


# -- files -------------------------------------------------------------------------------------------------------------

BASE = {"train_batch_size": 1, "bf16": {"enabled": True}}


def test_true_is_short_for_the_section() -> None:
    short, long = (load_config({**BASE, "ds_hf": {"fp8": each}}).ds_hf.fp8 for each in (True, {}))
    assert short == long
    assert short is not None
    assert short.enabled
    off = load_config({**BASE, "ds_hf": {"fp8": False}}).ds_hf.fp8
    assert off is not None
    assert not off.enabled


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({**BASE, "ds_hf": {"fp8": {"recipe": "blockwise"}}}, "blockwise"),
        ({**BASE, "ds_hf": {"fp8": {"recipes": "rowwise"}}}, "recipe"),
        ({**BASE, "ds_hf": {"fp8": "yes"}}, "fp8"),
        ({**BASE, "ds_hf": {"fp8": {"exclude": ["("]}}}, "no regular expression"),
        ({**BASE, "ds_hf": {"fp8": {"smallest": -1}}}, "smallest"),
        ({"train_batch_size": 1, "ds_hf": {"fp8": True}}, "computes in another dtype"),
        ({"train_batch_size": 1, "fp16": {"enabled": True}, "ds_hf": {"fp8": True}}, "computes in another dtype"),
    ],
)
def test_faults_are_named(file: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(file)


def test_keys_without_effect_are_told() -> None:
    for section, stage in (({"keep_weights": True}, 3), ({"keep_weights": True, "recipe": "rowwise"}, 1)):
        file = {**BASE, "zero_optimization": {"stage": stage}, "ds_hf": {"fp8": section}}
        assert any("keep_weights" in warning.pointer for warning in load_config(file).warnings)


# -- torchao's weights -------------------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """As torchao wraps a weight that FSDP2 is to cast before it gathers: no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        found: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        found._tensor = inner
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0]._tensor)
        raise AssertionError(f"{func} of a wrapped weight")


@pytest.mark.parametrize("stage", [0, 3])
def test_wrapped_weights_become_those_that_the_optimizer_knows(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("torchao.float8.fsdp_utils")
    theirs.WeightWithDynamicFloat8CastTensor = Wrapped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao.float8.fsdp_utils", theirs)
    found = []
    for wraps in (False, True):
        torch.manual_seed(3)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for block in model.blocks if wraps else ():
            block.inner.weight = nn.Parameter(Wrapped(block.inner.weight))  # type: ignore[union-attr]
        config = base_config(stage, torch_autocast={"enabled": True, "dtype": "bf16"})
        config.pop("optimizer", None)
        engine = initialize(model=model, optimizer=optimizer, config=config)[0]
        found.append(train(engine, [0, 1, 2]))
        assert not any(isinstance(param, Wrapped) for param in model.parameters())
    assert found[0] == found[1]
