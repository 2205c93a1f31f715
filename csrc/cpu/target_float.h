// The target of an instruction set that works on float32 vectors.

#ifndef ZYFA_CPU_TARGET_FLOAT_H_
#define ZYFA_CPU_TARGET_FLOAT_H_

#include "csrc/cpu/float_engine.h"
#include "csrc/cpu/kernel.h"
#include "csrc/cpu/target.h"

namespace zyfa::cpu {
namespace {

constexpr Target FloatTarget(const char* name) {
  return {
      name,
      [](DType) { return true; },
      FloatEngine::kGroupRows,
      MaxRows<FloatEngine>,
      WorkspaceBytes<FloatEngine>,
      Run<FloatEngine>,
      Fp8SoftmaxBlockOf,
  };
}

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_TARGET_FLOAT_H_
