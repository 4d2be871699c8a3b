"""``deepspeed.runtime.zero.leaf_module_config``: what ``zero_optimization.leaf_module`` names by default."""

from ds_hf.config.types.zero import LeafModuleSection

__all__ = ["DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"]

_DEFAULT = LeafModuleSection()
DEFAULT_LEAF_MODULE_CLASSES = list(_DEFAULT.classes)
DEFAULT_LEAF_MODULE_NAMES = list(_DEFAULT.names)
DEFAULT_LEAF_MODULE_NAME_SUFFIXES = list(_DEFAULT.name_suffixes)
