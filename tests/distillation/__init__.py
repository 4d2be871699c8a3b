"""Tests of ``ds_hf.distillation``."""
