"""ZeRO over flat units: layout -> buffer -> unit -> grouping, reduction -> hooks; then init, gather, access."""
