#ifndef ZYFA_FFI_CUDA_HANDLER_H_
#define ZYFA_FFI_CUDA_HANDLER_H_

#include "xla/ffi/api/c_api.h"

namespace zyfa {

// The stages of the FFI target "zyfa_attention" on the platform "CUDA", whose
// third result is a workspace: `uint8` of any shape, of at least as many bytes
// as cuda::PlanAttention says.
XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaAttention(XLA_FFI_CallFrame* call_frame);

// The same on the platform "cpu", for tests: buffers are the host's, the CPU
// device's number is the GPU's, and the stream is the default one.
XLA_FFI_Error* CudaAttentionOnHost(XLA_FFI_CallFrame* call_frame);

}  // namespace zyfa

#endif  // ZYFA_FFI_CUDA_HANDLER_H_
