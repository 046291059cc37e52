// mma_sm75: the kernel of kernel.cuh on Turing (device/sm75.cuh), and by JIT on anything later. Its instances, the
// choice among them, and its row in the registry.
// architectures: 7.5+PTX
#include "device/sm75.cuh"
#include "device/tiled_kernel.h"
#include "forward/mma/kernel.cuh"

namespace flash_wmma::mma {
namespace {

/// The shapes that ship; order as in kSm80Rows. Those for any problem at d = 192 and 256 spill, 36 and 16 bytes. At
/// d = 512 four blocks share the rows of O, and 64 KiB hold K of 32 keys, V's part of them and, before them, Q.
inline constexpr TableRow kDenseRows[] = {
    {{.d = 32, .row_tiles = 2, .keys = 64, .q_steps = 2, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 32, .keys = 64, .q_steps = 2, .blocks_per_sm = 2}},
    {{.d = 64, .row_tiles = 2, .keys = 32, .q_steps = 4, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 64, .keys = 64, .q_steps = 4, .blocks_per_sm = 2}},
    {{.d = 96, .row_tiles = 2, .keys = 32, .q_steps = 0, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 96, .keys = 32, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 128, .row_tiles = 2, .keys = 16, .q_steps = 3, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 128, .keys = 32, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .dim_warps = 2, .keys = 32, .q_steps = 12, .blocks_per_sm = 1}},
    {{.d = 256, .dim_warps = 2, .keys = 32, .q_steps = 16, .blocks_per_sm = 1}},
    {{.d = 512, .row_warps = 3, .dim_warps = 2, .keys = 32, .q_steps = 32, .blocks_per_sm = 1, .columns = 128}},
};
inline constexpr TableRow kAnyRows[] = {
    {{.d = 32, .keys = 64, .q_steps = 2, .blocks_per_sm = 2}},
    {{.d = 64, .keys = 64, .q_steps = 4, .blocks_per_sm = 2}},
    {{.d = 96, .keys = 32, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 128, .keys = 32, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .dim_warps = 2, .keys = 32, .q_steps = 12, .blocks_per_sm = 1}},
    {{.d = 256, .row_warps = 3, .dim_warps = 2, .keys = 32, .q_steps = 1, .blocks_per_sm = 1}},
    {{.d = 512, .row_warps = 3, .dim_warps = 2, .keys = 32, .q_steps = 32, .blocks_per_sm = 1, .columns = 128}},
};
/// The shapes for key/value caches; with at most 16 rows that share a key, each warp has keys of its own.
inline constexpr Pays kFewRows{.rows = 16};
inline constexpr TableRow kCachedRows[] = {
    {{.d = 32, .row_warps = 1, .keys = 128, .q_steps = 2, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 32, .keys = 64, .q_steps = 2, .blocks_per_sm = 2}},
    {{.d = 64, .row_warps = 1, .keys = 128, .q_steps = 4, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 64, .keys = 64, .q_steps = 4, .blocks_per_sm = 2}},
    {{.d = 96, .row_warps = 1, .keys = 64, .q_steps = 6, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 96, .keys = 32, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 128, .row_warps = 1, .keys = 64, .q_steps = 8, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 128, .keys = 32, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .dim_warps = 2, .keys = 32, .q_steps = 12, .blocks_per_sm = 1}},
    {{.d = 256, .row_warps = 3, .dim_warps = 2, .keys = 32, .q_steps = 1, .blocks_per_sm = 1}},
};
const std::vector<Shape> kShapes =
    join({shapes<Sm75, half, Problems::kPlain, kDenseRows>(75), shapes<Sm75, half, Problems::kAny, kAnyRows>(75),
          cached_shapes<Sm75, half, kCachedRows>(75)});

const KernelInfo kInfo = Tiled<kShapes, /*kConverts=*/true>::row(
    {.name = "mma_sm75",
     .summary = "mma.sync m16n8k8, ldmatrix, swizzled tiles, register prefetch, at most 64 KiB of shared memory",
     .min_arch = 75,
     .bf16_min_arch = 75,
     .float32 = true,
     .float16 = true,
     .features =
         kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks | kCache,
     .auto_rank = 20});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::mma
