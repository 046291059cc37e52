// simt_padded: simt_shared with rows of K of d + 1 words, so that a column of K lies in 32 banks: one wavefront a load.
#include "forward/simt/shared_rung.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many rows and keys, so that the tiles fit 64 KiB. A row of 64 keys takes a warp of 64 lanes.
const std::vector<Shape> kShapes =
    shared_shapes<SharedRung<64, 16, 64, 1, false>, SharedRung<64, 32, 32, 1, false>, SharedRung<128, 32, 32, 1, false>,
                  SharedRung<256, 16, 16, 1, false>>();
const KernelInfo kInfo = rung_row<kShapes>("simt_padded", "K's rows padded to d + 1: no bank conflicts");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
