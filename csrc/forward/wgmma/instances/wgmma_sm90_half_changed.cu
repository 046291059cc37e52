// The half instances of wgmma_sm90 for masks, biases, ALiBi, key ranges and a softcap: each alone, and everything.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> half_changed_shapes() {
    return join({shapes<half, Problems::kMasked, kMaskedRows>(), shapes<half, Problems::kBiased, kBiasedRows>(),
                 shapes<half, Problems::kSloped, kOneChangeRows>(), shapes<half, Problems::kRanged, kOneChangeRows>(),
                 shapes<half, Problems::kCapped, kCappedRows>(),
                 shapes<half, Problems::kGeneralChanged, kChangedRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
