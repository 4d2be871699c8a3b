"""The command line ``ds-hf``, a module for each command; ``deepspeed`` and ``ds_report`` are two of them.

Commands stay thin: they call the library and render what it returns, with colours and tables on a terminal, aligned
plain text elsewhere, and JSON on demand. Nothing here imports torch before a command runs that needs it, so that all
start at once. How it works is in docs/design/tools.md.
"""

from __future__ import annotations

import sys

from ds_hf.printable import speak_any_language
from ds_hf.processes import signals_interrupt
from ds_hf.stand_in import beside_real

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``ds-hf`` script."""
    from ds_hf.cli.root import app  # every command; who starts only one of them imports that

    speak_any_language()
    if (told := beside_real()) and "doctor" not in sys.argv[1:2]:  # which tells it among its facts
        sys.stderr.write(f"ds_hf: {told}\n")
    with signals_interrupt():
        app(prog_name="ds-hf")
