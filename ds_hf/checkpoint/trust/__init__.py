"""Pickled files that may be a stranger's: looked at before they are loaded, and loaded without running code."""
