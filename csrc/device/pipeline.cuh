// What the warps of Hopper kernels hand over through shared memory: slots of rings with transaction barriers.
#pragma once

#include <ptx.cuh>
#include <ptx_sm90.cuh>

#include "attention.h"
#include "device/constants.cuh"
#include "problems.h"

namespace flash_wmma {

/// A barrier pair of something that one warp fills and others empty.
struct Slot {
    ptx::Barrier full, empty;
};

/// x, whose words are the same in the whole warp; tells the compiler so.
template <class X>
__device__ __forceinline__ X uniform(X x) {
#pragma unroll
    for (unsigned i = 0; i < sizeof(X) / sizeof(int); ++i) {
        int& word = reinterpret_cast<int*>(&x)[i];
        word = __shfl_sync(kWarpMask, word, 0);
    }
    return x;
}

/// A place in the ring, and how often the ring has come round. kHidden: a ring of one hides from the compiler that its
/// stage is constant, or every address in it is kept for the loop; whole warps advance.
template <int Stages, bool kHidden = false>
struct RingPlace {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if constexpr (Stages == 1 && kHidden) {
            stage = uniform(ptx::opaque(stage));
            parity ^= 1;
        } else if (++stage == Stages) {
            stage = 0, parity ^= 1;
        }
    }
};

/// x, which is the same in the whole warp, in a register of the warp: so is what is computed from x.
__device__ __forceinline__ unsigned in_uniform_register(unsigned x) { return __reduce_or_sync(kWarpMask, x); }

/// The map of rows (B, H, N, columns), or of packed ones (total, H, columns), for boxes of box_rows rows.
inline TensorMap map_rows(const ForwardParams& p, const Rows& rows, std::int64_t columns, std::int64_t n,
                          std::int64_t heads, int box_rows) {
    return make_tensor_map(rows.data, p.dtype, {columns, n, heads, p.sequences.cu_seqlens_q ? 1 : p.batch},
                           {rows.row, rows.head, rows.batch}, {64, box_rows, 1, 1});
}

/// The batch coordinate, in these maps, of the rows of batch entry or sequence `batch`: packed rows have one batch.
template <Problems kProblems>
__device__ __forceinline__ int batch_in_maps(const Sequences& sequences, int batch) {
    return includes(kProblems, Problems::kPacked) && sequences.cu_seqlens_q ? 0 : batch;
}

}  // namespace flash_wmma
