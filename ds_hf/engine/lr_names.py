"""The keys and values of schedules under DeepSpeed's constant names, which scripts import instead of writing them."""

from __future__ import annotations

__all__ = [
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_MOMENTUM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "LR_RANGE_TEST",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "LR_SCHEDULE",
    "ONE_CYCLE",
    "TOTAL_NUM_STEPS",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE",
    "WARMUP_LR",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
]

LR_SCHEDULE = "lr_schedule"

LR_RANGE_TEST = "LRRangeTest"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"

ONE_CYCLE = "OneCycle"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_MAX_MOM = "cycle_max_mom"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_MOM_RATE = "decay_mom_rate"
DECAY_STEP_SIZE = "decay_step_size"

WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MIN_RATIO = "warmup_min_ratio"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LINEAR_RATE = "linear"
WARMUP_LOG_RATE = "log"
