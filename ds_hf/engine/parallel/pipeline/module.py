"""What a stage holds of a sequence of layers: ``StageModule``, which becomes DeepSpeed's ``PipelineModule``.

Invariants
- Layer ``i`` is the child ``str(i)``, a tied one ``tied_modules[key]``: names do not depend on the number of stages.
- Layers of other stages are described at most, on the meta device, and never built.
- A module that several stages hold has the same values on all of them; its gradient is the sum over them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf.engine.comm.mesh import Axis, compute_device
from ds_hf.engine.comm.process_group import init_distributed
from ds_hf.engine.comm.together import building
from ds_hf.engine.parallel.likeness import describe_arguments, describe_config
from ds_hf.engine.parallel.pipeline.division import LayerDivision, divide_layers
from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.engine.parallel.pipeline.handing import hand_over, set_alike
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec, check_apart, tied_keys
from ds_hf.engine.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from ds_hf.engine.zero.replicas import tie_over_stages
from ds_hf.errors import ConfigError
from ds_hf.log import say

__all__ = ["StageModule", "recompute"]

_WHERE = "PipelineModule(...)"


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` without its activations, which backward computes again."""
    return checkpoint(function, *args, use_reentrant=False)


class StageModule(nn.Module):
    """The layers of this process's stage; ``forward`` runs them one after another. All processes make it.

    Args:
        layers: ``LayerSpec``, ``TiedLayerSpec``, modules, or functions of one argument, in order. The output of each is
            the input of the next: a tensor or a tuple of tensors.
        num_stages: without a ``topology`` all processes are num_stages x data, or x data x tensor where the
            configuration asks for tensor parallelism.
        loss_fn: ``loss_fn(outputs, labels)`` of the last stage; without it the last layer gives the loss.
        seed_layers: seed layer ``i`` with ``base_seed + i`` before it is built, and anew before each of its calls.
        seed_fn: what seeds, by default Python, numpy and torch.
        partition_method: ``"parameters"`` (trained ones), ``"uniform"``, ``"type:REGEX"`` (layers whose class matches,
            ignoring case) or ``"memory"`` (states, with ``sample`` activations too).
        activation_checkpoint_interval: so many layers are recomputed together in backward; 0 for none.
        activation_checkpoint_func: ``func(function, *inputs)``.
        checkpointable_layers: names of the classes that are recomputed; default those with parameters.
        dynamic_shape: accepted for DeepSpeed's sake: shapes may always change.
        chunks: parts of the model that each stage has, see ``ds_hf.pipeline.chunks``.
        folded: of two chunks the second goes back from the last stage to the first, which has both ends of the model,
            and batches run in the order of DualPipeV.
        sample: inputs of the first layer, for the partition by memory; a meta tensor will do.

    Attributes:
        parts: where the layers are cut: chunk after chunk, in each stage after stage.
        forward_funcs: the layers of this stage. tied_modules: those that other layers share, by key.
        chunk: which part of them ``forward`` runs.
        data_is_left: nobody gave the number of pipelines, which is what other sizes leave of the processes.
        tied_comms: of each tied module here its ranks, group, module and tied weights.

    Raises:
        RuntimeError: neither a number of stages nor a topology, or a number that does not divide the processes.
        ConfigError: fewer layers than stages, a partition without layers, tied layers that differ.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = recompute,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        chunks: int = 1,
        sample: Any = None,
        folded: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        if checkpointable_layers is not None and not isinstance(checkpointable_layers, list):
            raise TypeError(f"checkpointable_layers is a list of class names, not {checkpointable_layers!r:.80}")
        init_distributed(verbose=False)
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers, self.dynamic_shape = checkpointable_layers, dynamic_shape
        self.partition_method, self.sample, self.folded = partition_method, sample, folded
        self.micro_offset = 0
        self.curr_layer = 0
        self.chunk = 0
        self.global_rank = dist.get_rank()
        with building(_WHERE) as others:
            self.data_is_left = topology is None
            self._topo = _topology(num_stages) if topology is None else topology
            self.num_stages = max(self._topo.get_dim("pipe"), 1)
            self._layer_specs = list(layers)
            _refuse_others(self._layer_specs)
            self._num_layers = len(self._layer_specs)
            self._tied_layers = tied_keys(self._layer_specs)
            self.tied_modules = nn.ModuleDict()
            self.tied_weight_attrs: dict[str, list[str]] = {}
            self._divide(chunks)
            others.compare(self._likeness())
            self._grid = PipelineParallelGrid(topology=self._topo)
            self.stage_id = self._grid.stage_id
            self._set_bounds()
            self._build()

    @property
    def trains_anywhere(self) -> bool:
        """Whether any stage was given a layer that trains."""
        return any(cost.trained for cost in self._division.costs)

    def _likeness(self) -> dict[str, str]:
        """What all stages have to be given alike: a layer that only one of them knows of would be nowhere."""
        found = {f"topology.{name}": str(self._topo.get_dim(name)) for name in self._topo.get_axis_names()}
        found["number of layers"] = str(self._num_layers)
        for index, cost in enumerate(self._division.costs):
            trained = f"{cost.name}, {cost.trained:,} parameters"
            found[f"layer {index}"] = f"{trained}, {cost.frozen:,} frozen" if cost.frozen else trained
            found |= describe_arguments(f"layer {index}", self._layer_specs[index])
        return found | {"parts": str(self.parts)} | describe_config(getattr(self, "config", None))

    def _divide(self, chunks: int) -> None:
        if chunks < 1:
            raise ConfigError(f"chunks is at least 1, not {chunks}", _WHERE)
        if self.folded and chunks != 2:
            raise ConfigError(f"a pipeline that is folded (DualPipeV) has 2 chunks a stage, not {chunks}", _WHERE)
        self._division = divide_layers(
            self._layer_specs,
            self.num_stages,
            self.partition_method,
            chunks=chunks,
            folded=self.folded,
            sample=self.sample,
        )
        check_apart(self._layer_specs, self._division.stage_of, self._held_together())
        self.parts = self._division.parts

    def _set_bounds(self) -> None:
        """The layers of this stage."""
        self._bounds = self._division.bounds(self.stage_id)
        self._local_start, self._local_stop = self._bounds[0][0], self._bounds[-1][1]
        if self.global_rank == 0:
            say(self._division.table(self._layer_specs))

    def _held_together(self) -> list[Tensor]:
        """Parameters of several layers that their stages tie without a ``TiedLayerSpec``."""
        return []

    # -- building -------------------------------------------------------------------------------------------------

    def _build(self, *, synchronize: bool = True) -> None:
        """Build this stage's layers, in order, and bring tied ones together."""
        self.forward_funcs: list[Any] = []
        self.fwd_map: dict[str, int] = {}
        self.layer_ids = [index for start, stop in self._bounds for index in range(start, stop)]
        for index in self.layer_ids:
            if self.seed_layers:
                (self.seed_fn or _seed)(self.base_seed + index)
            self.forward_funcs.append(self._built(index, self._layer_specs[index]))
        self._register_in_order()
        self.to(compute_device())
        with building(_WHERE) as others:
            others.meet()
        self.tied_comms = self._index_tied_modules()
        if synchronize:
            self._synchronize_tied_weights()
        self.is_checkpointable_results: list[bool] = []
        self._precompute_checkpointable_values()

    def _built(self, index: int, layer: Any) -> Any:
        """What ``forward`` calls for a layer; a module is added to this one, if it is not yet there."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
                self.tied_weight_attrs[layer.key] = layer.tied_weight_attr
            tied = self.tied_modules[layer.key]
            return tied if layer.forward_fn is None else partial(layer.forward_fn, tied)
        if isinstance(layer, LayerSpec | nn.Module):
            name = str(index)
            module: nn.Module | None = getattr(self, name, None)
            if module is None:
                module = layer.build() if isinstance(layer, LayerSpec) else layer
                self.add_module(name, module)
            self.fwd_map[name] = len(self.forward_funcs)
            return module
        return layer

    def repartition(self, chunks: int) -> bool:
        """Give each stage ``chunks`` chunks; layers that change stages take their values along. Collective.

        Returns:
            whether anything changed: then the module's parameters are others.
        """
        if chunks == self.chunks or self.num_stages == 1:
            return False
        before, held = self._division, self.layer_modules()
        for name in [name for name in self._modules if name != "tied_modules"]:
            del self._modules[name]
        self.tied_modules.clear()
        self._divide(chunks)
        self._set_bounds()
        for index, layer in held.items():
            if self._division.stage_of(index) == self.stage_id:  # what is there already is not built
                spec = self._layer_specs[index]
                home, name = (self.tied_modules, spec.key) if isinstance(spec, TiedLayerSpec) else (self, str(index))
                home.add_module(name, layer)
        self._build(synchronize=False)
        now, axis = self.layer_modules(), self._grid.mesh.axis("pipe")
        set_alike(held, now, axis)
        for index in range(self._num_layers):
            source, target = before.stage_of(index), self._division.stage_of(index)
            module = held.get(index) if self.stage_id == source else now.get(index)
            if source != target and self.stage_id in (source, target) and module is not None:
                hand_over(module, axis, source, target)
        self._synchronize_tied_weights()
        return True

    def layer_modules(self) -> dict[int, nn.Module]:
        """The modules of this stage's layers, by number of the layer."""
        found = {}
        for index, layer in zip(self.layer_ids, self.forward_funcs, strict=True):
            spec = self._layer_specs[index]
            module = self.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else layer
            if isinstance(module, nn.Module):
                found[index] = module
        return found

    def _register_in_order(self) -> None:
        """Tied modules by key, alike on all stages: what several stages do together they do in this order."""
        for key in sorted(self.tied_modules):
            module = self.tied_modules.pop(key)
            self.tied_modules[key] = module
        blocks = [child for name, child in self.named_children() if name != "tied_modules"]
        # Each layer with children of its own is a unit: its gradients are reduced when its backward is over.
        self._no_split_modules = sorted(
            {type(child).__name__ for child in blocks if any(True for _ in child.children())}
        )
        for param in self.parameters():
            param.ds_pipe_replicated = False  # type: ignore[attr-defined]

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Groups of the tied modules that several stages hold. All processes make all of them, in one order."""
        found = {}
        for key, indices in self._tied_layers.items():
            stages = sorted({self.stage_owner(index) for index in indices})
            if len(stages) == 1:
                continue
            here = self._grid.mesh.spanning(stages)
            self._grid.mesh.spanning(stages, "data", "sequence")
            if here is None:
                continue
            for param in self.tied_modules[key].parameters():
                tie_over_stages(param, key, stages)
                param.ds_pipe_replicated = here.rank > 0  # type: ignore[attr-defined]
            found[key] = {
                "ranks": [here.global_rank(rank) for rank in range(here.world_size)],
                "group": dist.group.WORLD if here.group is None else here.group,
                "weight_attr": self.tied_weight_attrs[key],
                "module": self.tied_modules[key],
                "axis": here,
            }
        return found

    def _synchronize_tied_weights(self) -> None:
        """Take the first stage's values of tied modules on the others."""
        for comm in self.tied_comms.values():
            axis: Axis = comm["axis"]
            for value in (*comm["module"].parameters(), *comm["module"].buffers()):
                dist.broadcast(value.data, axis.global_rank(0), group=axis.group)

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum ``.grad`` of tied weights over their stages. The engine does that itself, in ``train_batch``."""
        for weight, group in self.get_tied_weights_and_groups():
            if weight.grad is not None:
                dist.all_reduce(weight.grad, group=group)

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """The tied weights here, each with the group of the stages that hold it."""
        found = []
        for key, comm in self.tied_comms.items():
            for path in comm["weight_attr"]:
                value: Any = self.tied_modules[key]
                for name in path.split("."):
                    value = getattr(value, name)
                found.append((value, comm["group"]))
        return found

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """The present chunk's layers, one after another.

        Args:
            forward_input: a tensor or a tuple of tensors.
        """
        self.micro_offset += 1
        offset = sum(stop - start for start, stop in self._bounds[: self.chunk])
        start, stop = self._bounds[self.chunk]
        last, interval = offset + stop - start, self.activation_checkpoint_interval
        if interval == 0:
            return self._runner(offset, last)(forward_input)
        value = forward_input
        for begin in range(offset, last, interval):
            end = min(begin + interval, last)
            value = value if isinstance(value, tuple) else (value,)
            run = self._runner(begin, end)
            if self._is_checkpointable(self.forward_funcs[begin:end]) and torch.is_grad_enabled():
                value = self.activation_checkpoint_func(run, *value)
            else:
                value = run(*value)
        return value

    def _runner(self, begin: int, end: int) -> Callable[..., Any]:
        """Runs the functions ``begin`` to ``end``; recomputed, with the seeds of the call that it repeats."""
        micro_offset = self.micro_offset + 1

        def run(*inputs: Any) -> Any:
            value: Any = inputs[0] if len(inputs) == 1 else inputs
            for place in range(begin, end):
                self.curr_layer = self.layer_ids[place]
                if self.seed_layers:
                    (self.seed_fn or _seed)(self.base_seed * micro_offset + self.curr_layer)
                value = self.forward_funcs[place](value)
            return value

        return run

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(func).__name__ in self.checkpointable_layers for func in funcs)
        modules = [func.args[0] if isinstance(func, partial) else func for func in funcs]
        return any(True for module in modules if isinstance(module, nn.Module) for _ in module.parameters())

    def _precompute_checkpointable_values(self) -> None:
        interval = self.activation_checkpoint_interval
        begins = range(0, len(self.forward_funcs), interval) if interval > 0 else ()
        self.is_checkpointable_results = [
            self._is_checkpointable(self.forward_funcs[begin : begin + interval]) for begin in begins
        ]

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute so many layers together from now on; 0 for none."""
        if interval < 0:
            raise ValueError(f"the interval is at least 0, not {interval}")
        self.activation_checkpoint_interval = interval
        self._precompute_checkpointable_values()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this stage with ``torch.compile``."""
        for place, layer in enumerate(self.forward_funcs):
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)
            else:
                self.forward_funcs[place] = torch.compile(layer, *args, **kwargs)

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        """Parts of the model that each stage has."""
        return len(self._bounds)

    @property
    def division(self) -> LayerDivision:
        """How layers are divided, and what each of them takes."""
        return self._division

    def partitions(self) -> list[int]:
        """Bounds of the parts."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer.

        Raises:
            IndexError: there is no such layer.
        """
        if not 0 <= layer_idx < self._num_layers:
            raise IndexError(f"layer {layer_idx} of {self._num_layers}")
        return self._division.stage_of(layer_idx)

    @property
    def loss_stage(self) -> int:
        """The stage that has the last layer."""
        return self._division.stage_of(self._num_layers - 1)

    @property
    def layer_count(self) -> int:
        """Of all stages together."""
        return self._num_layers

    def share_layers(self, size: int) -> None:
        """Let so many of the processes of each stage, neighbours, share its layers. All processes call it."""
        pipelines = dist.get_world_size() // (self.num_stages * size)
        self._topo = PipeModelDataParallelTopology(num_pp=self.num_stages, num_mp=size, num_dp=pipelines)
        self._grid = PipelineParallelGrid(topology=self._topo)  # stages are outermost: each process stays in its own
        self.tied_comms = self._index_tied_modules()

    def topology(self) -> ProcessTopology:
        """Coordinates of all processes."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """The grid, which answers as an ``mpu``."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """More losses of the latest micro-batch, to be reported by name; to be overridden."""
        return None


def _refuse_others(layers: Sequence[Any]) -> None:
    """Before any is built, so that the stages that do not have the layer stop as well."""
    for index, layer in enumerate(layers):
        if isinstance(layer, StageModule):
            raise ConfigError(f"layer {index} is a PipelineModule itself: give its layers", _WHERE)
        if not isinstance(layer, LayerSpec) and not callable(layer):
            kind = type(layer).__name__
            raise ConfigError(f"layer {index} is of type {kind}: give a LayerSpec, a module or a function", _WHERE)


def _topology(num_stages: int | None) -> ProcessTopology:
    world = dist.get_world_size()
    assert num_stages is not None
    if num_stages < 1 or world % num_stages:
        raise RuntimeError(f"num_stages ({num_stages}) must divide distributed world size ({world})")
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
