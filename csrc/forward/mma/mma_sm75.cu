// mma_sm75: the kernel of kernel.cuh on Turing (device/sm75.cuh), and by JIT on anything later. Its instances, the choice
// among them, and its row in the registry.
// architectures: 7.5+PTX
#include "device/convert.h"
#include "device/sm75.cuh"
#include "forward/mma/kernel.cuh"

namespace flash_wmma::mma {
namespace {

template <int HeadDim, int RowWarps, int DimWarps, int RowTiles, int KeyTile, int Stages, int QSteps,
          Problems kProblems>
Shape shape(float blocks_per_sm) {
    constexpr int kBlocksPerSm = DimWarps == 1 && RowWarps <= 4 ? 2 : 1;
    using T = Tile<Sm75, half, HeadDim, RowWarps, DimWarps, RowTiles, KeyTile, Stages, QSteps, kBlocksPerSm>;
    static_assert(sizeof(Smem<T>) <= 64 * 1024);
    return mma::shape<T, kProblems>(75, blocks_per_sm, 1);
}

/// The shapes that ship, none of which spills; arguments and order as in sm80_shapes.
const std::vector<Shape> kShapes = {
    shape<32, 4, 1, 2, 64, 1, 2, kDense>(0.75f),  shape<32, 4, 1, 1, 64, 1, 2, kDense>(0.f),
    shape<64, 4, 1, 2, 32, 1, 4, kDense>(0.75f),  shape<64, 4, 1, 1, 64, 1, 4, kDense>(0.f),
    shape<96, 4, 1, 2, 32, 1, 0, kDense>(0.75f),  shape<96, 4, 1, 1, 32, 1, 6, kDense>(0.f),
    shape<128, 4, 1, 2, 16, 1, 3, kDense>(0.75f), shape<128, 4, 1, 1, 32, 1, 8, kDense>(0.f),
    shape<192, 4, 2, 1, 32, 1, 12, kDense>(0.f),  shape<256, 4, 2, 1, 32, 1, 16, kDense>(0.f),

    shape<32, 4, 1, 1, 64, 1, 2, kAny>(0.f),      shape<64, 4, 1, 1, 64, 1, 4, kAny>(0.f),
    shape<96, 4, 1, 1, 32, 1, 6, kAny>(0.f),      shape<128, 4, 1, 1, 32, 1, 8, kAny>(0.f),
    shape<192, 4, 2, 1, 32, 1, 12, kAny>(0.f),    shape<256, 3, 2, 1, 32, 1, 1, kAny>(0.f),
};
const std::vector<Instance> kInstances = instances_of(kShapes);

const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    const bool dense = problems_of(p, p.dtype != DType::kFloat16) == kDense;
    return flash_wmma::choose_shape(kShapes, DType::kFloat16, dense ? kDense : kAny, p, device);
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) {
    return kInstances[static_cast<std::size_t>(&choose_shape(p, device) - kShapes.data())];
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return p.dtype == DType::kFloat16 ? 0 : converted_bytes(p);
}

void launch_mma_sm75(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(p, device);
    shape.launch(p.dtype == DType::kFloat16 ? p : convert_to_half(p, stream), stream);
}

const KernelInfo kInfo = {
    /*name=*/"mma_sm75",
    /*summary=*/"mma.sync m16n8k8, ldmatrix, swizzled tiles, register prefetch, at most 64 KiB of shared memory",
    /*min_arch=*/75,
    /*bf16_min_arch=*/75,
    /*float32=*/true,
    /*float16=*/true,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim,
    /*auto_rank=*/20,
    kInstances.data(),
    kInstances.size(),
    choose,
    workspace_bytes,
    launch_mma_sm75,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::mma
