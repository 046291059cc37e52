// The tile shapes of bwd_sm75 for gradients of statistics and of slopes: those of other problems of the same kind.
#pragma once

#include "backward/mma/shapes.cuh"
#include "backward/mma/sm75_shapes.h"
#include "device/sm75.cuh"

namespace flash_wmma::backward {

/// None was timed.
inline constexpr TableRow kSm75Terms[] = {
    {kGeneralTerms, {.d = 64, .own_warps = 4, .stream_rows = 32, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 128, .stream_warps = 2, .stream_rows = 32}},
    {kGeneralTerms, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 1}},
};
inline constexpr TableRow kSm75TermsQueries[] = {
    {kGeneralTerms, {.d = 64, .own_warps = 4, .stream_rows = 32, .in_registers = 2, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 128, .own_warps = 4, .row_tiles = 1, .stream_rows = 32, .step = 32, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 1}},
};
template <Problems kMore = Problems::kPlain>
std::vector<Shape> sm75_terms() {
    return join({shapes<mma::Sm75, half, Pass::kFused, kSm75Terms, kMore>(75),
                 shapes<mma::Sm75, half, Pass::kKeys, kSm75Terms, kMore>(75),
                 shapes<mma::Sm75, half, Pass::kQueries, kSm75TermsQueries, kMore>(75)});
}

}  // namespace flash_wmma::backward
