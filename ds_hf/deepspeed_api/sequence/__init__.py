"""Sequence parallelism under DeepSpeed's names, and in the models of transformers."""
