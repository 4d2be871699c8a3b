"""Finding a learning rate with a user's script: launch it, read what its engine measured, show it.

``find(command, options) -> LrResult`` is what ``ds-hf lr-find`` and ``ds-hf autotune --lr`` call; the arithmetic is in
``ds_hf.lr``, the measuring in ``ds_hf.engine.observe.probes.learning_rate``. Nothing here imports the engine or torch.
"""

from ds_hf.autotune.lr.figure import figure
from ds_hf.autotune.lr.find import FindOptions, LrSearchError, find, total_steps_in
from ds_hf.autotune.lr.report import closing_line, report, sections
from ds_hf.autotune.lr.summary import event_line, summary
from ds_hf.lr import LrOptions, LrResult
from ds_hf.lr.budget import fitting, updates_of

__all__ = [
    "FindOptions",
    "LrOptions",
    "LrResult",
    "LrSearchError",
    "closing_line",
    "event_line",
    "figure",
    "find",
    "fitting",
    "report",
    "sections",
    "summary",
    "total_steps_in",
    "updates_of",
]
