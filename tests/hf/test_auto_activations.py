"""``--deepspeed auto`` and activations: the order of what is looked at, and what ends up in a real Trainer."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import ParallelismConfig
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ds_hf.hf import auto, auto_activations
from ds_hf.hf.auto_activations import FILL, KEPT, OFFLOADED, RECOMPUTED, ActivationChoice, Lengths, fit
from ds_hf.memory import Predictor, Workload
from tests.helpers.distributed import run_distributed

LENGTH = 128


def model_of(layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))


def found(room: int, smallest: str = "zero0", *, model: Any = None, **more: Any) -> ActivationChoice:
    settings = {"processes": 4, "dtype": "bfloat16", "accumulates": False, "offload": True, "recomputed": False}
    return fit(model or model_of(), smallest, Workload(8, LENGTH), room=room, **{**settings, **more})


def test_what_is_cheap_is_looked_at_first() -> None:
    nothing = found(0)
    assert not nothing.fits
    plain = [(name, kind) for kind in (KEPT, RECOMPUTED, OFFLOADED) for name in ("zero0", "zero1", "zero2", "zero3")]
    moved = [(name, kind) for kind in (KEPT, RECOMPUTED, OFFLOADED) for name in ("zero2-offload", "zero3-offload")]
    assert list(nothing.needs) == plain + moved
    assert (nothing.preset, nothing.activations) == min(nothing.needs, key=nothing.needs.__getitem__)
    assert nothing.needs["zero0", RECOMPUTED] < nothing.needs["zero0", KEPT] - 2**19


def test_the_first_that_fits() -> None:
    needs = found(0).needs
    for room in sorted(needs.values())[::6]:
        choice = found(int(room / FILL) + 1)
        first = next(way for way, need in needs.items() if need <= room)
        assert (choice.preset, choice.activations, choice.fits) == (*first, True)


def test_from_the_stage_that_was_chosen_on_and_no_less_than_the_user_asked_for() -> None:
    assert {name for name, _ in found(0, "zero3", offload=False).needs} == {"zero3"}
    assert {kind for _, kind in found(0, recomputed=True, offload=False).needs} == {RECOMPUTED}
    assert {kind for _, kind in found(0, offload=False).needs} == {KEPT, RECOMPUTED}


@pytest.mark.parametrize(("sizes", "config"), [
    ({"sp_size": 2, "sp_backend": "deepspeed"}, {"sequence_parallel_size": 2}),
    ({"tp_size": 2}, {"tensor_parallel": {"autotp_size": 2}}),
])  # fmt: skip
def test_a_process_has_its_part_of_shared_sequences_and_layers(
    sizes: dict[str, Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for what ``ds-hf memory`` predicts of the part, where the whole had to be computed again."""
    model, said = model_of(), list[str]()
    file = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, **config}
    predictor = Predictor(model, Workload(8, LENGTH))
    need = predictor.predict(file, world_size=2, device_memory=2**40).device_peak
    monkeypatch.setattr(auto_activations, "_room", lambda model: int(need / FILL) + 1)
    monkeypatch.setattr(auto_activations, "say", said.append)
    monkeypatch.setattr(auto_activations.process_group, "is_initialized", lambda: True)
    monkeypatch.setattr(auto_activations.process_group, "get_world_size", lambda: 2)
    plugin = SimpleNamespace(ds_hf_choice=SimpleNamespace(preset="zero0"), hf_ds_config=SimpleNamespace(config={}))
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}
    arguments = SimpleNamespace(
        deepspeed_plugin=plugin, bf16=False, fp16=False, **settings, parallelism_config=ParallelismConfig(**sizes)
    )
    trainer = SimpleNamespace(model=model, args=arguments)
    assert auto_activations.settle_activations(trainer, Lengths(1, 1, LENGTH - 1 if "sp_size" in sizes else LENGTH), "")
    assert said[0].startswith(f"activations of 8 x {LENGTH} tokens are kept: the first that fits (predicted on the ")
    assert "zero0 kept" in said[0]


def test_a_model_that_cannot_be_checkpointed() -> None:
    model = model_of(1)
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        assert {kind for _, kind in found(0, model=model).needs} == {KEPT}
    finally:
        type(model).supports_gradient_checkpointing = before


class Samples(Dataset[Any]):
    """Lengths from 65 to 128, and one that is drawn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.random()
        ids = torch.randint(0, 128, (LENGTH,))[: 65 + index]
        ids = torch.cat([ids, torch.zeros(LENGTH - len(ids), dtype=torch.long)]) if index % 2 else ids
        return {"input_ids": ids, "labels": ids}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Equal()[index] for index in range(len(Equal())))


def test_the_longest_sample_is_found_and_nothing_is_drawn() -> None:
    torch.manual_seed(3)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    lengths = [65 + index if index % 2 == 0 else LENGTH for index in range(64)]
    assert auto_activations.lengths_of(Samples())[0] == Lengths(65, sum(lengths) // 64, LENGTH)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    for nothing in (Stream(), None, [], [{"pixel_values": torch.zeros(3)}], [(torch.zeros(3),)], [{"input_ids": None}]):
        assert auto_activations.lengths_of(nothing)[0] is None


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: [ids], np.array])
def test_ids_of_any_kind_have_their_last_dimension_as_length(kind: Callable[[list[int]], Any]) -> None:
    samples = [{"input_ids": kind(list(range(length)))} for length in (3, 17, 5)]
    assert auto_activations.lengths_of(samples)[0] == Lengths(3, 8, 17)


class Broken(Dataset[Any]):
    """On the first process a sample cannot be read, which training never asks for."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        random.random()
        if index == 5 and torch.distributed.get_rank() == 0:
            raise OSError("no such picture")
        return {"input_ids": torch.zeros(LENGTH)}


def looked_at_broken() -> tuple[tuple[Lengths | None, str], bool]:
    random.seed(3)
    state = random.getstate()
    return auto_activations.lengths_of(Broken()), state == random.getstate()


def test_a_sample_that_cannot_be_read_ends_the_look_on_all_processes() -> None:
    first, second = run_distributed(looked_at_broken, 2, timeout=30)
    assert first == ((None, "sample 5 of the data set cannot be read (OSError: no such picture)"), True)
    assert second == ((None, "another process knows no length of its samples"), True)


class Equal(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trained_each(folder: str, cases: list[Any]) -> list[dict[str, Any]]:
    from accelerate.state import AcceleratorState

    found = []
    for case in cases:
        AcceleratorState._reset_state(True)
        found.append(trained(folder, *case))
    return found


def trained(folder: str, ways: list[tuple[str, str]] | None, stream: bool = False) -> dict[str, Any]:
    """Losses of four steps of a Trainer; with ``ways`` by "auto" that finds no room but for the last of them."""
    said: list[str] = []
    if ways is not None:
        sys.argv = ["train.py"]
        auto.free_device_memory = lambda: auto.Memory(2**40, 2**40)
        auto_activations.say = said.append
        auto_activations.fit = lambda *args, **more: ActivationChoice(*ways[-1], True, dict.fromkeys(ways, 1))
    arguments = TrainingArguments(
        folder, report_to="none", max_steps=4, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
        seed=1, use_cpu=ways is None, deepspeed=None if ways is None else "auto",
    )  # fmt: skip
    trainer = Trainer(model_of(3), arguments, train_dataset=Stream() if stream else Equal())
    trainer.train()
    engine = trainer.model_wrapped
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "checkpointing": trainer.args.gradient_checkpointing,
        "stage": getattr(getattr(engine, "plan", None), "stage", None)
        if ways is None
        else engine.zero_optimization_stage(),
        "host": ways is not None and engine.settings.activation_checkpointing.cpu_checkpointing,
        "said": said,
    }


def test_a_trainer_trains_as_without(tmp_path: Path) -> None:
    ways = [
        (0, [("zero0", KEPT)]),
        (0, [("zero0", KEPT), ("zero0", RECOMPUTED)]),
        (2, [("zero0", KEPT), ("zero2", OFFLOADED)]),
    ]
    cases = [(None,), *((way,) for _, way in ways), ([("zero0", KEPT)], True)]
    ((plain, *found, streamed),) = run_distributed(trained_each, 1, str(tmp_path), cases)
    for (stage, way), ours in zip(ways, found, strict=True):
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)  # logged in four places
        assert ours["stage"] == stage
        assert ours["checkpointing"] == (way[-1][1] != KEPT)
        assert ours["host"] == (way[-1][1] == OFFLOADED)
        (line,) = ours["said"]
        assert line.startswith(f"activations of 2 x {LENGTH} tokens are {way[-1][1]}")
    reason = "the data set is a stream, or there is none"
    assert streamed["said"] == [f"activations are not looked at: {reason}"]
