// simt_padded: simt_shared with rows of K of d + 1 words, so that a column of K lies in 32 banks: one wavefront a load.
#include "simt_shared.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many rows and keys, so that the tiles fit 64 KiB.
const std::vector<Shape> kShapes = {
    shared_shape<SharedRung<64, 32, 32, 1, false>>(),
    shared_shape<SharedRung<128, 32, 32, 1, false>>(),
    shared_shape<SharedRung<256, 16, 16, 1, false>>(),
};
const KernelInfo kInfo =
    Rung<kShapes>::info(/*name=*/"simt_padded", /*summary=*/"K's rows padded to d + 1: no bank conflicts");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
