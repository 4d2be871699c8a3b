"""Experts divided over processes: which modules they are, the cut along their first dimension, and how tokens travel."""
