"""``deepspeed.elasticity.utils``."""


def is_torch_elastic_compatible() -> bool:
    """Whether this torch has an elastic agent: each that ds_hf runs with has."""
    return True


__all__ = ["is_torch_elastic_compatible"]
