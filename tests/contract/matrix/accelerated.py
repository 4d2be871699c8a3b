"""The training of ``plain.py`` with accelerate: ``prepare``, and of several models its guide to plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.contract.matrix import plain
from tests.contract.matrix.cells import Cell
from tests.contract.matrix.clients import (
    MICRO,
    Numbers,
    Part,
    Rows,
    config,
    evaluating,
    forget,
    generating,
    mean_over_data,
    models_of,
    optimizer,
    parallelism,
    pipeline_of,
)

__all__ = ["by_accelerate"]


class AcceleratedPart(Part):
    """A model that ``prepare`` gave, with the Accelerator and the optimizer that belong to it."""

    def __init__(self, cell: Cell, accelerator: Any, model: Any, rule: Any) -> None:
        super().__init__(cell, model)
        self.accelerator, self.rule = accelerator, rule
        self.held_out: Any = None  # the first one's loader to evaluate on, which all share

    def of_batch(self, batch: Any) -> Tensor:
        """The guide's loss of parts of a sequence; the model's own of a whole one."""
        if self.cell.mesh != "sp2":
            return self.engine(**batch).loss  # type: ignore[no-any-return]
        from deepspeed.utils import groups

        labels = batch["shift_labels"]
        group = groups._get_sequence_parallel_group()
        logits = self.engine(**batch).logits
        function = self.accelerator.unwrap_model(self.engine).loss_function
        loss = function(logits=logits, labels=None, shift_labels=labels, vocab_size=plain.VOCABULARY)
        if self.cell.copies > 1:  # torch's gather of one of several groups has no backward with gloo
            from ds_hf.engine.parallel.sequence.losses import mean_over_tokens

            return mean_over_tokens(loss, (labels != -100).sum(), self.engine.mesh.axis("sequence"))
        gather = torch.distributed.nn.functional.all_gather
        each, counts = gather(loss, group=group), gather((labels != -100).sum(), group=group)
        total = sum(each[rank] * counts[rank] for rank in range(2) if counts[rank] > 0)
        return total / max(sum(counts), 1)  # type: ignore[no-any-return,type-var,operator]

    def evaluate(self) -> None:
        with evaluating(self.engine):
            found = [float(self.of_batch(batch)) for batch in self.held_out]
        self.evaluated = sum(mean_over_data(self.cell, found)) / len(found)

    def generate(self) -> None:
        self.generated = self.accelerator.unwrap_model(self.engine).generate(**generating())


def by_accelerate(cell: Cell, folder: Path) -> list[Numbers]:
    """``prepare`` and the loop of accelerate's documentation; of several models as its guide to plugins has it."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    def start(resumed: bool) -> tuple[list[AcceleratedPart], Any]:
        held_out: Any = DataLoader(Rows(*plain.held_out(cell.data), sharing=cell.sharing), batch_size=MICRO)
        rows = Rows(*plain.data(cell.data, cell.accumulation), sharing=cell.sharing)
        forget()
        models, stages = models_of(cell), cell.stages(resumed)
        plugins = {
            str(i): DeepSpeedPlugin(hf_ds_config=config(cell, stage))
            for i, (_, stage) in enumerate(zip(models, stages, strict=False))
        }
        given = {"deepspeed_plugins": plugins} if len(models) > 1 else {"deepspeed_plugin": plugins["0"]}
        precision = "no" if cell.precision == "fp32" else cell.precision
        parts, loader = [], DataLoader(rows, batch_size=MICRO)
        for index, model in enumerate(models):
            accelerator = Accelerator(mixed_precision=precision, **given, **(parallelism(cell) if not index else {}))
            if index:
                accelerator.state.select_deepspeed_plugin(str(index))
            given = {}
            model = pipeline_of(cell, model)
            rule = optimizer(plain.groups(model))
            if index == 0:
                model, rule, loader, held_out = accelerator.prepare(model, rule, loader, held_out)
            else:
                model, rule = accelerator.prepare(model, rule)
            parts.append(AcceleratedPart(cell, accelerator, model, rule))
            parts[-1].held_out = held_out
        return parts, loader

    parts, loader = start(False)
    step, losses = 0, [[] for _ in parts]
    batches = iter(loader)
    for index in range(plain.STEPS * cell.accumulation):
        if index == plain.MIDDLE * cell.accumulation:
            if cell.event == "resume":
                parts, batches = _resume(parts, start, folder, index)
            for part in parts:
                if cell.event == "evaluate":
                    part.evaluate()
                elif cell.event == "generate":
                    part.generate()
                plain.unfreeze(part.accelerator.unwrap_model(part.engine))
        batch = next(batches)
        with parts[0].accelerator.accumulate(*[part.engine for part in parts]):
            for part, found in zip(parts, losses, strict=True):
                loss = part.of_batch(batch)
                part.accelerator.backward(loss)
                part.rule.step()
                part.rule.zero_grad()
                found.append(float(loss.detach()))
        if (index + 1) % cell.accumulation == 0:
            step += 1
            for part, found in zip(parts, losses, strict=True):
                part.losses.append(sum(mean_over_data(cell, found)) / len(found))
                part.norms.append(float(part.engine.get_global_grad_norm()))
                found.clear()
    found = [part.numbers(folder / f"last{index}") for index, part in enumerate(parts)]
    for part in parts:
        part.accelerator.free_memory()
    return found


def _resume(parts: list[AcceleratedPart], start: Any, folder: Path, done: int) -> tuple[list[AcceleratedPart], Any]:
    for index, part in enumerate(parts):
        part.accelerator.save_state(str(folder / str(index)))
    for part in parts:
        part.accelerator.free_memory()
    made, loader = start(True)
    for index, (part, old) in enumerate(zip(made, parts, strict=True)):
        part.accelerator.load_state(str(folder / str(index)))
        part.losses, part.norms = old.losses, old.norms
    return made, iter(made[0].accelerator.skip_first_batches(loader, done))
