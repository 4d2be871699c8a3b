"""Reading checkpoints that DeepSpeed wrote (ZeRO stages 0 to 3) as if they were ours.

DeepSpeed keeps one flat fp32 tensor a rank and parameter group, with moments of the same layout, and tells the order
of the parameters beside it. That is what a manifest says too: fragments of parameters in flat tensors. Nothing is
copied: files are mapped, and read when a parameter is wanted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.deepspeed_layout import addressed, count_of, even_parts, in_order
from ds_hf.engine.checkpoint.deepspeed_pickle import DynamicScaler, StaticScaler, load_pickled
from ds_hf.engine.checkpoint.interface import dtype_name
from ds_hf.engine.checkpoint.source import Kind, MappedFiles, Source
from ds_hf.engine.checkpoint.states import encode_scalar
from ds_hf.engine.checkpoint.zero_to_fp32 import Manifest, SavedBuffer, SavedFragment, SavedParameter
from ds_hf.errors import CheckpointError
from ds_hf.log import logger
from ds_hf.printable import harmless

__all__ = ["is_deepspeed", "read_deepspeed"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_COMPARED = 256  # elements of a tensor that are looked at before all are
_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
}  # fmt: skip


def is_deepspeed(folder: Path) -> bool:
    """Whether ``folder`` is a tag's folder that DeepSpeed wrote."""
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def read_deepspeed(folder: Path) -> Source:
    """Open the folder of one tag.

    Raises:
        CheckpointError: it is incomplete, damaged, or of a kind that cannot be read (tensor or pipeline parallel,
            experts, universal checkpoints).
    """
    try:
        return _Reader(folder).read()
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{folder} is not as DeepSpeed writes it: {type(error).__name__}: {error}") from harmless(
            error
        )


@dataclass
class _Group:
    """What the ranks hold of one flat tensor: ``[rank][state]``, and the scalars beside it."""

    values: list[Tensor]
    moments: list[dict[str, Tensor]]
    scalars: dict[str, Any]


@dataclass
class _Found:
    """What is put into the manifest."""

    parameters: dict[str, SavedParameter] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = self._by_rank(_MODEL)
        self.optimizers = self._by_rank(_OPTIMIZER)
        self.found = _Found()

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {reason}")

    def _by_rank(self, pattern: re.Pattern[str]) -> list[str]:
        matches = [match for path in sorted(self.folder.iterdir()) if (match := pattern.fullmatch(path.name))]
        if any(int(match[2]) > 0 for match in matches):
            raise self._fail("it was saved with tensor or pipeline parallelism, which cannot be imported")
        if any("expert" in path.name for path in self.folder.glob("*expert*.pt")):
            raise self._fail("it holds experts in separate files, which cannot be imported")
        by_rank = {int(match[1] or 0): match[0] for match in matches}
        if sorted(by_rank) != list(range(len(by_rank))):
            raise self._fail(f"the files of some ranks are missing; present are those of ranks {sorted(by_rank)}")
        return [by_rank[rank] for rank in range(len(by_rank))]

    def read(self) -> Source:
        model_states = [load_pickled(self.folder / name) for name in self.models]
        if not model_states:
            raise self._fail("there is no file *_model_states.pt: this is not a checkpoint of DeepSpeed")
        first = model_states[0]
        module = _of(dict, first.get("module"), self.folder / self.models[0], "module")
        world_size = count_of(first.get("dp_world_size", 1))
        optimizers = self._optimizer_states(world_size)
        stage = count_of(optimizers[0].get("zero_stage", 1)) if optimizers else 0
        common: dict[str, Any] = {"extra_state": {}, "client_state": {}, "lr_scheduler": first.get("lr_scheduler")}
        common["client_state"] = {key: value for key, value in first.items() if key not in _OWN_KEYS}
        if optimizers:
            if stage == 3 and len(model_states) != world_size:
                raise self._fail(f"{world_size} ranks wrote it, but there are model states of {len(model_states)}")
            self._trained(first, optimizers, stage)
            self._options(common, optimizers[0], stage)
        elif first.get("optimizer") is not None:
            logger.warning(
                "%s was written without ZeRO: its moments have no names and are left out, weights are read", self.folder
            )
        shared = first.get("shared_params")
        tied = _shared(module) if shared is None else {str(alias): str(name) for alias, name in shared.items()}
        buffers = self._rest(module, first, model_states, tied, common["extra_state"])
        return self._source(first, world_size, stage, buffers, tied, common)

    def _optimizer_states(self, world_size: int) -> list[dict[str, Any]]:
        if not self.optimizers:
            return []
        if len(self.optimizers) != world_size:
            raise self._fail(f"{world_size} ranks wrote it, but there are optimizer states of {len(self.optimizers)}")
        states = []
        for name in self.optimizers:
            content = load_pickled(self.folder / name).get("optimizer_state_dict")
            states.append(_of(dict, content, self.folder / name, "optimizer_state_dict"))
        return states

    # -- trained parameters ---------------------------------------------------------------------------------------

    def _trained(self, first: dict[str, Any], optimizers: list[dict[str, Any]], stage: int) -> None:
        shapes = first.get("param_shapes")
        if isinstance(shapes, Mapping):  # one group, in old versions
            shapes = [shapes]
        shapes = _of(list, shapes, self.folder / self.models[0], "param_shapes")
        groups = [self._group(optimizers, index, stage) for index in range(len(shapes))]
        if stage == 3:
            self._check_that_ranks_differ(groups)
        addresses = [state.get("param_slice_mappings") for state in optimizers]
        for index, (group, names) in enumerate(zip(groups, shapes, strict=True)):
            sized = {str(name): tuple(count_of(n) for n in shape) for name, shape in names.items()}
            if stage == 3:
                placed = even_parts(sized, len(optimizers))
            elif all(isinstance(address, list) and index < len(address) for address in addresses):
                placed = addressed([address[index] for address in addresses])  # type: ignore[index]
            else:
                placed = in_order(sized, [value.numel() for value in group.values])
            self._add_group(index, group, sized, placed)
        self._name_groups(optimizers[0], shapes, stage)

    def _group(self, optimizers: list[dict[str, Any]], index: int, stage: int) -> _Group:
        values, moments = [], []
        scalars: dict[str, Any] = {}
        flat, inner = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
            "single_partition_of_fp32_groups", "base_optimizer_state"
        )  # fmt: skip
        for rank, state in enumerate(optimizers):
            path = self.folder / self.optimizers[rank]
            tensors = _of(list, state.get(flat), path, flat)
            base = state.get(inner)
            if isinstance(base, list):
                raise CheckpointError(f"{path} was saved with zero_optimization.elastic_checkpoint: switch that off")
            known = _of(dict, _of(dict, base, path, inner).get("state"), path, f"{inner}.state")
            if index >= len(tensors) or not isinstance(tensors[index], Tensor) or tensors[index].dim() != 1:
                raise CheckpointError(f"{path}: {flat} has no flat tensor {index}")
            values.append(tensors[index].detach())
            of_group = _of(dict, known.get(index, {}), path, f"{inner}.state")
            moments.append({k: v.detach() for k, v in of_group.items() if isinstance(v, Tensor) and v.dim() == 1})
            for key, value in of_group.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                    scalars[str(key)] = value
        return _Group(values, moments, scalars)

    def _check_that_ranks_differ(self, groups: list[_Group]) -> None:
        """At stage 3 nothing in a file says whose it is: that one was copied over another shows in its values alone.

        Equal constants, such as norms before the first step, are no sign of it.
        """
        known: dict[Any, int] = {}
        for rank, file in enumerate(self.optimizers):
            held = [[group.values[rank], *group.moments[rank].values()] for group in groups]
            flat = [tensor for tensors in held for tensor in tensors]
            first = tuple((tensor.numel(), *tensor[:_COMPARED].tolist()) for tensor in flat)
            other = known.setdefault(first, rank)
            if other == rank or not any(value.numel() and bool((value != value[0]).any()) for value in flat):
                continue
            others = [[group.values[other], *group.moments[other].values()] for group in groups]
            if all(torch.equal(a, b) for a, b in zip(flat, (t for ts in others for t in ts), strict=True)):
                raise self._fail(f"{file} holds the same as {self.optimizers[other]}: one was copied over the other")

    def _add_group(
        self, index: int, group: _Group, shapes: dict[str, tuple[int, ...]], placed: dict[str, list[SavedFragment]]
    ) -> None:
        keys = list(dict.fromkeys(key for moments in group.moments for key in moments))
        states = {"master": f"group.{index}.master", **{key: f"group.{index}.{key}" for key in keys}}
        for rank, name in enumerate(self.optimizers):
            self.found.tensors[name, states["master"]] = group.values[rank]
            for key in keys:
                if key in group.moments[rank]:
                    self.found.tensors[name, states[key]] = group.moments[rank][key]
        scalars = {key: encode_scalar(_as_step(key, value)) for key, value in group.scalars.items()}
        for name, shape in shapes.items():
            rows = []
            for fragment in placed.get(name, ()):
                file = self.optimizers[int(fragment.file)]
                rows.append(SavedFragment(file, fragment.start, fragment.offset, fragment.numel))
            if sum(row.numel for row in rows) != math.prod(shape):
                raise self._fail(f"the ranks hold {sum(row.numel for row in rows)} elements of {name} {list(shape)}")
            self.found.parameters[name] = SavedParameter(name, shape, True, states, tuple(rows), scalars)

    def _name_groups(self, state: dict[str, Any], shapes: list[Any], stage: int) -> None:
        """Names of each parameter group: at stage 3 it may lie in several flat tensors."""
        options = self._saved_groups(state, stage)
        if options is None:
            return
        for group in options:
            indices = [i for i in group.get("params", ()) if isinstance(i, int) and 0 <= i < len(shapes)]
            self.found.groups.append([str(name) for index in indices for name in shapes[index]])

    @staticmethod
    def _saved_groups(state: dict[str, Any], stage: int) -> list[dict[str, Any]] | None:
        base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
        groups = base.get("param_groups") if isinstance(base, dict) else None
        return groups if isinstance(groups, list) and all(isinstance(g, dict) for g in groups) else None

    def _options(self, common: dict[str, Any], state: dict[str, Any], stage: int) -> None:
        groups = self._saved_groups(state, stage)
        if groups is not None:
            common["param_groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        scaler = state.get("loss_scaler")
        if isinstance(scaler, DynamicScaler):
            common["loss_scaler"] = {"kind": "DynamicLossScaler", "state": _scaler_state(scaler)}
        elif isinstance(scaler, StaticScaler):
            common["loss_scaler"] = {"kind": "StaticLossScaler", "state": {"scale": float(scaler.get("cur_scale", 1))}}

    # -- everything else ------------------------------------------------------------------------------------------

    def _rest(
        self,
        module: dict[str, Any],
        first: dict[str, Any],
        model_states: list[dict[str, Any]],
        tied: dict[str, str],
        extra_state: dict[str, Any],
    ) -> dict[str, SavedBuffer]:
        """Frozen parameters, buffers and extra states: what the module's state dict has besides trained parameters."""
        named = {str(name) for name in first.get("buffer_names") or ()}
        shapes = first.get("frozen_param_shapes") or {}
        frozen = {str(name): tuple(count_of(n) for n in shape) for name, shape in shapes.items()}
        buffers: dict[str, SavedBuffer] = {}
        file = self.models[0]
        for name, value in module.items():
            if name in self.found.parameters or name in tied or name in frozen:
                if isinstance(value, Tensor):
                    self.found.dtypes[name] = dtype_name(value.dtype)
            elif not isinstance(value, Tensor):
                extra_state[name] = value
            else:
                self.found.tensors[file, f"module.{name}"] = value.detach()
                shape = tuple(value.shape)
                if name in named:
                    buffers[name] = SavedBuffer(name, shape, file, f"module.{name}")
                else:  # at stages 0 and 1 nothing tells frozen parameters from others
                    rows = (SavedFragment(file, 0, 0, value.numel()),) if value.numel() else ()
                    self.found.dtypes[name] = dtype_name(value.dtype)
                    self.found.parameters[name] = SavedParameter(
                        name, shape, False, {"weight": f"module.{name}"}, rows, {}
                    )
        for name, shape in frozen.items():
            self._add_frozen(name, shape, model_states)
        return buffers

    def _add_frozen(self, name: str, shape: tuple[int, ...], model_states: list[dict[str, Any]]) -> None:
        """A frozen parameter: whole at stage 2, at stage 3 a part on each rank, the last one padded."""
        rows, start = [], 0
        key = f"frozen.{name}"
        for rank, state in enumerate(model_states):
            value = (state.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(value, Tensor) or start >= math.prod(shape):
                continue
            self.found.tensors[self.models[rank], key] = value.detach()
            numel = min(value.numel(), math.prod(shape) - start)
            rows.append(SavedFragment(self.models[rank], start, 0, numel))
            start += numel
        if start != math.prod(shape):
            raise self._fail(f"the ranks hold {start} elements of the frozen {name} {list(shape)}")
        self.found.parameters[name] = SavedParameter(name, shape, False, {"weight": key}, tuple(rows), {})

    def _source(
        self,
        first: dict[str, Any],
        world_size: int,
        stage: int,
        buffers: dict[str, SavedBuffer],
        tied: dict[str, str],
        common: dict[str, Any],
    ) -> Source:
        found, config = self.found, first.get("ds_config")
        parameters = _ordered(found.parameters, list(first["module"]))
        settings = config if isinstance(config, dict) else {}
        steps = count_of(first.get("global_steps", 0))
        accumulation = settings.get("gradient_accumulation_steps", 1)
        extra: dict[str, Any] = {
            "written_by": {"deepspeed": str(first.get("ds_version", "unknown"))},
            "counters": {
                "global_steps": steps,
                "global_samples": count_of(first.get("global_samples", 0)),
                "skipped_steps": count_of(first.get("skipped_steps", 0)),
                "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            },
            "optimizer": {"class": str((settings.get("optimizer") or {}).get("type", "")), "whole": False},
            "groups": found.groups or None,
            "parameters": {name: {"dtype": dtype} for name, dtype in found.dtypes.items()},
        }
        files = {name: (self.folder / name).stat().st_size for name in (*self.models, *self.optimizers)}
        if sum(p.numel for p in parameters.values()) > sum(files.values()):
            raise self._fail("its parameters are larger than all files together")
        known = {alias: name for alias, name in tied.items() if name in parameters or name in buffers}
        manifest = Manifest(self.folder, world_size, parameters, buffers, known, frozenset(), files, extra)
        return Source(Kind.DEEPSPEED, manifest, MappedFiles(self.folder, found.tensors), common, stage)


# -- small things ---------------------------------------------------------------------------------------------------


def _of(kind: type[Any], value: Any, path: Path, what: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: {what} should be a {kind.__name__}, not a {type(value).__name__}")
    return value


def _as_step(key: str, value: Any) -> Any:
    """torch keeps the step as an fp32 tensor, DeepSpeed's own optimizers as a number."""
    return torch.tensor(float(value)) if key == "step" and not isinstance(value, Tensor) else value


def _shared(module: Mapping[str, Any]) -> dict[str, str]:
    """Further names of tensors that are there under another name; without ZeRO nothing else tells of tied weights."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, Tensor) and value.numel():
            known = first.setdefault((value.data_ptr(), value.shape, value.stride()), name)
            if known != name:
                found[name] = known
    return found


def _scaler_state(scaler: DynamicScaler) -> dict[str, Any]:
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "boundary": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
        "hysteresis_left": int(scaler.get("cur_hysteresis", 1)),
        "consecutive_overflows": 0,
        "settings": {
            "loss_scale_window": int(scaler.get("scale_window", 1000)),
            "hysteresis": int(scaler.get("delayed_shift", 2)),
            "consecutive_hysteresis": bool(scaler.get("consecutive_hysteresis", False)),
            "min_loss_scale": float(scaler.get("min_scale", 1.0)),
        },
    }


def _ordered(parameters: dict[str, SavedParameter], names: list[str]) -> dict[str, SavedParameter]:
    place = {name: index for index, name in enumerate(names)}
    return dict(sorted(parameters.items(), key=lambda item: place.get(item[0], len(place))))
