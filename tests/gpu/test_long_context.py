"""Activations in host memory, tiles and chunked losses on a CUDA device: the same numbers, and what is allocated."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf import initialize
from ds_hf.engine.modules.activations.attach import BlockOffload
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, HIDDEN, LENGTH, VOCAB = 12, 1024, 8192, 65536
INPUT_NBYTES = LENGTH * HIDDEN * 2


def llama(device: torch.device) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        return LlamaForCausalLM(config).train()


def run(stage: int, dtype: str | None, own: dict[str, Any], reentrant: bool = False, steps: int = 4) -> dict[str, Any]:
    """Losses and norms; bytes allocated after forward, at the peak, and left over; the time of a step."""
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated()
    model = llama(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "ds_hf": own,
    }
    if dtype is not None:
        config[dtype] = {"enabled": True}
    engine, *_ = initialize(model=model, config=config)
    numbers, times, forwards = [], [], []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (1, LENGTH), generator=generator).to(device)
        engine._finish_update()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        resting = torch.cuda.memory_allocated()
        loss = engine(input_ids=ids, labels=ids).loss
        forwards.append(torch.cuda.memory_allocated() - resting)
        engine.backward(loss)
        engine.step()
        engine._finish_update()
        end.record()
        numbers += [loss.item(), float(engine.get_global_grad_norm())]
        del loss
        end.synchronize()
        times.append(start.elapsed_time(end))
    moved = [handle.offload.kept_nbytes for handle in engine.hooks.handles if isinstance(handle, BlockOffload)]
    found = {
        "numbers": numbers,
        "forward": forwards[-1],
        "peak": torch.cuda.max_memory_allocated() - resting,
        "ms": min(times[1:] or times),
        "moved": sum(moved),
    }
    engine.destroy()
    del engine, model
    gc.collect()
    found["left"] = torch.cuda.memory_allocated() - before
    torch.cuda.empty_cache()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload_activations": True},
    "tiles": {"tiled_mlp": 4},
    "loss": {"chunked_loss": True},
    "all": {"offload_activations": True, "tiled_mlp": 4, "chunked_loss": True},
}


def all_ways(stage: int, dtype: str | None) -> dict[str, Any]:
    run(stage, dtype, {}, steps=1)  # what libraries allocate once
    return {name: run(stage, dtype, own) for name, own in WAYS.items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (2, "bf16"), (3, "bf16"), (3, None)], ids=str)
def test_numbers_and_memory(stage: int, dtype: str | None, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    for found in run_distributed(all_ways, world, stage, dtype, timeout=200, backend="nccl"):
        plain = found["plain"]
        for name, ours in found.items():
            print(stage, dtype, name, {key: value for key, value in ours.items() if key != "numbers"})
        for name, ours in found.items():
            # Tiles are other sums, and attention on GPUs adds up its gradients in any order: last bits differ.
            assert ours["numbers"] == pytest.approx(plain["numbers"], rel=5e-3 if dtype else 2e-5), name
            if name == "offload":
                assert ours["numbers"][0] == plain["numbers"][0]
            assert ours["left"] <= plain["left"] + (1 << 20), name
        width = 2 if dtype else 4
        held = (LAYERS - 1) * INPUT_NBYTES * width // 2
        flying = max(256 << 20, INPUT_NBYTES)  # inputs on their way down that may be alive
        assert found["offload"]["moved"] == 4 * LAYERS * INPUT_NBYTES * width // 2
        assert plain["forward"] - found["offload"]["forward"] >= 0.98 * held - flying
        assert found["offload"]["peak"] <= plain["peak"] + INPUT_NBYTES * width
        logits = LENGTH * VOCAB * 4
        assert plain["peak"] - found["loss"]["peak"] >= 1.5 * logits
        assert found["all"]["peak"] <= found["loss"]["peak"] + INPUT_NBYTES * width


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds_of_checkpoint(reentrant: bool) -> None:
    (found,) = run_distributed(
        both_kinds, 1, reentrant, timeout=120, backend="nccl", env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    )
    assert found["offload"]["numbers"] == found["plain"]["numbers"]


def both_kinds(reentrant: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # what attention sums in any order moves the last losses by 0.2 %
    return {name: run(2, "bf16", WAYS[name], reentrant) for name in ("plain", "offload")}


def tiny_flight() -> dict[str, Any]:
    """With one input in flight memory after forward is that of one input, to 2 %."""
    from ds_hf.engine.modules.activations import offload as room

    room._IN_FLIGHT_NBYTES = 0
    usual = room.ActivationOffload.__init__.__kwdefaults__
    room.ActivationOffload.__init__.__kwdefaults__ = {**usual, "in_flight_nbytes": 0}  # type: ignore[dict-item]
    return {name: run(2, "bf16", {"chunked_loss": True, **WAYS[name]}) for name in ("plain", "offload")}


def test_memory_after_forward() -> None:
    (found,) = run_distributed(tiny_flight, 1, timeout=120, backend="nccl")
    held = (LAYERS - 1) * INPUT_NBYTES
    assert abs(found["plain"]["forward"] - found["offload"]["forward"] - held) <= 0.02 * held
    assert found["offload"]["numbers"] == pytest.approx(found["plain"]["numbers"], rel=2e-3)
