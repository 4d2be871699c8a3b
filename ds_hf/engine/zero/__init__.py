"""ZeRO over flat units: layout -> buffer -> unit -> planning, reduction -> hooks; then init, gather, access.

How it works is in docs/design/zero.md.
"""
