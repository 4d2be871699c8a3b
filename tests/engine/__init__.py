"""Tests of ds_hf.engine, laid out as its sources."""
