// The instructions of Hopper (sm_90a) that C++ has no words for.

#ifndef ZYFA_CUDA_SM90_INTRINSICS_H_
#define ZYFA_CUDA_SM90_INTRINSICS_H_

#include <cstdint>

#include "csrc/cuda/attention_args.h"

#define ZYFA_DEVICE __device__ __forceinline__

namespace zyfa::sm90 {

// ---- Global memory

// How long the L2 cache is to keep what is loaded.
ZYFA_DEVICE uint64_t KeepPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
ZYFA_DEVICE uint64_t LastUsePolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes of what no kernel writes meanwhile; zeros, and no access, unless
// `valid`. Loads start in the order in which they are written down.
ZYFA_DEVICE uint4 LoadIf(bool valid, const void* from, uint64_t policy) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred valid;\n"
      "setp.ne.s32 valid, %6, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;\n"
      "}\n"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "l"(policy), "r"(static_cast<int>(valid)));
  return x;
}

// ---- Addresses and barriers of shared memory, as 32-bit addresses

ZYFA_DEVICE uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

ZYFA_DEVICE void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine.
ZYFA_DEVICE void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

ZYFA_DEVICE void StoreShared(uint32_t address, uint8_t byte) {
  asm volatile("st.shared.b8 [%0], %1;"
               :
               : "r"(address), "r"(uint32_t{byte})
               : "memory");
}
ZYFA_DEVICE void StoreShared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;"
               :
               : "r"(address), "r"(word)
               : "memory");
}
ZYFA_DEVICE void StoreShared(uint32_t address, float x) {
  StoreShared(address, __float_as_uint(x));
}
ZYFA_DEVICE float LoadShared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
ZYFA_DEVICE uint4 LoadShared4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
ZYFA_DEVICE void StoreShared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Makes this thread's stores to shared memory visible to the matrix units and
// the copy engine.
ZYFA_DEVICE void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

ZYFA_DEVICE void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(barrier)
               : "memory");
}

// Arrives, and announces bytes that copies will bring.
ZYFA_DEVICE void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of the given parity is over.
ZYFA_DEVICE void Wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n}\n"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

// Waits for `threads` threads of the block at the hardware barrier `id`.
ZYFA_DEVICE void SyncNamed(int id, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// The same; returns whether all of them say so.
ZYFA_DEVICE bool SyncNamedAll(int id, int threads, bool says) {
  int all;
  asm volatile(
      "{\n.reg .pred says, all;\n"
      "setp.ne.s32 says, %3, 0;\n"
      "barrier.cta.red.and.pred all, %1, %2, says;\n"
      "selp.s32 %0, 1, 0, all;\n}\n"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<int>(says))
      : "memory");
  return __all_sync(~0u, all != 0);  // so that the compiler knows
}

// ---- The copy engine

ZYFA_DEVICE void PrefetchMap(const cuda::TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Coordinates of a box, innermost first.
struct Box {
  int at[5];
};

// Starts the copy of a box to shared memory; its bytes count on the barrier.
ZYFA_DEVICE void CopyBox(uint32_t to, const cuda::TensorMap* map, Box box,
                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global"
      ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
      :
      : "r"(to), "l"(map), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]),
        "r"(box.at[3]), "r"(box.at[4]), "r"(barrier)
      : "memory");
}

// ---- Registers of a warpgroup

template <int kRegisters>
ZYFA_DEVICE void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
ZYFA_DEVICE void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// ---- Matrix products of a warpgroup

// Operands in shared memory: rows of 64 or 128 bytes, swizzled as the copy
// engine swizzles them, in groups of eight rows.
template <int kRowBytes>
ZYFA_DEVICE uint64_t OperandAt(uint32_t address, int leading_bytes = 16) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kGroupBytes = 8 * kRowBytes;
  return (uint64_t{address & 0x3ffff} >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         ((kGroupBytes >> 4) << 32) | (kSwizzle << 62);
}
// The operand some bytes further on.
ZYFA_DEVICE uint64_t Advance(uint64_t operand, int bytes) {
  return operand + static_cast<uint64_t>(bytes >> 4);
}

// Before products that use registers which other instructions have written.
ZYFA_DEVICE void FenceProducts() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
ZYFA_DEVICE void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
// Waits until at most kPending of the committed groups are under way.
template <int kPending>
ZYFA_DEVICE void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;"
               :
               : "n"(kPending)
               : "memory");
}

// After a wait: keeps uses of what products wrote from moving before it; before
// one: keeps work from moving behind it.
template <int kCount>
ZYFA_DEVICE void PinRegisters(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i]) : : "memory");
  }
}
template <class Integer, int kCount>
ZYFA_DEVICE void PinRegisters(Integer (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(registers[i]) : : "memory");
  }
}
template <int kSteps>
ZYFA_DEVICE void PinRegisters(uint32_t (&registers)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    asm volatile("" : "+r"(registers[i / 4][i % 4]) : : "memory");
  }
}

// Operands of an assembler statement: the elements of an array from i on.
#define ZYFA_OPERANDS_4(kind, d, i) \
  kind((d)[i]), kind((d)[(i) + 1]), kind((d)[(i) + 2]), kind((d)[(i) + 3])
#define ZYFA_OPERANDS_16(kind, d, i)                              \
  ZYFA_OPERANDS_4(kind, d, i), ZYFA_OPERANDS_4(kind, d, (i) + 4), \
      ZYFA_OPERANDS_4(kind, d, (i) + 8), ZYFA_OPERANDS_4(kind, d, (i) + 12)
#define ZYFA_OPERANDS_32(kind, d) \
  ZYFA_OPERANDS_16(kind, d, 0), ZYFA_OPERANDS_16(kind, d, 16)
#define ZYFA_OPERANDS_64(kind, d)                              \
  ZYFA_OPERANDS_16(kind, d, 0), ZYFA_OPERANDS_16(kind, d, 16), \
      ZYFA_OPERANDS_16(kind, d, 32), ZYFA_OPERANDS_16(kind, d, 48)
#define ZYFA_OPERANDS_68(kind, d) \
  ZYFA_OPERANDS_64(kind, d), ZYFA_OPERANDS_4(kind, d, 64)
#define ZYFA_NAMES_32                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
  "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31"
#define ZYFA_NAMES_64                                                 \
  ZYFA_NAMES_32                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "    \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, " \
  "%57, %58, %59, %60, %61, %62, %63"
#define ZYFA_NAMES_68 ZYFA_NAMES_64 ", %64, %65, %66, %67"

// One product; `accumulates` is 1 or 0, and then the accumulators are outputs
// alone ("=f"): as inputs they would keep what they held before alive, for
// which there are not enough registers.
#define ZYFA_PRODUCT(count, kind, accumulates, d, shape, operands, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulates          \
               ", 0;\nwgmma.mma_async.sync.aligned." shape              \
               " {" ZYFA_NAMES_##count "}, " operands ";\n}\n"          \
               : ZYFA_OPERANDS_##count(kind, d)                         \
               : __VA_ARGS__)
#define ZYFA_EITHER_PRODUCT(count, kind, accumulates, d, ...) \
  if constexpr (accumulates) {                                \
    ZYFA_PRODUCT(count, "+" kind, "1", d, __VA_ARGS__);       \
  } else {                                                    \
    ZYFA_PRODUCT(count, "=" kind, "0", d, __VA_ARGS__);       \
  }

// 64 rows by 128 columns: d = a b, or d += a b.
struct Fp8Products {
  static constexpr int kDepth = 32;  // of one product, in elements
  // What a product in float32 adds to the sums.
  static constexpr float kBias = 0.0f;

  // Both operands in shared memory.
  template <bool kAccumulates>
  static ZYFA_DEVICE void Multiply(float (&d)[64], uint64_t a, uint64_t b) {
    ZYFA_EITHER_PRODUCT(64, "f", kAccumulates, d, "m64n128k32.f32.e4m3.e4m3",
                        "%64, %65, p, 1, 1", "l"(a), "l"(b));
  }
  // In half precision, two neighbouring columns in a register.
  template <bool kAccumulates>
  static ZYFA_DEVICE void Multiply(uint32_t (&d)[32], uint64_t a, uint64_t b) {
    ZYFA_EITHER_PRODUCT(32, "r", kAccumulates, d, "m64n128k32.f16.e4m3.e4m3",
                        "%32, %33, p, 1, 1", "l"(a), "l"(b));
  }
  // The first operand in registers; 8 columns more.
  template <bool kAccumulates>
  static ZYFA_DEVICE void Multiply(float (&d)[68], const uint32_t (&a)[4],
                                   uint64_t b) {
    ZYFA_EITHER_PRODUCT(68, "f", kAccumulates, d, "m64n136k32.f32.e4m3.e4m3",
                        "{%68, %69, %70, %71}, %72, p, 1, 1", "r"(a[0]),
                        "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

// Of int8, both operands in shared memory.
struct Int8Products {
  static constexpr int kDepth = 32;
  // The number of which 1 is the last place: sums that begin as its bits are
  // float32, too, while they stay below 2^22 without it.
  static constexpr float kBias = 0x1.8p23f;

  template <bool kAccumulates>
  static ZYFA_DEVICE void Multiply(int32_t (&d)[64], uint64_t a, uint64_t b) {
    ZYFA_EITHER_PRODUCT(64, "r", kAccumulates, d, "m64n128k32.s32.s8.s8",
                        "%64, %65, p", "l"(a), "l"(b));
  }
  template <bool kAccumulates>
  static ZYFA_DEVICE void Multiply(float (&d)[64], uint64_t a, uint64_t b) {
    if (!kAccumulates) {
#pragma unroll
      for (float& sum : d) sum = kBias;
      FenceProducts();
    }
    Multiply<true>(reinterpret_cast<int32_t (&)[64]>(d), a, b);
  }
};

// The first operand of the second kind in registers; the second's rows lie
// along the depth.
#define ZYFA_TWO_BYTE_PRODUCTS(Name, type)                                     \
  struct Name {                                                                \
    static constexpr int kDepth = 16;                                          \
    static constexpr float kBias = 0.0f;                                       \
                                                                               \
    template <bool kAccumulates>                                               \
    static ZYFA_DEVICE void Multiply(float (&d)[64], uint64_t a, uint64_t b) { \
      ZYFA_EITHER_PRODUCT(64, "f", kAccumulates, d,                            \
                          "m64n128k16.f32." type "." type,                     \
                          "%64, %65, p, 1, 1, 0, 0", "l"(a), "l"(b));          \
    }                                                                          \
    template <bool kAccumulates>                                               \
    static ZYFA_DEVICE void Multiply(float (&d)[64], const uint32_t (&a)[4],   \
                                     uint64_t b) {                             \
      ZYFA_EITHER_PRODUCT(64, "f", kAccumulates, d,                            \
                          "m64n128k16.f32." type "." type,                     \
                          "{%64, %65, %66, %67}, %68, p, 1, 1, 1", "r"(a[0]),  \
                          "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));            \
    }                                                                          \
  }
ZYFA_TWO_BYTE_PRODUCTS(BF16Products, "bf16");
ZYFA_TWO_BYTE_PRODUCTS(F16Products, "f16");

#undef ZYFA_TWO_BYTE_PRODUCTS
#undef ZYFA_EITHER_PRODUCT
#undef ZYFA_PRODUCT
#undef ZYFA_NAMES_68
#undef ZYFA_NAMES_64
#undef ZYFA_NAMES_32
#undef ZYFA_OPERANDS_68
#undef ZYFA_OPERANDS_64
#undef ZYFA_OPERANDS_32
#undef ZYFA_OPERANDS_16
#undef ZYFA_OPERANDS_4

// ---- Numbers

// NaN if either is.
ZYFA_DEVICE float Maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

ZYFA_DEVICE float Minimum(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 2^x; denormal results become 0.
ZYFA_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x, of normal numbers.
ZYFA_DEVICE float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ZYFA_DEVICE float Log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Two halves each

ZYFA_DEVICE uint32_t MultiplyHalves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// a b + c, rounded once.
ZYFA_DEVICE uint32_t MultiplyAddHalves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// The same, but 0 for what is below it.
ZYFA_DEVICE uint32_t MultiplyAddHalvesAboveZero(uint32_t a, uint32_t b,
                                                uint32_t c) {
  uint32_t y;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Two e4m3 in the low 16 bits as halves, and back.
ZYFA_DEVICE uint32_t HalvesOfE4m3(uint32_t both) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
      : "=r"(y)
      : "h"(static_cast<uint16_t>(both)));
  return y;
}
ZYFA_DEVICE uint32_t E4m3OfHalves(uint32_t both) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(both));
  return y;
}

ZYFA_DEVICE void WidenHalves(uint32_t both, float& low, float& high) {
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(low), "=f"(high)
      : "r"(both));
}

// Two numbers rounded to half precision, negative ones to 0.
ZYFA_DEVICE uint32_t PackHalvesAboveZero(float low, float high) {
  uint32_t y;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
ZYFA_DEVICE uint32_t PackHalves(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
ZYFA_DEVICE uint32_t PackBFloats(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// Two numbers as e4m3 in the low 16 bits.
ZYFA_DEVICE uint32_t PackE4m3(float low, float high) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(y)
      : "f"(high), "f"(low));
  return y;
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_INTRINSICS_H_
