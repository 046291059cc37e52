// Parts of attention over the keys, and their merger. Each part has seen other keys of the same rows:
//
//     m = max m_i,   l = sum l_i 2^(m_i - m),   O = sum O_i 2^(m_i - m)         and, as ever, O / l and the LSE.
//
// What warps of a block hand each other lies in shared memory as their lanes hold 16 rows: one vector of all 32 lanes
// after the other. The vectors of O come first (8 columns each), then one of m and l (PartRows, merge_parts).
//
// What blocks leave for another grid lies in global memory row by row, so that rows that do not exist cost nothing and
// that a thread of the grid merges four columns of a row, or a few lanes do, each some of the parts (StoredPart,
// MergedVector).
#pragma once

#include <ptx.cuh>

#include <cmath>

#include "device/register_tile.cuh"

namespace flash_wmma {

/// Where a lane's vectors of a part with so many columns of O lie.
template <int kColumns>
class PartRows {
  public:
    static constexpr int kVectors = kColumns / 8;  // of O
    static constexpr int kSize = (kVectors + 1) * 32;

    __device__ __forceinline__ PartRows(float4* part, int lane) : first_(part + lane) {}
    __device__ __forceinline__ float4& o(int i) const { return first_[i * 32]; }
    /// m of the lane's two rows, then l.
    __device__ __forceinline__ float4& facts() const { return first_[kVectors * 32]; }

  private:
    float4* first_;
};

/// What some keys add to 16 rows, columns kColumns of O: of one part, or of several that were merged. A lane has l of
/// whole rows.
template <int kColumns>
struct KeyPart {
    RowValues<16> m, l;
    RegisterTile<16, kColumns> o;

    /// Stores O as the vectors from `vector` on.
    template <int kAll>
    __device__ __forceinline__ void give_o(const PartRows<kAll>& to, int vector) const {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
            to.o(vector + j) = make_float4(o.block[0][j][0], o.block[0][j][1], o.block[0][j][2], o.block[0][j][3]);
    }
    template <int kAll>
    __device__ __forceinline__ void give_facts(const PartRows<kAll>& to) const {
        to.facts() = make_float4(m[0], m[1], l[0], l[1]);
    }
};

/// Merges the parts at(i), i = begin, begin + step, ... below end: the columns of the vectors from `vector` on. Without
/// a part m is -inf, l and O are 0.
template <int kColumns, class At>
__device__ __forceinline__ KeyPart<kColumns> merge_parts(int begin, int end, int step, int vector, At at) {
    KeyPart<kColumns> all;
    all.o.clear();
    all.m.each([&](int i, float& m) { m = -INFINITY, all.l[i] = 0.f; });
#pragma unroll 4
    for (int i = begin; i < end; i += step) {
        const float4 facts = at(i).facts();
        all.m[0] = fmaxf(all.m[0], facts.x), all.m[1] = fmaxf(all.m[1], facts.y);
    }
#pragma unroll 4
    for (int i = begin; i < end; i += step) {
        const auto part = at(i);
        const float4 facts = part.facts();
        const float m[2] = {facts.x, facts.y}, l[2] = {facts.z, facts.w};
        // Without a visible key O may be 0 * NaN of v. If all scores are NaN, so is l
        const bool sees[2] = {m[0] != -INFINITY, m[1] != -INFINITY};
        float weight[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            weight[h] = sees[h] ? ptx::ex2(m[h] - all.m[h]) : 1.f;
            all.l[h] = fmaf(l[h], weight[h], all.l[h]);
        }
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            const float4 x = part.o(vector + j);
            const float o[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (sees[e / 2]) all.o.block[0][j][e] = fmaf(o[e], weight[e / 2], all.o.block[0][j][e]);
        }
    }
    return all;
}

/// Where four columns of a row of a part lie in global memory, and the row's m and l.
struct PartVector {
    const float *facts, *o;

    __device__ __forceinline__ PartVector behind(std::int64_t floats) const { return {facts + floats, o + floats}; }
};

/// A part in global memory, of kRows rows: O, and behind it m and l of each row.
template <int kRows, int kColumns>
class StoredPart {
  public:
    static constexpr int kSize = kRows * (kColumns + 2);  // floats

    __device__ __forceinline__ explicit StoredPart(float* part) : first_(part) {}
    /// Columns [column, column + 4) of a row, column a multiple of 4.
    __device__ __forceinline__ float4& o(int row, int column) const {
        return *reinterpret_cast<float4*>(first_ + row * kColumns + column);
    }
    /// m and l.
    __device__ __forceinline__ float2& facts(int row) const {
        return *reinterpret_cast<float2*>(first_ + kRows * kColumns + 2 * row);
    }

    __device__ __forceinline__ PartVector vector(int row, int column) const {
        return {&facts(row).x, &o(row, column).x};
    }

    /// Stores what a warp has of 16 rows, from `row` on, and of the columns from `column` on, but of no row from `rows`
    /// on. `facts`: m and l too.
    template <int kSome>
    __device__ __forceinline__ void give(const KeyPart<kSome>& some, int row, int column, int rows, bool facts,
                                         int lane) const {
        some.m.each([&](int i, float m) {
            const int at = row + lane / 4 + 8 * i;
            if (at >= rows) return;
            float* const to = first_ + at * kColumns + column + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < kSome / 8; ++j)
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(some.o.block[0][j][2 * i], some.o.block[0][j][2 * i + 1]);
            if (facts && lane % 4 == 0) this->facts(at) = make_float2(m, some.l[i]);
        });
    }

  private:
    float* first_;
};

/// Four columns of a row, of several parts together. Without a part m is -inf, l and O are 0.
struct MergedVector {
    float m = -INFINITY, l = 0.f, o[4] = {};

    static constexpr int kAtOnce = 8;  // parts

    /// Of `parts` parts, at least 1, those of numbers first, first + step, ...; first < step. Part 0 lies at `begin`,
    /// part i at `others` + i * stride floats. `parts` and `step` are the same in a whole warp, which calls this.
    __device__ __forceinline__ MergedVector(int first, int step, int parts, PartVector begin, PartVector others,
                                            int stride) {
        for (int from = 0; from < parts; from += kAtOnce * step) {
            float2 facts[kAtOnce];
            float4 x[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int part = from + first + i * step;
                // No branch between the loads
                PartVector found = others.behind(std::int64_t{min(part, parts - 1)} * stride);
                if (i == 0 && part == 0) found = begin;
                facts[i] = *reinterpret_cast<const float2*>(found.facts);
                x[i] = *reinterpret_cast<const float4*>(found.o);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (from + first + i * step >= parts) facts[i] = make_float2(-INFINITY, 0.f);
            float top = m;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, facts[i].x);
            const float base = rescale_to(top);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                // Without a visible key O may be 0 * NaN of v. If all scores are NaN, so is l
                const bool sees = facts[i].x != -INFINITY;
                const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
                add(facts[i].y, values, sees ? ptx::ex2(facts[i].x - base) : 1.f, sees);
            }
        }
    }

    /// What the warp's lanes have whose numbers differ by multiples of `distance`, a power of two: in all of them.
    __device__ __forceinline__ void over_lanes(int distance) {
        for (; distance < 32; distance *= 2) {
            const auto of_other = [&](float x) { return __shfl_xor_sync(kWarpMask, x, distance); };
            const float other_m = of_other(m), other_l = of_other(l);
            const float other_o[4] = {of_other(o[0]), of_other(o[1]), of_other(o[2]), of_other(o[3])};
            const float base = rescale_to(fmaxf(m, other_m));
            add(other_l, other_o, ptx::ex2(other_m - base), true);
        }
    }

  private:
    /// Makes m this one. Returns the m that weights are relative to.
    __device__ __forceinline__ float rescale_to(float top) {
        const float base = top == -INFINITY ? 0.f : top, rescale = ptx::ex2(m - base);
        m = top, l *= rescale;
#pragma unroll
        for (float& value : o) value *= rescale;
        return base;
    }
    __device__ __forceinline__ void add(float part_l, const float (&part_o)[4], float weight, bool sees) {
        l = fmaf(part_l, weight, l);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(sees ? part_o[e] : 0.f, weight, o[e]);
    }
};

}  // namespace flash_wmma
