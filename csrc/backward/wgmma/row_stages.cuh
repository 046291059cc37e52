// How a block brings rows, before its items: groups of 64 go through a ring of stages in the shared memory that later
// holds K, V, Q, dO and dS. The producer copies o and dO of a group, or its dQ in fp32; the consumers compute L and D,
// or convert dQ. So as many bytes are under way as there is shared memory, and HBM and L2 are bound.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_grid.cuh>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/rows.cuh"

namespace flash_wmma::backward::wgmma {

/// The first warp of the block.
template <class Tile, bool kPacked>
class RowProducer {
    using Memory = SharedMemory<Tile>;
    using Stage = RowStage<Tile>;

  public:
    __device__ __forceinline__ RowProducer(const Problem& problem, const Work& work, const Maps& maps, Memory& shared)
        : problem_(problem), work_(work), maps_(maps), smem_(shared), lane_(static_cast<int>(threadIdx.x)) {}

    /// Ends when the consumers are done with all rows, and these are counted.
    __device__ __forceinline__ void run() {
        for (Groups groups = taken_to_begin(work_); groups.first < groups.end; groups = taken_to_begin(work_))
            prepare(groups);
        empty_places(RowTask::kFlush);
        if (blockIdx.x < work_.row_blocks) bring_more();
        empty_places(RowTask::kNone);
    }

  private:
    /// Prepares runs of groups, as long as there are any, then finishes some. It leaves the rest when no items are left
    /// to take, since all blocks bring it then, and when it would wait for long.
    __device__ __forceinline__ void bring_more() {
        constexpr int kPatience = 64;
        constexpr unsigned kPause = 500;  // ns
        for (Groups groups = taken_to_prepare(work_); groups.first < groups.end; groups = taken_to_prepare(work_))
            prepare(groups);
        empty_places(RowTask::kFlush);
        unsigned run = blockIdx.x;
        for (int idle = 0; idle < kPatience && are_items_left(); ++idle) {
            const Groups groups{kTogether * run, min(kTogether * (run + 1), work_.groups)};
            if (groups.first >= groups.end) break;
            if (is_added(groups)) {
                for (unsigned i = groups.first; i < groups.end; ++i) bring(RowTask::kFinish, i);
                run += work_.row_blocks, idle = 0;
            } else {
                ptx::sleep(kPause);
            }
        }
        if (lane_ == 0) work_.finished[blockIdx.x] = run;
    }
    __device__ __forceinline__ bool are_items_left() const {
        return uniform(lane_ == 0 ? ptx::load_acquire(work_.to_work_on) : 0u) < work_.items;
    }
    __device__ __forceinline__ void prepare(const Groups& groups) {
        for (unsigned i = groups.first; i < groups.end; ++i) bring(RowTask::kPrepare, i);
        count();
    }
    /// Whether all items of the groups' units have added their dQ: lane 0 knows of it then, and its copies.
    __device__ __forceinline__ bool is_added(const Groups& groups) const {
        bool added = true;
        if (lane_ == 0) {
            const unsigned last = (groups.end - 1) / work_.unit_groups;
            for (unsigned unit = groups.first / work_.unit_groups; unit <= last && added; ++unit)
                added = ptx::load_acquire(work_.added + unit) == work_.unit_items;
            ptx::fence_proxy_async_global();
        }
        return uniform(static_cast<unsigned>(added));
    }

    __device__ __forceinline__ void bring(RowTask::Kind kind, unsigned index) {
        const RowGroup group = group_at<kPacked>(problem_.forward, index);
        const Sequence& sequence = group.sequence;
        if (group.first_row < 0 || group.first_row >= sequence.seqlen_q) {
            if (kind == RowTask::kPrepare) note(index);
            return;
        }
        take_place();
        Stage& stage = smem_.row_stages()[place_.stage];
        ptx::Barrier* const full = &smem_.row_slot[place_.stage].full;
        if (kind == RowTask::kPrepare) {
            hand_over({kind, index}, sizeof(stage));
            const int row = sequence.first_q + group.first_row,
                      batch = kPacked && problem_.forward.sequences.cu_seqlens_q ? 0 : sequence.index;
            if (lane_ == 0)
#pragma unroll
                for (int i = 0; i < Tile::kPanels; ++i) {
                    ptx::tensor_load(stage.o[i], &maps_.row_o, full, {64 * i, row, group.head, batch});
                    ptx::tensor_load(stage.dout[i], &maps_.row_dout, full, {64 * i, row, group.head, batch});
                }
        } else {
            const auto bytes = static_cast<unsigned>(kRowGroup * problem_.forward.head_dim * sizeof(float));
            hand_over({kind, index}, bytes);
            if (lane_ == 0)
                ptx::bulk_load(&stage, problem_.dq_rows + std::int64_t{index} * kRowGroup * problem_.forward.head_dim,
                               bytes, full);
        }
        place_.advance();
    }

    /// Waits until the next place is empty, and notes the group that was prepared there.
    __device__ __forceinline__ void take_place() {
        if (lane_ > 0) return;
        ptx::barrier_wait(&smem_.row_slot[place_.stage].empty, place_.parity ^ 1);
        RowTask& before = smem_.row_task[place_.stage];
        if (before.kind == RowTask::kPrepare) note(before.index);
        before.kind = RowTask::kNone;
    }
    /// Has the consumers give back all places, and counts all groups.
    __device__ __forceinline__ void empty_places(RowTask::Kind kind) {
        take_place();
        hand_over({kind, 0}, 0);
        place_.advance();
        const RingPlace<Memory::kRowStages> next = place_;
        for (int i = 0; i < Memory::kRowStages; ++i, place_.advance()) take_place();
        place_ = next;  // nothing was put there
        count();
    }
    /// Lane 0: this group is prepared. Groups of a unit are counted together: each count waits for memory.
    __device__ __forceinline__ void note(unsigned index) {
        if (lane_ > 0) return;
        const unsigned unit = index / work_.unit_groups;
        if (unit != noted_unit_) count();
        noted_unit_ = unit, ++noted_;
    }
    __device__ __forceinline__ void count() {
        if (noted_ > 0 && lane_ == 0) ptx::add_release(work_.prepared + noted_unit_, noted_);
        noted_ = 0;
    }
    __device__ __forceinline__ void hand_over(const RowTask& task, unsigned bytes) {
        if (lane_ > 0) return;
        smem_.row_task[place_.stage] = task;
        ptx::barrier_arrive_expect(&smem_.row_slot[place_.stage].full, bytes);
    }

    const Problem& problem_;
    const Work& work_;
    const Maps& maps_;
    Memory& smem_;
    const int lane_;
    RingPlace<Memory::kRowStages> place_;
    unsigned noted_unit_ = 0, noted_ = 0;  // groups that are prepared and not counted yet
};

/// A warp of the consumers.
template <class Tile, bool kPacked>
class RowConsumer {
    using Memory = SharedMemory<Tile>;
    using Stage = RowStage<Tile>;
    using T = typename Tile::T;
    static constexpr int kWarps = 4 * Tile::kConsumers, kRows = kRowGroup / kWarps;  // rows of a warp
    static constexpr int kLanes = 8, kAtOnce = 32 / kLanes, kSteps = kRows / kAtOnce;

  public:
    __device__ __forceinline__ RowConsumer(const Problem& problem, Memory& shared)
        : problem_(problem),
          smem_(shared),
          warp_(uniform(static_cast<int>(threadIdx.x) / 32 - 4)),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    /// Ends when all consumers are done with all rows.
    __device__ __forceinline__ void run() {
        for (RingPlace<Memory::kRowStages> place;; place.advance()) {
            ptx::barrier_wait(&smem_.row_slot[place.stage].full, place.parity);
            const RowTask task = smem_.row_task[place.stage];
            if (task.kind == RowTask::kPrepare) {
                const Late now = prepare(smem_.row_stages()[place.stage], task.index, place.stage);
                complete();
                late_ = now;
                continue;
            }
            complete();
            if (task.kind == RowTask::kFinish) finish(smem_.row_stages()[place.stage], task.index);
            release(place.stage);
            if (task.kind == RowTask::kNone) break;
        }
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&smem_.rows_done);
        ptx::barrier_wait(&smem_.rows_done, 0);
    }

  private:
    /// A row whose L is under way, so that the next group is worked on before it is there.
    struct Late {
        int stage = -1;          // negative: none
        RowPair* pair = nullptr;  // null: this lane has no row
        int place = 0;           // in the pair
        float sum = 0.f, lse = 0.f, dlse = 0.f;
    };

    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&smem_.row_slot[stage].empty);
    }

    __device__ __forceinline__ Late prepare(const Stage& stage, unsigned index, int place) const {
        const ForwardParams& p = problem_.forward;
        const RowGroup group = group_at<kPacked>(p, index);
        const auto head_dim = static_cast<int>(p.head_dim);
        auto* zeros = reinterpret_cast<float4*>(problem_.dq_rows +
                                                (std::int64_t{index} * kRowGroup + warp_ * kRows) * head_dim);
        for (int i = lane_; i < kRows * head_dim / 4; i += 32) zeros[i] = make_float4(0.f, 0.f, 0.f, 0.f);

        Late late{.stage = place};
        const int own = lane_ % kLanes, mine = kRows * warp_ + kAtOnce * own + lane_ / kLanes;
        if (own < kSteps) {
            late.pair = problem_.facts + (std::int64_t{index} * kRowGroup + mine) / 2, late.place = mine % 2;
            const int row = group.first_row + mine;
            const std::int64_t at = group.sequence.index * p.lse_batch + group.head * p.lse_head +
                                    group.sequence.first_q + row;
            late.lse = -INFINITY;
            if (row < group.sequence.seqlen_q) {
                late.lse = p.lse[at];
                late.dlse = problem_.dlse ? problem_.dlse[at] : 0.f;
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int row = kRows * warp_ + kAtOnce * step + lane_ / kLanes;
            const int at = row * 64 + 8 * (own ^ row % 8);  // the swizzle of the copies
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < Tile::kPanels; ++i)
                sum += product<T>(*reinterpret_cast<const uint4*>(stage.o[i] + at),
                                  *reinterpret_cast<const uint4*>(stage.dout[i] + at));
            sum = reduce_lanes(sum, [](float x, float y) { return x + y; }, kLanes);
            if (step == own) late.sum = sum;
        }
        return late;
    }
    /// Writes L and D of the row before, and gives back its place.
    __device__ __forceinline__ void complete() {
        if (late_.stage < 0) return;
        if (late_.pair) {
            const bool sees = late_.lse != -INFINITY;
            float minus_delta = late_.dlse - late_.sum;
            if (problem_.forward.dropout.rng_state) minus_delta *= 1.f - problem_.forward.dropout.probability;
            late_.pair->minus_lse[late_.place] = sees ? -late_.lse * kLog2e : -INFINITY;
            late_.pair->minus_delta[late_.place] = sees ? minus_delta : 0.f;
        }
        release(late_.stage);
        late_.stage = -1;
    }

    /// Two warps to 16 rows: 16 columns each in turns.
    __device__ __forceinline__ void finish(const Stage& stage, unsigned index) const {
        const ForwardParams& p = problem_.forward;
        const RowGroup group = group_at<kPacked>(p, index);
        const float scale = p.scale * unscaled_factor(p);
        const auto head_dim = static_cast<int>(p.head_dim);
        const int first = warp_ / 2 * 16, quarter = lane_ % 4;
        const int query = group.first_row + first + lane_ / 4 + 8 * (quarter & 1);
        const auto* from = reinterpret_cast<const float*>(&stage) + first * head_dim + 4 * lane_;
        T* to = row_of<T>(problem_.dq, group.sequence.index, group.head, group.sequence.first_q + query);
        const bool exists = query < group.sequence.seqlen_q;
        for (int column = warp_ % 2 * 16; column < head_dim; column += 32) {
            const auto fragment = [&](int c) {
                return c < head_dim ? *reinterpret_cast<const float4*>(from + DqFragment::offset(0, c, 0)) : float4{};
            };
            const uint4 eight = transposed<T>(fragment(column), fragment(column + 8), scale);
            const int own = column + 8 * (quarter >> 1);
            if (exists && own < head_dim) *reinterpret_cast<uint4*>(to + own) = eight;
        }
    }

    const Problem& problem_;
    Memory& smem_;
    const int warp_, lane_;
    Late late_;
};

}  // namespace flash_wmma::backward::wgmma
