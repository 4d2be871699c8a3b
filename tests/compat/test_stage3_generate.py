"""Generation and evaluation at stage 3: ranks finish at different lengths, have different numbers of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from tests.compat import stage3_code as code
from tests.compat.common import run_user_code

STAGE3 = "Stage 3 models"
TOLERANCE = 2e-5
# How long each rank generates: rank 1 goes on when rank 0 has finished.
LENGTHS = (3, 11)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams, several": {"num_beams": 4, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 20},
}
if Version(transformers.__version__) >= Version("5.23"):  # before, the mask of a rank that has finished grows on
    WAYS["no cache"] = {"use_cache": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models that generate here."""
    folder = tmp_path_factory.mktemp("families")
    for family in ("llama", "gpt2", "t5", "whisper", "mixtral"):
        code.save_family(family, folder)
    return folder


def generated(model: Any, family: str, device: Any, **way: Any) -> list[list[int]]:
    """What this rank's model says to this rank's prompts."""
    batch = code.on(device, code.batch_of(family, 40 + code.rank()))
    prompt = {name: value for name, value in batch.items() if name != "labels"}
    torch.manual_seed(5)
    settings = {"max_new_tokens": LENGTHS[code.rank()], "pad_token_id": 0, "eos_token_id": 77, **way}
    out: torch.Tensor = model.generate(**prompt, **settings)
    return out.tolist()


def generate_all(folder: Path, alive: bool, families: tuple[str, ...], ways: tuple[str, ...]) -> list[str]:
    """Which outputs are not those of the plain model."""
    import deepspeed

    deepspeed.init_distributed()
    wrong = []
    for family in families:
        model_class = code.classes(family)[1]
        plain = model_class.from_pretrained(folder / family).eval()
        if alive:
            with code.under_stage3() as settings:
                model = model_class.from_pretrained(folder / family)
                wrong += compare(deepspeed.initialize(model=model, config=settings)[0], plain, family, ways)
        else:  # a script without HfDeepSpeedConfig: transformers does not know of stage 3
            model = model_class.from_pretrained(folder / family)
            wrong += compare(deepspeed.initialize(model=model, config=code.config())[0], plain, family, ways)
    return wrong


def compare(engine: Any, plain: Any, family: str, ways: tuple[str, ...]) -> list[str]:
    engine.eval()
    plain.to(engine.device)
    wrong = []
    for way in ways:
        ours = generated(engine.module, family, engine.device, **WAYS[way])
        if ours != generated(plain, family, engine.device, **WAYS[way]):
            wrong.append(f"{family}, {way}")
    engine.destroy()
    return wrong


@pytest.mark.feature(STAGE3, "`generate()`: cache, beams, sampling, ranks that finish at different lengths", pain="P11")
def test_generation_equals_the_plain_model_though_ranks_finish_at_different_lengths(saved: Path) -> None:
    for wrong in run_user_code(generate_all, saved, True, ("llama",), tuple(WAYS)):
        assert wrong == []


@pytest.mark.feature(STAGE3, "`generate()` of a script without `HfDeepSpeedConfig`", pain="P11")
def test_ranks_wait_for_each_other_without_an_hf_deepspeed_config(saved: Path) -> None:
    for wrong in run_user_code(generate_all, saved, False, ("gpt2", "t5"), ("greedy", "beams")):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.feature(STAGE3, "`generate()`: cache, beams, sampling, ranks that finish at different lengths", pain="P11")
def test_every_generating_family_does_so_too(saved: Path) -> None:
    families = ("gpt2", "t5", "whisper", "mixtral")
    for wrong in run_user_code(
        generate_all, saved, True, families, tuple(way for way in ("greedy", "beams", "no cache") if way in WAYS)
    ):
        assert wrong == []


# -- between steps --------------------------------------------------------------------------------------------------


def generate_between_steps(folder: Path) -> tuple[float, bool]:
    """Losses of training with generation between steps, and in evaluation mode, against plain training without."""
    import deepspeed

    deepspeed.init_distributed()
    model_class = code.classes("llama")[1]
    batches = [[code.tokens(10 * step + r) for r in range(code.world())] for step in range(4)]
    plain = model_class.from_pretrained(folder / "llama")
    with code.under_stage3() as settings:
        engine = code.initialize(model_class.from_pretrained(folder / "llama"), settings)
        reference, losses, same = [], [], True
        for step in batches:
            reference += code.train_plain(plain.cpu(), [step], code.hf_loss)
            losses += code.train_engine(engine, [step], code.hf_loss)
            engine.eval()
            ours = generated(engine.module, "llama", engine.device)
            same = same and ours == generated(plain.eval().to(engine.device), "llama", engine.device)
    return code.largest(losses, reference), same


@pytest.mark.feature(STAGE3, "`generate()` between training steps", pain="P11")
def test_generation_between_steps_uses_the_new_weights_and_leaves_training_alone(saved: Path) -> None:
    for error, same in run_user_code(generate_between_steps, saved):
        assert error < TOLERANCE
        assert same


# -- Seq2SeqTrainer -------------------------------------------------------------------------------------------------


class Sums(torch.utils.data.Dataset):
    """Rows of different lengths, an odd number of them."""

    def __init__(self, count: int = 13) -> None:
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
        self.rows = [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": [1] * len(row), "labels": row[: max(1, len(row) // 2)]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    longest = {name: max(len(row[name]) for row in rows) for name in padding}
    return {
        name: torch.tensor([row[name] + [value] * (longest[name] - len(row[name])) for row in rows])
        for name, value in padding.items()
    }


def seq2seq(folder: Path, deepspeed: dict[str, Any] | None) -> dict[str, Any]:
    """Train, evaluate and predict with generation; an odd number of samples, batches of 2 on each rank."""
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from tests.compat.trainer_code import PLAIN_ARGUMENTS, history, start_afresh

    start_afresh()
    place: dict[str, Any] = PLAIN_ARGUMENTS if deepspeed is None else {"deepspeed": deepspeed}
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        learning_rate=5e-3,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **place,
    )
    model = code.classes("t5")[1].from_pretrained(folder / "t5")
    model.generation_config = GenerationConfig(
        max_new_tokens=9, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0, num_beams=2
    )

    def metrics(found: Any) -> dict[str, float]:
        return {
            "rows": float(len(found.predictions)),
            "sum": float((found.predictions * (found.predictions > 0)).sum()),
        }

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Sums(17),
        eval_dataset=Sums(),
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(Sums(7), metric_key_prefix="test")
    kept = {name: value for name, value in evaluated.items() if name in ("eval_loss", "eval_rows", "eval_sum")}
    return {
        "history": [row["loss"] for row in history(trainer) if "loss" in row],
        "predictions": predicted.predictions.tolist(),
        **kept,
    }


def both(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without DeepSpeed and at stage 3."""
    from tests.compat.trainer_code import config

    return seq2seq(folder, None), seq2seq(folder, config(3))


@pytest.mark.slow
@pytest.mark.feature(STAGE3, "`Seq2SeqTrainer(predict_with_generate=True)`, uneven evaluation data", pain="P11 P36")
def test_seq2seq_trainer_predicts_what_it_does_without_deepspeed(saved: Path) -> None:
    for plain, ours in run_user_code(both, saved):
        assert ours["predictions"] == plain["predictions"]
        assert ours["eval_rows"] == plain["eval_rows"] >= 13
        assert ours["eval_sum"] == plain["eval_sum"] > 0
        assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], rel=TOLERANCE)
        assert ours["history"] == pytest.approx(plain["history"], rel=TOLERANCE)


# -- evaluation by hand ---------------------------------------------------------------------------------------------


def evaluate_by_hand(folder: Path) -> float:
    """``accelerator.prepare`` of an odd number of samples, ``gather_for_metrics``: the mean loss of each sample."""
    import os

    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    rows = [code.tokens(seed, rows=1) for seed in range(7)]
    samples = [{name: value[0] for name, value in row.items()} for row in rows]
    plain = code.classes("llama")[1]
    reference = plain.from_pretrained(folder / "llama").eval()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=code.config()))
    model = plain.from_pretrained(folder / "llama")
    loader = DataLoader(samples, batch_size=2)  # type: ignore[arg-type]
    model, _optimizer, loader = accelerator.prepare(model, code.sgd(model), loader)
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            logits = model(input_ids=batch["input_ids"]).logits
            flat = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
            losses.append(accelerator.gather_for_metrics(flat.mean(1)))
    ours = torch.cat(losses).cpu()
    assert len(ours) == len(samples)
    with torch.no_grad():
        theirs = [code.hf_loss(reference.cpu(), row).item() for row in rows]
    return abs(ours.mean().item() - sum(theirs) / len(theirs))


@pytest.mark.feature(STAGE3, "evaluation of an odd number of samples", pain="P36")
def test_evaluation_counts_every_sample_once(saved: Path) -> None:
    assert max(run_user_code(evaluate_by_hand, saved)) < TOLERANCE
