"""Everything that trains: the engine, its ZeRO units, optimizers, schedules, data and checkpoints."""
