// The Machine of Turing for the kernels of mma.sync: m16n8k8 of half. There is no asynchronous copy: a tile is loaded
// to registers, 16 bytes at a time, before the work on the previous tile, and stored to shared memory after that work.
#pragma once

#include <ptx.cuh>

#include <cstdint>
#include <type_traits>

#include "device/copy_map.cuh"

namespace flash_wmma::mma {

struct Sm75 {
    static constexpr bool kThroughRegisters = true;  // on the way to shared memory
    static constexpr bool kMultipliesBf16 = false;
    static constexpr int kSharedMemory = 64 * 1024;  // bytes that a block may have
    static constexpr bool kPairsB = false;           // each product takes its part of B from one register

    /// D += A B: A 16x16, B 16x8, as two products along k.
    template <class T>
    __device__ __forceinline__ static void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
        static_assert(std::is_same_v<T, half>);
        const std::uint32_t first[2] = {a[0], a[1]}, second[2] = {a[2], a[3]};
        ptx::mma_m16n8k8(d, first, b0);
        ptx::mma_m16n8k8(d, second, b1);
    }

    /// A vector from global to shared memory, or zeros.
    __device__ __forceinline__ static void copy_16(void* to, const void* from, bool inside) {
        *static_cast<uint4*>(to) = inside ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    }

    /// A block's copies of tiles of Rows rows, zeros beyond `rows`, in two steps.
    template <class Tile, int Rows, class Map = CopyMap<Tile, Rows>>
    struct Copy : Map {
        using Map::Map;

        uint4 vectors[Map::kCount];

        template <class Target>
        __device__ __forceinline__ void start(Target&, std::int64_t pitch) {
            this->for_each(pitch, [&](int i, int, int, const auto* from) {
                vectors[i] = this->inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            });
        }
        template <class Target>
        __device__ __forceinline__ void start(Target&, std::int64_t pitch, int rows) {
            this->for_each(pitch, [&](int i, int row, int, const auto* from) {
                vectors[i] = this->inside && row < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            });
        }
        /// Of a key/value cache, as its for_each_in_runs.
        template <class Target, class Runs>
        __device__ __forceinline__ void start_runs(Target&, const Runs& runs, std::int64_t pitch, int rows) {
            const auto first = [&](int run) { return runs.first[run]; };
            this->for_each_in_runs(first, pitch, rows, [&](int i, int, int, const auto* from) {
                vectors[i] = this->inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            });
        }
        template <class Target>
        __device__ __forceinline__ void finish(Target& target) {
            this->each_place(
                [&](int i, int row, int column) { *reinterpret_cast<uint4*>(target.at(row, column)) = vectors[i]; });
        }
    };
};

}  // namespace flash_wmma::mma
