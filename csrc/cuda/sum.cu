// A tensor becomes the scaled sum of others, added up in fp32 in their order: what arrives from other GPUs.
//
// DS_GRAD is the dtype. pointers[0] of entry 0: the sum; of the others: its parts. All have numel[0] elements.
// scalars[0]: the factor.
#include "core.cuh"

using Part = Numbered<DS_GRAD>::type;

template <bool WHOLE>
__device__ __forceinline__ void sum_tile(const Table& table, Tile tile) {
  Lane<Part> lane;
  float sums[ITEMS] = {};
#pragma unroll 2
  for (tile.entry = 1; tile.entry < table.entries; ++tile.entry) {
    load<Part, WHOLE>(lane, tensor<Part>(table, 0, tile), tile.left);
#pragma unroll
    for (u32 item = 0; item < ITEMS; ++item) sums[item] += Part::wide(lane.value[item]);
  }
  const float factor = (float)table.scalars[0];
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) lane.value[item] = Part::narrow(sums[item] * factor);
  tile.entry = 0;
  store<Part, WHOLE, false>(lane, tensor<Part>(table, 0, tile), tile.left);  // the norm or an update reads it soon
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) scaled_sum(const __grid_constant__ Table table) {
  bool vectors = true;
  for (u32 entry = 0; entry < table.entries; ++entry) vectors = vectors && aligned<Part>(table, 0, entry);
  for (u32 at = blockIdx.x; at < table.tiles; at += gridDim.x) {
    Tile tile;
    tile.begin = (i64)at * TILE;
    const i64 left = table.numel[0] - tile.begin;
    tile.left = left < (i64)TILE ? (u32)left : TILE;
    if (vectors && tile.left == TILE) {
      sum_tile<true>(table, tile);
    } else {
      sum_tile<false>(table, tile);
    }
  }
}
