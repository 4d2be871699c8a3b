"""DeepSpeed's layer of experts: its gates, the layer, and its parameter groups."""
