"""What `checkpoint convert` is asked for beside a format: few bits, the pattern 2:4, figures of before and after."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hf.cli.options import wrong_usage

if TYPE_CHECKING:
    import torch

    from ds_hf.checkpoint.few_bits import FewBits
    from ds_hf.checkpoint.source import Source

__all__ = ["Asked", "asked_for", "lines"]

_READER = "pip install 'ds-hf[few-bits]'"


@dataclass
class Asked:
    """What ``convert`` is asked for beside a format: few bits, a pattern, figures of both."""

    bits: int | None
    group_size: int | None
    sparse: bool
    exclude: list[str]
    timed: bool
    text: Path | None
    form: FewBits | None = None
    config: Any = None

    def plan(self, source: Source, model: Path | None) -> None:
        """Look at the model before anything is written."""
        from ds_hf.checkpoint.few_bits import plan
        from ds_hf.hf.few_bits import linear_layers, model_config

        self.config = model_config(source, model)
        found = linear_layers(self.config, self.exclude, packed=self.bits is not None)
        self.form = plan(
            source, found.linear, self.bits,
            group_size=self.group_size, sparse=self.sparse, exclude=self.exclude, known=found.tensors,
        )  # fmt: skip

    def compare(self, source: Source, folder: Path, dtype: torch.dtype | None) -> dict[str, Any]:
        """Sizes, and what was asked for, before and after."""
        from ds_hf.checkpoint.pretrained import AsTheyAre
        from ds_hf.hf.few_bits import cost_of, load_plain, load_written, token_ids

        assert self.form is not None
        weights = list(source.weights())
        sizes = [
            sum(spec.nbytes for weight in weights for spec in form.specs(weight, dtype))
            for form in (AsTheyAre(), self.form)
        ]
        missing = self.bits is not None and importlib.util.find_spec("compressed_tensors") is None
        found: dict[str, Any] = {"layers": self.form.text, "nbytes": sizes, "needs": _READER if missing else None}
        if self.timed or self.text is not None:
            text = None if self.text is None else token_ids(folder, self.text)
            costs = [
                cost_of(load_plain(source, self.config, dtype), text),
                cost_of(load_written(folder, self.config), text),
            ]
            found |= {"milliseconds": [cost.milliseconds for cost in costs]} if self.timed else {}
            found |= {"loss": [cost.loss for cost in costs]} if text is not None else {}
        return found


def asked_for(
    to: str,
    output: Path,
    bits: int | None,
    group_size: int | None,
    sparse: str | None,
    exclude: list[str] | None,
    timed: bool,
    text: Path | None,
) -> Asked | None:
    """What the options ask for, ``None`` if nothing; what does not fit together ends the command."""
    asked = {
        "--bits": bits,
        "--sparse": sparse,
        "--group-size": group_size,
        "--exclude": exclude,
        "--time": timed or None,
        "--text": text,
    }
    given = [name for name, value in asked.items() if value is not None]
    if not given:
        return None
    if to != "hf" or output.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        wrong_usage(f"{given[0]} goes with a folder for from_pretrained: --to hf")
    if bits not in (None, 8, 4):
        wrong_usage(f"--bits {bits}: use 8 or 4, for which transformers and vLLM have layers")
    if sparse not in (None, "2:4"):
        wrong_usage(f"--sparse {sparse}: use 2:4, two of every four values")
    if bits is None and (sparse is None or group_size is not None):
        wrong_usage(f"{given[0]} goes with --bits" + (" or --sparse" if group_size is None else ""))
    for pattern in exclude or ():
        try:
            re.compile(pattern)
        except re.error as error:
            wrong_usage(f"--exclude {pattern}: it is no regular expression: {error}")
    if text is not None and not text.is_file():
        wrong_usage(f"--text {text}: there is no such file")
    if bits is not None and (timed or text is not None) and importlib.util.find_spec("compressed_tensors") is None:
        wrong_usage(f"to load what is written, transformers needs compressed-tensors: {_READER}")
    return Asked(bits, group_size, sparse is not None, list(exclude or ()), timed, text)


def lines(found: dict[str, Any], size: Callable[[int], str]) -> Iterator[str]:
    """What ``compare`` found, as sentences."""
    before, after = found["nbytes"]
    yield found["layers"]
    if found["needs"]:
        yield f"from_pretrained needs compressed-tensors, which is not installed here: {found['needs']}"
    yield f"weights: {size(before)} before, {size(after)} after, {after / before:.2f} of it"
    if "milliseconds" in found:
        before, after = found["milliseconds"]
        yield (
            f"a token in transformers: {before:.2f} ms before, {after:.2f} ms after (it opens packed weights at the "
            "first call and computes without; vLLM computes with them)"
        )
    if "loss" in found:
        before, after = found["loss"]
        yield f"loss of the text: {before:.4f} before, {after:.4f} after, {(after / before - 1) * 100:+.2f} %"
