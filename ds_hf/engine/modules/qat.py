"""Layers that round while they train as a file in few bits will have them (quantization-aware training), by torchao.

A linear layer takes the class of torchao's ``FakeQuantizedLinear``, in place: the parameter, its unit, its name and the
hooks around it stay, so nothing else of the engine knows of it, and a checkpoint is the same with and without. The grid
is that of ``ds_hf.checkpoint.few_bits``, so that ``ds-hf checkpoint convert --bits`` writes what was trained; what was
trained for stands in the checkpoint, where it looks for it.

Where weights are gathered for use and released again, their rounded copies would be kept for backward, whole and six
bytes a weight: there a layer computes them again (``torch.utils.checkpoint``, which ends before the product).

Sources: torchao's ``IntxFakeQuantizeConfig``; the gradient is the straight-through estimator's (arXiv:1308.3432), zero
where a value was cut off.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf.config.types.training import DsHfQatSection
from ds_hf.engine.modules.linear_layers import layers_of_backbone
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import ConfigError
from ds_hf.log import logger, warn_once

__all__ = ["RoundedLayers", "attach"]

_POINTER = "/ds_hf/qat"
_OWN = ("_ds_again", "_ds_owner")
_THEIRS = ("weight_fake_quantizer", "activation_fake_quantizer")


@cache
def _rounded_linear(base: Any) -> Any:
    """torchao's layer, which can do without what it rounded until backward."""

    class RoundedLinear(base):  # type: ignore[misc]
        _ds_again: bool

        def forward(self, x: Tensor) -> Tensor:
            if not self._ds_again or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                plain: Tensor = super().forward(x)
                return plain
            return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

        def __reduce_ex__(self, protocol: Any) -> Any:
            state = {name: value for name, value in vars(self).items() if name not in _OWN}
            state["_modules"] = {name: each for name, each in self._modules.items() if name not in _THEIRS}
            return _ordinary, (), state

    return RoundedLinear


def _ordinary() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


class RoundedLayers:
    """The rounding layers of one engine's model, until ``remove``.

    Args:
        ao: the module ``torchao.quantization.qat``.
        again: rounded weights are not kept for backward.

    Attributes:
        layers: those that are.
        others: how many linear layers stay as they are, by reason.

    Raises:
        ConfigError: a group does not divide the columns of a layer.
    """

    def __init__(self, model: nn.Module, section: DsHfQatSection, ao: Any, *, again: bool) -> None:
        self.section, self.layers, self.others = section, list[nn.Linear](), Counter[str]()
        kind = _rounded_linear(ao.FakeQuantizedLinear)
        for name, module, why in layers_of_backbone(model):
            why = _why_not(name, module, section, kind) or why
            if why:
                self.others[why] += 1
                continue
            _check_group(name, module, section)
            self.layers.append(module)
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for pattern in section.exclude:
            if not any(re.search(pattern, name) for name in names):
                warn_once(
                    f"ds_hf.qat.exclude: {pattern!r:.80} is in no linear layer's name, and leaves nothing out; "
                    f"there are {', '.join(names[:3])}, ..."
                )
        for module in self.layers:
            module.__class__ = kind
            weights, activations = _configs(section, ao)
            own: Any = module
            own.weight_fake_quantizer = ao.fake_quantizer.FakeQuantizerBase.from_config(weights)
            own.activation_fake_quantizer = (
                None if activations is None else ao.fake_quantizer.FakeQuantizerBase.from_config(activations)
            )
            own._ds_again, own._ds_owner = again, self

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        beside = f", inputs to {self.section.activations}" if self.section.activations else ""
        return f"{len(self.layers)} layers round their weights to {self.section.weights} bits{beside}"

    def state_dict(self) -> dict[str, Any]:
        """What the weights are trained for; ``few_bits.plan`` reads it."""
        return {
            "bits": self.section.weights,
            "group_size": self.section.group_size,
            "exclude": list(self.section.exclude),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say it where a checkpoint was trained for something else."""
        if (state.get("bits"), state.get("group_size")) != (self.section.weights, self.section.group_size):
            warn_once(
                f"the checkpoint was trained to be rounded to {state.get('bits')} bits in groups of "
                f"{state.get('group_size')}, and goes on with {self.section.weights} bits in groups of "
                f"{self.section.group_size}: convert it with the latter"
            )

    def remove(self) -> None:
        """Make the layers ordinary ones again."""
        for layer in self.layers:
            if layer.__dict__.get("_ds_owner") is not self:
                continue  # a later engine has taken it
            layer.__class__ = nn.Linear
            for name in _THEIRS:
                layer._modules.pop(name, None)
                layer.__dict__.pop(name, None)
            for name in _OWN:
                layer.__dict__.pop(name, None)
        self.layers.clear()


def _why_not(name: str, module: nn.Linear, section: DsHfQatSection, kind: type) -> str:
    if any(re.search(pattern, name) for pattern in section.exclude):
        return "excluded"
    if cut_of(module.weight) is not None:
        return "divided over processes (autotp_size)"
    if type(module) not in (nn.Linear, kind):  # an earlier engine's, which are taken over
        return f"of class {type(module).__name__}"
    if not module.weight.requires_grad:
        return "frozen"
    return ""


def _check_group(name: str, module: nn.Linear, section: DsHfQatSection) -> None:
    columns, group = logical_shape(module.weight)[-1], section.group_size
    if group is not None and columns % group:
        raise ConfigError(
            f"groups of {group} do not divide the {columns} columns of {name}: give group_size a divisor, null for one "
            "scale a row, or leave the layer out (exclude)",
            f"{_POINTER}/group_size",
        )


def _configs(section: DsHfQatSection, ao: Any) -> tuple[Any, Any]:
    """torchao's, of weights and inputs."""
    dtype = getattr(torch, f"int{section.weights}")
    shared = {"granularity": "per_channel"} if section.group_size is None else {"group_size": section.group_size}
    weights = ao.IntxFakeQuantizeConfig(dtype, is_symmetric=True, **shared)
    if section.activations is None:
        return weights, None
    return weights, ao.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)


def _torchao() -> Any:
    """Its room for this.

    Raises:
        ConfigError: it is not there, or not as it is needed.
    """
    try:
        found: Any = importlib.import_module("torchao.quantization.qat")
        importlib.import_module("torchao.quantization.qat.fake_quantizer")
        assert found.FakeQuantizedLinear, found.IntxFakeQuantizeConfig
    except ImportError as error:
        raise ConfigError(
            f"layers round by torchao, which cannot be imported ({error}): pip install 'ds-hf[few-bits]'", _POINTER
        ) from error
    except AttributeError as error:
        raise ConfigError(f"this torchao is too old ({error}): pip install -U torchao", _POINTER) from error
    return found


def attach(engine: Any) -> None:
    """Let the linear layers of an engine's model round from now on.

    Raises:
        ConfigError: torchao is not there, a group does not divide, the model has adapters, or no layer can.
    """
    section: DsHfQatSection = engine.settings.ds_hf.qat
    ao = _torchao()
    if any("lora_A" in module._modules for module in engine.module.modules()):
        raise ConfigError(
            "what is rounded are weights that train, and under adapters they are frozen: train whole weights, or merge "
            "the adapters first (merge_and_unload)",
            _POINTER,
        )
    layers = RoundedLayers(engine.module, section, ao, again=any(unit.sharded for unit in engine.units))
    others = ", ".join(f"{count} {why}" for why, count in layers.others.most_common())
    if not layers.layers:
        raise ConfigError(
            f"no linear layer of {type(engine.module).__name__} can be rounded ({others or 'there is none'})", _POINTER
        )
    engine.hooks.handles.append(layers)
    engine.kept["qat"] = layers
    if engine.mesh.world.rank == 0:
        logger.info("qat: %s%s", layers.note, f"; as they are: {others}" if others else "")
