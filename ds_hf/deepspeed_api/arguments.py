"""The command-line arguments that a script using ``initialize(args=...)`` takes."""

from __future__ import annotations

import argparse

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` (and their oldest spellings) to ``parser``; returns it."""
    group = parser.add_argument_group("DeepSpeed", "the configuration that initialize(args=...) reads")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with the DeepSpeed engine")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="FILE", help="DeepSpeed JSON file")
    for old in ("--deepscale", "--deepscale_config"):
        options = {"action": "store_true"} if old == "--deepscale" else {"type": str}
        group.add_argument(old, default=None, help=argparse.SUPPRESS, **options)
    return parser
