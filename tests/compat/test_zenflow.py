"""ZenFlow as users ask for it: keys of the file, the Trainer unmodified, a run that is resumed within an interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ds_hf.checkpoint.formats import open_source
from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import config, history, make_trainer

STEPS, SAVED = 9, 5
SECTION = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 20,
    "update_interval": 3,
    "overlap_step": True,
    "full_warm_up_rounds": 2,
}


def file_of(stage: int, section: dict[str, Any] | None) -> dict[str, Any]:
    return config(stage, zero={"offload_optimizer": {"device": "cpu"}, "zenflow": section})


def trained(folder: Path, stage: int, section: dict[str, Any] | None, resume: bool = False) -> list[dict[str, float]]:
    trainer = make_trainer(
        folder,
        file_of(stage, section),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVED,
        gradient_accumulation_steps=2,
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    store = trainer.deepspeed.optimizer.store
    assert not section or not (store._running or any(waiting.steps for waiting in store._put_off.values()))
    return history(trainer)


def best(folder: Path, file: dict[str, Any], weights_alone: bool) -> tuple[float, float, float]:
    """Losses that the best checkpoint was chosen by and that it has; how far its weights are from its masters."""
    trainer = make_trainer(
        folder,
        file,
        max_steps=4,  # within an interval
        save_strategy="steps",
        save_steps=4,
        save_only_model=weights_alone,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
    )
    trainer.train()
    loss, apart = trainer.evaluate()["eval_loss"], 0.0
    if not weights_alone:
        source, weights = open_source(folder / "checkpoint-4"), load_file(folder / "checkpoint-4/model.safetensors")
        apart = max(
            float((weight.read().view(weight.shape) - weights[weight.name]).abs().max()) for weight in source.weights()
        )
    return trainer.state.best_metric, loss, apart


def best_each(folder: Path) -> list[tuple[float, float, float]]:
    late = {"zero": {"offload_optimizer": {"device": "cpu"}}, "ds_hf": {"offload": {"delayed": True}}}
    cases = [
        (file_of(2, SECTION), False),
        (config(2, **late), False),
        (config(3, **late), True),
    ]
    return [best(folder / str(number), *case) for number, case in enumerate(cases)]


def test_a_checkpoint_is_one_model(tmp_path: Path) -> None:
    """What waits is made before the Trainer evaluates and writes weights, not between these and the engine's files."""
    for rank in run_user_code(best_each, tmp_path, world_size=2):
        for chosen_by, loaded, apart in rank:
            assert abs(loaded - chosen_by) < 1e-6
            assert apart == 0


def trained_each(folder: Path) -> list[Any]:
    found = []
    for stage, section in ((2, SECTION), (3, SECTION), (2, {})):
        whole = trained(folder / f"{stage}-{len(section)}", stage, section)
        found.append((whole, trained(folder / f"{stage}-{len(section)}", stage, section, resume=True)))
    return [*found, trained(folder / "plain", 2, None)]


def test_the_trainer(tmp_path: Path) -> None:
    for rank in run_user_code(trained_each, tmp_path, world_size=2):
        *runs, plain = rank
        for whole, resumed in runs:
            assert len(whole) == len(plain) == STEPS
            assert largest_difference(resumed[SAVED:], whole[SAVED:]) < 1e-4
        assert largest_difference(runs[0][0], runs[1][0]) < 1e-4, "stages 2 and 3"
        assert runs[0][0][:3] == plain[:3], "steps of the warm-up"
        assert largest_difference(runs[0][0], plain) > 1e-3, "something is put off"
