"""What a range test measures: losses over learning rates, one curve for each order of the data, and their average.

Pure numbers, no torch: the engine records them, ``rules`` reads them, files hold them as JSON. A learning rate is that
of the update in question; ``train`` is the loss before it, ``held_out`` the loss of batches set aside after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Curve", "Sweep", "mean_curve"]

BANDWIDTH = 0.08  # of the smoothing, in decades of the learning rate


@dataclass(frozen=True)
class Sweep:
    """One sweep over learning rates.

    Attributes:
        seed: which order of the data, and which random numbers in the model.
        lrs: ascending.
        train: loss before each update.
        held_out_lrs, held_out: loss of the batches set aside, after the update at that learning rate.
        grad_norms: before clipping.
        skipped: updates that fp16 skipped for an overflow.
        diverged_at: learning rate at which the sweep was ended, ``None`` when it reached its own end.
    """

    seed: int
    lrs: tuple[float, ...]
    train: tuple[float, ...]
    held_out_lrs: tuple[float, ...]
    held_out: tuple[float, ...]
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    diverged_at: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not finite becomes ``None``."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sweep:
        rows = {key: tuple(math.nan if v is None else float(v) for v in values[key]) for key in _ROWS}
        for of, lrs in (("train", "lrs"), ("held_out", "held_out_lrs")):
            if len(rows[of]) != len(rows[lrs]):
                raise ValueError(f"{len(rows[of])} numbers in {of} for {len(rows[lrs])} learning rates")
        end = values["diverged_at"]
        return cls(
            **rows,
            seed=int(values["seed"]),
            skipped=int(values["skipped"]),
            diverged_at=None if end is None else float(end),
        )


_ROWS = ("lrs", "train", "held_out_lrs", "held_out", "grad_norms")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Curve:
    """Losses over learning rates, ``[n]`` each, ascending and finite."""

    lrs: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.lrs)

    def smooth(self, bandwidth: float = BANDWIDTH) -> Curve:
        """Weighted with a Gaussian over the logarithm of the learning rate: no lag, unlike a moving average."""
        x = np.log10(self.lrs)
        weights = np.exp(-0.5 * ((x[:, None] - x[None, :]) / bandwidth) ** 2)
        return Curve(self.lrs, (weights @ self.losses) / weights.sum(1))


def mean_curve(sweeps: Sequence[Sweep], *, held_out: bool) -> Curve:
    """The mean over sweeps, as far as every one of them has finite losses; possibly empty."""
    columns: list[dict[float, float]] = []
    for sweep in sweeps:
        pairs = (
            zip(sweep.held_out_lrs, sweep.held_out, strict=True)
            if held_out
            else zip(sweep.lrs, sweep.train, strict=True)
        )
        column: dict[float, float] = {}
        for lr, loss in pairs:
            if not math.isfinite(loss):
                break
            column[lr] = loss
        columns.append(column)
    shared = sorted(set.intersection(*map(set, columns))) if columns else []
    losses = [sum(column[lr] for column in columns) / len(columns) for lr in shared]
    return Curve(np.asarray(shared, dtype=float), np.asarray(losses, dtype=float))
