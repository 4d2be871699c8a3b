"""Optimizer kernels: one pass over lists of tensors, on CUDA and on the CPU, each with a reference in torch.

``library.py`` defines the operators, ``reference.py`` says what they compute, ``cuda.py`` and ``cpu.py`` load what
``csrc/`` holds. Nothing is compiled and no library is loaded before an operator's first call.
How it works is in docs/design/ops.md.
"""
