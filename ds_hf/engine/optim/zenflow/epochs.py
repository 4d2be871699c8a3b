"""How many steps an epoch has, after which columns are chosen again where ``select_strategy`` says so."""

from __future__ import annotations

from typing import Any

from ds_hf.engine.optim.zenflow.store import ZenFlowStore
from ds_hf.errors import ConfigError, Fault
from ds_hf.log import log_once

__all__ = ["attach"]


def attach(engine: Any) -> None:
    """Take it from the loader of ``engine``, if it made one, and say what happens when.

    Raises:
        ConfigError: columns would be chosen more often than all are updated.
    """
    store, section = engine.optimizer.store, engine.settings.zero_optimization.zenflow
    assert isinstance(store, ZenFlowStore)
    rounds, loader = store.rounds, engine.training_dataloader
    if section.select_strategy != "step" and section.steps_per_epoch is None and hasattr(loader, "__len__"):
        every = 1 if section.select_strategy == "auto" else int(section.select_interval)
        rounds.choose_every = every * max(1, len(loader) // engine.gradient_accumulation_steps())
    if not rounds.automatic and 0 < rounds.choose_every < section.update_interval:
        message = f"all is updated every {section.update_interval} steps, and an epoch has {rounds.choose_every}"
        raise ConfigError([Fault("/zero_optimization/zenflow/update_interval", message, "give less")])
    again = f"again every {rounds.choose_every} steps" if rounds.choose_every else "once"
    apart = "as gradients say" if rounds.automatic else f"every {section.update_interval} steps"
    log_once(
        f"zenflow: {section.topk_ratio:.1%} of the columns of each matrix, chosen {again}, are updated in each step, "
        f"the others {apart}{', beside the steps that follow' if section.overlap_step else ''}; a checkpoint, and the "
        "end of Trainer.train(), make what waits and begin anew"
    )
