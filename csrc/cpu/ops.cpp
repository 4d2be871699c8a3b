// The functions of ds_hf_cpu.h: scalars of each op, worked out in double, and the chunks that kernels run over.
#include "ds_hf_cpu.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "ds_hf_onebit.h"
#include "kernels.hpp"
#include "parallel.hpp"

namespace {

using namespace ds_hf;

// Lists shorter than this stay in the caches, where their outs may soon be read.
constexpr int64_t streaming_numel = 1 << 20;

const Kernels *find(const char *isa) {
    const bool best = *isa == 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if ((best || !std::strcmp(isa, "avx512")) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &kernels_avx512;
    // every processor with AVX2 and FMA has F16C, which compilers older than GCC 11 cannot ask for
    if ((best || !std::strcmp(isa, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &kernels_avx2;
#endif
    return best || !std::strcmp(isa, "baseline") ? &kernels_baseline : nullptr;
}

std::atomic<const Kernels *> chosen{nullptr};

bool is(int32_t type, int32_t a, int32_t b, int32_t c = DS_HF_F32) { return type == a || type == b || type == c; }

int32_t check(const ds_hf_lists *lists) {
    if (lists->nbytes != sizeof(ds_hf_lists)) return DS_HF_WRONG_LAYOUT;
    const bool known = is(lists->param_type, DS_HF_F32, DS_HF_BF16, DS_HF_NONE) &&
                       is(lists->moment_type, DS_HF_F32, DS_HF_BF16, DS_HF_NONE) &&
                       (lists->grad_type == DS_HF_NONE || is(lists->grad_type, DS_HF_BF16, DS_HF_F16)) &&
                       (lists->out_type == DS_HF_NONE || is(lists->out_type, DS_HF_BF16, DS_HF_F16));
    return known ? DS_HF_OK : DS_HF_WRONG_TYPE;
}

// A mixer of 64 bits (constants of "splitmix64", S. Vigna, public domain): neighbouring inputs, unrelated outputs.
uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

template <class Pointers> Span span(Pointers list, int64_t entry, int64_t begin, int32_t type) {
    if (list == nullptr) return {nullptr, DS_HF_NONE};
    const int64_t width = type == DS_HF_F32 ? 4 : 2;
    return {static_cast<char *>(const_cast<void *>(static_cast<const void *>(list[entry]))) + begin * width, type};
}

Chunk make_chunk(const ds_hf_lists &lists, int64_t entry, Range elements, bool long_lists) {
    Chunk chunk = {};
    chunk.param = span(lists.params, entry, elements.begin, lists.param_type);
    chunk.grad = span(lists.grads, entry, elements.begin, lists.grad_type);
    chunk.first = span(lists.firsts, entry, elements.begin, lists.moment_type);
    chunk.second = span(lists.seconds, entry, elements.begin, lists.moment_type);
    chunk.out = span(lists.outs, entry, elements.begin, lists.out_type);
    chunk.numel = elements.end - elements.begin;
    chunk.scale = lists.control ? lists.control[0] : 1.0f;
    chunk.write = !(lists.control && lists.control[1] != 0);
    chunk.streaming = long_lists && reinterpret_cast<uintptr_t>(chunk.out.data) % 32 == 0;
    chunk.stochastic = lists.stochastic != 0;
    if (chunk.stochastic) {
        // the upper bits of the position join the key, the kernels count with the lower ones
        const uint64_t upper = static_cast<uint64_t>(elements.begin) >> 32;
        const uint64_t key = mix(mix(lists.seed) ^ mix(static_cast<uint64_t>(entry) << 32 ^ upper));
        chunk.keys[0] = static_cast<uint32_t>(key);
        chunk.keys[1] = static_cast<uint32_t>(key >> 32);
        chunk.position = static_cast<uint32_t>(elements.begin);
    }
    return chunk;
}

// Runs a kernel over all chunks; `scalars(entry)` are its scalars, `sums`, if given, two results for each chunk.
template <class Scalars, class Make>
void run(const ds_hf_lists &lists, void (*kernel)(const Scalars &, Chunk &), const Make &scalars,
         double *sums = nullptr) {
    int64_t numel = 0;
    for (int64_t entry = 0; entry < lists.count; ++entry) numel += lists.numels[entry];
    const bool long_lists = numel >= streaming_numel;
    for_chunks(lists.numels, lists.count, lists.threads, scalars,
               [&](const Scalars &ready, int64_t entry, Range elements, int64_t index) {
                   Chunk chunk = make_chunk(lists, entry, elements, long_lists);
                   kernel(ready, chunk);
                   if (sums) std::memcpy(sums + 2 * index, chunk.sums, sizeof chunk.sums);
               });
}

// Two sums for each chunk of the lists; no std::vector, because the library is linked without libstdc++.
class ChunkSums {
  public:
    explicit ChunkSums(const ds_hf_lists &lists)
        : numel(2 * chunk_count(lists.numels, lists.count)),
          data(static_cast<double *>(std::malloc(sizeof(double) * static_cast<size_t>(numel + 1)))) {}
    ~ChunkSums() { std::free(data); }
    ChunkSums(const ChunkSums &) = delete;
    ChunkSums &operator=(const ChunkSums &) = delete;

    const int64_t numel;
    double *const data;
};

struct Corrections {
    double c1, c2;
};

Corrections corrections(const ds_hf_lists &lists, int64_t entry, double beta1, double beta2, bool wanted) {
    if (!wanted) return {1, 1};
    const double step = *lists.steps[entry];
    return {1 - std::pow(beta1, step), 1 - std::pow(beta2, step)};
}

double trust_ratio(const float *norms, const ds_hf_lamb &args) {
    const double weight = std::sqrt(double(norms[0])), size = std::sqrt(double(norms[1]));
    if (!(weight > 0 && size > 0)) return 1;
    double ratio = weight / size; // nan stays nan
    if (ratio < args.min_coeff) ratio = args.min_coeff;
    if (ratio > args.max_coeff) ratio = args.max_coeff;
    return ratio;
}

LambScalars lamb_scalars(const ds_hf_lamb &args, double rate) {
    return {float(args.beta1), float(1 - args.beta1),     float(args.beta2), float(1 - args.beta2),
            float(args.eps),   float(args.weight_decay), float(rate),       args.eps_inside_sqrt != 0};
}

OneBitScalars onebit_scalars(const ds_hf_onebit &args, const float *floor) {
    return {float(args.beta1), float(1 - args.beta1), float(args.eps), float(1 - args.lr * args.weight_decay),
            float(args.lr),    *floor,                args.eps_inside_sqrt != 0};
}

} // namespace

const Kernels &ds_hf::kernels() {
    const Kernels *now = chosen.load(std::memory_order_acquire);
    if (now == nullptr) chosen.store(now = find(""), std::memory_order_release);
    return *now;
}

int32_t ds_hf_cpu_abi(void) { return DS_HF_CPU_ABI; }

const char *ds_hf_cpu_isa(void) { return kernels().isa; }

int32_t ds_hf_cpu_set_isa(const char *name) {
    const Kernels *found = find(name);
    if (found == nullptr) return 1;
    chosen.store(found, std::memory_order_release);
    return 0;
}

int32_t ds_hf_cpu_adam(const ds_hf_lists *lists, const ds_hf_adam *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ds_hf_adam a = *args;
    run<AdamScalars>(*lists, kernels().adam, [&](int64_t entry) -> AdamScalars {
        const Corrections c = corrections(*lists, entry, a.beta1, a.beta2, a.bias_correction != 0);
        return {float(a.beta1),
                float(1 - a.beta1),
                float(a.beta2),
                float(1 - a.beta2),
                float(a.eps),
                a.decoupled ? float(1 - a.lr * a.weight_decay) : 1.0f,
                a.decoupled ? 0.0f : float(a.weight_decay),
                float(a.lr / c.c1),
                float(1 / c.c2)};
    });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_lion(const ds_hf_lists *lists, const ds_hf_lion *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ds_hf_lion a = *args;
    const LionScalars scalars = {float(a.beta1),     float(1 - a.beta1),             float(a.beta2),
                                 float(1 - a.beta2), float(1 - a.lr * a.weight_decay), float(a.lr)};
    run<LionScalars>(*lists, kernels().lion, [&](int64_t) { return scalars; });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_adagrad(const ds_hf_lists *lists, const ds_hf_adagrad *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ds_hf_adagrad a = *args;
    run<AdagradScalars>(*lists, kernels().adagrad, [&](int64_t entry) -> AdagradScalars {
        const double step = *lists->steps[entry];
        return {float(a.eps), float(a.weight_decay), float(a.lr / (1 + (step - 1) * a.lr_decay))};
    });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_sgd(const ds_hf_lists *lists, const ds_hf_sgd *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ds_hf_sgd a = *args;
    const SgdScalars scalars = {float(a.momentum), float(1 - a.dampening), float(a.weight_decay), float(a.lr),
                                a.momentum != 0,   a.nesterov != 0,        a.first != 0};
    run<SgdScalars>(*lists, kernels().sgd, [&](int64_t) { return scalars; });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_lamb_moments(const ds_hf_lists *lists, const ds_hf_lamb *args, float *norms) {
    if (const int32_t wrong = check(lists)) return wrong;
    const LambScalars scalars = lamb_scalars(*args, 0);
    const ChunkSums sums(*lists);
    if (sums.data == nullptr) return DS_HF_NO_MEMORY;
    run<LambScalars>(*lists, kernels().lamb_moments, [&](int64_t) { return scalars; }, sums.data);
    int64_t chunk = 0;
    for (int64_t entry = 0; entry < lists->count; ++entry) {
        double param = 0, update = 0;
        for (int64_t left = chunk_count(lists->numels + entry, 1); left > 0; --left, ++chunk) {
            param += sums.data[2 * chunk];
            update += sums.data[2 * chunk + 1];
        }
        norms[2 * entry] = float(param);
        norms[2 * entry + 1] = float(update);
    }
    return DS_HF_OK;
}

int32_t ds_hf_cpu_lamb_apply(const ds_hf_lists *lists, const ds_hf_lamb *args, const float *norms) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ds_hf_lamb a = *args;
    run<LambScalars>(*lists, kernels().lamb_apply, [&](int64_t entry) {
        const Corrections c = corrections(*lists, entry, a.beta1, a.beta2, a.bias_correction != 0);
        return lamb_scalars(a, a.lr * std::sqrt(c.c2) / c.c1 * trust_ratio(norms + 2 * entry, a));
    });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_squared_norm(const ds_hf_lists *lists, float *result) {
    if (const int32_t wrong = check(lists)) return wrong;
    const ChunkSums sums(*lists);
    if (sums.data == nullptr) return DS_HF_NO_MEMORY;
    struct Nothing {};
    void (*const norm)(Chunk &) = kernels().squared_norm;
    for_chunks(lists->numels, lists->count, lists->threads, [](int64_t) { return Nothing{}; },
               [&](const Nothing &, int64_t entry, Range elements, int64_t index) {
                   Chunk chunk = make_chunk(*lists, entry, elements, false);
                   norm(chunk);
                   sums.data[2 * index] = chunk.sums[0];
               });
    double total = 0;
    for (int64_t chunk = 0; chunk < sums.numel; chunk += 2) total += sums.data[chunk];
    *result = float(total);
    return DS_HF_OK;
}

int32_t ds_hf_cpu_onebit_abi(void) { return DS_HF_ONEBIT_ABI; }

int32_t ds_hf_cpu_onebit_values(const ds_hf_lists *lists, const ds_hf_onebit *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    run<OneBitScalars>(*lists, kernels().onebit_values,
                       [&](int64_t entry) { return onebit_scalars(*args, lists->steps[entry]); });
    return DS_HF_OK;
}

int32_t ds_hf_cpu_onebit_apply(const ds_hf_lists *lists, const ds_hf_onebit *args) {
    if (const int32_t wrong = check(lists)) return wrong;
    run<OneBitScalars>(*lists, kernels().onebit_apply,
                       [&](int64_t entry) { return onebit_scalars(*args, lists->steps[entry]); });
    return DS_HF_OK;
}
