"""The hostfile: what it means, and where its mistakes are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.hostfile import MAX_SLOTS, check_host_name, parse_hostfile, read_hostfile
from tests.launcher.common import read_or_refused

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,15}", fullmatch=True)


def test_hosts_slots_comments() -> None:
    text = "\ufeff# all of them\nworker-0 slots=2\n\n  user@10.0.0.7\tslots=1 max_slots=4 # old\r\nfe80::1 slots=1"
    assert parse_hostfile(text) == {"worker-0": (0, 1), "user@10.0.0.7": (0,), "fe80::1": (0,)}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a slots=2\na slots=1", 2, 1, "host a is already in line 1"),
        ("a", 1, 2, "slots=N is missing after a"),
        ("# x\n  a  slot=2", 2, 6, "slots=N is expected here, not 'slot=2'"),
        ("a slots=-1", 1, 3, "slots=N is expected here"),
        ("a slots=٣", 1, 3, "slots=N is expected here"),
        ("a slots=0", 1, 3, "a has no slots"),
        ("a slots=99999999", 1, 3, "more than any host has"),
        ("a slots=1 b", 1, 11, "'b' is not understood here"),
        ("-oProxyCommand=x slots=1", 1, 1, "would be read as an option"),
        ("a;reboot slots=1", 1, 1, "is not a host name"),
        ("$(reboot) slots=1", 1, 1, "is not a host name"),
        ("a,b slots=1", 1, 1, "is not a host name"),
        ("a[1-3] slots=1", 1, 1, "is not a host name"),
        ("a\x00b slots=1", 1, 1, "is not a host name"),
        ("'a b' slots=1", 1, 1, "is not a host name"),
        ("x" * 300 + " slots=1", 1, 1, "too many"),
        ("".join(f"h{host} slots=4096\n" for host in range(300)), 257, 1, "more than 1048576 slots in all"),
    ],
)
def test_mistakes_name_line_and_column(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(LaunchError) as failure:
        parse_hostfile(text, "hosts.txt")
    assert str(failure.value).startswith(f"hosts.txt, line {line}, column {column}: ")
    assert message in str(failure.value)
    assert "fix: " in str(failure.value)


def test_empty() -> None:
    with pytest.raises(LaunchError, match="no host in it"):
        parse_hostfile("# nothing\n\n")


@given(st.dictionaries(NAMES, st.integers(1, MAX_SLOTS), min_size=1, max_size=6), st.sampled_from(["", " # c", "  "]))
def test_what_is_written_is_read(hosts: dict[str, int], tail: str) -> None:
    text = "\n".join(f"{name} slots={count}{tail}" for name, count in hosts.items())
    pool = parse_hostfile(text)
    assert list(pool) == list(hosts)
    assert {name: len(slots) for name, slots in pool.items()} == hosts


@given(
    st.one_of(
        st.text(), st.lists(st.sampled_from(["a", "slots=2", " ", "\n", "#", "\t", "=", "-x", "\r", "@"])).map("".join)
    )
)
def test_any_text_is_read_or_refused(text: str) -> None:
    pool = read_or_refused(parse_hostfile, text)
    if isinstance(pool, LaunchError):
        assert "fix: " in str(pool)
        return
    assert all(check_host_name(name) is None and slots for name, slots in pool.items())


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any_bytes"
    path.write_bytes(raw)
    pool = read_or_refused(read_hostfile, str(path), explicit=True)
    assert str(path) in str(pool) if isinstance(pool, LaunchError) else pool


@given(st.text())
def test_no_name_carries_what_a_shell_or_ssh_reads(name: str) -> None:
    if check_host_name(name) is None:
        assert not set(name) & set(" \t\n'\"\\$`;|&<>()[]{}*?!~#,%=\0")
        assert not name.startswith("-")


def test_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "no\nfile")
    assert read_hostfile(missing, explicit=False) is None
    assert read_hostfile("None", explicit=True) is None
    with pytest.raises(LaunchError, match="No such file"):
        read_hostfile(missing, explicit=True)
    (tmp_path / "latin").write_bytes(b"a slots=1\nb\xe9 slots=1\n")
    with pytest.raises(LaunchError, match="line 2, column 2: this is not UTF-8"):
        read_hostfile(str(tmp_path / "latin"), explicit=True)
