// nvcuda::wmma for 16x16x16 tiles of half and bf16 with float and half accumulators, in the lane layout of the hardware
// (the same in code for sm_75 to sm_90). Element i (0...7) of lane l is
//     of an accumulator or of matrix_a  at row l / 4 + 8 (i / 2 % 2), column 2 (l % 4) + i % 2 + 8 (i / 4),
//     of matrix_b                       at row 2 (l % 4) + i % 2 + 8 (i / 2 % 2), column l / 4 + 8 (i / 4).
// half's matrix_a and matrix_b have 16 elements, each place twice (i and i + 8); bf16's have 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "the emulator has 16x16x16 fragments");
    static constexpr int num_elements = std::is_same_v<T, __half> && !std::is_same_v<Use, accumulator> ? 16 : 8;
    using element_type = T;
    using storage_element_type = T;
    T x[num_elements];
};

template <class Fragment, class T>
EMULATOR_INLINE void fill_fragment(Fragment& f, const T& value) {
    for (auto& element : f.x) element = value;
}

}  // namespace nvcuda::wmma

namespace flash_wmma::emulator {

namespace wmma = nvcuda::wmma;

/// Row and column of element i of a lane.
template <class Use>
EMULATOR_INLINE void place(int lane, int i, int& row, int& column) {
    const int far = lane / 4 + 8 * (i / 2 % 2), near = 2 * (lane % 4) + i % 2 + 8 * (i / 4 % 2);
    if constexpr (std::is_same_v<Use, wmma::matrix_b>) {
        row = 2 * (lane % 4) + i % 2 + 8 * (i / 2 % 2), column = lane / 4 + 8 * (i / 4 % 2);
    } else {
        row = far, column = near;
    }
}

template <class Fragment, class T>
struct FragmentArgument {
    Fragment* fragment;
    T* tile;
    unsigned pitch;
    bool columns;  // stored column by column
};

/// The accesses of the compiled load or store, from sm_75 on: half operands in shared memory by one ldmatrix of four
/// matrices; other memory by a 32-bit access per pair of neighbours; float accumulators by pairs, or one by one if
/// neighbours lie in different rows.
template <class Use, class T, bool Store, class Argument>
EMULATOR_INLINE void tile_requests(const Argument& a) {
    const auto at = [&](int row, int column) __attribute__((always_inline)) {
        return a.tile + (a.columns ? static_cast<std::size_t>(column) * a.pitch + static_cast<std::size_t>(row)
                                   : static_cast<std::size_t>(row) * a.pitch + static_cast<std::size_t>(column));
    };
    const void* address[32];
    constexpr bool kOperand = !std::is_same_v<Use, wmma::accumulator>;
    if (kOperand && std::is_same_v<T, __half> && in_shared_memory(a.tile)) {
        for (int l = 0; l < 32; ++l)
            address[l] = a.tile + static_cast<std::size_t>(l % 8 + 8 * (l / 8 % 2)) * a.pitch + 8 * (l / 16);
        warp_access(Access::kLdmatrix, address, 0xffffffff, 16);
        return;
    }
    // Neighbours in memory. Operands: along k; the other direction is transposed in registers
    const bool pairs = kOperand || !a.columns;
    for (int i = 0; i < 8; i += pairs ? 2 : 1) {
        for (int l = 0; l < 32; ++l) {
            int row, column;
            if (kOperand) {
                place<wmma::accumulator>(l, i, row, column);
                address[l] = a.tile + static_cast<std::size_t>(row) * a.pitch + column;
            } else {
                place<Use>(l, i, row, column);
                address[l] = at(row, column);
            }
        }
        warp_access(Store ? Access::kStore : Access::kLoad, address, 0xffffffff,
                    static_cast<int>(sizeof(T)) * (pairs ? 2 : 1));
    }
}

template <class Use, class Fragment, class T, bool Store>
EMULATOR_UNSEEN void move_tile(Arguments arguments, LaneMask) {
    using Argument = FragmentArgument<Fragment, T>;
    const Argument& first = *static_cast<Argument*>(arguments[0]);
    for (int l = 1; l < 32; ++l) {
        const Argument& a = *static_cast<Argument*>(arguments[l]);
        if (a.tile != first.tile || a.pitch != first.pitch || a.columns != first.columns)
            fail_collective("lanes differ in the address, the pitch or the layout");
    }
    constexpr unsigned kPitchBytes = 16;
    if (reinterpret_cast<std::uintptr_t>(first.tile) % 32) fail_collective("the address is not 32-byte aligned");
    if (first.pitch * sizeof(T) % kPitchBytes) fail_collective("the pitch is no multiple of 16 bytes");
    tile_requests<Use, T, Store>(first);
    for (int l = 0; l < 32; ++l) {
        Fragment& f = *static_cast<Argument*>(arguments[l])->fragment;
        for (int i = 0; i < Fragment::num_elements; ++i) {
            int row, column;
            place<Use>(l, i, row, column);
            T* e = first.tile + (first.columns
                                     ? static_cast<std::size_t>(column) * first.pitch + static_cast<std::size_t>(row)
                                     : static_cast<std::size_t>(row) * first.pitch + static_cast<std::size_t>(column));
            if constexpr (Store) *e = f.x[i];
            else f.x[i] = *e;
        }
    }
}
template <class Use, class Fragment, class T, bool Store>
inline constexpr Collective kMoveTile{Store ? "wmma::store_matrix_sync" : "wmma::load_matrix_sync",
                                      Store ? Instruction::kStoreShared : Instruction::kLoadShared,
                                      0,
                                      32,
                                      false,
                                      move_tile<Use, Fragment, T, Store>};

template <class D, class A, class B, class C>
struct WmmaArgument {
    D* d;
    const A* a;
    const B* b;
    const C* c;
};
template <class D, class A, class B, class C>
EMULATOR_UNSEEN void wmma_sync(Arguments arguments, LaneMask) {
    using Argument = WmmaArgument<D, A, B, C>;
    float a[256], b[256], c[256];
    for (int l = 0; l < 32; ++l) {
        const Argument& x = *static_cast<Argument*>(arguments[l]);
        for (int i = 0; i < 8; ++i) {
            int row, column;
            place<wmma::matrix_a>(l, i, row, column);
            a[16 * row + column] = float(x.a->x[i]);
            c[16 * row + column] = float(x.c->x[i]);
            place<wmma::matrix_b>(l, i, row, column);
            b[16 * row + column] = float(x.b->x[i]);
        }
    }
    multiply(c, a, b, 16, 16);
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 8; ++i) {
            int row, column;
            place<wmma::accumulator>(l, i, row, column);
            static_cast<Argument*>(arguments[l])->d->x[i] = c[16 * row + column];
        }
}
/// Two mma.m16n8k16 each.
template <class D, class A, class B, class C>
inline constexpr Collective kWmma{"wmma::mma_sync", Instruction::kMma, 2, 32, false, wmma_sync<D, A, B, C>};

}  // namespace flash_wmma::emulator

namespace nvcuda::wmma {

namespace emulator = ::flash_wmma::emulator;

template <class Use, class T, class Layout>
EMULATOR_BRICK void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* tile, unsigned pitch,
                                     EMULATOR_SITE) {
    using Fragment = fragment<Use, 16, 16, 16, T, Layout>;
    emulator::FragmentArgument<Fragment, T> argument{&f, const_cast<T*>(tile), pitch,
                                                     std::is_same_v<Layout, col_major>};
    emulator::collective(emulator::kMoveTile<Use, Fragment, T, false>, 0xffffffff, &argument, site, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK void load_matrix_sync(fragment<accumulator, 16, 16, 16, T>& f, const T* tile, unsigned pitch,
                                     layout_t layout, EMULATOR_SITE) {
    using Fragment = fragment<accumulator, 16, 16, 16, T>;
    emulator::FragmentArgument<Fragment, T> argument{&f, const_cast<T*>(tile), pitch, layout == mem_col_major};
    emulator::collective(emulator::kMoveTile<accumulator, Fragment, T, false>, 0xffffffff, &argument, site,
                         EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK void store_matrix_sync(T* tile, const fragment<accumulator, 16, 16, 16, T>& f, unsigned pitch,
                                      layout_t layout, EMULATOR_SITE) {
    using Fragment = fragment<accumulator, 16, 16, 16, T>;
    emulator::FragmentArgument<Fragment, T> argument{const_cast<Fragment*>(&f), tile, pitch, layout == mem_col_major};
    emulator::collective(emulator::kMoveTile<accumulator, Fragment, T, true>, 0xffffffff, &argument, site, EMULATOR_PC);
}
template <class TD, class TI, class TC, class LayoutA, class LayoutB>
EMULATOR_BRICK void mma_sync(fragment<accumulator, 16, 16, 16, TD>& d,
                             const fragment<matrix_a, 16, 16, 16, TI, LayoutA>& a,
                             const fragment<matrix_b, 16, 16, 16, TI, LayoutB>& b,
                             const fragment<accumulator, 16, 16, 16, TC>& c, EMULATOR_SITE) {
    using D = fragment<accumulator, 16, 16, 16, TD>;
    using A = fragment<matrix_a, 16, 16, 16, TI, LayoutA>;
    using B = fragment<matrix_b, 16, 16, 16, TI, LayoutB>;
    using C = fragment<accumulator, 16, 16, 16, TC>;
    emulator::WmmaArgument<D, A, B, C> argument{&d, &a, &b, &c};
    emulator::collective(emulator::kWmma<D, A, B, C>, 0xffffffff, &argument, site, EMULATOR_PC);
}

}  // namespace nvcuda::wmma
