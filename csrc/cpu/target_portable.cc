#include "csrc/cpu/target_float.h"

namespace zyfa::cpu {

extern const Target kPortableTarget = FloatTarget("portable");

}  // namespace zyfa::cpu
