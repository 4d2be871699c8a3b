"""Values of ``--optim`` that cannot train under an engine, refused when the arguments are parsed.

Left alone they end in an error from inside the optimizer after the model was loaded, or train nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ds_hf.config import Config
from ds_hf.config.plan import plan_states
from ds_hf.errors import Fault

__all__ = ["find_unfit_optimizers"]

INSIDE_BACKWARD = ("lomo", "adalomo")
LOW_RANK = ("galore_", "apollo_")


def find_unfit_optimizers(config: Config | None, arguments: Any) -> list[Fault]:
    """What is wrong with ``arguments.optim`` (a TrainingArguments).

    Args:
        config: the configuration with its "auto" values; None where accelerate has it.
    """
    return list(_look(config, str(getattr(arguments.optim, "value", arguments.optim))))


def _look(config: Config | None, name: str) -> Iterator[Fault]:
    if name in INSIDE_BACKWARD or name.endswith("_layerwise"):
        yield Fault(
            "",
            f"--optim {name} updates each parameter inside backward, before the engine has reduced its gradient",
            "take another --optim; at ZeRO stages 1 to 3 optimizer states are divided among the processes, "
            "and offload_optimizer keeps them off the device",
        )
    elif name.startswith(LOW_RANK) and config is not None and config.optimizer is None and _gives_pieces(config):
        yield Fault(
            "/zero_optimization/stage",
            f"--optim {name} projects whole gradient matrices, but sharded optimizer states give it pieces of them",
            "use stage 0, or another --optim",
        )


def _gives_pieces(config: Config) -> bool:
    return plan_states(config).shards_optimizer and int(os.environ.get("WORLD_SIZE") or 1) > 1
