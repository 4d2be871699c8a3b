// Divides lists of tensors into chunks and chunks among threads.
//
// Chunks have a fixed length and each thread gets a run of neighbours, so that results never depend on the number of
// threads. Threads are OpenMP's, of the runtime that torch has loaded (CMakeLists.txt links none): one pool serves
// both. That pool does not survive fork(), so a forked child works on its own thread only.
#pragma once

#include <stdint.h>

namespace ds_hf {

constexpr int64_t chunk_numel = 8192; // a multiple of every vector; 28 bytes each of them are a part of an L2 cache
constexpr int64_t least_numel = 32768; // fewer for each thread and starting threads takes longer than the work

struct Range {
    int64_t begin, end;
};

// Denormals are kept, whatever mode the calling thread or a thread of the pool is in.
class KeepDenormals {
  public:
    KeepDenormals();
    ~KeepDenormals();
    KeepDenormals(const KeepDenormals &) = delete;
    KeepDenormals &operator=(const KeepDenormals &) = delete;

  private:
    unsigned mode_;
};

int64_t chunk_count(const int64_t *numels, int64_t count);

// How many threads the work is worth, at most `wanted`.
int useful_threads(const int64_t *numels, int64_t count, int wanted);

// Calls work(context, chunks) on each thread with the chunks that are its share.
void share(int64_t chunks, int threads, void (*work)(void *, Range), void *context);

// For each chunk: on_entry(entry) when another entry begins on this thread, then on_chunk(entry, elements, chunk).
// `OnEntry` returns what it has worked out for the entry, which on_chunk gets as its first argument.
template <class OnEntry, class OnChunk>
void for_chunks(const int64_t *numels, int64_t count, int threads, const OnEntry &on_entry, const OnChunk &on_chunk) {
    struct Context {
        const int64_t *numels;
        int64_t count;
        const OnEntry &on_entry;
        const OnChunk &on_chunk;
    } context = {numels, count, on_entry, on_chunk};
    const auto work = [](void *opaque, Range chunks) {
        const Context &c = *static_cast<Context *>(opaque);
        KeepDenormals keep;
        int64_t before = 0; // chunks of earlier entries
        for (int64_t entry = 0; entry < c.count && before < chunks.end; ++entry) {
            const int64_t own = chunk_count(c.numels + entry, 1);
            if (own > 0 && before + own > chunks.begin) {
                auto state = c.on_entry(entry);
                const int64_t last = before + own < chunks.end ? before + own : chunks.end;
                for (int64_t chunk = before > chunks.begin ? before : chunks.begin; chunk < last; ++chunk) {
                    const int64_t begin = (chunk - before) * chunk_numel, left = c.numels[entry] - begin;
                    c.on_chunk(state, entry, Range{begin, begin + (left < chunk_numel ? left : chunk_numel)}, chunk);
                }
            }
            before += own;
        }
    };
    share(chunk_count(numels, count), useful_threads(numels, count, threads), work, &context);
}

} // namespace ds_hf
