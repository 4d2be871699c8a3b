"""The Trainer with divided sequences (``ParallelismConfig(sp_size=)``), against the Trainer alone in one process.

A batch of one process is what the processes of a sequence share, so 2 of them make the steps of one; beside 2-fold data
parallelism, two accumulated micro-batches make the steps of four.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import ParallelismConfig
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from ds_hf.log import logger
from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import config, history, make_trainer, tiny_llama
from tests.helpers.logs import Lines

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes")
SEQUENCE = 2


DATA: dict[str, Any] = {"train_dataset": Sentences(64, seed=1), "eval_dataset": Sentences(17, seed=2)}
EVALUATING: dict[str, Any] = {
    "eval_strategy": "steps",
    "per_device_eval_batch_size": 2,
    "eval_steps": 2,
    "max_steps": 4,
}


def trainer(folder: Path, deepspeed: Mapping[str, Any] | None, **more: Any) -> Trainer:
    if deepspeed is not None and "sequence_parallel_size" not in deepspeed:
        more["parallelism_config"] = ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed")
    return make_trainer(folder, deepspeed, trainer_arguments=DATA, **more)


def logged(folder: Path, deepspeed: Mapping[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    made = trainer(folder, deepspeed, **more)
    made.train()
    return numbers(made)


def numbers(made: Trainer) -> list[dict[str, Any]]:
    """What was logged, and what does not depend on time of the rest."""
    last = made.state.log_history[-1]
    return [
        *history(made),
        {"epoch": made.state.epoch, "flos": last["total_flos"], "train_loss": last["train_loss"]},
        {"tokens": float(made.state.num_input_tokens_seen)},
    ]


def alone(folder: Path, **more: Any) -> list[dict[str, Any]]:
    (found,) = (
        run_user_code(logged, folder, world_size=1, **more)
        if not more
        else run_user_code(logged_with, folder, more, world_size=1)
    )
    return found  # type: ignore[no-any-return]


def logged_with(folder: Path, more: dict[str, Any]) -> list[dict[str, Any]]:
    return logged(folder, **more)


def logged_at(folder: Path, stages: list[int], more: dict[str, Any], **file: Any) -> dict[int, list[dict[str, Any]]]:
    return {stage: logged(folder / str(stage), config(stage, **file), **more) for stage in stages}


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], fewest: int = 5) -> None:
    assert len(found) == len(expected) >= fewest
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        for key, value in wanted.items():
            tolerance = 1e-4 if key == "grad_norm" else 1e-5
            assert math.isclose(row[key], value, rel_tol=tolerance, abs_tol=1e-7), (key, row, wanted)


COUNTING: dict[str, Any] = {**EVALUATING, "include_num_input_tokens_seen": "all"}


def logged_by_each(folder: Path) -> list[list[dict[str, Any]]]:
    """Asked for by a ``ParallelismConfig``, and by the file alone, which may say how many samples a step has."""
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    file = {**config(3), **batch, "sequence_parallel_size": SEQUENCE}
    return [logged(folder / "2", config(2), **COUNTING), logged(folder / "3", file, **COUNTING)]


def test_every_logged_number_of_two_processes(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", **COUNTING)
    for found in run_user_code(logged_by_each, tmp_path):
        for history_ in found:
            assert_same(history_, expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_logged_number_of_every_stage_beside_data_parallelism(tmp_path: Path, checkpointing: bool) -> None:
    more = {**COUNTING, "gradient_checkpointing": checkpointing, "max_steps": 3, "eval_steps": 3}
    expected = alone(tmp_path / "alone", **{**more, "per_device_eval_batch_size": 4}, gradient_accumulation_steps=4)
    more["gradient_accumulation_steps"] = 2
    for found in run_user_code(logged_at, tmp_path, [0, 1, 2, 3], more, world_size=4, timeout=200.0):
        for history_ in found.values():
            assert_same(history_, expected)


# -- what compute_loss does beyond the model's own loss ---------------------------------------------------------------


class LlamaForCausalLM(transformers.LlamaForCausalLM):  # the Trainer goes by the name
    """Divides by the tokens of its batch, whatever the Trainer counts."""

    accepts_loss_kwargs = False


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A ``compute_loss_func`` that shifts labels itself, as users' do."""
    logits, shifted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, shifted, reduction="sum") / num_items_in_batch


EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}


SMALL_GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)


class Unmasked(Sentences):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


def by_each_kind(folder: Path, file: Mapping[str, Any] | None, **more: Any) -> dict[str, list[dict[str, Any]]]:
    """Steps and an evaluation of each kind of loss."""
    config_ = tiny_llama().config.to_dict()
    kinds: dict[str, Any] = {
        "smoothed": (tiny_llama(), {"label_smoothing_factor": 0.2}, {}),
        "function": (tiny_llama(), {}, {"compute_loss_func": summed}),
        "of the batch": (LlamaForCausalLM(tiny_llama().config), {}, {}),
        # whose first labels the Trainer counts, though they are no one's next token
        "no loss_type": (
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL_GPT2)),
            {},
            {"train_dataset": Unmasked(64, seed=1)},
        ),
        "experts": (transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**config_, **EXPERTS})), {}, {}),
    }
    if file is not None:
        more["parallelism_config"] = ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed")
    found = {}
    for kind, (model, settings, given) in kinds.items():
        torch.manual_seed(0)
        for module in model.modules():
            getattr(module, "reset_parameters", lambda: None)()
        given = {**DATA, **given, "model": model}
        made = make_trainer(folder, file, trainer_arguments=given, **more, **settings)
        made.train()
        found[kind] = history(made)
    return found


def kinds_alone(folder: Path, more: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return by_each_kind(folder, None, **more)


def kinds_divided(folder: Path, more: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return by_each_kind(folder, config(1), **more)


@pytest.mark.parametrize("average", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_smoothing_functions_and_accumulation(tmp_path: Path, average: bool) -> None:
    more = {**EVALUATING, "gradient_accumulation_steps": 3, "max_steps": 2, "average_tokens_across_devices": average}
    (expected,) = run_user_code(kinds_alone, tmp_path, more, world_size=1)
    for found in run_user_code(kinds_divided, tmp_path, more):
        for kind, rows in expected.items():
            assert_same(found[kind], rows, fewest=3)


def refused(folder: Path) -> str:
    given = {**DATA, "model": transformers.BertForMaskedLM(transformers.BertConfig(**SMALL_BERT))}
    more = {"parallelism_config": ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed")}
    made = make_trainer(folder, config(1), trainer_arguments=given, **more)
    with pytest.raises(ConfigError) as error:
        made.train()
    return str(error.value)


SMALL_BERT = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_labels_of_the_same_token_are_refused(tmp_path: Path) -> None:
    for told in run_user_code(refused, tmp_path):
        assert "takes the label at each token" in told
        assert "compute_loss_func" in told


# -- evaluation beside data parallelism -------------------------------------------------------------------------------


def evaluated(folder: Path, file: Mapping[str, Any] | None, batch: int) -> dict[str, list[float]]:
    """Evaluation losses of each kind, with answers gathered and without."""
    kinds: dict[str, Any] = {
        "plain": ({}, {}),
        "smoothed": ({"label_smoothing_factor": 0.2}, {}),
        "function": ({}, {"compute_loss_func": summed}),
        "dealt out": ({"accelerator_config": {"dispatch_batches": True}}, {"eval_dataset": Sentences(15, seed=2)}),
        "of each": ({"average_tokens_across_devices": False}, {}),
    }
    more = {} if file is None else {"parallelism_config": ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed")}
    found: dict[str, list[float]] = {}
    for kind, (settings, given) in kinds.items():
        size = batch if kind != "of each" or file is not None else batch // 2
        for gathers in (False, True) if kind == "plain" else (False,):
            given = {**DATA, **given} | (
                {"compute_metrics": lambda told: {"rows": len(told.label_ids)}} if gathers else {}
            )
            made = make_trainer(
                folder, file, trainer_arguments=given, per_device_eval_batch_size=size, max_steps=1, **settings, **more
            )
            metrics = made.evaluate()
            assert metrics.get("eval_rows", 17) == 17
            found.setdefault(kind, []).append(metrics["eval_loss"])
    return found


def test_evaluation_beside_data_parallelism(tmp_path: Path) -> None:
    """Two pairs weigh the tokens of their batches together, as two processes do, and no sample is counted twice."""
    (expected,) = run_user_code(evaluated, tmp_path, None, 4, world_size=1)
    for found in run_user_code(evaluated, tmp_path, config(2), 2, world_size=4):
        for kind, losses in expected.items():
            assert found[kind] == pytest.approx(losses, rel=1e-6), kind


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([Sentences(10, seed=1)[index] for index in range(10)])


def noise_and_batches(folder: Path, data: Any) -> tuple[float, list[str]]:
    """What NEFTune is told, and what is said where batches do not divide."""
    logger.addHandler(lines := Lines())
    made = make_trainer(
        folder,
        config(2),
        trainer_arguments={"train_dataset": data},
        parallelism_config=ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed"),
        neftune_noise_alpha=5.0,
        max_steps=1,
    )
    seen = []

    class Look(TrainerCallback):
        def on_step_begin(self, *args: Any, model: Any, **more: Any) -> None:
            seen.append(model.get_input_embeddings().neftune_noise_alpha)

    made.add_callback(Look())
    made.train()
    logger.removeHandler(lines)
    return seen[0], lines.texts


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (Sentences(10, seed=1), "5 batches, which 2 processes do not share evenly"),
        (Stream(), "Give a stream of a multiple of 4 samples"),
    ],
    ids=["samples", "streamed"],
)
def test_noise_of_whole_sequences_and_batches_that_are_repeated(tmp_path: Path, data: Any, told: str) -> None:
    for rank, (alpha, said) in enumerate(run_user_code(noise_and_batches, tmp_path, data)):
        assert alpha == pytest.approx(5 / math.sqrt(SEQUENCE))
        assert any(told in text for text in said) == (rank == 0)


def trained(folder: Path, stage: int, sequence: int, resume: str | None) -> tuple[list[dict[str, float]], float]:
    """What was logged, and how far what ``save_model`` wrote is from what was trained."""
    more = {} if sequence == 1 else {"parallelism_config": ParallelismConfig(sp_size=sequence, sp_backend="deepspeed")}
    made = make_trainer(folder, config(stage), trainer_arguments=DATA, **SAVING, **more)
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(folder / "model"))
    dist.barrier()
    saved = load_file(folder / "model" / "model.safetensors")
    with GatheredParameters(list(made.model.parameters())):
        differences = [(saved[name] - param.detach()).abs().max() for name, param in made.model.named_parameters()]
    return history(made), float(max(differences))


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 2, 2), (3, 2, 1), (1, 1, 2), (0, 2, 2), (3, 2, 2)]]


@pytest.mark.parametrize(("stage", "before", "after"), SLOW)
def test_resume_with_as_many_processes_and_with_others(tmp_path: Path, stage: int, before: int, after: int) -> None:
    whole = run_user_code(trained, tmp_path, stage, before, None, world_size=before)
    resumed = run_user_code(trained, tmp_path, stage, after, str(tmp_path / "checkpoint-3"), world_size=after)
    for steps, difference in resumed:
        assert len(steps) == 6  # with those before, from the checkpoint
        assert largest_difference(steps, whole[0][0]) < (1e-10 if before == after else 1e-5)
        assert difference == 0.0
    if stage == 2:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert loaded.config._attn_implementation == "sdpa"
        assert "ds_hf" not in (tmp_path / "model" / "config.json").read_text()
