// simt_shared: simt_block with its Q, K and V tiles in shared memory. The block reads each from global memory once,
// with neighbouring threads at neighbouring addresses. But a column of K is 32 words in one bank: every load of it
// takes 32 wavefronts.
#include "forward/simt/shared_rung.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many rows and keys, so that the tiles fit 64 KiB. A row of 64 keys takes a warp of 64 lanes.
const std::vector<Shape> kShapes =
    shared_shapes<SharedRung<64, 16, 64, 0, false>, SharedRung<64, 32, 32, 0, false>, SharedRung<128, 32, 32, 0, false>,
                  SharedRung<256, 16, 16, 0, false>>();
const KernelInfo kInfo =
    rung_row<kShapes>("simt_shared", "Q, K and V tiles in shared memory, columns of K in one bank");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
