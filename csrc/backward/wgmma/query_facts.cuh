// How L and D of a tile's queries come to its scores, whose columns the queries are: P = exp2(S * scale - L) and
// dS = P (dP - D).
//
// Loaded: each lane loads those of its queries from shared memory. Such loads wait behind the products' operands, the
// additions to dQ and all else that the SM's load and store unit and shared memory have to do.
//
// Folded into the products: S and dP begin with one more step of 16 k, whose first operand is ones in registers, and
// whose second is -L / scale and -D, each as three bf16 that add up to it (RowTerms). Nothing is loaded, no register
// holds L or D, and nothing is subtracted afterwards. At d = 128 the loads cost 7 to 8 %, and the terms are 2 of 42
// steps (docs/tuning/hopper_backward.md). For plain problems: what changes scores comes between the product and L, and
// dropout between the product and D.
#pragma once

#include <ptx_sm90.cuh>

#include <cstdint>

#include "backward/wgmma/block.cuh"
#include "device/element.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// L and D of a lane's queries, one after the other in the same registers.
template <class Tile>
class LoadedFacts {
    using Scores = RegisterTile<16, Tile::kQueries>;

  public:
    static constexpr bool kFolded = false;

    __device__ __forceinline__ explicit LoadedFacts(int lane) : lane_(lane) {}

    __device__ __forceinline__ void load_lse(const QueryFacts<Tile>& of_tile) {
        load([pairs = of_tile.pairs + lane_ % 4](int i) { return pairs[4 * i].minus_lse; });
    }
    __device__ __forceinline__ void load_delta(const QueryFacts<Tile>& of_tile) {
        load([pairs = of_tile.pairs + lane_ % 4](int i) { return pairs[4 * i].minus_delta; });
    }
    /// -L or -D, whichever was loaded last, of the query of a column.
    __device__ __forceinline__ float of_column(int c) const { return values_[c / 8 * 2 + c % 2]; }
    __device__ __forceinline__ float plus_delta(float dp, int c) const { return dp + of_column(c); }

    __device__ __forceinline__ static void begin_scores(Scores&, const QueryFacts<Tile>&) {}
    __device__ __forceinline__ static void begin_dp(Scores&, const QueryFacts<Tile>&) {}

  private:
    template <class Of>
    __device__ __forceinline__ void load(Of of) {
#pragma unroll
        for (int i = 0; i < Tile::kQueries / 8; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) values_[2 * i + e] = of(i)[e];
    }

    const int lane_;
    float values_[Tile::kQueries / 4];
};

template <class Tile>
class FoldedFacts {
    using Scores = RegisterTile<16, Tile::kQueries>;

  public:
    static constexpr bool kFolded = true;

    __device__ __forceinline__ explicit FoldedFacts(int lane) {
        constexpr std::uint32_t kOne = 0x3f80;  // in bf16
        const int k = lane % 4 * 2;             // of this lane's pairs
        ones_[0] = ones_[1] = k == 0 ? kOne | kOne << 16 : k == 2 ? kOne : 0;
        ones_[2] = ones_[3] = 0;
    }

    // As of LoadedFacts: nothing to load, and nothing that the products lack
    __device__ __forceinline__ static void load_lse(const QueryFacts<Tile>&) {}
    __device__ __forceinline__ static void load_delta(const QueryFacts<Tile>&) {}
    __device__ __forceinline__ static float of_column(int) { return 0.f; }
    __device__ __forceinline__ static float plus_delta(float dp, int) { return dp; }

    /// Issues the first step of S or dP.
    __device__ __forceinline__ void begin_scores(Scores& s, const QueryFacts<Tile>& of_tile) const {
        multiply(s, of_tile.terms[0].minus_lse);
    }
    __device__ __forceinline__ void begin_dp(Scores& dp, const QueryFacts<Tile>& of_tile) const {
        multiply(dp, of_tile.terms[0].minus_delta);
    }

  private:
    __device__ __forceinline__ void multiply(Scores& to, const void* terms) const {
        const ptx::SharedMatrix<ptx::Major::K8> b(terms, sizeof(RowTerms));
        ptx::wgmma<bf16, Tile::kQueries>(to.flat(), ones_, b, false);
    }

    std::uint32_t ones_[4];  // of rows that are all 1, 1, 1, 0, 0, ...
};

}  // namespace flash_wmma::backward::wgmma
