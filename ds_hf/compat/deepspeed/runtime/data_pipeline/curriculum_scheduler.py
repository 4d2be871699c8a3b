"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``."""

from ds_hf.data.difficulty import CurriculumScheduler

__all__ = ["CurriculumScheduler"]
