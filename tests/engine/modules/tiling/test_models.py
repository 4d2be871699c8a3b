"""``tiled_mlp`` and ``chunked_loss`` for unmodified models of transformers."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hf import initialize
from ds_hf.engine.modules.tiling import models as room
from ds_hf.engine.modules.tiling.logits import DeferredLogits
from ds_hf.engine.modules.tiling.models import ChunkedLoss, TiledMlps, chunks_loss, tiles_of
from ds_hf.log import forget_said
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import fit
from tests.helpers.distributed import run_distributed
from tests.helpers.live_bytes import LiveBytes

VOCAB = 128
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 8},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "Phi3": {},
    "GPTNeoX": {},
    "GPT2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 64,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
}


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **more})
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + suffix)(config).train()


def numbers(model: Any, ignored: int = 7, **more: Any) -> list[Tensor]:
    """Loss and all gradients."""
    model.zero_grad()
    ids = torch.randint(1, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[slice(0, 1 if ignored < 24 else 2), :ignored] = -100
    torch.manual_seed(4)
    loss = model(input_ids=ids, labels=labels, **more).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 2e-6 * max(float(b.abs().max()), 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_without(name: str) -> None:
    model = build(name)
    plain, counted = numbers(model), numbers(model, num_items_in_batch=torch.tensor(31))
    names = set(model.state_dict())
    tiles, loss = TiledMlps(model, 4), ChunkedLoss(model)
    assert len(tiles.modules) == 2
    assert len(loss.models) == 1
    close(numbers(model), plain)
    close(numbers(model, num_items_in_batch=torch.tensor(31)), counted)
    assert set(model.state_dict()) == names
    close(numbers(copy.deepcopy(model)), plain)
    pickle.loads(pickle.dumps(model))
    tiles.remove()
    loss.remove()
    close(numbers(model), plain)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert "_loss_function" not in model.__dict__


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_batch_without_labels_has_no_gradients(items: Any) -> None:
    """As torch's: the mean over nothing is NaN, and nothing goes back."""
    model = build("Llama")
    plain = numbers(model, 24, num_items_in_batch=items)
    ChunkedLoss(model)
    for found, wanted in zip(numbers(model, 24, num_items_in_batch=items), plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert all(not found.any() for found in plain[1:])


def test_logits_are_there_for_who_looks() -> None:
    model = build("Llama")
    ids = torch.randint(1, VOCAB, (2, 24))
    plain = model(input_ids=ids, labels=ids).logits
    ChunkedLoss(model)
    logits = model(input_ids=ids, labels=ids).logits
    assert isinstance(logits, DeferredLogits)
    assert logits.shape == plain.shape
    assert logits.made is None
    torch.testing.assert_close(logits.argmax(-1), plain.argmax(-1))
    torch.testing.assert_close(logits * 1, plain)
    (logits[:, -1].sum() * 2).backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        assert type(model(input_ids=ids, labels=ids).logits) is Tensor
    assert type(model(input_ids=ids).logits) is Tensor
    assert type(model.eval()(input_ids=ids, labels=ids).logits) is Tensor


def _hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2)


def _patched(model: Any) -> None:
    usual = model.lm_head.forward
    model.lm_head.forward = lambda x: usual(x) * 2


@pytest.mark.parametrize("change", [_hooked, _patched])
def test_what_is_done_to_the_head_is_seen(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    forget_said()
    model = build("Llama")
    change(model)
    wanted = numbers(model)
    ChunkedLoss(model)
    with caplog.at_level(logging.WARNING):
        close(numbers(model), wanted)
    assert "lm_head has hooks, or another forward" in caplog.text


def test_a_call_that_fails_leaves_the_head() -> None:
    model = build("Llama")
    ChunkedLoss(model)
    with pytest.raises(Exception):  # noqa: B017
        model(input_ids=torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))
    assert isinstance(model.lm_head, nn.Linear)


def test_live_bytes() -> None:
    """Of 512 positions and 4096 words no logits are alive, chunk by chunk of an eighth."""
    from ds_hf.engine.modules.tiling import loss as losses

    peaks = {}
    before = losses._LOGITS_NBYTES, losses._LEAST_ROWS
    ids = torch.randint(1, 4096, (2, 256))
    logits_nbytes = 512 * 4096 * 4
    for chunked in (False, True):
        model = build("Llama", vocab_size=4096, max_position_embeddings=256)
        if chunked:
            losses._LOGITS_NBYTES, losses._LEAST_ROWS = logits_nbytes // 8, 1
            ChunkedLoss(model)
        live = LiveBytes()
        with live:
            model(input_ids=ids, labels=ids).loss.backward()
        gc.collect()
        peaks[chunked] = live.peak
    losses._LOGITS_NBYTES, losses._LEAST_ROWS = before
    assert peaks[False] - peaks[True] >= 2 * logits_nbytes


def test_auto() -> None:
    x = torch.empty(4, 65536, 16)
    assert tiles_of(x[:1], "auto") == 8
    assert tiles_of(x, "auto") == 32
    assert tiles_of(x[:1, :100], "auto") == 1
    assert tiles_of(x[:1, :3], 8) == 3
    assert tiles_of(torch.empty(1, 65536, 16384), "auto") == 4


class Mixer(nn.Module):
    """No MLP and no language model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv1d(1, 1, 3)])


def test_models_without_are_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ds_hf").addHandler(caplog.handler)
    TiledMlps(Mixer(), 2)
    ChunkedLoss(Mixer())
    logging.getLogger("ds_hf").removeHandler(caplog.handler)
    assert "tiled_mlp has no effect: Mixer" in caplog.text
    assert "chunked_loss has no effect: Mixer" in caplog.text


class MixtureMLP(nn.Module):
    """Called as gpt-oss calls its block of experts, which has a linear layer inside once PEFT has been there."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.Bilinear(4, 2, 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(hidden)
        return self.experts(hidden, scores), scores


def test_blocks_of_experts_are_no_mlps() -> None:
    model = nn.Sequential(nn.ModuleList([MixtureMLP()]))
    assert not TiledMlps(model, 2).modules


# -- under ZeRO -----------------------------------------------------------------------------------------------------


def trained(stage: int) -> dict[str, list[float]]:
    """Losses and norms with nothing, with each and with all three; the head is a unit of its own."""
    everything = {"tiled_mlp": 4, "chunked_loss": True, "offload_activations": True}
    ways = {"plain": {}, "tiles": {"tiled_mlp": 4}, "loss": {"chunked_loss": True}, "all": everything}
    found = {}
    for name, own in ways.items():
        model = build("Llama", vocab_size=2**20 // 32)
        if name in ("all", "plain"):
            model.gradient_checkpointing_enable()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "ds_hf": own,
        }
        engine = initialize(model=model, config=config)[0]
        for handle in engine.hooks.handles:
            if hasattr(handle, "offload"):
                handle.offload.least_nbytes = 1
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        found[name] = []
        for _ in range(4):
            ids = torch.randint(1, VOCAB, (2, 24), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found[name].append(loss.item())
        found[name].append(float(engine.get_global_grad_norm()))
        engine.destroy()
        assert "forward" not in model.model.layers[0].mlp.__dict__
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])  # 1 has the gradients of 0 and the updates of 2
def test_under_zero_with_two_processes(stage: int) -> None:
    for found in run_distributed(trained, 2, stage, timeout=80):
        for name, ours in found.items():
            assert ours == pytest.approx(found["plain"], rel=2e-6), name


def trainers(folder: str) -> dict[str, Any]:
    own = {"tiled_mlp": 3, "chunked_loss": True}
    found: dict[str, Any] = {"plain": fit(folder)}
    for stage in (2, 3):
        found[str(stage)] = fit(folder, trainer_config(stage, ds_hf=own), gradient_accumulation_steps=1)
    return found


def test_trainer(tmp_path: Any) -> None:
    for found in run_user_code(trainers, str(tmp_path)):
        for stage in ("2", "3"):
            for ours, plain in zip(found[stage], found["plain"], strict=True):
                assert ours == pytest.approx(plain, rel=1e-5)
    assert room.tiles_of(torch.empty(1, 4, 4), "auto") == 1


def _with_adapters(vocabulary: int, target: str = "q_proj", **options: Any) -> Any:
    import peft

    torch.manual_seed(0)
    model = build("Llama", vocab_size=vocabulary)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target.split("|"), **options))


def test_losses_are_chunked_by_themselves_under_a_frozen_head_that_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LARGE_VOCABULARY", 256)
    cases = [
        (build("Llama", vocab_size=256), False),
        (_with_adapters(255), False),
        (_with_adapters(256), True),
        (_with_adapters(256, modules_to_save=["lm_head"]), False),
    ]
    assert [chunks_loss("auto", model) for model, _ in cases] == [chunked for _, chunked in cases]
    assert chunks_loss(True, cases[0][0])
    assert not chunks_loss(False, cases[2][0])


class _Products(TorchDispatchMode):
    """How many products gave logits of ``words``."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.count = words, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        self.count += packet in (torch.ops.aten.mm, torch.ops.aten.addmm) and found.shape[-1] == self.words
        return found


def _adapted_losses(
    chunked: Any, looks: str = "", stage: int = 0, target: str = "q_proj"
) -> tuple[list[float], list[int], list[bool], str]:
    """Losses, products with the head and whether logits were deferred, of each of five steps; the line."""
    room._LARGE_VOCABULARY = 256
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "ds_hf": {"chunked_loss": chunked},
    }
    model = _with_adapters(256, target)
    engine = initialize(model=model, config=config)[0]
    losses, products, deferred = [], [], []
    for step in range(5):
        ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
        with _Products(256) as counted:
            output = engine(input_ids=ids, labels=ids)
            deferred.append(isinstance(output.logits, DeferredLogits))
            if step >= 1 and (looks == "all" or (looks == "first" and dist.get_rank() == 0)):
                with torch.no_grad():
                    assert (output.logits.argmax(-1) == ids).shape == (2, 16)
            engine.backward(output.loss)
        products.append(counted.count)
        engine.step()
        losses.append(output.loss.item())
        if looks == "evaluation":
            engine.eval()
            with torch.no_grad():
                assert engine(input_ids=ids, labels=ids).logits.sum().isfinite()
            engine.train()
    return losses, products, deferred, str(engine.summary())


def test_an_engine_chunks_the_loss_of_adapters() -> None:
    plain, products, deferred, said = run_distributed(_adapted_losses, 1, False, "", 0, "q_proj|k_proj")[0]
    assert (products, deferred) == ([1] * 5, [False] * 5)
    assert said.endswith(" data, adapters computed together")
    for looks in ("", "evaluation"):
        found, products, deferred, said = run_distributed(_adapted_losses, 1, "auto", looks)[0]
        assert (products, deferred) == ([1] * 5, [True] * 5)
        assert said.endswith(" data, loss in chunks")  # one adapter of a block has none to be computed with
    plain = run_distributed(_adapted_losses, 1, False)[0][0]
    assert found == pytest.approx(plain, abs=1e-5)


def test_who_looks_at_logits_gets_the_models_own_loss_back() -> None:
    """From the step after; a loss that was asked to be chunked stays so."""
    plain = run_distributed(_adapted_losses, 1, False, "all")[0][0]
    found, products, deferred, said = run_distributed(_adapted_losses, 1, "auto", "all")[0]
    assert products == [1, 2, 1, 1, 1]
    assert deferred == [True, True, False, False, False]
    assert found == pytest.approx(plain, abs=1e-5)
    assert said.endswith(" data")
    found, products, deferred, _ = run_distributed(_adapted_losses, 1, True, "all")[0]
    assert (products, deferred) == ([1, 2, 2, 2, 2], [True] * 5)
    assert found == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(("stage", "looks"), [(2, "first"), (3, "all")])
def test_each_process_decides_by_itself(stage: int, looks: str) -> None:
    plain = run_distributed(_adapted_losses, 2, False, "", stage, timeout=60)[0][0]
    for rank, (found, _, deferred, _) in enumerate(
        run_distributed(_adapted_losses, 2, "auto", looks, stage, timeout=60)
    ):
        assert found == pytest.approx(plain, abs=1e-5)
        assert deferred == [True, True, *[looks == "first" and rank == 1] * 3]
