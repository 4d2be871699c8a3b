// Groups of vectors for the instruction set that this translation unit is compiled for, and the 16-bit formats.
//
// A value of a rule is a Group: W numbers in a few vectors, each operation on all of them before the next. Long
// dependency chains (square root, division, rounding) then overlap, and each tensor is read two cache lines at a time;
// against one vector at a time a step of AdamW takes a sixth less. Arithmetic is the compilers' own on vector types
// (GCC, Clang); intrinsics are used only where they have no operator. Everything lies in an unnamed namespace and
// nothing of the standard library is used: an inline function compiled for AVX-512 must never be the copy that the
// linker keeps.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DS_HF_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
constexpr int vectors = 2; // four do not fit into the sixteen registers before AVX-512
constexpr int W = vectors * lanes;

typedef float VF __attribute__((vector_size(4 * lanes)));
typedef uint32_t VU __attribute__((vector_size(4 * lanes)));
typedef int32_t VI __attribute__((vector_size(4 * lanes))); // masks: lanes are 0 or -1
typedef uint16_t VH __attribute__((vector_size(2 * lanes)));

template <class Vector> struct Group {
    Vector v[vectors];
};

using F = Group<VF>;
using U = Group<VU>;
using I = Group<VI>;
using H = Group<VH>;

// The operation on each vector of the arguments.
template <class Operation, class First, class... More>
DS_HF_INLINE auto each(Operation operation, const Group<First> &first, const Group<More> &...more) {
    Group<decltype(operation(first.v[0], more.v[0]...))> result;
    for (int k = 0; k < vectors; ++k) result.v[k] = operation(first.v[k], more.v[k]...);
    return result;
}

#define DS_HF_OPERATOR(op)                                                                                             \
    template <class V> DS_HF_INLINE auto operator op(const Group<V> &a, const Group<V> &b) {                           \
        return each([](V x, V y) { return x op y; }, a, b);                                                            \
    }                                                                                                                  \
    template <class V, class Scalar> DS_HF_INLINE auto operator op(const Group<V> &a, Scalar b) {                      \
        return each([b](V x) { return x op b; }, a);                                                                   \
    }                                                                                                                  \
    template <class V, class Scalar> DS_HF_INLINE auto operator op(Scalar a, const Group<V> &b) {                      \
        return each([a](V y) { return a op y; }, b);                                                                   \
    }
DS_HF_OPERATOR(+)
DS_HF_OPERATOR(-)
DS_HF_OPERATOR(*)
DS_HF_OPERATOR(/)
DS_HF_OPERATOR(&)
DS_HF_OPERATOR(|)
DS_HF_OPERATOR(^)
DS_HF_OPERATOR(<<)
DS_HF_OPERATOR(>>)
DS_HF_OPERATOR(<)
DS_HF_OPERATOR(>)
DS_HF_OPERATOR(>=)
DS_HF_OPERATOR(!=)
#undef DS_HF_OPERATOR

template <class V> DS_HF_INLINE Group<V> load_raw(const void *from) {
    Group<V> group;
    for (int k = 0; k < vectors; ++k)
        __builtin_memcpy(&group.v[k], static_cast<const char *>(from) + k * sizeof(V), sizeof(V));
    return group;
}

template <class V> DS_HF_INLINE void store_raw(void *to, const Group<V> &group) {
    for (int k = 0; k < vectors; ++k)
        __builtin_memcpy(static_cast<char *>(to) + k * sizeof(V), &group.v[k], sizeof(V));
}

DS_HF_INLINE U bits(const F &x) {
    return each([](VF v) { return (VU)v; }, x);
}
DS_HF_INLINE U bits(const I &mask) {
    return each([](VI v) { return (VU)v; }, mask);
}
DS_HF_INLINE I as_signed(const U &x) {
    return each([](VU v) { return (VI)v; }, x);
}
DS_HF_INLINE F from_bits(const U &x) {
    return each([](VU v) { return (VF)v; }, x);
}
DS_HF_INLINE U select(const I &mask, const U &yes, const U &no) {
    return (yes & bits(mask)) | (no & (bits(mask) ^ ~0u));
}
DS_HF_INLINE F select(const I &mask, const F &yes, const F &no) { return from_bits(select(mask, bits(yes), bits(no))); }

DS_HF_INLINE U lane_numbers() {
    U numbers = {};
    for (int k = 0; k < vectors; ++k)
        for (int i = 0; i < lanes; ++i) numbers.v[k][i] = (uint32_t)(k * lanes + i);
    return numbers;
}

DS_HF_INLINE F square_root(const F &x) {
    return each(
        [](VF v) {
#if defined(__AVX512F__)
            return (VF)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
            return (VF)_mm256_sqrt_ps((__m256)v);
#elif defined(__x86_64__)
            return (VF)_mm_sqrt_ps((__m128)v);
#else
            for (int i = 0; i < lanes; ++i) v[i] = __builtin_sqrtf(v[i]);
            return v;
#endif
        },
        x);
}

DS_HF_INLINE U widen(const H &x) {
    return each(
        [](VH v) {
#if defined(__AVX512F__)
            return (VU)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
            return (VU)_mm256_cvtepu16_epi32((__m128i)v);
#else
            return __builtin_convertvector(v, VU);
#endif
        },
        x);
}

// The upper halves.
DS_HF_INLINE H narrow_upper(const U &x) {
    return each(
        [](VU v) {
#if defined(__AVX512F__)
            const __m512i odd_words = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, //
                                                       25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
            return (VH)_mm512_castsi512_si256(_mm512_permutexvar_epi16(odd_words, (__m512i)v));
#elif defined(__AVX2__)
            const __m256i odd_words = _mm256_set1_epi64x(0x0f0e0b0a07060302);
            const __m256i twice = _mm256_shuffle_epi8((__m256i)v, odd_words);
            return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08));
#else
            return __builtin_convertvector(v >> 16, VH);
#endif
        },
        x);
}

DS_HF_INLINE F from_bf16(const H &x) { return from_bits(widen(x) << 16); }

// To bf16 by adding to what will be cut off; a carry goes up in magnitude, to inf at last. A nan becomes all ones.
DS_HF_INLINE H cut_to_bf16(const F &x, const U &addend) { return narrow_upper((bits(x) + addend) | bits(x != x)); }

// To nearest, ties to even. Not the instruction of AVX512_BF16, which flushes denormals.
DS_HF_INLINE H to_bf16(const F &x) {
#if defined(__AVX512F__)
    const U half = each(
        [](VF v) {
            const __mmask16 odd = _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(0x10000));
            return (VU)_mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
        },
        x);
#else
    const U half = (bits(x) >> 16 & 1) + 0x7fff;
#endif
    return cut_to_bf16(x, half);
}

DS_HF_INLINE F from_half(const H &x) {
#if defined(__AVX512F__)
    return each([](VH v) { return (VF)_mm512_cvtph_ps((__m256i)v); }, x);
#elif defined(__F16C__)
    return each([](VH v) { return (VF)_mm256_cvtph_ps((__m128i)v); }, x);
#else
    const U wide = widen(x), a = wide & 0x7fff;
    const U value = bits(from_bits(a << 13) * 0x1p112f);                   // right for subnormals too
    const U special = bits(as_signed(a) >= 0x7c00) & 0x7f800000;           // inf and nan keep their fraction
    return from_bits(value | special | (wide & 0x8000) << 16);
#endif
}

DS_HF_INLINE H to_half(const F &x) {
#if defined(__AVX512F__)
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return each([](VF v) { return (VH)_mm512_cvtps_ph((__m512)v, nearest); }, x);
#elif defined(__F16C__)
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return each([](VF v) { return (VH)_mm256_cvtps_ph((__m256)v, nearest); }, x);
#else
    const U u = bits(x), a = u & 0x7fffffff;
    const U normal = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    const U subnormal = bits(from_bits(a) + 0.5f) - 0x3f000000;            // the addition rounds at 2**-24
    const U huge = (bits(as_signed(a) > 0x7f800000) & 0x200) | 0x7c00;     // nan or inf
    const U finite = select(as_signed(a) < 0x38800000, subnormal, normal);
    const U magnitude = select(as_signed(a) < 0x47800000, finite, huge);
    return each([](VU v) { return __builtin_convertvector(v, VH); }, magnitude | (u >> 16 & 0x8000));
#endif
}

// Past the caches; `to` has the alignment of the vectors.
DS_HF_INLINE void store_streaming(void *to, const H &group) {
#if defined(__AVX512F__)
    for (int k = 0; k < vectors; ++k) _mm256_stream_si256((__m256i *)to + k, (__m256i)group.v[k]);
#elif defined(__AVX2__)
    for (int k = 0; k < vectors; ++k) _mm_stream_si128((__m128i *)to + k, (__m128i)group.v[k]);
#else
    store_raw(to, group);
#endif
}

// After streaming stores, before another thread may read what they wrote.
DS_HF_INLINE void finish_streaming() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

// 32 random bits a lane; a bijection of `counter` for each key (multipliers: "lowbias32", C. Wellons, public domain).
DS_HF_INLINE U scramble(const U &counter, uint32_t key, uint32_t other_key) {
    U x = counter ^ key;
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) + other_key;
    x = x * 0x846ca68b;
    return x ^ x >> 16;
}

} // namespace
