"""What offload is made of, below model states: host memory, copies beside the computation, a thread for the CPU's
updates, files. What is offloaded is decided above: ``zero/storage.py`` for parameters, ``optim/store.py`` for states.

How it works is in docs/design/offload.md.
"""
