"""``ReportCallback``: the Trainer's logs get the figures of ``ds_hf.report``, and training ends with a paragraph.

It is added by itself where the engine records a report: ``step_ms``, ``compute_ms``, ``exposed_gather_ms`` and so on,
and this process's ``tokens_per_second`` and ``mfu``, as means of the steps recorded since the last log. At the end
stands where the time went, what limits the run and what would help.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ds_hf.log import say

__all__ = ["ReportCallback", "add_report_callback"]


class ReportCallback(TrainerCallback):
    """Give it to ``Trainer(callbacks=[...])``, or leave that to ds_hf.

    Args:
        report: of the engine that trains; by default it is found when training begins.
    """

    def __init__(self, report: Any = None) -> None:
        self.report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of the steps since the last log of a loss."""
        if self.report is None or logs is None or "loss" not in logs:
            return
        figures = {name: round(value, 6) for name, value in self.report.figures().items()}
        logs.update(figures)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say where the time went, on the first process."""
        if self.report is None:
            return
        words = self.report.words()
        if words and not self.report.told:
            self.report.told = True
            say(words)


def add_report_callback(trainer: Any) -> None:
    """Have the logs of ``trainer`` and its end tell what its engine records, if it does."""
    engine = getattr(trainer, "deepspeed", None)
    report = None if engine is None else vars(engine).get("_ds_report")
    if report is None:
        return
    callbacks = trainer.callback_handler.callbacks
    for each in callbacks:
        if isinstance(each, ReportCallback):
            each.report = report
            return
    callbacks.insert(0, ReportCallback(report))  # before those that print
