// Stand-ins for what is CUDA's, so that csrc/cuda compiles as C++ and runs on the host: each thread of a launch is a
// fiber, and fibers change where threads wait for each other and, at random, where they access memory. Blocks are all
// there at once, as in a cooperative launch. Included in front of a kernel's program by cuda_emulator.py.
#pragma once
#include <immintrin.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }

namespace emulated {

struct Index {
  unsigned x;
};

struct Block {
  Index index;
  unsigned arrived = 0, phase = 0;
  std::map<int, std::vector<uint4>> shared;
  std::vector<uint4> dynamic;
  struct Warp {
    double values[32];
    unsigned arrived = 0, phase = 0;
  };
  std::vector<Warp> warps;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index index;
  Block* block = nullptr;
  bool done = false;
};

constexpr size_t STACK = 128 << 10;
inline ucontext_t scheduler;
inline Fiber* running;
inline Index grid, block_dim;
inline const std::function<void()>* body;

inline void pause() { swapcontext(&running->context, &scheduler); }

// Now and then a thread stops here and others go on, so that a missing barrier shows.
inline void maybe_pause() {
  static unsigned random = 1;
  random = random * 1664525u + 1013904223u;
  if (random >> 28 == 0) pause();
}

inline void entry() {
  (*body)();
  running->done = true;
  pause();
}

inline void wait(unsigned& arrived, unsigned& phase, unsigned wanted) {
  const unsigned mine = phase;
  if (++arrived == wanted) {
    arrived = 0;
    ++phase;
    return;
  }
  while (phase == mine) pause();
}

inline void wait_block() { wait(running->block->arrived, running->block->phase, block_dim.x); }

inline double exchange(double value, unsigned with) {
  const unsigned lane = running->index.x % 32;
  auto& warp = running->block->warps[running->index.x / 32];
  warp.values[lane] = value;
  wait(warp.arrived, warp.phase, 32);
  const double result = warp.values[with];
  wait(warp.arrived, warp.phase, 32);
  return result;
}

inline void* shared(int site, size_t nbytes) {
  auto& memory = running->block->shared[site];
  if (memory.empty()) {
    memory.resize((nbytes + 15) / 16);
    std::memset(memory.data(), 0xff, nbytes);  // nan: what nobody wrote shows
  }
  return memory.data();
}

inline int run(unsigned blocks, unsigned threads, size_t dynamic, const std::function<void()>& kernel) {
  std::vector<Block> all(blocks);
  std::vector<Fiber> fibers(blocks * threads);
  grid = {blocks};
  block_dim = {threads};
  body = &kernel;
  for (unsigned at = 0; at < fibers.size(); ++at) {
    Block& block = all[at / threads];
    block.index = {at / threads};
    block.warps.resize(threads / 32);
    block.dynamic.resize((dynamic + 15) / 16, uint4{~0u, ~0u, ~0u, ~0u});
    Fiber& fiber = fibers[at];
    fiber.index = {at % threads};
    fiber.block = &block;
    fiber.stack = std::make_unique<char[]>(STACK);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, entry, 0);
  }
  for (unsigned rounds = 0;; ++rounds) {
    if (rounds > 200000) return 1;  // threads wait for what never comes
    bool any = false;
    for (Fiber& fiber : fibers) {
      if (fiber.done) continue;
      any = true;
      running = &fiber;
      swapcontext(&scheduler, &fiber.context);
    }
    if (!any) return 0;
  }
}

}  // namespace emulated

#define threadIdx (emulated::running->index)
#define blockIdx (emulated::running->block->index)
#define gridDim (emulated::grid)
#define blockDim (emulated::block_dim)
#define DS_SHARED(type, name, count) type* name = (type*)emulated::shared(__COUNTER__, sizeof(type) * (count))
#define DS_DYNAMIC(name) uint4* name = emulated::running->block->dynamic.data()

inline void __syncthreads() { emulated::wait_block(); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulated::pause(); }
inline double __shfl_xor_sync(unsigned, double value, int mask) {
  return emulated::exchange(value, (emulated::running->index.x % 32) ^ mask);
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  emulated::maybe_pause();
  const unsigned before = *to;
  *to += value;
  return before;
}
inline unsigned atomicExch(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to = value;
  return before;
}
template <class T>
T __ldcs(const T* from) {
  if ((size_t)from % sizeof(T)) std::abort();  // misaligned, which a GPU does not allow
  emulated::maybe_pause();
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  if ((size_t)to % sizeof(T)) std::abort();
  emulated::maybe_pause();
  *to = value;
}
template <class T>
T __ldcg(const T* from) {
  return __ldcs(from);
}

inline float host_half_to_float(unsigned short value) { return _cvtsh_ss(value); }
inline unsigned short host_float_to_half(float value) { return _cvtss_sh(value, 0); }
