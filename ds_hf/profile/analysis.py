"""Adds up where the time of the recorded steps went, and compares the ranks with each other.

A rank that takes longer at some place than others makes them wait at the next collective, so the time of a collective
has two parts: until the last rank has come, and from there on. Their clocks are one on one host; otherwise they are
aligned by the ends of reductions, which all ranks leave together.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ds_hf.engine.observe.report.spans import COLLECTIVE, KINDS, Key
from ds_hf.profile.load import Rank, Run, StepRecord

__all__ = ["Analysis", "Late", "Traffic", "Unequal", "analyse", "fullest_expert"]

WARM_UP = 2  # steps that compile, allocate and record what later ones use
LEAST_LATE = 1e-3  # seconds
LEAST_SHARE = 0.01
_EXPLAINS = 0.5  # least correlation of a rank's tokens with how long it computes
_OUTSIDE = {"checkpoint", "evaluation"}  # no part of a usual step


@dataclass(frozen=True)
class Late:
    """A rank that takes longer at a place than the others do.

    Attributes:
        seconds: longer than the median of the others, in the median of the steps.
        share: of a step.
    """

    rank: int
    kind: str
    place: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Unequal:
    """Ranks that are given unequal numbers of tokens, and so wait for whichever has most.

    Attributes:
        ratio: tokens of the rank with most over the mean of all, mean of the steps.
        seconds: that the longest computation of a step takes beyond the mean of the ranks, mean of the steps.
        share: of a step.
    """

    ratio: float
    seconds: float
    share: float


@dataclass
class Traffic:
    """Of the collectives of one kind, a step and rank.

    Attributes:
        late: seconds until the last rank had come; ``moving``: from then on.
        nbytes: put in. calls: how many.
    """

    late: float = 0.0
    moving: float = 0.0
    nbytes: float = 0.0
    calls: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.moving if self.moving > 0 else 0.0


@dataclass
class Analysis:
    """What was found. Times are seconds of a step, means over steps and ranks unless they are said to be another.

    Attributes:
        steps: numbers of the steps that were added up.
        ranks_kinds: own time of each kind, for each rank.
        places: own time of computing places, for each rank, in the median.
        late: ranks that others wait for, the worst first.
        traffic: of the collectives, by kind.
        files: reads and writes of offload: operation -> (seconds, bytes).
        floor: seconds that the model's arithmetic takes at the device's full rate.
        history: number of a step -> (tokens a second, MFU), of all ranks.
        unequal: where batches of unequal lengths make ranks wait.
    """

    run: Run
    steps: list[int]
    seconds: float
    ranks_kinds: list[dict[str, float]]
    places: dict[str, list[float]]
    late: list[Late]
    traffic: dict[str, Traffic]
    files: dict[str, tuple[float, float]]
    floor: float
    samples: float
    tokens: float | None
    starved: float
    micro_steps: int
    history: dict[int, tuple[float, float]] = field(default_factory=dict)
    unequal: Unequal | None = None

    @property
    def kinds(self) -> dict[str, float]:
        """Own time of each kind, those that there are, in the order of ``KINDS``."""
        total = {kind: statistics.fmean(each.get(kind, 0.0) for each in self.ranks_kinds) for kind in KINDS}
        return {kind: seconds for kind, seconds in total.items() if seconds > 0}

    def share(self, kind: str) -> float:
        """Of a step."""
        return self.kinds.get(kind, 0.0) / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation; ``None`` where tokens are not known."""
        return self.floor / self.seconds if self.floor and self.seconds else None

    @property
    def tokens_a_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def samples_a_second(self) -> float:
        return self.samples / self.seconds


def analyse(run: Run) -> Analysis:
    """Of all steps that every rank recorded, without the first ones where there are others, and without those in which
    something was saved or evaluated, where there are others."""
    numbers = _usual_steps(run)
    if not numbers:
        return Analysis(run, [], 0.0, [{} for _ in run.ranks], {}, [], {}, {}, 0.0, 0.0, None, 0.0, 1)
    seconds = statistics.fmean(rank.steps[number].seconds for rank in run.ranks for number in numbers)
    ranks_kinds, medians = [], []
    for rank in run.ranks:
        own = [rank.own_times(rank.steps[number]) for number in numbers]
        ranks_kinds.append(_by_kind(own))
        medians.append(_medians(own))
    tokens = _tokens(run, numbers)
    starved = statistics.fmean(rank.steps[number].starved for rank in run.ranks for number in numbers)
    batch = run.header["batch"]
    return Analysis(
        run,
        numbers,
        seconds,
        ranks_kinds,
        _places(medians),
        _late(run, medians, seconds),
        _traffic(run, numbers),
        _files(run, numbers),
        statistics.fmean(_floor(rank, rank.steps[number]) for rank in run.ranks for number in numbers),
        float(batch["train"]),
        tokens,
        starved,
        int(batch["accumulation"]),
        _history(run),
        _unequal(run, numbers, seconds),
    )


def common_steps(run: Run) -> list[int]:
    """Numbers of the steps that every rank has."""
    return sorted(set.intersection(*(set(rank.steps) for rank in run.ranks)))


def _usual_steps(run: Run) -> list[int]:
    numbers = common_steps(run)
    warm = numbers[min(WARM_UP, max(0, len(numbers) - 1)) :]
    usual = [n for n in warm if not any(_holds(rank, rank.steps[n], _OUTSIDE) for rank in run.ranks)]
    return usual or warm


def _holds(rank: Rank, step: StepRecord, kinds: set[str]) -> bool:
    return any(rank.keys[span.key].kind in kinds for span in step.spans)


def _by_kind(own: Sequence[dict[Key, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for step in own:
        for key, seconds in step.items():
            found[key.kind] += seconds / len(own)
    return dict(found)


def _medians(own: Sequence[dict[Key, float]]) -> dict[tuple[str, str], float]:
    """Of each place that is no collective."""
    found: dict[tuple[str, str], list[float]] = {}
    for step in own:
        places: dict[tuple[str, str], float] = defaultdict(float)
        for key, seconds in step.items():
            if key.kind not in (*COLLECTIVE, "pipeline", "report"):
                places[key.kind, key.place] += seconds
        for place, seconds in places.items():
            found.setdefault(place, []).append(seconds)
    return {place: statistics.median([*values, *[0.0] * (len(own) - len(values))]) for place, values in found.items()}


def _places(medians: Sequence[dict[tuple[str, str], float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(place for each in medians for place in each)
    return {place: [each.get((kind, place), 0.0) for each in medians] for kind, place in names}


def _late(run: Run, medians: Sequence[dict[tuple[str, str], float]], seconds: float) -> list[Late]:
    stages = int(run.header["mesh"]["pipe"])
    stage_of = [rank.number * stages // run.world_size for rank in run.ranks]
    found = []
    for kind, place in dict.fromkeys(name for each in medians for name in each):
        times = [each.get((kind, place), 0.0) for each in medians]
        for index, mine in enumerate(times):
            others = [t for i, t in enumerate(times) if i != index and stage_of[i] == stage_of[index]]
            if not others:
                continue
            longer = mine - statistics.median(others)
            if longer >= max(LEAST_LATE, LEAST_SHARE * seconds):
                found.append(Late(run.ranks[index].number, kind, place, longer, longer / seconds))
    return sorted(found, key=lambda late: -late.seconds)


def _unequal(run: Run, numbers: Sequence[int], seconds: float) -> Unequal | None:
    """``None`` where every rank has as many tokens, they are not known, or do not say which rank computes longest."""
    if len(run.ranks) == 1 or int(run.header["mesh"]["pipe"]) > 1:
        return None
    ratios, waits, pairs = [], [], []
    for number in numbers:
        tokens = [rank.steps[number].tokens for rank in run.ranks]
        if not all(tokens):
            return None
        counts = [float(count or 0) for count in tokens]
        computing = [_by_kind([rank.own_times(rank.steps[number])]).get("compute", 0.0) for rank in run.ranks]
        usual, mean = statistics.fmean(counts), statistics.fmean(computing)
        ratios.append(max(counts) / usual)
        waits.append(max(computing) - mean)
        pairs += [(count / usual - 1, time - mean) for count, time in zip(counts, computing, strict=True)]
    more, longer = (list(column) for column in zip(*pairs, strict=True))
    if len(set(more)) == 1 or len(set(longer)) == 1 or statistics.correlation(more, longer) < _EXPLAINS:
        return None
    found = statistics.fmean(waits)
    return Unequal(statistics.fmean(ratios), found, found / seconds)


def _floor(rank: Rank, step: StepRecord) -> float:
    header = rank.header
    if not step.tokens:
        return 0.0
    each = header["flops_a_token"] + header["flops_a_token_and_position"] * step.tokens / max(step.samples, 1)
    return float(step.tokens * each / header["matrix_rate"])


def _tokens(run: Run, numbers: Iterable[int]) -> float | None:
    """Of a step, of all processes; those that share layers read the same."""
    counts = [[rank.steps[number].tokens for rank in run.ranks] for number in numbers]
    if any(count is None for step in counts for count in step):
        return None
    share = run.world_size / len(run.ranks) / int(run.header["mesh"]["tensor"])
    return statistics.fmean(sum(count or 0 for count in step) * share for step in counts)


def _history(run: Run) -> dict[int, tuple[float, float]]:
    found = {}
    for number in common_steps(run):
        steps = [(rank, rank.steps[number]) for rank in run.ranks]
        tokens = _tokens(run, [number])
        seconds = statistics.fmean(step.seconds for _, step in steps)
        if tokens is not None and seconds > 0:
            floor = statistics.fmean(_floor(rank, step) for rank, step in steps)
            found[number] = (tokens / seconds, floor / seconds)
    return found


# -- collectives -------------------------------------------------------------------------------------------------------

Call = tuple[Key, int]  # a key, and which of its calls in the step


def _calls(rank: Rank, step: StepRecord) -> dict[Call, tuple[float, float]]:
    """When each collective of the step began and ended, on the rank's clock."""
    counts: Counter[Key] = Counter()
    found = {}
    for span in (*step.spans, *step.beside):
        key = rank.keys[span.key]
        if key.operation and key.kind in COLLECTIVE:
            begin = step.begin + span.start
            found[key, counts[key]] = (begin, begin + span.seconds)
            counts[key] += 1
    return found


def _offsets(calls: Sequence[dict[Call, tuple[float, float]]], run: Run) -> list[float]:
    """What to add to each rank's times; 0 where they have one clock."""
    clocks = {rank.header["clock"] for rank in run.ranks}
    if len(clocks) == 1 and clocks != {""}:
        return [0.0] * len(calls)
    first = calls[0]
    found = []
    for each in calls:
        apart = [first[c][1] - each[c][1] for c in each if c in first and "reduce" in c[0].operation]
        found.append(statistics.median(apart) if apart else 0.0)
    return found


def _traffic(run: Run, numbers: Sequence[int]) -> dict[str, Traffic]:
    found: dict[str, Traffic] = defaultdict(Traffic)
    share = 1 / (len(numbers) * len(run.ranks))
    for number in numbers:
        calls = [_calls(rank, rank.steps[number]) for rank in run.ranks]
        offsets = _offsets(calls, run)
        for call in calls[0]:
            key = call[0]
            if not all(call in each for each in calls):
                continue
            times = [
                (begin + off, end + off)
                for (begin, end), off in zip((each[call] for each in calls), offsets, strict=True)
            ]
            last = max(begin for begin, _ in times)
            together = key.ranks == run.world_size
            traffic = found[key.kind]
            for begin, end in times:
                late = min(max(0.0, last - begin), end - begin) if together else 0.0
                traffic.late += late * share
                traffic.moving += (end - begin - late) * share
            traffic.nbytes += key.nbytes * len(times) * share
            traffic.calls += len(times) * share
    return dict(found)


def _files(run: Run, numbers: Sequence[int]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    share = 1 / (len(numbers) * len(run.ranks))
    for rank in run.ranks:
        for number in numbers:
            for span in rank.steps[number].spans:
                key = rank.keys[span.key]
                if key.kind == "offload":
                    name = key.operation or "copy"
                    seconds, nbytes = found.get(name, (0.0, 0.0))
                    found[name] = (seconds + span.seconds * share, nbytes + key.nbytes * share)
    return found


def fullest_expert(run: Run) -> str:
    """Which expert of a layer has the largest share of all tokens, and how much more than its part the process has that
    computes most; empty where nothing was counted."""
    layers = [
        (each[0], [sum(numbers) for numbers in zip(*(layer["routes"] for layer in each), strict=False)])
        for each in zip(*(rank.experts for rank in run.ranks if rank.experts), strict=False)
    ]
    shares = [(max(routes) / sum(routes), layer, routes) for layer, routes in layers if sum(routes)]
    if not shares:
        return ""
    share, layer, routes = max(shares, key=lambda found: found[0])
    top, parts = int(layer["top"]), int(layer["processes"])
    text = (
        f"the fullest is expert {routes.index(max(routes))} of {layer['name']}, which has {share * top:.0%} of all "
        f"tokens ({top / len(routes):.0%} would be even)"
    )
    each = len(routes) // parts
    starts = range(0, parts * each, each) if each else ()
    most = max(
        (sum(found[at : at + each]) * parts / sum(found) for _, _, found in shares for at in starts), default=1.0
    )
    return f"{text}, and the fullest process computes {most:.2f} x its part" if parts > 1 else text
