"""Process groups, meshes, collectives and streams: all that the engine knows of other ranks and of the device.

How it works is in docs/design/comm.md.
"""
