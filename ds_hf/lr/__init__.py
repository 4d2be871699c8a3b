"""Learning rates from measurements: curves, rules, confirming runs and schedules. Pure Python, below the engine.

The engine (``ds_hf.engine.observe.probes.learning_rate``) measures and asks ``decide`` what to measure next; the
command line and the report (``ds_hf.autotune.lr``) show the ``LrResult``. How it works is in docs/design/tools.md.
"""

from ds_hf.lr.confirm import Decision, PlannedRun, RunResult, decide, run_lr, so_far
from ds_hf.lr.curves import Curve, Sweep, mean_curve
from ds_hf.lr.options import LrOptions
from ds_hf.lr.result import LrResult
from ds_hf.lr.rules import Landmarks, landmarks
from ds_hf.lr.schedules import Advice, advise

__all__ = [
    "Advice",
    "Curve",
    "Decision",
    "Landmarks",
    "LrOptions",
    "LrResult",
    "PlannedRun",
    "RunResult",
    "Sweep",
    "advise",
    "decide",
    "landmarks",
    "mean_curve",
    "run_lr",
    "so_far",
]
