// Adam, Lion, Adagrad and SGD: one read and one write of everything, over all entries of a launch.
//
// DS_RULE, DS_STOCHASTIC and the dtypes DS_PARAM, DS_GRAD, DS_OUT, DS_FIRST and DS_SECOND say which one this is; with
// DS_AFTER it may start before the kernel ahead of it on the stream has ended. Pointers of an entry: param, grad, out,
// first and second moment. table.extra, with DS_AFTER: blocks that the GPU holds at once.
#include "core.cuh"
#include "rules.cuh"

using Param = Numbered<DS_PARAM>::type;
using Grad = Numbered<DS_GRAD>::type;
using Out = Numbered<DS_OUT>::type;
using First = Numbered<DS_FIRST>::type;
using Second = Numbered<DS_SECOND>::type;
using Rule = DS_RULE;
constexpr bool HALVES = DS_OUT == DS_LOW;  // param and out are one master: out is read too

// The rule's constants for the entry at hand. Thread 0 writes one while others may still read the other.
struct Prepared {
  Rule rule;
  float step;
};

// What all threads of a block agree on.
struct Block {
  u32 entry = ~0u;  // whose constants are prepared
  int current = 0;
  float scale = 1;
  bool skip = false;
};

__device__ __forceinline__ void prepare(const Table& table, u32 entry, Prepared& to, const Prepared& before, bool any) {
  const float step = Rule::STEPS ? *table.steps[entry] : 0;
  if (any && before.step == step) {
    to = before;
    return;
  }
  to.step = step;
  to.rule.prepare(table.scalars, table.flags, table.lr ? (double)*table.lr : table.scalars[0], step);
}

template <bool WHOLE>
__device__ __forceinline__ void update_tile(const Table& table, const Tile& tile, Block& block, Prepared* prepared) {
  Lane<Param> params;
  Lane<Grad> grads;
  Lane<First> firsts;
  Lane<Second> seconds;
  load<Grad, WHOLE>(grads, tensor<Grad>(table, 1, tile), tile.left);
  load<Param, WHOLE>(params, tensor<Param>(table, 0, tile), tile.left);
  load<First, WHOLE>(firsts, tensor<First>(table, 3, tile), tile.left);
  load<Second, WHOLE>(seconds, tensor<Second>(table, 4, tile), tile.left);
  Lane<Out> outs;
  if (HALVES) load<Out, WHOLE>(outs, tensor<Out>(table, 2, tile), tile.left);

  if (block.entry != tile.entry) {  // after the loads were issued: they go on meanwhile
    const bool any = block.entry != ~0u;
    block.current ^= 1;
    block.entry = tile.entry;
    if (threadIdx.x == 0) prepare(table, tile.entry, prepared[block.current], prepared[block.current ^ 1], any);
    __syncthreads();
  }
  if (block.skip) return;

  const Rule rule = prepared[block.current].rule;
  const Noise noise(table.seed, (u64)table.first_entry + tile.entry);
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    float p = HALVES ? Low::join((u16)params.value[item], outs.value[item]) : Param::wide(params.value[item]);
    float first = First::wide(firsts.value[item]), second = Second::wide(seconds.value[item]);
    rule.update(p, Grad::wide(grads.value[item]) * block.scale, first, second);
    const u64 random = DS_STOCHASTIC ? noise.of(tile.begin + place<WHOLE>(item)) : 0;
    params.value[item] =
        HALVES ? (typename Param::raw)Low::high_of(p) : rounded<Param, DS_STOCHASTIC>(p, random, 0);
    firsts.value[item] = rounded<First, DS_STOCHASTIC>(first, random, 1);
    seconds.value[item] = rounded<Second, DS_STOCHASTIC>(second, random, 2);
    outs.value[item] = HALVES ? Low::low_of(p) : Out::narrow(Param::wide(params.value[item]));
  }
  store<Param, WHOLE>(params, tensor<Param>(table, 0, tile), tile.left);
  store<First, WHOLE>(firsts, tensor<First>(table, 3, tile), tile.left);
  store<Second, WHOLE>(seconds, tensor<Second>(table, 4, tile), tile.left);
  store<Out, WHOLE>(outs, tensor<Out>(table, 2, tile), tile.left);
}

__device__ __forceinline__ bool all_aligned(const Table& table, u32 entry) {
  return aligned<Param>(table, 0, entry) && aligned<Grad>(table, 1, entry) && aligned<Out>(table, 2, entry) &&
         aligned<First>(table, 3, entry) && aligned<Second>(table, 4, entry);
}

// While the kernel before still runs, which computes `control`: what this block will read first.
__device__ __forceinline__ void fetch_first_tile(const Table& table) {
  if (blockIdx.x >= table.extra[0] || blockIdx.x >= table.tiles || threadIdx.x % 8) return;
  const Tile tile = tile_at(table, blockIdx.x, 0);
  if (tile.left < TILE) return;
#pragma unroll
  for (u32 item = 0; item < ITEMS; item += VEC) {
    const u32 at = place<true>(item);
    fetch_ahead(tensor<Grad>(table, 1, tile) + at);
    fetch_ahead(tensor<Param>(table, 0, tile) + at);
    if (HALVES) fetch_ahead(tensor<Out>(table, 2, tile) + at);
    if (First::exists) fetch_ahead(tensor<First>(table, 3, tile) + at);
    if (Second::exists) fetch_ahead(tensor<Second>(table, 4, tile) + at);
  }
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) update(const __grid_constant__ Table table) {
  DS_SHARED(Prepared, prepared, 2);
  Block block;
  if (DS_AFTER) {
    fetch_first_tile(table);
    wait_for_kernel_before();
  }
  if (table.control) {
    block.scale = table.control[0];
    block.skip = table.control[1] != 0;
  }
  Tile tile;
  tile.entry = 0;
  for (u32 at = blockIdx.x; at < table.tiles; at += gridDim.x) {
    tile = tile_at(table, at, tile.entry);
    if (tile.left == TILE && all_aligned(table, tile.entry)) {
      update_tile<true>(table, tile, block, prepared);
    } else {
      update_tile<false>(table, tile, block, prepared);
    }
    if (block.skip) return;
  }
}
