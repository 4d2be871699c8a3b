"""Cutting a model: each parameter that a rule names becomes the part that is here, and stays the same object.

A cut parameter is an ordinary, smaller one to everything that comes after: flat buffers, optimizers that were made
before, kernels. It happens before units are made. Of a model that was built under ``zero.Init`` one parameter is
gathered at a time, and its part is sharded again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config.types.parallel import TensorParallelSection
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, Mesh, compute_device
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.parallel.tensor.gathered import Divided, mark_divided
from ds_hf.engine.parallel.tensor.heads import share_heads
from ds_hf.engine.parallel.tensor.hosts import warn_across_hosts
from ds_hf.engine.parallel.tensor.plan import Slicing, plan_division
from ds_hf.engine.parallel.tensor.styles import STYLES, AlibiPart, Style, place_of, swap_class
from ds_hf.engine.parallel.tensor.tokens import divide_tokens
from ds_hf.engine.zero.buffer import home_of, leave_home, unshard
from ds_hf.engine.zero.cut import cut_of, is_marked, set_cut
from ds_hf.engine.zero.init import shard_again
from ds_hf.engine.zero.replicas import expert_processes, sum_over_tensor
from ds_hf.errors import ConfigError

_WHOLLY = "_ds_wholly_divided"  # on a model whose layers are all cut as its rules say

WHOLE_COUNTS = "_ds_whole_counts"  # in a module: its numbers of heads and widths, of which it has those that are here

__all__ = ["WHOLE_COUNTS", "check_whole", "cut_parameter", "divide", "divide_without_values"]


def divide(model: nn.Module, mesh: Mesh, section: TensorParallelSection, optimizer: Any = None) -> None:
    """Cut ``model`` over the tensor axis of ``mesh``, in place. Collective.

    A model that is cut over as many processes already (by an engine that was destroyed) stays as it is, and so do the
    layers that it shares with such a one. The random states of torch become those of the first tensor-parallel process:
    dropout outside of cut layers has to draw the same on all.

    Args:
        section: ``tensor_parallel`` of the configuration.
        optimizer: one that was made of the model's parameters; its states are cut with them.

    Raises:
        ConfigError: see ``plan_division``; or the model is cut otherwise already.
    """
    axis = mesh.axis("tensor")
    warn_across_hosts(axis)
    if not _is_divided(model, axis):
        divisions = _planned(model, section, mesh, axis)
        _check_shared(model, divisions)
        divisions = [division for division in divisions if place_of(division.module) is None]
        copied, tied = list[Any]([None]), {id(param) for param in model.parameters() if cut_of(param) is not None}
        for division in divisions:
            _apply(division, model, mesh, axis, copied, tied, optimizer)
        _localise(model, divisions, axis)
        _make_neighbours(mesh, divisions)
        share_heads(model, divisions, mesh.sharing_neighbours, copied)
        _cut_relative_biases(model, mesh, optimizer)
        model.__dict__[_WHOLLY] = True
    share_random_states(axis)


def _planned(model: nn.Module, section: TensorParallelSection, mesh: Mesh, axis: Axis) -> list[Slicing]:
    """The divisions. Stages of a pipeline have other layers each: the faults of one stop all, which would wait for it
    in the next collective."""
    if mesh.shape.pipe == 1:
        return plan_division(model, section, axis.world_size)
    divisions, own = list[Slicing](), None
    try:
        divisions = plan_division(model, section, axis.world_size)
    except ConfigError as error:
        own = error
    found: list[ConfigError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    first = own or next((fault for fault in found if fault is not None), None)
    if first is not None:
        raise first
    return divisions


def _make_neighbours(mesh: Mesh, divisions: Sequence[Slicing]) -> None:
    """Make the groups of ``share_heads`` on all stages of a pipeline, also on one that has no attention."""
    sizes = {division.neighbours for division in divisions if division.neighbours > 1}
    if mesh.shape.pipe > 1:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sizes)
        sizes = set().union(*every)
    for size in sorted(sizes):
        mesh.sharing_neighbours(size)


def divide_without_values(model: nn.Module, size: int, section: TensorParallelSection, *, tokens: bool = False) -> None:
    """Cut a model on the meta device as the first of ``size`` processes has it, for predictions: nothing is sent.

    Args:
        tokens: those between cut layers are divided, too (``ds_hf.tensor_sequence_parallel``).

    Raises:
        ConfigError: see ``plan_division``.
    """
    axis = Axis(None, 0, size)
    divisions = plan_division(model, section, size)
    copied, tied = list[Any]([None]), set[int]()
    for division in divisions:
        _apply(division, model, None, axis, copied, tied, None)
    _localise(model, divisions, axis)
    share_heads(model, divisions, lambda size: Axis(None, 0, size), copied)
    divide_tokens(model, axis, wanted=tokens)


def _is_divided(model: nn.Module, axis: Axis) -> bool:
    marked = next((name for name, p in model.named_parameters() if is_marked(p) and cut_of(p) is None), None)
    if marked is not None:
        raise ConfigError(
            f"{marked} is marked as divided by the model's author, and tensor_parallel asks to divide it: remove the "
            "one or the other",
            "initialize(mpu=...)",
        )
    places = _places(model)
    if not places:
        return False
    if any(_ranks(place.axis) != _ranks(axis) for place in places):
        raise ConfigError(
            f"the model was cut over {places[0].axis.world_size} processes by an engine before, and now it is to be "
            f"{axis.world_size}, or others: load the model anew",
            "initialize(model=...)",
        )
    inside = {id(param) for module in model.modules() if _WHOLLY in module.__dict__ for param in module.parameters()}
    return all(id(param) in inside for param in model.parameters())


def _check_shared(model: nn.Module, divisions: Sequence[Slicing]) -> None:
    """
    Raises:
        ConfigError: a layer that stays whole has a weight of which an engine before has left a part here.
    """
    parts = {id(division.module) for division in divisions if division.parts}
    for name, module in model.named_modules():
        if id(module) in parts or place_of(module) is not None or "_place" in vars(module):
            continue  # the last are layers of deepspeed.module_inject, which cut their own weights
        for key, param in module._parameters.items():
            if param is not None and cut_of(param) is not None and expert_processes(param) == 1:
                raise ConfigError(
                    f"{name}.{key} is shared with a model whose layers an engine has cut over processes, and here it "
                    "stays whole: give both models the same rules, or each its own copy of the weight",
                    "initialize(model=...)",
                )


def _places(model: nn.Module) -> list[Place]:
    """Of the layers that an engine has cut; divided experts are none of them."""
    placed = [(module, place) for module in model.modules() if (place := place_of(module)) is not None]
    cut = [(module, place) for module, place in placed if place.axis.world_size > 1]
    return [place for module, place in cut if all(expert_processes(param) == 1 for param in module.parameters())]


def check_whole(model: nn.Module) -> None:
    """For an engine that divides no layers.

    Raises:
        ConfigError: an engine before has, so each process has a part of what would be taken for all of it.
    """
    if places := _places(model):
        raise ConfigError(
            f"{places[0].name} and other layers were cut over {places[0].axis.world_size} processes by an engine "
            "before, and now no layer is to be: load the model anew",
            "initialize(model=...)",
        )


def _ranks(axis: Axis) -> list[int]:
    """Two engines may have groups of their own for the same processes."""
    return [axis.global_rank(rank) for rank in range(axis.world_size)]


def _apply(
    division: Slicing,
    model: nn.Module,
    mesh: Mesh | None,
    axis: Axis,
    copied: list[Any],
    tied: set[int],
    optimizer: Any,
) -> None:
    module = division.module
    if division.style is STYLES["replicate"]:
        for whole in module.parameters():
            sum_over_tensor(whole, parts=False)
    for key in division.sums:
        param = module._parameters[key]
        assert param is not None
        sum_over_tensor(param)
    for key in division.parts:
        param = module._parameters[key]
        assert param is not None
        if id(param) not in tied and (not param.is_meta or division.style.cuts):
            tied.add(id(param))  # another module may have it, too
            cut_parameter(param, division, key, axis, optimizer, shards=None if mesh is None else mesh.replicas)
            mark_divided(param)
    if division.style.module is None:
        return
    known: dict[str, Any] = {}
    if division.style.cuts == "rows":
        weight = module._parameters["weight"]
        assert weight is not None
        cut = cut_of(weight)
        assert cut is not None
        known["_ds_first_row"] = cut.ranges[0][0]
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            local = padding - cut.ranges[0][0]
            known["padding_idx"] = local if 0 <= local < cut.ranges[0][1] else None
    elif division.style is STYLES["mla_kv_a_proj"]:
        known["_ds_rotary"] = _rotary(model, division)
    if division.style.cuts == "out" and "nf" in vars(module):  # of Conv1D, which shapes its result by it
        known["nf"] = vars(module)["nf"] // axis.world_size
    swap_class(module, division.style.module, Place(axis, division.name, copied), **known)


def _rotary(model: nn.Module, division: Slicing) -> int:
    for holder in (division.module, *model.modules()):
        config = getattr(holder, "config", None)
        config = getattr(config, "text_config", None) or config
        found = getattr(holder, "qk_rope_head_dim", None) or getattr(config, "qk_rope_head_dim", None)
        if isinstance(found, int):
            return found
    raise ConfigError(f"{division.name} is the first layer of MLA, and no configuration says qk_rope_head_dim")


@torch.no_grad()
def cut_parameter(
    param: nn.Parameter, division: Slicing, key: str, axis: Axis, optimizer: Any, *, shards: Axis | None
) -> None:
    """Leave of ``param``, the ``key`` of a division, the part of this process. Collective where it has values.

    Args:
        axis: the processes that divide it.
        optimizer: one that was made of it, whose states are cut as well.
        shards: of a parameter that was built under ``zero.Init``, the processes over which its part is sharded again.
    """
    home = home_of(param)
    if home is not None and home.buffer.sharded and shards is not None:  # every process gathers the same values
        buffer = home.buffer
        with unshard([buffer]):
            cut = division.cut(key, param.shape, axis.rank, axis.world_size)
            local = cut.take(param.data).clone(memory_format=torch.contiguous_format)
        leave_home(param)
        param.data = local
        set_cut(param, cut)
        shard_again(param, shards, like=buffer)
    else:
        cut = division.cut(key, param.shape, axis.rank, axis.world_size)
        whole = param.data
        if not whole.is_meta:
            whole = whole.to(compute_device(), copy=True)
            collectives.broadcast(whole, axis, what=f"the weights of {division.name}")
        leave_home(param)
        param.data = cut.take(whole).to(param.device, copy=True).contiguous()
        set_cut(param, cut)
    cuts = [division.cut(key, cut.whole, rank, axis.world_size) for rank in range(axis.world_size)]
    param._ds_divided = Divided(axis, cuts)  # type: ignore[attr-defined]
    if param.grad is not None:
        param.grad = None
    if isinstance(optimizer, Optimizer) and param in optimizer.state:
        for name, value in optimizer.state[param].items():
            if isinstance(value, Tensor) and value.shape == cut.whole:
                optimizer.state[param][name] = cut.take(value).clone()


# -- what the layers' own code counts ------------------------------------------------------------------------------

_COUNTS = (
    "n_head",
    "n_heads",
    "num_heads",
    "num_kv",
    "num_attention_heads",
    "num_attn_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "split_size",
    "inner_dim",
    "d_model",
    "num_attention_heads_per_partition",
    "num_multi_query_groups_per_partition",
    "hidden_size_per_partition",
)
_CONFIG_COUNTS = ("num_attention_heads", "num_key_value_heads", "n_head", "multi_query_group_num")


def _localise(model: nn.Module, divisions: Sequence[Slicing], axis: Axis) -> None:
    """Where rules were given for a model that does not know of tensor parallelism: the numbers of heads, and widths, by
    which the parents of layers that are cut by their outputs shape what these give. DeepSpeed changes the same."""
    size = axis.world_size
    modules, done = dict(model.named_modules()), set[nn.Module]()
    for division in divisions:
        if not division.localises or division.style.cuts != "out" or division.style.gathers:
            continue
        parent = modules[division.name.removesuffix(".base_layer").rpartition(".")[0]]
        if parent is model or parent in done or isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        done.add(parent)
        found = {name: value for name in _COUNTS if type(value := vars(parent).get(name)) is int and value % size == 0}
        for name, value in found.items():
            setattr(parent, name, value // size)
        config = vars(parent).get("config")
        if config is not None and "attention" in type(parent).__name__.lower():
            parent.config = _local_config(config, size)
            found["config"] = config
        parent.__dict__[WHOLE_COUNTS] = found
        if "alibi" in inspect.signature(type(parent).forward).parameters:
            swap_class(parent, AlibiPart, Place(axis, division.name, [None]))


def _cut_relative_biases(model: nn.Module, mesh: Mesh, optimizer: Any) -> None:
    """T5 adds a learnt bias a head to the scores: each process keeps the columns of its heads. Collective."""
    axis = mesh.axis("tensor")
    for name, module in model.named_modules():
        table: Any = getattr(module, "relative_attention_bias", None)
        heads = vars(module).get("n_heads")
        if isinstance(table, nn.Embedding) and table.embedding_dim == (heads or 0) * axis.world_size:
            whole = Slicing(f"{name}.relative_attention_bias", table, Style(), {"weight": (1, (table.embedding_dim,))})
            weight: Any = table.weight
            cut_parameter(weight, whole, "weight", axis, optimizer, shards=mesh.replicas)
            mark_divided(weight)
            table.embedding_dim = heads
            table.__dict__["_ds_place"] = Place(axis, whole.name, [None])


def _local_config(config: Any, size: int) -> Any:
    local = copy.copy(config)
    for name in _CONFIG_COUNTS:
        value = getattr(local, name, None)
        if type(value) is int and value % size == 0:
            setattr(local, name, value // size)
    return local


# -- random states -------------------------------------------------------------------------------------------------


def share_random_states(axis: Axis) -> None:
    """Give all processes of ``axis`` the states of the first one's generators, CPU and device. Collective."""
    device = compute_device()
    state = torch.get_rng_state().to(device)
    collectives.broadcast(state, axis, what="random states")
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state().to(device)
        collectives.broadcast(state, axis, what="random states")
        torch.cuda.set_rng_state(state.cpu())
