// simt: the kernel of simt.cuh, its tile shapes, and its row in the registry.
#include "forward/simt/simt.cuh"

namespace flash_wmma::simt {
namespace {

/// The shapes that ship, found by a sweep (benchmark/tiles.py, docs/simt.md): per head dim the fastest first, then
/// shapes with less shared memory. Arguments of Tile: d, warps, columns of a warp's grid of lanes, rows per lane, Bc,
/// stages, blocks per SM to keep registers for. Arguments of shape: the blocks per SM from which it pays, and the
/// blocks that an SM must hold for it to pay.
const std::vector<Shape> kShapes = {
    shape<Tile<64, 4, 8, 8, 32, 2, 2>>(2.f, 2),   shape<Tile<64, 4, 16, 8, 64, 2, 2>>(0.f, 2),
    shape<Tile<64, 4, 8, 4, 64, 1, 2>>(0.f, 1),   shape<Tile<64, 4, 8, 4, 32, 1, 2>>(0.f, 1),
    shape<Tile<128, 8, 16, 8, 64, 1, 1>>(0.f, 1), shape<Tile<128, 4, 16, 8, 32, 1, 2>>(0.f, 1),
    shape<Tile<128, 2, 16, 8, 32, 1, 2>>(0.f, 1), shape<Tile<256, 8, 16, 4, 64, 1, 1>>(0.f, 1),
    shape<Tile<256, 4, 16, 4, 16, 1, 2>>(0.f, 1), shape<Tile<256, 2, 16, 4, 16, 1, 2>>(0.f, 1),
};

const std::vector<Instance> kInstances = instances_of(kShapes);

/// Every instance takes all features.
const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    return flash_wmma::choose_shape(kShapes, DType::kFloat32, /*general=*/false, p, device);
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) {
    return kInstances[static_cast<std::size_t>(&choose_shape(p, device) - kShapes.data())];
}

std::int64_t workspace_bytes(const ForwardParams&, const DeviceFacts&) { return 0; }

void launch_simt(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    choose_shape(p, device).launch(p, stream);
}

const KernelInfo kInfo = {
    /*name=*/"simt",
    /*summary=*/"fp32 FMAs on CUDA cores: register tiles, 16-byte accesses, P through shared memory within a warp",
    /*min_arch=*/75,
    /*bf16_min_arch=*/0,
    /*float32=*/true,
    /*float16=*/false,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim,
    /*auto_rank=*/0,
    kInstances.data(),
    kInstances.size(),
    choose,
    workspace_bytes,
    launch_simt,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
