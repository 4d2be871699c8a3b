"""Checkpoints on disk, of any library: reading, checking and writing their files. It knows no engine.

``formats.open_source`` opens any of them as a ``source.Source``; ``trust`` looks at pickles before they are loaded,
``deepspeed`` reads and writes DeepSpeed's layouts. What a running engine saves and restores is ``engine.checkpoint``.
How it works is in docs/design/checkpoint.md.
"""
