"""What changes how a model's modules compute: compiled, tiled, sparse or in few bits, with activations elsewhere, for
generation. All of it is undone when the engine is destroyed.

How it works is in docs/design/modules.md.
"""
