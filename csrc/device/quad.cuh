// What the four lanes of a quad do together: they share the rows of a tensor-core accumulator, 2 columns each.
#pragma once

#include "device/constants.cuh"
#include "device/element.cuh"

namespace flash_wmma {

/// Two neighbouring elements in a register.
template <class T>
__device__ __forceinline__ std::uint32_t packed(float x, float y) {
    const typename Element<T>::Pair pair = Element<T>::pair(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The quad's four x combined (maximum or sum); every lane gets the result.
template <class Combine>
__device__ __forceinline__ float over_quad(float x, Combine combine) {
    x = combine(x, __shfl_xor_sync(kWarpMask, x, 1));
    return combine(x, __shfl_xor_sync(kWarpMask, x, 2));
}

/// Lane q of a quad holds word (pair of columns) q of a row in each of two tiles; afterwards it has words q / 2 * 2 and
/// the next, both of tile q % 2.
__device__ __forceinline__ void pair_in_quad(std::uint32_t (&words)[2], int quad_lane) {
    const bool upper = quad_lane & 1;
    const std::uint32_t got = __shfl_xor_sync(kWarpMask, upper ? words[0] : words[1], 1);
    (upper ? words[0] : words[1]) = got;
}

/// Lane q of a quad holds word (pair of columns) q of a row in each of four tiles; afterwards it has the four words of
/// tile q.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&words)[4], int quad_lane) {
#pragma unroll
    for (const int step : {1, 2}) {
        const bool upper = quad_lane & step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const std::uint32_t sent = upper ? words[i] : words[i | step];
            const std::uint32_t got = __shfl_xor_sync(kWarpMask, sent, step);
            (upper ? words[i] : words[i | step]) = got;
        }
    }
}

}  // namespace flash_wmma
