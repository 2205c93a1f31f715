#include "csrc/cpu/amx_engine.h"
#include "csrc/cpu/kernel.h"
#include "csrc/cpu/target.h"

namespace zyfa::cpu {
namespace {

bool IsBFloat16Exactly(DType type) {
  return type == DType::kBF16 || type == DType::kE4m3 || type == DType::kI8;
}

}  // namespace

extern const Target kAmxTarget = {
    "amx",
    IsBFloat16Exactly,
    AmxEngine::kGroupRows,
    MaxRows<AmxEngine>,
    WorkspaceBytes<AmxEngine>,
    Run<AmxEngine>,
    Fp8SoftmaxBlockOf,
};

}  // namespace zyfa::cpu
