/* The C interface of the block formats: what ds_hf/engine/ops/cpu_blocks.py mirrors with ctypes.
 *
 * What the functions compute is written down in ds_hf/engine/ops/reference_blocks.py. It has an ABI number of its own:
 * a library from before it serves the optimizers all the same.
 */
#ifndef DS_HF_BLOCKS_H
#define DS_HF_BLOCKS_H

#include "ds_hf_cpu.h"

#define DS_HF_BLOCKS_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of values and rows of blocks, each one after another. Types are those of ds_hf_cpu.h. */
struct ds_hf_blocks {
    int64_t nbytes;     /* sizeof(struct ds_hf_blocks), as the caller sees it */
    int64_t rows;       /* of values */
    int64_t numel;      /* of a row */
    int64_t row_nbytes; /* of a row of blocks: numbers, padded to 4 bytes, then scales */
    int64_t summed;     /* from_blocks: rows of blocks that are added up into one of values */
    void *values;       /* to_blocks: read; from_blocks: written */
    void *other;        /* to_blocks: feedback, read and written; from_blocks: what is added, read; or null */
    void *blocks;
    float factor;       /* from_blocks */
    float gain, beta;   /* to_blocks */
    int32_t bits, block; /* 8, 4 or 1; elements of a block, a multiple of 64, at most 4096 */
    int32_t value_type, other_type;
    int32_t threads;
};

DS_HF_EXPORT int32_t ds_hf_cpu_blocks_abi(void);
DS_HF_EXPORT int32_t ds_hf_cpu_to_blocks(const struct ds_hf_blocks *args);
DS_HF_EXPORT int32_t ds_hf_cpu_from_blocks(const struct ds_hf_blocks *args);

#ifdef __cplusplus
}
#endif

#endif
