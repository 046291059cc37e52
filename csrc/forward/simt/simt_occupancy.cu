// simt_occupancy: simt_padded with 16 rows instead of 32. A block of 32 x 32 threads fills half of an SM, or all of it
// on Turing, and nothing else runs while it waits at a barrier. Blocks of half the threads leave less of the SM unused,
// and one computes while another waits. Each K/V tile now serves half as many rows.
#include "forward/simt/shared_rung.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many rows and keys, so that the tiles fit 64 KiB. A row of 64 keys takes a warp of 64 lanes.
const std::vector<Shape> kShapes = shared_shapes<SharedRung<64, 8, 64, 1, false>, SharedRung<64, 16, 32, 1, false>,
                                                 SharedRung<128, 16, 32, 1, false>, SharedRung<256, 8, 16, 1, false>>();
const KernelInfo kInfo = rung_row<kShapes>("simt_occupancy", "Br 16: more blocks an SM");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
