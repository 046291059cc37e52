// simt_registers: simt_occupancy with O in registers until the last tile. O is rescaled there when the maximum rises,
// and divided by l once, as FlashAttention-2 does: until the end, global memory is only read, for the tiles. The gap
// that is left to simt: every FMA reads two words of shared memory.
#include "forward/simt/shared_rung.cuh"

namespace flash_wmma::simt {
namespace {

/// At d = 256 half as many keys, so that the tiles fit 64 KiB. A row of 64 keys takes a warp of 64 lanes.
const std::vector<Shape> kShapes = shared_shapes<SharedRung<64, 8, 64, 1, true>, SharedRung<64, 16, 32, 1, true>,
                                                 SharedRung<128, 16, 32, 1, true>, SharedRung<256, 16, 16, 1, true>>();
const KernelInfo kInfo = rung_row<kShapes>("simt_registers", "O in registers, divided by l once");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
