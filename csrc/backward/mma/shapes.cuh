// Tables of tile shapes of the backward kernels on tensor cores, and the launch of a shape.
#pragma once

#include <launch.h>

#include <algorithm>

#include "backward/mma/kernel.cuh"
#include "backward/mma/three_roles.cuh"
#include "backward/mma/two_roles.cuh"
#include "backward_shapes.h"

namespace flash_wmma::backward {

template <void (*kKernel)(Problem), class Tile, class Memory, Pass kPass>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    dim3 grid = kPass == Pass::kQueries ? assignment_grid(p, Tile::kOwn) : owned_keys_grid(p, Tile::kOwn);
    if (grid.x == 0) return;
    grid.y = static_cast<unsigned>((std::max(p.head_dim, p.head_dim_v) + Tile::kColumns - 1) / Tile::kColumns);
    launch(kKernel, {grid, dim3(Tile::kThreads), sizeof(Memory)}, stream, problem);
}

template <void (*kKernel)(Problem), class Tile, class Memory, Pass kPass>
Shape shape(Problems problems, int min_arch, int resident) {
    constexpr bool kQueries = kPass == Pass::kQueries;
    static_assert(sizeof(Memory) <= Tile::Machine::kSharedMemory);
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, kQueries ? Tile::kOwn : Tile::kStream,
             kQueries ? Tile::kStream : Tile::kOwn, Tile::kWarps, Tile::kStages, static_cast<int>(sizeof(Memory)),
             reinterpret_cast<const void*>(kKernel)},
            problems,
            kPass,
            launch_tile<kKernel, Tile, Memory, kPass>,
            resident};
}

/// A row of a table of shapes. `resident`: see Shape.
struct TableRow {
    Problems problems;
    TileShape tile;
    int resident = 1;
};
inline constexpr Problems kPlain = Problems::kPlain, kGeneral = Problems::kGeneral;
inline constexpr Problems kGeneralTerms = Problems::kGeneralTerms;

/// kMore: what the instances take besides the problems of their rows.
template <class Machine, class T, Pass kPass, const auto& kRows, Problems kMore = Problems::kPlain>
std::vector<Shape> shapes(int min_arch) {
    return of_rows<kRows>([&](auto i) {
        constexpr Problems kProblems = kRows[i].problems | kMore;
        using Tile = backward::Tile<Machine, T, kRows[i].tile>;
        const int resident = kRows[i].resident;
        if constexpr (Tile::kRoles == 3)
            return shape<backward_three_roles<Tile>, Tile, ThreeRolesMemory<Tile>, kPass>(kProblems, min_arch,
                                                                                          resident);
        else if constexpr (Tile::kRoles == 2)
            return shape<backward_two_roles<Tile, kPass>, Tile, TwoRolesMemory<Tile>, kPass>(kProblems, min_arch,
                                                                                             resident);
        else
            return shape<backward<Tile, kProblems, kPass>, Tile, SharedMemory<Tile, kProblems, kPass>, kPass>(
                kProblems, min_arch, resident);
    });
}

}  // namespace flash_wmma::backward
