"""What files hold does not steer a terminal, by whatever way it gets there."""

from __future__ import annotations

import io
import json
import logging
import struct
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ds_hf.cli
from ds_hf.checkpoint.formats import open_source
from ds_hf.cli.root import app
from ds_hf.errors import CheckpointError, ConfigError, Fault
from ds_hf.log import logger, say, warn_once
from ds_hf.printable import printable, printable_json

NASTY = "\x1b]0;title\x07\x9b2J\u202e\t\r\x7fü"


def harmless(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def test_printable() -> None:
    assert printable("größe 数\n'x'") == "größe 数\n'x'"
    assert printable(NASTY) == r"\x1b]0;title\x07\x9b2J\u202e\t\r\x7fü"
    assert printable(Path("a\x1b")) == r"a\x1b"
    assert printable("\udc80\U000e0001") == r"\udc80\U000e0001"


def test_printable_json() -> None:
    value = {NASTY: [NASTY, "\udc80", "\U000e0001", 1.5], "ö": None}
    text = printable_json(value)
    assert harmless(text)
    assert "ö" in text
    assert json.loads(text) == value


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_an_escape(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal or a pipe of another encoding than UTF-8 ends no command."""
    stream = io.TextIOWrapper(out := io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.argv", ["ds-hf", "config", "check", "数é.json"])
    with pytest.raises(SystemExit) as ended:
        ds_hf.cli.main()
    assert ended.value.code == 1
    stream.flush()
    assert r"faulty: \u6570" in out.getvalue().decode(encoding)


def test_errors() -> None:
    assert harmless(str(CheckpointError(f"{NASTY} is missing")))
    assert harmless(str(ConfigError([Fault(f"/{NASTY}", NASTY, NASTY)], NASTY)))
    assert harmless(Fault("", NASTY, NASTY).message + Fault("", NASTY, NASTY).fix)


def test_log(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.warning("%s and %s: %d", Path(NASTY), OSError(2, NASTY), 5)
        logger.warning("%r", CheckpointError(NASTY))
        warn_once(f"once: {NASTY}")
        logger.warning("\x1b[31muser's own colours\x1b[0m")
    finally:
        logger.removeHandler(handler)
    *ours, own = stream.getvalue().splitlines()
    assert harmless("".join(ours))
    assert "x1b]0;title" in ours[0]
    assert own == "\x1b[31muser's own colours\x1b[0m"
    say(NASTY)
    assert harmless(capsys.readouterr().out)


@pytest.mark.parametrize("command", [["check"], ["explain"], ["explain", "--json"], ["check", "--json"]])
@pytest.mark.parametrize("content", [{f"{NASTY}": 1}, {"optimizer": {"type": NASTY}}, {"wandb": {"project": NASTY}}])
def test_configurations(tmp_path: Path, command: list[str], content: dict[str, object]) -> None:
    path = tmp_path / f"{NASTY.replace('/', '')}.json"
    path.write_text(json.dumps({"train_batch_size": 1, **content}))
    result = CliRunner().invoke(app, ["config", *command, str(path)])
    assert result.exit_code in (0, 1)
    assert command == ["check", "--json"] or "1b]0;title" in result.output
    assert harmless(result.output)


def _tensors(path: Path) -> None:
    header = json.dumps({"a": {"dtype": NASTY, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


@pytest.mark.parametrize("name", ["model.safetensors", "mp_rank_00_model_states.pt", ".metadata"])
def test_tracebacks(tmp_path: Path, name: str) -> None:
    """Other libraries quote what they find in a file, and theirs is the cause of our error."""
    if name == "model.safetensors":
        _tensors(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(f"\x80\x02c{NASTY.replace(chr(13), '')}\nbar\n.".encode("latin-1", "replace"))
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert harmless("".join(traceback.format_exception(caught.value)))
