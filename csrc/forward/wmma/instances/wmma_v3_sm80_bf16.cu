// The bf16 instances of wmma_v3: bf16 tensor cores begin with sm_80.
// architectures: 8.0+PTX;9.0
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> sm80_bf16_shapes() {
    std::vector<Shape> shapes = wide_shapes<bf16>();
    for (const Shape& shape : common_shapes<bf16>(80)) shapes.push_back(shape);
    return shapes;
}

}  // namespace flash_wmma::wmma_v3
