"""Layouts value by value: pictures drawn by hand, and checksums of what DeepSpeed 0.19.3 makes of the arguments."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch

from ds_hf.engine.modules.sparse import layouts
from ds_hf.engine.modules.sparse.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

# Pattern, arguments beside num_heads=4, tokens; sum and CRC-32 of the layout as bytes, after random.seed(11), as
# deepspeed.ops.sparse_attention of DeepSpeed 0.19.3 gives them.
DEEPSPEED: list[tuple[str, dict[str, Any], int, int, int]] = [
    ("Dense", {}, 128, 256, 0x613287C6),
    ("Fixed", {}, 256, 448, 0x94B0DA5D),
    ("Fixed", {}, 208, 352, 0xB2134396),
    ("Fixed", {"attention": "unidirectional"}, 208, 184, 0x2CA541D3),
    ("Fixed", {"horizontal_global_attention": True}, 208, 460, 0x74854414),
    ("Fixed", {"different_layout_per_head": True, "num_different_global_patterns": 4}, 256, 448, 0x9A90F4F4),
    (
        "Fixed",
        {
            "different_layout_per_head": True,
            "num_local_blocks": 6,
            "num_global_blocks": 2,
            "num_different_global_patterns": 3,
            "attention": "unidirectional",
        },
        512,
        1016,
        0x588E6FAC,
    ),
    ("Fixed", {"num_local_blocks": 8, "num_global_blocks": 4, "block": 8}, 56, 196, 0x841464B2),
    ("Variable", {}, 208, 232, 0x01469F63),
    (
        "Variable",
        {"num_random_blocks": 2, "local_window_blocks": [1, 3, 2], "global_block_indices": [2, 40]},
        256,
        292,
        0xFFA977C7,
    ),
    (
        "Variable",
        {
            "different_layout_per_head": True,
            "num_random_blocks": 1,
            "global_block_indices": [1, 7],
            "global_block_end_indices": [3, 30],
            "horizontal_global_attention": True,
        },
        320,
        1556,
        0x39FA21FB,
    ),
    (
        "Variable",
        {"num_random_blocks": 1, "attention": "unidirectional", "global_block_indices": [0, 5]},
        256,
        284,
        0x92F2786A,
    ),
    ("BigBird", {}, 256, 336, 0x562CA153),
    (
        "BigBird",
        {
            "different_layout_per_head": True,
            "num_random_blocks": 3,
            "num_sliding_window_blocks": 5,
            "num_global_blocks": 2,
        },
        256,
        597,
        0xC5013F2D,
    ),
    ("BigBird", {"attention": "unidirectional"}, 256, 228, 0xB31F02B1),
    ("BigBird", {"num_sliding_window_blocks": 2, "block": 32}, 512, 336, 0x562CA153),
    ("BSLongformer", {}, 256, 296, 0xC4CB9877),
    (
        "BSLongformer",
        {"global_block_indices": [0, 9], "global_block_end_indices": [2, 12], "num_sliding_window_blocks": 5},
        256,
        712,
        0xA33580FC,
    ),
    ("BSLongformer", {"attention": "unidirectional", "different_layout_per_head": True}, 256, 180, 0x403E01F8),
    ("LocalSlidingWindow", {}, 256, 124, 0xB86883DC),
    ("LocalSlidingWindow", {"num_sliding_window_blocks": 5, "attention": "bidirectional"}, 256, 296, 0x6617EB3B),
]


@pytest.mark.parametrize(("name", "arguments", "tokens", "total", "checksum"), DEEPSPEED)
def test_values_are_those_of_deepspeed(
    name: str, arguments: dict[str, Any], tokens: int, total: int, checksum: int
) -> None:
    random.seed(11)
    layout = getattr(layouts, f"{name}SparsityConfig")(num_heads=4, **arguments).make_layout(tokens)
    assert layout.dtype == torch.int64
    assert int(layout.sum()) == total
    assert zlib.crc32(layout.to(torch.uint8).numpy().tobytes()) == checksum


def picture(layout: torch.Tensor) -> list[str]:
    return ["".join(".#"[cell] for cell in row) for row in layout.tolist()]


def test_fixed_drawn() -> None:
    config = FixedSparsityConfig(2, block=4, num_local_blocks=3, attention="unidirectional")
    assert picture(config.make_layout(32)[1]) == [
        "#.......",
        "##......",
        "###.....",
        "..##....",
        "..###...",
        "..####..",
        "..#..##.",
        "..#..###",
    ]


def test_fixed_drawn_for_each_head() -> None:
    config = FixedSparsityConfig(
        3, block=4, different_layout_per_head=True, num_local_blocks=2, num_different_global_patterns=2
    )
    layout = config.make_layout(24)
    assert picture(layout[0]) == ["##.#.#", "##.#.#", ".###.#", ".###.#", ".#.###", ".#.###"]
    assert picture(layout[1]) == ["###.#.", "###.#.", "#.###.", "#.###.", "#.#.##", "#.#.##"]
    assert torch.equal(layout[2], layout[0])


def test_variable_drawn() -> None:
    config = VariableSparsityConfig(
        1, block=4, local_window_blocks=[1, 3], global_block_indices=[4], horizontal_global_attention=True
    )
    assert picture(config.make_layout(24)[0]) == ["#...#.", ".####.", ".####.", ".####.", "######", "....##"]


def test_longformer_and_window_drawn() -> None:
    config = BSLongformerSparsityConfig(1, block=4, global_block_indices=[0], attention="unidirectional")
    assert picture(config.make_layout(20)[0]) == ["#....", "##...", "###..", "#.##.", "#..##"]
    window = LocalSlidingWindowSparsityConfig(1, block=4)
    assert picture(window.make_layout(20)[0]) == ["#....", "##...", ".##..", "..##.", "...##"]


def test_bigbird_takes_what_there_is_before_the_diagonal() -> None:
    """DeepSpeed asks for two different blocks of one here, and fails."""
    layout = BigBirdSparsityConfig(2, block=4, num_random_blocks=2, attention="unidirectional").make_layout(32)
    assert torch.equal(layout, layout.tril())
    assert layout[0, 1].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_patterns_of_users() -> None:
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len: int) -> torch.Tensor:
            layout = self.setup_layout(seq_len)
            layout[0] = torch.eye(layout.shape[1], dtype=layout.dtype)
            return self.check_and_propagate_first_head_layout(layout)

    assert Diagonal(num_heads=2, block=8).make_layout(24).tolist() == [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]] * 2


@pytest.mark.parametrize(
    ("name", "arguments", "tokens", "words"),
    [
        ("Dense", {}, 100, "multiple of the block of 16"),
        ("Dense", {"block": 0}, 16, "block has to be"),
        ("Fixed", {"num_local_blocks": 4, "num_global_blocks": 3}, 64, "multiple of num_global_blocks"),
        ("Fixed", {"num_different_global_patterns": 2}, 64, "needs different_layout_per_head"),
        (
            "Fixed",
            {"num_different_global_patterns": 5, "different_layout_per_head": True},
            64,
            "have 4 different patterns",
        ),
        ("Fixed", {"attention": "sideways"}, 64, "unidirectional"),
        ("Fixed", {"attention": "unidirectional", "horizontal_global_attention": True}, 64, "looks ahead"),
        ("Variable", {"global_block_indices": [1], "global_block_end_indices": [1]}, 64, "are none"),
        ("Variable", {"global_block_indices": [1, 2], "global_block_end_indices": [3]}, 64, "2 elements"),
        ("Variable", {"local_window_blocks": []}, 64, "local_window_blocks"),
        ("BigBird", {"num_sliding_window_blocks": 5}, 64, "needs at least 80 tokens"),
        ("BSLongformer", {"attention": "x"}, 64, "unidirectional"),
    ],
)
def test_wrong_arguments(name: str, arguments: dict[str, Any], tokens: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(layouts, f"{name}SparsityConfig")(num_heads=4, **arguments).make_layout(tokens)
