// The bf16 instances of wmma_v3: bf16 tensor cores begin with sm_80.
// architectures: 8.0+PTX;9.0
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> sm80_bf16_shapes() {
    return join({shapes<bf16, kPlain, kWideRows>(80), shapes<bf16, kPlain, kCommonRows>(80)});
}

}  // namespace flash_wmma::wmma_v3
