"""Tests of ds_hf.engine.sparse."""
