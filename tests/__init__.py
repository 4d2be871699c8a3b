"""Tests of ds_hf; the folders mirror the sources, ``helpers`` is shared."""
