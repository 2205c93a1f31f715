#ifndef ZYFA_FFI_ROCM_HANDLER_H_
#define ZYFA_FFI_ROCM_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace zyfa {

// The stages of the FFI target "zyfa_attention" on the platform "ROCM".
XLA_FFI_Error* RocmInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* RocmAttention(XLA_FFI_CallFrame* call_frame);

// The same on the platform "cpu", for tests: buffers are the host's, the CPU
// device's number is the GPU's, and the stream is the default one.
XLA_FFI_Error* RocmAttentionOnHost(XLA_FFI_CallFrame* call_frame);

}  // namespace zyfa

#endif  // ZYFA_FFI_ROCM_HANDLER_H_
