// Names for the gfx950 instructions that the kernels use. A wave has 64 lanes;
// "half" is lane / 32.

#ifndef ZYFA_ROCM_GFX950_INTRINSICS_H_
#define ZYFA_ROCM_GFX950_INTRINSICS_H_

#include <cstdint>

#define ZYFA_DEVICE static inline __attribute__((device, always_inline))

namespace zyfa::gfx950 {

using F32x2 = float __attribute__((ext_vector_type(2)));
using F32x4 = float __attribute__((ext_vector_type(4)));
using F32x16 = float __attribute__((ext_vector_type(16)));
using I32x2 = int32_t __attribute__((ext_vector_type(2)));
using I32x4 = int32_t __attribute__((ext_vector_type(4)));
using I32x8 = int32_t __attribute__((ext_vector_type(8)));
using I32x16 = int32_t __attribute__((ext_vector_type(16)));
using I16x2 = int16_t __attribute__((ext_vector_type(2)));
using I16x4 = int16_t __attribute__((ext_vector_type(4)));
using U16x2 = uint16_t __attribute__((ext_vector_type(2)));
using BF16x2 = __bf16 __attribute__((ext_vector_type(2)));
using BF16x8 = __bf16 __attribute__((ext_vector_type(8)));
using F16x2 = _Float16 __attribute__((ext_vector_type(2)));
using F16x8 = _Float16 __attribute__((ext_vector_type(8)));

template <class To, class From>
ZYFA_DEVICE To BitCast(From from) {
  return __builtin_bit_cast(To, from);
}

// ---- Threads

ZYFA_DEVICE int Thread() { return __builtin_amdgcn_workitem_id_x(); }
ZYFA_DEVICE int Group() { return __builtin_amdgcn_workgroup_id_x(); }
// Tells the compiler that all lanes hold the same number.
ZYFA_DEVICE int Uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
ZYFA_DEVICE bool AnyLane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }

// The kernel's one argument, in constant memory.
template <class T>
using Constant = const __attribute__((address_space(4))) T;

template <class T>
ZYFA_DEVICE Constant<T>& KernelArgument() {
  return *(Constant<T>*)__builtin_amdgcn_kernarg_segment_ptr();
}

// The same, of which the compiler does not know that it has read it before:
// what is read through it takes no registers until then.
template <class T>
ZYFA_DEVICE Constant<T>& Reread(Constant<T>& argument) {
  auto* pointer = &argument;
  asm volatile("" : "+s"(pointer));
  return *pointer;
}

// Of `x`, the same in all lanes, the compiler must have computed or read the
// value here, and cannot do it later.
template <class T>
ZYFA_DEVICE void Pin(T& x) {
  asm volatile("" : "+s"(x));
}

// Memory that no kernel writes while this one runs: read by the scalar unit.
template <class T>
ZYFA_DEVICE Constant<T>* Unwritten(const T* pointer) {
  return (Constant<T>*)pointer;
}

// The same, read here and not where it is used.
template <class T>
ZYFA_DEVICE T ReadHere(Constant<T>* pointer) {
  return *(volatile Constant<T>*)pointer;
}

// A pointer to device memory, of which the compiler knows that it is one.
template <class T>
using GlobalPointer = __attribute__((address_space(1))) T*;

template <class T>
ZYFA_DEVICE GlobalPointer<T> Global(T* pointer) {
  return (GlobalPointer<T>)pointer;
}

// Nothing moves across: neither instructions nor what memory holds.
ZYFA_DEVICE void Barrier() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_sched_barrier(0);
  asm volatile("" ::: "memory");
}

// The wave's rank among those that compete for one SIMD's issue slots.
template <int kPriority>
ZYFA_DEVICE void SetPriority() {
  __builtin_amdgcn_s_setprio(kPriority);
}

// The order of a region's instructions, for the scheduler: next come `kCount`
// LDS reads or vector instructions, or one matrix product.
template <int kCount>
ZYFA_DEVICE void ScheduleLdsReads() {
  constexpr int kLdsRead = 0x100;
  __builtin_amdgcn_sched_group_barrier(kLdsRead, kCount, 0);
}
ZYFA_DEVICE void ScheduleProduct() {
  constexpr int kMatrix = 0x8;
  __builtin_amdgcn_sched_group_barrier(kMatrix, 1, 0);
}
template <int kCount>
ZYFA_DEVICE void ScheduleVector() {
  constexpr int kVector = 0x2;
  __builtin_amdgcn_sched_group_barrier(kVector, kCount, 0);
}
// All of these are computed before anything is made of one of them.
template <class T>
ZYFA_DEVICE void ScheduleAll(T (&x)[8]) {
  asm volatile(""
               : "+v"(x[0]), "+v"(x[1]), "+v"(x[2]), "+v"(x[3]), "+v"(x[4]),
                 "+v"(x[5]), "+v"(x[6]), "+v"(x[7]));
}
// These are computed here, not where they are used.
ZYFA_DEVICE void ScheduleAll(F32x16 (&x)[4]) {
  asm volatile("" : "+v"(x[0]), "+v"(x[1]), "+v"(x[2]), "+v"(x[3]));
}
// The compiler forgets what it is, and keeps it instead of making it anew.
ZYFA_DEVICE void Keep(F32x16& x) { asm volatile("" : "+v"(x)); }
// Instructions stay on their side.
ZYFA_DEVICE void ScheduleFence() { __builtin_amdgcn_sched_barrier(0); }

// ---- Memory to LDS

// A buffer resource: loads at or beyond `bytes` from `address` give zeros.
ZYFA_DEVICE I32x4 BufferOf(uint64_t address, int bytes) {
  constexpr int kRawFormat = 0x00020000;
  return {Uniform(static_cast<int>(address)),
          Uniform(static_cast<int>(address >> 32)), Uniform(bytes), kRawFormat};
}

// Each lane copies 16 bytes at `offset` of the buffer; together they fill 1024
// bytes of LDS from `lds`. Written as text so that the compiler does not wait
// for the copy before each LDS read that it cannot tell apart from it:
// WaitForCopies does; so that it does not see either that the copy needs a wait
// state after M0 is written, and five after a vector instruction wrote a scalar
// register of the buffer.
ZYFA_DEVICE void CopyToLds(I32x4 buffer, int offset, int lds) {
  asm volatile(
      "s_mov_b32 m0, %0\n\t"
      "s_nop 3\n\t"
      "buffer_load_dwordx4 %1, %2, 0 offen lds"
      :
      : "s"(lds), "v"(offset), "s"(buffer));
}

// Waits until no more than the latest `kCount` copies (and other memory
// operations) of this wave are under way.
template <int kCount>
ZYFA_DEVICE void WaitForCopies() {
  static_assert(kCount < 16);
  constexpr int kOthersDoNotCount = 0x0f70;
  __builtin_amdgcn_s_waitcnt(kOthersDoNotCount | kCount);
}

// ---- LDS to registers

template <class T>
using LdsPointer = __attribute__((address_space(3))) T*;

ZYFA_DEVICE int LdsAddress(void* shared) {
  return static_cast<int>(
      reinterpret_cast<uintptr_t>((LdsPointer<void>)shared));
}

// `offset` becomes part of the instruction: it is known when the kernel is
// compiled, and `address` is not below zero.
template <class T>
ZYFA_DEVICE LdsPointer<T> AtLds(int address, int offset) {
  return reinterpret_cast<LdsPointer<T>>(
      reinterpret_cast<LdsPointer<char>>(address) + offset);
}

template <class T>
ZYFA_DEVICE T ReadLds(int address, int offset) {
  return *AtLds<T>(address, offset);
}

// Transposing reads work on groups of 16 lanes, each lane with the address of
// eight bytes. Read8: two lanes name a row of 16 bytes; lane i receives byte i
// of each of the eight rows. Read16: four lanes name a row of 16 halfwords;
// lane i receives halfword i of each of the four rows.
ZYFA_DEVICE I32x2 ReadTransposed8(int address, int offset) {
  return __builtin_amdgcn_ds_read_tr8_b64_v2i32(AtLds<I32x2>(address, offset));
}
ZYFA_DEVICE I32x2 ReadTransposed16(int address, int offset) {
  return BitCast<I32x2>(
      __builtin_amdgcn_ds_read_tr16_b64_v4i16(AtLds<I16x4>(address, offset)));
}

// ---- Between lanes

// The lower half receives its own `a` and the upper half's; the upper half, the
// lower half's `b` and its own.
ZYFA_DEVICE I32x2 SwapHalves(int32_t a, int32_t b) {
  const auto both = __builtin_amdgcn_permlane32_swap(a, b, false, false);
  return {static_cast<int32_t>(both[0]), static_cast<int32_t>(both[1])};
}
// The value of the lower half's lane and that of the upper half's.
ZYFA_DEVICE F32x2 BothHalves(float x) {
  return BitCast<F32x2>(SwapHalves(BitCast<int32_t>(x), BitCast<int32_t>(x)));
}

// `x` of lane `lane` of each lane's row of 16; `lane` is known when the kernel
// is compiled.
template <int kLane = 0>
ZYFA_DEVICE float OfRow(float x, int lane) {
  if constexpr (kLane < 15) {
    if (lane != kLane) return OfRow<kLane + 1>(x, lane);
  }
  constexpr int kBroadcast = 0x150;
  constexpr int kAll = 0xf;
  return BitCast<float>(__builtin_amdgcn_mov_dpp(
      BitCast<int32_t>(x), kBroadcast + kLane, kAll, kAll, true));
}

// ---- Bits

// The lowest `count` bits; none below 0, all beyond 31.
ZYFA_DEVICE uint32_t LowBits(int count) {
  const int bits = count < 0 ? 0 : count > 32 ? 32 : count;
  return static_cast<uint32_t>((uint64_t{1} << bits) - 1);
}

// `x` where bit `bit` of `mask` is set, else `other`: two instructions, and no
// wait for a scalar register as after a comparison.
ZYFA_DEVICE float Select(uint32_t mask, int bit, float x, float other) {
  const auto all = static_cast<uint32_t>(
      __builtin_amdgcn_sbfe(static_cast<int32_t>(mask), bit, 1));
  return BitCast<float>((all & BitCast<uint32_t>(x)) |
                        (~all & BitCast<uint32_t>(other)));
}

// ---- Arithmetic

// NaN if either is.
ZYFA_DEVICE float Maximum(float a, float b) {
  return __builtin_elementwise_maximum(a, b);
}
ZYFA_DEVICE float Fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
// One packed instruction, on the matrix unit's multipliers.
ZYFA_DEVICE F32x2 Fma(F32x2 a, F32x2 b, F32x2 c) {
  return __builtin_elementwise_fma(a, b, c);
}
ZYFA_DEVICE F16x2 Fma(F16x2 a, F16x2 b, F16x2 c) {
  return __builtin_elementwise_fma(a, b, c);
}
ZYFA_DEVICE float Exp2(float x) { return __builtin_amdgcn_exp2f(x); }
ZYFA_DEVICE float Reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
ZYFA_DEVICE float Log2(float x) { return __builtin_amdgcn_logf(x); }

// Clamped to [0, 1], times 65535, rounded: two of them.
ZYFA_DEVICE uint32_t ToUnorm16(F32x2 x) {
  return BitCast<uint32_t>(__builtin_amdgcn_cvt_pknorm_u16(x[0], x[1]));
}

// Two numbers rounded to e4m3, into the low or the high half of `into`.
template <bool kHigh>
ZYFA_DEVICE int32_t InsertFp8(int32_t into, F16x2 x) {
  return BitCast<int32_t>(__builtin_amdgcn_cvt_scalef32_pk_fp8_f16(
      BitCast<I16x2>(into), x, 1.0f, kHigh));
}

// The high bytes of four halfwords.
ZYFA_DEVICE int32_t HighBytes(uint32_t low_pair, uint32_t high_pair) {
  return static_cast<int32_t>(
      __builtin_amdgcn_perm(high_pair, low_pair, 0x07050301));
}

// ---- Matrix products

// D (32 x 32) = A (32 x K) B (K x 32) + C. Lane l holds row (column) l % 32 of
// A (B), and column l % 32 of D: in register r, row 8 (r / 4) + 4 half + r % 4.
// Which K a lane's bytes stand for is the same for A and B.

ZYFA_DEVICE F32x16 MultiplyFp8(I32x8 a, I32x8 b, F32x16 c) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, 0, 0, 0, 0, 0,
                                                         0);
}

// Scales are exponents in E8M0: 127 + e stands for 2^e. Both halves of a lane
// give the same one, so that it does not matter which K each covers.
ZYFA_DEVICE F32x16 MultiplyScaledFp8(I32x8 a, I32x8 b, F32x16 c, int a_scale,
                                     int b_scale) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, 0, 0, 0,
                                                         a_scale, 0, b_scale);
}

// D (16 x 16) = A (16 x 128) B (128 x 16) + C. Lane l holds row (column) l % 16
// of A (B), and rows 4 (l / 16) .. + 3 of column l % 16 of D.
ZYFA_DEVICE F32x4 MultiplyFp8Narrow(I32x8 a, I32x8 b, F32x4 c) {
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, 0, 0, 0, 0,
                                                          0, 0);
}

ZYFA_DEVICE I32x16 MultiplyInt8(I32x4 a, I32x4 b, I32x16 c) {
  return __builtin_amdgcn_mfma_i32_32x32x32_i8(a, b, c, 0, 0, 0);
}

ZYFA_DEVICE F32x16 MultiplyBF16(I32x4 a, I32x4 b, F32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_bf16(
      BitCast<BF16x8>(a), BitCast<BF16x8>(b), c, 0, 0, 0);
}

ZYFA_DEVICE F32x16 MultiplyF16(I32x4 a, I32x4 b, F32x16 c) {
  return __builtin_amdgcn_mfma_f32_32x32x16_f16(BitCast<F16x8>(a),
                                                BitCast<F16x8>(b), c, 0, 0, 0);
}

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_INTRINSICS_H_
