// Which attention weights dropout keeps: a pure function of the state and the weight's absolute place (batch entry or
// sequence, query head, query, key), the same in every kernel, tile shape, split and layout, forward and backward. The
// CPU kernel and CUDA kernels share this file: it is constexpr, so that nvcc takes it for both. Always inline: units
// for one instruction set must not emit functions (cpu/isa.h).
//
// Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with 7 rounds, the fewest that pass
// BigCrush. One call makes the 16-bit numbers of eight weights, those that one lane holds of a 16x16 tile of
// accumulators (device/register_tile.cuh): queries i and i + 8, keys j, j + 1, j + 8 and j + 9.
//
// The counter is (head, queries, entry, keys). A round multiplies its first and third word, so that queries and keys
// meet in the third round alone: a tile computes what comes before once for its queries (DropoutRow) and once for its
// keys (DropoutColumn), and a call is four rounds and two operations more.
//
// A number is read as a half, so that one instruction compares the two of a word. With p up to 1/2 those below a limit
// are dropped; with a larger p those below a limit are kept. NaNs are not below. The limit is such that 65536 p of
// the 65536 numbers, rounded, are dropped; there is no limit with 31745 numbers below it (-0 is not below 0), where
// 31744 stand for them.
#pragma once

#include "attention.h"

namespace flash_wmma {

/// The numbers of eight weights, as a product's operand of queries and keys has them (device/ptx.cuh, mma_m16n8k16).
struct DropoutNumbers {
    std::uint32_t words[4];

    /// Those of an even key and the next, in a half of the queries and a half of the keys: i or i + 8, j or j + 8.
    [[gnu::always_inline]] constexpr std::uint32_t pair(int query_half, int key_half) const {
        return words[key_half * 2 + query_half];
    }
};

/// What queries i and i + 8 give to the third round, and what keys give to it.
struct DropoutRow {
    std::uint32_t c0, c1, c2;
};
struct DropoutColumn {
    std::uint32_t c0, c2, c3;
};

/// Halves, by their size.
[[gnu::always_inline]] constexpr int half_order(std::uint32_t number) {
    const int size = static_cast<int>(number & 0x7fff);
    return number & 0x8000 ? -size : size;
}

/// The dropout of a call. A word of `limit` has the limit twice. `turn` is 0 if numbers below it are kept, otherwise
/// all ones.
constexpr Dropout make_dropout(const std::uint64_t* rng_state, float probability, const DropoutOrigin& origin = {}) {
    const auto dropped = static_cast<std::uint32_t>(probability * 65536.f + 0.5f);
    const bool keeps_below = dropped > 0x8000;
    const std::uint32_t below = !keeps_below ? dropped : dropped < 0xffff ? 0x10000 - dropped : 1;
    const std::uint32_t limit = below <= 0x7c00 ? 0xfc00 - below : below - 0x7c01;
    return {rng_state, probability, limit * 0x10001, keeps_below ? 0 : ~0u, origin};
}

/// The state of a call: the keys of Philox's first round.
struct DropoutState {
    std::uint32_t k0, k1;

    DropoutState() = default;
    [[gnu::always_inline]] constexpr explicit DropoutState(const Dropout& dropout)
        : DropoutState(dropout.rng_state[0] ^ dropout.rng_state[1] * 0x9e3779b97f4a7c15u) {}

  private:
    [[gnu::always_inline]] constexpr explicit DropoutState(std::uint64_t key)
        : k0(static_cast<std::uint32_t>(key)), k1(static_cast<std::uint32_t>(key >> 32)) {}
};

/// Whether the weight with this number is kept.
[[gnu::always_inline]] constexpr bool keeps(const Dropout& dropout, std::uint32_t number) {
    const bool is_nan = (number & 0x7fff) > 0x7c00;
    return (!is_nan && half_order(number) < half_order(dropout.limit & 0xffff)) != (dropout.turn != 0);
}

/// In which of the rows and columns of numbers a query or a key is. 16 more are 8 or 4 groups more.
[[gnu::always_inline]] constexpr int dropout_row(int query) { return query / 16 * 8 + query % 8; }
[[gnu::always_inline]] constexpr int dropout_column(int key) { return key / 16 * 4 + key % 8 / 2; }

/// How many of these rows and columns lie before a call's first one.
[[gnu::always_inline]] constexpr int rows_before(const DropoutOrigin& origin) {
    return static_cast<int>(origin.query / 2);
}
[[gnu::always_inline]] constexpr int columns_before(const DropoutOrigin& origin) {
    return static_cast<int>(origin.key / 4);
}

/// The numbers of the weights of a head.
class DropoutMask {
  public:
    DropoutMask() = default;
    /// entry, head: of the call.
    [[gnu::always_inline]] constexpr DropoutMask(const DropoutState& state, const DropoutOrigin& origin,
                                                 std::int64_t entry, std::int64_t head)
        : state_(state) {
        const std::uint64_t x = kX * static_cast<std::uint32_t>(origin.head + head);
        const std::uint64_t y = kY * static_cast<std::uint32_t>(origin.entry + entry);
        u0_ = high(y) ^ k0(0), u1_ = low(y) ^ k0(1), u2_ = high(x) ^ k1(0), u3_ = low(x) ^ k1(1);
    }
    [[gnu::always_inline]] constexpr DropoutMask(const Dropout& dropout, std::int64_t entry, std::int64_t head)
        : DropoutMask(DropoutState(dropout), dropout.origin, entry, head) {}

    /// index: dropout_row(query) and dropout_column(key) of the whole.
    [[gnu::always_inline]] constexpr DropoutRow row(int index) const {
        const std::uint64_t x = kX * (static_cast<std::uint32_t>(index) ^ u0_);
        const std::uint64_t y = kY * (high(x) ^ u3_);
        return {high(y) ^ k0(2), low(y), low(x) ^ k1(2)};
    }
    [[gnu::always_inline]] constexpr DropoutColumn column(int index) const {
        const std::uint64_t y = kY * (static_cast<std::uint32_t>(index) ^ u2_);
        const std::uint64_t x = kX * (high(y) ^ u1_);
        return {low(y), high(x), low(x)};
    }
    /// The numbers of the eight weights in this row and column.
    [[gnu::always_inline]] constexpr DropoutNumbers numbers(const DropoutRow& row, const DropoutColumn& column) const {
        std::uint32_t c0 = row.c0 ^ column.c0, c1 = row.c1, c2 = row.c2 ^ column.c2, c3 = column.c3;
        for (int round = 3; round < 7; ++round) {
            const std::uint64_t x = kX * c0, y = kY * c2;
            c0 = high(y) ^ c1 ^ k0(round), c1 = low(y), c2 = high(x) ^ c3 ^ k1(round), c3 = low(x);
        }
        return {{c0, c1, c2, c3}};
    }
    /// That of one weight of the whole.
    [[gnu::always_inline]] constexpr std::uint32_t number(int query, int key) const {
        const DropoutNumbers eight = numbers(row(dropout_row(query)), column(dropout_column(key)));
        // Halves known at compile time keep the numbers in registers
        const std::uint32_t pair = query / 8 % 2 ? key / 8 % 2 ? eight.pair(1, 1) : eight.pair(1, 0)
                                   : key / 8 % 2 ? eight.pair(0, 1)
                                                 : eight.pair(0, 0);
        return pair >> (key % 2 * 16) & 0xffff;
    }

  private:
    static constexpr std::uint64_t kX = 0xd2511f53, kY = 0xcd9e8d57;

    [[gnu::always_inline]] static constexpr std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
    [[gnu::always_inline]] static constexpr std::uint32_t high(std::uint64_t x) {
        return static_cast<std::uint32_t>(x >> 32);
    }
    /// The keys of a round.
    [[gnu::always_inline]] constexpr std::uint32_t k0(std::uint32_t round) const {
        return state_.k0 + round * 0x9e3779b9u;
    }
    [[gnu::always_inline]] constexpr std::uint32_t k1(std::uint32_t round) const {
        return state_.k1 + round * 0xbb67ae85u;
    }

    DropoutState state_;
    std::uint32_t u0_, u1_, u2_, u3_;  // of the first round, with the keys to which it is added
};

/// What kept weights are multiplied by.
[[gnu::always_inline]] constexpr float kept_scale(const Dropout& dropout) { return 1.f / (1.f - dropout.probability); }

}  // namespace flash_wmma
