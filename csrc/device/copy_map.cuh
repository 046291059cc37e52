// Which vectors of a tile a thread copies to shared memory, for the machines of mma.sync (sm75.cuh, sm80.cuh).
#pragma once

#include <cstdint>

#include "cached_rows.h"
#include "device/constants.cuh"

namespace flash_wmma::mma {

/// How a block's threads share the copy of a tile of Rows rows: neighbouring threads copy neighbouring vectors of 8
/// elements. Walks from a last tile of rows back to the first.
template <class Tile, int Rows, int Columns = Tile::kD>
struct CopyMap {
    static constexpr bool kReadsOnce = false;  // other blocks read the same
    static constexpr int kVectors = Columns / 8, kRowsAtOnce = Tile::kThreads / kVectors;
    static constexpr int kCount = (Rows + kRowsAtOnce - 1) / kRowsAtOnce;  // vectors of a thread

    const typename Tile::T* from;  // this thread's first vector of the next tile
    bool inside;                   // whether its column exists

    /// `columns`: how many there are.
    __device__ CopyMap(const typename Tile::T* source, std::int64_t pitch, int columns)
        : from(source + row() * pitch + column()), inside(column() < columns) {}

    /// Calls f(i, row, column, from) for this thread's vectors, and moves on to the tile before.
    template <class F>
    __device__ __forceinline__ void for_each(std::int64_t pitch, F f) {
        const typename Tile::T* vector = from;
        if (Tile::kThreads % kVectors == 0 || row() < kRowsAtOnce)
#pragma unroll
            for (int i = 0; i < kCount; ++i, vector += kRowsAtOnce * pitch)
                if (Rows % kRowsAtOnce == 0 || row() + i * kRowsAtOnce < Rows)
                    f(i, row() + i * kRowsAtOnce, column(), vector);
        from -= Rows * pitch;
    }
    /// Calls f(i, row, column) for the places of this thread's vectors.
    template <class F>
    __device__ __forceinline__ void each_place(F f) const {
        CopyMap(*this).for_each(0, [&](int i, int row, int column, const auto*) { f(i, row, column); });
    }

    __device__ static int row() { return static_cast<int>(threadIdx.x / kVectors); }
    __device__ static int column() { return static_cast<int>(threadIdx.x % kVectors * 8); }
};

/// How the warps of a group share the copy of a tile of Rows rows of a key/value cache: a warp has neighbouring rows,
/// lane r knows where row r of these lies, and the lanes copy neighbouring vectors. So a warp looks up each of its rows
/// once, and once for K and V. Where runs of kRun rows are adjacent, as in a cache without pages and in most with
/// pages, only a run's first row is handed round.
template <class Tile, int Rows>
struct CachedCopyMap {
    static constexpr bool kReadsOnce = Tile::kBr <= 32;  // such tiles have all rows that share a key
    static constexpr int kVectors = Tile::kD / 8;
    static constexpr int kWarpRows = (Rows + Tile::kGroupWarps - 1) / Tile::kGroupWarps;
    static constexpr int kCount = (kWarpRows * kVectors + 31) / 32;
    static constexpr std::int64_t kNowhere = -1;  // the offset of a row that does not exist
    static constexpr bool kAllExist = Rows % Tile::kGroupWarps == 0 && kWarpRows * kVectors % 32 == 0;
    // Of the vectors that a lane copies one after the other, every kPeriod-th is in the same column
    static constexpr int kPeriod = kVectors % 3 ? 1 : 3, kPeriodRows = 32 * kPeriod / kVectors;
    static constexpr int kRun = kWarpRows % 16 ? kWarpRows : 16;
    static constexpr bool kHasRuns = kAllExist && 32 * kPeriod % kVectors == 0 && kRun % kPeriodRows == 0;
    static constexpr int kRuns = kWarpRows / kRun;
    static_assert(kWarpRows <= 32);

    const typename Tile::T* head;  // the head's first row in the cache
    int d;
    bool passes_by;       // whether the cache is too large to stay in L2 until it is read again
    bool inside = false;  // whether the vector exists that f is called for

    __device__ CachedCopyMap(const typename Tile::T* first_row, int columns, bool passes_by_)
        : head(first_row), d(columns), passes_by(passes_by_) {}

    /// The first of the warp's rows.
    __device__ static int first_row() { return static_cast<int>(threadIdx.x / 32 % Tile::kGroupWarps) * kWarpRows; }
    /// The row of a tile that this lane looks up; Rows or more: none.
    __device__ static int lane_row() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        return lane < kWarpRows ? first_row() + lane : Rows;
    }

    /// As CopyMap's. `offset` is that of this lane's row, in elements from `head`. Vectors that do not exist get an
    /// address that is not read.
    template <class F>
    __device__ __forceinline__ void for_each(std::int64_t offset, F f) {
        each([&](int i, int r, int column, bool exists) {
            const std::int64_t row = __shfl_sync(kWarpMask, offset, r);
            inside = row >= 0 && column < d;
            if (exists) f(i, first_row() + r, column, head + (inside ? row + column : 0));
        });
    }
    /// Where a run of kRun of the warp's rows begins. `offset` as above.
    __device__ __forceinline__ const typename Tile::T* first_of_run(std::int64_t offset, int run) const {
        return head + __shfl_sync(kWarpMask, offset, run * kRun);
    }
    /// Where all of them begin.
    struct Runs {
        const typename Tile::T* first[kRuns];
    };
    __device__ __forceinline__ Runs runs(std::int64_t offset) const {
        Runs runs;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) runs.first[run] = first_of_run(offset, run);
        return runs;
    }
    /// As for_each if rows of a run are `pitch` elements apart, and of the tile's rows those below `rows` exist.
    /// `first_of(run)`: where a run begins.
    template <class First, class F>
    __device__ __forceinline__ void for_each_in_runs(First first_of, std::int64_t pitch, int rows, F f) {
        const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const typename Tile::T* const first = first_of(run);
#pragma unroll
            for (int b = 0; b < kPeriod; ++b) {
                const int vector = lane + 32 * b, r = vector / kVectors, column = vector % kVectors * 8;
                const typename Tile::T* from = first + r * pitch + column;
#pragma unroll
                for (int a = 0; a < kRun / kPeriodRows; ++a, from += kPeriodRows * pitch) {
                    const int row = first_row() + run * kRun + a * kPeriodRows + r;
                    inside = column < d && row < rows;
                    f((run * (kRun / kPeriodRows) + a) * kPeriod + b, row, column, from);
                }
            }
        }
    }
    template <class F>
    __device__ __forceinline__ void each_place(F f) const {
        each([&](int i, int r, int column, bool exists) {
            if (exists) f(i, first_row() + r, column);
        });
    }

  private:
    /// f(i, row among the warp's, column, whether the tile has it).
    template <class F>
    __device__ __forceinline__ static void each(F f) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const unsigned vector = threadIdx.x % 32 + 32 * i;
            const int r = static_cast<int>(vector / kVectors), column = static_cast<int>(vector % kVectors * 8);
            f(i, r, column, kAllExist || (r < kWarpRows && first_row() + r < Rows));
        }
    }
};

}  // namespace flash_wmma::mma
