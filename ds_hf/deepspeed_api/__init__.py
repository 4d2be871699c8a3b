"""What DeepSpeed's users call, under DeepSpeed's names, made of the engine below.

Nothing in ``ds_hf.engine`` imports it. The package ``deepspeed`` (``compat/deepspeed``) gives these names to scripts.
How it works is in docs/design/names.md.
"""
