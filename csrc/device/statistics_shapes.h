// A backward kernel's compiled shapes for the statistics (BackwardParams::statistics), what they are given, and the
// choice among them.
#pragma once

#include <stdexcept>
#include <vector>

#include "device/backward_rows.cuh"

namespace flash_wmma::backward {

/// A shape and the launches of its two passes.
struct StatisticsShape {
    DType dtype;                              ///< of q and k as the products read them
    int head_dim;                             ///< the largest d that it takes
    void (*rows)(const Problem&, Stream);     ///< maxima, entropies and row_sum
    void (*columns)(const Problem&, Stream);  ///< column_sum
};

/// The problem of the two passes. `extents`: extents_bytes of the workspace. With key ranges this launches
/// find_extents, which fills them.
template <class Machine>
Problem problem_of_scores(const BackwardParams& p, void* extents, Stream stream) {
    Problem problem{p, nullptr, nullptr};
    if (extents_bytes(p.forward) > 0) {
        problem.extents = static_cast<KeyExtent*>(extents);
        launch_rows(find_extents<Machine>, problem, stream);
    }
    return problem;
}

/// Launches the passes that the problem asks for, by the first shape in the table that holds d.
inline void launch_statistics(const std::vector<StatisticsShape>& shapes, const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    for (const StatisticsShape& shape : shapes) {
        if (shape.dtype != p.dtype || shape.head_dim < p.head_dim) continue;
        if (p.row_max || p.entropy || problem.statistics.row_sum) shape.rows(problem, stream);
        if (problem.statistics.column_sum) shape.columns(problem, stream);
        return;
    }
    throw std::runtime_error("flash_wmma: no tile of this kernel holds the head dim");
}

}  // namespace flash_wmma::backward
