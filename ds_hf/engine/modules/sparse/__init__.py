"""Block-sparse attention: patterns of blocks, attention over them, and models of transformers that use it."""
