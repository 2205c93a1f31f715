#ifndef ZYFA_FFI_QUANTIZE_HANDLERS_H_
#define ZYFA_FFI_QUANTIZE_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace zyfa {

// The stages of the FFI target "zyfa_quantize" on the platforms "ROCM" and
// "CUDA". Operands and results are those that the attribute `step` takes:
//
//   "find"      x                           -> found of tiles
//   "round"     x, given of tiles           -> values in e4m3fn
//   "both"      x                           -> values in e4m3fn, found of tiles
//   "tokens"    x                           -> values in int8, found of tokens
//   "blocks"    x                           -> values in int8, found of tiles,
//                                              nan
//   "channels"  x, given of channels, nan   -> values in e4m3fn
//   "measure"   x                           -> statistics
//
//   x (B, S, H, D) bf16, f16 or f32; values (B, S, H, D)
//   found and given float32, descales: of tiles (B, H, ceil(S / 128)), of
//     tokens (B, H, S), of channels (B, H, D)
//   nan (B, H, S) bool: the tokens that have one
//   statistics (B, H, ceil(S / 128), 5, D) float32: see quantize_args.h
//
// All but the last two take two more operands, (B, H, D) float32: with the
// attribute `center` a mean to subtract, with `weigh` powers of two to multiply
// by then. `rotate` asks for Hadamard matrices of the largest power of two in
// D, as `weigh` and the steps to int8 must. What "find" finds for a tile
// without any magnitude is 0, and all others 1. A token with NaN has NaN for a
// descale, and with given `nan`, for values.
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
