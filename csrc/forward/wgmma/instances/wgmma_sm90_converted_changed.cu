// The instances of wgmma_sm90 for converted inputs with packed sequences, softcap, biases, ALiBi and key ranges.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> converted_changed_shapes() {
    return shapes<half, Problems::kConvertedChanged, kConvertedChangedRows>();
}

}  // namespace flash_wmma::wgmma_sm90
