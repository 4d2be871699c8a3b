"""Layers that round while they train: numbers and gradients are torchao's at every stage, and what is written is what
was trained."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from ds_hf import Engine, GatheredParameters, initialize
from ds_hf.checkpoint.few_bits import plan, round_to_bits, trained_for
from ds_hf.checkpoint.formats import open_source
from ds_hf.config.load import load_config
from ds_hf.errors import ConfigError
from ds_hf.hf.few_bits import linear_layers
from ds_hf.log import forget_said
from tests.helpers.compiled import with_quick_backend
from tests.helpers.distributed import run_distributed
from tests.helpers.few_bits import opened
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.parity import base_config, full_weights

ao = pytest.importorskip("torchao.quantization.qat", reason="pip install 'ds-hf[few-bits]'")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QAT = {"weights": 4, "group_size": 16}
STEPS = 3
LR = 2.0**-4  # its product with a gradient is exact: a value halfway between two codes is rounded alike in every order


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(vocab_size=48, initializer_range=0.2, num_key_value_heads=2, **SIZES, **more))


def batch(number: int) -> Tensor:
    return torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(number))


def make(stage: int, model: nn.Module, qat: Any = QAT, **more: Any) -> Engine:
    own = {} if qat is None else {"qat": qat}
    sgd = {"type": "SGD", "params": {"lr": LR}}
    config = {**base_config(stage, optimizer=sgd, ds_hf={**own, **more.pop("ds_hf", {})}), **more}
    return initialize(model=model, config=config)[0]


def loss_of(model: Any, number: int) -> Tensor:
    loss: Tensor = model(input_ids=batch(number), labels=batch(number)).loss
    return loss


def train(engine: Engine, numbers: list[int]) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def by_torchao(model: nn.Module, qat: dict[str, Any] = QAT) -> nn.Module:
    """The user's own preparation of the same layers."""
    from torchao.quantization import quantize_

    dtype = {4: torch.int4, 8: torch.int8}[qat["weights"]]
    size = qat.get("group_size")
    weights = ao.IntxFakeQuantizeConfig(dtype, **({"group_size": size} if size else {"granularity": "per_channel"}))
    inputs = ao.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if qat.get("activations") else None
    inside = {id(module) for module in model.base_model.modules()}  # type: ignore[union-attr]
    quantize_(
        model,
        ao.QATConfig(activation_config=inputs, weight_config=weights),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and id(module) in inside,
    )
    return model


def plain_training(
    qat: dict[str, Any], dtype: torch.dtype, count: int = 2, device: str = "cpu"
) -> tuple[list[float], dict[str, Tensor]]:
    """In torch, one process, all data."""
    model = by_torchao(llama(), qat).to(dtype).to(device)
    masters = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        for part in range(count):
            loss = loss_of(model, count * step + part)
            (loss / count).backward()
            losses.append(loss.item())
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                masters[name] -= LR * param.grad.float()
                param.copy_(masters[name])
    return losses, {name: param.detach().float().cpu().clone() for name, param in model.named_parameters()}


# -- numbers -----------------------------------------------------------------------------------------------------------

FORMS = [QAT, {"weights": 8, "group_size": None, "activations": 8}]


def at_stages(qat: dict[str, Any], stages: list[int], own: bool, more: dict[str, Any]) -> list[Any]:
    """Each process has every second batch; the JSON's section, or the user's ``quantize_``."""
    found = []
    for stage in stages:
        model = llama() if own else by_torchao(llama(), qat)
        engine = make(stage, model, qat if own else None, **more)
        rank, world = engine.axis.rank, engine.axis.world_size
        losses = train(engine, [number for number in range(2 * STEPS) if number % world == rank])
        found.append((losses, {name: value.float() for name, value in full_weights(engine.module).items()}))
        engine.destroy()
        if own:
            assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    return found


@pytest.mark.parametrize("qat", FORMS, ids=["4 bits", "8 and 8 bits"])
@pytest.mark.parametrize("own", [True, False], ids=["json", "quantize_"])
def test_two_processes_at_every_stage_are_torchao_on_one(qat: dict[str, Any], own: bool) -> None:
    losses, weights = plain_training(qat, torch.float32)
    for rank, stages in enumerate(run_distributed(at_stages, 2, qat, [0, 1, 2, 3], own, {}, timeout=120)):
        for found, values in stages:
            assert found == pytest.approx(losses[rank::2], rel=1e-5)
            for name, value in values.items():
                torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["json", "quantize_"])
def test_in_bf16_they_are_as_near_as_bf16(own: bool) -> None:
    losses, weights = plain_training(QAT, torch.bfloat16)
    more = {"bf16": {"enabled": True}}
    for rank, stages in enumerate(run_distributed(at_stages, 2, QAT, [0, 1, 2, 3], own, more, timeout=120)):
        for found, values in stages:
            assert found == pytest.approx(losses[rank::2], rel=0.02)
            for name, value in values.items():
                assert (value - weights[name]).norm() <= 0.01 * weights[name].norm(), name


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("qat", FORMS, ids=["4 bits", "8 and 8 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gradients_are_torchaos(qat: dict[str, Any], stage: int, dtype: torch.dtype) -> None:
    """To the bit, also where rounded weights are computed again."""
    theirs = by_torchao(llama(), qat).to(dtype)
    engine = make(stage, llama(), qat, bf16={"enabled": dtype is torch.bfloat16})
    name, x = "model.layers.1.mlp.down_proj", torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    results = []
    for model in (theirs, engine.module):
        layer = dict(model.named_modules())[name]
        with GatheredParameters([layer.weight]):
            given = x.clone().requires_grad_()
            found = layer(given)
            results.append((found.detach(), *torch.autograd.grad(found.float().square().sum(), [given, layer.weight])))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# -- beside other features ---------------------------------------------------------------------------------------------


def test_what_is_rounded_is_not_kept_where_weights_are_divided() -> None:
    """Between forward and backward, beside what a plain model keeps."""
    kept = {}
    for stage in (2, 3):
        for qat in (QAT, None):
            engine = make(stage, llama(), qat)
            with LiveBytes() as live:
                loss = loss_of(engine, 0)
                kept[stage, bool(qat)] = live.now()
            engine.backward(loss)
            engine.step()
    rounded = sum(p.numel() for name, p in llama().named_parameters() if p.dim() == 2 and "layers" in name)
    assert kept[2, True] - kept[2, False] >= 4 * rounded
    assert kept[3, True] - kept[3, False] <= rounded // 2  # scales and zeros of groups of 16


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks(stage: int) -> None:
    finer = {"weights": 8, "group_size": 16}  # where one code more or less is nothing
    expected = train(make(stage, llama(), finer), [0, 1, 2])
    torch._dynamo.reset()
    engine = make(stage, llama(use_cache=False), finer, ds_hf={"compile": "blocks"})
    with_quick_backend(engine)
    assert train(engine, [0, 1, 2]) == pytest.approx(expected, rel=1e-3)
    assert engine.compile_report().breaks == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointed_blocks(stage: int) -> None:
    expected = train(make(stage, llama(), QAT), [0, 1, 2])
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    assert train(make(stage, model, QAT), [0, 1, 2]) == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_beside_a_teacher(stage: int) -> None:
    """The student rounds, the teacher does not."""
    from ds_hf.distillation import distill

    found = []
    for model, qat in ((llama(), QAT), (by_torchao(llama()), None)):
        handle = distill(model, llama().eval(), labels=0.5)
        engine = make(stage, model, qat)
        found.append(train(engine, [0, 1]))
        assert handle.parts["logits"] > 0, "of the same weights, unrounded"
        engine.destroy()
    assert found[0] == found[1]


def saved_and_loaded(folder: str) -> None:
    """Saved at stage 3 by two processes; goes on at others as without a pause."""
    engine = make(3, llama())
    rank = engine.axis.rank
    train(engine, [rank, 2 + rank])
    engine.save_checkpoint(folder)
    expected = train(engine, [4 + rank, 6 + rank])
    engine.destroy()
    for stage in (3, 1):
        again = make(stage, llama())
        again.load_checkpoint(folder)
        assert train(again, [4 + rank, 6 + rank]) == pytest.approx(expected, rel=1e-5), stage
        again.destroy()


def test_a_checkpoint_goes_on_at_another_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_distributed(saved_and_loaded, 2, str(tmp_path), timeout=120)
    forget_said()
    make(0, llama(), {"weights": 8, "group_size": 16}).load_checkpoint(str(tmp_path))
    assert "was trained to be rounded to 4 bits in groups of 16" in caplog.text
    plain = make(2, llama(), None)
    plain.load_checkpoint(str(tmp_path))  # which knows nothing of it
    assert len(train(plain, [0])) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_written_is_what_was_trained(tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    engine = make(3, model, {**QAT, "exclude": ["v_proj"]}, bf16={"enabled": dtype == "bf16"})
    train(engine, [0, 1])
    engine.save_checkpoint(tmp_path)
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=batch(9)).logits
    engine.destroy()
    source = open_source(tmp_path)
    assert trained_for(source) == (4, 16, ("v_proj",))
    form = plan(source, linear_layers(model.config).linear, 4)
    assert (form.group_size, len(form.layers)) == (16, 12)
    with torch.no_grad():
        for weight in source.weights():
            name = weight.name.removesuffix(".weight")
            value = weight.read().to(weight.dtype)
            if name in form.layers:
                codes, scales = round_to_bits(value, 4, 16)
                value = codes.to(value.dtype) * scales.repeat_interleave(16, 1)
                assert torch.equal(value, opened(weight.read().to(weight.dtype), 4, 16))
            model.get_parameter(weight.name).data = value
        assert torch.equal(model.eval()(input_ids=batch(9)).logits, expected)
    assert "was trained to be rounded" not in caplog.text
    assert plan(source, linear_layers(model.config).linear, 4, group_size=32).group_size == 32
    assert "was trained to be rounded to 4 bits, groups of 16" in caplog.text


def test_torchaos_own_conversion_gives_what_was_trained(tmp_path: Path) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    model = llama()
    engine = make(3, model)
    train(engine, [0, 1])
    engine.export_pretrained(tmp_path)
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=batch(9)).logits
    engine.destroy()
    written = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    head = written.lm_head
    base = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
    quantize_(written, base, filter_fn=lambda module, name: isinstance(module, nn.Linear) and module is not head)
    with torch.no_grad():
        torch.testing.assert_close(written(input_ids=batch(9)).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_users_preparation_is_converted_in_place() -> None:
    """``QATConfig(step="convert")`` after training, where weights are whole."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    base = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
    model = llama()
    quantize_(model, ao.QATConfig(base, step="prepare"))
    engine = make(2, model, None)
    train(engine, [0, 1])
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=batch(9)).logits
    engine.destroy()
    quantize_(model, ao.QATConfig(base, step="convert"))
    assert not any(isinstance(module, ao.FakeQuantizedLinear) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=batch(9)).logits, expected, rtol=1e-5, atol=1e-5)


def test_copies_are_ordinary_and_a_second_engine_takes_over() -> None:
    first = make(1, llama())
    layer = first.module.model.layers[0].mlp.up_proj  # type: ignore[union-attr,index]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is nn.Linear
        assert torch.equal(copied.weight, layer.weight)
        assert not list(copied.children())
    second = make(1, first.module, {"weights": 8, "group_size": None})
    first.destroy()
    assert isinstance(layer, ao.FakeQuantizedLinear)
    second.destroy()
    assert type(layer) is nn.Linear
    assert not list(layer.children())
    assert not [name for name in vars(layer) if name.startswith("_ds_")]


def steps_of(number: int) -> Tensor:
    """Sequences that go on by a step of their own."""
    generator = torch.Generator().manual_seed(number)
    start, step = (torch.randint(low, high, (16, 1), generator=generator) for low, high in ((0, 64), (1, 6)))
    return (start + step * torch.arange(12)) % 64


def learned(model: Any, count: int, lr: float, qat: Any = None, first: int = 0) -> Any:
    adam = {"type": "AdamW", "params": {"lr": lr}}
    engine = initialize(model=model, config=base_config(2, optimizer=adam, ds_hf={"qat": qat} if qat else {}))[0]
    for number in range(first, first + count):
        loss = engine(input_ids=steps_of(number), labels=steps_of(number)).loss
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return model


@torch.no_grad()
def held_out(model: Any, bits: int | None = None) -> float:
    model = copy.deepcopy(model).eval()
    for module in model.model.modules() if bits else ():
        if isinstance(module, nn.Linear):
            module.weight.data = opened(module.weight.data, bits, module.in_features)
    losses = [model(input_ids=steps_of(n), labels=steps_of(n)).loss.item() for n in range(10**6, 10**6 + 8)]
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_most_of_what_rounding_loses_is_won_back() -> None:
    """Of a model with columns of large weights, as language models have: here a norm gives to the layers behind it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = learned(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)), 500, 3e-3)
    model = learned(model, 200, 5e-4, first=500)
    before = held_out(model)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, behind in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[::16] /= 8
                for each in behind:
                    each.weight[:, ::16] *= 8
    assert held_out(model) == pytest.approx(before, rel=1e-4)
    qat = {"weights": 4, "group_size": None}
    plain, rounding = (learned(copy.deepcopy(model), 150, 1e-4, each, 700) for each in (None, qat))
    best, lost, kept = held_out(plain), held_out(plain, 4), held_out(rounding, 4)
    print(
        f"16 bits {best:.4f}, rounded to 4 {lost:.4f}, trained for 4 {kept:.4f}, rounded to 8 {held_out(plain, 8):.4f}"
    )
    assert held_out(plain, 8) <= best * 1.005
    assert lost > best * 1.1
    assert (lost - kept) / (lost - best) >= 0.5


# -- what is told ------------------------------------------------------------------------------------------------------


def test_a_run_says_what_is_rounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make(2, llama(), {**QAT, "exclude": ["o_proj", "no_such_layer"]})
    assert "'no_such_layer' is in no linear layer's name" in caplog.text
    assert "'o_proj' is in no" not in caplog.text
    assert "12 layers round their weights to 4 bits; as they are: 2 excluded, 1 the head" in caplog.text
    assert "12 layers round their weights to 4 bits" in str(engine.summary())
    bert = BertForMaskedLM(BertConfig(vocab_size=48, **SIZES))
    rounds = make(0, bert, True)  # the same layers that convert writes
    names = {name for name, module in bert.named_modules() if isinstance(module, ao.FakeQuantizedLinear)}
    rounds.destroy()
    bert.config.architectures = ["BertForMaskedLM"]
    assert names == {name for name, why in linear_layers(bert.config).linear.items() if not why}


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"groups of 24 do not divide the 32 columns of model\.layers\.0"):
        make(0, llama(), {"group_size": 24})
    with pytest.raises(ConfigError, match=r"no linear layer of LlamaForCausalLM can be rounded \(14 excluded"):
        make(0, llama(), {**QAT, "exclude": ["layers"]})
    with pytest.raises(ConfigError, match="cannot round to few bits and multiply in fp8"):
        load_config({**base_config(0), "bf16": {"enabled": True}, "ds_hf": {"qat": True, "fp8": True}})
    with pytest.raises(ConfigError, match="no regular expression"):
        load_config({**base_config(0), "ds_hf": {"qat": {"exclude": ["("]}}})
    peft = importlib.import_module("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="merge the adapters first"):
        make(0, adapted)
    frozen = llama()
    frozen.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="14 frozen"):
        make(0, frozen)
    monkeypatch.setitem(sys.modules, "torchao.quantization.qat", None)
    with pytest.raises(ConfigError, match=r"pip install 'ds-hf\[few-bits\]'"):
        make(0, llama())
