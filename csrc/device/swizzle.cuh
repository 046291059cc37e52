// A tile in shared memory whose 16-byte vectors are permuted within each row (XOR with the row number), so that the
// eight rows that ldmatrix reads at one column lie in different banks, without padding.
#pragma once

namespace flash_wmma {

/// Rows x Columns 16-bit elements. Columns is a multiple of 16.
template <class T, int Rows, int Columns>
struct SwizzledTile {
    static_assert(sizeof(T) == 2 && Columns % 16 == 0);
    static constexpr int kVector = 8, kVectors = Columns / kVector;  // elements of 16 bytes; vectors a row
    // 128 bytes span all banks once. If a row is an odd multiple of 64 (32) bytes, 2 (4) rows share a permutation.
    static constexpr int kShift = kVectors % 8 == 0 ? 0 : kVectors % 4 == 0 ? 1 : 2;
    static constexpr int kMask = (8 >> kShift) - 1;

    alignas(128) T data[Rows][Columns];

    /// The vector of `row` that holds `column`, a multiple of kVector.
    __device__ __forceinline__ T* at(int row, int column) {
        return &data[row][kVector * (column / kVector ^ (row >> kShift & kMask))];
    }

    /// The vectors that a lane reads by ldmatrix, at (row + rows, column + columns), where `rows` and `columns` are
    /// multiples of 16. A few offsets, kept in registers, serve them all.
    class Lane {
      public:
        __device__ __forceinline__ Lane(int row, int column) {
#pragma unroll
            for (int i = 0; i < kOffsets; ++i)
                offset_[i] = row * Columns + kVector * ((column / kVector + 2 * i) ^ (row >> kShift & kMask));
        }
        /// From first() of a Lane whose column is a multiple of 64, or kVector more.
        __device__ __forceinline__ explicit Lane(int first) {
#pragma unroll
            for (int i = 0; i < kOffsets; ++i) offset_[i] = first ^ 2 * kVector * i;
        }
        __device__ __forceinline__ int first() const { return offset_[0]; }
        __device__ __forceinline__ const T* of(const SwizzledTile& tile, int rows, int columns) const {
            const int pair = columns / 16;
            return &tile.data[rows][pair / kOffsets * kOffsets * 16] + offset_[pair % kOffsets];
        }

      private:
        static constexpr int kOffsets = (kMask + 1) / 2;
        int offset_[kOffsets];
    };
};

}  // namespace flash_wmma
