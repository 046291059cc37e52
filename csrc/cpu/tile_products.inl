// Products of pairs by registers that hold a tile each: 16 rows of 64 bytes.
#pragma once

#include "cpu/pairs.inl"

namespace flash_wmma::cpu {
namespace {

/// Calls f<0>(), ..., f<n - 1>().
template <int kCount, int kFirst = 0, class F>
inline void each(const F& f) {
    if constexpr (kFirst < kCount) {
        f.template operator()<kFirst>();
        each<kCount, kFirst + 1>(f);
    }
}

/// `Registers`: eight of them, by number (attention_amx.cpp).
template <class Registers>
struct TileProducts {
    using Scope = typename Registers::Scope;
    static constexpr int kWidest = 2;

    /// C is in the first registers, a step's A and B follow, for all products of the step.
    template <int kM, int kN>
    static void multiply(const PairProduct& x) {
        constexpr int kA = kM * kN, kB = kA + kM;
        static_assert(kB + kN <= 8);
        const auto c = [&](int i) { return x.c_block(i / kN, i % kN); };
        each<kA>([&]<int i>() {
            if (x.adds) Registers::template load<i>(c(i), x.c_row * 4);
            else Registers::template clear<i>();
        });
        for (int step = 0; step < x.steps; ++step)
            for (int part = 0; part < x.parts; ++part) {
                if (part == 0 || x.a_part != 0)
                    each<kM>([&]<int m>() { Registers::template load<kA + m>(x.a_block(m, step, part), x.a_row * 2); });
                if (part == 0 || x.b_part != 0)
                    each<kN>([&]<int n>() { Registers::template load<kB + n>(x.b_block(n, step, part), x.b_row * 4); });
                each<kA>([&]<int i>() { Registers::template multiply<i, kA + i / kN, kB + i % kN>(); });
            }
        each<kA>([&]<int i>() { Registers::template store<i>(c(i), x.c_row * 4); });
    }
};

}  // namespace
}  // namespace flash_wmma::cpu
