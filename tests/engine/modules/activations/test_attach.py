"""``cpu_checkpointing`` for unmodified models of transformers: found, switched on late, taken away, told."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from ds_hf import initialize
from ds_hf.engine.modules.activations.attach import BlockOffload, Offloading
from ds_hf.engine.zero.gather import GatheredParameters
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import fit
from tests.helpers.distributed import run_distributed

LAYERS, TOKENS, HIDDEN = 4, 16, 32


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **more}))


def engine_of(model: Any, stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        **more,
    }
    return initialize(model=model, config=config)[0]


def attached(engine: Any) -> BlockOffload:
    """The offload of ``engine``, of tensors of any size."""
    (found,) = [handle for handle in engine.hooks.handles if isinstance(handle, BlockOffload)]
    found.offload.least_nbytes, found.offload.in_flight_nbytes = 1, 0
    return found  # type: ignore[no-any-return]


def steps(engine: Any, count: int = 2, **more: Any) -> list[float]:
    """Loss and gradient norm of each step."""
    found = []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(count):
        tokens = torch.randint(0, 128, (2, TOKENS), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens, **more).loss
        engine.backward(loss)
        engine.step()
        found += [float(loss), float(engine.get_global_grad_norm())]
    return found


def both_ways(stage: int) -> dict[str, Any]:
    """Without and with, of either checkpoint, with checkpointing switched on before and after ``initialize``."""
    found: dict[str, Any] = {}
    for reentrant in (False, True):
        for offload in (False, True):
            model = llama()
            enable = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
            if not offload:
                model.gradient_checkpointing_enable(**enable)
            engine = engine_of(model, stage, activation_checkpointing={"cpu_checkpointing": offload})
            if offload:
                model.gradient_checkpointing_enable(**enable)
                kept = attached(engine).offload
            found[f"{reentrant} {offload}"] = steps(engine)
            if offload:
                assert kept.kept_nbytes == 2 * LAYERS * 2 * TOKENS * HIDDEN * 4
                with GatheredParameters(list(model.parameters())):
                    copied = copy.deepcopy(model)
                found["copy"] = type(copied.model.layers[0]._gradient_checkpointing_func).__name__
            engine.destroy()
            assert not isinstance(model.model.layers[0]._gradient_checkpointing_func, Offloading)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_llama_with_two_processes(stage: int) -> None:
    for found in run_distributed(both_ways, 2, stage, timeout=60):
        for reentrant in (False, True):
            assert found[f"{reentrant} True"] == pytest.approx(found[f"{reentrant} False"], rel=1e-6)
        assert found["copy"] == "partial", "a copy of the model moves nothing"


def encoder_and_decoder() -> dict[bool, list[float]]:
    found = {}
    for offload in (False, True):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=128, decoder_start_token_id=0)
        )
        model.gradient_checkpointing_enable()
        engine = engine_of(model, 3, ds_hf={"offload_activations": offload})
        if offload:
            attached(engine)
        torch.manual_seed(7)  # dropout draws the same
        found[offload] = steps(engine)
        engine.destroy()
    return found


def test_an_encoder_whose_states_all_decoder_blocks_read() -> None:
    for found in run_distributed(encoder_and_decoder, 2, timeout=60):
        assert found[True] == pytest.approx(found[False], rel=1e-6)


def compiled_blocks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for offload in (False, True):
        model = llama()
        model.gradient_checkpointing_enable()
        engine = engine_of(model, 2, activation_checkpointing={"cpu_checkpointing": offload})
        engine.compile(backend="aot_eager")
        kept = attached(engine).offload if offload else None
        found[str(offload)] = steps(engine)
        if kept is not None:
            found["kept"] = kept.kept_nbytes
            found["breaks"] = engine.compile_report().breaks
        engine.destroy()
    return found


def test_compiled_blocks() -> None:
    """The checkpoint is inside the graph (outside of it with older transformers): the same is moved."""
    (found,) = run_distributed(compiled_blocks, 1, timeout=100)
    assert found["True"] == pytest.approx(found["False"], rel=1e-6)
    assert found["kept"] == 2 * LAYERS * 2 * TOKENS * HIDDEN * 4
    assert not found["breaks"]


def warned(checkpointing: bool) -> int:
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("ds_hf").addHandler(Handler())
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    engine = engine_of(model, 0, activation_checkpointing={"cpu_checkpointing": True})
    with torch.no_grad():
        engine(input_ids=torch.zeros(1, 4, dtype=torch.long))
    steps(engine, 3)
    return sum("the model checkpoints none" in message for message in messages)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_checkpointing_is_told_once(checkpointing: bool) -> None:
    assert run_distributed(warned, 1, checkpointing, timeout=60) == [0 if checkpointing else 1]


def trainers(folder: str) -> dict[str, Any]:
    """The Trainer with ``gradient_checkpointing=True``, without DeepSpeed and with the key."""
    from ds_hf.engine.modules.activations import offload as room

    small, room.LEAST_NBYTES = room.LEAST_NBYTES, 1
    before = room.ActivationOffload.rounds
    found = {"plain": fit(folder, gradient_checkpointing=True)}
    for stage in (2, 3):
        json = trainer_config(stage, activation_checkpointing={"cpu_checkpointing": True})
        found[str(stage)] = fit(folder, json, gradient_checkpointing=True)
    room.LEAST_NBYTES = small
    return {**found, "rounds": room.ActivationOffload.rounds - before}


def test_trainer(tmp_path: Any) -> None:
    for found in run_user_code(trainers, str(tmp_path)):
        assert found["rounds"] == 2 * 4 * 2, "every block of every step"
        for stage in ("2", "3"):
            for ours, plain in zip(found[stage], found["plain"], strict=True):
                assert ours == pytest.approx(plain, rel=1e-5)
