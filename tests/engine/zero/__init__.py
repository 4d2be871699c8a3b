"""Tests of ds_hf.engine.zero."""
