// What the kernels of kernel.cuh, two_roles.cuh and three_roles.cuh share: the shape of a block's work, its tiles in
// shared memory, and a thread's place in the tiles.
#pragma once

#include <type_traits>

#include "device/backward_rows.cuh"
#include "device/constants.cuh"
#include "device/swizzle.cuh"

namespace flash_wmma::backward {

/// Shape of a block's work. Scalar is half or bf16; HeadDim is the largest d (and d_v) that the instance holds. Roles:
/// the number of roles, each of OwnWarps * StreamWarps warps (two_roles.cuh, three_roles.cuh).
template <class Architecture, class Scalar, int HeadDim, int OwnWarps, int StreamWarps, int RowTiles, int StreamTile,
          int Step, int Stages, int Resident, int BlocksPerSm, int Roles = 1>
struct Tile {
    using Machine = Architecture;
    using T = Scalar;
    static constexpr int kD = HeadDim, kOwnWarps = OwnWarps, kStreamWarps = StreamWarps, kRowTiles = RowTiles;
    static constexpr int kStream = StreamTile;  // rows of a streamed tile
    static constexpr int kStep = Step;          // of those, the rows of S that a warp computes at a time
    static constexpr int kStages = Stages;
    static constexpr bool kSecondInRegisters = Resident >= 1, kFirstInRegisters = Resident == 2;
    static constexpr int kBlocksPerSm = BlocksPerSm;  // resident blocks to keep registers for

    // dP is computed in parts of S if that repeats no load of its operand
    static constexpr int kPart = kSecondInRegisters ? 16 : kStep;

    static constexpr int kRoleWarps = kOwnWarps * kStreamWarps, kWarps = kRoleWarps * Roles, kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kOwnWarps;
    static constexpr int kWarpStream = kStream / kStreamWarps, kWarpColumns = kD / kStreamWarps;
    static_assert(kWarpStream % kStep == 0 && kStep % 16 == 0 && kWarpColumns % 16 == 0);
    static_assert(kRowGroup % kStream == 0 && kScaleRows % kStream == 0);

    // dQ's tile of kStream x kD among the warps: 32 rows each where the columns can be shared out
    static constexpr bool kWide = kStream >= 32 && kWarps * 32 % kStream == 0 && kD * kStream % (kWarps * 512) == 0;
    static constexpr int kQueryRows = kWide ? 32 : 16, kQueryWarps = kStream / kQueryRows;
    static constexpr int kQueryColumns = kD * kQueryWarps / kWarps;
};

struct Nothing {};

/// The own tiles and the ring of streamed ones in shared memory.
template <class Tile>
struct TileMemory {
    using T = typename Tile::T;
    using OwnRows = SwizzledTile<T, Tile::kOwn, Tile::kD>;
    using StreamRows = SwizzledTile<T, Tile::kStream, Tile::kD>;
    using Weights = SwizzledTile<T, Tile::kOwn, Tile::kStream>;

    struct Stage {
        StreamRows first, second;
    };
    OwnRows first;  // at the end the gradients on their way out
    union {
        Stage ring[Tile::kStages];
        std::conditional_t<Tile::kSecondInRegisters, OwnRows, Nothing> passing;  // on its way to registers
    };
    std::conditional_t<Tile::kSecondInRegisters, Nothing, OwnRows> staying;

    __device__ OwnRows& second() {
        if constexpr (Tile::kSecondInRegisters) return this->passing;
        else return this->staying;
    }
};

/// Which of a block's rows and columns are this thread's. Accumulators are 16x8 tiles: a lane has rows row() and
/// row() + 8, columns column() and column() + 1 of each (ptx.cuh).
template <class Tile>
struct Thread {
    int lane, own_warp, stream_warp, warp, role;
    __device__ explicit Thread(int tid) {
        lane = tid % 32;
        warp = __shfl_sync(kWarpMask, tid / 32, 0);  // so that the compiler knows it is the same in all lanes
        role = warp / Tile::kRoleWarps;
        own_warp = warp % Tile::kRoleWarps / Tile::kStreamWarps;
        stream_warp = warp % Tile::kStreamWarps;
    }
    __device__ int warp_row() const { return own_warp * Tile::kWarpRows; }
    __device__ int warp_stream() const { return stream_warp * Tile::kWarpStream; }
    __device__ int warp_column() const { return stream_warp * Tile::kWarpColumns; }
    __device__ int row() const { return lane / 4; }
    __device__ int column() const { return lane % 4 * 2; }
};

}  // namespace flash_wmma::backward
