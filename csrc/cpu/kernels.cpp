// The kernels, compiled once for each instruction set (CMakeLists.txt defines DS_HF_ISA and passes the flags).
//
// A rule says what one vector of elements becomes; `sweep` moves the elements. Types are looked at for each vector:
// the branches are predicted, memory is what takes the time, and there is one piece of code instead of a hundred.
#include "kernels.hpp"

#include "ds_hf_cpu.h"
#include "simd.hpp"

namespace {

using namespace ds_hf;

inline int64_t width(int32_t type) { return type == DS_HF_NONE ? 0 : type == DS_HF_F32 ? 4 : 2; }

inline F load(const Span &span, int64_t i) {
    if (span.type == DS_HF_F32) return load_raw<F>(span.data + 4 * i);
    const H value = load_raw<H>(span.data + 2 * i);
    return span.type == DS_HF_BF16 ? from_bf16(value) : from_half(value);
}

// Params and moments. Returns what a load would give now.
inline F store(const Span &span, int64_t i, F x) {
    if (span.type == DS_HF_F32) {
        store_raw(span.data + 4 * i, x);
        return x;
    }
    const H value = to_bf16(x);
    store_raw(span.data + 2 * i, value);
    return from_bf16(value);
}

inline void store_out(const Chunk &chunk, int64_t i, F x) {
    const Span &out = chunk.out;
    if (out.type == DS_HF_NONE) return;
    if (out.type == DS_HF_F32) return store_raw(out.data + 4 * i, x);
    const H value = out.type == DS_HF_BF16 ? to_bf16(x) : to_half(x);
    if (chunk.streaming) return store_streaming(out.data + 2 * i, value);
    store_raw(out.data + 2 * i, value);
}

// What a rule reads and writes besides; sums are of squares.
struct Plain {
    static constexpr bool grad = true, writes_param = true, writes_moments = true, sums = false;
};

struct Adam : Plain {
    static constexpr int moments = 2;
    using Scalars = AdamScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &m, F &v, F &) {
        if (s.l2 != 0) g += s.l2 * p;
        m = s.beta1 * m + s.rest1 * g;
        v = s.beta2 * v + s.rest2 * g * g;
        p = p * s.shrink - s.rate * (m / (square_root(v * s.inverse_c2) + s.eps));
    }
};

struct Lion : Plain {
    static constexpr int moments = 1;
    using Scalars = LionScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &m, F &, F &) {
        const F direction = s.beta1 * m + s.rest1 * g;
        const U rate = bits(splat(s.rate));
        const F signed_rate = from_bits(((U)(direction > 0) & rate) | ((U)(direction < 0) & (rate ^ 0x80000000)));
        p = p * s.shrink - signed_rate;
        m = s.beta2 * m + s.rest2 * g;
    }
};

struct Adagrad : Plain {
    static constexpr int moments = 1;
    using Scalars = AdagradScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &sum, F &, F &) {
        if (s.l2 != 0) g += s.l2 * p;
        sum += g * g;
        p -= s.rate * (g / (square_root(sum) + s.eps));
    }
};

struct Sgd : Plain {
    static constexpr int moments = 0;
    using Scalars = SgdScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &, F &, F &) {
        if (s.l2 != 0) g += s.l2 * p;
        p -= s.rate * g;
    }
};

struct Momentum : Plain {
    static constexpr int moments = 1;
    using Scalars = SgdScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &b, F &, F &) {
        if (s.l2 != 0) g += s.l2 * p;
        b = s.first ? g : s.momentum * b + s.rest * g;
        p -= s.rate * (s.nesterov ? g + s.momentum * b : b);
    }
};

inline F lamb_update(const LambScalars &s, F p, F m, F v) {
    const F root = s.eps_inside ? square_root(v + s.eps) : square_root(v) + s.eps;
    return m / root + s.decay * p;
}

struct LambMoments {
    static constexpr bool grad = true, writes_param = false, writes_moments = true, sums = true;
    static constexpr int moments = 2;
    using Scalars = LambScalars;
    static inline void apply(const Scalars &s, F g, F &p, F &m, F &v, F &update) {
        m = s.beta1 * m + s.rest1 * g;
        v = s.beta2 * v + s.rest2 * g * g;
        update = lamb_update(s, p, m, v);
    }
};

struct LambApply {
    static constexpr bool grad = false, writes_param = true, writes_moments = false, sums = false;
    static constexpr int moments = 2;
    using Scalars = LambScalars;
    static inline void apply(const Scalars &s, F, F &p, F &m, F &v, F &) { p -= s.rate * lamb_update(s, p, m, v); }
};

// Sums of squares: short runs in fp32, lane by lane, and the runs in double.
struct Sums {
    static constexpr int run = 32; // vectors
    F short_sums[2] = {};
    double lanes[2][W] = {};

    inline void flush(int which) {
        for (int lane = 0; lane < W; ++lane) lanes[which][lane] += short_sums[which][lane];
        short_sums[which] = F{};
    }

    inline double total(int which) {
        flush(which);
        double sum = 0;
        for (int lane = 0; lane < W; ++lane) sum += lanes[which][lane];
        return sum;
    }
};

// The vector of elements that starts at i; of a tail only the first `valid` lanes count.
template <class Rule>
inline void step(const typename Rule::Scalars &scalars, const Chunk &c, int64_t i, int64_t valid, Sums &sums) {
    F g = {}, first = {}, second = {}, update = {};
    F p = load(c.param, i);
    if constexpr (Rule::grad) g = load(c.grad, i) * c.scale;
    if constexpr (Rule::moments > 0) first = load(c.first, i);
    if constexpr (Rule::moments > 1) second = load(c.second, i);
    Rule::apply(scalars, g, p, first, second, update);
    if constexpr (Rule::sums) {
        const I kept = (I)lane_numbers() < (int32_t)valid;
        const F counted = select(kept, p, F{}), counted_update = select(kept, update, F{});
        sums.short_sums[0] += counted * counted;
        sums.short_sums[1] += counted_update * counted_update;
    }
    if (!c.write) return;
    if (c.stochastic) {
        const U counter = lane_numbers() + c.position + (uint32_t)i;
        const U noise = scramble(counter, c.keys[0], c.keys[1]);
        if (Rule::writes_param && c.param.type == DS_HF_BF16) p = round_bf16(p, noise >> 16);
        if (Rule::moments > 0 && c.first.type == DS_HF_BF16) first = round_bf16(first, noise & 0xffff);
        if (Rule::moments > 1 && c.second.type == DS_HF_BF16)
            second = round_bf16(second, scramble(counter, c.keys[2], c.keys[3]) >> 16);
    }
    if constexpr (Rule::writes_param) store_out(c, i, store(c.param, i, p));
    if constexpr (Rule::writes_moments && Rule::moments > 0) store(c.first, i, first);
    if constexpr (Rule::writes_moments && Rule::moments > 1) store(c.second, i, second);
}

// The last elements, too few for a vector, go through buffers of our own: nothing beyond a tensor is touched.
template <class Rule>
void tail(const typename Rule::Scalars &scalars, const Chunk &chunk, int64_t i, Sums &sums) {
    alignas(64) char buffers[5][4 * W] = {};
    Chunk staged = chunk;
    const int64_t valid = chunk.numel - i;
    const Span *from[5] = {&chunk.param, &chunk.first, &chunk.second, &chunk.out, &chunk.grad};
    Span *to[5] = {&staged.param, &staged.first, &staged.second, &staged.out, &staged.grad};
    for (int k = 0; k < 5; ++k) {
        if (from[k]->data == nullptr) continue;
        to[k]->data = buffers[k];
        __builtin_memcpy(buffers[k], from[k]->data + i * width(from[k]->type), valid * width(from[k]->type));
    }
    staged.position += (uint32_t)i;
    step<Rule>(scalars, staged, 0, valid, sums);
    if (staged.streaming) finish_streaming();
    if (!chunk.write) return;
    for (int k = 0; k < 4; ++k) // all but the gradient
        if (from[k]->data != nullptr)
            __builtin_memcpy(from[k]->data + i * width(from[k]->type), buffers[k], valid * width(from[k]->type));
}

template <class Rule> void sweep(const typename Rule::Scalars &given, Chunk &chunk_) {
    const Chunk chunk = chunk_; // the compiler sees that no store changes it
    const typename Rule::Scalars scalars = given;
    Sums sums;
    int64_t i = 0;
    for (int since = 0; i + W <= chunk.numel; i += W) {
        step<Rule>(scalars, chunk, i, W, sums);
        if (Rule::sums && ++since == Sums::run) {
            sums.flush(0);
            sums.flush(1);
            since = 0;
        }
    }
    if (i < chunk.numel) tail<Rule>(scalars, chunk, i, sums);
    if (chunk.streaming) finish_streaming();
    if constexpr (Rule::sums) {
        chunk_.sums[0] = sums.total(0);
        chunk_.sums[1] = sums.total(1);
    }
}

void sgd(const SgdScalars &scalars, Chunk &chunk) {
    if (scalars.moving) return sweep<Momentum>(scalars, chunk);
    sweep<Sgd>(scalars, chunk);
}

void squared_norm(Chunk &chunk) {
    constexpr int ways = 4; // additions in flight
    const Span grad = chunk.grad;
    const int64_t numel = chunk.numel;
    Sums sums;
    int64_t i = 0;
    while (i + ways * W <= numel) {
        F partial[ways] = {};
        for (int rounds = 0; rounds < 8 && i + ways * W <= numel; ++rounds, i += ways * W)
            for (int k = 0; k < ways; ++k) {
                const F x = load(grad, i + k * W);
                partial[k] += x * x;
            }
        sums.short_sums[0] = (partial[0] + partial[1]) + (partial[2] + partial[3]);
        sums.flush(0);
    }
    for (; i < numel; i += W) {
        alignas(64) char buffer[4 * W] = {};
        const int64_t valid = numel - i < W ? numel - i : W;
        __builtin_memcpy(buffer, grad.data + i * width(grad.type), valid * width(grad.type));
        const F x = load(Span{buffer, grad.type}, 0);
        sums.short_sums[0] += x * x;
    }
    chunk.sums[0] = sums.total(0);
}

} // namespace

#define DS_HF_JOIN(a, b) a##b
#define DS_HF_KERNELS(isa) DS_HF_JOIN(kernels_, isa)
#define DS_HF_TEXT(isa) #isa
#define DS_HF_NAME(isa) DS_HF_TEXT(isa)

// Constants only: nothing of an instruction set may run before it was chosen.
extern const ds_hf::Kernels ds_hf::DS_HF_KERNELS(DS_HF_ISA) = {
    DS_HF_NAME(DS_HF_ISA), sweep<Adam>,      sweep<Lion>,  sweep<Adagrad>, sgd, sweep<LambMoments>,
    sweep<LambApply>,      squared_norm};
