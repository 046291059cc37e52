// The bf16 instances of wgmma_sm90 for masks, biases, ALiBi, key ranges and a softcap: each alone, and everything.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_changed_shapes() {
    return join({shapes<bf16, Problems::kMasked, kMaskedRows>(), shapes<bf16, Problems::kBiased, kBiasedRows>(),
                 shapes<bf16, Problems::kSloped, kOneChangeRows>(), shapes<bf16, Problems::kRanged, kOneChangeRows>(),
                 shapes<bf16, Problems::kCapped, kCappedRows>(),
                 shapes<bf16, Problems::kGeneralChanged, kChangedRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
