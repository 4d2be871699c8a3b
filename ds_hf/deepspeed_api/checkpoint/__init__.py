"""``deepspeed.checkpoint``: names of its files and keys, its descriptions of a checkpoint's mesh, universal folders."""
