"""``--resume_from_checkpoint`` that the script does not hand on to ``train()``: told, and told only then."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import Trainer

from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import TOLERANCE, arguments, config, history, tiny_llama
from tests.helpers.logs import Lines


def resumed(folder: str) -> list[tuple[list[dict[str, float]], str]]:
    """History and warnings of a run, and of others that are given its checkpoint of step 2: one whose script does not
    hand it on, one that does, one that looks for the last one itself, and one that found none."""
    last, runs = f"{folder}/run/checkpoint-2", []
    for name, asked, handed in (
        ("run", None, None),
        ("not", last, None),
        ("on", last, last),
        ("run", "True", None),
        ("none", "True", None),
        ("off", "False", None),
    ):
        said = Lines(logging.WARNING)
        logging.getLogger("ds_hf").addHandler(said)
        saves = {"save_strategy": "steps" if name == "run" and asked is None else "no", "save_steps": 2}
        args = arguments(f"{folder}/{name}", config(2), resume_from_checkpoint=asked, **saves)
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=Sentences(60, seed=1))
        trainer.train(resume_from_checkpoint=handed)
        logging.getLogger("ds_hf").removeHandler(said)
        runs.append((history(trainer), " ".join(said.texts)))
    return runs


def test_a_script_that_does_not_hand_it_on_is_told(tmp_path: Path) -> None:
    for rank, runs in enumerate(run_user_code(resumed, str(tmp_path))):
        whole = runs[0][0]
        assert all(largest_difference(found, whole) <= TOLERANCE for found, _ in runs)  # begun anew, but for "on"
        told = ["is not followed: the script calls train() without it" in said for _, said in runs]
        assert told == [False, rank == 0, False, rank == 0, False, False]
