// Stand-ins for what is CUDA's, so that csrc/cuda compiles as C++ and runs on the host: each thread of a launch is a
// fiber, and fibers change where threads wait for each other and, at random, where they access memory. Blocks are all
// there at once, as in a cooperative launch. Included in front of a kernel's program by cuda_emulator.py.
#pragma once
// Plain C headers: those of the C++ library would take longer to compile than the kernels.
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

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

struct Warp {
  double values[32];
  unsigned arrived, phase;
};

struct Block {
  Index index;
  unsigned arrived, phase;
  void* shared[8];  // for each place in the source that asks for some
  uint4* dynamic;
  Warp warps[32];
};

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it paused: swapcontext would ask the kernel for signal masks each time
  bool begun;
  Index index;
  Block* block;
  bool done;
};

typedef void (*Body)(void** arguments);

constexpr size_t STACK = 128 << 10;
inline jmp_buf scheduler;
inline Fiber* running;
inline Index grid, block_dim;
inline Body body;
inline void** arguments;

inline void pause() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

inline void go_on(Fiber* fiber) {
  running = fiber;
  if (_setjmp(scheduler)) return;
  if (fiber->begun) _longjmp(fiber->place, 1);
  fiber->begun = true;
  setcontext(&fiber->context);
}

// Now and then a thread stops here and others go on, so that a missing barrier shows.
inline void maybe_pause() {
  static unsigned random = 1;
  random = random * 1664525u + 1013904223u;
  if (random >> 28 == 0) pause();
}

inline void entry() {
  body(arguments);
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

inline unsigned votes(bool mine) {
  auto& warp = running->block->warps[running->index.x / 32];
  warp.values[running->index.x % 32] = mine;
  wait(warp.arrived, warp.phase, 32);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) result |= (unsigned)(warp.values[lane] != 0) << lane;
  wait(warp.arrived, warp.phase, 32);
  return result;
}

// Memory of which nothing was written yet is nan.
inline void* fresh(size_t nbytes) {
  void* memory = aligned_alloc(16, (nbytes + 31) / 16 * 16);
  return memset(memory, 0xff, nbytes);
}

inline void* shared(int site, size_t nbytes) {
  if (site >= 8) abort();
  void*& memory = running->block->shared[site];
  if (!memory) memory = fresh(nbytes);
  return memory;
}

inline bool schedule(Fiber* fibers, unsigned count) {
  for (unsigned rounds = 0; rounds < 200000; ++rounds) {
    bool any = false;
    for (unsigned at = 0; at < count; ++at) {
      if (fibers[at].done) continue;
      any = true;
      go_on(fibers + at);
    }
    if (!any) return true;
  }
  return false;  // threads wait for what never comes
}

inline int run(unsigned blocks, unsigned threads, size_t dynamic, Body kernel, void** with) {
  const unsigned count = blocks * threads;
  Block* all = (Block*)calloc(blocks, sizeof(Block));
  Fiber* fibers = (Fiber*)calloc(count, sizeof(Fiber));
  static char* stacks;  // kept: pages that are given back have to be made again
  static unsigned most;
  if (count > most) stacks = (char*)realloc(stacks, (most = count) * STACK);
  grid = {blocks};
  block_dim = {threads};
  body = kernel;
  arguments = with;
  for (unsigned at = 0; at < count; ++at) {
    Fiber& fiber = fibers[at];
    fiber.index = {at % threads};
    fiber.block = all + at / threads;
    fiber.block->index = {at / threads};
    if (at % threads == 0) fiber.block->dynamic = (uint4*)fresh(dynamic);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + at * STACK;
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, entry, 0);
  }
  const bool ended = schedule(fibers, count);
  for (unsigned block = 0; block < blocks; ++block) {
    for (void* memory : all[block].shared) free(memory);
    free(all[block].dynamic);
  }
  free(fibers);
  free(all);
  return ended ? 0 : 1;
}

}  // namespace emulated

#define threadIdx (emulated::running->index)
#define blockIdx (emulated::running->block->index)
#define gridDim (emulated::grid)
#define blockDim (emulated::block_dim)
#define DS_SHARED(type, name, count) type* name = (type*)emulated::shared(__COUNTER__, sizeof(type) * (count))
#define DS_DYNAMIC(name) uint4* name = emulated::running->block->dynamic

inline void __syncthreads() { emulated::wait_block(); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulated::pause(); }
inline void __threadfence_block() {}
inline unsigned __ballot_sync(unsigned, bool mine) { return emulated::votes(mine); }
inline void __syncwarp() { emulated::votes(false); }
inline unsigned __shfl_sync(unsigned, unsigned value, unsigned from) { return (unsigned)emulated::exchange(value, from); }
inline int __ffs(unsigned value) { return __builtin_ffs((int)value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline double __shfl_xor_sync(unsigned, double value, int mask) {
  return emulated::exchange(value, (emulated::running->index.x % 32) ^ mask);
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  emulated::maybe_pause();
  const unsigned before = *to;
  *to += value;
  return before;
}
inline unsigned atomicInc(unsigned* to, unsigned limit) {
  emulated::maybe_pause();
  const unsigned before = *to;
  *to = before >= limit ? 0 : before + 1;
  return before;
}
inline unsigned atomicExch(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to = value;
  return before;
}
template <class T>
T __ldcs(const T* from) {
  if ((size_t)from % sizeof(T)) abort();  // misaligned, which a GPU does not allow
  emulated::maybe_pause();
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  if ((size_t)to % sizeof(T)) abort();
  emulated::maybe_pause();
  *to = value;
}
template <class T>
T __ldcg(const T* from) {
  return __ldcs(from);
}

typedef float emulated_floats __attribute__((vector_size(16)));
typedef short emulated_halves __attribute__((vector_size(16)));
inline float host_half_to_float(unsigned short value) {
  return __builtin_ia32_vcvtph2ps(emulated_halves{(short)value})[0];
}
inline unsigned short host_float_to_half(float value) {
  return (unsigned short)__builtin_ia32_vcvtps2ph(emulated_floats{value}, 0)[0];
}
