// LAMB of whole parameters in one launch, with what the first pass computed kept on the chip for the second.
//
// Entries form groups. All blocks make the first pass over a group and add up its norms; when the last of them is done,
// each makes the second pass over its own tiles, the last first. Between, a block begins with the next group, so that
// memory does not rest while blocks wait. Shared memory is cut into slots of a tile in fp32:
//
//   slots 0 .. main - 1: directions of the group's last tiles from the front, their params, where there is room left,
//     from the back; then 2 * AHEAD slots: directions of tiles begun ahead, of even groups and of odd ones.
//
// Registers hold the directions of HELD further tiles, the very last. What has no slot is read again. Blocks wait for
// one another: the launch must be cooperative. table.extra: groups, slots of `main`, the number of this launch.
// `counters`: for each group how many blocks have finished its first pass, 0 between launches; COUNTERS further, for
// each, the last launch whose rates are there.
#include "lamb.cuh"

#ifndef DS_AHEAD
#define DS_AHEAD 1
#endif
#ifndef DS_HELD
#define DS_HELD 0
#endif
constexpr u32 AHEAD = DS_AHEAD, HELD = DS_HELD, NO_SLOT = ~0u, REGISTERS = 1u << 16;
constexpr u32 COUNTERS = 1024;  // as in ops/cuda_launch.py
constexpr u32 AT_ONCE = 8;  // sums a thread reads before it adds them: all blocks wait for this

// What all of this kernel's functions need.
struct Job {
  const Table& table;
  double2* parts;
  float* rates;
  u32* arrived;
  u32* ready;
  float* slots;
  double* of_warps;
  Lamb rule;
  float scale;
};

// Directions of the last tiles. Its indices must be known to the compiler.
struct Held {
  float values[HELD ? HELD : 1][ITEMS];
};

// A group, and this block's tiles of it: first, first + gridDim.x, ...
struct Group {
  u32 number, begin, end;  // entries
  u32 tiles, first, count;
};

__device__ __forceinline__ Group group_at(const Table& table, u32 number) {
  Group group;
  group.number = number;
  group.begin = number ? table.group_end[number - 1] : 0;
  group.end = table.group_end[number];
  const u32 begin = table.first_tile[group.begin], end = end_tile(table, group.end - 1);
  group.tiles = end - begin;
  group.first = begin + (blockIdx.x + gridDim.x - begin % gridDim.x) % gridDim.x;
  group.count = group.first < end ? (end - group.first + gridDim.x - 1) / gridDim.x : 0;
  return group;
}

__device__ __forceinline__ u32 slot_of_directions(const Job& job, const Group& group, u32 which) {
  const u32 main = job.table.extra[1], from_end = group.count - 1 - which;
  if (which < AHEAD) return main + group.number % 2 * AHEAD + which;
  if (from_end < HELD) return REGISTERS + from_end;
  return from_end - HELD < main ? from_end - HELD : NO_SLOT;
}

__device__ __forceinline__ u32 slot_of_params(const Job& job, const Group& group, u32 which) {
  const u32 main = job.table.extra[1], from_end = group.count - 1 - which;
  const u32 taken = group.count > AHEAD + HELD ? group.count - AHEAD - HELD : 0;
  return which >= AHEAD && taken < main && from_end < main - taken ? main - 1 - from_end : NO_SLOT;
}

__device__ __forceinline__ void keep(const Job& job, Held& held, u32 slot, const float (&values)[ITEMS]) {
  if (slot == NO_SLOT) return;
  if (HELD && slot >= REGISTERS) {
#pragma unroll
    for (u32 which = 0; which < HELD; ++which) {
#pragma unroll
      for (u32 item = 0; item < ITEMS; ++item) {
        if (slot == REGISTERS + which) held.values[which][item] = values[item];
      }
    }
    return;
  }
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) job.slots[slot * TILE + item * THREADS + threadIdx.x] = values[item];
}

__device__ __forceinline__ void recall(const Job& job, const Held& held, u32 slot, float (&values)[ITEMS]) {
  if (HELD && slot >= REGISTERS) {
#pragma unroll
    for (u32 which = 0; which < HELD; ++which) {
#pragma unroll
      for (u32 item = 0; item < ITEMS; ++item) {
        if (slot == REGISTERS + which) values[item] = held.values[which][item];
      }
    }
    return;
  }
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) values[item] = job.slots[slot * TILE + item * THREADS + threadIdx.x];
}

__device__ __forceinline__ u32 read_acquire(const u32* from) {
#ifdef __CUDA_ARCH__
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#else
  return *from;
#endif
}

__device__ __forceinline__ void first_pass_of(const Job& job, Held& held, const Group& group, u32 which,
                                              Sums& sums) {
  const u32 at = group.first + which * gridDim.x;
  const Tile tile = tile_at(job.table, at, sums.entry);
  if (tile.entry != sums.entry) {
    sums.write(job.parts, job.of_warps);
    sums.begin(tile.entry, at);
  }
  const u32 directions_in = slot_of_directions(job, group, which);
  const Moments moments = directions_in == NO_SLOT ? Moments::stored_for_now : Moments::stored_for_long;
  float params[ITEMS], directions[ITEMS];
  if (tile.left == TILE && all_aligned(job.table, tile.entry)) {
    first_pass<true>(job.table, tile, job.rule, job.scale, moments, sums, params, directions);
  } else {
    first_pass<false>(job.table, tile, job.rule, job.scale, moments, sums, params, directions);
  }
  keep(job, held, directions_in, directions);
  keep(job, held, slot_of_params(job, group, which), params);
}

// The last block to arrive computes the rates: a warp for each entry.
__device__ __forceinline__ void compute_rates(const Job& job, const Group& group) {
  for (u32 entry = group.begin + threadIdx.x / 32; entry < group.end; entry += THREADS / 32) {
    const u32 begin = job.table.first_tile[entry], tiles = end_tile(job.table, entry) - begin;
    const u32 count = tiles < gridDim.x ? tiles : gridDim.x;
    double params = 0, directions = 0;
    for (u32 round = threadIdx.x % 32; round < count; round += 32 * AT_ONCE) {
      double2 sums[AT_ONCE];
#pragma unroll
      for (u32 which = 0; which < AT_ONCE; ++which) {
        const u32 part = round + 32 * which;
        sums[which] = part < count ? __ldcg(job.parts + begin + part) : make_double2(0, 0);
      }
#pragma unroll
      for (u32 which = 0; which < AT_ONCE; ++which) {
        params += sums[which].x;
        directions += sums[which].y;
      }
    }
    params = warp_sum(params);
    directions = warp_sum(directions);
    // Through fp32, as the norms that lamb_moments_ returns.
    if (threadIdx.x % 32 == 0) job.rates[entry] = rate_of(job.table, entry, (float)params, (float)directions);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicExch(job.ready + group.number, job.table.extra[2]);
  }
}

// Whether this is the last of `blocks` blocks to come here; it sees what the others wrote. The counter is 0 again then.
// Every thread must come here.
__device__ __forceinline__ bool last_to_arrive(u32* counter, u32 blocks, u32* last /* shared */) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *last = atomicInc(counter, blocks - 1) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return *last;
}

__device__ __forceinline__ void arrive(const Job& job, const Group& group, u32* last /* shared */) {
  const u32 blocks = group.tiles < gridDim.x ? group.tiles : gridDim.x;
  if (last_to_arrive(job.arrived + group.number, blocks, last)) compute_rates(job, group);
}

__device__ __forceinline__ void wait_for_rates(const Job& job, const Group& group) {
  if (threadIdx.x == 0) {
    while (read_acquire(job.ready + group.number) != job.table.extra[2]) __nanosleep(32);
    __threadfence();
  }
  __syncthreads();
}

template <bool WHOLE>
__device__ __forceinline__ void second_pass(const Job& job, const Held& held, const Tile& tile, float rate,
                                            u32 params_in, u32 directions_in) {
  float params[ITEMS], directions[ITEMS];
  if (params_in == NO_SLOT) {
    read_params<WHOLE>(job.table, tile, params);
  } else {
    recall(job, held, params_in, params);
  }
  if (directions_in == NO_SLOT) {
    read_directions<WHOLE>(job.table, tile, job.rule, params, directions);
  } else {
    recall(job, held, directions_in, directions);
  }
  write_params<WHOLE>(job.table, tile, rate, params, directions);
}

__device__ __forceinline__ void second_pass_of(const Job& job, const Held& held, const Group& group) {
  u32 entry = ~0u;
  float rate = 0;
  for (u32 which = group.count; which-- > 0;) {
    const Tile tile = tile_at(job.table, group.first + which * gridDim.x, entry);
    if (tile.entry != entry) {
      entry = tile.entry;
      rate = __ldcg(job.rates + entry);  // its line may have been in L1 before another rate came
    }
    const u32 params_in = slot_of_params(job, group, which), directions_in = slot_of_directions(job, group, which);
    if (tile.left == TILE && all_aligned(job.table, tile.entry)) {
      second_pass<true>(job, held, tile, rate, params_in, directions_in);
    } else {
      second_pass<false>(job, held, tile, rate, params_in, directions_in);
    }
  }
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS)
    lamb_fused(const __grid_constant__ Table table, double2* parts, float* rates, u32* counters) {
  DS_SHARED(double, of_warps, 2 * DS_THREADS / 32);
  DS_SHARED(u32, last, 1);
  DS_DYNAMIC(slots);
  if (table.control && table.control[1] != 0) return;  // all blocks do
  const u32 groups = table.extra[0];
  Job job{table, parts, rates, counters, counters + COUNTERS, (float*)slots, of_warps, {}, 1};
  job.rule.prepare(table.scalars, table.flags);
  if (table.control) job.scale = table.control[0];
  Held held;
  Sums sums;
  u32 done = 0;
  for (u32 number = 0; number < groups; ++number) {
    const Group group = group_at(table, number);
    for (u32 which = done; which < group.count; ++which) first_pass_of(job, held, group, which, sums);
    sums.write(parts, of_warps);
    if (group.count) arrive(job, group, last);
    done = 0;
    if (number + 1 < groups) {
      const Group next = group_at(table, number + 1);
      for (; done < AHEAD && done < next.count; ++done) first_pass_of(job, held, next, done, sums);
    }
    if (!group.count) continue;
    wait_for_rates(job, group);
    second_pass_of(job, held, group);
  }
}
