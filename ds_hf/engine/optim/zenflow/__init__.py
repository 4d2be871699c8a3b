"""ZenFlow (arXiv:2505.12242): a few columns of each matrix are updated by the device in each step, the rest by the host
every few steps, with the mean of its gradients. See docs/design/offload.md.
"""
