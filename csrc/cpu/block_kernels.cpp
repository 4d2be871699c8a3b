// Block formats, compiled once for each instruction set as kernels.cpp is, but without contraction: numbers of 8 and 4
// bits are those of the reference to the bit.
//
// One block at a time. Its values, plus the feedback, are staged in a buffer that stays in the first cache, padded with
// zeros to whole groups, so tails are no case of their own; then they are rounded and packed.
#include "kernels.hpp"

#include "ds_hf_blocks.h"
#include "simd.hpp"

namespace {

using namespace ds_hf;

constexpr int64_t most = 4096; // elements of a block

typedef uint8_t VB __attribute__((vector_size(lanes)));
typedef uint64_t VL __attribute__((vector_size(4 * lanes)));      // two lanes as one
typedef uint8_t VN __attribute__((vector_size(lanes / 2)));       // two numbers of 4 bits each

DS_HF_INLINE F load(const char *from, int32_t type) {
    if (type == DS_HF_F32) return load_raw<VF>(from);
    const H value = load_raw<VH>(from);
    return type == DS_HF_BF16 ? from_bf16(value) : from_half(value);
}

DS_HF_INLINE void store(char *to, int32_t type, const F &x) {
    if (type == DS_HF_F32) return store_raw(to, x);
    store_raw(to, type == DS_HF_BF16 ? to_bf16(x) : to_half(x));
}

DS_HF_INLINE int64_t width(int32_t type) { return type == DS_HF_NONE ? 0 : type == DS_HF_F32 ? 4 : 2; }

// A group of which only `valid` elements exist in memory.
DS_HF_INLINE F load_some(const char *from, int32_t type, int64_t valid) {
    if (valid >= W) return load(from, type);
    alignas(64) char buffer[4 * W] = {};
    __builtin_memcpy(buffer, from, valid * width(type));
    return load(buffer, type);
}

DS_HF_INLINE void store_some(char *to, int32_t type, const F &x, int64_t valid) {
    if (valid >= W) return store(to, type, x);
    alignas(64) char buffer[4 * W];
    store(buffer, type, x);
    __builtin_memcpy(to, buffer, valid * width(type));
}

DS_HF_INLINE I bigger(const I &a, const I &b) {
    return as_signed(select(a > b, each([](VI v) { return (VU)v; }, a), each([](VI v) { return (VU)v; }, b)));
}

// The largest magnitude, as the bits of an fp32: that order knows inf and nan.
int32_t largest(const float *staged, int64_t end) {
    I most_bits = {};
    for (int64_t i = 0; i < end; i += W)
        most_bits = bigger(as_signed(bits(load_raw<VF>(staged + i)) & 0x7fffffff), most_bits);
    int32_t result = 0;
    for (int k = 0; k < vectors; ++k)
        for (int lane = 0; lane < lanes; ++lane) result = most_bits.v[k][lane] > result ? most_bits.v[k][lane] : result;
    return result;
}

float mean_square_root(const float *staged, int64_t end, int64_t numel) {
    F sums = {};
    for (int64_t i = 0; i < end; i += W) {
        const F x = load_raw<VF>(staged + i);
        sums = sums + x * x;
    }
    float total = 0;
    for (int k = 0; k < vectors; ++k)
        for (int lane = 0; lane < lanes; ++lane) total += sums.v[k][lane];
    return __builtin_sqrtf(total / (float)numel);
}

// ---- numbers: `pack` gives the bytes of a group of whole numbers, in the low bits of its lanes, `unpack` takes them

template <int BITS> struct Numbers;

template <> struct Numbers<8> {
    static constexpr float limit = 127;
    static DS_HF_INLINE void pack(uint8_t *to, const U &x) {
        for (int k = 0; k < vectors; ++k) {
            const VB bytes = __builtin_convertvector(x.v[k], VB);
            __builtin_memcpy(to + k * lanes, &bytes, lanes);
        }
    }
    static DS_HF_INLINE F unpack(const uint8_t *from) {
        F result;
        for (int k = 0; k < vectors; ++k) {
            typedef int8_t VS __attribute__((vector_size(lanes)));
            VS bytes;
            __builtin_memcpy(&bytes, from + k * lanes, lanes);
            result.v[k] = __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
        }
        return result;
    }
};

template <> struct Numbers<4> {
    static constexpr float limit = 7;
    static DS_HF_INLINE void pack(uint8_t *to, const U &x) {
        for (int k = 0; k < vectors; ++k) {
            const VL pairs = (VL)x.v[k];
            const VN bytes = __builtin_convertvector((pairs & 0xf) | (pairs >> 28 & 0xf0), VN);
            __builtin_memcpy(to + k * (lanes / 2), &bytes, lanes / 2);
        }
    }
    static DS_HF_INLINE F unpack(const uint8_t *from) {
        F result;
        for (int k = 0; k < vectors; ++k) {
            VN bytes;
            __builtin_memcpy(&bytes, from + k * (lanes / 2), lanes / 2);
            const VL pairs = __builtin_convertvector(bytes, VL);
            const VI numbers = (VI)(pairs << 28 | pairs >> 4 << 60) >> 28;
            result.v[k] = __builtin_convertvector(numbers, VF);
        }
        return result;
    }
};

DS_HF_INLINE uint32_t signs_of(const VI &mask) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t result = 0;
    for (int lane = 0; lane < lanes; ++lane) result |= (uint32_t)(mask[lane] & 1) << lane;
    return result;
#endif
}

template <> struct Numbers<1> {
    static DS_HF_INLINE void pack(uint8_t *to, const I &positive) {
        uint32_t word = 0;
        for (int k = 0; k < vectors; ++k) word |= signs_of(positive.v[k]) << (k * lanes);
        __builtin_memcpy(to, &word, W / 8);
    }
    static DS_HF_INLINE F unpack(const uint8_t *from) {
        uint32_t word = 0;
        __builtin_memcpy(&word, from, W / 8);
        const U bit = (U{} + word) >> lane_numbers() & 1;
        return from_bits((bit ^ 1) << 31 | 0x3f800000); // 1 or -1
    }
};

constexpr float rounding = 12582912; // 1.5 * 2**23: added, it leaves the nearest whole number in the low bits
constexpr float least = 1e-30f;      // smaller blocks are zeros

// Values that stand for `staged` replace them; returns the scale.
template <int BITS> float quantize(float *staged, int64_t numel, int64_t end, uint8_t *numbers) {
    if constexpr (BITS == 1) {
        const float scale = mean_square_root(staged, end, numel);
        const bool finite = scale <= 3.4e38f;
        const float kept = scale >= least ? scale : 0;
        for (int64_t i = 0; i < end; i += W) {
            const F x = load_raw<VF>(staged + i);
            const I positive = x >= 0.0f;
            Numbers<1>::pack(numbers + i / 8, positive);
            store_raw(staged + i, select(positive, F{} + kept, F{} - kept));
        }
        return finite ? kept : __builtin_nanf("");
    } else {
        const int32_t magnitude = largest(staged, end);
        const bool finite = magnitude < 0x7f800000;
        float amax;
        __builtin_memcpy(&amax, &magnitude, 4);
        const bool zero = !finite || amax < least;
        constexpr float limit = Numbers<BITS>::limit;
        const float scale = zero ? 0 : amax / limit, inverse = zero ? 0 : limit / amax;
        for (int64_t i = 0; i < end; i += W) {
            const F x = zero ? F{} : load_raw<VF>(staged + i);
            const F shifted = x * inverse + rounding;
            Numbers<BITS>::pack(numbers + i * BITS / 8, bits(shifted));
            store_raw(staged + i, (shifted - rounding) * scale);
        }
        return finite ? scale : __builtin_nanf("");
    }
}

struct Place {
    int64_t row, begin, numel; // of a block: its row, its first element there, its elements
    int64_t end;               // the elements of whole groups
};

Place place_of(const ds_hf_blocks &a, int64_t index) {
    const int64_t in_row = (a.numel + a.block - 1) / a.block, begin = index % in_row * a.block;
    const int64_t numel = a.numel - begin < a.block ? a.numel - begin : a.block;
    return {index / in_row, begin, numel, (numel + W - 1) / W * W};
}

DS_HF_INLINE char *numbers_at(const ds_hf_blocks &a, int64_t row, int64_t begin) {
    return static_cast<char *>(a.blocks) + row * a.row_nbytes + begin * a.bits / 8;
}

DS_HF_INLINE char *scale_at(const ds_hf_blocks &a, int64_t row, int64_t begin) {
    const int64_t numbers = ((a.numel * a.bits + 7) / 8 + 3) / 4 * 4;
    return static_cast<char *>(a.blocks) + row * a.row_nbytes + numbers + begin / a.block * 4;
}

template <int BITS> void to_block(const ds_hf_blocks &a, int64_t index) {
    alignas(64) float staged[most + W], wanted[most + W];
    alignas(64) uint8_t packed[most + W];
    const Place at = place_of(a, index);
    const int64_t first = at.row * a.numel + at.begin;
    const char *values = static_cast<const char *>(a.values) + first * width(a.value_type);
    char *feedback = a.other ? static_cast<char *>(a.other) + first * width(a.other_type) : nullptr;
    for (int64_t i = 0; i < at.end; i += W) {
        F x = load_some(values + i * width(a.value_type), a.value_type, at.numel - i);
        if (feedback) {
            x = x + load_some(feedback + i * width(a.other_type), a.other_type, at.numel - i) * a.gain;
            store_raw(wanted + i, x);
        }
        store_raw(staged + i, x);
    }
    const float scale = quantize<BITS>(staged, at.numel, at.end, packed);
    __builtin_memcpy(numbers_at(a, at.row, at.begin), packed, (at.numel * BITS + 7) / 8);
    __builtin_memcpy(scale_at(a, at.row, at.begin), &scale, 4);
    if (!feedback || !(scale == scale)) return;
    for (int64_t i = 0; i < at.end; i += W) {
        F lost = load_raw<VF>(wanted + i) - load_raw<VF>(staged + i);
        char *to = feedback + i * width(a.other_type);
        if (a.beta != 0) {
            const F before = load_some(to, a.other_type, at.numel - i) * a.gain;
            lost = before * a.beta + lost * (1 - a.beta);
        }
        store_some(to, a.other_type, lost, at.numel - i);
    }
}

template <int BITS> void from_block(const ds_hf_blocks &a, int64_t index) {
    alignas(64) float sums[most + W];
    const Place at = place_of(a, index);
    const int64_t whole = at.numel / W * W;
    for (int64_t row = 0; row < a.summed; ++row) {
        const char *numbers = numbers_at(a, at.row * a.summed + row, at.begin);
        float scale;
        __builtin_memcpy(&scale, scale_at(a, at.row * a.summed + row, at.begin), 4);
        for (int64_t i = 0; i < at.end; i += W) {
            alignas(64) uint8_t tail[W] = {};
            const uint8_t *from = reinterpret_cast<const uint8_t *>(numbers) + i * BITS / 8;
            if (i >= whole) {
                __builtin_memcpy(tail, from, ((at.numel - i) * BITS + 7) / 8);
                from = tail;
            }
            const F x = Numbers<BITS>::unpack(from) * scale;
            store_raw(sums + i, row == 0 ? x : load_raw<VF>(sums + i) + x);
        }
    }
    const int64_t first = at.row * a.numel + at.begin;
    char *values = static_cast<char *>(a.values) + first * width(a.value_type);
    const char *before = a.other ? static_cast<const char *>(a.other) + first * width(a.other_type) : nullptr;
    for (int64_t i = 0; i < at.end; i += W) {
        F x = load_raw<VF>(sums + i) * a.factor;
        if (before) x = x + load_some(before + i * width(a.other_type), a.other_type, at.numel - i);
        store_some(values + i * width(a.value_type), a.value_type, x, at.numel - i);
    }
}

template <void (*EIGHT)(const ds_hf_blocks &, int64_t), void (*FOUR)(const ds_hf_blocks &, int64_t),
          void (*ONE)(const ds_hf_blocks &, int64_t)>
void over(const ds_hf_blocks &args, Range blocks) {
    const auto block = args.bits == 8 ? EIGHT : args.bits == 4 ? FOUR : ONE;
    for (int64_t index = blocks.begin; index < blocks.end; ++index) block(args, index);
}

} // namespace

#define DS_HF_JOIN(a, b) a##b
#define DS_HF_BLOCK_KERNELS(isa) DS_HF_JOIN(block_kernels_, isa)

extern const ds_hf::BlockKernels ds_hf::DS_HF_BLOCK_KERNELS(DS_HF_ISA) = {
    over<to_block<8>, to_block<4>, to_block<1>>, over<from_block<8>, from_block<4>, from_block<1>>};
