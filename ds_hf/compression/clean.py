"""``redundancy_clean``: the end of compression, after which a model is an ordinary one, and smaller.

Quantized values and zeros become the weights. Where a group names related modules, rows, heads and channels are removed
from all of them, and the model's configuration follows, so that ``save_pretrained`` writes what plain transformers
loads. Whether it does is looked up: a model without values is made of that configuration, and its shapes are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hf.compression.compressed import Compressed
from ds_hf.compression.conv1d import convert_back
from ds_hf.compression.layers import is_conv1d, release
from ds_hf.compression.schedule import CompressionSchedule, forget, read_section, schedule_of
from ds_hf.compression.scopes import PRUNINGS, Group, inputs_of, outputs_of
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.zero.buffer import home_of, logical_shape
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import log_once, logger

__all__ = ["redundancy_clean"]

# Numbers by which models of transformers, and their configurations, say how wide an MLP is, ...
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
    "hidden_dim",
    "ffn_hidden_size",
    "dim_feedforward",
    "d_inner",
)
# ... how many heads there are, ...
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
# ... and how wide all of them are together.
_ALL_HEADS = ("all_head_size", "inner_dim", "split_size")


def redundancy_clean(model: Any, deepspeed_config: Any = None, mpu: Any = None) -> Any:
    """Make of a model that was compressed during training an ordinary, smaller one (DeepSpeed's name). Collective where
    parameters are sharded.

    Weights are quantized and masked for good, at the target's bits; rows, heads and channels of groups with
    ``related_modules`` are removed. Quantized activations end: a format of files quantizes them anew.

    Args:
        model: an engine, or the module that it trains: the engine is destroyed; or a model without an engine.
        deepspeed_config: what ``init_compression`` was given; may be left out.
        mpu: must be ``None``.

    Returns:
        The module, whole on each process.

    Raises:
        ConfigError: the model was not given to ``init_compression``, or with another section.
        DsHfError: another engine, which does not compress it, trains the model.
    """
    if mpu is not None:
        raise ConfigError("redundancy_clean(mpu=...): layers that processes divide are not compressed; leave mpu out")
    engine = model if isinstance(model, CoreEngine) else None
    module: nn.Module = model if engine is None else engine.module
    schedule = schedule_of(module)
    if schedule is None:
        raise ConfigError(
            "redundancy_clean() of a model that is not compressed: call init_compression(model, config) first, load "
            "what was trained into it, and clean it then"
        )
    if deepspeed_config is not None and read_section(deepspeed_config) != schedule.section:
        raise ConfigError("redundancy_clean() has another compression_training than init_compression() was given")
    root = schedule.model
    if engine is None and any(_is_trained(param) for param in module.parameters()):
        engine = schedule.engine() if schedule.engine is not None else None
        if engine is None:
            raise DsHfError(
                "redundancy_clean() of a model that an engine trains which does not compress it: call engine.destroy() "
                "first"
            )
        log_once("redundancy_clean() ends the engine that trained the model, whose parameters become others")
    before = sum(logical_shape(p).numel() for name, p in root.named_parameters() if not name.endswith("_mask_scores"))
    if engine is not None:
        schedule.go_to(engine.global_steps)
    with torch.no_grad(), GatheredParameters(list(module.parameters())):
        schedule.finish()
        values = _values(module)
    if engine is not None:
        engine.destroy()
    _own_parameters(module, values)
    shrunk = list(_shrink_all(schedule))
    for layer in root.modules():
        if isinstance(layer, Compressed):
            release(layer)
    convert_back(root)
    forget(root)
    if shrunk:
        _follow(root, shrunk)
        after = sum(param.numel() for param in root.parameters())
        logger.info("redundancy_clean: %d parameters are %d now (%.0f %%)", before, after, 100 * after / before)
    return module


def _is_trained(param: Tensor) -> bool:
    home = home_of(param)
    return home is not None and home.buffer.states is not None


# -- values ------------------------------------------------------------------------------------------------------------


def _values(root: nn.Module) -> dict[int, Tensor]:
    """By the id of a parameter its final values, in memory of their own; of those that an engine shards, or that a
    layer compresses."""
    values: dict[int, Tensor] = {}
    owners: dict[int, list[str]] = {}
    for name, module in root.named_modules():
        training = module.training
        if isinstance(module, Compressed):
            module.training = False  # nothing is rounded by chance any more
            weight, bias = module.compressed()
            module.training = training
            values.setdefault(id(module.weight), module._matrix(weight).clone())
            own = module._parameters.get("bias")
            if own is not None and bias is not None and bias is not own:
                values.setdefault(id(own), bias.clone())
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(name)
    compressed = {id(m.weight) for m in root.modules() if isinstance(m, Compressed)}
    for param in root.parameters():
        if home_of(param) is not None and id(param) not in values:
            values[id(param)] = param.detach().clone()
    _tell_tied(root, compressed, owners)
    return values


def _tell_tied(root: nn.Module, compressed: set[int], owners: dict[int, list[str]]) -> None:
    for key in compressed:
        plain = [name for name in owners[key] if not isinstance(root.get_submodule(name), Compressed)]
        if plain:
            logger.warning(
                "%s shares its weight with a layer that is compressed: its values become the same", ", ".join(plain)
            )


def _own_parameters(root: nn.Module, values: dict[int, Tensor]) -> None:
    """Ordinary parameters, with these values, in the place of those that had them; what was shared stays so."""
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, param in list(module._parameters.items()):
            if param is None or id(param) not in values:
                continue
            if id(param) not in made:
                made[id(param)] = nn.Parameter(values[id(param)].contiguous(), requires_grad=param.requires_grad)
            module._parameters[name] = made[id(param)]


# -- shapes ------------------------------------------------------------------------------------------------------------


class _Shrunk(NamedTuple):
    """What one group has removed: of ``total`` rows, heads or channels (``what``) there are ``kept``."""

    what: str
    total: int
    kept: int


def _shrink_all(schedule: CompressionSchedule) -> Iterator[_Shrunk]:
    for group in schedule.groups:
        what = PRUNINGS.get(group.method)
        if what not in ("row", "head", "channel") or not group.related:
            continue
        sizes = set()
        for name, layer in schedule.layers(group):
            if group.related.get(name):
                mask = layer.mask_of(what).detach().view(-1) > 0
                _shrink(schedule.model, group, name, mask)
                sizes.add((mask.numel(), int(mask.sum())))
        for total, kept in sizes:
            yield _Shrunk(what, total, kept)


def _shrink(root: nn.Module, group: Group, name: str, mask: Tensor) -> None:
    layer = root.get_submodule(name)
    others = [root.get_submodule(other) for other in group.related[name]]
    total, kept = mask.numel(), int(mask.sum())
    if group.method == "head_pruning":
        width = inputs_of(layer)
        for other in others:
            stacks = 3 if outputs_of(other) == 3 * width else 1  # queries, keys and values in one layer
            _keep_outputs(other, mask.repeat_interleave(outputs_of(other) // stacks // total).repeat(stacks))
        _keep_inputs(layer, mask.repeat_interleave(width // total))
        _set_heads(root, name, total, kept)
        return
    for other in others:
        if inputs_of(other) == total and not isinstance(other, nn.BatchNorm2d):
            _keep_inputs(other, mask)
        elif isinstance(other, nn.Linear) and group.method == "channel_pruning":
            _keep_inputs(other, mask.repeat_interleave(inputs_of(other) // total))
        else:  # a gate beside it, or a norm after it
            _keep_outputs(other, mask)
    _keep_outputs(layer, mask)
    parent = root.get_submodule(name.rpartition(".")[0])
    for key in _WIDTHS:
        if isinstance(vars(parent).get(key), int) and vars(parent)[key] == total:
            setattr(parent, key, kept)


def _keep_outputs(module: nn.Module, mask: Tensor) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        dim = 1 if name == "weight" and is_conv1d(module) else 0
        _select(module, name, dim, mask)
    kept = int(mask.sum())
    for key in ("out_features", "out_channels", "num_features", "nf"):
        if key in vars(module):
            setattr(module, key, kept)


def _keep_inputs(module: nn.Module, mask: Tensor) -> None:
    _select(module, "weight", 0 if is_conv1d(module) else 1, mask)
    kept = int(mask.sum())
    for key in ("in_features", "in_channels", "nx"):
        if key in vars(module):
            setattr(module, key, kept)


def _select(module: nn.Module, name: str, dim: int, mask: Tensor) -> None:
    param, buffer = module._parameters.get(name), module._buffers.get(name)
    places = mask.nonzero().view(-1)
    if param is not None:
        values = param.detach().index_select(dim, places.to(param.device)).contiguous()
        module._parameters[name] = nn.Parameter(values, requires_grad=param.requires_grad)
    elif buffer is not None:
        module._buffers[name] = buffer.index_select(dim, places.to(buffer.device)).contiguous()


def _set_heads(root: nn.Module, name: str, total: int, kept: int) -> None:
    """The numbers by which modules around a layer know its heads."""
    parents = [name.rpartition(".")[0]]
    parents.append(parents[0].rpartition(".")[0])
    around = [root.get_submodule(parent) for parent in parents]
    around += [child for parent in around for child in parent.children() if "ttention" in type(child).__name__]
    for module in {id(each): each for each in around}.values():
        for key in (*_HEADS, *_ALL_HEADS):
            value = vars(module).get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value % total == 0:
                setattr(module, key, value // total * kept)


# -- configurations ----------------------------------------------------------------------------------------------------


def _follow(root: nn.Module, shrunk: list[_Shrunk]) -> None:
    """Let the model's configuration say what there is now, and say where it cannot."""
    config = getattr(root, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return
    new = copy.deepcopy(config)
    for each in shrunk:
        if each.what == "head":
            _set_config_heads(new, each)
        elif each.what == "row":
            _set_config_width(new, each)
    wrong = _mismatch(root, new)
    if wrong is None:
        for key, value in vars(new).items():
            if key in (*_WIDTHS, *_HEADS, "head_dim") and vars(config).get(key) != value:
                setattr(config, key, value)
        return
    logger.warning(
        "redundancy_clean: plain transformers cannot load this model, as its configuration has no way to say what it "
        "is: %s. It computes as it is; save it by torch.save(model), or leave related_modules out, which keeps the "
        "shapes and makes zeros",
        wrong,
    )


def _set_config_width(config: Any, each: _Shrunk) -> None:
    for key in _WIDTHS:
        if getattr(config, key, None) == each.total:
            setattr(config, key, each.kept)
            return
    if getattr(config, "n_inner", 0) is None and 4 * getattr(config, "n_embd", 0) == each.total:
        config.n_inner = each.kept


def _set_config_heads(config: Any, each: _Shrunk) -> None:
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and getattr(config, "head_dim", None) is None and hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // heads
    for key in _HEADS:
        value = vars(config).get(key)
        if isinstance(value, int) and value % each.total == 0:
            setattr(config, key, value // each.total * each.kept)


def _mismatch(root: nn.Module, config: Any) -> str | None:
    """A parameter that a model of ``config`` has in another shape; ``None`` where all are alike."""
    try:
        with torch.device("meta"):
            fresh = type(root)(config)
    except Exception as error:
        return f"a model of it cannot be made ({type(error).__name__}: {str(error)[:200]})"
    shapes = {name: tuple(param.shape) for name, param in fresh.named_parameters()}
    for name, param in root.named_parameters():
        if shapes.get(name) != tuple(param.shape):
            return f"{name} is {tuple(param.shape)}, and would be {shapes.get(name)}"
    return None
