"""Progressive layer drop: a model that takes ``pld_theta`` is told it; of another, blocks are left out.

A block that is left out passes its hidden states on, and what one that is computed adds to them is divided by its
probability. Which are left out follows from the seed, the step, the call and the block, and from nothing of a process:
all of them agree, and a run that resumes goes on with the same ones. The last block that trains is computed where
nothing else would train. Units are gathered all the same.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.config.types import Config
from ds_hf.data.layer_keeping import ProgressiveLayerDrop, kept_share
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Events, Observer
from ds_hf.engine.modules.compiling import StandIn
from ds_hf.engine.modules.decoder_blocks import Calls, find_blocks
from ds_hf.engine.modules.keywords import takes
from ds_hf.engine.zero.hooks import Hook
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import logger

__all__ = ["LayerDrop", "attach"]

_KEYWORDS = ("progressive_layer_drop", "pld_theta")


class _Engine(Protocol):
    module: nn.Module
    settings: Config
    mesh: Mesh
    events: Events
    reducer: Any
    monitor: Any
    global_steps: int
    global_samples: int
    kept: dict[str, Any]


class LayerDrop(Observer):
    """Leaves blocks of ``engine``'s model out.

    Attributes:
        schedule: gives theta.
        blocks: empty for a model that is told theta.
    """

    def __init__(self, engine: _Engine) -> None:
        section = engine.settings.progressive_layer_drop
        self.engine, self.schedule = engine, ProgressiveLayerDrop(section.theta, section.gamma)
        self.seed = engine.settings.data_efficiency.seed
        forward = engine.module.forward
        self._keywords = [name for name in _KEYWORDS if takes(forward, name)]
        kinds = [each.kind for each in inspect.signature(forward).parameters.values()]
        self.blocks = [] if "pld_theta" in self._keywords else self._found(inspect.Parameter.VAR_KEYWORD in kinds)
        engine.reducer.fills = bool(self.blocks)  # one process updates what was left out as several do
        self._tell = engine.module.register_forward_pre_hook(Hook(self._with_theta), prepend=True, with_kwargs=True)
        self.calls = Calls(engine, self._begin)
        self.forms: dict[type[nn.Module], tuple[Any, ...]] = {}  # of what each class of block gives; () is a tensor
        self._around: list[StandIn] = []
        for index, block in enumerate(self.blocks):
            around = StandIn(block, "forward", _Sometimes(self, index, block, block.forward))
            self._around.append(around)
            block.__dict__["forward"] = around

    def _found(self, takes_all: bool) -> list[nn.Module]:
        try:
            return list(find_blocks(self.engine.module, "/progressive_layer_drop"))
        except ConfigError:
            if not takes_all:
                raise
        self._keywords = list(_KEYWORDS)
        model = type(self.engine.module).__name__
        logger.warning("progressive_layer_drop: %s has no list of blocks; its **kwargs are told pld_theta", model)
        return []

    def share(self, index: int) -> float:
        """The probability that the block of this place is computed in the present step."""
        return kept_share(self.schedule.get_theta(), index, len(self.blocks))

    def keeps(self, index: int, call: int) -> bool:
        """Whether it was drawn to be computed in this call."""
        return random.Random(f"{self.seed} {self.calls.step} {call} {index}").random() < self.share(index)

    def trains_outside(self) -> bool:
        """Whether anything trains that is in no block."""
        inside = {id(param) for block in self.blocks for param in block.parameters()}
        return any(param.requires_grad and id(param) not in inside for param in self.engine.module.parameters())

    def _begin(self, new: bool) -> None:
        self.schedule.update_state(self.calls.step)

    def _with_theta(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (self._keywords and module.training):
            return None
        state = self.schedule.get_state()
        return args, {**{name: state[name] for name in self._keywords}, **kwargs}

    def after_step(self, engine: Any) -> None:
        """Tell monitors."""
        if self.engine.monitor.writes:
            theta, samples = self.schedule.get_theta(), self.engine.global_samples
            self.engine.monitor.write_events([("Train/Samples/pld_theta", theta, samples)])

    def state_dict(self) -> dict[str, Any]:
        """All follows from the step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Calls of a step that was begun before are not counted."""
        self.calls.step = -1

    def close(self) -> None:
        self.engine.reducer.fills = False
        self._tell.remove()
        self.calls.close()
        for block, around in zip(self.blocks, self._around, strict=True):
            if block.__dict__.get("forward") is around:
                del block.__dict__["forward"]


class _Sometimes:
    """A block's forward that is left out in some steps; ``given`` may be replaced by compiled code."""

    decides = True  # outside of graphs: see ``ModuleCompiler.compile``

    def __init__(self, drop: LayerDrop, index: int, block: nn.Module, given: Callable[..., Any]) -> None:
        self.drop, self.index, self.block, self.given = drop, index, block, given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        call = self.drop.calls.of(self.block, hidden)
        if not call:
            return self.given(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        share = self.drop.share(self.index)
        if not self.drop.keeps(self.index, call) and not self._trains_alone(call):
            return self._passed_by(hidden, args, kwargs)
        output = self.given(*args, **kwargs)
        if type(self.block) not in self.drop.forms:
            self._learn_form(output)
        if share == 1.0:
            return output
        rows = self._rows_of(output, hidden)
        rows = hidden + (rows - hidden) / share
        return rows if isinstance(output, Tensor) else type(output)([rows, *output[1:]])

    def _trains_alone(self, call: int) -> bool:
        """Whether nothing would train in this call without the block: of those that do it is the last.

        Hidden states do not tell: those of checkpointed adapters ask for gradients that nothing needs.
        """
        trains = [any(param.requires_grad for param in block.parameters()) for block in self.drop.blocks]
        if not trains[self.index] or any(trains[self.index + 1 :]):
            return False
        earlier = any(trains[index] and self.drop.keeps(index, call) for index in range(self.index))
        return not earlier and not self.drop.trains_outside()

    def _passed_by(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``hidden`` in the form of what the block gives: alone, or before what else there is of it."""
        kind, forms = type(self.block), self.drop.forms
        if kind not in forms:  # none was computed yet: training goes on in the middle
            devices = [hidden.device] if hidden.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices), _evaluated(self.block):
                output = Context().run(self.given, *args, **kwargs)  # transformers collects router logits by context
            self._rows_of(output, hidden)
            self._learn_form(output)
            if kind not in forms:
                raise DsHfError(
                    f"progressive_layer_drop: {kind.__name__} gives more than hidden states (attention weights, a "
                    "cache), which a block that is left out has not: switch those off (output_attentions, use_cache), "
                    "or disable progressive_layer_drop"
                )
        form = forms[kind]
        hidden = hidden.view_as(hidden)  # a node of its own, or backward would come to what is around it first
        return form[0]([hidden, *form[1]]) if form else hidden

    def _learn_form(self, output: Any) -> None:
        if isinstance(output, Tensor):
            self.drop.forms[type(self.block)] = ()
        elif all(each is None for each in output[1:]):
            self.drop.forms[type(self.block)] = (type(output), output[1:])

    def _rows_of(self, output: Any, hidden: Tensor) -> Tensor:
        rows = output if isinstance(output, Tensor) else output[0]
        if not isinstance(rows, Tensor) or rows.shape != hidden.shape:
            raise DsHfError(
                f"progressive_layer_drop: {type(self.block).__name__} does not give hidden states of the shape that it "
                "takes, and a block that is left out passes them on: disable progressive_layer_drop"
            )
        return rows


@contextmanager
def _evaluated(block: nn.Module) -> Iterator[None]:
    """Inside, what ``block`` computes changes nothing that it keeps: running ranges and statistics."""
    trains = [module for module in block.modules() if module.training]
    for module in trains:
        module.training = False
    try:
        yield
    finally:
        for module in trains:
            module.training = True


def attach(engine: _Engine) -> None:
    """Leave blocks out from now on.

    Raises:
        ConfigError: of this model, or on this mesh, it cannot be done.
    """
    if engine.mesh.shape.pipe > 1:
        raise ConfigError(
            "progressive_layer_drop leaves out blocks of a whole model, and the processes have stages of a pipeline: "
            "disable it",
            "/progressive_layer_drop",
        )
    drop = LayerDrop(engine)
    engine.kept["progressive_layer_drop"] = drop
    engine.events.add(drop)
    engine.events.step_hooks.append(drop.after_step)
