"""Measuring learning rates on a live engine; the arithmetic is in ``ds_hf.lr``."""
