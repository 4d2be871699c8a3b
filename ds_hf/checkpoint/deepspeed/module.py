"""What the files ``*_model_states.pt`` of DeepSpeed say: all but the states of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.experts import AUTOEP, ExpertFiles, with_experts
from ds_hf.checkpoint.deepspeed.layout import Grid, count_of
from ds_hf.checkpoint.deepspeed.pickles import SAVE, load_pickled, of
from ds_hf.checkpoint.deepspeed.slices import INFO, SlicePlace, SliceRules, given_info
from ds_hf.checkpoint.deepspeed.whole import ExpertTensor, Found, Local, Written
from ds_hf.checkpoint.format import SavedBuffer, SavedFragment, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.scalars import newest, number
from ds_hf.checkpoint.source import CheckpointKind, MappedFiles, Source
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["ModelStates"]

_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", AUTOEP, SAVE,
}  # fmt: skip
_COMPARED = 256  # elements of an expert's tensor
_ALIKE = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", SAVE)


class ModelStates:
    """The models' files of a folder, loaded.

    Attributes:
        content: by model-parallel rank, then by data-parallel rank.
        pipe, tensor: stages of the pipeline, tensor-parallel ranks.
        experts: which of them are where.

    Raises:
        CheckpointError: they do not belong together.
    """

    def __init__(self, folder: Path, grid: Grid, *, assumed: bool = False) -> None:
        self.folder, self.grid = folder, grid
        self.content = [[load_pickled(folder / name) for name in row] for row in grid.models]
        self.first: dict[str, Any] = self.content[0][0]
        self._check_alike()
        self.experts = ExpertFiles(self.first)
        if self.experts.stacked and len(self.content) > 1:
            raise self._fail("AutoEP beside tensor parallelism or a pipeline wrote it, which cannot be imported")
        if len(self.content[0]) > 1:
            self.experts.check_processes(self.content[0])
        for state in self.content[0]:
            self.experts.rename(state)
        self.pipe, self.tensor = self._degrees()
        self.world_size = count_of(self.first.get("dp_world_size", 1))
        self.info = given_info(folder, self.first.get(INFO))
        self.rules = SliceRules(self.info, folder, self.tensor, assumed=assumed)

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {reason}")

    def _check_alike(self) -> None:
        for row, names in zip(self.content, self.grid.models, strict=True):
            for state, name in zip(row, names, strict=True):
                for key in _ALIKE:
                    if state.get(key) != self.first.get(key):
                        raise self._fail(
                            f"{key} is {self.first.get(key)!s:.40} in {self.grid.models[0][0]} and "
                            f"{state.get(key)!s:.40} in {name}: the files are of different saves"
                        )

    def check_save(self, content: Mapping[str, Any], name: str) -> None:
        """What ds_hf has written in DeepSpeed's formats says of which save each file is; DeepSpeed's files do not."""
        if content.get(SAVE) != self.first.get(SAVE):
            raise self._fail(f"{name} and {self.grid.models[0][0]} are of different saves: copy the folder again")

    def _compare_steps(self, found: Found) -> None:
        """Of files that do not say it, the steps tell: the optimizer's beside the engine's."""
        steps = [saved.scalars["step"] for saved in found.parameters.values() if "step" in saved.scalars]
        counted = [count_of(self.first.get(key, 0)) for key in ("global_steps", "skipped_steps")]
        updates = counted[0] - counted[1]
        if not steps or updates <= 0 or number(newest(steps)) == updates:
            return
        logger.warning(
            "%s: %s was saved after %d updates of the weights, and the optimizer's states after %s. Unless that run "
            "had begun with weights alone, the files are of different saves: copy the folder again",
            self.folder, self.grid.models[0][0], updates, number(newest(steps)),
        )  # fmt: skip

    def _degrees(self) -> tuple[int, int]:
        ranks = len(self.content)
        known = self.first.get("checkpoint_parallel_dimensions")
        if isinstance(known, Mapping):
            pipe, tensor = count_of(known.get("pp_degree", 1)), count_of(known.get("tp_degree", 1))
        else:
            tensors = {tensor for _, tensor, _ in self.grid.layers}
            tensor = len(tensors) or count_of(self.first.get("mp_world_size", 1)) or 1
            pipe = max(1, ranks // tensor) if tensors else 1
        if pipe * tensor != ranks:
            raise self._fail(
                f"{pipe * tensor} model-parallel ranks wrote it (tensor {tensor}, pipeline {pipe}), but there are "
                f"models of {ranks}: the files of some ranks are missing"
            )
        return pipe, tensor

    def column(self, pipe: int, tensor: int) -> int:
        """Number of a model-parallel rank."""
        return pipe * self.tensor + tensor

    def file(self, column: int) -> str:
        """The first file of a model-parallel rank."""
        return self.grid.models[column][0]

    def module(self, column: int) -> dict[str, Any]:
        """The state dict of a model-parallel rank; empty in a pipeline, which keeps it in files of its layers."""
        found = self.content[column][0].get("module")
        if found is None and self.grid.layers:
            return {}
        return of(dict, found, self.folder / self.file(column), "module")  # type: ignore[no-any-return]

    def shapes(self, column: int) -> list[dict[str, tuple[int, ...]]]:
        """Shapes on a model-parallel rank, by flat tensor."""
        path = self.folder / self.file(column)
        found = self.content[column][0].get("param_shapes")
        if isinstance(found, Mapping):  # one group, in old versions
            found = [found]
        return [
            {str(name): _shape(shape) for name, shape in of(Mapping, each, path, "param_shapes").items()}
            for each in of(list, found, path, "param_shapes")
        ]

    def place(self, name: str, slices: Sequence[tuple[int, ...]]) -> SlicePlace | None:
        """See ``SliceRules.place``; ``None`` where no rank has slices."""
        return None if self.tensor == 1 else self.rules.place(name, slices)

    def common(self) -> dict[str, Any]:
        """What is no tensor and one for all."""
        client = {key: value for key, value in self.first.items() if key not in _OWN_KEYS}
        return {"extra_state": {}, "client_state": client, "lr_scheduler": self.first.get("lr_scheduler")}

    def tied(self) -> dict[str, str]:
        """Further names of parameters, each with the first."""
        found: dict[str, str] = {}
        for pipe in range(self.pipe):
            column = self.column(pipe, 0)
            shared = self.content[column][0].get("shared_params")
            found.update(
                _shared(self.module(column))
                if shared is None
                else {str(alias): str(name) for alias, name in shared.items()}
            )
        return found

    def rest(self, found: Found, tied: Mapping[str, str], extra_state: dict[str, Any]) -> dict[str, SavedBuffer]:
        """Frozen parameters, buffers and extra states: what is not in ``found`` yet."""
        buffers: dict[str, SavedBuffer] = {}
        for pipe in range(self.pipe):
            columns = [self.column(pipe, tensor) for tensor in range(self.tensor)]
            frozen = [self._frozen_shapes(column) for column in columns]
            self._of_module(found, tied, extra_state, columns, frozen[0], buffers)
            self._of_layers(found, pipe, buffers)
            for name in frozen[0]:
                held = [
                    self._frozen(found, name, shapes.get(name), column)
                    for shapes, column in zip(frozen, columns, strict=True)
                ]
                found.add(name, held, self.place(name, [local.shape for local in held]), trainable=False)
        return buffers

    def place_experts(self, found: Found) -> None:
        """What ``found`` lacks of experts: weights that have files of their own, one an expert. They are compared with
        what was trained."""
        counts = self.first.get("num_experts")
        there = [len(files) for files in self.grid.experts]
        if (there or not self.experts.stacked) and isinstance(counts, list) and counts != there:
            raise self._fail(f"its layers have {counts} experts, and there are files of {there}")
        stacked: dict[tuple[str, str], list[ExpertTensor]] = {}
        for files in self.grid.experts:
            for expert, file in enumerate(files):
                for name, value in load_pickled(self.folder / file).items():
                    part = self.experts.stacked_part(str(name))
                    mine = f".deepspeed_experts.{expert}." in str(name) if part is None else part[1] == expert
                    if not isinstance(value, Tensor) or not mine:
                        raise self._fail(f"{file} has {str(name)[:80]}, which is no tensor of expert {expert}")
                    tensor = ExpertTensor(file, str(name), expert, value.detach())
                    if part is None:
                        self._own_expert(found, tensor)
                    else:
                        stacked.setdefault(part[0], []).append(tensor)
        self.experts.finish(found, stacked)
        gone = sorted(name for name in found.parameters if ".deepspeed_experts." in name and name not in found.dtypes)
        if gone and self.experts.own:
            raise self._fail(f"no file of an expert has {gone[0]}, which was trained")

    def _own_expert(self, found: Found, tensor: ExpertTensor) -> None:
        name, value = tensor.name, tensor.value
        found.dtypes[name] = name_of(value.dtype)
        if name in found.parameters:
            found.written.append(Written(name, 0, None, tensor))
            return
        key = f"module.{name}"
        found.tensors[tensor.file, key] = value
        rows = [SavedFragment(tensor.file, 0, 0, value.numel())] if value.numel() else []
        found.add(name, [Local(tuple(value.shape), {"weight": key}, rows)], None, trainable=False)

    def _frozen_shapes(self, column: int) -> dict[str, tuple[int, ...]]:
        shapes = self.content[column][0].get("frozen_param_shapes") or {}
        known = {str(name): shape for name, shape in shapes.items() if not self.experts.is_expert(str(name))}
        return {name: _shape(shape) for name, shape in known.items()}

    def _of_module(
        self,
        found: Found,
        tied: Mapping[str, str],
        extra_state: dict[str, Any],
        columns: Sequence[int],
        frozen: Mapping[str, Any],
        buffers: dict[str, SavedBuffer],
    ) -> None:
        modules = [self.module(column) for column in columns]
        named = {str(name) for name in self.content[columns[0]][0].get("buffer_names") or ()}
        for name, value in modules[0].items():
            if name in found.parameters or name in tied or name in frozen:
                if isinstance(value, Tensor):
                    found.dtypes[name] = name_of(value.dtype)
            elif not isinstance(value, Tensor):
                extra_state[name] = value
            elif name in named:
                self._buffer(found, name, [module.get(name) for module in modules], columns, buffers)
            else:  # at stages 0 and 1 nothing tells frozen parameters from others
                found.dtypes[name] = name_of(value.dtype)
                held = [self._whole(found, name, module, c) for module, c in zip(modules, columns, strict=True)]
                found.add(name, held, self.place(name, [local.shape for local in held]), trainable=False)

    def _whole(self, found: Found, name: str, module: dict[str, Any], column: int) -> Local:
        value, file, key = module.get(name), self.file(column), f"module.{name}"
        if not isinstance(value, Tensor):
            raise self._fail(f"{file} does not have {name}, which other ranks have")
        found.tensors[file, key] = value.detach()
        rows = [SavedFragment(file, 0, 0, value.numel())] if value.numel() else []
        return Local(tuple(value.shape), {"weight": key}, rows)

    def _buffer(
        self, found: Found, name: str, values: Sequence[Any], columns: Sequence[int], buffers: dict[str, SavedBuffer]
    ) -> None:
        first = values[0]
        if not all(isinstance(v, Tensor) and v.dtype == first.dtype and torch.equal(v, first) for v in values[1:]):
            found.excluded.add(name)  # each rank has built its own, as one that says where its slice begins
            return
        file = self.file(columns[0])
        found.tensors[file, f"module.{name}"] = first.detach()
        buffers[name] = SavedBuffer(name, tuple(first.shape), file, f"module.{name}")

    def _of_layers(self, found: Found, pipe: int, buffers: dict[str, SavedBuffer]) -> None:
        """Buffers and dtypes in the files of a pipeline's layers, where names lack the number of the layer."""
        if pipe:
            return
        named = {str(n) for row in self.content for n in row[0].get("buffer_names") or ()}
        for layer, tensor, file in self.grid.layers:
            if tensor:
                continue
            for key, value in load_pickled(self.folder / file).items():
                name = f"{layer}.{key}"
                if isinstance(value, Tensor) and name in found.parameters:
                    found.dtypes[name] = name_of(value.dtype)
                elif isinstance(value, Tensor) and name in named:
                    found.tensors[file, f"module.{name}"] = value.detach()
                    buffers[name] = SavedBuffer(name, tuple(value.shape), file, f"module.{name}")

    def _frozen(self, found: Found, name: str, shape: tuple[int, ...] | None, column: int) -> Local:
        """A frozen parameter: whole at stage 2, at stage 3 a part on each data-parallel rank, the last one padded."""
        if shape is None:
            raise self._fail(f"{self.file(column)} does not have the frozen {name}, which other ranks have")
        rows, start = [], 0
        key = f"frozen.{name}"
        for file, state in zip(self.grid.models[column], self.content[column], strict=True):
            value = (state.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(value, Tensor) or start >= math.prod(shape):
                continue
            found.tensors[file, key] = value.detach()
            numel = min(value.numel(), math.prod(shape) - start)
            rows.append(SavedFragment(file, start, 0, numel))
            start += numel
        return Local(shape, {"weight": key}, rows)

    def source(
        self,
        kind: CheckpointKind,
        found: Found,
        stage: int | None,
        buffers: dict[str, SavedBuffer],
        tied: Mapping[str, str],
        common: dict[str, Any],
        files: Sequence[str],
    ) -> Source:
        """What was found, as any other checkpoint is."""
        if self.experts.stacked and found.groups and len(common.get("param_groups") or ()) == len(found.groups):
            common["param_groups"], found.groups = with_experts(common["param_groups"], found.groups)
        self._compare_steps(found)
        order = {name: None for column in range(len(self.content)) for name in self.module(column)}
        parameters = _ordered(found.parameters, list(order))
        nbytes = {name: (self.folder / name).stat().st_size for name in files}
        if sum(p.numel for p in parameters.values()) > sum(nbytes.values()):
            raise self._fail("its parameters are larger than all files together")
        known = {alias: name for alias, name in tied.items() if name in parameters or name in buffers}
        world_size = self.world_size * len(self.content)
        manifest = Manifest(
            self.folder, world_size, parameters, buffers, known, frozenset(found.excluded), nbytes, self._extra(found)
        )
        mapped = MappedFiles(self.folder, found.tensors)
        checks = (*found.checks, lambda: self._compare_experts(mapped, parameters, found))
        return Source(kind, manifest, mapped, common, stage, checks)

    def _compare_experts(self, files: MappedFiles, parameters: Mapping[str, SavedParameter], found: Found) -> None:
        """What was trained of an expert is what its own file has, rounded: files are of one save, and experts where
        they are looked for."""
        for written in found.written:
            value = written.tensor.value.reshape(-1)[:_COMPARED]
            trained = torch.empty(value.numel())
            files.fill(trained, parameters[written.name], "master", written.start, written.cut)
            if not torch.equal(trained.to(value.dtype), value):
                raise self._fail(
                    f"{written.tensor.name} in {written.tensor.file} is not what the optimizer's files have of it: "
                    "they are of different saves, or processes divide experts in another way than "
                    "use_data_before_expert_parallelism says"
                )

    def _extra(self, found: Found) -> dict[str, Any]:
        config = self.first.get("ds_config")
        settings = config if isinstance(config, dict) else {}
        steps = count_of(self.first.get("global_steps", 0))
        accumulation = settings.get("gradient_accumulation_steps", 1)
        extra: dict[str, Any] = {
            "written_by": {"deepspeed": str(self.first.get("ds_version", "unknown"))},
            "counters": {
                "global_steps": steps,
                "global_samples": count_of(self.first.get("global_samples", 0)),
                "skipped_steps": count_of(self.first.get("skipped_steps", 0)),
                "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            },
            "optimizer": {
                "class": str((settings.get("optimizer") or {}).get("type", "")),
                "whole": False,
                "counts_in_tensors": found.counts_in_tensors,
            },
            "groups": found.groups or None,
            "parameters": {name: {"dtype": dtype} for name, dtype in found.dtypes.items()},
        }
        if len(self.content) > 1:
            extra["mesh"] = {"pipe": self.pipe, "data": self.world_size, "sequence": 1, "tensor": self.tensor}
        if self.info is not None:
            extra[INFO] = self.info  # of the checkpoint, or what lies beside its files
        if found.keys:
            extra["universal"] = found.keys
            extra["vocabulary"] = [name for name, keys in found.keys.items() if keys.get("vocab_tensor") is True]
        return extra


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(count_of(n) for n in shape)
    if len(sizes) > 64 or math.prod(sizes) >= 2**63:
        raise ValueError("it has an impossible shape")
    return sizes


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


def _ordered(parameters: dict[str, SavedParameter], names: list[str]) -> dict[str, SavedParameter]:
    place = {name: index for index, name in enumerate(names)}
    return dict(sorted(parameters.items(), key=lambda item: place.get(item[0], len(place))))
