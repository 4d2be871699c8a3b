"""Packages that stand in for others, reached through a path entry; as ds_hf.compat only where another has the name.

How it works is in docs/design/names.md.
"""
