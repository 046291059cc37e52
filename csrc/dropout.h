// Which attention weights dropout keeps: a pure function of the state and the weight's absolute place (batch entry or
// sequence, query head, query, key), the same in every kernel, tile shape, split and layout, forward and backward. The
// CPU kernel and CUDA kernels share this file: it is constexpr, so that nvcc takes it for both. Always inline: units for
// one instruction set must not emit functions (cpu/isa.h).
//
// Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with 7 rounds, the fewest that pass
// BigCrush. One call makes the 16-bit numbers of eight weights, those that one lane holds of a 16x16 tile of
// accumulators (device/register_tile.cuh): queries i and i + 8, keys j, j + 1, j + 8 and j + 9. A weight is dropped if
// its number is below 65536 p, rounded.
#pragma once

#include "attention.h"

namespace flash_wmma {

/// The numbers of eight weights.
struct DropoutNumbers {
    std::uint32_t words[4];

    /// That of the weight in a half of the queries and a half of the keys, i or i + 8 and j or j + 8, with an even key
    /// or (odd: 1) an odd one.
    [[gnu::always_inline]] constexpr std::uint32_t at(int query_half, int key_half, int odd) const {
        return (words[query_half * 2 + key_half] >> (odd * 16)) & 0xffff;
    }
};

/// Which weights of a head are kept.
class DropoutMask {
  public:
    [[gnu::always_inline]] constexpr DropoutMask(const Dropout& dropout, std::int64_t entry, std::int64_t head)
        : key_(dropout.rng_state[0] ^ dropout.rng_state[1] * 0x9e3779b97f4a7c15u),
          entry_(static_cast<std::uint32_t>(dropout.first_entry + entry)),
          head_(static_cast<std::uint32_t>(head)),
          threshold_(threshold(dropout.probability)) {}

    /// The numbers of the eight weights among which (query, key) is.
    [[gnu::always_inline]] constexpr DropoutNumbers numbers(int query, int key) const {
        std::uint32_t c0 = static_cast<std::uint32_t>(key / 16 * 4 + key % 8 / 2),
                      c1 = static_cast<std::uint32_t>(query / 16 * 8 + query % 8), c2 = head_, c3 = entry_;
        auto k0 = static_cast<std::uint32_t>(key_), k1 = static_cast<std::uint32_t>(key_ >> 32);
        for (int round = 0; round < 7; ++round) {
            const std::uint64_t x = std::uint64_t{0xd2511f53} * c0, y = std::uint64_t{0xcd9e8d57} * c2;
            c0 = static_cast<std::uint32_t>(y >> 32) ^ c1 ^ k0;
            c1 = static_cast<std::uint32_t>(y);
            c2 = static_cast<std::uint32_t>(x >> 32) ^ c3 ^ k1;
            c3 = static_cast<std::uint32_t>(x);
            k0 += 0x9e3779b9, k1 += 0xbb67ae85;
        }
        return {{c0, c1, c2, c3}};
    }
    [[gnu::always_inline]] constexpr bool keeps(std::uint32_t number) const { return number >= threshold_; }
    [[gnu::always_inline]] constexpr bool kept(int query, int key) const {
        const DropoutNumbers eight = numbers(query, key);
        // Halves known at compile time keep the numbers in registers
        const int odd = key % 2;
        return keeps(query / 8 % 2 ? key / 8 % 2 ? eight.at(1, 1, odd) : eight.at(1, 0, odd)
                     : key / 8 % 2 ? eight.at(0, 1, odd)
                                   : eight.at(0, 0, odd));
    }

  private:
    [[gnu::always_inline]] static constexpr std::uint32_t threshold(float probability) {
        const auto rounded = static_cast<std::uint32_t>(probability * 65536.f + 0.5f);
        return rounded < 65535 ? rounded : 65535;
    }

    std::uint64_t key_;
    std::uint32_t entry_, head_, threshold_;
};

/// What kept weights are multiplied by.
[[gnu::always_inline]] constexpr float kept_scale(const Dropout& dropout) { return 1.f / (1.f - dropout.probability); }

}  // namespace flash_wmma
