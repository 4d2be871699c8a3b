"""Configuration: JSON to a validated, completed, frozen ``Config``. The only part of ds_hf that reads raw dicts.

How it works is in docs/design/config.md.
"""

from __future__ import annotations

from ds_hf.config.load import load_config
from ds_hf.config.types.root import Config
from ds_hf.errors import ConfigError

__all__ = ["Config", "ConfigError", "load_config"]
