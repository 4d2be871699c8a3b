"""One model on several processes: shared layers (``tensor``), sequences (``sequence``), stages of layers
(``pipeline``); the data that each process reads, and whether all of them were given the same.

How it works is in docs/design/parallel.md.
"""
