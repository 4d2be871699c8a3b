// What every kernel shares: dtypes, the table of tensors a launch works on, tiles, and access to them.
//
// A launch covers up to DS_CAPACITY entries (a param and what belongs to it), cut into tiles of TILE elements that are
// numbered through all entries. Blocks take tiles in turn. Thread t of a block holds the same ITEMS elements of each
// tensor of the entry. Two ways to hold them: WHOLE, vectors of VEC elements, for full tiles whose pointers are all
// aligned to a vector; otherwise single elements, a warp's side by side, with a check of the end.
//
// No header of CUDA is needed, so NVRTC needs no include path. The tests also compile this as C++ on the host, with
// stand-ins for what is CUDA's; there __CUDA_ARCH__ is not defined.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DS_F32 0
#define DS_BF16 1
#define DS_F16 2
#define DS_NONE 3
#define DS_LOW 4  // in the place of `out`: the low half of a master whose high half is the param

#ifndef DS_CAPACITY
#define DS_CAPACITY 60  // keeps the table under the 4 KB that every driver takes as parameters
#endif
#ifndef DS_THREADS
#define DS_THREADS 256
#endif
#ifndef DS_BLOCKS  // blocks a multiprocessor holds at once: limits the registers of a thread
#define DS_BLOCKS 4
#endif
#ifndef DS_VEC  // elements of one vector access of fp32; 4 is 16 bytes, and a warp's accesses leave no gaps
#define DS_VEC 4
#endif
#ifndef DS_GROUPS  // vectors that a thread holds of each tensor
#define DS_GROUPS 2
#endif
#ifndef DS_STREAM  // 1: tell the caches what is not used twice
#define DS_STREAM 1
#endif

#ifndef DS_EXACT  // 1: quotients and roots to the last bit; 0: to 2 units of it, without branches
#define DS_EXACT 1
#endif
#ifndef DS_SHARED  // an array in a block's shared memory
#define DS_SHARED(type, name, count) __shared__ type name[count]
#endif
#ifndef DS_DYNAMIC  // what the launch adds to it
#define DS_DYNAMIC(name) extern __shared__ uint4 name[]
#endif

constexpr u32 THREADS = DS_THREADS, VEC = DS_VEC, GROUPS = DS_GROUPS;
constexpr u32 ITEMS = VEC * GROUPS, TILE = THREADS * ITEMS;
constexpr int PLACES = 5;

// ds_hf/engine/ops/cuda_launch.py fills the same struct: keep them alike.
struct Table {
  u64 workspace;         // memory of the call, meaning as each kernel says
  const float* control;  // null, or {what gradients are multiplied by, skip if not 0}
  const float* lr;       // null: scalars[0]
  u64 seed;
  double scalars[8];
  u32 tiles, entries;
  u32 first_entry;  // of the first entry, in the lists of the call
  u32 flags;
  u32 extra[4];
  const float* steps[DS_CAPACITY];
  i64 numel[DS_CAPACITY];
  void* pointers[PLACES][DS_CAPACITY];
  u32 first_tile[DS_CAPACITY];
  u32 group_end[DS_CAPACITY];
};
static_assert(DS_CAPACITY > 60 || sizeof(Table) <= 4096 - 32, "more than the classic limit of kernel parameters");

template <class To, class From>
__device__ __forceinline__ To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- dtypes: `raw` is what lies in memory, arithmetic is in float

struct F32 {
  using raw = float;
  static constexpr bool exists = true;
  static __device__ __forceinline__ float wide(raw value) { return value; }
  static __device__ __forceinline__ raw narrow(float value) { return value; }
};

struct BF16 {
  using raw = u16;
  static constexpr bool exists = true;
  static __device__ __forceinline__ float wide(raw value) { return bits<float>((u32)value << 16); }
  static __device__ __forceinline__ raw narrow(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    raw result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const u32 word = bits<u32>(value);
    if (value != value) return (raw)((word >> 16) | 0x40);  // quiet, and never rounded to infinity
    return (raw)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
#endif
  }
};

struct F16 {
  using raw = u16;
  static constexpr bool exists = true;
#ifdef __CUDA_ARCH__
  static __device__ __forceinline__ float wide(raw value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
  }
  static __device__ __forceinline__ raw narrow(float value) {
    raw result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
  }
#else
  static float wide(raw value) { return host_half_to_float(value); }
  static raw narrow(float value) { return host_float_to_half(value); }
#endif
};

struct None {
  using raw = u16;
  static constexpr bool exists = false;
  static __device__ __forceinline__ float wide(raw) { return 0; }
  static __device__ __forceinline__ raw narrow(float) { return 0; }
};

// The low bits of an fp32 whose high half is bf16, see ds_hf/engine/ops/split_master.py.
struct Low {
  using raw = u16;
  static constexpr bool exists = true;
  static __device__ __forceinline__ float wide(raw) { return 0; }
  static __device__ __forceinline__ raw narrow(float) { return 0; }

  static __device__ __forceinline__ float join(u16 high, u16 low) {
    return bits<float>(((u32)high << 16) + (u32)(int)(short)low);
  }

  static __device__ __forceinline__ u16 high_of(float value) {
    return value != value ? 0x7fff : (u16)((bits<u32>(value) + 0x8000) >> 16);
  }

  static __device__ __forceinline__ u16 low_of(float value) { return value != value ? 0 : (u16)bits<u32>(value); }
};

template <int>
struct Numbered;
template <>
struct Numbered<DS_F32> {
  using type = F32;
};
template <>
struct Numbered<DS_BF16> {
  using type = BF16;
};
template <>
struct Numbered<DS_F16> {
  using type = F16;
};
template <>
struct Numbered<DS_NONE> {
  using type = None;
};
template <>
struct Numbered<DS_LOW> {
  using type = Low;
};

// ---- access

// ONCE: nothing will read it again soon, so that it is the first to leave the caches.
template <class Vector, bool ONCE>
__device__ __forceinline__ Vector fetch(const void* from) {
  if constexpr (ONCE) return __ldcs((const Vector*)from);
  return *(const Vector*)from;
}

template <class Vector, bool ONCE>
__device__ __forceinline__ void put(void* to, Vector value) {
  if constexpr (ONCE) {
    __stcs((Vector*)to, value);
  } else {
    *(Vector*)to = value;
  }
}

// A thread's elements of one tensor, of one tile.
template <class D>
struct Lane {
  typename D::raw value[ITEMS];
};

// Where, in the tile, element `item` of this thread is.
template <bool WHOLE>
__device__ __forceinline__ u32 place(u32 item) {
  return WHOLE ? (item / VEC * THREADS + threadIdx.x) * VEC + item % VEC : item * THREADS + threadIdx.x;
}

template <class D, bool WHOLE, bool ONCE = DS_STREAM>
__device__ __forceinline__ void load(Lane<D>& lane, const typename D::raw* tile, u32 left) {
  using raw = typename D::raw;
  if constexpr (!D::exists) return;
  if constexpr (WHOLE) {
    constexpr u32 bytes = VEC * sizeof(raw);
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
      const raw* from = tile + place<true>(group * VEC);
      raw* to = lane.value + group * VEC;
      if constexpr (bytes == 8) {
        const uint2 word = fetch<uint2, ONCE>(from);
        memcpy(to, &word, 8);
      } else {
#pragma unroll
        for (u32 part = 0; part < bytes / 16; ++part) {
          const uint4 word = fetch<uint4, ONCE>((const uint4*)from + part);
          memcpy(to + part * 16 / sizeof(raw), &word, 16);
        }
      }
    }
  } else {
#pragma unroll
    for (u32 item = 0; item < ITEMS; ++item) {
      const u32 at = place<false>(item);
      lane.value[item] = at < left ? fetch<raw, ONCE>(tile + at) : raw(0);
    }
  }
}

template <class D, bool WHOLE, bool ONCE = DS_STREAM>
__device__ __forceinline__ void store(const Lane<D>& lane, typename D::raw* tile, u32 left) {
  using raw = typename D::raw;
  if constexpr (!D::exists) return;
  if constexpr (WHOLE) {
    constexpr u32 bytes = VEC * sizeof(raw);
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
      raw* to = tile + place<true>(group * VEC);
      const raw* from = lane.value + group * VEC;
      if constexpr (bytes == 8) {
        uint2 word;
        memcpy(&word, from, 8);
        put<uint2, ONCE>(to, word);
      } else {
#pragma unroll
        for (u32 part = 0; part < bytes / 16; ++part) {
          uint4 word;
          memcpy(&word, from + part * 16 / sizeof(raw), 16);
          put<uint4, ONCE>((uint4*)to + part, word);
        }
      }
    }
  } else {
#pragma unroll
    for (u32 item = 0; item < ITEMS; ++item) {
      const u32 at = place<false>(item);
      if (at < left) put<raw, ONCE>(tile + at, lane.value[item]);
    }
  }
}

// ---- tiles

struct Tile {
  u32 entry;
  i64 begin;  // its first element, in the entry
  u32 left;   // elements from there on, at most TILE
};

// The last entry that begins at or before the tile, which leaves out empty ones.
__device__ __forceinline__ u32 entry_of(const Table& table, u32 tile) {
  u32 low = 0, high = table.entries - 1;
  while (low < high) {
    const u32 middle = (low + high + 1) / 2;
    if (table.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ u32 end_tile(const Table& table, u32 entry) {
  return entry + 1 < table.entries ? table.first_tile[entry + 1] : table.tiles;
}

__device__ __forceinline__ Tile tile_at(const Table& table, u32 tile, u32 entry_before) {
  Tile result;
  const bool same = entry_before < table.entries && tile >= table.first_tile[entry_before] &&
                    tile < end_tile(table, entry_before);
  result.entry = same ? entry_before : entry_of(table, tile);
  result.begin = (i64)(tile - table.first_tile[result.entry]) * TILE;
  const i64 left = table.numel[result.entry] - result.begin;
  result.left = left < (i64)TILE ? (u32)left : TILE;
  return result;
}

template <class D>
__device__ __forceinline__ typename D::raw* tensor(const Table& table, int which, const Tile& tile) {
  return (typename D::raw*)table.pointers[which][tile.entry] + tile.begin;
}

// Whether every vector of this tensor is aligned: tiles begin at a multiple of 16 bytes from the tensor's begin.
template <class D>
__device__ __forceinline__ bool aligned(const Table& table, int which, u32 entry) {
  constexpr u64 bytes = VEC * sizeof(typename D::raw);
  return !D::exists || ((u64)table.pointers[which][entry] & ((bytes < 16 ? bytes : 16) - 1)) == 0;
}

// ---- sums of a block

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Of COUNT values at once, in the same order each time. The results are thread 0's; every thread must come here.
template <int COUNT>
__device__ __forceinline__ void block_sum(double (&values)[COUNT], double* of_warps /* shared, COUNT for each warp */) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = THREADS / 32;
#pragma unroll
  for (int which = 0; which < COUNT; ++which) values[which] = warp_sum(values[which]);
  __syncthreads();  // of_warps may still be read by who was here before
#pragma unroll
  for (int which = 0; which < COUNT; ++which) {
    if (lane == 0) of_warps[which * warps + warp] = values[which];
  }
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int which = 0; which < COUNT; ++which) {
    values[which] = warp_sum(lane < warps ? of_warps[which * warps + lane] : 0.0);
  }
}

// ---- kernels and blocks that wait for others

// Nothing that the kernel before on the stream writes may be used above this. Where the launch does not let the two
// overlap, that one has ended already.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start where there is room, once all blocks have come here.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void fetch_ahead(const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));  // the cache of all: it cannot get stale
#endif
}

// ---- messages: a number, and above it that of the launch that sends it. Memory for them is never written otherwise
// and was 0 at first, so a word says itself whether it has come, and neither side needs a fence.

__device__ __forceinline__ u64 message_of(float value, u32 launch) { return (u64)launch << 32 | bits<u32>(value); }

__device__ __forceinline__ bool came(u64 message, u32 launch) { return (u32)(message >> 32) == launch; }

__device__ __forceinline__ float value_of(u64 message) { return bits<float>((u32)message); }

__device__ __forceinline__ void send(u64* to, u64 message) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(message) : "memory");
#else
  *to = message;
#endif
}

// What is there now.
__device__ __forceinline__ u64 look(const u64* from) {
#ifdef __CUDA_ARCH__
  u64 message;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(message) : "l"(from) : "memory");
  return message;
#else
  return *from;
#endif
}

// ---- stochastic rounding

// The finalizer of splitmix64: each input bit reaches every output bit.
__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// 64 random bits of one element: 16 for each tensor of the entry.
struct Noise {
  u64 key;
  __device__ __forceinline__ Noise(u64 seed, u64 entry) : key(mix(mix(seed + 0x9e3779b97f4a7c15ull) + entry + 1)) {}
  __device__ __forceinline__ u64 of(i64 element) const { return mix(key + (u64)element * 0x9e3779b97f4a7c15ull); }
};

// bf16 is the upper half of fp32: carrying random bits out of the lower half rounds up in proportion to it.
template <class D, bool STOCHASTIC>
__device__ __forceinline__ typename D::raw rounded(float value, u64 noise, int which) {
  if constexpr (STOCHASTIC && sizeof(typename D::raw) == 2) {
    const u32 word = bits<u32>(value);
    if ((word & 0x7f800000) != 0x7f800000) return (u16)((word + (u32)((noise >> (16 * which)) & 0xffff)) >> 16);
  }
  return D::narrow(value);
}
