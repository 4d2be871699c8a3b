"""Puts into the wheel what makes the name ``deepspeed`` importable (docs/design.md, "The deepspeed name").

Owns two generated files: a ``.pth`` that appends ``ds_hf/compat`` to sys.path, and the RECORD of the ``deepspeed``
stand-in. An editable install needs neither: ``dev-mode-dirs`` in pyproject.toml names the folders, and without a RECORD
pip refuses to uninstall ``deepspeed`` instead of deleting sources of the checkout.

Hatchling and not scikit-build-core makes the wheel because the latter leaves out every folder called ``*.dist-info``
and runs code at Python's start-up in editable installs; C++ sources can be built from this hook.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPAT = "ds_hf/compat"
# Files of paths run no code when Python starts; the late name keeps the folder behind everybody else's.
PTH_NAME = "zz_ds_hf.pth"


class DeepSpeedNameHook(BuildHookInterface[Any]):
    """Adds the generated files to a standard wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="ds_hf_build_"))
        compat = Path(self.root) / COMPAT
        (dist_info,) = compat.glob("deepspeed-*.dist-info")
        owned = [*compat.glob("deepspeed/**/*.py"), *(path for path in dist_info.iterdir() if path.name != "RECORD")]
        names = [*sorted(path.relative_to(compat).as_posix() for path in owned), f"{dist_info.name}/RECORD"]
        include = build_data["force_include"]
        include[self._write("RECORD", "".join(f"{name},,\n" for name in names))] = f"{COMPAT}/{dist_info.name}/RECORD"
        include[self._write(PTH_NAME, COMPAT + "\n")] = PTH_NAME

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)
