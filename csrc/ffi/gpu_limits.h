// What the kernels of both GPU platforms take: they count in 32 bits.

#ifndef ZYFA_FFI_GPU_LIMITS_H_
#define ZYFA_FFI_GPU_LIMITS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "csrc/ffi/attention_params.h"

namespace zyfa {

int64_t SizeOf(DType dtype);
std::string Name(DType dtype);

// A window's side as the kernels take it, -1 for one that reaches every key
// from every int32 position; nothing where neither is exact.
std::optional<int32_t> ToWindow(int64_t side);

// What they do not take of a call whose dtype and head dims they do, or
// nothing.
std::string GpuRefusal(const AttentionParams& p);

}  // namespace zyfa

#endif  // ZYFA_FFI_GPU_LIMITS_H_
