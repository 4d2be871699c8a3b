"""DTensor parameters: a model that torch's ``parallelize_module`` or transformers' ``tp_plan=`` has divided already.

Each such parameter becomes an ordinary one, the local tensor with its ``Cut``, which ZeRO divides further as it divides
all others. The model's own code computes with DTensors, so a read of ``module.weight`` by name still gives one, made
over the parameter as it is then; autograd brings the gradient back to the parameter. ``parameters()`` and optimizers
have the local tensors, ``state_dict()`` has DTensors.

Rejected: to leave the DTensors and put ``_local_tensor`` into the flat buffer. It is private, ``param.data =`` does not
reach it, and whatever treats parameters alike (clipping, foreach, adapters) fails on a mixture of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ds_hf.config.mesh import MODEL, Claim
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.zero.cut import cut_of, even_cut, set_cut
from ds_hf.errors import ConfigError

__all__ = ["Adopted", "adopt_dtensors", "dtensor_claims", "reader_of"]

_ADVICE = (
    "load the model without tp_plan=, parallelize_module() and fully_shard(), and ZeRO stage 3 divides its weights; or "
    "lay it out over one axis of consecutive ranks"
)


def dtensor_claims(model: nn.Module) -> list[Claim]:
    """What the layout of the model's DTensors says about the mesh; nothing where there are none.

    Raises:
        ConfigError: a layout that ZeRO cannot divide further, with the parameter's name.
    """
    found = list(_dtensors(model))
    if not found:
        return []
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise _refusal(*found[0], "fully_shard() has divided the model already, as ZeRO would")
    if any(getattr(module, "_is_expert_parallel", False) for module in model.modules()):
        raise ConfigError(
            f"{found[0][0]} is a DTensor, and transformers has divided the model's experts (DistributedConfig("
            "ep_size=...)): load the model without distributed_config, and let the file divide them: "
            '"expert_parallel": {"enabled": true, "autoep_size": ...}',
            "initialize(model=...)",
        )
    first = found[0][1].device_mesh
    for name, param in found:
        mesh = param.device_mesh
        if sum(size > 1 for size in mesh.shape) > 1:
            raise _refusal(name, param, "only one axis of its mesh may have several processes")
        if mesh != first:
            raise _refusal(name, param, f"{found[0][0]} lies on another mesh")
        if param.to_local().dtype.itemsize < 2 or not param.is_floating_point():
            raise _refusal(name, param, "quantized weights of such a model are not supported")
        for placement, size in zip(param.placements, mesh.shape, strict=True):
            if type(placement) is Shard and param.shape[placement.dim] % size:
                raise _refusal(name, param, f"dimension {placement.dim} is not divided equally")
            if type(placement) not in (Shard, Replicate):
                raise _refusal(name, param, "only Shard and Replicate can be trained")
    size = first.size()
    ranks, me = first.mesh.flatten().tolist(), dist.get_rank()
    start = me // size * size
    if ranks != list(range(start, start + size)):
        raise _refusal(*found[0], f"rank {me} is in the group {ranks}, and tensor-parallel ranks are consecutive here")
    return [Claim("tensor", size, f"the mesh of {found[0][0]}, a DTensor", MODEL)]


def _dtensors(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            yield name, param


def _refusal(name: str, param: DTensor, why: str) -> ConfigError:
    mesh = param.device_mesh
    sizes = " x ".join(str(size) for size in mesh.shape)
    axes = f", {', '.join(mesh.mesh_dim_names)}" if mesh.mesh_dim_names else ""
    placements = ", ".join(str(placement) for placement in param.placements)
    return ConfigError(
        f"{name} is a DTensor ({sizes} processes{axes}; placements {placements}): {why}; {_ADVICE}",
        "initialize(model=...)",
    )


class Adopted:
    """Which ordinary parameter each wrapped one, as a rule a DTensor, has become.

    Args:
        new: id of the old parameter -> (the old one, which keeps the id taken, the new one).
    """

    def __init__(self, new: dict[int, tuple[Any, nn.Parameter]]) -> None:
        self._new = new

    def now(self, param: Any) -> Any:
        """The parameter in place of ``param``, which may be any other object."""
        return self._new.get(id(param), (None, param))[1]

    def now_all(self, given: Iterable[Any] | None) -> list[Any] | None:
        """The same for parameters, (name, parameter) pairs or parameter groups."""
        return None if given is None else [self._now_deep(each) for each in given]

    def _now_deep(self, given: Any) -> Any:
        if isinstance(given, dict):
            params = given["params"]
            return {**given, "params": self.now(params) if isinstance(params, Tensor) else self.now_all(params)}
        return (given[0], self.now(given[1])) if isinstance(given, tuple) else self.now(given)

    def put_into(self, optimizer: Any) -> None:
        """Have an optimizer that was made before update the new parameters.

        Raises:
            ConfigError: it has made steps: its states have the layout of DTensors.
        """
        if not isinstance(optimizer, Optimizer) or not self._new:
            return
        if any(id(param) in self._new for param in optimizer.state):
            raise ConfigError(
                "the optimizer has made steps over wrapped parameters (DTensors, or torchao's): give initialize() a "
                "new one, load a checkpoint after that",
                "initialize(optimizer=...)",
            )
        for group in optimizer.param_groups:
            group["params"] = [self.now(param) for param in group["params"]]


def adopt_dtensors(model: nn.Module, mesh: Mesh) -> Adopted:
    """Replace the DTensor parameters of ``model`` by ordinary ones that are cut; ``dtensor_claims`` has looked at them.

    Raises:
        ConfigError: the model-parallel group of an ``mpu`` has other processes than the mesh of the DTensors.
    """
    new: dict[int, tuple[Any, nn.Parameter]] = {}
    if mesh.is_given and mesh.shape.tensor > 1:
        axis = mesh.axis("tensor")
        ranks = [axis.global_rank(rank) for rank in range(axis.world_size)]
        for name, param in _dtensors(model):
            if param.device_mesh.mesh.flatten().tolist() != ranks:
                raise _refusal(name, param, f"the model-parallel group of the mpu is {ranks}")
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        layouts = {name: param for name, param in held.items() if isinstance(param, DTensor)}
        for name, param in layouts.items():
            if id(param) not in new:
                new[id(param)] = (param, _local(param))
            module._parameters[name] = new[id(param)][1]
        if layouts:
            form = {name: (param.device_mesh, param.placements) for name, param in layouts.items()}
            module.__dict__["_parameters"] = _ReadAsDTensors(module._parameters, form)
            module.register_state_dict_post_hook(_give_dtensors)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_take_local)  # type: ignore[no-untyped-call]
    return Adopted(new)


def _local(param: DTensor) -> nn.Parameter:
    """The part that is here, with the attributes that users and libraries gave the parameter."""
    values: Any = param.detach()
    local = nn.Parameter(values.to_local().contiguous(), requires_grad=param.requires_grad)
    for name, value in vars(param).items():
        setattr(local, name, value)
    for dim, (placement, size) in enumerate(zip(param.placements, param.device_mesh.shape, strict=True)):
        if isinstance(placement, Shard) and size > 1:
            rank = param.device_mesh.get_local_rank(dim)
            set_cut(local, even_cut(local.shape, placement.dim, rank, size))
    return local


class _ReadAsDTensors(dict[str, nn.Parameter | None]):
    """``module._parameters`` whose parameters read by name are DTensors again. Its copies hold DTensors.

    Args:
        given: what the dictionary holds.
        layouts: mesh and placements by name.
    """

    __slots__ = ("layouts",)

    def __init__(self, given: dict[str, nn.Parameter | None], layouts: dict[str, tuple[Any, Any]]) -> None:
        super().__init__(given)
        self.layouts = layouts

    def __getitem__(self, name: str) -> Any:
        return self.read(name, super().__getitem__(name))

    def read(self, name: str, param: Any) -> Any:
        """``param`` as the module's forward wants it."""
        if name not in self.layouts or param is None:
            return param
        mesh, placements = self.layouts[name]
        return DTensor.from_local(param, mesh, placements, run_check=False)

    def __reduce__(self) -> tuple[Any, ...]:
        copied = {name: self[name] for name in self}
        for name in self.layouts.keys() & copied.keys():
            if isinstance(value := copied[name], DTensor):
                copied[name] = nn.Parameter(value.detach(), value.requires_grad)
        return dict, (copied,)


def reader_of(module: nn.Module) -> _ReadAsDTensors | None:
    """How the module's parameters are read, where that is as DTensors."""
    found: Any = module._parameters
    found = getattr(found, "given", found)  # under ``external.watch``
    return found if isinstance(found, _ReadAsDTensors) else None


def _give_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """``state_dict()`` speaks of whole parameters: else a part would be saved under the name of the whole."""
    reader = reader_of(module)
    for name, _ in reader.layouts.items() if reader is not None else ():
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, DTensor) and value.numel():  # none of it: released, at stage 3
            state[prefix + name] = reader.read(name, value)  # type: ignore[union-attr]


def _take_local(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """``load_state_dict()`` takes DTensors, whole tensors and parts; the parameter takes its part."""
    reader = reader_of(module)
    for name in reader.layouts if reader is not None else ():
        value, param = state.get(prefix + name), module._parameters.get(name)
        if isinstance(value, DTensor):
            state[prefix + name] = value.to_local()
        elif value is not None and param is not None and (cut := cut_of(param)) and value.shape == cut.whole:
            state[prefix + name] = cut.take(value)
