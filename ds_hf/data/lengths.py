"""Curriculum by length: what of a batch is cut, so that models that know nothing of it see shorter sequences.

All tensors with a place for each position are cut to the first ``length`` positions: tokens, labels, masks (one or both
of their dimensions), positions, and any other tensor whose second dimension is as long as the sequences. What cannot be
cut so that it means the same is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hf.errors import DsHfError

__all__ = ["check_batch", "cut_batch", "labels_left", "length_of"]

_TOKENS = ("input_ids", "inputs_embeds")
_LAST = ("position_ids", "cache_position")  # [batch, positions], [axes, batch, positions], [positions]
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "seq_idx", "block_mask")
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values", "image_grid_thw", "video_grid_thw")
_IGNORED = -100


def length_of(batch: Any) -> int | None:
    """Positions of a batch: of its tokens, or of the first tensor ``[batch, positions]`` of integers in it."""
    if isinstance(batch, Mapping):
        named = [batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor)]
        values = named or list(batch.values())
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        named = []
    for value in values:
        if isinstance(value, Tensor) and value.ndim >= 2 and (named or not value.is_floating_point()):
            return value.shape[1]
    return None


def cut_batch(batch: Any, length: int) -> Any:
    """``batch``, a mapping or a sequence, with sequences of at most ``length`` positions; the same object if they are
    not longer."""
    before = length_of(batch)
    if before is None or before <= length:
        return batch
    if isinstance(batch, Mapping):
        cut = {name: _cut(name, value, before, length) for name, value in batch.items()}
        if type(batch) is dict:
            return cut
        copied = batch.copy() if hasattr(batch, "copy") else None  # a BatchEncoding stays one
        if copied is None or not hasattr(copied, "update"):
            return cut
        copied.update(cut)
        return copied
    if isinstance(batch, Tensor):
        return _cut("", batch, before, length)
    kind = type(batch)
    found = [_cut("", value, before, length) for value in batch]
    return kind(*found) if hasattr(batch, "_fields") else kind(found)


def _cut(name: str, value: Any, before: int, length: int) -> Any:
    if isinstance(value, Mapping):  # masks by kind of layer
        return {key: _cut(name, each, before, length) for key, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    if name in _LAST:
        return value[..., :length] if value.ndim and value.shape[-1] == before else value
    if "mask" in name and value.ndim >= 3:
        value = value[..., :length] if value.shape[-1] == before else value
        return value[..., :length, :] if value.shape[-2] == before else value
    return value[:, :length] if value.ndim >= 2 and value.shape[1] == before else value


def check_batch(batch: Any, kwargs_of: str, wait: bool = True) -> list[tuple[Tensor, str]]:
    """Refuse what cannot be cut.

    Args:
        kwargs_of: what the batch is of, for the sentence.
        wait: for values that are on a device.

    Returns:
        what was not waited for: tensors that say whether it cannot be cut, with their sentences.

    Raises:
        DsHfError: the batch has packed documents, images or sound, or is padded on the left.
    """
    if not isinstance(batch, Mapping):
        return []
    for name in _PACKED:
        if batch.get(name) is not None:
            raise DsHfError(
                f"curriculum by length and {name}: the documents of {kwargs_of} are packed, and cutting a row of them "
                "would drop whole documents and leave none shorter. Take DataCollatorForLanguageModeling in place of "
                "a collator that packs (packing=False, padding_free=False), or remove the curriculum"
            )
    for name in _MEDIA:
        if batch.get(name) is not None:
            raise DsHfError(
                f"curriculum by length and {name}: cutting {kwargs_of} would leave images or sound without their "
                "places among the tokens. Remove the curriculum"
            )
    later = []
    for doubt, sentence in _doubts(batch, kwargs_of):
        if not wait and doubt.device.type != "cpu":
            later.append((doubt, sentence))
        elif bool(doubt):
            raise DsHfError(sentence)
    return later


def _doubts(batch: Mapping[str, Any], kwargs_of: str) -> Iterator[tuple[Tensor, str]]:
    places, mask = batch.get("position_ids"), batch.get("attention_mask")
    if isinstance(places, Tensor) and places.ndim >= 2:
        again = places[..., 1:] < places[..., :-1]
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == places.shape[-1]:
            again = again & mask[:, 1:].bool() & mask[:, :-1].bool()  # positions of padding may begin again
        elif isinstance(mask, Tensor):
            again = again.any() & mask.bool().all()
        yield (
            again.any(),
            f"curriculum by length and position_ids that begin again inside a row: the documents of {kwargs_of} "
            "are packed, and cutting a row of them would drop whole documents and leave none shorter. Give each "
            "document a row of its own (packing=False, padding_free=False), or remove the curriculum",
        )
    if isinstance(mask, Tensor) and mask.ndim == 2:
        yield (
            (mask[:, 0] == 0).any(),
            f"curriculum by length and padding on the left: the first positions of {kwargs_of} are padding, and those "
            'are what is kept. Set tokenizer.padding_side = "right"',
        )


def labels_left(batch: Any) -> Tensor | None:
    """Whether a label is left, as a tensor that nothing waits for; ``None`` for a batch without labels of tokens."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return None
    return torch.any(labels[:, 1:] != _IGNORED)
