"""Weights that rest as blocks of 8 or 4 bits and are read as 16 bits (ZeRO-Inference, frozen bases)."""
