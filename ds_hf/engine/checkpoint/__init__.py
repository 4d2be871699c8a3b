"""What a running engine saves and loads: it calls ``save`` and ``load``; ``consolidate`` makes whole state dicts.

Safetensors and one JSON manifest, indexed by parameter name and flat offset: any world size, stage, offload and dtype
loads any other. The files, of ours and of other libraries, are ``ds_hf.checkpoint``'s.
How it works is in docs/design/checkpoint.md.
"""
