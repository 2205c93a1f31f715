#ifndef ZYFA_FFI_CPU_HANDLER_H_
#define ZYFA_FFI_CPU_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace zyfa {

// The handler of the FFI target "zyfa_attention" on the platform "cpu".
XLA_FFI_Error* CpuAttention(XLA_FFI_CallFrame* call_frame);

}  // namespace zyfa

#endif  // ZYFA_FFI_CPU_HANDLER_H_
