"""What ``compression.py`` has llm-compressor do, in an environment of its own, where neither it nor torch knows ds_hf.

PYTHON compression_peer.py MODEL OUT BITS SIZE METHOD: round the folder MODEL to weights of BITS bits in groups of SIZE,
by ``rtn`` (to the nearest, without data) or ``gptq``, for which ``calibration.pt`` lies in MODEL: token ids,
``[samples, length]``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate


def main(source: Path, target: Path, bits: int, size: int, method: str) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    scheme = {"targets": ["Linear"], "weights": weights}
    kind: Any = GPTQModifier if method == "gptq" else QuantizationModifier
    recipe = kind(config_groups={"all": scheme}, ignore=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(source)
    data = None
    if method == "gptq":
        ids = torch.load(source / "calibration.pt", weights_only=True)
        samples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        data = DataLoader(samples, batch_size=8, collate_fn=default_collate)
    unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # it wants one, though the data are ids
    oneshot(model=model, recipe=[recipe], dataset=data, processor=unused)
    model.save_pretrained(target, save_compressed=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
