// The rules, element by element: what ds_hf/engine/ops/reference.py says, in fp32.
//
// A rule turns the scalars of a call into constants (in double, by one thread) and then works on single elements.
// `scalars` and `flags` are in the order in which ds_hf/engine/ops/cuda.py passes them.
#pragma once

constexpr u32 DECOUPLED = 1, BIAS_CORRECTION = 2, NESTEROV = 4, FIRST = 8, EPS_INSIDE = 16;

// Of all floats, denormals and infinities among them, also where not exact.
__device__ __forceinline__ float quotient(float dividend, float divisor) {
#if defined(__CUDA_ARCH__) && !DS_EXACT
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(dividend), "f"(divisor));
  return result;
#else
  return dividend / divisor;
#endif
}

__device__ __forceinline__ float root(float value) {
#if defined(__CUDA_ARCH__) && !DS_EXACT
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  return sqrtf(value);
#endif
}

// beta ** step: steps are whole numbers, and squaring stays within 1e-10 of pow() for a million steps.
__device__ __forceinline__ double power(double base, double exponent) {
  double result = 1;
  for (u64 left = (u64)exponent; left; left >>= 1) {
    if (left & 1) result *= base;
    base *= base;
  }
  return result;
}

struct Corrections {
  double first, second;
  __device__ __forceinline__ Corrections(double beta1, double beta2, double step, bool wanted)
      : first(wanted ? 1 - power(beta1, step) : 1), second(wanted ? 1 - power(beta2, step) : 1) {}
};

// scalars: lr, beta1, beta2, eps, weight_decay
struct Adam {
  static constexpr bool STEPS = true;
  float beta1, rest1, beta2, rest2, eps, into_gradient, keep, rate, inverse2;

  __device__ __forceinline__ void prepare(const double* scalars, u32 flags, double lr, double step) {
    const Corrections c(scalars[1], scalars[2], step, flags & BIAS_CORRECTION);
    beta1 = (float)scalars[1];
    rest1 = (float)(1 - scalars[1]);
    beta2 = (float)scalars[2];
    rest2 = (float)(1 - scalars[2]);
    eps = (float)scalars[3];
    into_gradient = flags & DECOUPLED ? 0 : (float)scalars[4];
    keep = flags & DECOUPLED ? (float)(1 - lr * scalars[4]) : 1;
    rate = (float)(lr / c.first);
    inverse2 = (float)(1 / c.second);
  }

  __device__ __forceinline__ void update(float& p, float g, float& m, float& v) const {
    if (into_gradient != 0) g += into_gradient * p;  // not always: 0 * inf is not 0
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
    p = p * keep - rate * quotient(m, root(v * inverse2) + eps);
  }
};

// scalars: lr, beta1, beta2, weight_decay
struct Lion {
  static constexpr bool STEPS = false;
  float beta1, rest1, beta2, rest2, keep, rate;

  __device__ __forceinline__ void prepare(const double* scalars, u32, double lr, double) {
    beta1 = (float)scalars[1];
    rest1 = (float)(1 - scalars[1]);
    beta2 = (float)scalars[2];
    rest2 = (float)(1 - scalars[2]);
    keep = (float)(1 - lr * scalars[3]);
    rate = (float)lr;
  }

  __device__ __forceinline__ void update(float& p, float g, float& m, float&) const {
    const float blend = beta1 * m + rest1 * g;
    const float sign = (float)(blend > 0) - (float)(blend < 0);  // of nan: 0, as torch
    p = p * keep - rate * sign;
    m = beta2 * m + rest2 * g;
  }
};

// scalars: lr, lr_decay, eps, weight_decay
struct Adagrad {
  static constexpr bool STEPS = true;
  float eps, decay, rate;

  __device__ __forceinline__ void prepare(const double* scalars, u32, double lr, double step) {
    eps = (float)scalars[2];
    decay = (float)scalars[3];
    rate = (float)(lr / (1 + (step - 1) * scalars[1]));
  }

  __device__ __forceinline__ void update(float& p, float g, float& s, float&) const {
    if (decay != 0) g += decay * p;
    s = s + g * g;
    p = p - rate * quotient(g, root(s) + eps);
  }
};

// scalars: lr, momentum, dampening, weight_decay. Without momentum there is no buffer.
struct Sgd {
  static constexpr bool STEPS = false;
  float momentum, rest, decay, rate;
  u32 flags;

  __device__ __forceinline__ void prepare(const double* scalars, u32 with, double lr, double) {
    momentum = (float)scalars[1];
    rest = (float)(1 - scalars[2]);
    decay = (float)scalars[3];
    rate = (float)lr;
    flags = with;
  }

  __device__ __forceinline__ void update(float& p, float g, float& b, float&) const {
    if (decay != 0) g += decay * p;
    if (momentum != 0) {
      b = flags & FIRST ? g : momentum * b + rest * g;
      g = flags & NESTEROV ? g + momentum * b : b;
    }
    p = p - rate * g;
  }
};

// scalars: lr, beta1, beta2, eps, weight_decay, min_coeff, max_coeff
struct Lamb {
  float beta1, rest1, beta2, rest2, eps_inside, eps_outside, decay;

  __device__ __forceinline__ void prepare(const double* scalars, u32 flags) {
    beta1 = (float)scalars[1];
    rest1 = (float)(1 - scalars[1]);
    beta2 = (float)scalars[2];
    rest2 = (float)(1 - scalars[2]);
    eps_inside = flags & EPS_INSIDE ? (float)scalars[3] : 0;
    eps_outside = flags & EPS_INSIDE ? 0 : (float)scalars[3];
    decay = (float)scalars[4];
  }

  __device__ __forceinline__ void moments(float g, float& m, float& v) const {
    m = beta1 * m + rest1 * g;
    v = beta2 * v + rest2 * g * g;
  }

  __device__ __forceinline__ float direction(float p, float m, float v) const {
    return quotient(m, root(v + eps_inside) + eps_outside) + decay * p;
  }

  // What the direction is multiplied by, but for the trust ratio.
  static __device__ __forceinline__ double base_rate(const double* scalars, u32 flags, double lr, double step) {
    const Corrections c(scalars[1], scalars[2], step, flags & BIAS_CORRECTION);
    return lr * sqrt(c.second) / c.first;
  }

  // `squares`: sums of the squares of the param and of its direction.
  static __device__ __forceinline__ double trust_ratio(const double* scalars, double squares_param,
                                                       double squares_direction) {
    double ratio = 1;
    if (squares_param > 0 && squares_direction > 0) {
      ratio = sqrt(squares_param) / sqrt(squares_direction);
      if (ratio < scalars[5]) ratio = scalars[5];  // nan (inf / inf) stays nan
      if (ratio > scalars[6]) ratio = scalars[6];
    }
    return ratio;
  }
};
