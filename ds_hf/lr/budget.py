"""How long a learning-rate search may be: options that fit the seconds, or the batches, that there are."""

from __future__ import annotations

import dataclasses

from ds_hf.lr.options import LrOptions

__all__ = ["fitting", "for_batches", "for_fed_batches", "planned", "updates_of"]

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


def planned(options: LrOptions, seconds: float, step_seconds: float) -> LrOptions:
    """``options``, or the longest shorter search of them that fits; with the same batches to train on."""
    if updates_of(options) * step_seconds <= seconds:
        return options
    fits = fitting(options, seconds, step_seconds)
    names = ("num_steps", "confirm_steps", "seeds", "held_out_batches")
    return dataclasses.replace(options, **{name: min(getattr(options, name), getattr(fits, name)) for name in names})


def for_batches(options: LrOptions, batches: int) -> LrOptions | None:
    """The same search with no more than ``batches`` batches, divided as before; ``None`` if they are too few."""
    held_out = max(1, min(batches - 1, round(batches * options.held_out_batches / options.batches)))
    if batches < 2:
        return None
    return dataclasses.replace(options, train_batches=batches - held_out, held_out_batches=held_out)


def fed_batches_of(options: LrOptions) -> int:
    """Batches that a search takes, as a rule, where each is used once, also for a look at those set aside."""
    sweep = options.num_steps + options.moment_steps
    sweep += -(-options.num_steps // options.held_out_every) * -(-options.held_out_batches // 4)
    runs = RUNGS * (options.confirm_steps + options.held_out_batches)
    runs += RATES * options.seeds * (2 * options.confirm_steps + options.held_out_batches)
    return options.seeds * sweep + (runs if options.confirm_steps else 0)


def for_fed_batches(options: LrOptions, batches: int) -> LrOptions | None:
    """The longest search that takes ``batches`` batches, each once: at last a range test alone; ``None`` for none."""
    few = dataclasses.replace(options, seeds=1, held_out_batches=min(4, options.held_out_batches))
    candidates = [fitting(options, batches, share) for share in (1.0, 1.5, 2.0, 3.0)]
    candidates += [
        dataclasses.replace(few, num_steps=min(steps, options.num_steps), confirm_steps=min(runs, few.confirm_steps))
        for steps, runs in ((50, 20), (25, 10), (25, 0), (10, 0))
    ]
    return next((chosen for chosen in candidates if fed_batches_of(chosen) <= batches), None)
