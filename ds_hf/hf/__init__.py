"""What ds_hf adds to transformers and accelerate: hooks that check ``--deepspeed`` early, CPU processes, ``auto``."""
