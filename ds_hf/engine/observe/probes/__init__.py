"""What measures an engine from inside a user's script, and puts it back as it was: learning rates, trials."""
