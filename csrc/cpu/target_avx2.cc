#include "csrc/cpu/target_float.h"

namespace zyfa::cpu {

extern const Target kAvx2Target = FloatTarget("avx2");

}  // namespace zyfa::cpu
