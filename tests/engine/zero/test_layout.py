"""Flat layouts: places, gaps, shards, and parameters as views."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.zero.layout import ALIGNMENT, FlatLayout

SHAPES = [torch.Size(shape) for shape in ((3, 5), (), (0, 4), (7,), (2, 3, 4))]


@pytest.mark.parametrize("world_size", [1, 3])
def test_places_do_not_overlap_and_gaps_fill_the_rest(world_size: int) -> None:
    layout = FlatLayout(SHAPES, world_size)
    covered = torch.zeros(layout.numel, dtype=torch.int32)
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        covered[slot.offset : slot.end] += 1
    for start, end in layout.gaps:
        covered[start:end] += 1
    assert torch.equal(covered, torch.ones_like(covered))
    assert layout.numel == world_size * layout.shard_numel


@pytest.mark.parametrize("shift", [0, 11])  # the flat tensor may itself be a part of another
def test_views_are_the_parameters(shift: int) -> None:
    layout = FlatLayout(SHAPES, 2)
    whole = torch.arange(float(shift + layout.numel))
    full = whole[shift:]
    for slot in layout.slots:
        view = slot.of(full)
        assert view.shape == slot.shape
        assert torch.equal(view, full[slot.offset : slot.end].view(slot.shape))
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_fragments_of_all_ranks_are_the_parameters() -> None:
    layout = FlatLayout(SHAPES, 3)
    found = [0] * len(SHAPES)
    for rank in range(3):
        low, _ = layout.shard_range(rank)
        for fragment in layout.fragments(rank):
            assert low + fragment.shard_start == fragment.slot.offset + fragment.start
            found[fragment.slot.index] += fragment.numel
    assert found == [shape.numel() for shape in SHAPES]
