"""What offload is made of, below model states: host memory, copies beside the computation, a thread for the CPU's
updates, files. Who offloads what is decided above: ``zero/rest.py`` for parameters, ``optim/store.py`` for states."""
