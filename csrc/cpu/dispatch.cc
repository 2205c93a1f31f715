#include "csrc/cpu/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace zyfa::cpu {

extern const Target kPortableTarget;
extern const Target kAvx2Target;
extern const Target kAvx512Target;
extern const Target kAvx512VnniTarget;
extern const Target kAmxTarget;

namespace {

// Kernels run with subnormal floats read and written as zero, as matrix units
// do, and rounding to nearest, whatever the calling thread has set: so the
// result does not depend on the thread.
class FloatingPointMode {
 public:
#if defined(__x86_64__)
  FloatingPointMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kMaskExceptions = 0x1f80;
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(kMaskExceptions | kFlushToZero | kDenormalsAreZero);
  }
  ~FloatingPointMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatingPointMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
    asm volatile("msr fpcr, %0" : : "r"(kFlushToZero));
  }
  ~FloatingPointMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;
};

bool Always() { return true; }

#if defined(__x86_64__)
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

bool HasAvx512Vnni() {
  return HasAvx512() && __builtin_cpu_supports("avx512vnni");
}

// AMX needs the instructions, the system's support of their state, and on Linux
// a permission for the process.
bool HasAmx() {
  unsigned eax, ebx, ecx, edx;
  if (!HasAvx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    return false;
  }
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) ||
      (eax & kAvx512Bf16) == 0) {
    return false;
  }
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Candidate {
  const Target* target;
  bool (*is_usable)();
};

const Candidate kCandidates[] = {
#if defined(ZYFA_WITH_AMX)
    {&kAmxTarget, HasAmx},
#endif
#if defined(ZYFA_WITH_AVX512VNNI)
    {&kAvx512VnniTarget, HasAvx512Vnni},
#endif
#if defined(ZYFA_WITH_AVX512)
    {&kAvx512Target, HasAvx512},
#endif
#if defined(ZYFA_WITH_AVX2)
    {&kAvx2Target, HasAvx2},
#endif
    {&kPortableTarget, Always},
};

std::atomic<const Target*> forced_target = nullptr;

const Target& TargetFor(DType in_dtype) {
  const Target* forced = forced_target.load();
  bool reached = forced == nullptr;
  for (const Target* target : UsableTargets()) {
    reached |= target == forced;
    if (reached && target->takes(in_dtype)) return *target;
  }
  return kPortableTarget;
}

}  // namespace

const std::vector<const Target*>& CompiledTargets() {
  static const auto* targets = [] {
    auto* list = new std::vector<const Target*>;
    for (const Candidate& candidate : kCandidates) {
      list->push_back(candidate.target);
    }
    return list;
  }();
  return *targets;
}

const std::vector<const Target*>& UsableTargets() {
  static const auto* targets = [] {
    auto* list = new std::vector<const Target*>;
    for (const Candidate& candidate : kCandidates) {
      if (candidate.is_usable()) list->push_back(candidate.target);
    }
    return list;
  }();
  return *targets;
}

const Target* FindTarget(const std::string& name) {
  for (const Target* target : UsableTargets()) {
    if (name == target->name) return target;
  }
  return nullptr;
}

void ForceTarget(const Target* target) { forced_target.store(target); }

AttentionPlan::AttentionPlan(const AttentionParams& params, int64_t threads)
    : params_(params),
      target_(&TargetFor(params.in_dtype)),
      rows_(params.kv_heads > 0
                ? params.q_len * (params.heads / params.kv_heads)
                : 0),
      tile_rows_(target_->row_step),
      items_(0) {
  const int64_t groups = params.batch * params.kv_heads;
  if (rows_ > 0 && groups > 0) {
    // A few items for each thread, so that the last ones even the load out.
    constexpr int64_t kItemsPerThread = 4;
    const int64_t wanted = rows_ * groups / (kItemsPerThread * threads);
    const int64_t steps =
        std::min(wanted, target_->max_rows(params)) / target_->row_step;
    tile_rows_ = std::max<int64_t>(steps, 1) * target_->row_step;
    items_ = groups * ((rows_ + tile_rows_ - 1) / tile_rows_);
  }
  workspace_bytes_ =
      target_->workspace_bytes(params, std::min(tile_rows_, rows_));
}

void AttentionPlan::Run(int64_t item, void* workspace) const {
  const FloatingPointMode mode;
  const int64_t groups = params_.batch * params_.kv_heads;
  const int64_t tiles = items_ / groups;
  const int64_t group = item % groups;
  const int64_t row_begin = (tiles - 1 - item / groups) * tile_rows_;
  target_->run(params_,
               {group / params_.kv_heads, group % params_.kv_heads, row_begin,
                std::min(tile_rows_, rows_ - row_begin)},
               workspace);
}

void RunFp8SoftmaxBlock(const Target& target, const Fp8SoftmaxBlock& block) {
  const FloatingPointMode mode;
  target.fp8_softmax_block(block);
}

}  // namespace zyfa::cpu
