// Vectors of W floats for the instruction set that this translation unit is compiled for, and the 16-bit formats.
//
// Arithmetic is the compilers' own on vector types (GCC, Clang); intrinsics are used only where they have no operator.
// Everything lies in an unnamed namespace and nothing of the standard library is used: an inline function compiled
// for AVX-512 must never be the copy that the linker keeps for everybody.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W))); // masks: lanes are 0 or -1
typedef uint16_t H __attribute__((vector_size(2 * W)));

template <class To> inline To load_raw(const void *from) {
    To value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class From> inline void store_raw(void *to, From value) { __builtin_memcpy(to, &value, sizeof value); }

inline F splat(float x) { return x - F{}; }
inline U splat_u(uint32_t x) { return x - U{}; }
inline U bits(F x) { return (U)x; }
inline F from_bits(U x) { return (F)x; }
inline F select(I mask, F yes, F no) { return (F)(((I)yes & mask) | ((I)no & ~mask)); }
inline U select(I mask, U yes, U no) { return (U)(((I)yes & mask) | ((I)no & ~mask)); }

inline U lane_numbers() {
    U lanes = {};
    for (int i = 0; i < W; ++i) lanes[i] = (uint32_t)i;
    return lanes;
}

inline F square_root(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (F)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (F)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

inline U widen(H x) {
#if defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, U);
#endif
}

// The lower halves; the upper ones are 0.
inline H narrow(U x) {
#if defined(__AVX512F__)
    return (H)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
#else
    return __builtin_convertvector(x, H);
#endif
}

inline F from_bf16(H x) { return from_bits(widen(x) << 16); }

// Not the instruction of AVX512_BF16, which flushes denormals.
inline H to_bf16(F x) {
    const U u = bits(x);
    const U nearest_even = u + 0x7fff + ((u >> 16) & 1);
    const I nan = (I)(u & 0x7fffffff) > 0x7f800000;
    return narrow(select(nan, u | 0x400000, nearest_even) >> 16);
}

// Each x to one of its two neighbours in bf16: up in magnitude with the probability of what would be cut off.
inline F round_bf16(F x, U noise16) {
    const U u = bits(x);
    const I finite = (u & 0x7f800000) != 0x7f800000;
    return from_bits(select(finite, (u + noise16) & 0xffff0000, u));
}

inline F from_half(H x) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps((__m128i)x);
#else
    const U wide = widen(x), a = wide & 0x7fff;
    const U value = bits(from_bits(a << 13) * 0x1p112f);            // right for subnormals too
    const U special = (U)((I)a >= 0x7c00) & 0x7f800000;             // inf and nan keep their fraction
    return from_bits(value | special | (wide & 0x8000) << 16);
#endif
}

inline H to_half(F x) {
#if defined(__AVX512F__)
    return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const U u = bits(x), a = u & 0x7fffffff;
    const U normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
    const U subnormal = bits(from_bits(a) + 0.5f) - 0x3f000000;     // the addition rounds at 2**-24
    const U huge = select((I)a > 0x7f800000, 0x7e00 | ((a >> 13) & 0x3ff), splat_u(0x7c00));
    const U magnitude = select((I)a < 0x38800000, subnormal, select((I)a < 0x47800000, normal, huge));
    return narrow(magnitude | (u >> 16 & 0x8000));
#endif
}

// Past the caches; `to` has the alignment of H.
inline void store_streaming(void *to, H value) {
#if defined(__AVX512F__)
    _mm256_stream_si256((__m256i *)to, (__m256i)value);
#elif defined(__AVX2__)
    _mm_stream_si128((__m128i *)to, (__m128i)value);
#else
    store_raw(to, value);
#endif
}

// After streaming stores, before another thread may read what they wrote.
inline void finish_streaming() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// 32 random bits a lane; a bijection of `counter` for each key (multipliers: "lowbias32", C. Wellons, public domain).
inline U scramble(U counter, uint32_t key, uint32_t other_key) {
    U x = counter ^ key;
    x ^= x >> 16;
    x *= 0x7feb352d;
    x = (x ^ x >> 15) + other_key;
    x *= 0x846ca68b;
    return x ^ x >> 16;
}

} // namespace
