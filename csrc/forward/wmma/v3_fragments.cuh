// The fragments of wmma_v3, and what the WMMA API does not say of them: the row and column of each element that a
// lane holds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <type_traits>

#include "device/constants.cuh"
#include "device/element.cuh"

namespace flash_wmma::wmma_v3 {

namespace wmma = nvcuda::wmma;

template <class Tile>
using AFragment = wmma::fragment<wmma::matrix_a, 16, 16, 16, typename Tile::T, wmma::row_major>;
template <class Tile>
using KFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, typename Tile::T, wmma::col_major>;
template <class Tile>
using VFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, typename Tile::T, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

/// The accumulator layout that the register route relies on: row and column, in the 16x16 tile, of element i of a lane.
__device__ constexpr int row_of_element(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
/// The e-th (0..3) element of a lane in its row h (0: lane / 4, 1: lane / 4 + 8).
__device__ constexpr int element_of_row(int h, int e) { return e % 2 + 2 * h + 4 * (e / 2); }
__device__ constexpr int column_of_element(int lane, int i) { return 2 * (lane % 4) + i % 2 + 8 * (i / 4); }

/// f(x, element) for every element of a lane in its row h of neighbouring accumulators; `element` counts 8 for each.
template <int Fragments, class F>
__device__ __forceinline__ void each_in_row(Accumulator (&row)[Fragments], int h, F f) {
#pragma unroll
    for (int j = 0; j < Fragments; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(row[j].x[element_of_row(h, e)], 8 * j + element_of_row(h, e));
}

/// A fragment from shared memory. A bf16 fragment is loaded as half's, bit for bit: nvcc loads half by LDSM, but bf16
/// by plain loads and transposes (layout_is_known checks that both have the same layout).
template <class Use, class Layout>
__device__ __forceinline__ void load_fragment(wmma::fragment<Use, 16, 16, 16, half, Layout>& fragment, const half* from,
                                              unsigned pitch) {
    wmma::load_matrix_sync(fragment, from, pitch);
}
template <class Use, class Layout>
__device__ __forceinline__ void load_fragment(wmma::fragment<Use, 16, 16, 16, bf16, Layout>& fragment, const bf16* from,
                                              unsigned pitch) {
    wmma::fragment<Use, 16, 16, 16, half, Layout> bits;
    wmma::load_matrix_sync(bits, reinterpret_cast<const half*>(from), pitch);
#pragma unroll
    for (int i = 0; i < fragment.num_elements; ++i) fragment.x[i] = __ushort_as_bfloat16(__half_as_ushort(bits.x[i]));
}

/// Whether load_fragment and load_matrix_sync agree in this lane.
template <class Fragment, class T>
__device__ bool loads_alike(const T* tile) {
    if constexpr (std::is_same_v<T, half>) return true;
    Fragment ours, theirs;
    load_fragment(ours, tile, 16);
    wmma::load_matrix_sync(theirs, tile, 16);
    bool alike = true;
#pragma unroll
    for (int i = 0; i < Fragment::num_elements; ++i)
        alike &= static_cast<float>(ours.x[i]) == static_cast<float>(theirs.x[i]);
    return alike;
}

/// Whether the fragments of this hardware are laid out as row_of_element and column_of_element say, matrix_a's element
/// i (and i + 8, where it has 16) at the accumulator's place i. `index` and `index_f32` are 16x16 tiles whose entries
/// are their own index, 16 * row + column. Every lane of the warp gets the same answer.
template <class Tile>
__device__ bool layout_is_known(const typename Tile::T* index, const float* index_f32) {
    AFragment<Tile> a;
    Accumulator c;
    wmma::load_matrix_sync(a, index, 16);
    wmma::load_matrix_sync(c, index_f32, 16, wmma::mem_row_major);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    static_assert(Accumulator::num_elements == 8 && AFragment<Tile>::num_elements % 8 == 0);
    bool known = loads_alike<AFragment<Tile>>(index) && loads_alike<KFragment<Tile>>(index) &&
                 loads_alike<VFragment<Tile>>(index);
#pragma unroll
    for (int i = 0; i < AFragment<Tile>::num_elements; ++i) {
        const auto place = static_cast<float>(16 * row_of_element(lane, i % 8) + column_of_element(lane, i % 8));
        known &= static_cast<float>(a.x[i]) == place && c.x[i % 8] == place;
    }
    return __all_sync(kWarpMask, known);
}

}  // namespace flash_wmma::wmma_v3
