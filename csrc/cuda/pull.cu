// A copy out of page-locked host memory by a few blocks. The engine that copies upwards takes one stream's queue after
// the other, so that what it is given late waits behind all states on their way; a kernel reads beside them.
#include "core.cuh"

// `to` and `from` are multiples of 16. A thread has GROUPS vectors under way at once.
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) pull(void* to, const void* from, u64 nbytes) {
  constexpr u64 CHUNK = (u64)THREADS * GROUPS;
  const u64 vectors = nbytes / sizeof(uint4);
  for (u64 first = blockIdx.x * CHUNK; first < vectors; first += gridDim.x * CHUNK) {
    uint4 held[GROUPS];
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
      const u64 at = first + group * THREADS + threadIdx.x;
      if (at < vectors) held[group] = fetch<uint4, true>((const uint4*)from + at);
    }
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
      const u64 at = first + group * THREADS + threadIdx.x;
      if (at < vectors) put<uint4, false>((uint4*)to + at, held[group]);
    }
  }
  const u64 at = vectors * sizeof(uint4) + threadIdx.x;
  if (blockIdx.x == 0 && at < nbytes) ((unsigned char*)to)[at] = ((const unsigned char*)from)[at];
}
