// What LAMB's kernels share: the two passes over one tile, and sums for each entry.
//
// DS_PARAM, DS_GRAD, DS_OUT, DS_FIRST and DS_SECOND are dtypes. Pointers of an entry: param, grad, out and the moments.
// `parts` has room for one double2 for each tile: a block adds up all its tiles of an entry and writes the sums at the
// number of its first one. Blocks take every gridDim.x-th tile, so the sums of an entry are the first
// min(gridDim.x, tiles of the entry) from its first tile on.
#pragma once
#include "core.cuh"
#include "rules.cuh"

using Param = Numbered<DS_PARAM>::type;
using Grad = Numbered<DS_GRAD>::type;
using Out = Numbered<DS_OUT>::type;
using First = Numbered<DS_FIRST>::type;
using Second = Numbered<DS_SECOND>::type;

__device__ __forceinline__ bool all_aligned(const Table& table, u32 entry) {
  return aligned<Param>(table, 0, entry) && aligned<Grad>(table, 1, entry) && aligned<Out>(table, 2, entry) &&
         aligned<First>(table, 3, entry) && aligned<Second>(table, 4, entry);
}

// A thread's sums of squares of params and directions, of the entry at hand.
struct Sums {
  u32 entry = ~0u;
  u32 at = 0;  // this block's first tile of it
  float params = 0, directions = 0;

  // Every thread of the block must come here.
  __device__ __forceinline__ void write(double2* parts, double* of_warps) {
    if (entry == ~0u) return;
    double both[2] = {params, directions};
    block_sum(both, of_warps);
    if (threadIdx.x == 0) parts[at] = make_double2(both[0], both[1]);
    entry = ~0u;
  }

  __device__ __forceinline__ void begin(u32 with, u32 tile) {
    entry = with;
    at = tile;
    params = directions = 0;
  }
};

enum class Moments { left, stored_for_long, stored_for_now };  // the last: the second pass reads them again

// What the first pass reads of a tile.
struct Loaded {
  Lane<Param> params;
  Lane<Grad> grads;
  Lane<First> firsts;
  Lane<Second> seconds;
};

template <bool WHOLE>
__device__ __forceinline__ void load_all(const Table& table, const Tile& tile, Loaded& loaded) {
  load<Grad, WHOLE>(loaded.grads, tensor<Grad>(table, 1, tile), tile.left);
  load<Param, WHOLE, false>(loaded.params, tensor<Param>(table, 0, tile), tile.left);
  load<First, WHOLE>(loaded.firsts, tensor<First>(table, 3, tile), tile.left);
  load<Second, WHOLE>(loaded.seconds, tensor<Second>(table, 4, tile), tile.left);
}

// The first pass: moments are updated. Leaves the params and their directions, the latter as the second pass would find
// them, that is from the moments as stored.
template <bool WHOLE>
__device__ __forceinline__ void first_pass(const Table& table, const Tile& tile, Loaded& loaded, const Lamb& rule,
                                           float scale, Moments moments, Sums& sums, float (&params)[ITEMS],
                                           float (&directions)[ITEMS]) {
  Lane<First>& firsts = loaded.firsts;
  Lane<Second>& seconds = loaded.seconds;
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    const float p = Param::wide(loaded.params.value[item]);
    float m = First::wide(firsts.value[item]), v = Second::wide(seconds.value[item]);
    rule.moments(Grad::wide(loaded.grads.value[item]) * scale, m, v);
    const float u = rule.direction(p, m, v);
    if (WHOLE || place<WHOLE>(item) < tile.left) {  // of nothing it may be 0 / 0
      sums.params += p * p;
      sums.directions += u * u;
    }
    firsts.value[item] = First::narrow(m);
    seconds.value[item] = Second::narrow(v);
    params[item] = p;
    const bool as_computed = sizeof(typename First::raw) == 4 && sizeof(typename Second::raw) == 4;
    directions[item] =
        as_computed ? u : rule.direction(p, First::wide(firsts.value[item]), Second::wide(seconds.value[item]));
  }
  if (moments == Moments::stored_for_long) {
    store<First, WHOLE>(firsts, tensor<First>(table, 3, tile), tile.left);
    store<Second, WHOLE>(seconds, tensor<Second>(table, 4, tile), tile.left);
  } else if (moments == Moments::stored_for_now) {
    store<First, WHOLE, false>(firsts, tensor<First>(table, 3, tile), tile.left);
    store<Second, WHOLE, false>(seconds, tensor<Second>(table, 4, tile), tile.left);
  }
}

template <bool WHOLE>
__device__ __forceinline__ void first_pass(const Table& table, const Tile& tile, const Lamb& rule, float scale,
                                           Moments moments, Sums& sums, float (&params)[ITEMS],
                                           float (&directions)[ITEMS]) {
  Loaded loaded;
  load_all<WHOLE>(table, tile, loaded);
  first_pass<WHOLE>(table, tile, loaded, rule, scale, moments, sums, params, directions);
}

template <bool WHOLE>
__device__ __forceinline__ void read_params(const Table& table, const Tile& tile, float (&params)[ITEMS]) {
  Lane<Param> lane;
  load<Param, WHOLE>(lane, tensor<Param>(table, 0, tile), tile.left);
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) params[item] = Param::wide(lane.value[item]);
}

template <bool WHOLE>
__device__ __forceinline__ void read_directions(const Table& table, const Tile& tile, const Lamb& rule,
                                                const float (&params)[ITEMS], float (&directions)[ITEMS]) {
  Lane<First> firsts;
  Lane<Second> seconds;
  load<First, WHOLE>(firsts, tensor<First>(table, 3, tile), tile.left);
  load<Second, WHOLE>(seconds, tensor<Second>(table, 4, tile), tile.left);
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    directions[item] =
        rule.direction(params[item], First::wide(firsts.value[item]), Second::wide(seconds.value[item]));
  }
}

// The second pass, once the rate is known.
template <bool WHOLE>
__device__ __forceinline__ void write_params(const Table& table, const Tile& tile, float rate,
                                             const float (&params)[ITEMS], const float (&directions)[ITEMS]) {
  Lane<Param> results;
  Lane<Out> outs;
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    results.value[item] = Param::narrow(params[item] - rate * directions[item]);
    outs.value[item] = Out::narrow(Param::wide(results.value[item]));
  }
  store<Param, WHOLE>(results, tensor<Param>(table, 0, tile), tile.left);
  store<Out, WHOLE>(outs, tensor<Out>(table, 2, tile), tile.left);
}

__device__ __forceinline__ double base_rate_of(const Table& table, u32 entry) {
  const double lr = table.lr ? (double)*table.lr : table.scalars[0];
  return Lamb::base_rate(table.scalars, table.flags, lr, *table.steps[entry]);
}

__device__ __forceinline__ float rate_of(const Table& table, u32 entry, double squares_params,
                                         double squares_directions) {
  return (float)(base_rate_of(table, entry) *
                 Lamb::trust_ratio(table.scalars, squares_params, squares_directions));
}
