"""Pipelines: the layers of a model divided over stages, each of which computes its part of every micro-batch.

topology -> grid -> partition, specs -> module (what a stage holds) -> schedule, messages -> executor (one batch).
"""
