// The source of the quantisation kernels, compiled for the host: each lane is a
// context of its own, and the lanes of a block take turns. Built by
// conftest.py.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "csrc/numerics/e4m3.h"

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

namespace {

struct Index {
  unsigned x;
};
Index threadIdx, blockIdx, blockDim, gridDim;

struct Lane {
  ucontext_t context;
  std::vector<char> stack;
  unsigned exchanges;
  bool done;
};
std::vector<Lane> lanes;
ucontext_t scheduler;

// What a warp's lanes show each other. No lane is more than one exchange ahead.
struct Shown {
  uint32_t slots[2][32];
};
std::vector<Shown> warps;
unsigned arrivals;
bool voted;

// Until every lane of the block has had its turn.
void Yield() { swapcontext(&lanes[threadIdx.x].context, &scheduler); }

const uint32_t* Exchange(uint32_t mine) {
  Lane& lane = lanes[threadIdx.x];
  auto& slots = warps[threadIdx.x / 32].slots[lane.exchanges++ % 2];
  slots[threadIdx.x % 32] = mine;
  Yield();
  return slots;
}

void __syncthreads() {
  const unsigned all = (arrivals++ / blockDim.x + 1) * blockDim.x;
  while (arrivals < all) Yield();
}

// Of one vote a block.
bool __syncthreads_or(bool mine) {
  voted |= mine;
  __syncthreads();
  return voted;
}

void __syncwarp() { Exchange(0); }

template <class To, class From>
To Bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
uint32_t __float_as_uint(float x) { return Bits<uint32_t>(x); }
float __uint_as_float(uint32_t x) { return Bits<float>(x); }
float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T>
T __ldg(const T* from) {
  return *from;
}

uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  const uint32_t* slots = Exchange(x);
  return *std::max_element(slots, slots + 32);
}
float __shfl_xor_sync(uint32_t, float x, int mask) {
  return Bits<float>(Exchange(Bits<uint32_t>(x))[(threadIdx.x % 32) ^ mask]);
}

uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selectors >> 4 * i & 7;
    bytes |= static_cast<uint32_t>(both >> 8 * from & 0xff) << 8 * i;
  }
  return bytes;
}
int __popc(uint32_t x) { return __builtin_popcount(x); }
// Lanes take turns, so that no other's comes between.
void atomicMax(uint32_t* to, uint32_t x) { *to = std::max(*to, x); }

using std::min;

}  // namespace

// In place of csrc/cuda/sm90/intrinsics.h.
#define ZYFA_CUDA_SM90_INTRINSICS_H_
#define ZYFA_DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define ZYFA_CUDA_SM90_WARP_PRODUCTS_H_

namespace zyfa::sm90 {

uint64_t KeepPolicy() { return 0; }
uint64_t LastUsePolicy() { return 1; }

uint4 LoadIf(bool valid, const void* from, uint64_t) {
  uint4 x = {};
  if (valid) std::memcpy(&x, from, sizeof(x));
  return x;
}

float Maximum(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
}
float Minimum(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b);
}

float Widen(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int fraction = half & 1023;
  const float x = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(fraction, -24)
                                  : std::ldexp(1024 + fraction, exponent - 25);
  return half >> 15 ? -x : x;
}
void WidenHalves(uint32_t both, float& low, float& high) {
  low = Widen(static_cast<uint16_t>(both));
  high = Widen(static_cast<uint16_t>(both >> 16));
}

uint32_t Encode(float x) {
  if (std::isnan(x)) return numerics::kE4m3NaN;
  return numerics::EncodeE4m3Magnitude(std::fabs(x)) |
         (std::signbit(x) ? 0x80 : 0);
}
uint32_t PackE4m3(float low, float high) {
  return Encode(low) | Encode(high) << 8;
}

// See csrc/cuda/sm90/warp_products.h.
template <class FromHalf>
__attribute__((noinline)) void WarpProduct(float (&d)[4],
                                           const uint32_t (&a)[4],
                                           const uint32_t (&b)[2],
                                           const float (&c)[4],
                                           const FromHalf& widen) {
  float left[16][16], right[16][8];
  const auto show = [&](uint32_t mine, const auto& element) {
    const uint32_t* all = Exchange(mine);
    for (int lane = 0; lane < 32; ++lane) {
      element(lane / 4, lane % 4 * 2, widen(all[lane] & 0xffff));
      element(lane / 4, lane % 4 * 2 + 1, widen(all[lane] >> 16));
    }
  };
  for (int i = 0; i < 4; ++i) {
    show(a[i], [&](int g, int k, float x) {
      left[g + i % 2 * 8][k + i / 2 * 8] = x;
    });
  }
  for (int i = 0; i < 2; ++i) {
    show(b[i], [&](int g, int k, float x) { right[k + i * 8][g] = x; });
  }
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      sum += double{left[lane / 4 + i / 2 * 8][k]} *
             right[k][lane % 4 * 2 + i % 2];
    }
    d[i] = static_cast<float>(sum);
  }
}
void WarpProductBF16(float (&d)[4], const uint32_t (&a)[4],
                     const uint32_t (&b)[2], const float (&c)[4]) {
  WarpProduct(d, a, b, c, [](uint32_t x) { return Bits<float>(x << 16); });
}
void WarpProductF16(float (&d)[4], const uint32_t (&a)[4],
                    const uint32_t (&b)[2], const float (&c)[4]) {
  WarpProduct(d, a, b, c,
              [](uint32_t x) { return Widen(static_cast<uint16_t>(x)); });
}

}  // namespace zyfa::sm90

#include "csrc/cuda/sm90/quantize.cu"

namespace {

using Kernel = void (*)(zyfa::gpu::QuantizeArgs);
struct Named {
  const char* name;
  Kernel kernel;
};
#define NAMED(name) {"zyfa_quantize_" #name, zyfa_quantize_##name}
#define NAMED_ROTATED(name, tail)                          \
  NAMED(name##_rotated##tail), NAMED(name##_tokens##tail), \
      NAMED(name##_blocks##tail)
#define NAMED_BY_LANES(name)                                  \
  NAMED(name), NAMED(name##_channels), NAMED(name##_measure), \
      NAMED_ROTATED(name, )
#define NAMED_TWO_BYTES(type)                                                \
  NAMED_BY_LANES(type##_128), NAMED_BY_LANES(type##_256),                    \
      NAMED_ROTATED(type##_64, _matrix), NAMED_ROTATED(type##_128, _matrix), \
      NAMED_ROTATED(type##_192, _matrix), NAMED_ROTATED(type##_256, _matrix)
constexpr Named kKernels[] = {
    NAMED_TWO_BYTES(bf16),          NAMED_TWO_BYTES(f16),
    NAMED_BY_LANES(f32_128),        NAMED_BY_LANES(f32_256),
    NAMED_ROTATED(f32_128, _whole), NAMED_ROTATED(f32_256, _whole)};

Kernel kernel;
zyfa::gpu::QuantizeArgs args;

void RunLane() {
  kernel(args);
  lanes[threadIdx.x].done = true;
}

void RunBlock() {
  arrivals = 0;
  voted = false;
  for (Lane& lane : lanes) {
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.data();
    lane.context.uc_stack.ss_size = lane.stack.size();
    lane.context.uc_link = &scheduler;
    lane.exchanges = 0;
    lane.done = false;
    makecontext(&lane.context, RunLane, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (unsigned i = 0; i < lanes.size(); ++i) {
      if (lanes[i].done) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &lanes[i].context);
      running = true;
    }
  }
}

}  // namespace

// Runs a launch; false where there is no such kernel, or a warp is not whole.
extern "C" __attribute__((visibility("default"))) bool quantize_on_host(
    const char* name, unsigned blocks, unsigned threads, const void* given) {
  kernel = nullptr;
  for (const Named& named : kKernels) {
    if (std::strcmp(named.name, name) == 0) kernel = named.kernel;
  }
  if (kernel == nullptr || threads % 32 != 0) return false;
  std::memcpy(&args, given, sizeof(args));
  lanes.resize(threads);
  warps.resize(threads / 32);
  for (Lane& lane : lanes) lane.stack.resize(64 << 10);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) RunBlock();
  return true;
}
