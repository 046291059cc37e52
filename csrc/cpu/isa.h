// The contract between the CPU kernels' drivers (attention.cpp, backward.cpp) and their compute units, one per
// instruction set (attention_avx512.cpp, ...). Plain structs and function pointers only: a unit compiled for AVX-512
// must not emit an inline function that the linker could pick for code that runs everywhere.
#pragma once

#include "attention.h"

namespace flash_wmma::cpu {

/// A run of packed rows of one key/value head against a run of its keys. Packed row r of key/value head h is
/// query r / G of query head h * G + r % G, with G = heads_q / heads_k: the G heads that share K and V share a tile.
struct Task {
    std::int64_t batch, head_k;
    std::int64_t row_begin, row_end;
    std::int64_t key_begin, key_end;
    /// Null: write o and lse. Otherwise this split's unnormalised rows, partial_stride(d_v) floats each.
    float* partial;
};

/// The largest d and d_v of the CPU kernels.
inline constexpr int kMaxHeadDim = 512;

/// Floats of one row of a split: o[d_v], maximum of the unscaled scores, sum.
constexpr std::int64_t partial_stride(std::int64_t head_dim_v) { return head_dim_v + 2; }

/// A run of the keys of one key/value head and all query heads that read them, in a problem of one entry: batch is 1.
struct BackwardTask {
    std::int64_t head_k;
    std::int64_t key_begin, key_end;
    const float* delta;  ///< (Hq, Nq): rowsum(o * dout) - dlse
    float* dq;           ///< (Hq / Hk, Nq, query_stride): this run's part of the unscaled dq, uninitialised
};

struct IsaKernel {
    const char* name;  ///< as FLASH_WMMA_CPU_ISA names it
    int rank;          ///< the highest that is supported runs
    int tile_rows;     ///< Br, packed rows of a Q tile
    bool (*supported)();
    /// Floats of scratch that attend needs, 64-byte aligned, for a task of at most `tiles` Q tiles.
    std::int64_t (*scratch_floats)(const ForwardParams&, std::int64_t tiles);
    void (*attend)(const ForwardParams&, const Task&, float* scratch);
    /// Writes o and lse of packed rows [row_begin, row_end) from `splits` partials that lie `split_stride` floats
    /// apart.
    void (*combine)(const ForwardParams&, const Task&, int splits, std::int64_t split_stride);

    /// Floats of a row of BackwardTask::dq.
    std::int64_t (*query_stride)(const ForwardParams&);
    /// Floats of scratch that delta, backward and finish_query need, 64-byte aligned.
    std::int64_t (*backward_scratch)(const ForwardParams&);
    /// Writes delta (Hq, Nq) of a query head's rows [row_begin, row_end).
    void (*delta)(const BackwardParams&, std::int64_t head, std::int64_t row_begin, std::int64_t row_end, float* delta,
                  float* scratch);
    /// Writes dk and dv of the task's keys and its part of dq, and adds to dbias.
    void (*backward)(const BackwardParams&, const BackwardTask&, float* scratch);
    /// Writes the statistics of a query head (BackwardParams::statistics).
    void (*statistics)(const BackwardParams&, std::int64_t head, float* scratch);
    /// Writes a row of dq: scale times the sum of `parts`, which lie `part_stride` floats apart.
    void (*finish_query)(const BackwardParams&, std::int64_t head, std::int64_t row, const float* first, int parts,
                         std::int64_t part_stride, float* scratch);

    /// Writes `half` rotated pairs of a row (cache/append.h, Rotary); cos and sin are the tables' row.
    void (*rotate)(const void* from, void* to, DType, const void* cos, const void* sin, int half, bool interleaved);
};

struct IsaRegistration {
    explicit IsaRegistration(const IsaKernel& kernel);
};

/// Bc: keys of a K/V tile. Tiles lie on a grid of absolute key positions, so a row's sums do not depend on its task.
inline constexpr int kTileKeys = 64;
/// Q tiles that share one converted K/V tile, at most.
inline constexpr int kMaxTaskTiles = 4;

}  // namespace flash_wmma::cpu
