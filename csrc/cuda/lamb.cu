// LAMB in two passes, for shards whose norms are added up over ranks in between: lamb_moments, lamb_norms, lamb_apply.
#include "lamb.cuh"

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) lamb_moments(const __grid_constant__ Table table) {
  DS_SHARED(double, of_warps, 2 * DS_THREADS / 32);
  double2* parts = (double2*)table.workspace;
  const float scale = table.control ? table.control[0] : 1;
  const Moments moments = table.control && table.control[1] != 0 ? Moments::left : Moments::stored_for_now;
  Lamb rule;
  rule.prepare(table.scalars, table.flags);
  Sums sums;
  Tile tile;
  tile.entry = 0;
  for (u32 at = blockIdx.x; at < table.tiles; at += gridDim.x) {
    tile = tile_at(table, at, tile.entry);
    if (tile.entry != sums.entry) {
      sums.write(parts, of_warps);
      sums.begin(tile.entry, at);
    }
    float params[ITEMS], directions[ITEMS];
    if (tile.left == TILE && all_aligned(table, tile.entry)) {
      first_pass<true>(table, tile, rule, scale, moments, sums, params, directions);
    } else {
      first_pass<false>(table, tile, rule, scale, moments, sums, params, directions);
    }
  }
  sums.write(parts, of_warps);
}

// A block for each entry; `blocks` were lamb_moments'.
extern "C" __global__ void __launch_bounds__(DS_THREADS)
    lamb_norms(const __grid_constant__ Table table, u32 blocks, float* norms) {
  DS_SHARED(double, of_warps, 2 * DS_THREADS / 32);
  const u32 entry = blockIdx.x, begin = table.first_tile[entry], tiles = end_tile(table, entry) - begin;
  const double2* parts = (const double2*)table.workspace + begin;
  double sums[2] = {0, 0};
  for (u32 part = threadIdx.x; part < (tiles < blocks ? tiles : blocks); part += DS_THREADS) {
    sums[0] += parts[part].x;
    sums[1] += parts[part].y;
  }
  block_sum(sums, of_warps);
  if (threadIdx.x == 0) {
    float* to = norms + 2 * ((u64)table.first_entry + entry);
    to[0] = (float)sums[0];
    to[1] = (float)sums[1];
  }
}

// The last tiles first: of those the L2 cache still has what lamb_moments wrote.
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS)
    lamb_apply(const __grid_constant__ Table table, const float* norms) {
  DS_SHARED(float, rates, 2);  // thread 0 writes one while others may still read the other
  if (table.control && table.control[1] != 0) return;
  Lamb rule;
  rule.prepare(table.scalars, table.flags);
  u32 prepared = ~0u;
  int current = 0;
  Tile tile;
  tile.entry = table.entries - 1;
  for (u32 count = blockIdx.x; count < table.tiles; count += gridDim.x) {
    tile = tile_at(table, table.tiles - 1 - count, tile.entry);
    const bool whole = tile.left == TILE && all_aligned(table, tile.entry);
    float params[ITEMS], directions[ITEMS];
    if (whole) {
      read_params<true>(table, tile, params);
      read_directions<true>(table, tile, rule, params, directions);
    } else {
      read_params<false>(table, tile, params);
      read_directions<false>(table, tile, rule, params, directions);
    }
    if (tile.entry != prepared) {
      prepared = tile.entry;
      current ^= 1;
      if (threadIdx.x == 0) {
        const float* of_entry = norms + 2 * ((u64)table.first_entry + tile.entry);
        rates[current] = rate_of(table, tile.entry, of_entry[0], of_entry[1]);
      }
      __syncthreads();
    }
    if (whole) {
      write_params<true>(table, tile, rates[current], params, directions);
    } else {
      write_params<false>(table, tile, rates[current], params, directions);
    }
  }
}
