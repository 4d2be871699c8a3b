"""The factors of the matrix, a line for each combination, what is refused, and arrays that cover every pair.

Invariant: ``refusal`` alone says which combinations cannot be; each of its sentences is one that a user gets to read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

__all__ = ["FACTORS", "Cell", "covering", "pairs_of", "refusal"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "client": ("trainer", "accelerate", "engine", "raw"),  # raw: an own loop with loss.backward()
    "accumulation": (1, 3),
    # unfrozen: frozen in the first half; two: engines of separate models; activation, encoder: of models that share
    # one, the encoder being frozen; experts: all of which every token goes to, so that rounding chooses no other ones
    "model": ("plain", "frozen", "unfrozen", "lora", "tied", "twice", "experts", "two", "activation", "encoder"),
    "precision": ("fp32", "bf16", "fp16"),
    "mesh": ("dp2", "tp2", "tokens2", "sp2", "ep2", "pp2"),  # tokens2: tp2 with divided tokens
    "clip": (0, 1),
    "event": ("nothing", "resume", "evaluate", "generate"),  # after half of the steps
    "other": (0, 1, 2, 3),  # the stage at which training is resumed, and that of a second engine
    # what is not kept on the device: states from stage 1 on, parameters at stage 3, activations that are computed again
    "spares": ("nothing", "states", "files", "parameters", "activations", "reentrant"),
    # by which the numbers do not change: losses and MLPs in pieces, units and buckets of one block, whole parameters on
    # each process, blocks traced by torch.compile, checkpoints that are written beside the training
    "way": ("usual", "pieces", "alone", "mics", "traced", "beside"),
}
FREE = ("accumulation", "precision", "clip", "spares")  # nothing is refused for their sake
PAIRED = ("two", "activation", "encoder")


@dataclass(frozen=True)
class Cell:
    """One combination; ``str`` of it is the line that names it, and ``Cell.of`` reads that."""

    stage: int
    client: str
    accumulation: int
    model: str
    precision: str
    mesh: str
    clip: int
    event: str
    other: int
    spares: str = "nothing"
    way: str = "usual"
    copies: int = 1  # of the mesh, each of which reads samples of its own

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def of(cls, line: str) -> Cell:
        given = dict(part.split("=", 1) for part in line.strip().split(","))
        given = {"spares": "nothing", "way": "usual", "copies": "1", **given}
        made = {name: next(v for v in values if str(v) == given[name]) for name, values in FACTORS.items()}
        return cls(**made, copies=int(given["copies"]))

    @property
    def data(self) -> int:
        """Processes that read different samples."""
        return self.copies * (2 if self.mesh in ("dp2", "ep2") else 1)

    @property
    def sharing(self) -> int:
        """Processes that share sequences."""
        return 2 if self.mesh == "sp2" else 1

    @property
    def world(self) -> int:
        return 2 * self.copies

    @property
    def engines(self) -> int:
        return 2 if self.model in PAIRED else 1

    def stages(self, resumed: bool) -> tuple[int, int]:
        """Of the first engine and of the second one, before and after training is resumed."""
        return (self.other, self.stage) if resumed else (self.stage, self.other)


def refusal(cell: Cell) -> str | None:
    """What a user is told (a regular expression) who combines these; None: it trains."""
    if cell.mesh == "ep2" and cell.model != "experts":
        return "no base_model_ep_plan with experts that are there"
    if cell.mesh == "tokens2" and cell.way == "pieces":
        return "tiles are stretches of whole sequences, and with tensor_sequence_parallel each process has a part"
    stages = cell.stages(False)[: cell.engines]
    if cell.event == "resume":
        stages += cell.stages(True)[: cell.engines]
    if cell.mesh == "ep2" and cell.way == "mics" and 3 in stages:
        return "mics_shard_size is 1, and experts are divided over 2 of the same processes"
    if cell.mesh != "pp2":
        return None
    found = {
        "ZeRO stage 3 with a pipeline": 3 in stages,
        r"layers 1 and 2 .* share the parameter .*TiedLayerSpec": cell.model == "twice",
        "the Trainer trains no pipelines.*train_batch": cell.client == "trainer",
        r"Only train_batch\(\) is accessible in pipeline mode|no_sync\(\) of a pipeline: train_batch": cell.client
        in ("accelerate", "raw"),
        r"engine\.generate\(\) calls generate\(\) of the model, and \w+ has none": cell.event == "generate",
    }
    return "|".join(words for words, applies in found.items() if applies) or None


def _values(cell: Cell) -> tuple[Any, ...]:
    return tuple(getattr(cell, name) for name in FACTORS)


def pairs_of(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """Every two values that are together here, by the places of their factors."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(_values(cell)), 2)}


def _every() -> Iterator[Cell]:
    """All, with one value each of factors that are free."""
    return (Cell(*each) for each in product(*(v[:1] if name in FREE else v for name, v in FACTORS.items())))


@cache
def possible_pairs() -> frozenset[tuple[int, Any, int, Any]]:
    """Those of which some combination trains."""
    found: set[tuple[int, Any, int, Any]] = set()
    for cell in _every():
        if refusal(cell) is None:
            found |= pairs_of(cell)
    free = [place for place, name in enumerate(FACTORS) if name in FREE]
    names = list(FACTORS)
    for place, other in combinations(range(len(names)), 2):
        if place in free or other in free:
            seen = [{v for i, a, j, b in found for k, v in ((i, a), (j, b)) if k == p} for p in (place, other)]
            choices = [FACTORS[names[p]] if p in free else sorted(s) for p, s in zip((place, other), seen, strict=True)]
            found |= {(place, a, other, b) for a, b in product(*choices)}
    return frozenset(found)


@cache
def covering(seed: int) -> tuple[Cell, ...]:
    """Combinations that train and hold every two values that can be together, in an order of this seed.

    Greedy: of some random combinations that hold a pair that is still missing, the one with most missing pairs.
    """
    draw = random.Random(seed)
    missing = set(possible_pairs())
    names, rows = list(FACTORS), []
    while missing:
        wanted = draw.choice(sorted(missing, key=repr))
        best: Cell | None = None
        gain = 0
        tries = 0
        while best is None or tries < 40:
            tries += 1
            assert tries < 10_000, wanted
            values = {name: draw.choice(choices) for name, choices in FACTORS.items()}
            values[names[wanted[0]]], values[names[wanted[2]]] = wanted[1], wanted[3]
            cell = Cell(**values)
            if refusal(cell) is None and len(pairs_of(cell) & missing) > gain:
                best, gain = cell, len(pairs_of(cell) & missing)
        rows.append(best)
        missing -= pairs_of(best)
    return tuple(rows)
