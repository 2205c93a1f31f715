#include "csrc/cpu/int8_engine.h"
#include "csrc/cpu/kernel.h"
#include "csrc/cpu/target.h"

namespace zyfa::cpu {
namespace {

bool IsInt8(DType type) { return type == DType::kI8; }

}  // namespace

extern const Target kAvx512VnniTarget = {
    "avx512vnni",
    IsInt8,
    Int8Engine::kGroupRows,
    MaxRows<Int8Engine>,
    WorkspaceBytes<Int8Engine>,
    RunFp8<Int8Engine>,
    Fp8SoftmaxBlockOf,
};

}  // namespace zyfa::cpu
