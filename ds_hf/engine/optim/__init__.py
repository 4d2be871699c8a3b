"""Optimizers by name, their unit-by-unit update, and fp16 loss scaling.

How it works is in docs/design/optim.md.
"""
