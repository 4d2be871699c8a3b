"""How a Trainer is told to train: every logged loss, gradient norm and learning rate as without DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

from ds_hf.errors import ConfigError
from tests.compat.common import WORLD, run_user_code
from tests.compat.trainer_code import (
    STAGES,
    assert_equal_histories,
    config,
    fit,
    histories,
    history,
    make_trainer,
    tiny_llama,
)

SHARDED = (2, 3)


def compare(folder: Path, *stages: int, **more: Any) -> list[dict[str, float]]:
    """Run on all ranks, without DeepSpeed and at each stage; returns rank 0's history without DeepSpeed."""
    results = run_user_code(histories, folder, stages or STAGES, more)
    for result in results:
        assert_equal_histories(result)
    return results[0][0]  # type: ignore[no-any-return]


def compare_each(folder: Path, variants: dict[str, dict[str, Any]], *stages: int) -> dict[str, list[dict[str, float]]]:
    """The same for several sets of arguments in one launch."""
    logged = {}
    for results in run_user_code(histories_of_each, folder, stages or STAGES, variants):
        for name, result in results.items():
            print(name)
            assert_equal_histories(result)
            logged[name] = result[0]
    return logged


def histories_of_each(folder: Path, stages: tuple[int, ...], variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: histories(folder, stages, more) for name, more in variants.items()}


# -- accumulation (P27) -------------------------------------------------------------------------------------------


@pytest.mark.feature("Trainer", "gradient accumulation, `num_items_in_batch`, last group shorter, epochs", pain="P27")
def test_accumulation_over_epochs_whose_last_group_is_shorter(tmp_path: Path) -> None:
    # 11 batches of 2 a rank (WORLD 2) in groups of 4: the third group of each epoch has 3 of them.
    samples = 22 * WORLD
    logged = compare(tmp_path, samples=samples, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2)
    assert len(logged) == 6


def accumulated_and_at_once(folder: Path) -> Any:
    more = {"samples": 4 * 8 * WORLD, "train_sampling_strategy": "sequential"}
    together = fit(folder, per_device_train_batch_size=8, **more)
    more |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    return together, {stage: fit(folder, config(stage), **more) for stage in STAGES}


@pytest.mark.slow
@pytest.mark.feature("Trainer", "k accumulated batches equal one of k times the size", pain="P27")
def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    """Though sequences differ in their numbers of labels: the Trainer weights by tokens."""
    for result in run_user_code(accumulated_and_at_once, tmp_path):
        assert_equal_histories(result)
        assert len(result[0]) == 4


class OwnLoss(Trainer):
    """A loss of the user's, which knows nothing of tokens: the Trainer divides it by the accumulated batches."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.float().logsumexp(-1).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`compute_loss` of one's own", pain="P27")
def test_own_loss_divided_by_the_accumulated_batches(tmp_path: Path) -> None:
    compare(tmp_path, *SHARDED, gradient_accumulation_steps=3, trainer_class=OwnLoss, samples=20)


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`average_tokens_across_devices=False`", pain="P27")
@pytest.mark.feature("Trainer", "label smoothing", pain="P27")
@pytest.mark.feature("Trainer", "NEFTune")
def test_tokens_averaged_by_rank_smoothed_labels_and_noise(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "by rank": {"gradient_accumulation_steps": 4, "average_tokens_across_devices": False},
        "smoothed": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
        "noise": {"neftune_noise_alpha": 5.0},
    }
    compare_each(tmp_path, variants, *SHARDED)


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`group_by_length`, `dataloader_drop_last`")
def test_batches_of_one_length_and_the_last_dropped(tmp_path: Path) -> None:
    more = {"train_sampling_strategy": "group_by_length", "dataloader_drop_last": True}
    logged = compare(tmp_path, *SHARDED, samples=13, max_steps=-1, num_train_epochs=2, **more)
    assert len(logged) == 2 * (13 // (2 * WORLD))


# -- forward and backward (P29) -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`gradient_checkpointing`, reentrant and not", pain="P29")
def test_gradient_checkpointing(tmp_path: Path) -> None:
    more = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    variants = {
        str(reentrant): {**more, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        for reentrant in (True, False)
    }
    compare_each(tmp_path, variants)


def tied_twice() -> PreTrainedModel:
    """Embedding and head are one tensor, and so are the two blocks' first projections."""
    model = tiny_llama(tie_word_embeddings=True)
    blocks: Any = model.model.layers
    blocks[1].mlp.gate_proj.weight = blocks[0].mlp.gate_proj.weight
    return model


def histories_of_shared_weights(folder: Path) -> Any:
    def run(deepspeed: dict[str, Any] | None) -> list[dict[str, float]]:
        checkpointing = {"use_reentrant": True}
        return fit(
            folder,
            deepspeed,
            trainer_arguments={"model": tied_twice()},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs=checkpointing,
            **({} if deepspeed else {"ddp_find_unused_parameters": False, "ddp_static_graph": True}),
        )

    return run(None), {stage: run(config(stage)) for stage in STAGES}


@pytest.mark.slow
@pytest.mark.feature("Trainer", "weights used twice, under reentrant checkpointing", pain="P29")
def test_weights_used_twice_are_reduced_once(tmp_path: Path) -> None:
    for result in run_user_code(histories_of_shared_weights, tmp_path):
        assert_equal_histories(result)


# -- counts -------------------------------------------------------------------------------------------------------


def counted(folder: Path) -> Any:
    """Elements of all kinds, operations and tokens, and what the index of a model in several files says."""
    results = []
    shared = config(1, tensor_parallel={"autotp_size": WORLD})
    for name, deepspeed, size in (("plain", None, 2), ("ours", config(3), 2), ("shared", shared, 2 * WORLD)):
        more = {"include_num_input_tokens_seen": "all", "per_device_train_batch_size": size}
        trainer = make_trainer(folder, deepspeed, **more)
        trainer.model.lm_head.requires_grad_(False)
        trainer.train()
        model = trainer.model
        flags = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.args.should_save:
            model.save_pretrained(folder / name, state_dict=state, max_shard_size="40KB")
        torch.distributed.barrier()
        index = json.loads((folder / name / "model.safetensors.index.json").read_text())["metadata"]
        counts = [model.num_parameters(**each) for each in flags]
        trainable = trainer.get_num_trainable_parameters()
        logged = [trainer.state.log_history[-1][name] for name in ("total_flos", "num_input_tokens_seen")]
        results.append((counts, trainable, trainer.state.total_flos, logged, index))
    return results


@pytest.mark.feature("Trainer", "`total_flos`, `num_parameters`, `get_num_trainable_parameters` at stage 3")
def test_released_parameters_are_counted(tmp_path: Path) -> None:
    for plain, ours, shared in run_user_code(counted, tmp_path):
        assert ours == shared == plain
        (every, trains, others), trainable, *_ = ours
        assert trainable == trains == others == every - 128 * 32


# -- gradient norm (P30) ------------------------------------------------------------------------------------------


@pytest.mark.feature("Trainer", "`grad_norm` is the global norm before clipping, at every stage", pain="P30")
@pytest.mark.feature("Trainer", "`max_grad_norm=0`: no clipping, the norm is logged all the same", pain="P30")
def test_logged_norm_is_the_one_before_clipping(tmp_path: Path) -> None:
    logged = compare_each(tmp_path, {"clipped": {"max_grad_norm": 0.1}, "free": {"max_grad_norm": 0.0}})
    assert all(row["grad_norm"] > 0.5 for rows in logged.values() for row in rows)
    assert logged["clipped"][-1]["loss"] != logged["free"][-1]["loss"]


# -- optimizers (P31) and schedules -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`--optim` adamw_torch, sgd, rmsprop, adagrad", pain="P31")
def test_optimizers_of_torch(tmp_path: Path) -> None:
    names = ("adamw_torch", "sgd", "rmsprop", "adagrad")
    compare_each(tmp_path, {name: {"optim": name, "weight_decay": 0.1} for name in names}, *SHARDED)


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`--optim adafactor` with whole states (stage 0)", pain="P31")
def test_adafactor_on_whole_states(tmp_path: Path) -> None:
    compare(tmp_path, 0, optim="adafactor", learning_rate=1e-3)


class Sign(torch.optim.Optimizer):
    """Lion without its second rate: an optimizer that nobody has heard of."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    momentum = state.setdefault("momentum", torch.zeros_like(param))
                    momentum.lerp_(param.grad, 1 - group["beta"])
                    param.add_(momentum.sign(), alpha=-group["lr"])


class Smoothed(torch.optim.Adamax):
    """A subclass of a known rule."""


def histories_of_given_optimizers(folder: Path) -> Any:
    def run(deepspeed: dict[str, Any] | None) -> list[dict[str, float]]:
        logged = []
        for make in (lambda params: Sign(params, lr=1e-3), lambda params: Smoothed(params, lr=2e-3, betas=(0.8, 0.9))):
            model = tiny_llama()
            optimizer = make(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
            logged += fit(folder, deepspeed, trainer_arguments={"model": model, "optimizers": (optimizer, schedule)})
        return logged

    return run(None), {stage: run(config(stage)) for stage in (0, 1, 2)}


@pytest.mark.feature("Trainer", "`optimizers=(optimizer, scheduler)` of one's own", pain="P31")
def test_given_optimizer_and_scheduler(tmp_path: Path) -> None:
    for plain, ours in run_user_code(histories_of_given_optimizers, tmp_path):
        assert_equal_histories((plain, ours))
        assert [row["learning_rate"] for row in plain[:4]] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


class OwnOptimizer(Trainer):
    """As the documentation of transformers has it: ``create_optimizer`` overridden."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            decayed = [p for p in self.model.parameters() if p.dim() > 1]
            rest = [p for p in self.model.parameters() if p.dim() <= 1]
            groups = [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "lr": 1e-2}]
            self.optimizer = torch.optim.NAdam(groups, lr=self.args.learning_rate)
        return self.optimizer


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`create_optimizer` overridden, with parameter groups", pain="P31")
def test_overridden_create_optimizer(tmp_path: Path) -> None:
    compare(tmp_path, trainer_class=OwnOptimizer)


def offloaded(folder: Path) -> Any:
    plain = fit(folder, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9)
    zero = {"offload_optimizer": {"device": "cpu"}}
    ours = {
        (stage, force): fit(
            folder,
            config(stage, zero=zero, zero_force_ds_cpu_optimizer=force),
            weight_decay=0.1,
            adam_beta1=0.8,
            adam_beta2=0.9,
        )
        for stage in SHARDED
        for force in (True, False)
    }
    return plain, ours


@pytest.mark.slow
@pytest.mark.feature("Trainer", "CPU offload, `zero_force_ds_cpu_optimizer` both ways", pain="P31")
def test_offloaded_optimizer_keeps_its_settings(tmp_path: Path) -> None:
    """accelerate passes only the learning rate and the weight decay on; the groups carry betas and eps."""
    for result in run_user_code(offloaded, tmp_path):
        assert_equal_histories(result)


SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"warmup_steps": 1},
    "cosine_with_min_lr": {"warmup_steps": 1, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "reduce_lr_on_plateau": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
    },
}


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`--lr_scheduler_type` cosine, cosine_with_min_lr, reduce_lr_on_plateau", pain="P32")
def test_schedules_of_transformers(tmp_path: Path) -> None:
    variants = {kind: {"lr_scheduler_type": kind, **more} for kind, more in SCHEDULES.items()}
    for logged in compare_each(tmp_path, variants, *SHARDED).values():
        rates = [row["learning_rate"] for row in logged if "loss" in row]
        assert rates[-1] < max(rates)


def rates_of_the_json(folder: Path, stage: int) -> tuple[list[float], list[float]]:
    """A linear schedule of the JSON with everything "auto", and the Trainer's own."""
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    scheduler = {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    deepspeed = config(stage, scheduler=scheduler, optimizer=optimizer)
    ours = fit(folder, deepspeed, warmup_steps=2, max_steps=6)
    plain = fit(folder, lr_scheduler_type="linear", warmup_steps=2, max_steps=6)
    return [row["learning_rate"] for row in ours], [row["learning_rate"] for row in plain]


@pytest.mark.feature("Trainer", "schedule of the JSON file with everything `auto`", pain="P32")
def test_schedule_of_the_json_is_filled_from_the_arguments(tmp_path: Path) -> None:
    """The engine steps it before the Trainer logs, and DeepSpeed's own begins with two steps at the least rate."""
    for ours, plain in run_user_code(rates_of_the_json, tmp_path, 2):
        assert ours == pytest.approx(plain)


def rates_beside_an_optimizer_of_the_json(folder: Path, stage: int) -> list[tuple[list[float], list[float]]]:
    """Schedules of transformers, which the engine steps there: a step's rate, and at ends of epochs the next one's."""
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    found = []
    for more in (
        {"lr_scheduler_type": "cosine", "max_steps": 6, "gradient_accumulation_steps": 2},
        {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
    ):
        files = (config(stage, optimizer=optimizer), None)
        both = [fit(folder, deepspeed, warmup_steps=2, **more) for deepspeed in files]
        found.append(tuple([row["learning_rate"] for row in rows if "loss" in row] for rows in both))
    return found


def test_logged_rates_are_those_of_the_steps(tmp_path: Path) -> None:
    for found in run_user_code(rates_beside_an_optimizer_of_the_json, tmp_path, 2):
        (ours, plain), (by_epoch, plain_by_epoch) = found
        assert ours[0] == 0.0
        assert ours == pytest.approx(plain)
        assert len(by_epoch) == 2
        assert by_epoch == pytest.approx(plain_by_epoch)


def metric_schedule(folder: Path) -> str:
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(ConfigError) as caught:
        fit(folder, config(2, optimizer=optimizer), lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")
    return str(caught.value)


def test_a_schedule_by_metrics_beside_an_optimizer_of_the_json_is_refused(tmp_path: Path) -> None:
    assert all('Remove "optimizer" from the file' in text for text in run_user_code(metric_schedule, tmp_path))


# -- callbacks ----------------------------------------------------------------------------------------------------


class Notes(TrainerCallback):
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("begin")

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("substep")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("before")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("after")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("end")
        if state.global_step == 3:
            control.should_training_stop = True


def noted(folder: Path) -> Any:
    results = []
    for deepspeed in (None, config(3)):
        notes = Notes()
        callbacks = {"callbacks": [notes]}
        trainer = make_trainer(folder, deepspeed, gradient_accumulation_steps=2, trainer_arguments=callbacks)
        trainer.train()
        results.append((notes.events, len(history(trainer))))
    return results


@pytest.mark.slow
@pytest.mark.feature("Trainer", "callbacks, and stopping by one")
def test_callbacks_come_in_the_same_order(tmp_path: Path) -> None:
    for plain, ours in run_user_code(noted, tmp_path):
        assert ours == plain
        assert plain == (["begin", "substep", "before", "after", "end"] * 3, 3)
