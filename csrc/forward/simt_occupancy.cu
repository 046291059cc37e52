// simt_occupancy: simt_padded with 16 rows instead of 32. A block of 32 x 32 threads fills half of an SM, or all of it
// on Turing, and nothing else runs while it waits at a barrier. Blocks of half the threads leave less of the SM unused,
// and one computes while another waits. Each K/V tile now serves half as many rows.
#include "simt_shared.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many rows and keys, so that the tiles fit 64 KiB.
const std::vector<Shape> kShapes = {
    shared_shape<SharedRung<64, 16, 32, 1, false>>(),
    shared_shape<SharedRung<128, 16, 32, 1, false>>(),
    shared_shape<SharedRung<256, 8, 16, 1, false>>(),
};
const KernelInfo kInfo = Rung<kShapes>::info(/*name=*/"simt_occupancy", /*summary=*/"Br 16: more blocks an SM");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
