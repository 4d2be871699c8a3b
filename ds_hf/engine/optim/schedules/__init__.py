"""Learning-rate schedules: the five of a DeepSpeed file, value for value, and those of torch by name."""
