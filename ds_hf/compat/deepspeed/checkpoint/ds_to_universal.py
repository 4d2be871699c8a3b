"""``python -m deepspeed.checkpoint.ds_to_universal``: a checkpoint as a universal one."""

from __future__ import annotations

import sys

from ds_hf.deepspeed_api.checkpoint.ds_to_universal import (
    atoi,
    command,
    dp_index_to_str,
    dump_param_fragment,
    extract_zero_shards,
    extract_zero_shards_stage3,
    main,
    merge_tp_slices,
    merge_zero3_slices,
    natural_keys,
    parse_arguments,
)

from .._missing import missing

__all__ = [
    "atoi",
    "dp_index_to_str",
    "dump_param_fragment",
    "extract_zero_shards",
    "extract_zero_shards_stage3",
    "main",
    "merge_tp_slices",
    "merge_zero3_slices",
    "natural_keys",
    "parse_arguments",
]
__getattr__ = missing(__name__)

if __name__ == "__main__":
    sys.exit(command())
