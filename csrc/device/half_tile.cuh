// A tile of float or half rows on its way from global memory to half shared memory, through the registers of one warp.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_wmma {

/// Rows x Columns elements of type T, spread over a warp's registers in 16-byte pieces: lane l holds piece l % kPieces
/// of every kRowsPerLoad-th row, so that neighbouring lanes read and write neighbouring bytes.
/// load() only issues the reads; what comes between load() and store() hides their latency.
template <class T, int Rows, int Columns>
struct HalfTile {
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, half>);
    static constexpr int kElements = 16 / static_cast<int>(sizeof(T));  // of a piece
    static constexpr int kPieces = Columns / kElements;                 // of a row
    static constexpr int kRowsPerLoad = 32 / kPieces;
    static constexpr int kLoads = Rows / kRowsPerLoad;
    static_assert(32 % kPieces == 0 && Rows % kRowsPerLoad == 0);

    uint4 pieces[kLoads];

    /// Reads the rows at first_row, first_row + stride, ...: `rows` of them (none if negative), zeros beyond.
    __device__ __forceinline__ void load(const T* first_row, std::int64_t stride, int rows) {
        const int row = lane_row();
        const T* from = first_row + row * stride + lane_column();
#pragma unroll
        for (int i = 0; i < kLoads; ++i, from += kRowsPerLoad * stride)
            pieces[i] = row + i * kRowsPerLoad < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    }

    /// Rounds to half and writes the tile. The warp must synchronise before it reads the tile.
    __device__ __forceinline__ void store(half (*tile)[Columns]) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            half* to = &tile[lane_row() + i * kRowsPerLoad][lane_column()];
            if constexpr (std::is_same_v<T, half>) {
                *reinterpret_cast<uint4*>(to) = pieces[i];
            } else {
                const uint4& x = pieces[i];
                union {
                    uint2 vector;
                    __half2 pairs[2];
                } rounded;
                rounded.pairs[0] = __floats2half2_rn(__uint_as_float(x.x), __uint_as_float(x.y));
                rounded.pairs[1] = __floats2half2_rn(__uint_as_float(x.z), __uint_as_float(x.w));
                *reinterpret_cast<uint2*>(to) = rounded.vector;
            }
        }
    }

  private:
    __device__ static int lane_row() { return static_cast<int>(threadIdx.x) % 32 / kPieces; }
    __device__ static int lane_column() { return static_cast<int>(threadIdx.x) % 32 % kPieces * kElements; }
};

}  // namespace flash_wmma
