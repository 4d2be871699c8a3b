// The sum of the squares of all elements of a list, in the same order each time: a sum for each block, then theirs.
//
// DS_GRAD is the dtype; pointers[0] of an entry. The workspace holds one double for each block.
#include "core.cuh"

using Grad = Numbered<DS_GRAD>::type;

template <bool WHOLE>
__device__ __forceinline__ float squares(const Table& table, const Tile& tile) {
  Lane<Grad> lane;
  load<Grad, WHOLE>(lane, tensor<Grad>(table, 0, tile), tile.left);
  float sums[4] = {};  // shorter chains of dependent additions
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    const float value = Grad::wide(lane.value[item]);
    sums[item % 4] += value * value;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) norm_parts(const __grid_constant__ Table table) {
  DS_SHARED(double, of_warps, DS_THREADS / 32);
  float sum = 0;
  Tile tile;
  tile.entry = 0;
  for (u32 at = blockIdx.x; at < table.tiles; at += gridDim.x) {
    tile = tile_at(table, at, tile.entry);
    const bool whole = tile.left == TILE && aligned<Grad>(table, 0, tile.entry);
    sum += whole ? squares<true>(table, tile) : squares<false>(table, tile);
  }
  double total[1] = {sum};
  block_sum(total, of_warps);
  if (threadIdx.x == 0) ((double*)table.workspace)[blockIdx.x] = total[0];
}

// One block.
extern "C" __global__ void __launch_bounds__(DS_THREADS) norm_total(const double* parts, u32 count, float* result) {
  DS_SHARED(double, of_warps, DS_THREADS / 32);
  double sum[1] = {0};
  for (u32 part = threadIdx.x; part < count; part += DS_THREADS) sum[0] += parts[part];
  block_sum(sum, of_warps);
  if (threadIdx.x == 0) *result = (float)sum[0];
}
