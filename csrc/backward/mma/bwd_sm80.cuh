// The tile shapes of bwd_sm80: the kernels of kernel.cuh and two_roles.cuh on sm_80 and later.
#pragma once

#include "backward/mma/shapes.cuh"
#include "backward/mma/sm80_shapes.h"
#include "device/sm80.cuh"

namespace flash_wmma::backward {

/// The fused pass of plain problems. Up to d = 64 P and dS stay in registers and two blocks share an SM; above, a block
/// takes 176 to 217 KiB of shared memory.
inline constexpr TableRow kSm80Plain[] = {
    {kPlain, {.d = 32, .own_warps = 4, .stream_rows = 64, .step = 32, .in_registers = 1, .blocks_per_sm = 2}},
    {kPlain, {.d = 64, .own_warps = 4, .stream_rows = 64, .in_registers = 1, .blocks_per_sm = 2}},
    {kPlain, {.d = 96, .stream_warps = 2, .row_tiles = 4, .stream_rows = 64, .step = 32, .stages = 2, .roles = 2}},
    {kPlain, {.d = 128, .stream_warps = 2, .row_tiles = 4, .stream_rows = 64, .step = 32, .stages = 2, .roles = 2}},
    {kPlain, {.d = 192, .stream_warps = 2, .stream_rows = 64, .step = 32, .stages = 2, .roles = 2}},
    {kPlain, {.d = 256, .stream_warps = 2, .stream_rows = 64, .step = 32, .stages = 2, .roles = 2}},
};

/// The fused pass of any problem, and with less shared memory: 128 and 145 KiB at d = 128 and 256 (the first shape of
/// each), 200 and 132 KiB at d = 512 (the first two), below 99 KiB otherwise. No shape of d = 512 was timed.
inline constexpr TableRow kSm80General[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .in_registers = 1, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .own_warps = 4, .stream_warps = 2, .stream_rows = 64, .step = 32}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 64, .step = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .stream_warps = 4, .stream_rows = 64}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .stream_warps = 4, .row_tiles = 1, .stream_rows = 64}},
    {kGeneral, {.d = 512, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
};

/// The deterministic passes. At d = 256 plain problems have a shape of their own, which needs large shared memory; the
/// last shape of each pass fits 99 KiB.
inline constexpr TableRow kSm80Keys[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 1, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 64, .step = 32, .blocks_per_sm = 2}},
    {kPlain, {.d = 256, .stream_warps = 2, .stream_rows = 64, .step = 32, .stages = 2, .roles = 2}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
};
inline constexpr TableRow kSm80Queries[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .own_warps = 4, .stream_rows = 32, .step = 32, .stages = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .own_warps = 4, .stream_warps = 2, .stream_rows = 64, .step = 32}},
    {kGeneral, {.d = 256, .own_warps = 4, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
};

/// The passes of converted inputs.
inline constexpr TableRow kSm80Converted[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .own_warps = 4, .stream_warps = 2, .stream_rows = 64, .step = 32}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 64, .step = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .stream_warps = 4, .stream_rows = 64}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
};
inline constexpr TableRow kSm80ConvertedKeys[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 64, .step = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
};
inline constexpr TableRow kSm80ConvertedQueries[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .own_warps = 4, .stream_rows = 32, .step = 32, .stages = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .own_warps = 4, .stream_warps = 2, .stream_rows = 64, .step = 32}},
    {kGeneral, {.d = 256, .own_warps = 4, .row_tiles = 1, .stream_rows = 32}},
    {kGeneral, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
};

/// The passes of problems with gradients of statistics or of slopes, of converted inputs too: shapes that fit 99 KiB.
/// None was timed.
inline constexpr TableRow kSm80Terms[] = {
    {kGeneralTerms, {.d = 64, .own_warps = 4, .stream_rows = 64, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 128, .stream_warps = 2, .stream_rows = 64, .step = 32, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
    {kGeneralTerms, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .columns = 256}},
};
inline constexpr TableRow kSm80TermsQueries[] = {
    {kGeneralTerms, {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 2, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 128, .own_warps = 4, .stream_rows = 32, .stages = 2, .blocks_per_sm = 2}},
    {kGeneralTerms, {.d = 256, .own_warps = 4, .row_tiles = 1, .stream_rows = 32}},
    {kGeneralTerms, {.d = 512, .own_warps = 1, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32}},
};
template <class T, Problems kMore = Problems::kPlain>
std::vector<Shape> sm80_terms_shapes() {
    return join({shapes<mma::Sm80, T, Pass::kFused, kSm80Terms, kMore>(80),
                 shapes<mma::Sm80, T, Pass::kKeys, kSm80Terms, kMore>(80),
                 shapes<mma::Sm80, T, Pass::kQueries, kSm80TermsQueries, kMore>(80)});
}

}  // namespace flash_wmma::backward
