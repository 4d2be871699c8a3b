"""--include, --exclude, --num_nodes, --num_gpus against DeepSpeed's meaning of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hf.launcher.errors import LaunchError
from ds_hf.launcher.filters import first_nodes_and_slots, parse_filter, select
from tests.launcher.common import read_or_refused

POOL = {"w0": (0, 1, 2, 3), "w1": (0, 1, 2, 3), "w2": (0, 1)}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("w1", "", {"w1": (0, 1, 2, 3)}),
        ("w1:2,0@w0", "", {"w0": (0, 1, 2, 3), "w1": (0, 2)}),  # the hostfile's order, ascending slots
        ("w0:1@w0:3,1", "", {"w0": (1, 3)}),
        ("", "w1", {"w0": (0, 1, 2, 3), "w2": (0, 1)}),
        ("", "w0:0,2@w2:0@w2:1", {"w0": (1, 3), "w1": (0, 1, 2, 3)}),
    ],
)
def test_selection(include: str, exclude: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert select(POOL, include, exclude) == expected
    assert list(select(POOL, include, exclude)) == list(expected)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("w0@w9", 4, "there is no host 'w9'"),
        ("w0:0,7", 6, "host w0 has no slot 7"),
        ("w0:0@w1:x", 9, "a slot number is expected here, not 'x'"),
        ("w0:", 4, "a slot number is expected here, not ''"),
        ("w0@@w1", 4, "a host name is missing"),
        ("w0:0,-1", 6, "a slot number is expected here, not '-1'"),
        ("w0:1:2", 4, "a slot number is expected here, not '1:2'"),
    ],
)
def test_mistakes_name_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(LaunchError) as failure:
        select(POOL, exclude=text)
    assert str(failure.value).startswith(f"--exclude, line 1, column {column}: {message}")


def test_contradictions() -> None:
    with pytest.raises(LaunchError, match="both given"):
        select(POOL, "w0", "w1")
    with pytest.raises(LaunchError, match="no slots are left"):
        select(POOL, exclude="w0@w1@w2")


@given(st.one_of(st.text(), st.lists(st.sampled_from(["w0", "w1", ":", ",", "@", "0", "1", "9", " "])).map("".join)))
def test_any_text_selects_of_the_pool_or_is_refused(text: str) -> None:
    named = read_or_refused(parse_filter, text, POOL)
    if isinstance(named, LaunchError):
        assert "column" in str(named)
        return
    assert named
    assert all(slots <= set(POOL[host]) for host, slots in named.items())
    assert {host: set(slots) for host, slots in select(POOL, include=text).items()} == named


@given(st.data())
def test_include_and_exclude_are_complements(data: st.DataObject) -> None:
    parts = {host: data.draw(st.sets(st.sampled_from(slots))) for host, slots in POOL.items()}
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in parts.items() if slots)
    left = {host: set(slots) - parts[host] for host, slots in POOL.items()}
    if text and any(left.values()):
        assert {host: set(slots) for host, slots in select(POOL, exclude=text).items()} == {
            h: s for h, s in left.items() if s
        }


def test_first_nodes_and_slots() -> None:
    assert first_nodes_and_slots(POOL, 2, 1) == {"w0": (0,), "w1": (0,)}
    assert first_nodes_and_slots(POOL) == POOL
    with pytest.raises(LaunchError, match="--num_gpus is 3, and host w2 has 2 slots"):
        first_nodes_and_slots(POOL, num_gpus=3)
    with pytest.raises(LaunchError, match="--num_nodes is 4, and there are 3: w0, w1, w2"):
        first_nodes_and_slots(POOL, 4)
    for wrong in (0, -2):
        with pytest.raises(LaunchError, match=f"--num_gpus is {wrong}"):
            first_nodes_and_slots(POOL, num_gpus=wrong)
