// What the kernels of kernel.cuh, two_roles.cuh and three_roles.cuh share: the shape of a block's work, its tiles in
// shared memory, and a thread's place in the tiles.
#pragma once

#include <type_traits>

#include "device/backward_rows.cuh"
#include "device/constants.cuh"
#include "device/nothing.cuh"
#include "device/swizzle.cuh"

namespace flash_wmma::backward {

/// Shape of a block's work. A block owns rows (keys, or queries in Pass::kQueries) and streams the others.
struct TileShape {
    int d;                  ///< the largest d and d_v that the instance takes
    int own_warps = 2;      ///< of a role: groups of warps, each with own rows
    int stream_warps = 1;   ///< of a group: each has a part of the streamed rows and of the columns
    int row_tiles = 2;      ///< of 16 own rows each, of a warp
    int stream_rows;        ///< of a streamed tile
    int step = 16;          ///< of those, the rows of S that a warp computes at a time
    int stages = 1;         ///< streamed tiles in flight
    int in_registers = 0;   ///< own operands that stay there. 1: the second, 2: both
    int roles = 1;          ///< two_roles.cuh, three_roles.cuh
    int blocks_per_sm = 1;  ///< resident blocks to keep registers for
    int columns = 0;        ///< of the gradients, of a block; 0: all. If d is larger, several blocks share the own rows
};

template <class Tile>
struct Thread;

/// The same with what follows from it. Scalar is half or bf16.
template <class Architecture, class Scalar, TileShape kShape>
struct Tile {
    using Machine = Architecture;
    using T = Scalar;
    using Place = Thread<Tile>;
    static constexpr int kD = kShape.d, kOwnWarps = kShape.own_warps, kStreamWarps = kShape.stream_warps;
    static constexpr int kRowTiles = kShape.row_tiles, kStream = kShape.stream_rows, kStep = kShape.step;
    static constexpr int kStages = kShape.stages, kRoles = kShape.roles, kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr bool kSecondInRegisters = kShape.in_registers >= 1, kFirstInRegisters = kShape.in_registers == 2;

    // dP is computed in parts of S if that repeats no load of its operand
    static constexpr int kPart = kSecondInRegisters ? 16 : kStep;

    static constexpr int kRoleWarps = kOwnWarps * kStreamWarps, kWarps = kRoleWarps * kRoles, kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kOwnWarps;
    static constexpr int kColumns = kShape.columns ? kShape.columns : kD;
    static constexpr int kWarpStream = kStream / kStreamWarps, kWarpColumns = kColumns / kStreamWarps;
    static_assert(kWarpStream % kStep == 0 && kStep % 16 == 0 && kWarpColumns % 16 == 0);
    static_assert(kRowGroup % kStream == 0 && kScaleRows % kStream == 0 && kRowGroup % kWarpRows == 0);

    // dQ's tile of kStream x kColumns among the warps: 32 rows each where the columns can be shared out
    static constexpr bool kWide =
        kStream >= 32 && kWarps * 32 % kStream == 0 && kColumns * kStream % (kWarps * 512) == 0;
    static constexpr int kQueryRows = kWide ? 32 : 16, kQueryWarps = kStream / kQueryRows;
    static constexpr int kQueryColumns = kColumns * kQueryWarps / kWarps;

    /// The first of the block's columns of the gradients.
    __device__ static int first_column() { return kColumns < kD ? static_cast<int>(blockIdx.y) * kColumns : 0; }
};

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
    __device__ int warp_column() const { return Tile::first_column() + stream_warp * Tile::kWarpColumns; }
    __device__ int row() const { return lane / 4; }
    __device__ int column() const { return lane % 4 * 2; }
};

}  // namespace flash_wmma::backward
