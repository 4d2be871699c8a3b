"""Which data a step gets: difficulties over steps, what is cut from batches. Numbers and tensors; no engine.

Chapter: docs/design/modules.md (Data).
"""
