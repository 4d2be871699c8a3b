// Rows added up by lists, and the gate of experts: see ds_hf/engine/ops/rows.py.
//
// DS_VALUE: the dtype. A thread makes eight neighbours of a row. Sums are in fp32, in the order of the list; the gate
// rounds where torch does, so that its numbers are those of silu(gate) * up but for the last bit of the exponential.
#include "eight.cuh"

using Value = Numbered<DS_VALUE>::type;
using raw = Value::raw;

struct Rows {
  const void *x, *other;
  void* out;
  const i64 *items, *starts;
  i64 rows, total, width;
};

__device__ __forceinline__ float rounded(float x) { return Value::wide(Value::narrow(x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// out[place] = sum of x[items[i]] for i from starts[place] to the next start
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) add_up(const __grid_constant__ Rows a) {
  const i64 chunks = (a.width + EACH - 1) / EACH, all = a.rows * chunks;
  for (i64 at = (i64)blockIdx.x * DS_THREADS + threadIdx.x; at < all; at += (i64)gridDim.x * DS_THREADS) {
    const i64 place = at / chunks, column = at % chunks * EACH, valid = a.width - column;
    const i64 end = place + 1 < a.rows ? a.starts[place + 1] : a.total;
    float sums[EACH] = {}, x[EACH];
    for (i64 i = a.starts[place]; i < end; ++i) {
      get<Value>(x, (const raw*)a.x + a.items[i] * a.width + column, valid);
#pragma unroll
      for (u32 k = 0; k < EACH; ++k) sums[k] += x[k];
    }
    set<Value>((raw*)a.out + place * a.width + column, sums, valid);
  }
}

// x: [rows, 2 * width], gates and ups; out: [rows, width]
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) gate(const __grid_constant__ Rows a) {
  const i64 chunks = (a.width + EACH - 1) / EACH, all = a.rows * chunks;
  for (i64 at = (i64)blockIdx.x * DS_THREADS + threadIdx.x; at < all; at += (i64)gridDim.x * DS_THREADS) {
    const i64 row = at / chunks, column = at % chunks * EACH, valid = a.width - column;
    const raw* gates = (const raw*)a.x + row * 2 * a.width + column;
    float g[EACH], u[EACH];
    get<Value>(g, gates, valid);
    get<Value>(u, gates + a.width, valid);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) g[k] = rounded(g[k] * sigmoid(g[k])) * u[k];
    set<Value>((raw*)a.out + row * a.width + column, g, valid);
  }
}

// What gate gave is silu(gates) * ups, rows of `width` that begin `stride` apart in these and in their gradients; grad
// has them side by side, and gets that product in the gradient's place if it is asked for.
struct Gate {
  const void *gates, *ups;
  void *of_gates, *of_ups, *grad;
  i64 rows, width, stride, product;
};

extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) gate_backward(const __grid_constant__ Gate a) {
  const i64 chunks = (a.width + EACH - 1) / EACH, all = a.rows * chunks;
  for (i64 at = (i64)blockIdx.x * DS_THREADS + threadIdx.x; at < all; at += (i64)gridDim.x * DS_THREADS) {
    const i64 row = at / chunks, column = at % chunks * EACH, valid = a.width - column;
    const i64 place = row * a.stride + column;
    raw* const of_product = (raw*)a.grad + row * a.width + column;
    float g[EACH], u[EACH], grad[EACH];
    get<Value>(g, (const raw*)a.gates + place, valid);
    get<Value>(u, (const raw*)a.ups + place, valid);
    get<Value>(grad, of_product, valid);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) {
      const float s = sigmoid(g[k]), silu = rounded(g[k] * s), of_silu = rounded(grad[k] * u[k]), up = u[k];
      u[k] = grad[k] * silu;
      grad[k] = silu * up;
      g[k] = of_silu * s * (1.0f + g[k] * (1.0f - s));
    }
    set<Value>((raw*)a.of_gates + place, g, valid);
    set<Value>((raw*)a.of_ups + place, u, valid);
    if (a.product) set<Value>(of_product, grad, valid);
  }
}
