"""Functions and losses computed tile by tile along the sequence, and where models have them."""
