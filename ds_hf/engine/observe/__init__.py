"""What listens to an engine's events, and what runs steps of it to find something out. Nothing below imports it.

How it works is in docs/design/observe.md.
"""
