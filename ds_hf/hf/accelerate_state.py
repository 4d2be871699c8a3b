"""Hooks on accelerate: the backend of a machine without an accelerator, what a DeepSpeed config may be, the sizes of a
``ParallelismConfig``, batches of a budget of tokens, loaders and metrics under tensor parallelism, checkpoints that are
written in the background, and skipping batches of divided sequences.

accelerate asks for a backend only where it finds a device it knows. On a CPU machine it finds none, lets DeepSpeed make
the process group all the same, and then believes on every rank that it is alone: no data are divided. Naming gloo
there is all that it needs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ds_hf.config.check import NOT_CHOSEN
from ds_hf.config.schema import load_schema
from ds_hf.engine.comm.discovery import discover
from ds_hf.errors import ConfigError
from ds_hf.hf.accelerate_loop import begin, counting_kept, counting_noted, wrap_loop, wrap_steps
from ds_hf.hf.autoload import wrap
from ds_hf.hf.loss import with_values
from ds_hf.hf.resuming import load_every_engine, load_whole_state
from ds_hf.hf.source import AUTO, fill_sizes, plain_config
from ds_hf.hf.token_batches import follow_batches, with_batches
from ds_hf.log import warn_once

__all__ = [
    "has_accelerator",
    "learn_of_launcher",
    "wrap_accelerator",
    "wrap_config",
    "wrap_data_loader",
    "wrap_launch",
    "wrap_plugin",
    "wrap_state",
]


_SAID = {  # what DeepSpeedPlugin's arguments and accelerate launch's flags say of a file's keys
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_optimization.stage"),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping"),
    "offload_optimizer_device": (
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "zero_optimization.offload_optimizer.device",
    ),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device"),
    "zero3_save_16bit_model": (
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
}


def wrap_plugin(module: ModuleType) -> None:
    """Hook of ``accelerate.utils.dataclasses``: what is said beside a DeepSpeed file, which alone counts, is told where
    the file says otherwise; and an "auto" that the engine chooses is left to it."""

    def compared(wrapped: Callable[..., Any], plugin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: getattr(plugin, name) for name in _SAID}
        given = {name: os.environ.get(_SAID[name][0]) if value is None else value for name, value in given.items()}
        file = plugin.hf_ds_config or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        wrapped(*args, **kwargs)
        if file != "none":
            _tell_of_said(given, plugin.hf_ds_config)

    def filled(wrapped: Callable[..., Any], plugin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = args[0] if args else kwargs["ds_key_long"]
        if key in kwargs or not _chosen_by_engine(key) or plugin.hf_ds_config.get_value(key) != AUTO:
            wrapped(*args, **kwargs)

    wrap(module, "DeepSpeedPlugin.__post_init__", compared)
    wrap(module, "DeepSpeedPlugin.fill_match", filled)


def _chosen_by_engine(key: str) -> bool:
    """Whether the engine resolves an "auto" of the dotted ``key`` itself, so that nobody has to fill it in."""
    node = load_schema()
    for part in key.split("."):
        node = node.get("properties", {}).get(part, {})
    fills = node.get("x-auto")
    return fills == "literal" or (isinstance(fills, dict) and fills["source"] in NOT_CHOSEN)


def _tell_of_said(given: Mapping[str, Any], config: Any) -> None:
    other = []
    for name, value in given.items():
        key = _SAID[name][1]
        found = config.get_value(key)
        differs = _as_written(found) != _as_written(value)
        if AUTO in (value, found) or value is None or not differs or ("stage3" in key and not config.is_zero3()):
            continue
        other.append(f"{name}={value}, and the file has {'no ' + key if found is None else f'{key} {found}'}")
    if other:
        warn_once(
            f"said beside the DeepSpeed file: {'; '.join(other)}. The file counts: leave out the argument, or the flag "
            'of accelerate launch, or write "auto" in the file'
        )


def _as_written(value: Any) -> Any:
    """Numbers as numbers, and what is off as what is absent."""
    text = str(value).lower()
    if text in ("none", "false"):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def wrap_state(module: ModuleType) -> None:
    """Hook of ``accelerate.state``."""
    no_device = module.DistributedType.NO

    def prepare_backend(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _deepspeed_asked():
            learn_of_launcher()
        backend, kind = wrapped(*args, **kwargs)
        if backend is None and kind == no_device and _deepspeed_processes() and not has_accelerator():
            return "gloo", kind
        return backend, kind

    wrap(module, "PartialState._prepare_backend", prepare_backend)


def wrap_config(module: ModuleType) -> None:
    """Hook of ``accelerate.utils.deepspeed``: presets, comments and checking wherever a config is taken, and what a
    loop calls (``accelerate_loop``)."""

    def read_first(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return wrapped(plain_config(_named(args[0])), *args[1:], **kwargs)
        return wrapped(**{**kwargs, "config_file_or_dict": plain_config(_named(kwargs["config_file_or_dict"]))})

    def keep_rule(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """accelerate makes an Adam of nearly any optimizer whose states are offloaded, and the engine takes all."""
        given = args[0] if args else kwargs["optimizer"]
        if type(given).__module__.startswith("bitsandbytes"):
            return _of_bitsandbytes(given)
        return wrapped(given) if _is_replaced(given) else given

    wrap(module, "map_pytorch_optim_to_deepspeed", keep_rule)
    wrap(module, "HfDeepSpeedConfig.__init__", read_first)
    wrap_steps(module)


def _is_replaced(optimizer: Any) -> bool:
    """Whether DeepSpeed's class for host memory has the rule of ``optimizer``."""
    other = ("amsgrad", "maximize", *(["decoupled_weight_decay"] if type(optimizer) is torch.optim.Adam else []))
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return plain and not any(group.get(key) for group in optimizer.param_groups for key in other)


def _of_bitsandbytes(optimizer: Any) -> Any:
    """Three of its rules have a class for host memory, with states in fp32 whatever their bits were; the others stay.

    accelerate makes an Adam of all but Lion, for which it fails; bitsandbytes' Adam decouples weight decay as its
    AdamW does.
    """
    from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad
    from ds_hf.engine.optim.adam import DeepSpeedCPUAdam
    from ds_hf.engine.optim.lion import DeepSpeedCPULion

    groups = optimizer.param_groups
    given = {key: optimizer.defaults[key] for key in ("lr", "weight_decay")}
    if optimizer.optimizer_name == "adam":
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **given)
    classes = {"lion": DeepSpeedCPULion, "adagrad": DeepSpeedCPUAdagrad}
    kind = classes.get(optimizer.optimizer_name)
    return optimizer if kind is None else kind(groups, **given)


def wrap_accelerator(module: ModuleType) -> None:
    """Hook of ``accelerate.accelerator``: what is being written in the background is on disk before ``save_state()``
    removes older checkpoints (``total_limit``), and when ``end_training()`` returns; ``initialize`` learns of the
    sizes of a ``ParallelismConfig``; and what a loop calls (``accelerate_loop``)."""

    def written(end: str) -> Callable[..., Any]:
        def wait_first(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
            for model in accelerator._models:
                writer = getattr(model, "checkpoint_writer", None)
                if writer is not None:
                    getattr(writer, end)()
            return wrapped(*args, **kwargs)

        return wait_first

    def with_known_plugin(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> None:
        """A second Trainer of the same TrainingArguments gives the plugin that is there already, which is no other."""
        from accelerate.utils import parse_flag_from_env

        given = kwargs.get("deepspeed_plugin")
        if given is module.AcceleratorState._shared_state.get("deepspeed_plugins"):
            kwargs = {**kwargs, "deepspeed_plugin": None}
        asked = given is not None or _deepspeed_processes()
        says = len(args) > 3 or not {"gradient_accumulation_steps", "gradient_accumulation_plugin"}.isdisjoint(kwargs)
        with counting_noted(accelerator, says):
            wrapped(*args, **kwargs)
        by = "Accelerator is given cpu=True"
        by = by if kwargs.get("cpu") else "ACCELERATE_USE_CPU is set (accelerate launch --cpu)"
        on_cpu = kwargs.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")
        if asked and on_cpu and accelerator.distributed_type != module.DistributedType.DEEPSPEED:
            warn_once(
                f"accelerate leaves DeepSpeed out where {by}: nothing of the DeepSpeed file is used, and models train "
                "without an engine. Leave it out: without a GPU ds_hf trains on the CPU"
            )

    def with_sizes(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        config = accelerator.deepspeed_plugin.hf_ds_config
        if _share_layers(accelerator) > 1:
            _leave_total_open(config)
        for own in [arg.config for arg in args if isinstance(arg, nn.Module) and hasattr(arg, "config")]:
            fill_sizes(config, own)
        with _environment(_sizes(accelerator.parallelism_config)), counting_kept(accelerator, args):
            prepared = wrapped(*args, **kwargs)
        begin(accelerator, args, prepared)
        follow_batches(accelerator, prepared)
        return prepared

    def by_tokens(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        given = {"data_loader": args[0]} if args else {}
        given |= dict(zip(("device_placement", "slice_fn_for_dispatch"), args[1:], strict=False)) | kwargs
        return wrapped(**{**given, "data_loader": with_batches(accelerator, given["data_loader"])})

    def with_mesh(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """What loaders ask, also one that is prepared before the model (evaluation without training)."""
        size = _share_layers(accelerator)
        if size > 1 and not hasattr(accelerator.state, "ds_device_mesh"):
            from torch.distributed.device_mesh import init_device_mesh

            accelerator.state.ds_device_mesh = init_device_mesh(
                accelerator.device.type, (size,), mesh_dim_names=("tp",)
            )
        return wrapped(*args, **kwargs)

    def leave_models(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """accelerate's own preparation is for models without an engine, and wraps optimizers before there is one."""
        deepspeed = module.DistributedType.DEEPSPEED
        return args if accelerator.distributed_type == deepspeed else wrapped(*args, **kwargs)

    def with_all_experts(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """accelerate asks an engine for whole weights at stage 3, by the file of the model that it prepared last, and
        with tensor parallelism alone."""
        model = args[0] if args else kwargs.get("model")
        mesh = getattr(model, "mesh", None)
        divided = mesh is not None and getattr(mesh.shape, "expert", 1) > 1 and kwargs.get("unwrap", True)
        if divided and (not model.plan.shards_parameters or model.zero_gather_16bit_weights_on_model_save()):
            return model._consolidated_16bit_state_dict()
        if mesh is None or not model.plan.shards_parameters:
            return wrapped(*args, **kwargs)
        with with_values(
            accelerator, deepspeed_config={**accelerator.deepspeed_config, "zero_optimization": {"stage": 3}}
        ):
            return wrapped(*args, **kwargs)

    wrap(module, "load_accelerator_state", load_whole_state)
    wrap(module, "Accelerator.load_state", load_every_engine)
    wrap(module, "Accelerator.__init__", with_known_plugin)
    wrap(module, "Accelerator.get_state_dict", with_all_experts)
    wrap_loop(module)
    wrap(module, "Accelerator._prepare_tp", leave_models)
    wrap(module, "Accelerator._prepare_deepspeed", with_sizes)
    wrap(module, "Accelerator._prepare_device_mesh", with_mesh)
    wrap(module, "Accelerator.prepare_data_loader", by_tokens)
    wrap(module, "Accelerator.gather_for_metrics", _each_sample_once)
    wrap(module, "Accelerator.save_state", written("wait"))
    wrap(module, "Accelerator.end_training", written("close"))  # some call it on rank 0 alone


def wrap_launch(module: ModuleType) -> None:
    """Hook of ``accelerate.commands.launch``, as the command ``accelerate`` imports it: accelerate 1.15 refuses
    ``--use_parallelism_config`` with DeepSpeed on the command line, though it takes the same from its own file."""

    def validate(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs["args"]
        if not (given.use_deepspeed and getattr(given, "use_parallelism_config", False)):
            return wrapped(*args, **kwargs)
        given.use_parallelism_config = False
        try:
            return wrapped(*args, **kwargs)
        finally:
            given.use_parallelism_config = True

    wrap(module, "_validate_launch_command", validate)


def wrap_data_loader(module: ModuleType) -> None:
    """Hook of ``accelerate.data_loader``: batches are skipped inside the adapter that divides them, which accelerate
    would take for a plain loader; and a loader that the first process reads for all (streamed data, by default) deals
    batches to groups that share layers, where accelerate gives one batch to all groups, and forgets them to skip."""

    def skip(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("dataloader", "num_batches"), args, strict=False)) | kwargs
        loader = given["dataloader"]
        if isinstance(loader, module.DataLoaderDispatcher):
            found = wrapped(*args, **kwargs)
            _deal_to_groups(found, getattr(loader.state, "sharing", 1))
            return found
        if type(loader).__name__ != "UlyssesSPDataLoaderAdapter" or not hasattr(loader, "skipping"):
            return wrapped(*args, **kwargs)
        whole, rest = divmod(given.get("num_batches", 0), loader.sp_world_size)
        return loader.skipping(rest, wrapped(loader.dl, whole))

    def deal(wrapped: Callable[..., Any], loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if loader.submesh_tp is not None:
            _deal_to_groups(loader, loader.submesh_tp.size())

    wrap(module, "skip_first_batches", skip)
    wrap(module, "DataLoaderDispatcher.__init__", deal)


class _Groups:
    """accelerate's state, with groups of ``sharing`` processes that read the same in place of processes."""

    def __init__(self, state: Any, sharing: int) -> None:
        self._state, self.sharing = state, sharing

    @property
    def num_processes(self) -> int:
        return int(self._state.num_processes) // self.sharing

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # before __init__, when it is copied
            raise AttributeError(name)
        return getattr(self._state, name)


def _deal_to_groups(loader: Any, sharing: int) -> None:
    """Have each group of ``sharing`` processes get the part of ``loader``'s batches that a process would."""
    if sharing == 1:
        return
    slice_fn = loader.slice_fn

    def part(batch: Any, of: slice, **others: Any) -> Any:
        place = of.start // max(of.stop - of.start, 1) // sharing * (of.stop - of.start)
        return slice_fn(batch, slice(place, place + of.stop - of.start), **others)

    loader.state, loader.slice_fn, loader.submesh_tp = _Groups(loader.state, sharing), part, None


def _share_layers(accelerator: Any) -> int:
    """The size of the tensor axis, as the DeepSpeed configuration or else a ``ParallelismConfig`` says it; the former
    is told, for everything looks there."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None or not isinstance(plugin.deepspeed_config, dict):
        return 1
    asked = getattr(accelerator.parallelism_config, "tp_size", 1) or 1
    given: int = plugin.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 0)
    if asked > 1 and given <= 1:
        plugin.deepspeed_config.setdefault("tensor_parallel", {})["autotp_size"] = given = asked
    return max(given, 1)


def _leave_total_open(config: Any) -> None:
    """A ``train_batch_size`` that is "auto" counts processes that read different samples: the engine derives it, where
    transformers and accelerate would count processes that share a sample several times."""
    if getattr(config, "ds_hf_total_is_open", False) or config.config.get("train_batch_size") == "auto":
        config.config.pop("train_batch_size", None)


def _each_sample_once(wrapped: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
    """Processes that share layers have the same samples: metrics take those of the first of them. Those that share
    sequences have parts of the same: what fills the last batches up is known by the process whose batch it was."""
    size, loader = _share_layers(accelerator), accelerator.gradient_state.active_dataloader
    owner = getattr(loader, "ds_owner", None)
    if size == 1 and owner is None:
        return wrapped(*args, **kwargs)
    module: Any = importlib.import_module("accelerate.accelerator")
    gather, gather_objects, processes = accelerator.gather, module.gather_object, accelerator.num_processes
    rows = [None] * processes
    if owner is not None and loader.remainder > 0:
        readers = processes // size
        batch = loader.total_batch_size // readers
        own = min(max(loader.remainder - owner // size * batch, 0), batch)
        rows = gather(torch.tensor([own], device=accelerator.device)).tolist()

    def once(parts: Any) -> list[Any]:
        return [part[:count] for part, count in zip(parts[::size], rows[::size], strict=True)]

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(once(tensor.view(processes, -1, *tensor.shape[1:])))

    accelerator.gather = lambda tensors: module.recursively_apply(first, gather(tensors))
    module.gather_object = lambda objects: [each for part in once(gather_objects([objects])) for each in part]
    try:
        if owner is None:
            return wrapped(*args, **kwargs)
        with with_values(loader, end_of_dataloader=False):  # nothing is left to be cut off
            return wrapped(*args, **kwargs)
    finally:
        del accelerator.gather
        module.gather_object = gather_objects


def _sizes(config: Any) -> dict[str, str]:
    """What accelerate's launcher sets for a ``ParallelismConfig``: scripts that make one themselves set nothing."""
    if config is None:
        return {}
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    found = {f"PARALLELISM_CONFIG_{name.upper()}": str(getattr(config, name, 1)) for name in names}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **found}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """With these variables of the environment, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def has_accelerator() -> bool:
    """Whether torch finds any accelerator in this process (CUDA, XPU, NPU, MPS, ...)."""
    return bool(torch.accelerator.is_available())


def _deepspeed_processes() -> bool:
    """A launcher started this process, and DeepSpeed is asked for."""
    return int(os.environ.get("LOCAL_RANK") or -1) != -1 and _deepspeed_asked()


def _deepspeed_asked() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def learn_of_launcher() -> None:
    """Say what mpirun or srun say of this process as torchrun does, since accelerate reads nothing else."""
    os.environ.update(discover(os.environ))


def _named(source: Any) -> Any:
    """A file, a preset or a dict.

    Raises:
        ConfigError: it is "auto", for which nothing here would choose.
    """
    if source == AUTO:
        raise ConfigError(
            '"auto" is chosen by the Trainer alone, from its model: give it as the script\'s own --deepspeed auto (or '
            'TrainingArguments(deepspeed="auto")); here stands a file or a preset such as zero2'
        )
    return source
