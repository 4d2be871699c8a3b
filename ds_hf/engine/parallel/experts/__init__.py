"""Experts divided over processes: which modules they are, the cut of their first dimension, how tokens travel."""
