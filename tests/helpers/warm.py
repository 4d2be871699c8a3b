"""What a process makes once, made where ranks are forked from: each of them has it already.

Nothing here starts a thread or computes with torch, as what is forked afterwards has no threads.
"""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.config import load_config
from ds_hf.engine.ops import cpu

load_config({"train_batch_size": 1}, world_size=1)
standalone_script()
get_checkpoint_conversion_mapping("llama")  # compiles thousands of expressions
cpu.available()  # opens the library
