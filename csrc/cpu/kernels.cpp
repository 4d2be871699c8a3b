// The kernels, compiled once for each instruction set (CMakeLists.txt defines DS_HF_ISA and passes the flags).
//
// A rule says what one group of elements becomes; `sweep` moves the elements. Types are looked at for each group: the
// branches are predicted, memory is what takes the time, and there is one piece of code instead of a hundred.
#include "kernels.hpp"

#include "ds_hf_cpu.h"
#include "simd.hpp"

namespace {

using namespace ds_hf;

DS_HF_INLINE int64_t width(int32_t type) { return type == DS_HF_NONE ? 0 : type == DS_HF_F32 ? 4 : 2; }

DS_HF_INLINE F load(const Span &span, int64_t i) {
    if (span.type == DS_HF_F32) return load_raw<VF>(span.data + 4 * i);
    const H value = load_raw<VH>(span.data + 2 * i);
    return span.type == DS_HF_BF16 ? from_bf16(value) : from_half(value);
}

// What is added to fp32 before it is cut to bf16: noise of 16 bits rounds up with the probability of what is cut off.
struct Noise {
    U bits;
    DS_HF_INLINE H round(const F &x) const { return cut_to_bf16(x, bits); }
};

struct NoNoise {
    DS_HF_INLINE H round(const F &x) const { return to_bf16(x); }
};

// Params and moments. Returns what a load would give now.
template <class Rounding>
DS_HF_INLINE F store(const Span &span, int64_t i, const F &x, const Rounding &rounding) {
    if (span.type == DS_HF_F32) {
        store_raw(span.data + 4 * i, x);
        return x;
    }
    const H value = rounding.round(x);
    store_raw(span.data + 2 * i, value);
    return from_bf16(value);
}

DS_HF_INLINE void store_out(const Chunk &chunk, int64_t i, F x) {
    const Span &out = chunk.out;
    if (out.type == DS_HF_NONE) return;
    if (out.type == DS_HF_F32) return store_raw(out.data + 4 * i, x);
    const H value = out.type == DS_HF_BF16 ? to_bf16(x) : to_half(x);
    if (chunk.streaming) return store_streaming(out.data + 2 * i, value);
    store_raw(out.data + 2 * i, value);
}

// What a rule reads and writes besides; sums are of squares.
struct Plain {
    static constexpr bool grad = true, writes_param = true, writes_moments = true, writes_second = true, sums = false;
};

struct Adam : Plain {
    static constexpr int moments = 2;
    using Scalars = AdamScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &m, F &v, F &) {
        if (s.l2 != 0) g = g + s.l2 * p;
        m = s.beta1 * m + s.rest1 * g;
        v = s.beta2 * v + s.rest2 * g * g;
        p = p * s.shrink - s.rate * (m / (square_root(v * s.inverse_c2) + s.eps));
    }
};

struct Lion : Plain {
    static constexpr int moments = 1;
    using Scalars = LionScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &m, F &, F &) {
        const F direction = s.beta1 * m + s.rest1 * g;
        uint32_t rate;
        __builtin_memcpy(&rate, &s.rate, sizeof rate);
        const U up = bits(direction > 0.0f) & rate, down = bits(direction < 0.0f) & (rate ^ 0x80000000);
        p = p * s.shrink - from_bits(up | down);
        m = s.beta2 * m + s.rest2 * g;
    }
};

struct Adagrad : Plain {
    static constexpr int moments = 1;
    using Scalars = AdagradScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &sum, F &, F &) {
        if (s.l2 != 0) g = g + s.l2 * p;
        sum = sum + g * g;
        p = p - s.rate * (g / (square_root(sum) + s.eps));
    }
};

struct Sgd : Plain {
    static constexpr int moments = 0;
    using Scalars = SgdScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &, F &, F &) {
        if (s.l2 != 0) g = g + s.l2 * p;
        p = p - s.rate * g;
    }
};

struct Momentum : Plain {
    static constexpr int moments = 1;
    using Scalars = SgdScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &b, F &, F &) {
        if (s.l2 != 0) g = g + s.l2 * p;
        b = s.first ? g : s.momentum * b + s.rest * g;
        p = p - s.rate * (s.nesterov ? g + s.momentum * b : b);
    }
};

DS_HF_INLINE F lamb_update(const LambScalars &s, F p, F m, F v) {
    const F root = s.eps_inside ? square_root(v + s.eps) : square_root(v) + s.eps;
    return m / root + s.decay * p;
}

struct LambMoments {
    static constexpr bool grad = true, writes_param = false, writes_moments = true, writes_second = true, sums = true;
    static constexpr int moments = 2;
    using Scalars = LambScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &m, F &v, F &update) {
        m = s.beta1 * m + s.rest1 * g;
        v = s.beta2 * v + s.rest2 * g * g;
        update = lamb_update(s, p, m, v);
    }
};

struct LambApply {
    static constexpr bool grad = false, writes_param = true, writes_moments = false, writes_second = false, sums = false;
    static constexpr int moments = 2;
    using Scalars = LambScalars;
    static DS_HF_INLINE void apply(const Scalars &s, F, F &p, F &m, F &v, F &) {
        p = p - s.rate * lamb_update(s, p, m, v);
    }
};

// What 1-bit optimizers do around their exchange; the second moment is frozen.
struct OneBit : Plain {
    static constexpr bool writes_second = false;
    static constexpr int moments = 2;
    using Scalars = OneBitScalars;
    static DS_HF_INLINE F size(const Scalars &s, const F &v) {
        const F floored = select(v < s.floor, F{} + s.floor, v); // a nan stays
        return s.eps_inside ? square_root(floored + s.eps) : square_root(floored) + s.eps;
    }
};

struct OneBitValues : OneBit {
    static DS_HF_INLINE void apply(const Scalars &s, F g, F &p, F &m, F &v, F &) {
        m = s.beta1 * m + s.rest1 * g;
        p = m / size(s, v);
    }
};

struct OneBitApply : OneBit {
    static DS_HF_INLINE void apply(const Scalars &s, F mean, F &p, F &m, F &v, F &) {
        m = mean * size(s, v);
        p = p * s.shrink - s.rate * mean;
    }
};

// Sums of squares: short runs in fp32, lane by lane, and the runs in double.
struct Sums {
    static constexpr int run = 16; // groups
    F short_sums[2] = {};
    double wide[2][lanes] = {};

    DS_HF_INLINE void add(int which, const F &x) { short_sums[which] = short_sums[which] + x * x; }

    DS_HF_INLINE void flush(int which) {
        const VF *v = short_sums[which].v;
        VF sum = v[0];
        for (int k = 1; k < vectors; ++k) sum += v[k];
        for (int lane = 0; lane < lanes; ++lane) wide[which][lane] += sum[lane];
        short_sums[which] = F{};
    }

    DS_HF_INLINE double total(int which) {
        flush(which);
        double sum = 0;
        for (int lane = 0; lane < lanes; ++lane) sum += wide[which][lane];
        return sum;
    }
};

template <class Rule, class Rounding>
DS_HF_INLINE void store_all(const Chunk &c, int64_t i, const F &p, const F &first, const F &second,
                            const Rounding &of_param, const Rounding &of_first, const Rounding &of_second) {
    if constexpr (Rule::writes_moments && Rule::moments > 0) store(c.first, i, first, of_first);
    if constexpr (Rule::writes_second && Rule::moments > 1) store(c.second, i, second, of_second);
    if constexpr (Rule::writes_param) store_out(c, i, store(c.param, i, p, of_param));
}

// The group of elements that starts at i; of a tail only the first `valid` lanes count.
template <class Rule>
DS_HF_INLINE void step(const typename Rule::Scalars &scalars, const Chunk &c, int64_t i, int64_t valid, Sums &sums) {
    F g = {}, first = {}, second = {}, update = {};
    F p = load(c.param, i);
    if constexpr (Rule::grad) g = load(c.grad, i) * c.scale;
    if constexpr (Rule::moments > 0) first = load(c.first, i);
    if constexpr (Rule::moments > 1) second = load(c.second, i);
    Rule::apply(scalars, g, p, first, second, update);
    if constexpr (Rule::sums) {
        const I kept = as_signed(lane_numbers()) < (int32_t)valid;
        sums.add(0, select(kept, p, F{}));
        sums.add(1, select(kept, update, F{}));
    }
    if (!c.write) return;
    if (!c.stochastic) return store_all<Rule>(c, i, p, first, second, NoNoise{}, NoNoise{}, NoNoise{});
    const U random = scramble(lane_numbers() + (c.position + (uint32_t)i), c.keys[0], c.keys[1]);
    // any two of the three are independent
    store_all<Rule>(c, i, p, first, second, Noise{random >> 16}, Noise{random & 0xffff},
                    Noise{random * 0x9e3779b1 >> 16});
}

// Whole groups from the chunk's first element to `end`; sums are added to `results`. The one copy of each rule's code.
template <class Rule>
[[gnu::noinline]] void run(const typename Rule::Scalars &given, const Chunk &given_chunk, int64_t end, int64_t valid,
                           double *results) {
    const typename Rule::Scalars scalars = given; // the compiler sees that no store changes these
    const Chunk chunk = given_chunk;
    Sums sums;
    for (int64_t i = 0, since = 0; i < end; i += W) {
        step<Rule>(scalars, chunk, i, valid, sums);
        if (Rule::sums && ++since == Sums::run) {
            sums.flush(0);
            sums.flush(1);
            since = 0;
        }
    }
    if (chunk.streaming) finish_streaming();
    if constexpr (Rule::sums) {
        results[0] += sums.total(0);
        results[1] += sums.total(1);
    }
}

// The last elements, too few for a group, go through buffers of our own: nothing beyond a tensor is touched.
template <class Rule> void run_tail(const typename Rule::Scalars &scalars, Chunk &chunk, int64_t begin) {
    alignas(64) char buffers[5][4 * W] = {};
    Chunk staged = chunk;
    const int64_t valid = chunk.numel - begin;
    const Span *from[5] = {&chunk.param, &chunk.first, &chunk.second, &chunk.out, &chunk.grad};
    Span *to[5] = {&staged.param, &staged.first, &staged.second, &staged.out, &staged.grad};
    for (int k = 0; k < 5; ++k) {
        if (from[k]->data == nullptr) continue;
        const int64_t w = width(from[k]->type);
        to[k]->data = buffers[k];
        __builtin_memcpy(buffers[k], from[k]->data + begin * w, valid * w);
    }
    staged.position += (uint32_t)begin;
    run<Rule>(scalars, staged, W, valid, chunk.sums);
    if (!chunk.write) return;
    for (int k = 0; k < 4; ++k) { // all but the gradient
        if (from[k]->data == nullptr) continue;
        const int64_t w = width(from[k]->type);
        __builtin_memcpy(from[k]->data + begin * w, buffers[k], valid * w);
    }
}

template <class Rule> void sweep(const typename Rule::Scalars &scalars, Chunk &chunk) {
    const int64_t whole = chunk.numel / W * W;
    chunk.sums[0] = chunk.sums[1] = 0;
    run<Rule>(scalars, chunk, whole, W, chunk.sums);
    if (whole < chunk.numel) run_tail<Rule>(scalars, chunk, whole);
}

void sgd(const SgdScalars &scalars, Chunk &chunk) {
    if (scalars.moving) return sweep<Momentum>(scalars, chunk);
    sweep<Sgd>(scalars, chunk);
}

void squared_norm(Chunk &chunk) {
    const Span grad = chunk.grad;
    const int64_t numel = chunk.numel;
    Sums sums;
    int64_t i = 0;
    while (i + W <= numel) {
        for (int since = 0; since < Sums::run && i + W <= numel; ++since, i += W) sums.add(0, load(grad, i));
        sums.flush(0);
    }
    if (i < numel) {
        alignas(64) char buffer[4 * W] = {};
        __builtin_memcpy(buffer, grad.data + i * width(grad.type), (numel - i) * width(grad.type));
        sums.add(0, load(Span{buffer, grad.type}, 0));
    }
    chunk.sums[0] = sums.total(0);
}

} // namespace

#define DS_HF_JOIN(a, b) a##b
#define DS_HF_KERNELS(isa) DS_HF_JOIN(kernels_, isa)
#define DS_HF_JOIN2(a, b) DS_HF_JOIN(a, b)
#define DS_HF_TEXT(isa) #isa
#define DS_HF_NAME(isa) DS_HF_TEXT(isa)

// Constants only: nothing of an instruction set may run before it was chosen.
extern const ds_hf::Kernels ds_hf::DS_HF_KERNELS(DS_HF_ISA) = {
    DS_HF_NAME(DS_HF_ISA), sweep<Adam>,      sweep<Lion>,  sweep<Adagrad>, sgd, sweep<LambMoments>,
    sweep<LambApply>,      squared_norm,      sweep<OneBitValues>, sweep<OneBitApply>, &DS_HF_JOIN2(block_kernels_, DS_HF_ISA)};
