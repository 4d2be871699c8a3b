"""DeepSpeed's universal checkpoints: written of every mesh, read into every other, and what is wrong with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf import initialize
from ds_hf.checkpoint.convert import write_own
from ds_hf.checkpoint.dcp import write_dcp
from ds_hf.checkpoint.deepspeed.pickles import SubparamShape, load_any, load_pickled, save_pickled
from ds_hf.checkpoint.deepspeed.read_universal import WRITTEN_AS, read_universal
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.inspect import faults_of, inspect
from ds_hf.checkpoint.source import Source
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import CheckpointError
from ds_hf.log import forget_said, logger
from tests.checkpoint.deepspeed import deepspeed_universal
from tests.checkpoint.deepspeed.sliced_files import values_of, write_slices
from tests.checkpoint.deepspeed.test_read import _places, _replace
from tests.checkpoint.deepspeed.test_slices import INFO, SHAPES, check_values, split, whole_values
from tests.contract.test_mesh_checkpoints import STEPS, digests, load, save
from tests.engine.checkpoint import workload
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines


def same(source: Source, other: Source) -> None:
    """All states, scalars and what is no tensor."""
    values, others = values_of(source), values_of(other)
    assert values.keys() == others.keys()
    for name, states in values.items():
        # A parameter of one number has its moments among the scalars, or as tensors.
        assert all(torch.equal(value, others[name][state]) for state, value in states.items()), name
        assert source.manifest.parameters[name].trainable == other.manifest.parameters[name].trainable
    assert source.manifest.tied == other.manifest.tied
    assert source.manifest.extra["counters"] == other.manifest.extra["counters"]
    assert source.manifest.extra["groups"] == other.manifest.extra["groups"]
    for key in ("client_state", "lr_scheduler"):
        assert source.common[key] == other.common[key]
    dtypes = [{w.name: (w.dtype, tuple(w.shape)) for w in each.weights()} for each in (source, other)]
    assert dtypes[0] == dtypes[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[float]]:
    """A checkpoint of ours, what it holds, and the losses after it."""
    folder = tmp_path_factory.mktemp("trained")
    with workload.engine_of(workload.config(2, "fp16")) as engine:
        workload.train(engine, 3)
        engine.save_checkpoint(folder, client_state={"epoch": 3})
        return folder, workload.states(engine), workload.train(engine, 3, 3)


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_our_own_comes_back(tmp_path: Path, trained: Any, stage: int) -> None:
    """With tied, frozen, one-number and uneven parameters, buffers, two groups and a moving loss scale."""
    folder, expected, losses = trained
    write_universal(open_source(folder), tmp_path / "global_step3_universal")
    assert (tmp_path / "latest_universal").read_text() == "global_step3_universal"
    same(open_source(folder), open_source(tmp_path))
    config = workload.config(stage, "fp16", checkpoint={"load_universal": True})
    with workload.engine_of(config, seed=7) as engine:
        workload.train(engine, 1, 50)
        path, client = engine.load_checkpoint(tmp_path)
        assert (path, client) == (str(tmp_path / "global_step3_universal"), {"epoch": 3})
        assert workload.differences(expected, workload.states(engine)) == []
        assert workload.train(engine, 3, 3) == losses


def test_files_are_those_of_deepspeed(tmp_path: Path, trained: Any) -> None:
    folder = write_universal(open_source(trained[0]), tmp_path / "u", workers=3)
    inside = folder / "zero" / "blocks.0.linear.weight"
    assert sorted(path.name for path in inside.iterdir()) == ["exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"]
    content = load_any(inside / "fp32.pt")
    assert set(content) == {"param", "cat_dim", WRITTEN_AS}
    assert content["param"].shape == (workload.WIDTH, workload.WIDTH)
    assert content["param"].dtype == torch.float32
    assert load_any(inside / "step.pt") == 3
    assert [path.name for path in (folder / "zero" / "frozen").iterdir()] == ["fp32.pt"]
    options = load_pickled(folder / "zero" / "optimizer_state.pt")
    assert [group["weight_decay"] for group in options["param_groups"]] == [0.1, 0.0]
    assert options["optimizer_state_dict"]["state"][0]["step"] == 3
    assert options["ds_version"] == "0.19.8"
    assert options["loss_scaler"].get("cur_scale") == 1024.0
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        state = load_pickled(folder / name)
        assert (state["global_steps"], state["dp_world_size"], state["epoch"]) == (3, 1, 3)


def test_every_reader_reads_it(tmp_path: Path, trained: Any) -> None:
    source = open_source(trained[0])
    folder = write_universal(source, tmp_path / "u")
    assert faults_of(folder) == []
    content = inspect(open_source(folder))
    assert (content.kind, content.step, content.trainable) == ("universal", 3, inspect(source).trainable)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    expected = get_fp32_state_dict_from_zero_checkpoint(trained[0])
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    write_own(open_source(folder), tmp_path / "own")
    same(source, open_source(tmp_path / "own"))
    write_deepspeed(open_source(folder), tmp_path / "theirs", Target(3, 2))
    same(source, open_source(tmp_path / "theirs"))


@pytest.mark.parametrize("stage", [1, 3])
def test_slices_of_deepspeeds_ranks(tmp_path: Path, stage: int) -> None:
    """Beside the whole tensors stands how they were cut, as DeepSpeed's own converter writes it."""
    source = open_source(write_slices(tmp_path / "x", whole_values(), split, stage=stage, data=2, info=INFO))
    folder = write_universal(source, tmp_path / "y" / "u")
    check_values(open_source(folder))
    said = {name: load_any(folder / "zero" / name / "exp_avg.pt") for name in SHAPES}
    for name, keys in said.items():
        assert keys.pop(WRITTEN_AS)["as"] == f"{name}/exp_avg"
        keys.pop("param")
    rows = SubparamShape([r"^qkv\.weight$"], ((4, 2, 2), -1), 0)
    assert said == {
        "embed.weight": {"cat_dim": 0, "vocab_tensor": True},
        "qkv.weight": {"sub_param_shape": rows},
        "experts.weight": {"sub_param_shape": SubparamShape(["experts"], (2, (3, 3), 4), 1)},
        "gate_up.weight": {"cat_dim": 0, "param_n_sub_params": 2},
        "o.weight": {"cat_dim": 1},
        "norm.weight": {},
        "router.weight": {},
        "up.weight": {"cat_dim": 0},
        "odd.weight": {},
    }
    state = load_pickled(folder / "mp_rank_00_model_states.pt")
    assert state["universal_checkpoint_info"]["original_vocab_size"] == 10
    again = write_universal(open_source(folder), tmp_path / "z" / "u")
    assert load_any(again / "zero" / "qkv.weight" / "fp32.pt")["sub_param_shape"] == rows


# -- any mesh to any other ------------------------------------------------------------------------------------------


def _slices(name: str, value: Tensor, rank: int) -> Tensor:
    if name.endswith(("up.weight", "up.bias")):
        return value.chunk(2)[rank]
    if name.endswith("down.weight"):
        return value.chunk(2, 1)[rank]
    return value.clone()


def _save_and_convert(folder: Path, mesh: int, stage: int, dtype: str) -> dict[str, Any]:
    """Ours, and of it DeepSpeed's slices and the universal folder, written by the first process."""
    found = save(folder / "own", mesh, stage, dtype)
    if torch.distributed.get_rank() == 0:
        source = open_source(folder / "own", "saved")
        write_universal(source, folder / "universal" / "saved")
        patterns = {
            "tp_replicated_parameter_patterns": [r".*norm", r"embedding\.weight"],
            "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
        }
        model = {"module": {"gain": torch.ones(32)}, "buffer_names": ["gain"]}
        model |= {"shared_params": {"head.weight": "embedding.weight"}, "lr_scheduler": source.common["lr_scheduler"]}
        for kind, level, data in (("one", 1, 2), ("three", 3, 1)):
            write_slices(
                folder / kind / "saved", values_of(source), _slices, stage=level, data=data, info=patterns,
                model=model, step=STEPS, client={"epoch": 3}, options=source.common["param_groups"][0],
            )  # fmt: skip
    torch.distributed.barrier()
    return found


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        ([(2, 1), (1, 3), (2, 3)], "fp32"),
        ([(1, 2), (2, 2), (2, 0)], "bf16"),
        pytest.param([(1, 1), *((m, s) for m in (1, 2) for s in range(4))], "fp32", marks=pytest.mark.slow),
        pytest.param([(2, 3), *((m, s) for m in (1, 2) for s in range(4))], "bf16", marks=pytest.mark.slow),
    ],
)
def test_each_format_into_each_mesh(tmp_path: Path, cells: list[tuple[int, int]], dtype: str) -> None:
    """Saved by the first mesh; DeepSpeed's tensor-parallel files and the universal folder are loaded into the others.

    What is saved again has the digests of the first, of every weight and moment.
    """
    first, *others = cells
    calls: list[Any] = [(_save_and_convert, (tmp_path, *first, dtype))]
    kinds = ("universal", "one", "three")
    places = {(kind, cell): tmp_path / f"{kind}-{cell[0]}-{cell[1]}" for kind in kinds for cell in others}
    calls += [(load, (tmp_path / kind, again, *cell, dtype)) for (kind, cell), again in places.items()]
    saved, *loaded = run_distributed(workload.on_both, 2, calls, timeout=30 * len(calls))[0]
    for (key, again), found in zip(places.items(), loaded, strict=True):
        assert digests(again) == digests(tmp_path / "own"), key
        assert found["losses"] == pytest.approx(saved["losses"], rel=1e-2 if dtype == "bf16" else 1e-5), key
        assert found["client"]["epoch"] == 3
        assert found["counters"][:2] == (STEPS, 0)


# -- DeepSpeed's other ways of writing -------------------------------------------------------------------------------


def test_stage_3_writes_flat_tensors(tmp_path: Path, trained: Any) -> None:
    """Without a dict around them, and one step for all in the common file."""
    folder = write_universal(open_source(trained[0]), tmp_path / "u")
    (folder / "mp_rank_00_model_states.pt").unlink()
    for path in (folder / "zero").glob("*/*.pt"):
        if path.name == "step.pt":
            path.unlink()
            continue
        value = load_any(path)["param"].reshape(-1).clone()
        path.unlink()
        torch.save(value, path)
    same(open_source(trained[0]), open_source(folder))
    step = open_source(folder).manifest.parameters["blocks.0.linear.bias"].scalars["step"]
    assert step == ["float32", 3.0]


def test_a_vocabulary_is_padded_as_the_model_is(tmp_path: Path) -> None:
    """The rows that the checkpoint lacks are zeros; more rows than the model has are a fault."""
    with workload.engine_of(workload.config(1)) as engine:
        workload.train(engine, 2)
        info = {"vocabulary_parameter_patterns": [r"embedding\.weight"], "original_vocab_size": 9}
        engine.save_checkpoint(tmp_path, client_state={"universal_checkpoint_info": info})
    folder = write_universal(open_source(tmp_path), tmp_path / "u" / "v")
    whole = open_source(tmp_path).manifest.parameters["embedding.weight"]
    kept = load_any(folder / "zero" / "embedding.weight" / "exp_avg.pt")
    assert kept["vocab_tensor"] is True
    assert kept["param"].shape == (9, workload.WIDTH)
    with workload.engine_of(workload.config(3), seed=7) as engine:
        _, client = engine.load_checkpoint(folder)
        found = workload.states(engine)
    assert client["universal_checkpoint_info"] == info
    for state in ("master", "exp_avg", "exp_avg_sq"):
        value = open_source(tmp_path).state(whole, state).view(whole.shape)
        assert torch.equal(found[f"embedding.weight/{state}"][:9], value[:9])
        assert not found[f"embedding.weight/{state}"][9:].any()


def test_rows_of_slices_are_padded_too(tmp_path: Path) -> None:
    """A vocabulary of Megatron's ranks, into a model that pads it otherwise."""
    from ds_hf.checkpoint.vocabulary import padded

    values = {name: whole_values()[name] for name in ("embed.weight", "o.weight")}
    info = {**INFO, "vocabulary_parameter_patterns": ["embed", "o"], "original_vocab_size": 3}
    source = open_source(
        write_slices(tmp_path / "x", values, split, info={k: v for k, v in info.items() if "sub" not in k})
    )
    found = padded(source, {"embed.weight": (8, 4), "o.weight": (6, 6)})
    for name, rows in (("embed.weight", 8), ("o.weight", 6)):
        saved = found.manifest.parameters[name]
        value = found.files.value(saved)
        assert torch.equal(value[:3], values[name]["master"][:3])
        assert not value[3:].any()
        assert value.shape[0] == rows


# -- real DeepSpeed --------------------------------------------------------------------------------------------------


def _deepspeed(action: str, folder: Path, *numbers: int, kind: str = "llama") -> list[float]:
    script = Path(__file__).with_name("deepspeed_universal.py")
    result = subprocess.run(
        [os.environ["DS_HF_DEEPSPEED_PYTHON"], str(script), action, str(folder), *map(str, numbers), kind],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    losses: list[float] = json.loads(result.stdout.splitlines()[-1])
    return losses


needs_deepspeed = pytest.mark.skipif(
    "DS_HF_DEEPSPEED_PYTHON" not in os.environ, reason="DS_HF_DEEPSPEED_PYTHON names no Python with DeepSpeed"
)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),  # stage, tensor-parallel processes, processes
    [
        ("llama", (1, 2, 2), (3, 1, 2)),
        ("llama", (3, 2, 4), (2, 2, 2)),
        ("llama", (2, 1, 2), (1, 1, 1)),
        ("mixtral", (1, 2, 2), (2, 1, 1)),
    ],
)
def test_real_deepspeed_agrees(tmp_path: Path, kind: str, saved: tuple[int, ...], loaded: tuple[int, ...]) -> None:
    """We read what its converter makes of its files, to the bit, and it goes on from what ours makes of them."""
    losses = _deepspeed("save", tmp_path, *saved, kind=kind)
    source, theirs = open_source(tmp_path / "saved"), open_source(tmp_path / "saved_universal")
    source.check()
    same(source, theirs)
    ours = write_universal(source, tmp_path / "ours")
    for name, states in values_of(source).items():
        for state, value in states.items():
            content = load_any(ours / "zero" / name / f"{'fp32' if state == 'master' else state}.pt")
            other = load_any(
                tmp_path / "saved_universal" / "zero" / name / f"{'fp32' if state == 'master' else state}.pt"
            )
            assert torch.equal(content.pop("param"), value)
            if isinstance(other, dict):
                other.pop("param")
                assert content == other
    assert _deepspeed("load", tmp_path, *loaded, kind=kind) == pytest.approx(losses, abs=1e-5)


def _cut_experts(folder: str) -> list[float]:
    """Our run with experts cut over two processes, saved after three steps; the losses of three more."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine = initialize(model=deepspeed_universal.model_of("mixtral"), config=config)[0]
    assert cut_of(engine.module.model.layers[0].mlp.experts.down_proj) is not None
    losses = []
    for number in range(6):
        if number == 3:
            engine.save_checkpoint(folder, tag="saved", client_state={"epoch": 3})
        tokens = deepspeed_universal.tokens_of(number)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses[3:]


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("loaded", [(1, 2, 2), (3, 1, 2)])
def test_real_deepspeed_goes_on_with_experts_that_we_cut(tmp_path: Path, loaded: tuple[int, ...]) -> None:
    losses = run_distributed(_cut_experts, 2, str(tmp_path))[0]
    write_universal(open_source(tmp_path / "saved"), tmp_path / "ours")
    assert _deepspeed("load", tmp_path, *loaded, kind="mixtral") == pytest.approx(losses, abs=1e-5)


# -- faults ---------------------------------------------------------------------------------------------------------


def test_load_universal_without_one(tmp_path: Path, trained: Any) -> None:
    """Ours are loaded at any world size without it, so they are taken too; nothing at all is DeepSpeed's error."""
    config = workload.config(1, "fp16", checkpoint={"load_universal": True})
    with workload.engine_of(config) as engine:
        with pytest.raises(ValueError, match="latest_universal does not exist"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(trained[0])[0] == str(trained[0] / "global_step3")


def test_which_of_two_is_loaded(tmp_path: Path, trained: Any) -> None:
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    write_universal(open_source(trained[0]), tmp_path / "u")
    for universal, name in ((True, "u"), (False, "global_step3")):
        config = workload.config(1, "fp16", checkpoint={"load_universal": universal})
        with workload.engine_of(config) as engine:
            assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / name)


def test_what_is_there_is_not_overwritten(tmp_path: Path, trained: Any) -> None:
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a universal checkpoint"):
        write_universal(open_source(trained[0]), tmp_path / "u")
    (tmp_path / "u" / "notes").unlink()
    for _ in range(2):
        write_universal(open_source(trained[0]), tmp_path / "u")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "u"]


def test_patterns_that_match_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = {**INFO, "parameter_with_row_parallelism_patterns": [r".*\bo\.weight", "misspelt"]}
    source = open_source(write_slices(tmp_path / "x", whole_values(), split, info=info))
    with pytest.raises(CheckpointError, match="match no parameter: misspelt"):
        write_universal(source, tmp_path / "y" / "u")
    assert not (tmp_path / "y" / "u").exists()
    write_universal(source, tmp_path / "y" / "u", strict=False)
    assert "match no parameter: misspelt" in caplog.text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("zero/blocks.0.linear.weight", "has no folder of blocks.0.linear.weight"),
        ("zero/blocks.0.linear.weight/fp32.pt", r"blocks.0.linear.weight/fp32\.pt is missing"),
        ("mp_rank_00_model_states.pt", None),  # stage 3's is enough
        ("*model_states.pt", "is missing: the folder is not a complete"),
        ("zero/optimizer_state.pt", "optimizer"),
    ],
)
def test_parts_are_missing(tmp_path: Path, trained: Any, path: str, message: str | None) -> None:
    folder = write_universal(open_source(trained[0]), tmp_path / "u")
    for each in list(folder.glob(path)):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    if message is None:
        same(open_source(trained[0]), open_source(folder))
        return
    with workload.engine_of(workload.config(1, "fp16")) as engine, pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path, "u")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("fp32.pt", {"param": torch.zeros(5, 5)}, r"shape \[5, 5\] in zero/ and \[6, 6\] in the model"),
        ("fp32.pt", {"param": torch.zeros(36, dtype=torch.int64)}, "no tensor of floating-point numbers"),
        ("fp32.pt", {"param": "x"}, "no tensor of floating-point numbers"),
        ("exp_avg.pt", {"param": torch.zeros(35)}, "has 35 elements, and the parameter has 36"),
        ("exp_avg.pt", {"param": torch.zeros(1).expand(10**9)}, "exp_avg.pt cannot be read: it stands for"),
        ("step.pt", "x", "step.pt: the step is 'x'"),
        ("step.pt", -1, "step.pt: the step is '-1'"),
    ],
)
def test_one_file_is_wrong(tmp_path: Path, trained: Any, name: str, content: Any, message: str) -> None:
    folder = write_universal(open_source(trained[0]), tmp_path / "u")
    torch.save(content, folder / "zero" / "blocks.0.linear.weight" / name)
    with pytest.raises(CheckpointError, match=message):
        read_universal(folder).check()


@pytest.mark.parametrize(
    ("gone", "named", "way"),
    [
        ("first/exp_avg.pt", "first/exp_avg.pt", "read"),
        ("first/exp_avg*.pt", "exp_avg of first", "converted to ours"),
        ("*/exp_avg_sq.pt", "exp_avg_sq.pt", "read"),
        ("first/step.pt", "first/step.pt", "read"),
    ],
)
def test_states_are_missing(tmp_path: Path, trained: Any, gone: str, named: str, way: str) -> None:
    """They would be zeros; weights alone can be had."""
    folder = write_universal(open_source(trained[0]), tmp_path / "universal")
    first = sorted(path.name for path in (folder / "zero").iterdir() if (path / "exp_avg.pt").is_file())[0]
    for path in folder.glob(f"zero/{gone.replace('first', first)}"):
        path.unlink()
    if gone == "first/step.pt":  # nor in the common file, as at stages 1 and 2
        common = folder / "zero/optimizer_state.pt"
        content = load_pickled(common)
        content.pop("optimizer_state_dict")
        save_pickled(common, content)
    if way != "read":
        folder = write_own(open_source(folder), tmp_path / "own")
    faults = faults_of(folder)
    assert faults
    assert named.replace("first", first) + " is missing" in faults[0]
    with workload.engine_of(workload.config(2, "fp16")) as engine:
        with pytest.raises(CheckpointError, match=re.escape(named.replace("first", first) + " ")):
            engine.load_checkpoint(folder)
        assert engine.load_checkpoint(folder, load_optimizer_states=False)[0] == str(folder)


@pytest.mark.parametrize("way", ["read", "ours", "deepspeed", "dcp"])
def test_states_in_each_others_place(tmp_path: Path, trained: Any, way: str) -> None:
    """A mean of squares is never negative: refused, by name, in every format; what is not finite is told."""
    folder = write_universal(open_source(trained[0]), tmp_path / "universal")
    name = next(path.parent for path in sorted(folder.glob("zero/*/exp_avg.pt")) if load_any(path)["param"].min() < 0)
    first, second = name / "exp_avg.pt", name / "exp_avg_sq.pt"
    exchange(first, second, tells=False)
    wrong = _as(way, folder, tmp_path / "wrong")
    with workload.engine_of(workload.config(2, "fp16")) as engine:
        with pytest.raises(
            CheckpointError, match=rf"{re.escape(name.name)}.* has negative values|exp_avg_sq.pt has neg"
        ):
            engine.load_checkpoint(wrong)
        assert engine.load_checkpoint(wrong, load_optimizer_states=False)[0] == str(wrong)
        content = load_any(second)
        content["param"] = torch.full_like(content["param"], float("nan"))
        save_pickled(second, content)
        forget_said()
        logger.addHandler(lines := Lines())
        assert engine.load_checkpoint(_as(way, folder, tmp_path / "nan"))[0]
        logger.removeHandler(lines)
        assert [name.name in text and "not finite" in text for text in lines.texts if "exp_avg_sq" in text] == [True]


def exchange(first: Path, second: Path, *, tells: bool) -> None:
    """Let each file be where the other was; those of DeepSpeed do not tell of what they were written."""
    contents = load_any(first), load_any(second)
    for path, content in zip((second, first), contents, strict=True):
        save_pickled(path, {key: value for key, value in content.items() if tells or key != WRITTEN_AS})


@pytest.mark.parametrize("state", ["exp_avg", "fp32"])
def test_parameters_in_each_others_place(tmp_path: Path, trained: Any, state: str) -> None:
    """Of one shape: refused, at a load and where they are converted; DeepSpeed's own files cannot be told apart."""
    names = [f"zero/blocks.{number}.linear.weight/{state}.pt" for number in (0, 1)]
    folder = write_universal(open_source(trained[0]), tmp_path / "u")
    exchange(folder / names[0], folder / names[1], tells=True)
    said = rf"{re.escape(names[0])} was written as blocks\.1\.linear\.weight/{state}\.pt"
    with workload.engine_of(workload.config(2, "fp16")) as engine:
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(folder)
        with pytest.raises(CheckpointError, match=said):
            write_own(open_source(folder), tmp_path / "own")
        exchange(folder / names[0], folder / names[1], tells=False)
        assert engine.load_checkpoint(folder)[0] == str(folder)


def _as(way: str, folder: Path, target: Path) -> Path:
    if way == "ours":
        return write_own(open_source(folder), target)
    if way == "deepspeed":
        return write_deepspeed(open_source(folder), target, Target(2, 2))
    if way == "dcp":
        write_dcp(open_source(folder), target)
        return target
    return folder


def test_damage_is_found(tmp_path: Path, trained: Any) -> None:
    folder = write_universal(open_source(trained[0]), tmp_path / "u")
    path = folder / "zero" / "blocks.1.linear.weight" / "exp_avg_sq.pt"
    value = load_any(path)["param"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(value) + 5] ^= 1
    path.write_bytes(content)
    assert any(path.name in fault for fault in faults_of(folder))
    with workload.engine_of(workload.config(1, "fp16")) as engine, pytest.raises(CheckpointError, match=path.name):
        engine.load_checkpoint(folder)


def test_nothing_in_the_files_is_believed(tmp_path: Path) -> None:
    source = open_source(write_slices(tmp_path / "x", whole_values(), split, info=INFO))
    folder = write_universal(source, tmp_path / "y" / "u")
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused = accepted = 0
    for path in [folder / "mp_rank_00_model_states.pt", *sorted((folder / "zero").glob("**/*.pt"))[::3]]:
        content, whole = path.read_bytes(), load_any(path)
        places = [place for place in _places(whole) if not {"ds_config", "param_groups"} & set(place)]
        for number, place in list(enumerate(places))[:: 3 if "model" in path.name else 1]:
            junk = (None, -1, 10**30, "x", [], {}, [[]], torch.ones(2, 2), torch.zeros(1).expand(10**9))[number % 9]
            changed = load_any(path)
            _replace(changed, place, junk)
            path.unlink()
            save_pickled(path, changed)
            fault = None
            try:
                opened = read_universal(folder)
                opened.check()
                assert sum(v.numel() for of in values_of(opened).values() for v in of.values()) < 10**6
            except CheckpointError as error:
                fault = str(error)
            assert fault is None or str(folder) in fault, fault
            refused, accepted = refused + (fault is not None), accepted + (fault is None)
            path.unlink()
            path.write_bytes(content)
    assert refused > 20
    assert accepted > 10
