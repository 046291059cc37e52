// The compiled tile shapes of wgmma_sm90, shared by its sources.
#pragma once

#include <cstdint>
#include <vector>

#include "shape_table.h"

namespace flash_wmma::wgmma_sm90 {

/// A tile shape and its launch.
struct Shape {
    Instance facts;
    Problems problems;  ///< kPlain; kPacked alone; kGeneral: packed sequences, and softcaps; kPackedDropped; one change
    ///< of the scores; kGeneralChanged: everything. Of converted inputs: kConverted; kConvertedChanged: everything.
    ///< kMaxima, kEntropies or both: kPlain with statistics of the rows; kMerged: kPlain, merged
    int head_dim_v;          ///< the largest d_v it takes
    int columns;             ///< of V and O that a launch computes
    bool splits;             ///< takes parts of items
    std::int64_t most_keys;  ///< that it takes for a row
    float speed;             ///< of a block, relative to other shapes of its head dim
    void (*launch)(const ForwardParams&, const DeviceFacts&, const Shape&, Stream);
};

std::vector<Shape> half_shapes();
std::vector<Shape> half_general_shapes();
std::vector<Shape> bf16_shapes();
std::vector<Shape> bf16_general_shapes();
std::vector<Shape> half_changed_shapes();
std::vector<Shape> bf16_changed_shapes();
std::vector<Shape> half_dropped_shapes();
std::vector<Shape> bf16_dropped_shapes();
std::vector<Shape> half_told_shapes();
std::vector<Shape> bf16_told_shapes();
std::vector<Shape> half_merged_shapes();
std::vector<Shape> bf16_merged_shapes();
std::vector<Shape> converted_shapes();
std::vector<Shape> converted_changed_shapes();

}  // namespace flash_wmma::wgmma_sm90
