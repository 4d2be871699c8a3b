"""What the autotuner and the engine say to each other, and how both turn step times into a figure. Imports neither."""
