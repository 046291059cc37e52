// The half instances of mma_sm80 for key/value caches.
// architectures: 8.0+PTX;9.0
#include "forward/mma/mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_half_cached_shapes() { return cached_shapes<Sm80, half, kSm80CachedRows>(80); }

}  // namespace flash_wmma::mma
