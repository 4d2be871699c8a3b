#include "parallel.hpp"

#include <atomic>

#include <omp.h>
#include <pthread.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ds_hf {

namespace {

std::atomic<bool> watching{false}, forked{false};

void watch_forks() {
    if (!watching.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

} // namespace

#if defined(__x86_64__)
KeepDenormals::KeepDenormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ & ~0x8040u); }
KeepDenormals::~KeepDenormals() { _mm_setcsr(mode_); }
#else
KeepDenormals::KeepDenormals() : mode_(0) {}
KeepDenormals::~KeepDenormals() { (void)mode_; }
#endif

int64_t chunk_count(const int64_t *numels, int64_t count) {
    int64_t chunks = 0;
    for (int64_t entry = 0; entry < count; ++entry) chunks += (numels[entry] + chunk_numel - 1) / chunk_numel;
    return chunks;
}

int useful_threads(const int64_t *numels, int64_t count, int wanted) {
    int64_t numel = 0;
    for (int64_t entry = 0; entry < count; ++entry) numel += numels[entry];
    const int64_t worth = numel / least_numel;
    return worth < wanted ? (worth < 1 ? 1 : static_cast<int>(worth)) : wanted;
}

void share(int64_t chunks, int threads, void (*work)(void *, Range), void *context) {
    // Without the runtime where one thread is enough: in a forked child it would wait for threads that are gone.
    if (threads <= 1 || forked) return work(context, {0, chunks});
    watch_forks();
#pragma omp parallel num_threads(threads)
    {
        const int64_t mine = omp_get_thread_num(), all = omp_get_num_threads();
        work(context, {chunks * mine / all, chunks * (mine + 1) / all});
    }
}

} // namespace ds_hf
