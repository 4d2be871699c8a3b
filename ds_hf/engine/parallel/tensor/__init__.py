"""Tensor parallelism: layers cut over the tensor axis of the mesh, by rules that are read."""
