"""What the autotuner and the engine say to each other, and how both turn step times into a figure. Imports neither.

How it works is in docs/design/tools.md.
"""
