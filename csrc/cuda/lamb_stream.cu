// LAMB of whole parameters in one launch, in which memory does not rest while blocks wait for one another.
//
// A block makes the first pass over its tiles one after another, and the second over them in the same order, some tiles
// behind: in each step it issues the loads of a tile for the first pass, makes the second pass over an older one
// meanwhile, and then computes. A tile's second pass is due AHEAD steps after the last tile of its entry. Until then
// its directions lie in a slot: in shared memory, or in registers (HELD slots); without one they are computed again.
// The last tiles' params have slots too, if there are any left.
//
// Warps do not wait for each other either. One more warp of each block, behind the THREADS that share tiles, adds up
// what the others have summed over an entry and sends it to all blocks; it adds up what all of them sent, in the same
// order everywhere, and tells its own block the rate. So the launch must be cooperative. table.extra: slots in shared
// memory, the number of this launch. `messages`: two for each block of each entry.
#include "lamb.cuh"

#ifndef DS_HELD
#define DS_HELD 0
#endif
constexpr u32 AHEAD = 2, HELD = DS_HELD;
constexpr u32 WARPS = THREADS / 32, ALL = 0xffffffffu, NO_SLOT = ~0u;
constexpr u32 BUFFERS = 4;  // entries whose sums the warps of a block may be about to add up
constexpr u32 AT_ONCE = 5;  // messages of each kind that a thread reads before it adds them

// A block's tiles of one entry, up to `end`. A block's tiles are numbered from 0 on, and so are its runs.
struct Run {
  u32 entry, end;
};
constexpr u32 ALIGNED = 1u << 31;  // in `entry`: all of its tensors are

// In shared memory.
struct Shared {
  double2 sums[BUFFERS][WARPS];  // of squares of params and of directions
  u64 rates[DS_CAPACITY];        // of runs, as messages of launch 1
  Run runs[DS_CAPACITY];
  u32 filled[BUFFERS];   // by so many warps, of all runs that have had this buffer
  u32 emptied[BUFFERS];  // of so many runs' sums
};

// What all of this kernel's functions need.
struct Job {
  const Table& table;
  u64* messages;
  uint4* slots;
  Shared* shared;
  const Lamb& rule;  // of the launch: operands need no registers
  float scale;
};

// By one warp.
__device__ __forceinline__ void write_runs(const Table& table, Run* runs) {
  const u32 lane = threadIdx.x % 32;
  u32 number = 0;
  for (u32 begin = 0; begin < table.entries; begin += 32) {
    const u32 entry = begin + lane < table.entries ? begin + lane : table.entries - 1;
    // So many of the tiles before are this block's: blocks take them in turn.
    const u32 before = (table.first_tile[entry] + gridDim.x - 1 - blockIdx.x) / gridDim.x;
    const u32 end = (end_tile(table, entry) + gridDim.x - 1 - blockIdx.x) / gridDim.x;
    const bool any = begin + lane < table.entries && before < end;
    const u32 those = __ballot_sync(ALL, any);
    const u32 flag = all_aligned(table, entry) ? ALIGNED : 0;
    if (any) runs[number + __popc(those & ((1u << lane) - 1))] = {entry | flag, end};
    number += __popc(those);
  }
}

// The run is read again each time: that costs less than the registers to remember all this.
struct Place {
  Tile tile;
  bool whole;
};

__device__ __forceinline__ Place place_of(const Job& job, u32 run, u32 index) {
  const u32 entry = *(volatile u32*)&job.shared->runs[run].entry;
  Place place;
  place.tile.entry = entry & ~ALIGNED;
  place.tile.begin = (i64)(blockIdx.x + index * gridDim.x - job.table.first_tile[place.tile.entry]) * TILE;
  const i64 left = job.table.numel[place.tile.entry] - place.tile.begin;
  place.tile.left = left < (i64)TILE ? (u32)left : TILE;
  place.whole = left >= (i64)TILE && entry & ALIGNED;
  return place;
}

// ---- slots: all warps of a block give the same ones away, each for itself

// Lane `slot` of a warp knows whose the slot is.
struct Slots {
  u32 owner = 0;

  static __device__ __forceinline__ u32 tag(u32 tile, bool params) { return 2 * (tile + 1) + params; }

  // Those of tiles before `done` are free again.
  __device__ __forceinline__ u32 free(u32 slots, u32 done) const {
    return __ballot_sync(ALL, threadIdx.x % 32 < slots && owner / 2 <= done);
  }

  __device__ __forceinline__ u32 take(u32 free, u32 tag) {
    const u32 slot = __ffs(free) - 1;  // NO_SLOT if there is none
    if (threadIdx.x % 32 == slot) owner = tag;
    return slot;
  }

  __device__ __forceinline__ u32 of(u32 tag) const { return __ffs(__ballot_sync(ALL, owner == tag)) - 1; }
};

// Indices must be known to the compiler.
struct Held {
  float values[HELD ? HELD : 1][ITEMS];
};

constexpr u32 WORDS = ITEMS / 4;  // 16 bytes each, of fp32

__device__ __forceinline__ bool in_registers(const Job& job, u32 slot) {
  return HELD && slot - job.table.extra[0] < HELD;
}

__device__ __forceinline__ void keep(const Job& job, Held& held, u32 slot, const float (&values)[ITEMS]) {
  if (slot == NO_SLOT) return;
  if (in_registers(job, slot)) {
#pragma unroll
    for (u32 which = 0; which < HELD; ++which) {
#pragma unroll
      for (u32 item = 0; item < ITEMS; ++item) {
        if (slot == job.table.extra[0] + which) held.values[which][item] = values[item];
      }
    }
    return;
  }
#pragma unroll
  for (u32 word = 0; word < WORDS; ++word) {
    uint4 value;
    memcpy(&value, values + 4 * word, 16);
    job.slots[(slot * WORDS + word) * THREADS + threadIdx.x] = value;
  }
}

__device__ __forceinline__ void recall(const Job& job, const Held& held, u32 slot, float (&values)[ITEMS]) {
  if (in_registers(job, slot)) {
#pragma unroll
    for (u32 which = 0; which < HELD; ++which) {
#pragma unroll
      for (u32 item = 0; item < ITEMS; ++item) {
        if (!which || slot == job.table.extra[0] + which) values[item] = held.values[which][item];
      }
    }
    return;
  }
#pragma unroll
  for (u32 word = 0; word < WORDS; ++word) {
    const uint4 value = job.slots[(slot * WORDS + word) * THREADS + threadIdx.x];
    memcpy(values + 4 * word, &value, 16);
  }
}

// ---- sums and rates

__device__ __forceinline__ u64* messages_of(const Job& job, u32 entry, u32 block) {
  return job.messages + 2 * ((u64)entry * gridDim.x + block);
}

// A warp has made the first pass over a run.
__device__ __forceinline__ void finish(const Job& job, u32 run, const Sums& sums) {
  Shared& shared = *job.shared;
  const u32 buffer = run % BUFFERS, round = run / BUFFERS;
  const double params = warp_sum((double)sums.params), directions = warp_sum((double)sums.directions);
  if (threadIdx.x % 32) return;
  while (*(volatile u32*)&shared.emptied[buffer] < round) __nanosleep(20);
  shared.sums[buffer][threadIdx.x / 32] = make_double2(params, directions);
  __threadfence_block();
  atomicAdd(&shared.filled[buffer], 1);
}

// The block's sums of a run, once all warps have them, to all blocks.
__device__ __forceinline__ void send_sums(const Job& job, u32 run, u32 entry) {
  Shared& shared = *job.shared;
  const u32 lane = threadIdx.x % 32, buffer = run % BUFFERS, round = run / BUFFERS;
  while (*(volatile u32*)&shared.filled[buffer] < (round + 1) * WARPS) __nanosleep(20);
  __threadfence_block();
  const double2 both = lane < WARPS ? shared.sums[buffer][lane] : make_double2(0, 0);
  const double params = warp_sum(both.x), directions = warp_sum(both.y);
  if (lane) return;
  *(volatile u32*)&shared.emptied[buffer] = round + 1;
  const u32 block = (blockIdx.x + gridDim.x - job.table.first_tile[entry] % gridDim.x) % gridDim.x;
  u64* to = messages_of(job, entry, block);  // the block of the entry's first tile is 0 here
  send(to, message_of((float)params, job.table.extra[1]));
  send(to + 1, message_of((float)directions, job.table.extra[1]));
}

// The sums of all blocks that have tiles of an entry, as each thread of the warp gets them.
__device__ __forceinline__ double2 receive_sums(const Job& job, u32 entry, u32 blocks) {
  const u32 launch = job.table.extra[1];
  double params = 0, directions = 0;
  for (u32 begin = 0; begin < blocks; begin += 32 * AT_ONCE) {
    u64 words[AT_ONCE][2];
    for (bool all = false; !all;) {
      all = true;
#pragma unroll
      for (u32 which = 0; which < AT_ONCE; ++which) {
        const u32 block = begin + 32 * which + threadIdx.x % 32;
        const u64* from = messages_of(job, entry, block < blocks ? block : 0);
        words[which][0] = look(from);
        words[which][1] = look(from + 1);
      }
#pragma unroll
      for (u32 which = 0; which < AT_ONCE; ++which) {
        all = all && came(words[which][0], launch) && came(words[which][1], launch);
      }
      if (!all) __nanosleep(20);
    }
#pragma unroll
    for (u32 which = 0; which < AT_ONCE; ++which) {
      if (begin + 32 * which + threadIdx.x % 32 < blocks) {
        params += value_of(words[which][0]);
        directions += value_of(words[which][1]);
      }
    }
  }
  return make_double2(warp_sum(params), warp_sum(directions));
}

// What the last warp of a block does: for one run after another it finds out the rate.
__device__ __forceinline__ void find_rates(const Job& job, u32 count) {
  const Table& table = job.table;
  for (u32 run = 0, end = 0; end < count; ++run) {
    const u32 entry = job.shared->runs[run].entry & ~ALIGNED;
    end = job.shared->runs[run].end;
    const u32 tiles = end_tile(table, entry) - table.first_tile[entry];
    const double base = base_rate_of(table, entry);
    send_sums(job, run, entry);
    const double2 squares = receive_sums(job, entry, tiles < gridDim.x ? tiles : gridDim.x);
    // Through fp32, as the norms that lamb_moments_ returns.
    const double ratio = Lamb::trust_ratio(table.scalars, (float)squares.x, (float)squares.y);
    if (threadIdx.x % 32 == 0) *(volatile u64*)&job.shared->rates[run] = message_of((float)(base * ratio), 1);
  }
}

__device__ __forceinline__ float wait_for_rate(const Job& job, u32 run) {
  const volatile u64* from = &job.shared->rates[run];
  u64 message = *from;
  while (!came(message, 1)) {
    __nanosleep(20);
    message = *from;
  }
  return value_of(message);
}

// ---- the two passes

// What the second pass over a tile needs, on its way. Loads are issued ahead for whole tiles only: others are few, or
// slow anyway.
struct Begun {
  u32 params_in, directions_in;
  Lane<Param> params;
};

__device__ __forceinline__ void begin_second_pass(const Job& job, const Slots& slots, u32 run, u32 index,
                                                  Begun& begun) {
  const Place place = place_of(job, run, index);
  begun.params_in = slots.of(Slots::tag(index, true));
  begun.directions_in = slots.of(Slots::tag(index, false));
  if (place.whole && begun.params_in == NO_SLOT) {
    load<Param, true>(begun.params, tensor<Param>(job.table, 0, place.tile), TILE);
  }
}

template <bool WHOLE>
__device__ __forceinline__ void second_pass(const Job& job, const Held& held, const Tile& tile, const Begun& begun,
                                            float rate) {
  float params[ITEMS], directions[ITEMS];
  if (begun.params_in != NO_SLOT) {
    recall(job, held, begun.params_in, params);
  } else if (WHOLE) {
#pragma unroll
    for (u32 item = 0; item < ITEMS; ++item) params[item] = Param::wide(begun.params.value[item]);
  } else {
    read_params<false>(job.table, tile, params);
  }
  if (begun.directions_in != NO_SLOT) {
    recall(job, held, begun.directions_in, directions);
  } else {
    read_directions<WHOLE>(job.table, tile, job.rule, params, directions);
  }
  write_params<WHOLE>(job.table, tile, rate, params, directions);
}

__device__ __forceinline__ void end_second_pass(const Job& job, const Held& held, u32 run, u32 index,
                                                const Begun& begun) {
  const float rate = wait_for_rate(job, run);
  const Place place = place_of(job, run, index);
  if (place.whole) {
    second_pass<true>(job, held, place.tile, begun, rate);
  } else {
    second_pass<false>(job, held, place.tile, begun, rate);
  }
}

__device__ __forceinline__ void begin_first_pass(const Job& job, u32 run, u32 index, Loaded& loaded) {
  const Place place = place_of(job, run, index);
  if (place.whole) load_all<true>(job.table, place.tile, loaded);
}

__device__ __forceinline__ void end_first_pass(const Job& job, u32 run, u32 index, Loaded& loaded, Moments moments,
                                               Sums& sums, float (&params)[ITEMS], float (&directions)[ITEMS]) {
  const Place place = place_of(job, run, index);
  if (place.whole) {
    first_pass<true>(job.table, place.tile, loaded, job.rule, job.scale, moments, sums, params, directions);
  } else {
    load_all<false>(job.table, place.tile, loaded);
    first_pass<false>(job.table, place.tile, loaded, job.rule, job.scale, moments, sums, params, directions);
  }
}

// Before anything else is known.
__device__ __forceinline__ void fetch_first_tile(const Table& table) {
  const Tile tile = tile_at(table, blockIdx.x, 0);
  if (tile.left < TILE || threadIdx.x % 8) return;
#pragma unroll
  for (u32 item = 0; item < ITEMS; item += VEC) {
    const u32 at = place<true>(item);
    fetch_ahead(tensor<Grad>(table, 1, tile) + at);
    fetch_ahead(tensor<Param>(table, 0, tile) + at);
    fetch_ahead(tensor<First>(table, 3, tile) + at);
    fetch_ahead(tensor<Second>(table, 4, tile) + at);
  }
}

// What the other warps do.
__device__ __forceinline__ void pass(const Job& job, u32 count) {
  const Run* runs = job.shared->runs;
  const u32 places = job.table.extra[0] + HELD;
  Held held;
  Slots slots;
  Sums sums;
  sums.begin(0, 0);
  u32 first = 0, first_end = runs[0].end, second = 0, second_end = first_end;  // runs of the two passes
  u32 done = 0;                                                               // second passes
  for (u32 step = 0; step < count; ++step) {
    if (step == first_end) first_end = runs[++first].end;
    const bool due = second_end + AHEAD <= step;
    Loaded loaded;
    Begun begun;
    if (due) begin_second_pass(job, slots, second, done, begun);
    begin_first_pass(job, first, step, loaded);
    if (due) {
      end_second_pass(job, held, second, done, begun);
      if (++done == second_end) second_end = runs[++second].end;
    }
    while (second_end + AHEAD <= step && !slots.free(places, done)) {
      begin_second_pass(job, slots, second, done, begun);
      end_second_pass(job, held, second, done, begun);
      if (++done == second_end) second_end = runs[++second].end;
    }

    u32 free = slots.free(places, done);
    const u32 directions_in = slots.take(free, Slots::tag(step, false));
    const Moments moments = directions_in == NO_SLOT ? Moments::stored_for_now : Moments::stored_for_long;
    float params[ITEMS], directions[ITEMS];
    end_first_pass(job, first, step, loaded, moments, sums, params, directions);
    keep(job, held, directions_in, directions);
    free = slots.free(places, done);
    if ((u32)__popc(free) > count - 1 - step) {  // more than directions to come
      keep(job, held, slots.take(free, Slots::tag(step, true)), params);
    }
    if (step + 1 == first_end) {
      finish(job, first, sums);
      sums.begin(0, 0);
    }
  }
  while (done < count) {
    if (done == second_end) second_end = runs[++second].end;
    Begun begun;
    begin_second_pass(job, slots, second, done, begun);
    end_second_pass(job, held, second, done, begun);
    ++done;
  }
}

extern "C" __global__ void __launch_bounds__(DS_THREADS + 32, DS_BLOCKS)
    lamb_stream(const __grid_constant__ Table table, const __grid_constant__ Lamb rule, u64* messages) {
  DS_SHARED(Shared, shared, 1);
  DS_DYNAMIC(memory);
  const float scale = table.control ? table.control[0] : 1;
  const bool skip = table.control && table.control[1] != 0;
  if (threadIdx.x >= THREADS) {
    write_runs(table, shared->runs);
  } else {
    fetch_first_tile(table);
    for (u32 run = threadIdx.x; run < table.entries; run += THREADS) shared->rates[run] = 0;
    if (threadIdx.x < BUFFERS) shared->filled[threadIdx.x] = shared->emptied[threadIdx.x] = 0;
  }
  __syncthreads();
  if (skip) return;  // all blocks do
  const Job job{table, messages, memory, shared, rule, scale};
  const u32 count = (table.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;  // no block is without a tile
  if (threadIdx.x < THREADS) {
    pass(job, count);
  } else {
    find_rates(job, count);
  }
}
