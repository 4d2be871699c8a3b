"""``universal_checkpoint_info`` of a model whose layers are cut: how DeepSpeed's converter joins the slices of its
parameters. Its keys are those that AutoTP sets on the model and writes into checkpoints.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ds_hf.deepspeed_api.checkpoint import constants as keys
from ds_hf.engine.parallel.tensor.styles import place_of
from ds_hf.engine.zero.cut import Cut, cut_of

__all__ = ["collect_autotp_universal_checkpoint_info"]


def collect_autotp_universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Patterns of parameters by how they are cut: along inputs ("row"), over the vocabulary, several matrices in one,
    or not at all. Tied parameters count under their first name.
    """
    places = (place_of(module) for module in model.modules())
    size = next((place.axis.world_size for place in places if place is not None), 1)
    rows, vocabulary, whole, packed, widths = [], [], [], [], {}
    original = None
    for name, param in model.named_parameters():
        cut, pattern = cut_of(param), f"^{re.escape(name)}$"
        if cut is None:
            whole.append(pattern)
        elif len(cut.ranges) > 1:
            shape, each = _packed(cut, size)
            packed.append({"patterns": [pattern], "shape": shape, "partition_dim": cut.dim})
            widths[pattern] = each
        elif len(cut.whole) == 2 and cut.dim == 1:
            rows.append(pattern)
        elif len(cut.whole) == 2 and ("embed" in name or "lm_head" in name):
            vocabulary.append(pattern)
            original = original or cut.whole[0]
    found: dict[str, Any] = {
        keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: keys.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: sorted(rows),
        keys.TP_REPLICATED_PARAMETER_PATTERNS: sorted(whole),
        keys.VOCABULARY_PARAMETER_PATTERNS: sorted(vocabulary),
        keys.PARAMETER_WITH_SUB_PARAMS: packed,
        keys.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS: {},
    }
    more = {keys.SUB_PARAM_SHARD_WIDTHS: widths, keys.ORIGINAL_VOCAB_SIZE: original}
    return found | {key: value for key, value in more.items() if value}


def _packed(cut: Cut, size: int) -> tuple[list[Any], list[list[int]]]:
    """The shape with the sizes of the matrices along the dimension that is cut, and their widths on each process."""
    each = [[count] * size for _, count in cut.ranges]
    shape: list[Any] = list(cut.whole)
    shape[cut.dim] = tuple(map(sum, each))
    return shape, each
