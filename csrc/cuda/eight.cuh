// Eight neighbours at a time, in fp32: what threads read and write that go through rows of any length.
#pragma once
#include "core.cuh"

constexpr u32 EACH = 8;  // elements of a thread

// ---- eight neighbours, of which the first `valid` exist; the others are 0

template <class D>
__device__ __forceinline__ void get(float (&x)[EACH], const typename D::raw* from, i64 valid) {
  using raw = typename D::raw;
  raw values[EACH] = {};
  if (valid >= (i64)EACH && ((u64)from & 15) == 0) {
#pragma unroll
    for (u32 part = 0; part < EACH * sizeof(raw) / 16; ++part) {
      const uint4 word = *((const uint4*)from + part);
      memcpy(values + part * 16 / sizeof(raw), &word, 16);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
      if ((i64)i < valid) values[i] = from[i];
    }
  }
#pragma unroll
  for (u32 i = 0; i < EACH; ++i) x[i] = D::wide(values[i]);
}

template <class D>
__device__ __forceinline__ void set(typename D::raw* to, const float (&x)[EACH], i64 valid) {
  using raw = typename D::raw;
  raw values[EACH];
#pragma unroll
  for (u32 i = 0; i < EACH; ++i) values[i] = D::narrow(x[i]);
  if (valid >= (i64)EACH && ((u64)to & 15) == 0) {
#pragma unroll
    for (u32 part = 0; part < EACH * sizeof(raw) / 16; ++part) {
      uint4 word;
      memcpy(&word, values + part * 16 / sizeof(raw), 16);
      *((uint4*)to + part) = word;
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
      if ((i64)i < valid) to[i] = values[i];
    }
  }
}
