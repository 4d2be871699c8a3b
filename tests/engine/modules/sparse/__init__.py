"""Tests of ds_hf.engine.modules.sparse."""
