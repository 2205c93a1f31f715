#include "csrc/cpu/target_float.h"

namespace zyfa::cpu {

extern const Target kAvx512Target = FloatTarget("avx512");

}  // namespace zyfa::cpu
