"""For fuzzing: what a parser returns, or the error that it refuses with; anything else it raises is a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ds_hf.launcher.errors import LaunchError

T = TypeVar("T")


def read_or_refused(parse: Callable[..., T], *arguments: object, **options: object) -> T | LaunchError:
    try:
        return parse(*arguments, **options)
    except LaunchError as error:
        return error
