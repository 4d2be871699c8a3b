"""Models changed at stage 3 before training: resized vocabularies, new heads, weights from scratch; and saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.compat import stage3_code as code
from tests.compat.common import run_user_code

STAGE3 = "Stage 3 models"
TOLERANCE = 2e-5
VOCABULARY = 128
RESIZED = ("llama", "llama-tied", "gpt2", "t5", "bert")
# These initialise weights of their children, which older releases of transformers do not gather for them.
OF_CHILDREN = ("distilbert", "wav2vec2", "whisper") if Version(transformers.__version__) >= Version("5.23") else ()
FROM_SCRATCH = ("llama-tied", "mixtral", "resnet", "sew", "vit", *OF_CHILDREN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models that are changed here."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    folder = tmp_path_factory.mktemp("families")
    for family in RESIZED:
        code.save_family(family, folder)
    settings = {**code.SMALL, **code.QUIET, "vocab_size": VOCABULARY}
    torch.manual_seed(1)
    BertModel(BertConfig(**settings)).save_pretrained(folder / "base", max_shard_size="20KB")
    BertForSequenceClassification(BertConfig(**settings, num_labels=3)).save_pretrained(folder / "three")
    return folder


# -- vocabularies ---------------------------------------------------------------------------------------------------


def resize(folder: Path, size: int) -> dict[str, dict[str, Any]]:
    """Each family's vocabulary resized after loading, at stage 3 and without; then trained and saved."""
    import deepspeed

    deepspeed.init_distributed()
    found = {}
    for family in RESIZED:
        model_class = code.classes(family)[1]
        plain = model_class.from_pretrained(folder / family)
        torch.manual_seed(9)
        plain.resize_token_embeddings(size)
        with code.under_stage3() as settings:
            model = model_class.from_pretrained(folder / family)
            torch.manual_seed(9 + code.rank())  # new rows are random: rank 0's are everybody's
            returned = model.resize_token_embeddings(size)
            same_object = returned is model.get_input_embeddings()
            engine = code.initialize(model, settings)
            state = code.whole(model)
            batches = [[code.tokens(10 * step + r, vocab=size) for r in range(code.world())] for step in range(2)]
            plain.load_state_dict({name: value.clone() for name, value in state.items()})
            different = code.different(state, plain.state_dict())
            reference = code.train_plain(plain, batches, code.hf_loss)
            error = code.largest(code.train_engine(engine, batches, code.hf_loss), reference)
            ids = torch.arange(size, device=engine.device)[None]
            embedded = model.get_input_embeddings()(ids)  # called outside of the model's forward
            expected = plain.get_input_embeddings()(ids.cpu())
            engine.save_16bit_model(str(folder / f"{family}-{size}"), "pytorch_model.bin")
            model.config.save_pretrained(folder / f"{family}-{size}")
            trained = code.whole(model)
        again = model_class.from_pretrained(folder / f"{family}-{size}")
        head = model.get_output_embeddings()
        found[family] = {
            "same object": same_object,
            "vocab_size": model.config.vocab_size,
            "different": different,
            "state": {name: value.double().sum().item() for name, value in state.items()},
            "error": error,
            "embedding": (embedded.cpu() - expected).abs().max().item(),
            "tied": head.weight is model.get_input_embeddings().weight,
            "plain tied": plain.get_output_embeddings().weight is plain.get_input_embeddings().weight,
            "reloaded": code.different(
                {k: v for k, v in trained.items() if k in again.state_dict()}, again.state_dict()
            ),
        }
        engine.destroy()
    return found


@pytest.mark.feature(STAGE3, "`resize_token_embeddings`, tied and untied, `get_input_embeddings`", pain="P13 P14")
@pytest.mark.parametrize("size", [VOCABULARY + 9, pytest.param(VOCABULARY - 8, marks=pytest.mark.slow)])
def test_resized_vocabulary_trains_and_saves(saved: Path, size: int) -> None:
    ranks = run_user_code(resize, saved, size)
    for found in ranks:
        for family, facts in found.items():
            assert facts["same object"], family
            assert facts["vocab_size"] == size, family
            assert facts["different"] == facts["reloaded"] == [], family
            assert facts["error"] < TOLERANCE, family
            assert facts["embedding"] < 1e-5, family
            assert facts["tied"] == facts["plain tied"], family
            assert facts["state"] == ranks[0][family]["state"], family  # all ranks have the same weights


def resized_rows(folder: Path, size: int) -> dict[str, float]:
    """Largest difference of the old rows from those of the file; spread of the new rows."""
    import deepspeed

    deepspeed.init_distributed()
    model_class = code.classes("llama")[1]
    old = model_class.from_pretrained(folder / "llama").get_input_embeddings().weight.detach()
    found = {}
    for mean_resizing in (True, False):
        with code.under_stage3():
            model = model_class.from_pretrained(folder / "llama")
            model.resize_token_embeddings(size, mean_resizing=mean_resizing)
            rows = code.whole(model)["model.embed_tokens.weight"]
        found[f"old {mean_resizing}"] = (rows[:VOCABULARY] - old).abs().max().item()
        found[f"new {mean_resizing}"] = rows[VOCABULARY:].std().item()
    return found


@pytest.mark.feature(STAGE3, "`resize_token_embeddings`, tied and untied, `get_input_embeddings`", pain="P13 P14")
def test_old_rows_stay_and_new_rows_are_initialised(saved: Path) -> None:
    for found in run_user_code(resized_rows, saved, VOCABULARY + 300):
        assert found["old True"] == found["old False"] == 0.0
        assert 0.015 < found["new False"] < 0.025  # initializer_range
        assert 0 < found["new True"] < 0.025  # around the mean of the old ones


# -- heads ----------------------------------------------------------------------------------------------------------


def new_heads(folder: Path) -> dict[str, Any]:
    """A classifier from a base model; a head of another size; the missing weights are on every rank the same."""
    import deepspeed
    from transformers import AutoModelForSequenceClassification as Classifier

    deepspeed.init_distributed()
    torch.manual_seed(7 + code.rank())
    base = Classifier.from_pretrained(folder / "base", num_labels=64).state_dict()
    three = Classifier.from_pretrained(folder / "three").state_dict()
    with code.under_stage3():
        from_base = code.whole(Classifier.from_pretrained(folder / "base", num_labels=64))
        five = code.whole(Classifier.from_pretrained(folder / "three", num_labels=5, ignore_mismatched_sizes=True))
        try:
            Classifier.from_pretrained(folder / "three", num_labels=5)
            refused = ""
        except RuntimeError as error:
            refused = str(error)
    head = ("classifier.weight", "classifier.bias")
    return {
        "base": [name for name in base if name not in head and not torch.equal(base[name], from_base[name])],
        "std": from_base["classifier.weight"].std().item(),
        "bias": from_base["classifier.bias"].abs().max().item(),
        "five": [name for name in three if name not in head and not torch.equal(three[name], five[name])],
        "shapes": [tuple(five[name].shape) for name in head],
        "five std": five["classifier.weight"].std().item(),
        "sums": (from_base["classifier.weight"].sum().item(), five["classifier.weight"].sum().item()),
        "refused": refused,
    }


@pytest.mark.feature(
    STAGE3, "new heads, `ignore_mismatched_sizes`: initialised right and the same everywhere", pain="P13"
)
def test_new_heads_are_initialised_and_the_same_on_every_rank(saved: Path) -> None:
    ranks = run_user_code(new_heads, saved)
    for found in ranks:
        assert found["base"] == found["five"] == []
        assert 0.018 < found["std"] < 0.022  # initializer_range 0.02
        assert found["bias"] == 0.0
        assert found["shapes"] == [(5, 32), (5,)]
        assert 0.01 < found["five std"] < 0.03
        assert found["sums"] == ranks[0]["sums"]
        assert "classifier.weight" in found["refused"] or "ignore_mismatched_sizes" in found["refused"]


# -- from scratch, and saving in several files ----------------------------------------------------------------------


def from_scratch() -> dict[str, tuple[float, float, list[str]]]:
    """Sum of all weights; its largest deviation from the statistics of plain initialisation."""
    import deepspeed

    deepspeed.init_distributed()
    found = {}
    for family in FROM_SCRATCH:
        config, model_class, settings = code.classes(family)
        torch.manual_seed(2)
        plain = model_class._from_config(config(**settings)).state_dict()
        torch.manual_seed(2 + code.rank())
        with code.under_stage3():
            state = code.whole(model_class._from_config(config(**settings)))
        wrong = [
            name
            for name, value in plain.items()
            if value.shape != state[name].shape
            or (value.is_floating_point() and not _alike(value.float(), state[name].float()))
        ]
        found[family] = (sum(value.double().abs().sum().item() for value in state.values()), len(plain), wrong)
    return found


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Of the same distribution: constants are equal, the spread of random values nearly."""
    if ours.std(correction=0) == 0:
        return torch.equal(ours, theirs)
    many = ours.numel() >= 256
    return not many or abs(ours.std() - theirs.std()) < 0.25 * ours.std()


@pytest.mark.feature(STAGE3, "`from_config`: initialised right and the same everywhere", pain="P13")
def test_models_from_scratch_are_initialised_and_the_same_on_every_rank() -> None:
    ranks = run_user_code(from_scratch)
    for found in ranks:
        assert {family: facts[2] for family, facts in found.items() if facts[2]} == {}
        assert found == ranks[0]


def save_in_several_files(folder: Path, out: Path) -> list[str]:
    """``save_pretrained`` as accelerate's documentation has it, after a step; loaded again it is the trained model."""
    import os

    from accelerate import Accelerator, DeepSpeedPlugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=code.config()))
    wrong = []
    for family in ("llama-tied", "t5"):
        model_class = code.classes(family)[1]
        loaded = model_class.from_pretrained(folder / family)
        model, optimizer = accelerator.prepare(loaded, code.sgd(loaded))
        before = code.whole(model.module)
        accelerator.backward(code.hf_loss(model, code.on(accelerator.device, code.tokens(code.rank()))))
        optimizer.step()
        trained = code.whole(model.module)
        accelerator.unwrap_model(model).save_pretrained(
            out / family,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
            max_shard_size="20KB",
        )
        accelerator.wait_for_everyone()
        again = code.whole(model_class.from_pretrained(out / family))  # sharded again
        wrong += [f"{family}: {name}" for name in code.different(again, trained)]
        if code.different(before, trained) == []:
            wrong.append(f"{family}: not trained")
        accelerator.free_memory()
    return wrong


@pytest.mark.feature(STAGE3, "`save_pretrained(max_shard_size=...)`, loaded again", pain="P14 P19")
def test_model_saved_in_several_files_is_the_trained_one(saved: Path, tmp_path: Path) -> None:
    for wrong in run_user_code(save_in_several_files, saved, tmp_path):
        assert wrong == []
    for family in ("llama-tied", "t5"):
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 2
        assert (tmp_path / family / "model.safetensors.index.json").exists()


# -- the model on every rank ----------------------------------------------------------------------------------------


def whole_model_everywhere(folder: Path) -> list[str]:
    """What is said when ``from_pretrained`` came before anything of DeepSpeed."""
    import deepspeed

    from ds_hf.engine import builder

    deepspeed.init_distributed()
    said: list[str] = []
    deepspeed.utils.logger.warning = lambda message, *_: said.append(message)
    deepspeed.utils.logger.log = lambda level, message, *values: said.append(message % values)
    model_class = code.classes("llama")[1]
    small = code.initialize(model_class.from_pretrained(folder / "llama"), code.config())
    small.destroy()
    quiet = len([message for message in said if "built the whole model" in message])
    builder.whole_model_advice.__kwdefaults__["worth_saying"] = 1 << 16
    with code.under_stage3() as settings:
        code.initialize(model_class.from_pretrained(folder / "llama"), settings).destroy()
    right = len([message for message in said if "built the whole model" in message])
    code.initialize(model_class.from_pretrained(folder / "llama"), code.config()).destroy()
    return [f"{quiet} {right}", *(message for message in said if "built the whole model" in message)]


@pytest.mark.feature(STAGE3, "a model loaded whole on every rank is named, with its cost and the fix", pain="P15")
def test_a_large_model_on_every_rank_is_named_once_with_the_fix(saved: Path) -> None:
    results = run_user_code(whole_model_everywhere, saved)
    assert [result[0] for result in results] == ["0 0"] * len(results)
    assert [len(result) - 1 for result in results] == [int(len(results) > 1), *([0] * (len(results) - 1))]
    if len(results) > 1:
        assert "TrainingArguments before from_pretrained()" in results[0][1]
        assert f"{len(results)} processes on this host" in results[0][1]
