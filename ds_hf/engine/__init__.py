"""Everything that trains: the engine, its ZeRO units, optimizers, schedules, data and checkpoints.

How it works is in docs/design/engine.md.
"""
