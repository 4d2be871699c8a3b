"""``DeepSpeedCheckpoint`` and ``ZeROCheckpoint``: DeepSpeed's files by rank, also of a smaller mesh.

Files are read as all of a stranger's: nothing in them runs. What is merged is in memory at a time for one rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_hf.checkpoint.deepspeed.pickles import load_pickled
from ds_hf.deepspeed_api.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    CHECKPOINT_PARALLEL_DIMS,
    GROUP_PADDINGS,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    PARTITION_COUNT,
    UNIVERSAL_CHECKPOINT_INFO,
)

from .reshape_utils import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_model_3d_descriptor,
    get_model_3d_descriptor_from_metadata,
    get_zero_files,
    meg_2d_parallel_map,
    merge_state,
    model_3d_desc,
    partition_data,
    reshape_meg_2d_parallel,
    validate_files,
)

__all__ = [
    "ARGS_KEY",
    "CHECKPOINT_INFO_KEY",
    "EMBEDDING_LAYER_INDEX",
    "FINAL_LAYER_NORM_INDEX",
    "GROUP_STATE_KEY",
    "ITERATION_KEY",
    "LAYER_CONCAT_DIM",
    "LAYER_FILE_PREFIX_PATTERN",
    "SEQUENTIAL_LAYERS",
    "DeepSpeedCheckpoint",
    "ZeROCheckpoint",
]

GROUP_STATE_KEY = "state"
EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"
LAYER_FILE_PREFIX_PATTERN = r"layer_(\d+)-model_.*"

# Megatron-DeepSpeed's names in files of layers: what ranks hold alike, and what they hold columns of.
SEQUENTIAL_LAYERS = [
    "input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias", "post_attention_layernorm.weight",
    "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias", "position_embeddings.weight",
]  # fmt: skip
LAYER_CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}


class ZeROCheckpoint:
    """Files of optimizer states by rank."""

    def __init__(self, dir: str, source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        if not self.num_files:
            raise AssertionError(f"No ZeRO files found in {dir}")
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(model_3d_desc(self.src_3d.pp_degree, self.src_3d.tp_degree, self.src_3d.dp_degree))

    def get_src_world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Of them, tensor-parallel."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Of them, stages of the pipeline."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Of them, data-parallel."""
        return self.src_3d.dp_degree

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Ranks are those of ``target_3d_desc`` from now on."""
        self.target_3d = target_3d_desc
        self._3d_file_map = self.src_3d.reshape(target_3d_desc)

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Numbers in ``file_list``."""
        if dp_index >= len(self._3d_file_map):
            raise AssertionError(f"DP index {dp_index} >= DP degree {len(self._3d_file_map)}")
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Their paths."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> Any:
        """What they hold, merged; by default without what pads the groups."""
        merged: Any = None
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = load_pickled(Path(path))
            for key in keys_to_ignore:
                state.pop(key, None)
            if strip_tensor_paddings:
                _strip(state)
            merged = state if merged is None else merge_state(merged, state)
            optimizer = merged.get(OPTIMIZER_STATE_DICT) or {}
            if optimizer.get(PARTITION_COUNT) and isinstance(optimizer[PARTITION_COUNT], list):
                optimizer[PARTITION_COUNT] = [self.target_3d.dp_degree] * len(optimizer[PARTITION_COUNT])
            if strip_tensor_paddings and optimizer.get(GROUP_PADDINGS):
                optimizer[GROUP_PADDINGS] = [0] * len(optimizer[GROUP_PADDINGS])
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Show the numbers of all ranks' files."""
        if tag:
            print(f"3D index map: {tag}")
        for dp_index, table in enumerate(self._3d_file_map):
            table.print_data(f"dp = {dp_index}")

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Show the paths of all ranks' files."""
        if tag:
            print(f"3D file map: {tag}")
        for dp, table in enumerate(self._3d_file_map):
            for pp in range(table.pp_degree):
                for tp in range(table.tp_degree):
                    print(f"{pp}, {tp}, {dp} => {self.get_files_for_rank(pp, tp, dp)}")


def _strip(state: dict[str, Any]) -> None:
    """Leave out what pads the flat moments."""
    optimizer = state.get(OPTIMIZER_STATE_DICT) or {}
    groups, paddings = (optimizer.get(BASE_OPTIMIZER_STATE) or {}), optimizer.get(GROUP_PADDINGS)
    groups = groups.get(GROUP_STATE_KEY) if isinstance(groups, dict) else None
    if not groups or paddings is None:
        return
    for index, moments in groups.items():
        for key, value in moments.items():
            if paddings[index] and key != "step" and torch.is_tensor(value) and value.dim():
                moments[key] = value[: value.numel() - paddings[index]].clone()


class DeepSpeedCheckpoint:
    """A checkpoint's files by rank; smaller degrees than those that wrote it merge neighbours.

    Args:
        dir: folder of one tag.
        final_layer_norm_idx: of a pipeline, which of its layers is the final norm.
    """

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
    ) -> None:
        self.final_layer_norm_idx, self.dir = final_layer_norm_idx, dir
        basic_folder_validation(dir)
        self.file_list = get_files(dir)
        self.layer_files = sorted(
            path for path in self.file_list if re.fullmatch(LAYER_FILE_PREFIX_PATTERN, os.path.basename(path))
        )
        self.mp_rank_files = get_files_with_prefix(self.file_list, MODEL_FILE_PREFIX)
        self._check_folder()
        self.global_state: dict[str, Any] = {}
        self.model_state_metadata = self._metadata()
        zero_files = get_zero_files(dir)
        source = get_model_3d_descriptor_from_metadata(self.file_list, zero_files, self.model_state_metadata)
        self.zero_checkpoint = ZeROCheckpoint(dir, source_3d=source)
        self.layer_keys = self._layer_keys()
        self.layer_count = len(self.layer_keys)
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        if self.is_change_pp_degree() or self.is_change_tp_degree() or self.is_change_dp_degree():
            self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        self.pp_to_transformer_map = self._layers_by_stage()
        self.transformer_file_map = self._files_by_rank()
        self.tp_to_embedding_map = self._files_of(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._files_of(final_layer_norm_idx)

    def _check_folder(self) -> None:
        prefixes = [MODEL_FILE_PREFIX]
        if self.layer_files:
            prefixes += [LAYER_FILE_PREFIX, f"{LAYER_FILE_PREFIX}01"]
        for prefix in prefixes:
            if not get_files_with_prefix(self.file_list, prefix):
                raise AssertionError(
                    f"{self.dir} seems a bogus DeepSpeed checkpoint folder: Cannot find {prefix}* files in there."
                )

    def _metadata(self) -> list[tuple[str, dict[str, Any]]]:
        """Of each model's file its mesh and the shapes of its parameters; of the first what is one for all."""
        found = []
        for index, path in enumerate(self.mp_rank_files):
            state = load_pickled(Path(path))
            shapes = state.get(PARAM_SHAPES)
            groups = shapes if isinstance(shapes, list | tuple) else []
            merged = {name: shape for group in groups if isinstance(group, dict) for name, shape in group.items()}
            known = {CHECKPOINT_PARALLEL_DIMS: state.get(CHECKPOINT_PARALLEL_DIMS), PARAM_SHAPES: merged}
            found.append((path, known))
            if index == 0:
                self.global_state[ITERATION_KEY] = state.get(ITERATION_KEY, 0)
                for key in (ARGS_KEY, CHECKPOINT_INFO_KEY, UNIVERSAL_CHECKPOINT_INFO):
                    self.global_state[key] = state.get(key)
        return found

    # -- degrees --------------------------------------------------------------------------------------------------

    def is_change_tp_degree(self) -> bool:
        """Whether the tensor-parallel degree is another than the one that wrote it."""
        return self.tp_degree != self.zero_checkpoint.get_src_tp_degree()

    def is_change_pp_degree(self) -> bool:
        """The same of the pipeline's."""
        return self.pp_degree != self.zero_checkpoint.get_src_pp_degree()

    def is_change_dp_degree(self) -> bool:
        """The same of the data-parallel one."""
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    # -- what is one for all --------------------------------------------------------------------------------------

    def get_iteration(self) -> Any:
        """Megatron's iteration, 0 where there is none."""
        return self._get_checkpoint_value(ITERATION_KEY)

    def get_args(self) -> Any:
        """Megatron's arguments."""
        return self._get_checkpoint_value(ARGS_KEY)

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """A value of the first model's file."""
        return self._get_checkpoint_value(info_key)

    def _get_checkpoint_value(self, key: str) -> Any:
        if key not in self.global_state:
            self.global_state[key] = load_pickled(Path(self.mp_rank_files[0])).get(key)
        return self.global_state[key]

    # -- states ---------------------------------------------------------------------------------------------------

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> Any:
        """Optimizer states of one rank."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, keys_to_ignore=[PARAM_SHAPES], strip_tensor_paddings=strip_tensor_paddings
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Paths of the files that they are in."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Paths of the models' files of one rank."""
        if tp_index >= self.tp_degree or pp_index >= self.pp_degree:
            raise AssertionError(f"there is no rank (pp {pp_index}, tp {tp_index})")
        return [self.mp_rank_files[index] for index in self.new_2d_map.get_data(pp_index=pp_index, tp_index=tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> Any:
        """What these hold, merged."""
        merged: Any = None
        for path in self.get_2d_parallel_files(tp_index=tp_index, pp_index=pp_index):
            state = load_pickled(Path(path))
            merged = state if merged is None else merge_state(merged, state)
        return merged

    # -- layers of a pipeline -------------------------------------------------------------------------------------

    def get_embedding_layer_id(self) -> str:
        """Prefix of the first layer's files."""
        return self.layer_keys[EMBEDDING_LAYER_INDEX]

    def get_final_norm_layer_id(self) -> str:
        """Prefix of the final norm's files."""
        return self.layer_keys[self.final_layer_norm_idx]

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Paths of the first layer's files of a rank."""
        return self.tp_to_embedding_map[tp_index]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """What they hold, merged."""
        return self._merged(self.tp_to_embedding_map[tp_index])

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Paths of the final norm's files of a rank."""
        return self.tp_to_final_norm_map[tp_index]

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """What the first of them holds."""
        return load_pickled(Path(self.tp_to_final_norm_map[tp_index][0]))

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Prefixes of the layers of one stage."""
        if pp_index >= self.pp_degree:
            raise AssertionError(f"there is no stage {pp_index}")
        return self.pp_to_transformer_map[pp_index]

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Of each layer of one stage what a rank has."""
        if tp_index >= self.tp_degree or pp_index >= self.pp_degree:
            raise AssertionError(f"there is no rank (pp {pp_index}, tp {tp_index})")
        return [self._merged(files) for files in self.transformer_file_map[tp_index, pp_index]]

    def _merged(self, files: Sequence[str]) -> dict[str, Any]:
        states = [load_pickled(Path(path)) for path in files]
        return {
            key: first
            if key in SEQUENTIAL_LAYERS
            else torch.cat([state[key] for state in states], dim=LAYER_CONCAT_DIM.get(key, 0))
            for key, first in states[0].items()
        }

    def _layer_keys(self) -> list[str]:
        numbers = {re.search(LAYER_FILE_PREFIX_PATTERN, os.path.basename(path))[1] for path in self.layer_files}  # type: ignore[index]
        return [f"{LAYER_FILE_PREFIX}{number}" for number in sorted(numbers, key=int)]

    def _layers_by_stage(self) -> dict[int, list[str]]:
        layers = self.layer_keys[1 : self.final_layer_norm_idx]
        each = len(layers) // self.pp_degree if self.pp_degree else 0
        return {stage: layers[stage * each : (stage + 1) * each] for stage in range(self.pp_degree)}

    def _files_by_rank(self) -> dict[tuple[int, int], list[list[str]]]:
        layers = self.layer_keys[1 : self.final_layer_norm_idx]
        each = max(1, len(layers) // self.pp_degree) if self.pp_degree else 1
        found: dict[tuple[int, int], list[list[str]]] = {}
        for index, key in enumerate(layers):
            files = partition_data(get_files_with_prefix(self.layer_files, f"{key}-"), self.tp_degree)
            for tp in range(self.tp_degree):
                found.setdefault((tp, index // each), []).append(files[tp])
        return found

    def _files_of(self, index: int) -> dict[int, list[str]]:
        if not self.layer_files:
            return {}
        files = get_files_with_prefix(self.layer_files, f"{self.layer_keys[index]}-")
        return dict(enumerate(partition_data(files, self.tp_degree)))

    # -- showing --------------------------------------------------------------------------------------------------

    def validate_files(self) -> None:
        """Print those that are not there."""
        validate_files(self.file_list)

    def show_2d_mapping(self) -> None:
        """Print the models' files of each rank."""
        print("reshaped 2d map ---- begin")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                print(f"[{pp}, {tp}] = {self.get_2d_parallel_files(tp_index=tp, pp_index=pp)}")
        print("reshaped 2d map ---- end")

    def show_tp_embedding_map(self) -> None:
        """Print the first layer's files."""
        self._dump_mapping(self.tp_to_embedding_map, "tp_to_embedding_layers")

    def show_tp_final_norm_map(self) -> None:
        """Print the final norm's files."""
        self._dump_mapping(self.tp_to_final_norm_map, "tp_to_final_norm_layers")

    def show_pp_transformer_map(self) -> None:
        """Print the layers of each stage."""
        self._dump_mapping(self.pp_to_transformer_map, "pp_to_transformer_layers")

    def show_transformer_file_map(self) -> None:
        """Print the layers' files of each rank."""
        self._dump_mapping(self.transformer_file_map, "rank_to_transformer_files")

    def _dump_mapping(self, data_map: dict[Any, Any], map_tag: str | None = None) -> None:
        if map_tag is not None:
            print(f"Dump mapping: {map_tag}")
        for key, value in data_map.items():
            print(f"{key} = {value}")
