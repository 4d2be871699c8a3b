"""Combinations of stage, client, accumulation, kind of model, precision, mesh, clipping, what happens in the middle and
what is not kept on the device, drawn so that every two values meet, against one process of plain torch: losses, norms,
weights.

To repeat one: ``DS_HF_MATRIX='stage=3,client=trainer,...' .venv/bin/pytest tests/contract/test_matrix.py``, with the
line of the failure; several are separated by spaces. ``DS_HF_MATRIX_SEED`` is the seed of what is drawn anew each day.
"""

from __future__ import annotations

import math
import os
import random
import re
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.ops.split_master import split_fp32
from ds_hf.errors import DsHfError
from tests.contract.matrix import plain
from tests.contract.matrix.accelerated import by_accelerate
from tests.contract.matrix.cells import FACTORS, Cell, covering, pairs_of, refusal
from tests.contract.matrix.clients import Numbers, by_loop, forget, traced
from tests.contract.matrix.trainer import by_trainer
from tests.helpers.distributed import DistributedFailure, run_distributed

CLIENTS = {"trainer": by_trainer, "accelerate": by_accelerate, "engine": by_loop, "raw": by_loop}


def train(cell: Cell, folder: Path) -> list[Numbers]:
    """Train the models of a combination and return what is to be compared, of each."""
    forget()
    torch.manual_seed(100 + dist.get_rank())
    try:
        with traced():
            return CLIENTS[cell.client](cell, folder)
    finally:
        forget()


def train_each(lines: list[str], folder: str) -> None:
    """One rank's part: the combinations one after another; what each gave, or was told, is in a file when it is done.
    Where one is refused the process goes on, as a user's notebook does."""
    for index, line in enumerate(lines):
        place = Path(folder) / str(index)
        place.mkdir(exist_ok=True)
        dist.barrier()
        began = time.process_time()
        try:
            found: Any = train(Cell.of(line), place)
        except DsHfError as error:
            if refusal(Cell.of(line)) is None:
                raise
            found = f"{type(error).__name__}: {error}"
        print(f"{time.process_time() - began:.1f} s of CPU: {line}")
        torch.save(found, Path(folder) / f"{index}.{dist.get_rank()}.pt")


def results(cells: list[Cell], backend: str = "gloo") -> dict[Cell, Any]:
    """What each combination gave, by rank, or how it failed; in as few processes as possible."""
    found: dict[Cell, Any] = {}
    while len(found) < len(cells):
        rest = [cell for cell in cells if cell not in found]
        rest = [cell for cell in rest if cell.world == rest[0].world]
        with tempfile.TemporaryDirectory(prefix="ds_hf_matrix_") as folder:
            failure: DistributedFailure | None = None
            try:
                lines = [str(cell) for cell in rest]
                run_distributed(train_each, rest[0].world, lines, folder, timeout=110, backend=backend)
            except DistributedFailure as error:
                failure = error
            for index, cell in enumerate(rest):
                files = [Path(folder) / f"{index}.{rank}.pt" for rank in range(cell.world)]
                if not all(file.exists() for file in files):
                    assert failure is not None
                    found[cell] = failure
                    break
                found[cell] = [torch.load(file, "cpu", weights_only=True) for file in files]
    return found


# -- judging ---------------------------------------------------------------------------------------------------------

# fp32: sums over processes have another order than those of one, and nothing else differs. So relative differences are
# a few 1e-7 (losses 1.3e-7, norms 1.3e-6 were the largest of 600 here); of the way that a weight went in four steps,
# which is some hundred times smaller than the weight, they were up to 5e-6. The limits are about eight times as wide.
FP32 = {"losses": 1e-6, "norms": 1e-5, "weights": 5e-5, "logits": 1e-5}
# 16 bits: gradients are rounded before they are added up, in another order too. What that does to a number is seen from
# plain mixed precision, which is off from fp32 by as much; three times that is allowed. Few steps may be right by luck,
# so it is never less than what a few roundings (2^-8, 2^-11) give; the largest seen on CPUs were a third of these
# limits. All steps count together: one norm of bf16 was 27 roundings off on a GPU, after others that were right.
TIMES, ROUNDING = 3.0, {"bf16": 2.0**-8, "fp16": 2.0**-11}
LEAST = {"losses": 0.5, "norms": 5.0, "weights": 3.0, "logits": 1.0}  # roundings


def distance(one: list[float], other: list[float]) -> float:
    """Root of the mean square of relative differences."""
    return math.hypot(*((a - b) / b for a, b in zip(one, other, strict=True))) / math.sqrt(len(other))


def ways(run: plain.Run, masters: dict[str, Tensor]) -> dict[str, float]:
    """How far weights that train are from a run's, by name, as a part of the way that they went in it."""
    pairs = {name: (value, value - run.before[name]) for name, value in run.masters.items()}
    return {name: float((masters[name] - value).norm() / way.norm()) for name, (value, way) in pairs.items()}


def faults(cell: Cell, which: int, found: dict[str, Any]) -> list[str]:
    """Where a model's numbers are not those of one process."""
    wanted, narrow = plain.expected(cell, which), cell.precision != "fp32"
    ideal = plain.expected(cell, which, "fp32")
    said = []

    def judge(kind: str, what: str, off: float, noise: float) -> None:
        limit = TIMES * max(noise, LEAST[kind] * ROUNDING[cell.precision]) if narrow else FP32[kind]
        print(f"    {what}: {off:.1e} of {limit:.1e}")
        if not off <= limit:
            said.append(f"model {which}, {what}: {off:.2e} off, allowed {limit:.1e}")

    for name in ("losses", "norms"):
        mine, theirs = found[name], getattr(wanted, name)
        if len(mine) != len(theirs):
            said.append(f"model {which}, {name}: {len(mine)} of them and not {len(theirs)}: {mine}")
            continue
        judge(name, name, distance(mine, theirs), distance(theirs, getattr(ideal, name)))
    if cell.event == "evaluate":
        off = distance([found["evaluated"]], [wanted.evaluated])
        judge("losses", "evaluation", off, distance(wanted.losses, ideal.losses))
    if cell.event == "generate":
        rows = torch.as_tensor(found["generated"])
        with torch.no_grad():
            logits, exact = (run.middle(rows).logits[:, :-1].float() for run in (wanted, ideal))
        least = plain.prompt().shape[1] - 1
        chosen = logits[:, least:].gather(-1, rows[:, least + 1 :, None]).squeeze(-1)
        gap = float((logits[:, least:].amax(-1) - chosen).max())
        judge("logits", "generation", gap, float((logits - exact).abs().max()))
        assert rows.shape == wanted.generated.shape
    masters = found.get("masters", found["weights"])
    offs, noise = ways(wanted, masters), ways(ideal, wanted.masters)
    worst = max(offs, key=lambda name: offs[name])
    judge("weights", f"weights, worst {worst}", offs[worst], max(noise.values()))
    dtype = plain.DTYPES[cell.precision]
    for given, value in found["weights"].items():
        name = wanted.names[given]
        right = masters[name].to(dtype).float() if name in wanted.masters else wanted.weights[name]
        if dtype == torch.bfloat16 and name in wanted.masters:  # on GPUs, halves are rounded away from zero
            right = torch.where(value == right, right, split_fp32(masters[name])[0].float())
        if not torch.equal(value, right):
            kind = "is not its master, rounded" if name in wanted.masters else "is frozen and has changed"
            said.append(f"model {which}: {name} {kind}: {float((value - right).abs().max()):.1e}")
    if set(wanted.masters) - set(found["weights"]):
        said.append(f"model {which}: without {sorted(set(wanted.masters) - set(found['weights']))}")
    return said


def gathered(cell: Cell, ranks: list[Any]) -> list[dict[str, Any]]:
    """One set of numbers of each model: those of rank 0, with the layers of a pipeline's other stages."""
    models = [dict(numbers) for numbers in ranks[0]]
    for rank in ranks[1:]:
        for mine, theirs in zip(models, rank, strict=True):
            assert all(
                torch.equal(theirs["weights"][n], v) for n, v in mine["weights"].items() if n in theirs["weights"]
            )
            mine["weights"] = {**theirs["weights"], **mine["weights"]}
            assert theirs["losses"] == pytest.approx(mine["losses"], rel=1e-6), cell
            assert theirs["norms"] == pytest.approx(mine["norms"], rel=1e-6), cell
    return models


def judged(cell: Cell, ranks: Any) -> list[str]:
    """What is wrong about a combination."""
    if isinstance(ranks, DistributedFailure):
        return [str(ranks)]
    words = refusal(cell)
    if words is not None:
        return [
            f"rank {rank}: it has to be refused with {words!r}, and not: {found}"
            for rank, found in enumerate(ranks)
            if not isinstance(found, str) or not re.search(words, found)
        ]
    try:
        models = gathered(cell, ranks)
        return [each for which, numbers in enumerate(models) for each in faults(cell, which, numbers)]
    except Exception:  # the others are judged, too
        return [traceback.format_exc()]


def check(cells: list[Cell], backend: str = "gloo") -> None:
    """Run them and name all that fail, each with the line that repeats it."""
    failed = []
    for cell, ranks in results(cells, backend).items():
        print(cell)
        if said := judged(cell, ranks):
            text = "\n  ".join(said)
            failed.append(f"DS_HF_MATRIX='{cell}' .venv/bin/pytest tests/contract/test_matrix.py\n  {text}")
    assert not failed, f"{len(failed)} of {len(cells)} combinations:\n" + "\n".join(failed)


ASKED = [Cell.of(line) for line in os.environ.get("DS_HF_MATRIX", "").split()]
TODAY = int(os.environ.get("DS_HF_MATRIX_SEED", date.today().strftime("%Y%m%d")))
FIXED = 750  # of which eleven rows hold every value
REFUSED = [
    Cell(stage, client, 1, model, "fp32", "pp2", 0, event, other)
    for stage, client, model, event, other in (
        (3, "engine", "plain", "nothing", 0),
        (1, "engine", "twice", "nothing", 0),
        (1, "trainer", "plain", "nothing", 0),
        (2, "accelerate", "tied", "nothing", 0),
        (0, "raw", "frozen", "nothing", 0),
        (1, "engine", "plain", "generate", 0),
        (1, "engine", "two", "nothing", 3),
        (1, "engine", "plain", "resume", 3),
    )
]


def refused(seed: int, count: int) -> list[Cell]:
    draw = random.Random(seed)
    drawn = (Cell(**{name: draw.choice(values) for name, values in FACTORS.items()}) for _ in iter(int, 1))
    return list(islice((cell for cell in drawn if refusal(cell) is not None), count))


@pytest.mark.skipif(not ASKED, reason="DS_HF_MATRIX names no combination")
def test_asked() -> None:
    check(ASKED)


@pytest.mark.skipif(bool(ASKED), reason="DS_HF_MATRIX asks for others")
def test_a_slice() -> None:
    """Of the fixed array the first rows, which hold each value and most pairs; some of today's; some refused ones."""
    print(f"DS_HF_MATRIX_SEED={TODAY}")
    fixed = covering(FIXED)[:11]
    held = {(name, getattr(cell, name)) for cell in fixed for name in FACTORS}
    assert held == {(name, value) for name, values in FACTORS.items() for value in values}
    check([*REFUSED[:3], *fixed, *REFUSED[3:6], *covering(TODAY)[:2]])


@pytest.mark.slow
@pytest.mark.skipif(bool(ASKED), reason="DS_HF_MATRIX asks for others")
@pytest.mark.parametrize("seed", [FIXED, TODAY])
@pytest.mark.minutes(5)
def test_every_pair(seed: int) -> None:
    print(f"DS_HF_MATRIX_SEED={seed}")
    check([*covering(seed), *REFUSED, *refused(seed, 6)])


@pytest.mark.slow
@pytest.mark.skipif(bool(ASKED), reason="DS_HF_MATRIX asks for others")
def test_two_of_each_mesh() -> None:
    """Four processes, of which two and two read the same samples, or each its own."""
    print(f"DS_HF_MATRIX_SEED={TODAY}")
    check([replace(cell, copies=2) for cell in covering(TODAY)[::3]])


# -- whether it would notice ------------------------------------------------------------------------------------------


def wrong(cell: Cell, name: str) -> dict[str, Any]:
    """Numbers of a training that has one fault."""
    model = plain.build(cell.model)[0]
    clip, precision, by_tokens = cell.clip, cell.precision, False
    ids, labels = plain.data(cell.data, cell.accumulation)
    if name == "no clipping":
        clip = 0
    elif name == "tokens weigh, not batches":
        by_tokens = True
    elif name == "the last micro-batch alone":
        ids, labels = ids[:, -1:], labels[:, -1:]
    elif name == "one process alone":
        ids, labels = ids[:, :, :1], labels[:, :, :1]
    elif name == "one matrix does not train":
        model.model.layers[1].mlp.up_proj.requires_grad_(False)
    made = plain.train(model, (ids, labels), clip, precision, by_tokens)
    masters = {**plain.expected(cell, 0).before, **made.masters}
    return {"losses": made.losses, "norms": made.norms, "weights": made.weights, "masters": masters}


@pytest.mark.parametrize("precision", FACTORS["precision"])
def test_limits_are_narrow_enough_for(precision: str) -> None:
    cell = Cell(0, "engine", 3, "plain", precision, "dp2", 1, "nothing", 0)
    assert faults(cell, 0, wrong(cell, "nothing")) == []
    names = ["no clipping", "tokens weigh, not batches", "the last micro-batch alone", "one process alone"]
    for name in [*names, "one matrix does not train"]:
        said = faults(cell, 0, wrong(cell, name))
        assert any("weights" in each for each in said), (name, said)
        assert any("norms" in each for each in said) or name in (names[0], "one matrix does not train"), (name, said)


def test_arrays_hold_every_pair() -> None:
    """Also those that only cells of one mesh have; refusals do not take a value away."""
    for seed in (FIXED, TODAY):
        cells = covering(seed)
        assert not [cell for cell in cells if refusal(cell)]
        assert len(cells) < 100
        found = set().union(*map(pairs_of, cells))
        draw = random.Random(seed)
        for _ in range(3000):
            cell = Cell(**{name: draw.choice(values) for name, values in FACTORS.items()})
            assert refusal(cell) or pairs_of(cell) <= found
        assert Cell.of(str(cells[0])) == cells[0]
