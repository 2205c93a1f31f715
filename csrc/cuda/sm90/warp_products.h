// Matrix products of one warp, for the quantisation kernels.

#ifndef ZYFA_CUDA_SM90_WARP_PRODUCTS_H_
#define ZYFA_CUDA_SM90_WARP_PRODUCTS_H_

#include <cstdint>

#include "csrc/cuda/sm90/intrinsics.h"

namespace zyfa::sm90 {

// d (16 x 8) = a (16 x 16) b (16 x 8) + c. Lane 4 g + t holds of `a` rows g and
// g + 8 in turn, columns 2 t and 2 t + 1, then the same 8 columns on; of `b`
// column g, rows likewise; of `c` and `d` row g, then g + 8, columns 2 t and
// 2 t + 1.
#define ZYFA_WARP_PRODUCT(Name, type)                                       \
  ZYFA_DEVICE void Name(float (&d)[4], const uint32_t (&a)[4],              \
                        const uint32_t (&b)[2], const float (&c)[4]) {      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type              \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "    \
        "%12, %13};"                                                        \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), \
          "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));                      \
  }
ZYFA_WARP_PRODUCT(WarpProductBF16, "bf16")
ZYFA_WARP_PRODUCT(WarpProductF16, "f16")
#undef ZYFA_WARP_PRODUCT

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_WARP_PRODUCTS_H_
