"""The language between the autotuner and the engines of its trials.

The autotuner writes a request, puts its path into one environment variable, and starts the user's script. The engine's
rank 0 appends one JSON object a line to ``events``. Sizes are samples, memory is bytes, time is seconds.

========  =======================================================================================================
event     fields
========  =======================================================================================================
facts     of the engine when it is made: parameter counts, dtype, batch, world size, device and its memory
survey    bytes and operations of one sample, bandwidth of the collectives (``request.survey``)
step      one measured step: ``micro``, ``accumulation``, ``seconds``; ``kind`` "replay", or "natural": the script's
          own, of which ``wait`` seconds were for the DataLoader
point     all steps of a (micro, accumulation): median, interval, peak, ``optimizer_seconds``; ``outcome``: "ok", "oom";
          ``length``: tokens of its sequences, where the longest are wanted;
          once after its first visit, and again when all are known
longest   ``known``: whether memory is checked with the longest samples of the data set
length    ``own``: tokens of the script's sequences; ``step``: what lengths are multiples of; ``most``: positions that
          the model has; ``why``: why sequences cannot be made longer (``request.length``)
peak      bytes, when only the script's own steps were measured
machine   how fast it was: ``levels`` of the probes (kind -> mean seconds of a beat, standard error of its logarithm),
          ``drift`` (slowest over fastest turn); ``phase`` "natural" where the script's own steps were beside it
split     where the time of one step goes, by kind of work
note      something that could not be measured, and why
done      everything asked for was measured
========  =======================================================================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.errors import ConfigError
from ds_hf.printable import harmless
from ds_hf.regular_files import read_object, replace_file

__all__ = ["TRIAL_ENV", "TrialRequest", "further_file", "read_events"]

TRIAL_ENV = "DS_HF_TRIAL"


@dataclass(frozen=True)
class TrialRequest:
    """What an engine is asked to measure.

    Attributes:
        events: file to which rank 0 appends.
        points: (micro-batch, accumulation steps) to measure by resizing the script's own batch, in this order.
        own_axis: measure the script's own batch, and every division of it into micro-batches from ``low_micro`` to
            ``high_micro``; only the engine knows it, once it was launched.
        largest: the largest micro-batch is wanted: powers of two beyond the script's batch are measured, too, and none
            is left out for being slow.
        length: the longest sequences are wanted, at each point: tokens that are tried first, 0 for the script's own;
            ``exactly``: these alone. The script's batch is made longer by repeating its tokens.
        natural_steps: optimizer steps of the script itself to time afterwards.
        survey: also measure what the cost model needs to know of the model.
        gradient_checkpointing: switch it on or off in the model; ``None`` leaves it as the script has it.
        memory_limit: bytes that count as the device's memory; ``None`` for the real one.
        steps: most replayed steps a point; ``point_seconds``: most time a point.
        precision: half width of the interval, relative to the median, at which a point is measured well enough.
        longest: check memory with the longest samples of the data set.
        best: seconds a sample of the best point known; much slower ones get few steps. machine: how fast the machine
            was at that (kind of probe -> seconds of a beat); empty where it is not known.
        finish: end the process when everything is measured; otherwise restore the state and let the script go on.
        config: the configuration with which the script was started, or to which its engine is to be changed.
        further: number of the file in this one's folder (``further_file``) in which the next request will be, for the
            same processes, which wait for it; 0: there will be none.
    """

    events: str
    points: tuple[tuple[int, int], ...] = ()
    own_axis: bool = False
    low_micro: int = 1
    high_micro: int = 1 << 30
    largest: bool = False
    length: int | None = None
    exactly: bool = False
    natural_steps: int = 0
    survey: bool = False
    gradient_checkpointing: bool | None = None
    memory_limit: int | None = None
    steps: int = 20
    point_seconds: float = 20.0
    precision: float = 0.02
    longest: bool = True
    best: float | None = None
    machine: dict[str, float] = field(default_factory=dict)
    finish: bool = True
    config: str | None = None
    further: int = 0

    def write(self, path: Path) -> None:
        """Save as JSON."""
        replace_file(path, json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: str | Path) -> TrialRequest:
        """Load what ``write`` saved.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
        """
        try:
            values = read_object(path)
            values["points"] = tuple((int(micro), int(steps)) for micro, steps in values["points"])
            made = cls(**values)
            if not isinstance(made.events, str) or not all(
                type(number) in (int, float) for number in (made.low_micro, made.high_micro, made.steps, made.precision)
            ):
                raise TypeError("events is no path, or a number is none")
            return made
        except (OSError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ConfigError(
                f"{TRIAL_ENV} names a trial that cannot be read ({error!s:.300}): it is set by ds-hf autotune alone; "
                "unset it",
                source=str(path)[:300],
            ) from harmless(error)


def further_file(first: Path, number: int) -> Path:
    """Where a request for the processes that were started with ``first`` lies."""
    return first.parent / f"further-{number}.json"


def read_events(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines after byte ``offset``, each with the offset behind it; a line still being written is left."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield json.loads(line), offset
