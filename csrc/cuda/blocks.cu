// Values as numbers of 8, 4 or 1 bit with an fp32 scale a block: see ds_hf/engine/ops/reference_blocks.py.
//
// DS_BITS, DS_BLOCK: the format. DS_VALUE, DS_OTHER: dtypes of the values and of feedback, or of what is added. A warp
// makes a block, reading it twice: the second time it lies in the first cache, as a block is 16 KB at most.
// Multiplications are not contracted with additions, so that numbers are those of the reference to the bit.
#include "eight.cuh"

using Value = Numbered<DS_VALUE>::type;
using Other = Numbered<DS_OTHER>::type;
using u8 = unsigned char;

constexpr int BITS = DS_BITS, BLOCK = DS_BLOCK;
constexpr u32 WARP = 32 * EACH;  // elements of a warp
constexpr float LIMIT = BITS == 8 ? 127 : 7, LEAST = 1e-30f, ROUNDING = 12582912;  // 1.5 * 2^23

struct Blocks {
  void *values, *other;
  u8* blocks;
  i64 rows, numel, row_nbytes, summed;
  float factor, gain, beta, unused;
};

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
#else
inline float times(float a, float b) { return a * b; }
inline float over(float a, float b) { return a / b; }
inline float root(float a) { return sqrtf(a); }
#endif

// Their numbers: BITS bytes, the pointer aligned to 4 where these are as many or more.
__device__ __forceinline__ void put_numbers(u8* to, u64 packed, i64 valid) {
  if (valid >= (i64)EACH && BITS >= 4) {
    *(u32*)to = (u32)packed;
    if constexpr (BITS == 8) *((u32*)to + 1) = (u32)(packed >> 32);
    return;
  }
#pragma unroll
  for (int i = 0; i < BITS; ++i) {
    if ((i64)i * 8 < valid * BITS) to[i] = (u8)(packed >> (8 * i));
  }
}

__device__ __forceinline__ u64 get_numbers(const u8* from, i64 valid) {
  if (valid >= (i64)EACH && BITS >= 4) {
    u64 packed = *(const u32*)from;
    if constexpr (BITS == 8) packed |= (u64) * ((const u32*)from + 1) << 32;
    return packed;
  }
  u64 packed = 0;
#pragma unroll
  for (int i = 0; i < BITS; ++i) {
    if ((i64)i * 8 < valid * BITS) packed |= (u64)from[i] << (8 * i);
  }
  return packed;
}

__device__ __forceinline__ float number(u64 packed, u32 i) {
  if constexpr (BITS == 1) return packed >> i & 1 ? 1.0f : -1.0f;
  const int shift = 64 - BITS * ((int)i + 1);
  return (float)(int)((i64)(packed << shift) >> (64 - BITS));
}

// What the numbers of a block are made with.
struct Scale {
  float kept, inverse;
  bool finite;
};

__device__ __forceinline__ float rounded_number(float x, const Scale& scale) {
  return times(scale.kept == 0 ? 0 : x, scale.inverse) + ROUNDING;
}

// Values, plus the feedback, which stays in `before`.
__device__ __forceinline__ void wanted(const Blocks& a, float (&x)[EACH], float (&before)[EACH], i64 at, i64 valid) {
  get<Value>(x, (const typename Value::raw*)a.values + at, valid);
  if constexpr (Other::exists) {
    get<Other>(before, (const typename Other::raw*)a.other + at, valid);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
      before[i] = times(before[i], a.gain);
      x[i] = x[i] + before[i];
    }
  }
}

__device__ __forceinline__ Scale scale_of(const Blocks& a, i64 first, u32 count) {
  float sum = 0;
  u32 largest = 0;  // magnitude, as bits: that order knows inf and nan
  for (u32 at = threadIdx.x % 32 * EACH; at < count; at += WARP) {
    float x[EACH], before[EACH];
    wanted(a, x, before, first + at, (i64)count - at);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
      const u32 magnitude = bits<u32>(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      sum += x[i] * x[i];
    }
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    if constexpr (BITS == 1) {
      sum += (float)__shfl_xor_sync(0xffffffffu, sum, step);
    } else {
      const u32 theirs = (u32)__shfl_xor_sync(0xffffffffu, largest, step);
      largest = theirs > largest ? theirs : largest;
    }
  }
  if constexpr (BITS == 1) {
    const float kept = root(over(sum, (float)count));
    return {kept >= LEAST ? kept : 0, 0, kept <= 3.4e38f};
  }
  const float amax = bits<float>(largest);
  const bool finite = largest < 0x7f800000, zero = !finite || amax < LEAST;
  return {zero ? 0 : over(amax, LIMIT), zero ? 0 : over(LIMIT, amax), finite};
}

__device__ __forceinline__ u8* numbers_at(const Blocks& a, i64 row, i64 begin) {
  return a.blocks + row * a.row_nbytes + begin * BITS / 8;
}

__device__ __forceinline__ float* scale_at(const Blocks& a, i64 row, i64 begin) {
  return (float*)(a.blocks + row * a.row_nbytes + ((a.numel * BITS + 7) / 8 + 3) / 4 * 4) + begin / BLOCK;
}

extern "C" __global__ void __launch_bounds__(DS_THREADS) to_blocks(const __grid_constant__ Blocks a) {
  const i64 in_row = (a.numel + BLOCK - 1) / BLOCK, warps = (i64)gridDim.x * (DS_THREADS / 32);
  for (i64 index = (i64)blockIdx.x * (DS_THREADS / 32) + threadIdx.x / 32; index < a.rows * in_row; index += warps) {
    const i64 row = index / in_row, begin = index % in_row * BLOCK, first = row * a.numel + begin;
    const u32 count = a.numel - begin < BLOCK ? (u32)(a.numel - begin) : BLOCK;
    const Scale scale = scale_of(a, first, count);
    if (threadIdx.x % 32 == 0) *scale_at(a, row, begin) = scale.finite ? scale.kept : bits<float>(0x7fc00000u);
    for (u32 at = threadIdx.x % 32 * EACH; at < count; at += WARP) {
      const i64 valid = (i64)count - at;
      float x[EACH], before[EACH];
      wanted(a, x, before, first + at, valid);
      u64 packed = 0;
#pragma unroll
      for (u32 i = 0; i < EACH; ++i) {
        float kept;
        if constexpr (BITS == 1) {
          packed |= (u64)(x[i] >= 0) << i;
          kept = x[i] >= 0 ? scale.kept : -scale.kept;
        } else {
          const float shifted = rounded_number(x[i], scale);
          packed |= (u64)(bits<u32>(shifted) & ((1u << BITS) - 1)) << (BITS * i);
          kept = times(shifted - ROUNDING, scale.kept);
        }
        x[i] = x[i] - kept;
        if constexpr (Other::exists) {
          if (a.beta != 0) x[i] = times(before[i], a.beta) + times(x[i], 1 - a.beta);
        }
      }
      put_numbers(numbers_at(a, row, begin) + at * BITS / 8, packed, valid);
      if constexpr (Other::exists) {
        if (scale.finite) set<Other>((typename Other::raw*)a.other + first + at, x, valid);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(DS_THREADS) from_blocks(const __grid_constant__ Blocks a) {
  const i64 in_row = (a.numel + EACH - 1) / EACH, threads = (i64)gridDim.x * DS_THREADS;
  for (i64 index = (i64)blockIdx.x * DS_THREADS + threadIdx.x; index < a.rows * in_row; index += threads) {
    const i64 row = index / in_row, begin = index % in_row * EACH, valid = a.numel - begin;
    float sums[EACH] = {};
    for (i64 part = row * a.summed; part < (row + 1) * a.summed; ++part) {
      const u64 packed = get_numbers(numbers_at(a, part, begin), valid);
      const float scale = *scale_at(a, part, begin);
#pragma unroll
      for (u32 i = 0; i < EACH; ++i) sums[i] = sums[i] + times(number(packed, i), scale);
    }
    float before[EACH] = {};
    if constexpr (Other::exists) get<Other>(before, (const typename Other::raw*)a.other + row * a.numel + begin, valid);
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) sums[i] = times(sums[i], a.factor) + before[i];
    set<Value>((typename Value::raw*)a.values + row * a.numel + begin, sums, valid);
  }
}
