// What came from other GPUs and this one's own part, added up in fp32 in the order of the ranks.
//
// DS_GRAD is the dtype of the parts, DS_OUT that of the sums, DS_FIRST of what they are added to, perhaps nothing.
// Pointers of an entry: sum, own part, what the next rank sent, what the sum is added to, which may be the sum itself.
// Others' parts lie table.workspace elements from one to the next. scalars[0]: what the sum is multiplied by first.
// table.extra: the number of ranks, this one's.
#include "core.cuh"

using Part = Numbered<DS_GRAD>::type;
using Out = Numbered<DS_OUT>::type;
using Before = Numbered<DS_FIRST>::type;

template <bool WHOLE>
__device__ __forceinline__ void sum_tile(const Table& table, const Tile& tile) {
  const u32 ranks = table.extra[0], own = table.extra[1];
  const typename Part::raw *mine = tensor<Part>(table, 1, tile), *others = tensor<Part>(table, 2, tile);
  Lane<Before> before;
  load<Before, WHOLE>(before, tensor<Before>(table, 3, tile), tile.left);
  float sums[ITEMS] = {};
#pragma unroll 2
  for (u32 rank = 0; rank < ranks; ++rank) {
    Lane<Part> part;
    const u64 row = (rank + ranks - own - 1) % ranks;
    load<Part, WHOLE>(part, rank == own ? mine : others + row * table.workspace, tile.left);
#pragma unroll
    for (u32 item = 0; item < ITEMS; ++item) sums[item] += Part::wide(part.value[item]);
  }
  const float factor = (float)table.scalars[0];
  Lane<Out> out;
#pragma unroll
  for (u32 item = 0; item < ITEMS; ++item) {
    out.value[item] = Out::narrow(sums[item] * factor + Before::wide(before.value[item]));
  }
  store<Out, WHOLE, false>(out, tensor<Out>(table, 0, tile), tile.left);  // the norm or an update reads it soon
}

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) sum_parts(const __grid_constant__ Table table) {
  const bool rows_aligned = table.workspace * sizeof(Part::raw) % 16 == 0;
  Tile tile;
  tile.entry = 0;
  for (u32 at = blockIdx.x; at < table.tiles; at += gridDim.x) {
    tile = tile_at(table, at, tile.entry);
    const bool vectors = rows_aligned && aligned<Out>(table, 0, tile.entry) && aligned<Part>(table, 1, tile.entry) &&
                         aligned<Part>(table, 2, tile.entry) && aligned<Before>(table, 3, tile.entry);
    if (vectors && tile.left == TILE) {
      sum_tile<true>(table, tile);
    } else {
      sum_tile<false>(table, tile);
    }
  }
}
