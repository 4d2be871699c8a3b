"""Curriculum by length: while the model trains its batches are cut to the difficulty of the step.

The cut is where the model is called, so it is there in every loop; what counts a batch before that (the Trainer's items
of a step) asks ``cut`` first, and finds nothing left to cut later. A model whose forward takes ``curriculum_seqlen``,
or reads it from its ``**kwargs``, cuts by itself and is told the number. What calls without gradients, or in
evaluation, sees whole batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.config.data_efficiency import length_settings
from ds_hf.config.types import Config
from ds_hf.data.difficulty import CurriculumScheduler
from ds_hf.data.lengths import check_batch, cut_batch, labels_left, length_of
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Events, Observer
from ds_hf.engine.modules.keywords import takes
from ds_hf.engine.zero.hooks import Hook
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import logger, warn_once

__all__ = ["Curriculum", "attach"]

_KEYWORD = "curriculum_seqlen"
_OF = "the training batches"


class CurriculumEngine(Protocol):
    """The engine as this sees it."""

    module: nn.Module
    settings: Config
    mesh: Mesh
    events: Events
    kept: dict[str, Any]
    monitor: Any
    global_steps: int
    global_samples: int


class Curriculum(Observer):
    """Cuts the batches of ``engine``.

    Attributes:
        name: of the metric.
        scheduler: gives the difficulty.
    """

    def __init__(self, engine: CurriculumEngine, name: str, settings: Mapping[str, Any]) -> None:
        self.engine, self.name = engine, name
        self.scheduler = CurriculumScheduler(settings)
        self._names = list(inspect.signature(engine.module.forward).parameters)
        self._tells = takes(engine.module.forward, _KEYWORD)
        self._checked = False
        self._doubts: list[tuple[Tensor, str]] = []  # of batches that were cut since
        self._left: Tensor | None = None  # whether the last cut batch had a label left
        self._handle = engine.module.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True)

    @property
    def length(self) -> int:
        """Positions that a sequence has at most in the coming step."""
        found = self.scheduler.update_difficulty(self.engine.global_steps + 1)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 1 <= found < float("inf"):
            raise ConfigError(f"the schedule of {self.name} gives {found!r:.80}: a length is a number of at least 1")
        return int(found)

    def cut(self, batch: Any) -> Any:
        """``batch`` as the coming step has it: a mapping of the model's keywords, a sequence of tensors, or one.

        For what looks at a batch besides the model: a loss of one's own, counts of tokens.

        Raises:
            DsHfError: it cannot be cut so that it means the same.
        """
        if self._tells:
            return batch
        length, before = self.length, length_of(batch)
        if before is None or before <= length:
            return batch
        # Any batch may be the first that is padded or packed; values on a device are looked at when the next one comes.
        self._doubts += check_batch(batch, _OF, wait=not self._checked)
        self._checked = True
        return cut_batch(batch, length)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        if self._tells:
            return args, {_KEYWORD: self.length, **kwargs}
        self._look_back()
        maps = [index for index, value in enumerate(args) if isinstance(value, Mapping)]
        if maps:
            return tuple(self.cut(value) if index in maps else value for index, value in enumerate(args)), kwargs
        names = [*self._names, *map(str, range(len(args)))][: len(args)]
        batch = {**dict(zip(names, args, strict=True)), **kwargs}
        before = length_of(batch)
        if before is None:
            raise DsHfError(
                f"the curriculum of {self.name} found no tokens to cut in a call of {type(module).__name__}: it looks "
                "for input_ids, inputs_embeds or integers [batch, positions]. Remove the curriculum, or let forward "
                f"take {_KEYWORD}, and cut there"
            )
        self._tell_of_short(before)
        cut = self.cut(batch)
        if cut is batch:
            return None
        if "num_items_in_batch" not in kwargs:
            self._left = labels_left(cut)
        return tuple(cut[name] for name in names), {name: cut[name] for name in kwargs}

    def _look_back(self) -> None:
        doubts, self._doubts = self._doubts, []
        for doubt, sentence in doubts:
            if bool(doubt):
                raise DsHfError(sentence)
        left, self._left = self._left, None
        if left is not None and not bool(left):
            raise DsHfError(
                f"the curriculum of {self.name} left no label in a micro-batch: its loss is 0 / 0. Prompts are longer "
                "than the first lengths: raise min_difficulty above them, or train on the prompts as well"
            )

    def _tell_of_short(self, before: int) -> None:
        least = self.scheduler.state["min_difficulty"]
        if self.engine.global_steps == 0 and before < least:
            warn_once(
                f"the curriculum of {self.name} begins at {least} positions, and the first batch has {before}: it cuts "
                "nothing of such batches. Lower min_difficulty, or remove the curriculum",
                about="a curriculum longer than the batches",
            )

    def set_custom(self, functions: Mapping[str, Callable[[int], Any]]) -> None:
        """The function of a "custom" schedule, by the name of its metric."""
        if self.scheduler.state["schedule_type"] != "custom":
            warn_once(f'the schedule of {self.name} is not "custom": the function for it is not used')
        elif self.name in functions:
            self.scheduler.set_custom_get_difficulty(functions[self.name])

    def after_step(self, engine: Any) -> None:
        """Tell monitors the length of the step that is over."""
        if self.engine.monitor.writes:
            length = self.scheduler.get_current_difficulty()
            self.engine.monitor.write_events([("Train/Samples/seqlen", float(length), self.engine.global_samples)])

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints.

        Raises:
            DsHfError: the last micro-batch before it had no label left, so that weights may be NaN.
        """
        self._look_back()
        return {"difficulty": self.scheduler.get_current_difficulty()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The rest follows from the step."""
        self.scheduler.set_current_difficulty(state["difficulty"])

    def close(self) -> None:
        self._handle.remove()
        try:
            self._look_back()
        except DsHfError as error:  # of the last micro-batch: there is no other call that could say it
            logger.warning("%s", error)


def attach(engine: CurriculumEngine) -> None:
    """Cut batches from now on, if the configuration says so.

    Raises:
        ConfigError: of this model, or on this mesh, it cannot be done.
    """
    found = length_settings(engine.settings)
    if found is None:
        return
    pointer, settings = found
    if engine.mesh.shape.sequence > 1 or engine.mesh.shape.pipe > 1:
        what = "stages of a pipeline" if engine.mesh.shape.pipe > 1 else "parts of sequences"
        raise ConfigError(
            f"a curriculum by length cuts whole sequences where the model is called, and the processes have {what}: "
            "remove the curriculum, or the division",
            pointer,
        )
    config = getattr(engine.module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(engine.module).__name__} has sequences of an encoder and of a decoder, which differ in length: a "
            "curriculum by length is for models with one",
            pointer,
        )
    places, most = getattr(config, "max_position_embeddings", None), settings["max_difficulty"]
    if isinstance(places, int) and most > places:
        warn_once(f"the curriculum ends at {most} positions, and {type(engine.module).__name__} has {places}")
    curriculum = Curriculum(engine, pointer.rpartition("/")[2] if "metrics" in pointer else "seqlen", settings)
    engine.kept["curriculum"] = curriculum
    engine.events.add(curriculum)
    engine.events.step_hooks.append(curriculum.after_step)
