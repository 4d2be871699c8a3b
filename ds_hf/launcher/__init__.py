"""Starting training on one machine or many: which slots, which environment, and how the processes get there.

Resource selection and remote start are here; the processes of a machine run under torch's elastic agent.
How it works is in docs/design/names.md.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What ``deepspeed.launcher`` has besides, for ``import ds_hf as deepspeed``."""
    from ds_hf.stand_in import name_of_deepspeed

    return name_of_deepspeed(__name__, name)
