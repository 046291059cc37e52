// bwd_sm75: the kernels of kernel.cuh, two_roles.cuh and three_roles.cuh on Turing, and by JIT on anything later:
// m16n8k8 of half, tiles through registers, at most 64 KiB of shared memory; bf16 and fp32 inputs are converted. Its
// instances, the choice among them, and its row in the registry.
// architectures: 7.5+PTX
#include "backward/mma/kernel.cuh"
#include "backward/mma/three_roles.cuh"
#include "backward/mma/two_roles.cuh"
#include "device/sm75.cuh"

namespace flash_wmma::backward {
namespace {

/// Arguments as in bwd_sm80.cuh.
template <Pass kPass, Problems kProblems, int HeadDim, int OwnWarps, int StreamWarps, int RowTiles, int StreamTile,
          int Step, int Resident, int BlocksPerSm>
Shape shape(int resident = 1) {
    using T =
        Tile<mma::Sm75, half, HeadDim, OwnWarps, StreamWarps, RowTiles, StreamTile, Step, 1, Resident, BlocksPerSm>;
    static_assert(sizeof(SharedMemory<T, kPass>) <= 64 * 1024);
    return backward::shape<T, kProblems, kPass>(75, resident);
}

/// The kernel of two_roles.cuh: 32 streamed rows, both operands in registers.
template <Pass kPass, int HeadDim, int RowTiles>
Shape two_roles() {
    using T = Tile<mma::Sm75, half, HeadDim, 2, 2, RowTiles, 32, 16, 2, 2, 1, 2>;
    static_assert(sizeof(TwoRolesMemory<T>) <= 64 * 1024);
    return two_roles_shape<T, kPass>(75);
}

/// The fused pass by the kernel of three_roles.cuh: 32 queries and 32 keys, K and V in registers.
template <int HeadDim>
Shape three_roles() {
    using T = Tile<mma::Sm75, half, HeadDim, 2, 2, 1, 32, 16, 1, 2, 1, 3>;
    static_assert(sizeof(ThreeRolesMemory<T>) <= 64 * 1024);
    return three_roles_shape<T>(75);
}

/// In each pass the plain shapes come first. Up to d = 128 two blocks of four warps an SM are fastest; if shared memory
/// holds only one, as on Turing, a block of eight warps is. At d = 256 a block of twelve is.
constexpr Problems kPlain = Problems::kPlain, kGeneral = Problems::kGeneral, kConverted = Problems::kConverted;
const std::vector<Shape> kShapes = {
    shape<Pass::kFused, kPlain, 32, 4, 1, 2, 64, 16, 1, 2>(),
    shape<Pass::kFused, kPlain, 64, 4, 1, 2, 32, 16, 1, 2>(/*resident=*/2),
    two_roles<Pass::kFused, 64, 4>(),
    shape<Pass::kFused, kPlain, 128, 2, 2, 2, 32, 16, 0, 1>(/*resident=*/2),
    two_roles<Pass::kFused, 128, 2>(),
    three_roles<256>(),

    shape<Pass::kFused, kGeneral, 64, 4, 1, 2, 32, 16, 0, 2>(),
    shape<Pass::kFused, kGeneral, 128, 2, 2, 2, 32, 16, 0, 1>(),
    shape<Pass::kFused, kGeneral, 256, 2, 2, 1, 32, 16, 1, 1>(),

    shape<Pass::kKeys, kGeneral, 64, 4, 1, 2, 32, 16, 0, 2>(),
    shape<Pass::kKeys, kGeneral, 128, 2, 2, 2, 32, 16, 0, 1>(),
    shape<Pass::kKeys, kGeneral, 256, 2, 2, 1, 32, 16, 1, 1>(),

    shape<Pass::kQueries, kGeneral, 64, 4, 1, 2, 32, 16, 2, 2>(),
    shape<Pass::kQueries, kGeneral, 128, 4, 1, 1, 32, 32, 0, 2>(),
    shape<Pass::kQueries, kGeneral, 256, 2, 2, 1, 32, 16, 1, 1>(),

    shape<Pass::kFused, kConverted, 64, 4, 1, 2, 32, 16, 0, 2>(),
    shape<Pass::kFused, kConverted, 128, 2, 2, 2, 32, 16, 0, 1>(),
    shape<Pass::kFused, kConverted, 256, 2, 2, 1, 32, 16, 1, 1>(),

    shape<Pass::kKeys, kConverted, 64, 4, 1, 2, 32, 16, 0, 2>(),
    shape<Pass::kKeys, kConverted, 128, 2, 2, 2, 32, 16, 0, 1>(),
    shape<Pass::kKeys, kConverted, 256, 2, 2, 1, 32, 16, 1, 1>(),

    shape<Pass::kQueries, kConverted, 64, 4, 1, 2, 32, 16, 2, 2>(),
    shape<Pass::kQueries, kConverted, 128, 4, 1, 1, 32, 32, 0, 2>(),
    shape<Pass::kQueries, kConverted, 256, 2, 2, 1, 32, 16, 1, 1>(),
};
const std::vector<Instance> kInstances = instances_of(kShapes);

const Shape& shape_of(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
    return choose_shape(kShapes, DType::kFloat16, pass, p.forward, device);
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
    const Shape& shape = shape_of(p.deterministic ? Pass::kKeys : Pass::kFused, p, device);
    return kInstances[static_cast<std::size_t>(&shape - kShapes.data())];
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return backward::workspace_bytes(p, p.forward.dtype != DType::kFloat16);
}

void launch_bwd_sm75(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    const auto shape = [&](Pass pass) { return shape_of(pass, p, device); };
    if (p.forward.dtype == DType::kFloat16) launch_all<mma::Sm75, half, false>(p, stream, shape);
    else if (p.forward.dtype == DType::kBFloat16) launch_all<mma::Sm75, bf16, true>(p, stream, shape);
    else launch_all<mma::Sm75, float, true>(p, stream, shape);
}

const BackwardKernelInfo kInfo = {
    {
        /*name=*/"bwd_sm75",
        /*summary=*/
        "mma.sync m16n8k8, ldmatrix, swizzled tiles, dK and dV in registers, at most 64 KiB of shared memory",
        /*min_arch=*/75,
        /*bf16_min_arch=*/75,
        /*float32=*/true,
        /*float16=*/true,
        /*min_head_dim=*/1,
        /*max_head_dim=*/256,
        /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim | kBiasGradient |
            kDeterministic,
        /*auto_rank=*/20,
        kInstances.data(),
        kInstances.size(),
    },
    choose,
    workspace_bytes,
    launch_bwd_sm75,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
