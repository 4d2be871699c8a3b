"""Random layer-token drop: how many tokens a layer keeps at a step, with DeepSpeed's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ds_hf.errors import ConfigError, Fault

__all__ = ["RandomLTDScheduler", "token_faults"]


class RandomLTDScheduler:
    """How many tokens are kept, with DeepSpeed's numbers; steps count from 0.

    Args:
        config: ``random_ltd`` with ``global_batch_size``.

    Attributes:
        state: ``min_value``, ``max_value``, ``current_value``, ``schedule_config``, ``schedule_type``,
            ``consumed_layer_tokens`` and ``current_steps``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if faults := list(token_faults(config.get("random_ltd_schedule") or {})):
            raise ConfigError(faults, "random_ltd_schedule")
        if (config.get("layer_token_lr_schedule") or {}).get("enabled"):
            raise ConfigError(
                "a learning rate by layer-tokens does not exist (DeepSpeed has none either)", "random_ltd"
            )
        self.model_layer_num: int = config["total_layer_num"]
        self.random_ltd_layer_num: int = config["random_ltd_layer_num"]
        self.config_schedule: Mapping[str, Any] = config["random_ltd_schedule"]
        self.global_batch_size: int = config["global_batch_size"]
        self.state: dict[str, Any] = {}
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Begin anew."""
        given = self.config_schedule
        self.state = {
            "min_value": given["min_value"],
            "max_value": given["max_value"],
            "current_value": given["min_value"],
            "schedule_config": dict(given["schedule_config"]),
            "schedule_type": given["schedule_type"],
            "consumed_layer_tokens": 0,
            "current_steps": -1,
        }

    def get_value(self, global_steps: int) -> int:
        """What is kept at a step, by the schedule alone."""
        least, most, settings = self.state["min_value"], self.state["max_value"], self.state["schedule_config"]
        reached = math.floor(float(global_steps) / settings["require_steps"] * (most - least) + least)
        return int(min(reached - reached % settings["seq_per_step"], most))

    def update_seq(self, global_steps: int) -> None:
        """Go to a step; its layer-tokens are counted once."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            others = self.model_layer_num - self.random_ltd_layer_num
            tokens = self.state["current_value"] * self.random_ltd_layer_num + self.state["max_value"] * others
            self.state["consumed_layer_tokens"] += self.global_batch_size * tokens
            self.state["current_steps"] = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """The layer-tokens of so many steps. It goes through them: take a scheduler of its own for it."""
        for step in range(train_iters):
            self.update_seq(step)
        return int(self.state["consumed_layer_tokens"])

    def get_current_seq(self) -> int:
        """Tokens that are kept now."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Keep so many from now on."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Layers that drop tokens."""
        return self.random_ltd_layer_num

    def get_state(self) -> dict[str, Any]:
        """All of it."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what ``get_state`` gave."""
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        kept = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")
        return {name: self.state[name] for name in kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.state.update(state_dict)


def token_faults(schedule: Mapping[str, Any], base: str = "") -> Iterator[Fault]:
    """What is wrong with a ``random_ltd_schedule``; ``base`` is its pointer."""
    kind = schedule.get("schedule_type")
    if kind != "fixed_linear":
        message = "schedule_type is missing" if kind is None else f"there is no schedule {kind!r:.80}"
        yield Fault(f"{base}/schedule_type", message, 'give "fixed_linear"')
    values: dict[str, Any] = {key: schedule.get(key) for key in ("min_value", "max_value")}
    settings = schedule.get("schedule_config")
    settings = settings if isinstance(settings, Mapping) else {}
    values |= {f"schedule_config/{key}": settings.get(key) for key in ("require_steps", "seq_per_step")}
    wrong = [key for key, value in values.items() if type(value) is not int or value < 1]
    for key in wrong:
        name = key.rpartition("/")[2]
        message = f"{name} is missing" if values[key] is None else f"{values[key]!r:.80} is not a number of at least 1"
        yield Fault(f"{base}/{key}", message, f"give {name}: min_value to max_value tokens over require_steps steps")
    if wrong:
        return
    least, most, _, each = values.values()
    if least > most:
        message = f"it begins at {least} tokens, and ends at {most}"
        yield Fault(f"{base}/min_value", message, "give a min_value that is not above max_value")
    if least < each:
        message = f"no multiple of seq_per_step {each} is as small as min_value {least}: no token would be kept"
        yield Fault(f"{base}/schedule_config/seq_per_step", message, "raise min_value, or lower seq_per_step")
