// What ops.cpp and the kernels of each instruction set have in common.
//
// A chunk is a run of elements of one entry of the lists. Kernels see one chunk at a time and know nothing of lists,
// threads or bias corrections: ops.cpp has worked those out into the scalars.
#pragma once

#include <stdint.h>

#include "parallel.hpp"

struct ds_hf_blocks;

namespace ds_hf {

struct Span {
    char *data; // of the chunk's first element
    int32_t type;
};

struct Chunk {
    Span param, grad, first, second, out;
    int64_t numel;
    float scale;    // of the gradient
    bool write;     // otherwise nothing is stored
    bool streaming; // outs go past the caches
    bool stochastic;
    uint32_t keys[2];  // of the hash
    uint32_t position; // of the first element in the entry, lower bits
    double sums[2];    // results of those kernels that have any
};

struct AdamScalars {
    float beta1, rest1, beta2, rest2, eps, shrink, l2, rate, inverse_c2;
};

struct LionScalars {
    float beta1, rest1, beta2, rest2, shrink, rate;
};

struct AdagradScalars {
    float eps, l2, rate;
};

struct SgdScalars {
    float momentum, rest, l2, rate;
    bool moving, nesterov, first;
};

struct LambScalars {
    float beta1, rest1, beta2, rest2, eps, decay, rate;
    bool eps_inside;
};

struct OneBitScalars {
    float beta1, rest1, eps, shrink, rate, floor;
    bool eps_inside;
};

// Those of the block formats: blocks are numbered through all rows of values.
struct BlockKernels {
    void (*to_blocks)(const ds_hf_blocks &, Range);
    void (*from_blocks)(const ds_hf_blocks &, Range);
};

extern const BlockKernels block_kernels_baseline;
extern const BlockKernels block_kernels_avx2;
extern const BlockKernels block_kernels_avx512;

// The kernels of one instruction set.
struct Kernels {
    const char *isa;
    void (*adam)(const AdamScalars &, Chunk &);
    void (*lion)(const LionScalars &, Chunk &);
    void (*adagrad)(const AdagradScalars &, Chunk &);
    void (*sgd)(const SgdScalars &, Chunk &);
    void (*lamb_moments)(const LambScalars &, Chunk &); // sums: squares of the params, of the updates
    void (*lamb_apply)(const LambScalars &, Chunk &);
    void (*squared_norm)(Chunk &); // sums[0]: squares of the grads
    void (*onebit_values)(const OneBitScalars &, Chunk &);
    void (*onebit_apply)(const OneBitScalars &, Chunk &);
    const BlockKernels *blocks;
};

const Kernels &kernels(); // those in use

extern const Kernels kernels_baseline;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

} // namespace ds_hf
