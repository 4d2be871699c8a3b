"""ZeRO over flat units: layout -> buffer -> unit -> planning, reduction -> hooks; then init, gather, access."""
