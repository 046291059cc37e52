// wmma_v3 (wmma_v3.cuh): its half instances, the choice among all of them, and its row in the registry.
// architectures: 7.5;8.0+PTX;9.0, one PTX
#include "forward/wmma/wmma_v3.cuh"

#include <algorithm>
#include <tuple>

#include "device/convert.h"

namespace flash_wmma::wmma_v3 {

namespace {

/// In place of the wide shapes on sm_75, where those would not keep their registers.
std::vector<Shape> turing_shapes() {
    return {
        shape<Tile<half, 64, 4, 2, 32, true, 2>>(75, 0.75f),
        shape<Tile<half, 96, 4, 1, 32, true, 2>>(75, 0.f),
        shape<Tile<half, 192, 4, 1, 16, false, 1>>(75, 0.f),
    };
}

/// Every shape of this build, by head dim, the largest tile first.
const std::vector<Shape> kShapes = [] {
    std::vector<Shape> all = common_shapes<half>(75);
    for (auto* more :
         {turing_shapes, sm80_half_shapes, sm80_bf16_shapes, half_general_shapes, sm80_bf16_general_shapes})
        if (more)
            for (const Shape& shape : more()) all.push_back(shape);
    std::stable_sort(all.begin(), all.end(), [](const Shape& a, const Shape& b) {
        return std::make_tuple(a.facts.head_dim, -a.facts.br, -a.facts.bc) <
               std::make_tuple(b.facts.head_dim, -b.facts.br, -b.facts.bc);
    });
    return all;
}();

const std::vector<Instance> kInstances = instances_of(kShapes);

/// fp32 runs on the half instances.
const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    const DType dtype = p.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
    return flash_wmma::choose_shape(kShapes, dtype, is_general(p), p, device);
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) {
    return kInstances[static_cast<std::size_t>(&choose_shape(p, device) - kShapes.data())];
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return p.dtype == DType::kFloat32 ? converted_bytes(p) : 0;
}

void launch_wmma_v3(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(p, device);
    if (p.dtype == DType::kFloat32) shape.launch(convert_to_half(p, stream), stream);
    else shape.launch(p, stream);
}

const KernelInfo kInfo = {
    /*name=*/"wmma_v3",
    /*summary=*/"WMMA, exact per-row softmax in registers, lagged maximum, any d up to 256, cp.async, padded tiles",
    /*min_arch=*/75,
    /*bf16_min_arch=*/sm80_bf16_shapes ? 80 : 0,
    /*float32=*/true,
    /*float16=*/true,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim,
    /*auto_rank=*/10,
    kInstances.data(),
    kInstances.size(),
    choose,
    workspace_bytes,
    launch_wmma_v3,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::wmma_v3
