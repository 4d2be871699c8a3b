"""DeepSpeed's checkpoints, those of its ranks and universal ones: read, put together, and written."""
