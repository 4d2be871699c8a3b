"""Packages that stand in for others, reached through a path entry and never imported as ds_hf.compat.

How it works is in docs/design/names.md.
"""
