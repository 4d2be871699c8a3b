"""The cheapest way that fits: of the table's rows, and where none does, of what else a user can give up.

"Cheap" is what it costs a training in speed and in quality, in this order: nothing, activations that are computed
twice, adapters in the place of all weights, a base of fewer bits, and at last states in files, unless the user's own
configuration has these. Within each the first row that fits, by what is offloaded and then by stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_hf.memory.adapters import LoraRequest
from ds_hf.memory.prediction import UnpredictableError
from ds_hf.memory.subject import Request, Subject
from ds_hf.memory.table import Machine, Row, offload_rank, rows, sized

__all__ = ["Way", "cheapest_way"]


@dataclass(frozen=True)
class Way:
    """Attributes:
    row: what fits. subject: what it is of.
    options: of ``ds-hf memory``, beyond the user's; arguments: of a script with the Trainer.
    longest: tokens of a sample that fit at the micro-batch asked for; 0 where that is not known.
    """

    row: Row
    subject: Subject
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    longest: int

    @property
    def words(self) -> str:
        """What it is."""
        request, said = self.subject.request, []
        if request.lora is not None:
            base = f" on a base in {request.base_bits} bits" if request.base_bits else ""
            said.append(f"LoRA of rank {request.lora.rank}{base}")
        if request.recomputes:
            said.append("gradient checkpointing")
        said.append(f"stage {self.row.stage}" + ("" if self.row.offload == "-" else f", {self.row.offload}"))
        return ", ".join(said)

    @property
    def file(self) -> dict[str, Any]:
        """The configuration, for the Trainer or a loop that fill in the batch."""
        batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        return {**batch, **self.row.config}


def cheapest_way(
    target: str, arguments: list[str], subject: Subject, table: list[Row], machine: Machine, micro_batch: int | None
) -> Way | None:
    """What fits; ``None`` where nothing does. Another model is built for each further way that is looked at."""
    if (row := _first(table)) is not None:
        return _way(subject, row, (), machine, micro_batch)
    on_disk = _first(table, files=True)
    if target.endswith(".py"):  # its model is its own
        return None if on_disk is None else _way(subject, on_disk, (), machine, micro_batch)
    for request, options in _further(subject.request):
        try:
            other = Subject.of(target, arguments, request)
        except UnpredictableError:  # no PEFT, or nothing to checkpoint
            continue
        found = _first(list(rows(other.predictor, other.config, machine, micro_batch, largest=False)))
        if found is not None:
            return _way(other, sized(other.predictor, found, machine), options, machine, micro_batch)
    return None if on_disk is None else _way(subject, on_disk, (), machine, micro_batch)


def _first(table: list[Row], *, files: bool = False) -> Row | None:
    fitting = (row for row in table if row.fits and (files or row.chosen or "nvme" not in row.offload))
    return min(fitting, key=lambda row: (offload_rank(row.offload), row.stage), default=None)


def _way(subject: Subject, row: Row, options: tuple[str, ...], machine: Machine, micro_batch: int | None) -> Way:
    arguments = _trainer_arguments(row) + (("--gradient_checkpointing",) if subject.request.recomputes else ())
    try:
        longest = subject.predictor.longest_sequence(
            row.config,
            world_size=machine.world_size,
            micro_batch=micro_batch,
            device_memory=machine.device_memory,
            exact=False,
        )
    except UnpredictableError:  # its batches have no tokens
        longest = 0
    return Way(row, subject, options, arguments, longest)


def _trainer_arguments(row: Row) -> tuple[str, ...]:
    """What the Trainer has to be told: it refuses a file that says otherwise, and its own micro-batch is 8."""
    precisions = [name for name in ("bf16", "fp16") if (row.config.get(name) or {}).get("enabled") is True]
    micro = row.prediction.micro_batch if row.prediction is not None else 1
    return (*(f"--{name}" for name in precisions), "--per_device_train_batch_size", str(micro))


def _further(request: Request) -> Iterator[tuple[Request, tuple[str, ...]]]:
    """The user's request with more and more given up."""
    options: tuple[str, ...] = ()
    if request.recomputes is None:
        request, options = replace(request, checkpointing=True), (*options, "--checkpointing")
        yield request, options
    if request.lora is None:
        request, options = replace(request, lora=LoraRequest()), (*options, "--lora", str(LoraRequest()))
        yield request, options
    if request.base_bits is None:
        for bits in (8, 4):
            yield replace(request, base_bits=bits), (*options, "--load-in", f"{bits}bit")
