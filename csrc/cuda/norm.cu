// The sum of the squares of all elements of a list, in the same order each time, and what the update needs of it.
//
// DS_GRAD is the dtype; pointers[0] of an entry. Each block sends its sum to the last block of the last launch, which
// adds them up; all other blocks are on the GPU by then. table.extra: blocks of the launches before; blocks in all, or
// 0 before the last launch; the number of the call.
#include "core.cuh"

using Grad = Numbered<DS_GRAD>::type;

constexpr u32 CONTROL = 1, CHECKED = 2;  // flags, as in ops/cuda.py

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

// scalars: the loss scale that gradients carry, and the largest norm, 0 for any. The result: what gradients are
// multiplied by, whether the step is skipped, and the norm with the scale.
__device__ __forceinline__ void write_result(const Table& table, float squares, float* result) {
  if (!(table.flags & CONTROL)) {
    *result = squares;
    return;
  }
  const float norm = sqrtf(squares), unscale = (float)(1 / table.scalars[0]), max_norm = (float)table.scalars[1];
  float clip = 1;
  if (max_norm > 0) {
    clip = max_norm / (norm * unscale + 1e-6f);
    if (clip > 1) clip = 1;
    if (clip != clip) clip = 0;  // no norm: parameters whose gradients are finite stay as they are
  }
  result[0] = clip * unscale;
  result[1] = table.flags & CHECKED && !(norm - norm == 0);
  result[2] = norm;
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS)
    gradient_norm(const __grid_constant__ Table table, u64* messages, float* result) {
  DS_SHARED(double, of_warps, DS_THREADS / 32);
  let_next_kernel_start();
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
  if (threadIdx.x == 0) send(messages + table.extra[0] + blockIdx.x, message_of((float)total[0], table.extra[2]));
  if (!table.extra[1] || blockIdx.x != gridDim.x - 1) return;
  total[0] = 0;
  for (u32 part = threadIdx.x; part < table.extra[1]; part += DS_THREADS) {
    u64 message = look(messages + part);
    while (!came(message, table.extra[2])) {
      __nanosleep(20);
      message = look(messages + part);
    }
    total[0] += value_of(message);
  }
  block_sum(total, of_warps);
  if (threadIdx.x == 0) write_result(table, (float)total[0], result);
}

// Of a sum that is known, or of none.
extern "C" __global__ void __launch_bounds__(DS_THREADS)
    clip_control(const __grid_constant__ Table table, const float* squares, float* result) {
  if (threadIdx.x == 0) write_result(table, squares ? *squares : 0, result);
}
