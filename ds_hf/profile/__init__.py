"""Reads what a run recorded of itself (``ds_hf.report``) and says what limits it.

``load`` reads the ranks' files, ``analysis`` adds up and compares ranks, ``verdict`` puts it into words with the change
that would help, ``page`` and ``trace`` show it, ``command`` is ``ds-hf profile``.
How it works is in docs/design/tools.md.
"""
