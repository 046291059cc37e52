// The Machine of sm_80 and later for the kernels of mma.sync: m16n8k16 of half or bf16; 16-byte asynchronous copies
// bring tiles to shared memory.
#pragma once

#include <ptx.cuh>

#include <cstdint>

#include "device/copy_map.cuh"

namespace flash_wmma::mma {

struct Sm80 {
    static constexpr bool kThroughRegisters = false;  // on the way to shared memory
    static constexpr bool kMultipliesBf16 = true;
    static constexpr int kSharedMemory = 227 * 1024;  // bytes that a block may have
    static constexpr bool kPairsB = true;             // a product takes B from two neighbouring registers

    /// D += A B: A 16x16, B 16x8.
    template <class T>
    __device__ __forceinline__ static void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
        const std::uint32_t b[2] = {b0, b1};
        ptx::mma_m16n8k16<T>(d, a, b);
    }

    /// A vector from global to shared memory, or zeros; it lands at the cp_async_wait of its group.
    __device__ __forceinline__ static void copy_16(void* to, const void* from, bool inside) {
        ptx::cp_async_16(to, from, inside ? 16 : 0);
    }

    /// A block's copies of tiles of Rows rows, zeros beyond `rows`.
    template <class Tile, int Rows, class Map = CopyMap<Tile, Rows>>
    struct Copy : Map {
        using Map::Map;

        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                copy(target.at(row, column), from, this->inside);
            });
        }
        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch, int rows) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                copy(target.at(row, column), from, this->inside && row < rows);
            });
        }
        /// Of a key/value cache, as its for_each_in_runs.
        template <class Target>
        __device__ __forceinline__ void start_runs(Target& target, std::int64_t offset, std::int64_t pitch, int rows) {
            const auto first = [&](int run) { return this->first_of_run(offset, run); };
            this->for_each_in_runs(first, pitch, rows, [&](int, int row, int column, const auto* from) {
                copy(target.at(row, column), from, this->inside);
            });
        }
        template <class Target>
        __device__ __forceinline__ void finish(Target&) {}

      private:
        __device__ __forceinline__ void copy(void* to, const void* from, bool inside) {
            [[maybe_unused]] const int bytes = inside ? 16 : 0;
            if constexpr (Map::kReadsOnce) ptx::cp_async_16(to, from, bytes, ptx::cache_policy(this->passes_by));
            else copy_16(to, from, inside);
        }
    };
};

}  // namespace flash_wmma::mma
