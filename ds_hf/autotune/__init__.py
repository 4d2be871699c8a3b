"""Searching settings by launching the user's script: nothing here imports the engine."""
