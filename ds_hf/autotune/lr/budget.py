"""How long a learning-rate search may be: options that fit the seconds that are left."""

from __future__ import annotations

import dataclasses

from ds_hf.lr import LrOptions

__all__ = ["fitting", "updates_of"]

RUNGS, RATES = 6, 5  # runs of the ladder, and rates around its best, as a rule (``ds_hf.lr.confirm``)
SHORTER = (1.0, 0.75, 0.5, 0.35, 0.25)  # of the default numbers of updates
LEAST = LrOptions(num_steps=25, confirm_steps=15, seeds=1, train_batches=32, held_out_batches=8)


def updates_of(options: LrOptions) -> int:
    """Updates that a search takes, as a rule; each evaluation counts as two batches of it without backward."""
    sweeps = options.seeds * (options.num_steps + options.moment_steps)
    runs = options.confirm_steps * (RUNGS + 2 * RATES * options.seeds)
    looks = (RUNGS + RATES * options.seeds + options.seeds * options.num_steps // (4 * options.held_out_every)) / 3
    return sweeps + runs + round(looks * options.held_out_batches) + options.batches // 3


def fitting(options: LrOptions, seconds: float, step_seconds: float) -> LrOptions:
    """The longest search that takes no more than ``seconds`` by the time of an update; the shortest if none does."""
    for share in SHORTER:
        for seeds in range(options.seeds, 0, -1):
            shorter = dataclasses.replace(
                options,
                num_steps=max(LEAST.num_steps, round(share * options.num_steps)),
                confirm_steps=max(LEAST.confirm_steps, round(share * options.confirm_steps)),
                seeds=seeds,
            )
            if updates_of(shorter) * step_seconds <= seconds:
                return shorter
    return dataclasses.replace(LEAST, total_steps=options.total_steps, seed=options.seed)
