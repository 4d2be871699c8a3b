"""Weights for ``from_pretrained``: from checkpoints and from live engines, at every stage, in little memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import ds_hf
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.pretrained import ShardedWriter, Spec, export_source, write_single
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.errors import CheckpointError
from tests.checkpoint.hostile import killed_at
from tests.engine.checkpoint.workload import Model, config, engine_of, on_both, states, train
from tests.engine.offload.test_aio import files_of_at_most
from tests.helpers.distributed import run_distributed

STAGES = (0, 1, 2, 3)
KEPT = {name for name in Model().state_dict() if name != "head.weight"}  # tied to the embedding


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=32,
        )
    )  # fmt: skip


def _train_llama(folder: Path, stage: int) -> Any:
    """Export live and from a checkpoint; the logits of the trained model."""
    content = config(stage, "bf16")
    model = _llama()
    engine = ds_hf.initialize(model=model, model_parameters=model.parameters(), config=content)[0]
    tokens = torch.arange(12).reshape(1, 12)
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.export_pretrained(folder / "live", max_shard_size=4000)
    engine.export_pretrained(folder / "wide", dtype=torch.float32)
    engine.save_checkpoint(folder / "saved")
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits.float()
    again = float(engine(input_ids=tokens, labels=tokens).loss.detach())
    engine.destroy()
    return logits, again


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("llama")
    calls = [(_train_llama, (root / str(stage), stage)) for stage in STAGES]
    results = run_distributed(on_both, 2, calls, timeout=100)[0]
    return {stage: (root / str(stage), result) for stage, result in zip(STAGES, results, strict=True)}


@pytest.mark.parametrize("stage", STAGES)
def test_from_pretrained_loads_what_is_exported(stage: int, llamas: dict[int, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    root, (logits, loss) = llamas[stage]
    assert loss > 0
    (root / "live/tokenizer.json").write_text("{}")
    (root / "live/modeling_evil.py").write_text("raise SystemExit")
    source = open_source(root / "saved")
    export_source(source, tmp_path / "hf", max_shard_size="4KB", model_folder=root / "live")
    assert sorted(path.name for path in (root / "live").glob("model-*"))[0].startswith("model-00001-of-")
    assert (tmp_path / "hf/tokenizer.json").is_file()
    assert not list((tmp_path / "hf").glob("*.py"))
    for folder in (root / "live", tmp_path / "hf"):
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        assert model.dtype is torch.bfloat16
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with torch.no_grad():
            found = model(input_ids=torch.arange(12).reshape(1, 12)).logits.float()
        assert torch.equal(found, logits)


def test_every_stage_exports_the_same_files(llamas: dict[int, Any]) -> None:
    """But for the numbers, which differ in the last bits with the order of reductions."""
    folders = [llamas[stage][0] / "live" for stage in STAGES]
    names = [
        sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json")) for folder in folders
    ]
    names = [[name for name in each if name != "tokenizer.json"] for each in names]  # put there by the test above
    assert names[0] == names[1] == names[2]
    assert {"config.json", "model.safetensors.index.json"} < set(names[3])
    for folder in folders:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        found = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
        assert index["weight_map"] == found
        assert "lm_head.weight" not in found
        elements = sum(p.numel() for p in _llama().parameters())
        assert index["metadata"] == {"total_parameters": elements, "total_size": 2 * elements}
        assert all(path.stat().st_size < 4000 + 2000 for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_dtype_can_be_asked_for(stage: int, llamas: dict[int, Any]) -> None:
    folder = llamas[stage][0]
    wide = load_file(folder / "wide/model.safetensors")
    live = {k: v for path in (folder / "live").glob("*.safetensors") for k, v in load_file(path).items()}
    assert wide.keys() == live.keys()
    assert all(torch.equal(wide[name], live[name].float()) for name in live)
    assert json.loads((folder / "wide/config.json").read_text())["dtype"] == "float32"
    assert json.loads((folder / "live/config.json").read_text())["dtype"] == "bfloat16"


def test_masters_are_exported_in_fp32(tmp_path: Path) -> None:
    with engine_of(config(2, "bf16")) as engine:
        train(engine, 5)
        engine.save_checkpoint(tmp_path / "saved")
        expected = states(engine)
    export_source(open_source(tmp_path / "saved"), tmp_path / "hf", dtype=torch.float32)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert set(found) == KEPT
    for name in ("embedding.weight", "blocks.1.linear.weight", "scale"):
        assert torch.equal(found[name], expected[f"{name}/master"])
        assert not torch.equal(found[name], found[name].bfloat16().float())
    assert found["blocks.0.calls"].dtype is torch.int64
    write_single(open_source(tmp_path / "saved"), tmp_path / "one.safetensors")
    model = Model(tied=True)
    assert load_model(model, str(tmp_path / "one.safetensors")) == (set(), [])
    assert torch.equal(model.head.weight.detach(), expected["embedding.weight/master"])
    write_single(open_source(tmp_path / "saved"), tmp_path / "one.bin", dtype=torch.float16)
    pickled = torch.load(tmp_path / "one.bin", weights_only=True)
    assert set(pickled) == {*KEPT, "head.weight"}
    assert pickled["head.weight"].dtype is torch.float16
    assert pickled["head.weight"].data_ptr() == pickled["embedding.weight"].data_ptr()


# -- the writer -----------------------------------------------------------------------------------------------------


def _specs(count: int, numel: int = 10) -> list[Spec]:
    return [Spec(f"w{index}", (numel,), torch.float32) for index in range(count)]


def test_shards_of_an_earlier_export_go(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    with ShardedWriter(tmp_path, _specs(4), 80) as writer:
        for index in (3, 0, 2, 1):
            writer.put(f"w{index}", torch.full((10,), float(index)))
    assert len(list(tmp_path.glob("model-*-of-00002.safetensors"))) == 2
    with ShardedWriter(tmp_path, _specs(2)) as writer:
        for index in range(2):
            writer.put(f"w{index}", torch.full((10,), float(index)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("w1").tolist() == [1.0] * 10


def test_a_failed_export_leaves_what_was_there(tmp_path: Path) -> None:
    with ShardedWriter(tmp_path, _specs(1)) as writer:
        writer.put("w0", torch.ones(10))
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail() -> None:
        with ShardedWriter(tmp_path, _specs(3), 40) as writer:
            writer.put("w0", torch.zeros(10))
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with ShardedWriter(tmp_path, _specs(2, 1000)) as writer:
            for index in range(2):
                writer.put(f"w{index}", torch.zeros(1000))

    with files_of_at_most(5000), pytest.raises(OSError, match=r"too large: '.*/model\.safetensors'"):
        fill()
    assert not list(tmp_path.iterdir())


def _model_folder(folder: Path, size: int) -> Path:
    """A model with a tokenizer, both of this size."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(size)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            eos_token_id=size - 1,
        )
    ).save_pretrained(folder)  # fmt: skip
    words = models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(folder)
    return folder


def _put_over(source: Path, folder: Path, limit: int | None) -> None:
    export_source(open_source(source), folder, max_shard_size=limit, model_folder=source)


def _size_read(folder: Path) -> int:
    """Of the model that transformers reads, and we; its tokenizer is of the same or tells that there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    size = int(AutoConfig.from_pretrained(folder).vocab_size)
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    ours = {weight.name: weight.read() for weight in open_source(folder).weights()}
    assert all(torch.equal(state[name], value) for name, value in ours.items())
    assert state["model.embed_tokens.weight"].shape == (size, size)
    assert ours.keys() == state.keys()
    with contextlib.suppress(OSError, ValueError):
        assert len(AutoTokenizer.from_pretrained(folder)) == size
    return size


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2000, 2000), (None, None), (None, 2000), (2000, None)])
def test_a_kill_never_leaves_weights_beside_the_configuration_of_others(
    old: int | None, new: int | None, tmp_path: Path
) -> None:
    """Of another size: readers find the older model or the new, and never the tokenizer of the other one."""
    first, second = _model_folder(tmp_path / "8", 8), _model_folder(tmp_path / "16", 16)
    _put_over(first, tmp_path / "old", old)
    _put_over(second, tmp_path / "wanted", None)
    seen: list[int] = []
    while True:
        folder = Path(shutil.copytree(tmp_path / "old", tmp_path / f"killed at {len(seen) + 1}"))
        killed = killed_at(len(seen) + 1, lambda folder=folder: _put_over(second, folder, new))  # type: ignore[misc]
        seen.append(_size_read(folder))
        if killed:
            _put_over(second, folder, None)
            assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "wanted"))
            assert _size_read(folder) == 16
            assert (folder / "config.json").read_bytes() == (tmp_path / "wanted/config.json").read_bytes()
        else:
            break
        shutil.rmtree(folder)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1], seen.count(16) > 6) == (8, 16, True)


def test_a_tokenizer_of_others_goes_and_nothing_is_written_through_links(tmp_path: Path) -> None:
    first, second = _model_folder(tmp_path / "8", 8), _model_folder(tmp_path / "16", 16)
    content = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({**content, "transformers_weights": "elsewhere.safetensors"}))
    open_first = open_source(first)
    _put_over(first, tmp_path / "out", None)
    for name in ("config.json", "tokenizer.json", "vocab.txt"):
        (tmp_path / name).write_text("mine")
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(tmp_path / name)
    export_source(open_first, tmp_path / "out", model_folder=second)
    assert {(tmp_path / name).read_text() for name in ("config.json", "tokenizer.json", "vocab.txt")} == {"mine"}
    assert not any(path.is_symlink() or path.name == "vocab.txt" for path in (tmp_path / "out").iterdir())
    assert "transformers_weights" not in json.loads((tmp_path / "out/config.json").read_text())


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    specs = [Spec("none", (0, 3), torch.float32), Spec("one", (), torch.int64), Spec("half", (3,), torch.float16)]
    with ShardedWriter(tmp_path, specs) as writer:
        writer.put("half", torch.ones(3, dtype=torch.float64))
        writer.put("none", torch.empty(0, 3))
        writer.put("one", torch.tensor(7))
    found = load_file(tmp_path / "model.safetensors")
    assert (found["none"].shape, found["one"].item(), found["half"].tolist()) == ((0, 3), 7, [1.0] * 3)


def test_damaged_checkpoints_are_not_exported(tmp_path: Path) -> None:
    with engine_of(config(1)) as engine:
        engine.save_checkpoint(tmp_path / "saved", tag="t")
    path = tmp_path / "saved/t/rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="rank_00000"):
        export_source(open_source(tmp_path / "saved"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- memory ---------------------------------------------------------------------------------------------------------

BLOCKS, SIDE = 16, 1024  # of 4 MiB each


def _plain(stage: int) -> dict[str, Any]:
    content = config(stage)
    content.pop("scheduler")
    return content


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _private_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


class _Peak:
    """The largest growth of memory seen whenever a tensor is written."""

    def __init__(self) -> None:
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: larger pieces go back to the system when freed
        self.base, self.most = _private_bytes(), 0

    def __call__(self, *_: Any) -> None:
        self.most = max(self.most, _private_bytes() - self.base)


def _measure_live(folder: Path) -> tuple[int, int]:
    alone = {"ds_hf": {"join_blocks": False}}  # of so small blocks four would be a unit
    engine = ds_hf.initialize(model=Wide(), config=_plain(3) | alone)[0]
    peak = _Peak()
    put = ShardedWriter.put

    def observed(self: ShardedWriter, name: str, value: torch.Tensor) -> None:
        put(self, name, value)
        peak()

    ShardedWriter.put = observed  # type: ignore[method-assign]
    gather = FlatBuffer.gather

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = gather(self, *args, **kwargs)
        peak()
        return result

    FlatBuffer.gather = watched  # type: ignore[method-assign]
    engine.export_pretrained(folder, max_shard_size="5MB")
    FlatBuffer.gather, ShardedWriter.put = gather, put  # type: ignore[method-assign]
    whole = _Peak()
    state = engine._zero3_consolidated_16bit_state_dict()
    whole()
    del state
    engine.destroy()
    return peak.most, whole.most


def test_a_live_export_needs_one_unit(tmp_path: Path) -> None:
    """Gathering everything first needs all sixteen."""
    (most, whole), (other, _) = run_distributed(_measure_live, 2, tmp_path, timeout=60)
    unit = 4 * SIDE * SIDE
    assert len(list(tmp_path.glob("*.safetensors"))) == BLOCKS
    assert whole > 0.8 * BLOCKS * unit
    assert most < 4 * unit  # the unit, what gloo needs to gather it, and what is being written
    assert other < 4 * unit


_FROM_FOLDER = """
import sys
from pathlib import Path
from ds_hf.checkpoint.pretrained import export_source
from ds_hf.checkpoint.formats import open_source
from tests.engine.checkpoint.test_export import _Peak
source = open_source(sys.argv[1])
peak = _Peak()
export_source(source, sys.argv[2], report=peak)
print(peak.most)
whole = _Peak()
kept = [weight.read() for weight in source.weights()]
whole()
print(whole.most)
"""


def test_a_checkpoint_is_exported_tensor_by_tensor(tmp_path: Path) -> None:
    engine = ds_hf.initialize(model=Wide(), config=_plain(2))[0]
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    command = [sys.executable, "-c", _FROM_FOLDER, str(tmp_path / "saved"), str(tmp_path / "hf")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    most, whole = map(int, result.stdout.split())
    tensor = 4 * SIDE * SIDE
    assert whole > 0.8 * BLOCKS * tensor
    assert most < 3 * tensor
