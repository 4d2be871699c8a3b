"""DeepSpeed's descriptions of a checkpoint's files: by rank, and of a smaller mesh."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import (
    DeepSpeedCheckpoint,
    ZeROCheckpoint,
    get_layer_ckpt_name_for_rank,
    get_model_3d_descriptor,
    merge_state,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map
from deepspeed.checkpoint.reshape_utils import get_zero_files, partition_data, sort_zero_files
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

from ds_hf.checkpoint.deepspeed.pickles import load_pickled, save_pickled
from tests.checkpoint.deepspeed.sliced_files import write_slices
from tests.checkpoint.deepspeed.test_slices import INFO, split, whole_values


def test_ranks_of_a_smaller_mesh() -> None:
    """Two stages of four tensor-parallel ranks: neighbours merge along each dimension."""
    table = reshape_meg_2d_parallel(2, 4, 1, 2)
    assert table.map == {"0,0": [0, 1, 4, 5], "0,1": [2, 3, 6, 7]}
    assert reshape_meg_2d_parallel(2, 4, 2, 4).get_data(pp_index=1) == [4, 5, 6, 7]
    tables = model_3d_desc(pp_degree=1, tp_degree=2, dp_degree=4).reshape(model_3d_desc(1, 1, 2))
    assert [each.get_data(0, 0) for each in tables] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(AssertionError, match="TP: 2 ---> 4"):
        model_3d_desc(tp_degree=2).reshape(model_3d_desc(tp_degree=4))
    assert model_3d_desc(2, 2, 2).is_valid(1, 2, 0) == (False, ["TP indexing error: index 2 >= degree 2"])
    assert model_3d_desc(2, 2, 2).get_desc() == "PP,TP,DP = (2, 2, 2)"
    assert model_3d_desc(2, 3, 4).world_size() == 24


def test_a_table_of_ranks() -> None:
    table = meg_2d_parallel_map(2, 2)
    table.add_data(1, 0, [5])
    table.add_data(1, 0, [6])
    assert table.get_data(1, 0) == [5, 6]
    with pytest.raises(AssertionError, match="outside"):
        table.get_data(2, 0)
    with pytest.raises(AssertionError, match="not a list"):
        table.add_data(0, 0, (1,))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="5 items"):
        partition_data([0] * 5, 2)


def test_states_merge() -> None:
    first = OrderedDict(a=torch.ones(2), b=[1, {"c": torch.zeros(1)}], d="x")
    second = OrderedDict(a=torch.zeros(1), b=[2, {"c": torch.ones(1)}], e=5)
    merged = merge_state(first, second)
    assert merged["a"].tolist() == [1, 1, 0]
    assert merged["b"][0] == 1
    assert merged["b"][1]["c"].tolist() == [0, 1]
    assert (list(merged), merged["e"]) == (["a", "b", "e"], 5)
    with pytest.raises(ValueError, match="different lengths, a = 1 b = 2"):
        merge_state([1], [1, 2])
    with pytest.raises(ValueError, match="two states of types"):
        merge_state([1], (1,))


def test_files_sort_by_rank(tmp_path: Path) -> None:
    names = [f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp in (10, 2) for mp in (1, 0)]
    for name in names:
        (tmp_path / name).touch()
    assert [Path(path).name for path in get_zero_files(str(tmp_path))] == names[::-1]
    with pytest.raises(ValueError, match="Cannot parse"):
        sort_zero_files(["zero_pp_rank_x"], "zero_pp_rank_")
    assert get_layer_ckpt_name_for_rank("a", "layer_03", 1) == "a/layer_03-model_01_model_states.pt"


def test_a_checkpoint_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    folder = write_slices(tmp_path / "x", whole_values(), split, stage=2, data=2, info=INFO, client={"iteration": 7})
    opened = DeepSpeedCheckpoint(str(folder))
    assert (opened.pp_degree, opened.tp_degree, opened.dp_degree, opened.world_size) == (1, 2, 2, 4)
    assert opened.get_iteration() == 7
    assert opened.get_args() is None
    assert opened.get_checkpoint_info("universal_checkpoint_info") == INFO
    assert get_model_3d_descriptor(str(folder)).get_desc() == "PP,TP,DP = (1, 2, 2)"
    assert [Path(path).name for path in opened.get_zero_files(0, 1, 0)] == ["zero_pp_rank_0_mp_rank_01_optim_states.pt"]
    state = opened.get_zero_checkpoint_state(0, 1, 1)["optimizer_state_dict"]
    value = state["single_partition_of_fp32_groups"][0]
    moment = state["base_optimizer_state"]["state"][0]["exp_avg"]
    assert value.numel() == moment.numel()  # without what pads the group
    assert state["group_paddings"] == [0]
    fewer = DeepSpeedCheckpoint(str(folder), tp_degree=1, dp_degree=1)
    assert fewer.is_change_tp_degree()
    assert len(fewer.get_zero_files(0, 0, 0)) == 4
    merged = fewer.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    parts = [load_pickled(Path(path))["optimizer_state_dict"] for path in fewer.get_zero_files(0, 0, 0)]
    whole = torch.cat([part["single_partition_of_fp32_groups"][0] for part in parts])
    assert torch.equal(merged["single_partition_of_fp32_groups"][0], whole)
    assert opened.get_2d_parallel_state(tp_index=1, pp_index=0)["global_steps"] == 3
    zero = ZeROCheckpoint(str(folder))
    assert (zero.get_src_world_size(), zero.get_src_tp_degree(), zero.num_files) == (4, 2, 4)
    with pytest.raises(AssertionError, match="DP index 2 >= DP degree 2"):
        zero.get_files_for_rank(0, 0, 2)


def test_layers_of_a_pipeline(tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks: an embedding, two layers, a norm."""
    sizes = {"pp_degree": 2, "tp_degree": 2}
    for rank in range(4):
        model = {"checkpoint_parallel_dimensions": sizes, "param_shapes": [], "module": None}
        save_pickled(tmp_path / f"mp_rank_{rank:02d}_model_states.pt", model)
        save_pickled(tmp_path / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt", {"optimizer_state_dict": {}})
    for layer in (1, 2, 3, 4):
        for rank in (0, 1):
            content = {
                "self_attention.dense.weight": torch.full((2, 1), float(rank)),
                "up.weight": torch.full((1, 2), float(rank)),
                "input_layernorm.weight": torch.full((2,), float(layer)),
            }
            save_pickled(tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt", content)
    opened = DeepSpeedCheckpoint(str(tmp_path), tp_degree=1)
    assert opened.layer_keys == ["layer_01", "layer_02", "layer_03", "layer_04"]
    assert opened.pp_to_transformer_map == {0: ["layer_02"], 1: ["layer_03"]}
    (state,) = opened.get_transformer_state(tp_index=0, pp_index=1)
    assert state["self_attention.dense.weight"].tolist() == [[0, 1], [0, 1]]
    assert state["up.weight"].tolist() == [[0, 0], [1, 1]]
    assert state["input_layernorm.weight"].tolist() == [3, 3]
    assert [Path(p).name for p in opened.get_embedding_files(0)] == [
        "layer_01-model_00-model_states.pt",
        "layer_01-model_01-model_states.pt",
    ]
    assert opened.get_final_norm_state(0)["input_layernorm.weight"].tolist() == [4, 4]
    path = tmp_path / "mp_rank_03_model_states.pt"
    save_pickled(path, {**model, "checkpoint_parallel_dimensions": {"pp_degree": 4, "tp_degree": 1}})
    with pytest.raises(RuntimeError, match="disagrees"):
        get_model_3d_descriptor(str(tmp_path))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not exist"):
        DeepSpeedCheckpoint(str(tmp_path / "x"))
    with pytest.raises(AssertionError, match="Cannot find mp_rank_"):
        DeepSpeedCheckpoint(str(tmp_path))
    with pytest.raises(AssertionError, match="No ZeRO files"):
        ZeROCheckpoint(str(tmp_path), source_3d=model_3d_desc())


def test_clones_for_torch_save() -> None:
    flat = torch.arange(100.0)
    found = clone_tensors_for_torch_save({"a": [flat[:2], (flat[2:3], "x")]})
    assert found["a"][0].untyped_storage().nbytes() == 8
    assert found["a"][1][1] == "x"
