// Items grouped by where they go, in the order that they have: see ds_hf/engine/ops/routes.py.
//
// An item is one of the `each` of a place: an expert of a token, or a process that may have some of its experts. Its bin
// is a number under `bins`, or it has none. `count_items` counts the bins of each tile of items; `group_items` adds up
// the counts of the tiles before its own, and so knows where each item goes. Counts are whole numbers, so the order in
// which threads come does not matter.
//
// DS_KEY: bytes of a number of an expert. DS_BINS: a power of two, 32 at least. DS_OWNERS 1: bins are processes.
#include "core.cuh"

#ifndef DS_KEY
#define DS_KEY 8
#endif
#ifndef DS_BINS
#define DS_BINS 32
#endif
#ifndef DS_OWNERS
#define DS_OWNERS 0
#endif

#if DS_KEY == 2
using Key = short;
#elif DS_KEY == 4
using Key = int;
#else
using Key = i64;
#endif

constexpr u32 STEPS = 4, WARPS = THREADS / 32, TILE_ITEMS = THREADS * STEPS, BINS = DS_BINS, PLANES = 1 + DS_OWNERS;
constexpr u32 NONE = 0xffffffffu, EVERY = 0xffffffffu;

struct Routes {
  const Key* experts;  // [places, k], rows `stride` apart
  u32* tiles;          // [tiles, PLANES, BINS]
  i64 *order, *place, *bin, *by_place, *starts, *number, *totals;  // as in Groups
  int* ends;
  i64 places, k, stride, each, bins, count, me;
};

// The rank of place `d` of processes: the others in their order, and this one the last.
__device__ __forceinline__ i64 rank_of(i64 d, i64 size, i64 me) { return d == size - 1 ? me : d + (d >= me); }

// The bin of an item, and how many routes it stands for.
__device__ __forceinline__ u32 bin_of(const Routes& a, i64 item, u32* routes) {
  *routes = 1;
  if (item >= a.places * a.each) return NONE;
  const i64 place = item / a.each, which = item % a.each;
  const Key* experts = a.experts + place * a.stride;
#if DS_OWNERS
  const i64 first = rank_of(which, a.each, a.me) * a.count;
  u32 found = 0;
  for (i64 j = 0; j < a.k; ++j) {
    const i64 expert = experts[j];
    found += expert >= first && expert < first + a.count;
  }
  *routes = found;
  return found ? (u32)which : NONE;
#else
  const i64 expert = experts[which];
  return expert >= 0 && expert < a.bins ? (u32)expert : NONE;
#endif
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) count_items(const __grid_constant__ Routes a) {
  DS_SHARED(u32, seen, PLANES * BINS);
  for (u32 i = threadIdx.x; i < PLANES * BINS; i += THREADS) seen[i] = 0;
  __syncthreads();
  for (u32 step = 0; step < STEPS; ++step) {
    u32 routes;
    const u32 bin = bin_of(a, (i64)blockIdx.x * TILE_ITEMS + step * THREADS + threadIdx.x, &routes);
    if (bin == NONE) continue;
    atomicAdd(&seen[bin], 1);
    if (DS_OWNERS) atomicAdd(&seen[(PLANES - 1) * BINS + bin], routes);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < PLANES * BINS; i += THREADS) a.tiles[(i64)blockIdx.x * PLANES * BINS + i] = seen[i];
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) group_items(const __grid_constant__ Routes a) {
  DS_SHARED(u32, total, PLANES * BINS);
  DS_SHARED(u32, at, BINS);              // where the next item of a bin goes: of this tile
  DS_SHARED(u32, of_warp, WARPS * BINS);  // ... and of each warp
  DS_SHARED(u32, valid, WARPS + 1);       // items with a bin: of each warp, and of all tiles before
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
  for (u32 i = threadIdx.x; i < WARPS * BINS; i += THREADS) of_warp[i] = 0;
  for (u32 i = threadIdx.x; i < PLANES * BINS; i += THREADS) total[i] = 0;
  for (u32 i = threadIdx.x; i < BINS; i += THREADS) at[i] = 0;
  if (threadIdx.x == 0) valid[WARPS] = 0;
  __syncthreads();

  const i64 counts = (i64)gridDim.x * PLANES * BINS, before = (i64)blockIdx.x * PLANES * BINS;
  for (i64 i = threadIdx.x; i < counts; i += THREADS) {
    const u32 seen = a.tiles[i], bin = (u32)(i % (PLANES * BINS));
    if (!seen) continue;
    atomicAdd(&total[bin], seen);
    if (bin < BINS && i < before) atomicAdd(&at[bin], seen), atomicAdd(&valid[WARPS], seen);
  }
  const i64 first = (i64)blockIdx.x * TILE_ITEMS + warp * 32 * STEPS + lane;
  u32 bins[STEPS], mine = 0;
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    u32 routes;
    bins[step] = bin_of(a, first + step * 32, &routes);
    if (bins[step] != NONE) atomicAdd(&of_warp[warp * BINS + bins[step]], 1);
    mine += __popc(__ballot_sync(EVERY, bins[step] != NONE));
  }
  if (lane == 0) valid[warp] = mine;
  __syncthreads();

  if (warp == 0) {  // sums of the bins before each
    constexpr u32 SPAN = BINS / 32;
    u32 sum = 0;
    for (u32 i = 0; i < SPAN; ++i) sum += total[lane * SPAN + i];
    u32 running = sum;
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_sync(EVERY, running, lane >= step ? lane - step : lane);
      running += lane >= step ? other : 0;
    }
    running -= sum;
    for (u32 i = 0; i < SPAN; ++i) {
      const u32 bin = lane * SPAN + i;
      at[bin] += running;
      running += total[bin];
      if (blockIdx.x || bin >= a.bins) continue;
      if (DS_OWNERS) {  // by rank
        i64* told = a.totals + 2 * rank_of(bin, a.each, a.me);
        told[0] = total[bin], told[1] = total[(PLANES - 1) * BINS + bin];
      } else {
        a.totals[bin] = total[bin], a.ends[bin] = (int)running;
      }
    }
  }
  __syncthreads();
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) {
    u32 next = at[bin];
    for (u32 i = 0; i < WARPS; ++i) {
      const u32 seen = of_warp[i * BINS + bin];
      of_warp[i * BINS + bin] = next;
      next += seen;
    }
  }
  __syncthreads();

  u32 earlier = valid[WARPS];
  for (u32 i = 0; i < warp; ++i) earlier += valid[i];
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    const i64 item = first + step * 32;
    const u32 bin = bins[step], all = __ballot_sync(EVERY, bin != NONE);
    u32 same = all;
    for (u32 bit = 1; bit < BINS; bit *= 2) {
      const u32 set = __ballot_sync(EVERY, (bin & bit) != 0);
      same &= bin & bit ? set : ~set;
    }
    const u32 number = bin == NONE ? 0 : of_warp[warp * BINS + bin] + __popc(same & below);
    __syncwarp();
    if (bin != NONE && !(same & below)) of_warp[warp * BINS + bin] += __popc(same);
    __syncwarp();
    const u32 nth = earlier + __popc(all & below);
    earlier += __popc(all);
    if (item >= a.places * a.each) continue;
    if (item % a.each == 0) a.starts[item / a.each] = nth;
    a.number[item] = bin == NONE ? -1 : (i64)number;
    if (bin == NONE) continue;
    a.order[number] = item;
    a.place[number] = item / a.each;
    a.bin[number] = bin;
    a.by_place[nth] = number;
  }
}

// ---- what goes along with rows: values as they are, `Key` for their size

struct Labels {
  const Key *experts, *values;
  Key* out;
  const i64 *order, *number;
  i64 rows, places, k, stride, each, count, me, offset;
};

// out: [rows, 2 * k]: of each row the experts as its process numbers them, `count` for those elsewhere, and their weights
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) label(const __grid_constant__ Labels a) {
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.rows * a.k; at += (i64)gridDim.x * THREADS) {
    const i64 row = at / a.k, j = at % a.k, item = a.order[row], place = item / a.each;
    const i64 first = rank_of(item % a.each, a.each, a.me) * a.count;
    const i64 expert = ((const i64*)a.experts)[place * a.k + j] - first;
    const bool here = expert >= 0 && expert < a.count;
    a.out[row * 2 * a.k + j] = (Key)(here ? expert : a.count);
    a.out[(row * 2 + 1) * a.k + j] = here ? a.values[place * a.k + j] : (Key)0;
  }
}

// values: [rows, 2 * k], gradients of what label gave; out: [places, k], those of the weights
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) unlabel(const __grid_constant__ Labels a) {
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.places * a.k; at += (i64)gridDim.x * THREADS) {
    const i64 place = at / a.k, j = at % a.k, expert = ((const i64*)a.experts)[place * a.k + j];
    Key value = 0;
    if (expert >= 0 && expert < a.count * a.each) {
      const i64 rank = expert / a.count, d = rank == a.me ? a.each - 1 : rank - (rank > a.me);
      value = a.values[(a.number[place * a.each + d] * 2 + 1) * a.k + j];
    }
    a.out[at] = value;
  }
}

// out: [rows], of values: [places, stride], of each item its own from column `offset` on
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) pick(const __grid_constant__ Labels a) {
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.rows; at += (i64)gridDim.x * THREADS) {
    const i64 item = a.order[at];
    a.out[at] = a.values[item / a.each * a.stride + a.offset + item % a.each];
  }
}

// out: [places, stride], 0 but for what pick took, which gets values, [rows]
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) unpick(const __grid_constant__ Labels a) {
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.places * a.stride; at += (i64)gridDim.x * THREADS) {
    const i64 place = at / a.stride, j = at % a.stride - a.offset;
    const i64 number = j >= 0 && j < a.each ? a.number[place * a.each + j] : -1;
    a.out[at] = number >= 0 ? a.values[number] : (Key)0;
  }
}
