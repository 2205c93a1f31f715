#ifndef ZYFA_FFI_QUANTIZE_HANDLERS_H_
#define ZYFA_FFI_QUANTIZE_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace zyfa {

// The stages of the FFI target "zyfa_quantize" on the platforms "ROCM" and
// "CUDA". Operands and results are those that the attribute `step` takes:
//
//   "find"   x, [mean]        -> found
//   "round"  x, given, [mean] -> values
//   "both"   x, [mean]        -> values, found
//   "measure"  x              -> statistics, of each channel    (CUDA alone)
//
//   x (B, S, H, D) bf16, f16 or f32; values (B, S, H, D) e4m3fn
//   mean (B, H, D); found, given (B, H, ceil(S / 128)), descales    float32
//   statistics (B, H, ceil(S / 128), 4, D) float32: see quantize_args.h
//
// The attribute `rotate` asks for Hadamard matrices of the largest power of two
// in D. What "find" finds for a tile without any magnitude is 0, and "both" 1.
XLA_FFI_Error* RocmQuantizeInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* RocmQuantize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaQuantizeInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaQuantize(XLA_FFI_CallFrame* call_frame);

// The same on the platform "cpu", for tests: buffers are the host's, the CPU
// device's number is the GPU's, and the stream is the default one.
XLA_FFI_Error* RocmQuantizeOnHost(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* CudaQuantizeOnHost(XLA_FFI_CallFrame* call_frame);

}  // namespace zyfa

#endif  // ZYFA_FFI_QUANTIZE_HANDLERS_H_
