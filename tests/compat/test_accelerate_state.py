"""What an ``Accelerator`` saves, loads, hands out and frees."""

from __future__ import annotations

import gc
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, skip_first_batches
from accelerate.utils import DummyOptim, DummyScheduler, ProjectConfiguration, load_checkpoint_in_model

import ds_hf.engine.checkpoint.background as background
from ds_hf.errors import CheckpointError
from tests.compat.accelerate_user import (
    DEVICE,
    LR,
    MICRO,
    Regressor,
    dataset,
    fresh_start,
    loader,
    loss_of,
    plain_batches,
    train,
)
from tests.compat.common import WORLD, run_user_code
from tests.compat.test_accelerate_prepare import OPTIMIZER, STAGES, WARMUP, config, decay
from tests.helpers.logs import Lines


class Counter:
    """An object of the user's own that goes into every checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def start(stage: int, *, from_file: bool = False, gather: bool = True, **options: Any) -> tuple[Any, ...]:
    """A new Accelerator with everything prepared, as a new process would have it."""
    fresh_start()
    settings = config(stage, **({"optimizer": OPTIMIZER, "scheduler": WARMUP} if from_file else {}))
    settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), **options)
    model = Regressor()
    optimizer: Any
    scheduler: Any
    if from_file:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.0)
        scheduler = DummyScheduler(optimizer, total_num_steps=64 * accelerator.num_processes, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    batches = loader(8 * MICRO * accelerator.num_processes)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, batches))


def save_and_load(folder: str) -> dict[str, Any]:
    """Train, save in the middle of an epoch, train on; then the same from the file, here and in a new set-up."""
    found = {}
    for stage, from_file in ((0, False), (1, True), (2, False), (3, False), (3, True)):
        place = f"{folder}/{stage}{from_file}"
        accelerator, model, optimizer, scheduler, batches = start(stage, from_file=from_file)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        train(accelerator, model, optimizer, scheduler, list(batches)[:3])
        counter.count = 3
        accelerator.save_state(place)
        straight = train(accelerator, model, optimizer, scheduler, skip_first_batches(batches, 3))
        counter.count = 99
        accelerator.load_state(place)
        again = train(accelerator, model, optimizer, scheduler, skip_first_batches(batches, 3))
        kept = counter.count

        accelerator, model, optimizer, scheduler, batches = start(stage, from_file=from_file)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        accelerator.load_state(place)
        anew = train(accelerator, model, optimizer, scheduler, skip_first_batches(batches, 3))
        files = sorted(path.name for path in Path(place).iterdir())
        found[f"{stage} {'file' if from_file else 'code'}"] = (straight, again, anew, kept, counter.count, files)
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "save_state() and load_state(), exact to the bit at every stage", pain="P22")
@pytest.mark.feature("accelerate", "skip_first_batches() and register_for_checkpointing()")
def test_a_loaded_state_goes_on_exactly(tmp_path: Path) -> None:
    found = run_user_code(save_and_load, str(tmp_path))[0]
    assert len(found) == 5
    for name, (straight, again, anew, kept, loaded, files) in found.items():
        assert len(straight) == 5
        assert again == straight, name
        assert anew == straight, name
        assert (kept, loaded) == (3, 3)
        assert {"pytorch_model", "latest", "zero_to_fp32.py", "custom_checkpoint_0.pkl"} <= set(files)
        # the scheduler that the engine steps lies in the engine's checkpoint, the user's own beside it
        assert ("scheduler.bin" in files) == name.endswith("code")


def spoilt(folder: str) -> list[str]:
    """What is raised or told where files beside the engine's are damaged, missing, or of a later save."""
    place, told = Path(folder), Lines(logging.WARNING)
    accelerator, model, optimizer, scheduler, batches = start(2)
    accelerator.register_for_checkpointing(Counter())
    rows = list(batches)
    for name, part in (("first", rows[:2]), ("later", rows[2:4])):
        train(accelerator, model, optimizer, scheduler, part)
        accelerator.save_state(str(place / name))
    accelerator.wait_for_everyone()
    logging.getLogger("ds_hf").addHandler(told)
    found: list[str] = []
    later = (place / "later" / "scheduler.bin").read_bytes()
    for case, file, content in (
        ("damaged", "scheduler.bin", later[: len(later) // 2]), ("missing", "scheduler.bin", None),
        ("own", "custom_checkpoint_0.pkl", b""), ("engine", "pytorch_model", None), ("other", "scheduler.bin", later),
    ):  # fmt: skip
        if accelerator.is_main_process:
            shutil.copytree(place / "first", place / case)
            (place / case / file).rename(place / f"taken from {case}")
            if content is not None:
                (place / case / file).write_bytes(content)
        accelerator.wait_for_everyone()
        told.texts.clear()
        try:
            accelerator.load_state(str(place / case))
            found += told.texts[:1]
        except CheckpointError as error:
            found.append(str(error))
    logging.getLogger("ds_hf").removeHandler(told)
    fresh_start()
    return found


def test_files_beside_the_engines_are_whole_and_of_one_save(tmp_path: Path) -> None:
    for found in run_user_code(spoilt, str(tmp_path)):
        for case, file in (
            ("damaged", "scheduler.bin"),
            ("missing", "scheduler.bin"),
            ("own", "custom_checkpoint_0.pkl"),
            ("engine", "pytorch_model"),
        ):
            assert f"{tmp_path / case} is not resumed from: {tmp_path / case / file}" in found.pop(0)
        assert len(found) <= 1  # rank 0 tells
        assert all(f"{tmp_path / 'other' / 'scheduler.bin'} is at learning rates [" in text for text in found)


def automatic_names(folder: str) -> dict[str, Any]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer, scheduler, batches = start(3, project_config=project)
    object.__setattr__(model.settings.ds_hf.checkpoint, "async_", True)
    write, remove = background.write_part, shutil.rmtree
    places = Path(folder) / "checkpoints"
    removed = []

    def slowly(place: Path, part: Any) -> Any:
        time.sleep(0.3)
        return write(place, part)

    def look(path: str | Path, *args: Any, **kwargs: Any) -> None:
        remove(path, *args, **kwargs)
        if Path(path).parent == places:
            removed.append(sorted(place.parent.parent.name for place in places.glob("*/pytorch_model/manifest.json")))

    background.write_part = slowly
    rows = []
    for batch in list(batches)[:4]:
        rows += train(accelerator, model, optimizer, scheduler, [batch])
        shutil.rmtree = look
        accelerator.save_state()
        shutil.rmtree = remove
    model.wait_for_checkpoint()
    background.write_part = write
    accelerator.wait_for_everyone()
    names = sorted(path.name for path in places.iterdir())
    straight = train(accelerator, model, optimizer, scheduler, list(batches)[4:])
    accelerator.load_state()  # the last one
    again = train(accelerator, model, optimizer, scheduler, list(batches)[4:])
    fresh_start()
    return {"names": names, "removed": removed, "straight": straight, "again": again}


@pytest.mark.feature("accelerate", "automatic checkpoint naming with total_limit")
def test_automatic_checkpoint_naming(tmp_path: Path) -> None:
    found = run_user_code(automatic_names, str(tmp_path))[0]
    assert found["names"] == ["checkpoint_2", "checkpoint_3"]
    assert found["removed"] == [["checkpoint_1"], ["checkpoint_2"]]  # whole while the next one is begun
    assert len(found["straight"]) == 4
    assert found["again"] == found["straight"]


def weights_out(folder: str) -> dict[int, Any]:
    """get_state_dict and save_model after some training."""
    found = {}
    for stage in STAGES:
        accelerator, model, optimizer, scheduler, batches = start(stage)
        original = accelerator.unwrap_model(model)
        train(accelerator, model, optimizer, scheduler, batches)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, f"{folder}/{stage}", max_shard_size="0.3KB")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            files = sorted(path.name for path in Path(f"{folder}/{stage}").iterdir())
            loaded = Regressor(seed=7)
            load_checkpoint_in_model(loaded, f"{folder}/{stage}")
            equal = all(torch.equal(state[name].cpu(), value) for name, value in loaded.state_dict().items())
            own = {name: value.cpu() for name, value in state.items()}
            found[stage] = (own, equal, files, original is model.module, type(original).__name__)
        else:
            found[stage] = sorted(state) if state else state
    fresh_start()
    return found


@pytest.mark.slow
@pytest.mark.feature("accelerate", "get_state_dict(), save_model() and unwrap_model() at every stage", pain="P19")
def test_whole_weights_come_out_at_every_stage(tmp_path: Path) -> None:
    results = run_user_code(weights_out, str(tmp_path))
    reference = results[0][0][0]
    assert sorted(reference) == sorted(Regressor().state_dict())
    for stage in STAGES:
        state, equal, files, same, name = results[0][stage]
        assert equal, stage
        assert same
        assert name == "Regressor"
        assert "model.safetensors.index.json" in files
        assert len(files) >= 3
        for parameter, value in reference.items():
            torch.testing.assert_close(state[parameter], value, rtol=1e-5, atol=1e-6)
    for result in results[1:]:
        assert not result[3]  # gathered to the main process only


def no_gathering(folder: str) -> dict[str, Any]:
    accelerator, model, optimizer, scheduler, batches = start(3, gather=False)
    train(accelerator, model, optimizer, scheduler, list(batches)[:1])
    with pytest.raises(ValueError) as caught:
        accelerator.get_state_dict(model)
    model.save_checkpoint(folder)
    fresh_start()
    return {"said": str(caught.value)}


@pytest.mark.feature("accelerate", "get_state_dict() at stage 3 without gathering on save says what to do", pain="P19")
def test_state_dict_without_gathering_is_refused_and_the_checkpoint_has_it(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    said = run_user_code(no_gathering, str(tmp_path))[0]["said"]
    assert "stage3_gather_16bit_weights_on_model_save" in said
    assert "zero_to_fp32.py" in said
    state = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in Regressor().state_dict().items()
    }


def held() -> int:
    """Bytes of all tensors alive in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def ten_lives(stage: int) -> tuple[list[int], list[float], int]:
    fresh_start()
    gc.freeze()  # what the imported libraries hold is not looked at again
    sizes, losses, hooks = [], [], 0
    for _ in range(11):
        fresh_start()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        raw = Regressor()
        optimizer: Any = torch.optim.AdamW(raw.parameters(), lr=LR, weight_decay=0.0)
        model, optimizer, batches = accelerator.prepare(raw, optimizer, loader(4 * MICRO * accelerator.num_processes))
        rows = train(accelerator, model, optimizer, None, batches)
        losses.append(rows[-1]["loss"])
        model, optimizer, batches = accelerator.free_memory(model, optimizer, batches)
        assert model is None
        assert accelerator.deepspeed_engine_wrapped is None
        hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in raw.modules())
        del raw, rows, accelerator
        sizes.append(held())
    fresh_start()
    return sizes, losses, hooks


@pytest.mark.slow
@pytest.mark.feature("accelerate", "free_memory() ends the engine: ten lives, flat memory", pain="P9")
def test_ten_lives_in_one_process_take_no_more_memory() -> None:
    for stage in (2, 3):
        for sizes, losses, hooks in run_user_code(ten_lives, stage):
            assert len(set(losses)) == 1
            assert hooks == 0
            # the first life may leave caches behind, and a thread of gloo's hold the tensors of a call that has ended
            assert min(sizes[-3:]) <= sizes[1], sizes


def smaller_things() -> dict[str, Any]:
    """no_sync, autocast, backward's keywords, gather_for_metrics, trigger: the rest of what loops use."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        accelerator, model, optimizer, _, batches = start(stage)
        batch = next(iter(batches))
        before = accelerator.get_state_dict(model)
        before = {name: value.clone() for name, value in before.items()} if before else {}
        with accelerator.no_sync(model), accelerator.autocast():
            loss = loss_of(model, batch)
        accelerator.backward(loss, retain_graph=True)
        value = float(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        warned = Lines()
        logging.getLogger("ds_hf").addHandler(warned)
        accelerator.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0 + int(stage))
        logging.getLogger("ds_hf").removeHandler(warned)
        told = [text for text in warned.texts if '"gradient_clipping": ' in text]
        assert len(told) == (int(stage) > 0 and accelerator.is_main_process), (stage, warned.texts)
        after = accelerator.get_state_dict(model) or {}
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        found[str(stage)] = (value, norm, len(moved), optimizer.step_was_skipped)
    # 5 samples on WORLD processes: the padding of the last batch is cut off again
    fresh_start()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    evaluation = loader(5)
    model, optimizer, evaluation = accelerator.prepare(model, optimizer, evaluation)
    model.eval()
    seen = []
    with torch.no_grad():
        for x, y in evaluation:
            predictions, targets = accelerator.gather_for_metrics((model(x), y))
            assert predictions.shape == targets.shape
            seen += targets.tolist()
    found["targets"] = seen
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "no_sync(), autocast(), backward(loss, **kwargs), gather_for_metrics()")
def test_the_smaller_things_of_a_loop() -> None:
    found = run_user_code(smaller_things)[0]
    for stage in STAGES:
        value, norm, moved, skipped = found[str(stage)]
        assert value == pytest.approx(found["0"][0], rel=1e-6)
        assert norm == pytest.approx(found["0"][1], rel=1e-5)
        assert norm > 0
        assert moved == len(Regressor().state_dict())
        assert skipped is False
    assert found["targets"] == pytest.approx(dataset(5).tensors[1].tolist(), rel=1e-6)


def evaluation_only() -> dict[int, Any]:
    """A model without optimizer."""
    found = {}
    for stage in STAGES:
        fresh_start()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        raw = Regressor()
        model, batches = accelerator.prepare(raw, loader(4 * MICRO * accelerator.num_processes))
        model.eval()
        held_here = sum(parameter.numel() for parameter in raw.parameters())
        with torch.no_grad():
            losses = [float(accelerator.gather(loss_of(model, batch).reshape(1)).mean()) for batch in batches]
        found[stage] = (losses, held_here, model.optimizer is None)
        accelerator.free_memory()
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "prepare() of a model alone, to evaluate, at every stage", pain="P36")
def test_evaluation_without_an_optimizer() -> None:
    found = run_user_code(evaluation_only)[0]
    model = Regressor().to(DEVICE)
    with torch.no_grad():
        expected = [loss_of(model, batch).item() for batch in plain_batches(WORLD, 4 * MICRO * WORLD)]
    whole = sum(parameter.numel() for parameter in model.parameters())
    for stage in STAGES:
        losses, held_here, no_optimizer = found[stage]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert held_here == (0 if stage == 3 else whole)
        assert no_optimizer


def skipped_step() -> list[tuple[bool, float, bool]]:
    """fp16: an infinite gradient, then ordinary ones."""
    fresh_start()
    settings = config(2)
    settings["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    accelerator = Accelerator(mixed_precision="fp16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    raw = Regressor()
    adam: Any = torch.optim.AdamW(raw.parameters(), lr=LR)
    model, optimizer, batches = accelerator.prepare(raw, adam, loader(3 * MICRO * accelerator.num_processes))
    rows = []
    for index, batch in enumerate(batches):
        before = model.module.head.weight.detach().clone()
        accelerator.backward(loss_of(model, batch) * (float("inf") if index == 0 else 1.0))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        moved = not torch.equal(before, model.module.head.weight)
        rows.append((accelerator.optimizer_step_was_skipped, norm, moved))
    fresh_start()
    return rows


@pytest.mark.feature("accelerate", "optimizer_step_was_skipped and the norm of a skipped fp16 step", pain="P24 P30")
def test_a_skipped_step_is_reported() -> None:
    first, second, third = run_user_code(skipped_step)[0]
    assert first == (True, float("inf"), False)
    for skipped, norm, moved in (second, third):
        assert not skipped
        assert 0 < norm < 100
        assert moved
