"""``tensor_parallel.autotp_size`` under the Trainer and accelerate: every logged number is that of the Trainer alone on
as many processes as read different samples; what is saved is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaForCausalLM, Seq2SeqTrainer

from tests.compat.common import run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import (
    assert_equal_histories,
    config,
    fit,
    history,
    make_trainer,
    start_afresh,
    tiny_llama,
)
from tests.compression.common import logged

ARGUMENTS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "samples": 34,
    "per_device_eval_batch_size": 4,
}


def settings(stage: int, tensor: int) -> dict[str, Any]:
    return config(stage, tensor_parallel={"autotp_size": tensor})


def alone(folder: str, more: dict[str, Any]) -> list[dict[str, float]]:
    return fit(folder, None, **more)


def shared(folder: str, more: dict[str, Any]) -> list[dict[str, float]]:
    return fit(folder, settings(1, 2), **more)


def runs(folder: str, tensor: int, stages: tuple[int, ...]) -> dict[int, Any]:
    return {stage: fit(f"{folder}/{stage}", settings(stage, tensor), **ARGUMENTS) for stage in stages}


@pytest.mark.parametrize(
    ("data", "stages"), [(1, (1, 3)), pytest.param(2, (0, 1, 2, 3), marks=pytest.mark.slow)], ids=["tp2", "dp2 x tp2"]
)
def test_numbers_are_those_of_the_trainer_alone(data: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    plain = run_user_code(alone, str(tmp_path), ARGUMENTS, world_size=data)[0]
    assert len(plain) > 4
    for found in run_user_code(runs, str(tmp_path), 2, stages, world_size=2 * data):
        assert_equal_histories((plain, found))


def test_each_process_divides_by_items_of_its_own(tmp_path: Path) -> None:
    """transformers divides them by the processes that share layers, over which it has not summed."""
    more = {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}
    plain = run_user_code(alone, str(tmp_path), more, world_size=1)[0]
    for found in run_user_code(shared, str(tmp_path), more, world_size=2):
        assert_equal_histories((plain, {1: found}))


class Drawn(Sentences):
    """Samples of which one word is drawn by the worker that reads them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = super().__getitem__(index)["input_ids"].clone()
        ids[2] = torch.randint(3, 20, ())
        return {"input_ids": ids, "labels": ids}


def drawing(folder: str, tensor: int) -> list[dict[str, float]]:
    given = {"train_dataset": Drawn(16, seed=1)}
    more = {"dataloader_num_workers": 1, "max_steps": 2}
    return fit(folder, settings(1, tensor) if tensor > 1 else None, trainer_arguments=given, **more)


def test_workers_of_processes_that_share_layers_draw_the_same(tmp_path: Path) -> None:
    plain = run_user_code(drawing, str(tmp_path), 1, world_size=1)[0]
    for found in run_user_code(drawing, str(tmp_path), 2, world_size=2):
        assert_equal_histories((plain, {1: found}))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Samples without a length, which the first process reads for all."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = Sentences(count, seed=seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


def streamed(folder: str, size: int, tensor: int, resume: bool) -> list[dict[str, float]]:
    data = {"train_dataset": Stream(40, 1), "eval_dataset": Stream(9 if size == 4 else 8, 2)}
    more = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, "save_strategy": "steps"}
    more |= {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    made = make_trainer(folder, settings(1, 2) if tensor > 1 else None, trainer_arguments=data, **more)
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return history(made)


@pytest.mark.parametrize("data", [1, 2], ids=["tp2", "dp2 x tp2"])
def test_streamed_samples(data: int, tmp_path: Path) -> None:
    """accelerate gives all groups one batch, weighs the last evaluation by copies, and forgets groups when it skips."""
    plain = run_user_code(streamed, f"{tmp_path}/plain", 4 // data, 1, False, world_size=data)[0]
    for resume in (False, True):
        for found in run_user_code(streamed, str(tmp_path), 4 // data, 2, resume, world_size=2 * data):
            assert_equal_histories((plain, {1: found}))


def right_words(prediction: Any) -> dict[str, float]:
    """Of whole logits the share of words that are right, and how sure the model is."""
    logits, labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    sure = logits.softmax(-1).amax(-1).mean()
    return {"right": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()), "sure": float(sure)}


def looking(folder: str, tensor: int, smoothing: float) -> list[Any]:
    """What is logged, and evaluated, by a Trainer that looks at logits in evaluation, and with smoothed labels."""
    deepspeed = settings(1, tensor) if tensor > 1 else None
    more = {**ARGUMENTS, "label_smoothing_factor": smoothing}
    trainer = make_trainer(folder, deepspeed, trainer_arguments={"compute_metrics": right_words}, **more)
    trainer.train()
    scores = trainer.evaluate()
    return [*history(trainer), {key: scores[f"eval_{key}"] for key in ("loss", "right", "sure")}]


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_metrics_of_logits_and_smoothed_labels(smoothing: float, tmp_path: Path) -> None:
    plain = run_user_code(looking, str(tmp_path / "alone"), 1, smoothing, world_size=1)[0]
    for found in run_user_code(looking, str(tmp_path / "shared"), 2, smoothing, world_size=2):
        assert_equal_histories((plain, {1: found}), tolerance=1e-4)  # norms, after AdamW has magnified rounding


def score(prediction: Any) -> dict[str, float]:
    """How many there are, and a number that each token of each counts for."""
    tokens = torch.tensor(prediction.predictions).double()
    return {"samples": len(tokens), "sum": float((tokens * torch.arange(1, tokens.shape[1] + 1)).sum())}


def generating(folder: str, tensor: int) -> tuple[list[Any], Any]:
    deepspeed = settings(1, tensor) if tensor > 1 else None
    model = tiny_llama()
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    more = {**ARGUMENTS, "max_steps": 2, "samples": 8}
    more |= {"predict_with_generate": True, "generation_max_length": 20, "eval_steps": 1}
    given = {"model": model, "compute_metrics": score, "eval_dataset": Sentences(5, seed=2)}
    trainer = make_trainer(folder, deepspeed, trainer_class=Seq2SeqTrainer, trainer_arguments=given, **more)
    trainer.train()
    found = trainer.predict(Sentences(5, seed=3))
    return [entry for entry in trainer.state.log_history if "eval_sum" in entry], found.predictions.tolist()


def test_generated_samples_are_taken_once(tmp_path: Path) -> None:
    """``Seq2SeqTrainer`` gathers what every process has: there were as many copies as processes."""
    evaluated, predicted = run_user_code(generating, str(tmp_path / "alone"), 1, world_size=1)[0]
    for other, found in run_user_code(generating, str(tmp_path / "shared"), 2, world_size=2):
        assert found == predicted
        for ours, theirs in zip(other, evaluated, strict=True):
            for name in ("eval_samples", "eval_sum", "eval_loss"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def saved_and_resumed(folder: str, stage: int) -> tuple[list[Any], list[Any], Any]:
    """Logged over six steps at once, over three and three, and a prediction of the saved model."""
    more = {**ARGUMENTS, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "seed": 5}
    whole = fit(f"{folder}/once", settings(stage, 2), **more)
    first = make_trainer(
        f"{folder}/twice", settings(stage, 2), **{**more, "max_steps": 3, "lr_scheduler_type": "constant"}
    )
    first.train()
    second = make_trainer(f"{folder}/twice", settings(stage, 2), **{**more, "lr_scheduler_type": "constant"})
    second.train(resume_from_checkpoint=True)
    second.save_model(f"{folder}/model")
    return whole, history(second), [tuple(param.shape) for param in second.model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_resume_and_whole_weights(stage: int, tmp_path: Path) -> None:
    more = {**ARGUMENTS, "max_steps": 6, "seed": 5, "lr_scheduler_type": "constant"}
    plain = run_user_code(alone, str(tmp_path), more, world_size=1)[0]
    for _, resumed, _ in run_user_code(saved_and_resumed, str(tmp_path), stage, world_size=2):
        assert_equal_histories((plain[-3:], {stage: resumed[-3:]}))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight.shape == (128, 32)


def accelerated(by_file: bool) -> tuple[list[float], list[int], int]:
    """Losses of a loop with accelerate, the samples that metrics see, and processes that share layers."""
    start_afresh()
    section = {"tensor_parallel": {"autotp_size": 2}} if by_file else {}
    plugin = DeepSpeedPlugin(hf_ds_config=config(1, **section, train_micro_batch_size_per_gpu=2))
    sizes = None if by_file else ParallelismConfig(tp_size=2, dp_shard_size=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=sizes)
    loader = DataLoader(Sentences(10, seed=1), batch_size=2)
    loader = accelerator.prepare(loader)  # before the model
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, seen = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        seen += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
        assert len(accelerator.gather_for_metrics(["a"])) == 2
    whole = accelerator.get_state_dict(model)
    assert not accelerator.is_main_process or whole["lm_head.weight"].shape == (128, 32)
    return losses, seen, model.autotp_size()


@pytest.mark.slow
def test_accelerate_by_the_file_and_by_a_parallelism_config() -> None:
    by_file = run_user_code(accelerated, True, world_size=4)
    by_sizes = run_user_code(accelerated, False, world_size=4)
    assert by_file == by_sizes
    losses, seen, size = by_file[0]
    assert (len(losses), size) == (3, 2)
    assert seen == [int(sample["input_ids"][0]) for sample in Sentences(10, seed=1)]
    assert all(each == by_file[0] for each in by_file)


def told_of_totals(folder: str) -> list[list[str]]:
    """What is told of ``train_batch_size`` where it is "auto", or counts all processes."""
    found = []
    shares = {"parallelism_config": ParallelismConfig(tp_size=2)}
    for given, more in (("auto", shares), (config(1), shares), (settings(1, 2), {})):
        with logged() as lines:
            fit(folder, given, gradient_accumulation_steps=2, max_steps=2, **more)
        found.append([line for line in lines if "train_batch_size" in line])
    start_afresh()
    plugin = DeepSpeedPlugin(hf_ds_config={**config(1), "gradient_clipping": 1.0})
    with logged() as lines:
        loader = DataLoader(Sentences(4, seed=1), batch_size=2)
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Accelerator(deepspeed_plugin=plugin, **shares).prepare(model, optimizer, loader)[0]
    found.append([line for line in lines if "train_batch_size" in line])
    assert engine.train_batch_size() == 2
    with logged() as lines:
        fit(folder, {**settings(1, 2), "train_batch_size": 8}, gradient_accumulation_steps=2, max_steps=2)
    return [*found, [line for line in lines if "train_batch_size" in line]]


def test_a_total_that_nobody_wrote_is_not_told(tmp_path: Path) -> None:
    """transformers and accelerate count processes that read the same when they fill "auto" in."""
    *silent, written = run_user_code(told_of_totals, str(tmp_path), world_size=2)[0]
    assert silent == [[]] * 4
    assert len(written) == 1
    assert "it counts 2 processes, of which 1 read different samples" in written[0]
