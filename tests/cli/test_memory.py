"""``ds-hf memory`` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_hf.cli.root import app
from ds_hf.memory import UnpredictableError
from ds_hf.memory.table import parse_bytes

TINY = "llama:hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=512"
ONE_LAYER = TINY.replace("layers=2", "layers=1")  # where many ways are looked at


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["memory", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_table() -> None:
    code, out, _ = run(TINY, "--world-size", "2", "--seq-len", "64", "--device-memory", "2GiB")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("LlamaForCausalLM: 0.14 M parameters; micro-batch 1 x 64 tokens; 2 processes")
    stages = [line.split()[0] for line in lines if line[:1].isdigit()]
    assert stages == ["0", "1", "1", "2", "2", "3", "3", "3", "3", "3"]
    assert any(line.split()[:2] == ["GPU", "parameters"] for line in lines)
    assert "CUDA context" in out


def test_json() -> None:
    code, out, _ = run(TINY, "--json", "--seq-len", "64", "--micro-batch", "3", "--device-memory", "2GiB")
    assert code == 0
    found = json.loads(out)
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert found["parameters"] == found["trainable"] == 2 * 512 * 64 + 2 * per_layer + 64
    assert [(row["stage"], row["offload"]) for row in found["rows"]][:3] == [
        (0, "-"),
        (1, "-"),
        (1, "optimizer to cpu"),
    ]
    device = found["rows"][0]["prediction"]["device"]
    assert device["tensors_peak"] == sum(device["parts"].values())
    assert device["total"] == device["tensors_peak"] + sum(device["outside"].values())
    assert found["rows"][0]["prediction"]["micro_batch"] == 3
    offloaded = found["rows"][4]
    assert offloaded["zero_optimization"] == {"offload_optimizer": {"device": "cpu"}, "stage": 2}
    assert offloaded["prediction"]["host"]["parts"]["moments"] > 0


@pytest.mark.slow
def test_its_own_configuration_is_the_row_that_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": zero, "optimizer": {"type": "Lion"}}))
    code, out, _ = run(TINY, "--seq-len", "64", "--config", str(file), "--device-memory", "2GiB")
    assert code == 0
    assert 'bf16.enabled is "auto": taken as true' in out
    assert "stage 3, offload optimizer to cpu: each process" in out
    code, out, _ = run(TINY, "--seq-len", "64", "--config", str(file), "--device-memory", "2GiB", "--json")
    assert [row["chosen"] for row in json.loads(out)["rows"]].index(True) == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no/such"], "cannot find the model 'no/such'"),
        (["nowhere.py"], "nowhere.py does not exist"),
        ([TINY, "--device-memory", "lots"], "'lots' is not a valid amount of memory"),
        ([TINY, "--host-memory", "0GiB"], "'0GiB' is not a valid amount of memory"),
        ([TINY, "--config", '{"zero_optimization": {"stage": 9}}'], "stage"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], text: str) -> None:
    code, out, err = run(*arguments)
    assert code == 1
    assert text in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([TINY, "--seqlen", "3"], "there is no option --seqlen; did you mean --seq-len?"),
        (["--devicememory", "3", TINY], "there is no option --devicememory; did you mean --device-memory?"),
        (["--devicememory", "3", "train.py"], "Options of a script come after it"),
        ([TINY, "--lora", "rank=3"], "write --lora r=16"),
        ([TINY, "--load-in", "3bit"], "write 4bit or 8bit"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], text: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert text in err


def test_bases_of_few_bits_want_adapters() -> None:
    code, _, err = run(TINY, "--load-in", "4bit")
    assert code == 1
    assert "add --lora r=16" in err


def test_the_cheapest_way_that_fits(tmp_path: Path) -> None:
    """Of a model whose states fit, then of one whose do not: adapters, with the commands and the file."""
    big = "llama:hidden=512,layers=1,heads=8,intermediate=1024,vocab=8704"
    code, out, _ = run(big, "--seq-len", "64", "--host-memory", "4GiB", "--device-memory", "1.42GiB", "-n", "2")
    assert code == 0
    assert "cheapest that fits: stage 1: 1.4 of 1.4 GiB; at most micro-batch 3" in out
    file = tmp_path / "ds.json"
    code, out, err = run(
        big, "--seq-len", "64", "--host-memory", "0.06GiB", "--device-memory", "0.74GiB", "-o", str(file)
    )
    assert code == 0, err
    assert "cheapest that fits: LoRA of rank 16" in out
    assert "--checkpointing --lora r=16" in out
    # the file has bf16, and the figures are those of one sample: the Trainer must be told both
    flags = "--bf16 --per_device_train_batch_size 1 --gradient_checkpointing"
    assert f"train.py --deepspeed {file} {flags}" in out
    assert json.loads(file.read_text())["zero_optimization"]["stage"] == 0
    code, out, err = run(big, "--seq-len", "64", "--device-memory", "0.1GiB", "-o", str(tmp_path / "none.json"))
    assert code == 1
    assert "nothing fits" in out
    assert not (tmp_path / "none.json").exists()


def test_host_memory_that_rules_out_what_fits_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory it is, and in what the described model is taken to be loaded, are said; else neither."""
    monkeypatch.setattr("ds_hf.cli.memory.total_memory", lambda: 400 << 10)  # 0.41 MiB of weights in fp32
    sizes = ("--seq-len", "64", "--device-memory", "4GiB")
    _, out, _ = run(ONE_LAYER, *sizes)
    assert "too large for the host" in out
    assert "GiB of host memory are this machine's, and rule out what would fit the GPU; --host-memory" in out
    assert "a description is loaded in fp32; add dtype=bfloat16" in out
    _, out, _ = run(f"{ONE_LAYER},dtype=bfloat16", *sizes)
    assert "a description is loaded" not in out
    _, out, _ = run(ONE_LAYER, *sizes, "--host-memory", "4GiB")
    assert "note: no configuration given" in out
    assert "host memory" not in out
    assert "a description is loaded" not in out


def test_arguments_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; raise SystemExit(' '.join(sys.argv[1:]))")
    _, _, err = run(str(script), "--deepspeed", "ds.json", "--lr", "1e-3", "--world-size", "4", "--bf16", "--out=o")
    assert "exit code --deepspeed ds.json --lr 1e-3 --bf16 --out=o" in err
    _, _, err = run(str(script), "--json", "--", "--config", "a", "--json")
    assert "exit code --config a --json" in err


def test_amounts() -> None:
    assert parse_bytes("80") == parse_bytes("80GiB") == parse_bytes(" 80 g ") == 80 << 30
    assert parse_bytes("24GB") == 24 * 10**9
    assert parse_bytes("1.5TiB") == 3 << 39
    for text in ("", "GiB", "-3GiB", "3 apples", "0"):
        with pytest.raises(UnpredictableError, match="not a valid amount of memory"):
            parse_bytes(text)


@pytest.mark.slow
def test_groups_of_processes(tmp_path: Path) -> None:
    """States divided inside hosts count at the stages that divide them, and nothing is said of the others."""
    file = tmp_path / "ds.json"
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "mics_hierarchical_params_gather": False}
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    parameters = {}
    for processes in ("4", "2", "3"):
        code, out, error = run(TINY, "--json", "--seq-len", "64", "--config", str(file), "--world-size", processes)
        assert code == 0
        assert "no effect" not in error
        rows = {(row["stage"], row["offload"]): row for row in json.loads(out)["rows"]}
        row = rows[3, "-"]
        if processes == "3":
            assert "zero_hpz_partition_size 2 does not divide the 3 processes" in json.dumps(row)
            continue
        parameters[processes] = row["prediction"]["device"]["parts"]["parameters"]
    # A second half beside the fourth; of two processes the half is all.
    assert parameters["4"] == pytest.approx(1.5 * parameters["2"], rel=0.05)


@pytest.mark.slow
def test_long_sequences() -> None:
    asked = (
        "--sp",
        "2",
        "-w",
        "4",
        "--offload-activations",
        "--longest",
        "--device-memory",
        "4GiB",
        "--seq-len",
        "512",
    )
    code, out, _ = run(TINY, *asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["sequence_parallel_size"] == 2
    row = found["rows"][3]
    assert row["longest_sequence"] % 512 == 0
    assert row["longest_sequence"] > 10_000
    code, out, _ = run(TINY, *asked)
    assert "4 processes, 2 to a sequence, with 4.00 GiB each" in out.replace("4.0 GiB", "4.00 GiB")
    assert "longest: tokens of a sample that fit" in out
    code, _, err = run(TINY, "--sp", "3", "-w", "3", "--seq-len", "513")
    assert code == 1
    assert "head" in err


def test_activations_of_a_long_sequence_are_on_the_host() -> None:
    long = ("--seq-len", "65536", "--device-memory", "4GiB", "--json")
    _, plain, _ = run(TINY, "--checkpointing", *long)
    _, moved, _ = run(TINY, "--offload-activations", *long)
    before, after = (json.loads(text)["rows"][3]["prediction"] for text in (plain, moved))
    assert after["host"]["parts"]["activations"] == 2 * 65536 * 64 * 2  # layers, tokens, hidden, bytes
    assert before["host"]["parts"].get("activations") is None


@pytest.mark.slow
def test_tiles_make_room_for_longer_sequences() -> None:
    long = ("--longest", "--checkpointing", "--device-memory", "4GiB", "--json")
    _, plain, _ = run(TINY, *long)
    _, tiled, _ = run(TINY, "--tiles", *long)
    before, after = (json.loads(text)["rows"][3]["longest_sequence"] for text in (plain, tiled))
    assert after > 1.5 * before


def test_where_every_row_is_refused_nothing_else_is_said() -> None:
    code, out, _ = run(TINY, "--world-size", "3", "--tp", "2", "--seq-len", "16")
    assert code == 1
    assert "tensor-parallel 2 (tensor_parallel.autotp_size) does not divide the 3 processes" in out
    assert "cheapest" not in out
