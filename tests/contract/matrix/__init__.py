"""Combinations of what users combine, each against one process of plain torch; ``tests/contract/test_matrix.py``."""
