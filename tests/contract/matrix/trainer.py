"""The training of ``plain.py`` by the Trainer; a second model is trained by a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.contract.matrix import plain
from tests.contract.matrix.cells import Cell
from tests.contract.matrix.clients import (
    MICRO,
    Numbers,
    Part,
    Rows,
    config,
    forget,
    generating,
    models_of,
    optimizer,
    parallelism,
    pipeline_of,
    step_all,
    weights_of,
)

__all__ = ["by_trainer"]


def by_trainer(cell: Cell, folder: Path) -> list[Numbers]:
    """The Trainer; a second model is trained by a callback, after each of its steps."""
    resumes = cell.event == "resume"
    trainer, beside = _trainer(cell, folder, False, plain.MIDDLE if resumes else plain.STEPS)
    trainer.train()
    if resumes:
        before = beside
        for part in before.parts:
            part.engine.save_checkpoint(folder / "beside")
            part.engine.destroy()
        trainer.accelerator.free_memory()
        trainer, beside = _trainer(cell, folder, True, plain.STEPS)
        for part, old in zip(beside.parts, before.parts, strict=True):
            part.engine.load_checkpoint(folder / "beside")
            part.losses, part.norms = old.losses, old.norms
        trainer.train(resume_from_checkpoint=True)
    logs = trainer.state.log_history
    found: list[Numbers] = [
        {
            "losses": [row["loss"] for row in logs if "loss" in row],
            "norms": [row["grad_norm"] for row in logs if "loss" in row],
            "evaluated": next((row["eval_loss"] for row in logs if "eval_loss" in row), None),
            "generated": beside.generated,
            **weights_of(cell, trainer.model_wrapped, folder / "last0"),
        }
    ]
    found += [part.numbers(folder / "last1") for part in beside.parts]
    for part in beside.parts:
        part.engine.destroy()
    trainer.accelerator.free_memory()
    return found


def _trainer(cell: Cell, folder: Path, resumed: bool, steps: int) -> tuple[Any, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ds_hf import initialize

    forget()
    stages = cell.stages(resumed)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    file = {**config(cell, stages[0]), **auto}
    if stages[0] == 3:
        file["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    more: dict[str, Any] = {} if cell.precision == "fp32" else {cell.precision: True}
    if cell.event == "evaluate":
        more |= {"eval_strategy": "steps", "eval_steps": plain.MIDDLE, "per_device_eval_batch_size": MICRO}
    adam = plain.ADAMW
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        deepspeed=file,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=cell.accumulation,
        max_grad_norm=plain.CLIP if cell.clip else 0.0,
        learning_rate=adam["lr"],
        adam_epsilon=adam["eps"],
        weight_decay=plain.DECAY,
        lr_scheduler_type="constant",
        max_steps=steps,
        train_sampling_strategy="sequential",
        save_strategy="steps" if cell.event == "resume" else "no",
        save_steps=plain.MIDDLE,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        **more,
        **parallelism(cell),
    )
    models = [pipeline_of(cell, model) for model in models_of(cell)]

    class Beside(TrainerCallback):
        """The second model and its engine, and what happens in the middle."""

        generated: Tensor | None = None
        parts: list[Part]

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == plain.MIDDLE:
                plain.unfreeze(model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            step = state.global_step - 1
            if step + 1 == plain.MIDDLE and cell.event == "generate":
                self.generated = model.generate(**generating())
            for part in self.parts:
                ids, labels = plain.data(cell.data, cell.accumulation)
                step_all([part], ids[step], labels[step])
                if step + 1 == plain.MIDDLE and cell.event == "evaluate":
                    part.evaluate()
                elif step + 1 == plain.MIDDLE and cell.event == "generate":
                    part.generate()

    beside = Beside()
    rows = Rows(*plain.data(cell.data, cell.accumulation), sharing=cell.sharing)
    held_out = Rows(*plain.held_out(cell.data))  # whole sequences for each process
    # the Trainer's own optimizer lists what trains when it is made
    given = (optimizer(plain.groups(models[0])), None) if cell.model == "unfrozen" else (None, None)
    trainer = Trainer(models[0], args, train_dataset=rows, eval_dataset=held_out, optimizers=given, callbacks=[beside])
    beside.parts = []
    for model in models[1:]:
        second = config(cell, stages[1]) | ({"sequence_parallel_size": 2} if cell.mesh == "sp2" else {})
        engine, *_ = initialize(model=model, optimizer=optimizer, model_parameters=plain.groups(model), config=second)
        beside.parts.append(Part(cell, engine))
    return trainer, beside
