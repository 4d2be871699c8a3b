"""The factors of the matrix, a line for each combination, what is refused, and arrays that cover every pair.

Invariant: ``refusal`` alone says which combinations cannot be; each of its sentences is one that a user gets to read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

__all__ = ["FACTORS", "Cell", "covering", "pairs_of", "refusal"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "client": ("trainer", "accelerate", "engine", "raw"),  # raw: an own loop with loss.backward()
    "accumulation": (1, 3),
    # unfrozen: frozen in the first half; two: engines of separate models; activation, encoder: of models that share
    # one, the encoder being frozen
    "model": ("plain", "frozen", "unfrozen", "lora", "tied", "twice", "two", "activation", "encoder"),
    "precision": ("fp32", "bf16", "fp16"),
    "mesh": ("dp2", "tp2", "tokens2", "sp2", "pp2"),  # tokens2: tp2 with divided tokens
    "clip": (0, 1),
    "event": ("nothing", "resume", "evaluate", "generate"),  # after half of the steps
    "other": (0, 1, 2, 3),  # the stage at which training is resumed, and that of a second engine
    # what is not kept on the device: states from stage 1 on, parameters at stage 3, activations that are computed again
    "spares": ("nothing", "states", "parameters", "activations", "reentrant"),
}
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

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def of(cls, line: str) -> Cell:
        given = dict(part.split("=", 1) for part in line.strip().split(","))
        given.setdefault("spares", "nothing")
        made = {name: next(v for v in values if str(v) == given[name]) for name, values in FACTORS.items()}
        return cls(**made)

    @property
    def data(self) -> int:
        """Processes that read different samples."""
        return 2 if self.mesh == "dp2" else 1

    @property
    def engines(self) -> int:
        return 2 if self.model in PAIRED else 1

    def stages(self, resumed: bool) -> tuple[int, int]:
        """Of the first engine and of the second one, before and after training is resumed."""
        return (self.other, self.stage) if resumed else (self.stage, self.other)


def refusal(cell: Cell) -> str | None:
    """What a user is told (a regular expression) who combines these; None: it trains."""
    if cell.mesh != "pp2":
        return None
    stages = cell.stages(False)[: cell.engines]
    if cell.event == "resume":
        stages += cell.stages(True)[: cell.engines]
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
    return tuple(getattr(cell, field.name) for field in fields(cell))


def pairs_of(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """Every two values that are together here, by the places of their factors."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(_values(cell)), 2)}


def _every() -> Iterator[Cell]:
    return (Cell(*values) for values in product(*FACTORS.values()))


@cache
def possible_pairs() -> frozenset[tuple[int, Any, int, Any]]:
    """Those of which some combination trains."""
    found: set[tuple[int, Any, int, Any]] = set()
    # two engines and their meshes decide what is refused: the other factors are looked at by one value each
    for cell in _every():
        if cell.accumulation == 1 and cell.precision == "fp32" and cell.clip == 0 and refusal(cell) is None:
            found |= pairs_of(cell)
    free = [place for place, name in enumerate(FACTORS) if name in ("accumulation", "precision", "clip")]
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
