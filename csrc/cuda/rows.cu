// Rows added up by lists, rows times numbers, and the gate of experts: see ds_hf/engine/ops/rows.py.
//
// DS_VALUE: the dtype; DS_OTHER: that of the numbers. A thread makes eight neighbours of a row. Sums are in fp32, in the order of the list; the gate
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

#ifndef DS_OTHER
#define DS_OTHER DS_VALUE
#endif
using Scale = Numbered<DS_OTHER>::type;

struct Weighed {
  const void *x, *grad, *scale;
  void *out, *of_scale;
  i64 rows, width;
};

__device__ __forceinline__ float scale_of(const Weighed& a, i64 row) {
  return Scale::wide(((const Scale::raw*)a.scale)[row]);
}

// out[row] = x[row] * scale[row]
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) weigh(const __grid_constant__ Weighed a) {
  const i64 chunks = (a.width + EACH - 1) / EACH, all = a.rows * chunks;
  for (i64 at = (i64)blockIdx.x * DS_THREADS + threadIdx.x; at < all; at += (i64)gridDim.x * DS_THREADS) {
    const i64 row = at / chunks, column = at % chunks * EACH, valid = a.width - column;
    const float scale = scale_of(a, row);
    float x[EACH];
    get<Value>(x, (const raw*)a.x + row * a.width + column, valid);
#pragma unroll
    for (u32 k = 0; k < EACH; ++k) x[k] *= scale;
    set<Value>((raw*)a.out + row * a.width + column, x, valid);
  }
}

// out[row] = grad[row] * scale[row], of_scale[row] = sum of grad[row] * x[row]. A warp makes a row.
extern "C" __global__ void __launch_bounds__(DS_THREADS, DS_BLOCKS) weigh_backward(const __grid_constant__ Weighed a) {
  const i64 warps = (i64)gridDim.x * (DS_THREADS / 32), lane = threadIdx.x % 32;
  for (i64 row = (i64)blockIdx.x * (DS_THREADS / 32) + threadIdx.x / 32; row < a.rows; row += warps) {
    const float scale = scale_of(a, row);
    float sum = 0.0f;
    for (i64 column = lane * EACH; column < a.width; column += 32 * EACH) {
      const i64 valid = a.width - column, place = row * a.width + column;
      float x[EACH], grad[EACH];
      get<Value>(x, (const raw*)a.x + place, valid);
      get<Value>(grad, (const raw*)a.grad + place, valid);
#pragma unroll
      for (u32 k = 0; k < EACH; ++k) {
        sum += x[k] * grad[k];
        grad[k] *= scale;
      }
      set<Value>((raw*)a.out + place, grad, valid);
    }
#pragma unroll
    for (u32 step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) ((Scale::raw*)a.of_scale)[row] = Scale::narrow(sum);
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

// ---- the gradients of act(gates) * ups; DS_GATE: act is silu (0), gelu (1), or gelu by tanh (2), as torch computes them
#ifndef DS_GATE
#define DS_GATE 0
#endif
constexpr float ROOT_2_OVER_PI = 0.79788456f, ROOT_HALF = 0.70710678f, CUBED = 0.044715f;

__device__ __forceinline__ float tanh_of(float x) { return tanhf(ROOT_2_OVER_PI * (x + CUBED * (x * x * x))); }

__device__ __forceinline__ float act(float x) {
  if (DS_GATE == 0) return x * sigmoid(x);
  if (DS_GATE == 1) return x * 0.5f * (1.0f + erff(x * ROOT_HALF));
  return 0.5f * x * (1.0f + tanh_of(x));
}

// grad: of act(x)
__device__ __forceinline__ float act_backward(float grad, float x) {
  if (DS_GATE == 0) {
    const float s = sigmoid(x);
    return grad * s * (1.0f + x * (1.0f - s));
  }
  if (DS_GATE == 1) {
    const float density = expf(-0.5f * x * x) * (0.5f * ROOT_2_OVER_PI);
    return grad * (0.5f * (1.0f + erff(x * ROOT_HALF)) + x * density);
  }
  const float t = tanh_of(x), slope = ROOT_2_OVER_PI * (1.0f + 3.0f * CUBED * (x * x));
  return grad * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope);
}

// Rows of `width` begin `stride` apart in gates and ups and in their gradients; grad has them side by side, and gets
// act(gates) * ups in the gradient's place if that product is asked for.
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
      const float value = rounded(act(g[k])), of_act = rounded(grad[k] * u[k]), up = u[k];
      u[k] = grad[k] * value;
      grad[k] = value * up;
      g[k] = act_backward(of_act, g[k]);
    }
    set<Value>((raw*)a.of_gates + place, g, valid);
    set<Value>((raw*)a.of_ups + place, u, valid);
    if (a.product) set<Value>(of_product, grad, valid);
  }
}
