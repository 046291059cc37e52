// The bf16 instances of bwd_sm90 for own keys, without dQ.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_keys() {
    return join({wgmma::shapes<bf16, Problems::kPlain, Pass::kKeys, wgmma::kKeysShapes>(),
                 wgmma::shapes<bf16, Problems::kPacked, Pass::kKeys, wgmma::kKeysShapes>(),
                 wgmma::shapes<bf16, Problems::kPackedDropped, Pass::kKeys, wgmma::kKeysShapes>()});
}
}  // namespace flash_wmma::backward
