// wgmma_sm90: FlashAttention-2 forward on Hopper's own instructions: tensor copies (TMA), transaction barriers, wgmma.
//
// Algorithm: as in mma.cuh. A block owns Br = 64 * consumers query rows of one head and loops over K/V tiles of Bc keys,
// from the last visible one back to the first:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
//
// Roles: warpgroup 0 is the producer, of which one warp works: it asks for the tiles, and the copy engine brings them. Each
// consumer warpgroup owns 64 query rows, each of its warps 16 of them with their m and l; S, P and O are registers, which
// the producer gives up (setmaxnreg).
//
// Pipeline: S of the next tile is asked for before P V of this one, so that the tensor cores work while P of the next is
// made. The consumers take turns at asking (named barriers), so that one's softmax meets another's products. Blocks are
// persistent: the producer runs ahead into the block's next Q tile while consumers finish this one.
//
// Lagged maximum (mma.cuh): a plain tile uses the old m; each warp votes that no partial row sum passed
// Element<T>::kLargestSum. A warp whose vote fails computes its scores of that tile again, by mma.sync and on its own,
// since wgmma takes four warps.
//
// Shared memory: Q, K and V tiles as panels of 64 columns with the 128-byte swizzle, a ring of `stages` K and V tiles, each
// with a barrier that says it is full and one that says it is empty.
//
// Bound: at d = 64 the issue slots of the softmax, from d = 128 on the tensor cores and the power they take.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>

#include "../attention.h"
#include "../device/element.cuh"
#include "../device/mask.cuh"
#include "../device/quad.cuh"
#include "../device/score_mod.cuh"
#include "../device/tile.cuh"
#include "wgmma_sm90_shapes.h"

namespace flash_wmma::wgmma_sm90 {

/// Shape of a block's work. Scalar is half or bf16; HeadDim is the largest d (and d_v) that the instance holds.
template <class Scalar, int HeadDim, int Consumers, int KeyTile, int Stages, int QStages>
struct Tile {
    using T = Scalar;
    static constexpr int kD = HeadDim, kConsumers = Consumers, kBc = KeyTile, kStages = Stages, kQStages = QStages;
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128;
    static constexpr int kBr = kGroupRows * kConsumers, kThreads = kGroupThreads * (kConsumers + 1);
    static constexpr int kPanels = HeadDim / 64;
    static constexpr int kProducerRegisters = Consumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = Consumers == 4 ? 112 : Consumers == 3 ? 160 : 240;
    static_assert(kD % 64 == 0 && kBc % 16 == 0 && kConsumers <= 4);
};

/// A barrier pair of something that the producer fills and consumers empty.
struct Slot {
    ptx::Barrier full, empty;
};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory {
    using T = typename Tile::T;
    struct alignas(1024) KeyRows {
        T panel[Tile::kPanels][Tile::kBc * 64];
    };
    struct alignas(1024) QRows {
        T panel[Tile::kPanels][Tile::kGroupRows * 64];
    };
    QRows q[Tile::kQStages][Tile::kConsumers];
    KeyRows k[Tile::kStages], v[Tile::kStages];
    Slot q_slot[Tile::kQStages][Tile::kConsumers], k_slot[Tile::kStages], v_slot[Tile::kStages];
    ptx::Barrier patch;  // of a V tile that the producer completes itself
};

/// Where q, k and v lie, for the copy engine.
struct Maps {
    TensorMap q, k, v;
};

inline constexpr unsigned kWarpMask = 0xffffffffu;
inline constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.44269504088896341f;

/// A place in the ring, and how often the ring has come round.
template <int Stages>
struct RingPlace {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
};

/// The order of the work. Blocks take the items of a round in turn, forth and back, so that what the longest of a round cost
/// more, they save in the next.
struct Schedule {
    int items;
    int heads_at_once;  // heads (of all batch entries) whose tiles are numbered together: the longest of all of them first

    /// Calls f(item) for those of this block.
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        const int blocks = static_cast<int>(gridDim.x), forth = static_cast<int>(blockIdx.x), back = blocks - 1 - forth;
        for (int first = 0, step = 0; first < items; first += blocks, ++step) {
            const int item = first + (step % 2 ? back : forth);
            if (item < items) f(item);
        }
    }

    template <int Br>
    __device__ __forceinline__ Assignment dense(const ForwardParams& p, int item) const {
        const int tiles = (static_cast<int>(p.seqlen_q) + Br - 1) / Br;
        const int heads = static_cast<int>(p.heads_q), slices = static_cast<int>(p.batch) * heads;
        const int section = item / (tiles * heads_at_once), first = section * heads_at_once;
        const int within = item % (tiles * heads_at_once), count = min(heads_at_once, slices - first);
        const int slice = first + within % count, tile = tiles - 1 - within / count;
        const int batch = slice / heads, head = slice % heads;
        return {{batch, 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k)},
                {batch, head, head / (heads / static_cast<int>(p.heads_k)), tile * Br}};
    }
};

/// Work item `item` of the grid.
template <class Tile, bool General>
__device__ __forceinline__ Assignment assignment(const ForwardParams& p, const Schedule& schedule, int item) {
    if (General && p.sequences.cu_seqlens_q) return flash_wmma::assignment<Tile::kBr>(p, static_cast<unsigned>(item));
    Assignment found = schedule.dense<Tile::kBr>(p, item);
    if (General) found.sequence = sequence(p, found.tile.batch);
    return found;
}

/// What a block works on at a time: its sequence and Q tile, and the keys it may see.
template <class Tile, bool General>
struct Work {
    Sequence sequence;
    QTile tile;
    BandMask mask;
    int first_tile, tiles;  // K tiles with a key that some row of the Q tile sees

    __device__ __forceinline__ Work(const ForwardParams& p, const Schedule& schedule, int item)
        : Work(p, assignment<Tile, General>(p, schedule, item)) {}

    /// Whether there is a Q tile: not all numbers of packed sequences are used.
    __device__ __forceinline__ bool exists() const {
        return !General || (tile.first_row >= 0 && tile.first_row < sequence.seqlen_q);
    }
    __device__ __forceinline__ int first_key() const { return first_tile * Tile::kBc; }

  private:
    __device__ __forceinline__ Work(const ForwardParams& p, const Assignment& a)
        : sequence(a.sequence), tile(a.tile), mask(p.band, sequence.seqlen_q, sequence.seqlen_k) {
        const int last_row = min(tile.first_row + Tile::kBr, sequence.seqlen_q) - 1;
        first_tile = mask.begin(tile.first_row) / Tile::kBc;
        tiles = max(0, (mask.end(last_row) + Tile::kBc - 1) / Tile::kBc - first_tile);
    }
};

/// x, which is the same in the whole warp: now the compiler knows.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kWarpMask, x, 0); }

// ---- Producer -------------------------------------------------------------------------------------------------------

/// One warp: fills the slots of the shared memory, in the order in which the consumers want them.
template <class Tile, bool General>
struct Producer {
    const ForwardParams& p;
    const Maps& maps;
    SharedMemory<Tile>& smem;
    bool leader = threadIdx.x == 0;
    RingPlace<Tile::kStages> k, v;
    RingPlace<Tile::kQStages> q;
    unsigned patch_parity = 0;

    __device__ __forceinline__ void run(const Schedule& schedule) {
        schedule.for_each([&](int item) {
            const Work<Tile, General> work(p, schedule, item);
            if (!work.exists() || work.tiles == 0) return;
            int key = work.first_key() + (work.tiles - 1) * Tile::kBc;
            load_k(work, key);
            load_q(work);
            for (; key > work.first_key(); key -= Tile::kBc) {
                load_k(work, key - Tile::kBc);
                load_v(work, key);
            }
            load_v(work, key);
        });
    }

  private:
    /// The panels of rows from `row` on.
    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, ptx::Barrier* barrier, int row, int head,
                                         int batch) {
        ptx::barrier_arrive_expect(barrier, sizeof(Rows));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            ptx::tensor_load(rows.panel[i], &map, barrier, {64 * i, row, head, batch});
    }

    __device__ __forceinline__ int batch(const Work<Tile, General>& work) const {
        return General && p.sequences.cu_seqlens_q ? 0 : work.sequence.index;
    }

    __device__ __forceinline__ void load_q(const Work<Tile, General>& work) {
        if (leader)
#pragma unroll
            for (int c = 0; c < Tile::kConsumers; ++c) {
                Slot& slot = smem.q_slot[q.stage][c];
                ptx::barrier_wait(&slot.empty, q.parity ^ 1);
                load(smem.q[q.stage][c], maps.q, &slot.full,
                     work.sequence.first_q + work.tile.first_row + Tile::kGroupRows * c, work.tile.head, batch(work));
            }
        q.advance();
    }

    __device__ __forceinline__ void load_k(const Work<Tile, General>& work, int key) {
        if (leader) {
            Slot& slot = smem.k_slot[k.stage];
            ptx::barrier_wait(&slot.empty, k.parity ^ 1);
            load(smem.k[k.stage], maps.k, &slot.full, work.sequence.first_k + key, work.tile.head_k, batch(work));
        }
        k.advance();
    }

    __device__ __forceinline__ void load_v(const Work<Tile, General>& work, int key) {
        Slot& slot = smem.v_slot[v.stage];
        auto& rows = smem.v[v.stage];
        const int count = work.sequence.seqlen_k - key;  // of the sequence's rows
        // Beyond a tensor's end the copy writes zeros; beyond a sequence's end there are rows that weights of 0 must not meet
        const bool cut = General && (p.sequences.cu_seqlens_k || p.sequences.seqused_k) && count < Tile::kBc;
        if (leader) {
            ptx::barrier_wait(&slot.empty, v.parity ^ 1);
            load(rows, maps.v, cut ? &smem.patch : &slot.full, work.sequence.first_k + key, work.tile.head_k,
                 batch(work));
        }
        if (cut) {
            ptx::barrier_wait(&smem.patch, patch_parity);
            patch_parity ^= 1;
            constexpr int kVectors = 64 / 8;  // of 16 bytes in a row of a panel
#pragma unroll
            for (int i = 0; i < Tile::kPanels; ++i)
                for (int vector = count * kVectors + static_cast<int>(threadIdx.x); vector < Tile::kBc * kVectors;
                     vector += 32)
                    reinterpret_cast<uint4*>(rows.panel[i])[vector] = uint4{};
            ptx::fence_proxy_async();
            __syncwarp();
            if (leader) ptx::barrier_arrive(&slot.full);
        }
        v.advance();
    }
};

// ---- Consumers ------------------------------------------------------------------------------------------------------

/// One warpgroup with its 64 rows of the Q tile.
template <class Tile, bool General>
struct Consumer {
    using T = typename Tile::T;
    static constexpr int kBc = Tile::kBc, kScores = kBc / 2, kColumns = Tile::kD / 2;  // registers of S and O

    const ForwardParams& p;
    SharedMemory<Tile>& smem;
    const int group, warp, lane;  // warpgroup among the consumers, warp in it
    RingPlace<Tile::kStages> k, v;
    RingPlace<Tile::kQStages> q;

    float s[kScores];  // scores, then weights; wgmma's layout (ptx_sm90.cuh)
    std::uint32_t weights[kBc / 16][4];
    float o[kColumns];
    float m[2], l[2];  // of rows row() and + 8 of the warp; l is this lane's part

    __device__ __forceinline__ Consumer(const ForwardParams& params, SharedMemory<Tile>& shared)
        : p(params),
          smem(shared),
          group(uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          warp(uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run(const Schedule& schedule) {
        if (Tile::kConsumers > 1 && group == Tile::kConsumers - 1) pass_turn();
        schedule.for_each([&](int item) {
            const Work<Tile, General> work(p, schedule, item);
            if (work.exists()) attend(work);
        });
    }

  private:
    using Item = Work<Tile, General>;

    __device__ __forceinline__ int row() const { return lane / 4; }
    __device__ __forceinline__ int column() const { return lane % 4 * 2; }

    // The consumers ask for products in turn
    __device__ __forceinline__ void take_turn() const {
        if (Tile::kConsumers > 1) ptx::named_barrier_sync(1 + group, 2 * Tile::kGroupThreads);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (Tile::kConsumers > 1)
            ptx::named_barrier_arrive(1 + (group + 1) % Tile::kConsumers, 2 * Tile::kGroupThreads);
    }

    /// This warp needs it no longer.
    __device__ __forceinline__ void release(Slot& slot) const {
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(&slot.empty);
    }

    /// Asks for S = Q K^T.
    __device__ __forceinline__ void multiply_qk() {
        ptx::barrier_wait(&smem.k_slot[k.stage].full, k.parity);
        take_turn();
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            const ptx::SharedMatrix<ptx::Major::K> q_rows(smem.q[q.stage][group].panel[i]), k_rows(smem.k[k.stage].panel[i]);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                ptx::wgmma<T, kBc>(s, q_rows + 32 * step, k_rows + 32 * step, i + step > 0);
        }
        ptx::wgmma_commit();
    }

    /// Asks for O += P V.
    __device__ __forceinline__ void multiply_pv() {
        ptx::barrier_wait(&smem.v_slot[v.stage].full, v.parity);
        ptx::wgmma_fence();
        const ptx::SharedMatrix<ptx::Major::N> v_rows(smem.v[v.stage].panel, sizeof(smem.v[0].panel[0]));
#pragma unroll
        for (int step = 0; step < kBc / 16; ++step)
            ptx::wgmma<T, Tile::kD>(o, weights[step], v_rows + 16 * 128 * step, true);
        ptx::wgmma_commit();
    }

    /// S of this warp's rows once more, without the warpgroup.
    __device__ __forceinline__ void multiply_qk_again() {
        const auto at = [](const T* panel, int r, int vector) { return panel + 64 * r + 8 * (vector ^ r % 8); };
#pragma unroll
        for (float& score : s) score = 0.f;
        const int q_row = Tile::kWarpRows * warp + lane % 16, k_row = lane / 16 * 8 + lane % 8;
#pragma unroll 1
        for (int step = 0; step < Tile::kD / 16; ++step) {
            const int vector = step % 4 * 2;
            std::uint32_t a[4], b[4];
            ptx::ldmatrix_x4(a, at(smem.q[q.stage][group].panel[step / 4], q_row, vector + lane / 16));
#pragma unroll
            for (int j = 0; j < kBc / 16; ++j) {
                ptx::ldmatrix_x4(b, at(smem.k[k.stage].panel[step / 4], 16 * j + k_row, vector + lane / 8 % 2));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float (&d)[4] = *reinterpret_cast<float (*)[4]>(s + 8 * j + 4 * h);
                    ptx::mma_m16n8k16<T>(d, a, {b[2 * h], b[2 * h + 1]});
                }
            }
        }
    }

    /// Products become scores where something is done to them but the scale; `key`: of the tile's first column.
    __device__ __forceinline__ void modify(const Item& work, int key, int first_query) {
        if constexpr (General) {
            if (!ScoreMod<true>::active(p)) return;
            const ScoreMod<true> mod(p, work.sequence, work.tile);
            mod.template apply<2, kBc / 8>([&](int i, int j, int e) -> float& { return s[4 * j + 2 * i + e]; },
                                           p.scale* kLog2e, [&](int i) { return first_query + row() + 8 * i; },
                                           key + column());
        }
    }

    /// Scores of keys that a row does not see become -inf: those left of its first where `left`, right of its last where
    /// `right`.
    __device__ __forceinline__ void hide(const Item& work, int key, int first_query, bool left, bool right) {
        const auto each = [&](auto hidden) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const auto hides = hidden(first_query + row() + 8 * h);
#pragma unroll
                for (int j = 0; j < kBc / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (hides(8 * j + e)) s[4 * j + 2 * h + e] = -INFINITY;
            }
        };
        const int first_key = key + column();
        if (left)
            each([&](int query) {
                return [begin = work.mask.begin(query) - first_key](int offset) { return offset < begin; };
            });
        if (right)
            each([&](int query) {
                return [end = work.mask.end(query) - first_key](int offset) { return offset >= end; };
            });
    }

    /// Each row's maximum of its scores in this tile.
    __device__ __forceinline__ void row_maximum(float (&top)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = -INFINITY;
#pragma unroll
            for (int j = 0; j < kBc / 8; ++j) top[h] = fmaxf(top[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            top[h] = over_quad(top[h], [](float x, float y) { return fmaxf(x, y); });
        }
    }

    /// P = exp2(S * factor + offset) in place; `sum` is this lane's part of the sums over the rows.
    __device__ __forceinline__ void weigh(float (&sum)[2], float factor, const float (&offset)[2]) {
        sum[0] = sum[1] = 0.f;
#pragma unroll
        for (int j = 0; j < kBc / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = s[4 * j + i];
                score = ptx::ex2(fmaf(score, factor, offset[i / 2]));
                sum[i / 2] += score;
            }
    }

    /// Whether all x * factor are below 2^24: then one that is rounded, as m, and one that is not, as in an FMA, differ by
    /// less than 1. -inf (no visible key yet) counts as such, NaN does not.
    __device__ __forceinline__ static bool all_moderate(const float (&x)[2], float factor) {
        constexpr float kLimit = 1 << 24;
        return (x[0] == -INFINITY || fabsf(x[0] * factor) < kLimit) &&
               (x[1] == -INFINITY || fabsf(x[1] * factor) < kLimit);
    }

    /// P with the exact maximum of what this tile shows; O and l are rescaled to it. Returns whether m is moderate.
    template <class Hide>
    __device__ __forceinline__ bool weigh_exactly(float factor, Hide hide_band, bool first) {
        float top[2], offset[2], sum[2];
        hide_band();
        row_maximum(top);
        const bool moderate = __all_sync(kWarpMask, factor > 0.f && all_moderate(top, factor));
        if (!moderate) {  // products are rounded first, so that the largest is m to the bit
#pragma unroll
            for (float& score : s) score *= factor;
            factor = 1.f;
            hide_band();
            row_maximum(top);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float before = m[h];
            m[h] = fmaxf(before, top[h] * factor);
            const float base = m[h] == -INFINITY ? 0.f : m[h];  // no visible key yet
            offset[h] = moderate ? -base : 0.f;
            if (!moderate)
#pragma unroll
                for (int j = 0; j < kBc / 8; ++j) s[4 * j + 2 * h] -= base, s[4 * j + 2 * h + 1] -= base;
            if (!first) {
                const float rescale = ptx::ex2(before - base);
                l[h] *= rescale;
#pragma unroll
                for (int j = 0; j < Tile::kD / 8; ++j) o[4 * j + 2 * h] *= rescale, o[4 * j + 2 * h + 1] *= rescale;
            }
        }
        weigh(sum, factor, offset);
        l[0] += sum[0], l[1] += sum[1];
        return moderate && __all_sync(kWarpMask, all_moderate(m, 1.f));
    }

    /// P as the second product's operand: its layout is that of S, in pairs.
    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) weights[i / 4][i % 4] = packed<T>(s[2 * i], s[2 * i + 1]);
    }

    /// Tiles of the block that none of this warpgroup's rows sees.
    __device__ __forceinline__ void skip(int tiles) {
        for (; tiles > 0; --tiles) {
            take_turn();
            pass_turn();
            ptx::barrier_wait(&smem.k_slot[k.stage].full, k.parity);
            release(smem.k_slot[k.stage]);
            k.advance();
            ptx::barrier_wait(&smem.v_slot[v.stage].full, v.parity);
            release(smem.v_slot[v.stage]);
            v.advance();
        }
    }

    __device__ __forceinline__ void attend(const Item& work) {
        const int group_query = work.tile.first_row + Tile::kGroupRows * group;
        const int last_row = work.sequence.seqlen_q - 1;
        // Tiles with a key that some row of the warpgroup sees
        const int first = max(work.first_tile, work.mask.begin(group_query) / kBc);
        const int end = group_query > last_row
                            ? first
                            : (work.mask.end(min(group_query + Tile::kGroupRows - 1, last_row)) + kBc - 1) / kBc;
        const int tiles = max(0, end - first), after = tiles > 0 ? first - work.first_tile : 0;
        // Where tiles begin whose keys all rows of the warp see
        const int first_query = group_query + Tile::kWarpRows * warp;
        const int last_query = min(first_query + Tile::kWarpRows - 1, last_row);
        const int all_begin = work.mask.begin(last_query), all_end = work.mask.end(first_query) - kBc + 1;

#pragma unroll
        for (float& x : o) x = 0.f;
        m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.f;
        Slot& q_slot = smem.q_slot[q.stage][group];
        if (work.tiles > 0) ptx::barrier_wait(&q_slot.full, q.parity);
        skip(work.tiles - tiles - after);

        if (tiles > 0) {
            const float factor = General && ScoreMod<General>::active(p) ? 1.f : p.scale * kLog2e;
            int key = (first + tiles - 1) * kBc;
            const auto hide_band = [&] { hide(work, key, first_query, key < all_begin, key >= all_end); };

            multiply_qk();
            pass_turn();
            ptx::wgmma_wait<0>();
            modify(work, key, first_query);
            bool settled = weigh_exactly(factor, hide_band, true);  // whether m is set, and moderate
            release(smem.k_slot[k.stage]);
            k.advance();
            pack_weights();

            for (int left = tiles - 1; left > 0; --left) {
                key -= kBc;
                multiply_qk();
                multiply_pv();
                pass_turn();
                ptx::wgmma_wait<1>();
                modify(work, key, first_query);
                // A tile that every row sees: the old m serves if no weight overflows
                const bool plain = settled && key >= all_begin && key < all_end;
                bool done = false;
                if (plain) {
                    const float offset[2] = {-m[0], -m[1]};
                    float sum[2];
                    weigh(sum, factor, offset);
                    constexpr float kLargest = Element<T>::kLargestSum;
                    done = __all_sync(kWarpMask, sum[0] <= kLargest && sum[1] <= kLargest);
                    if (done) l[0] += sum[0], l[1] += sum[1];
                }
                ptx::wgmma_wait<0>();
                release(smem.v_slot[v.stage]);
                v.advance();
                if (!done) {
                    if (plain) {
                        multiply_qk_again();
                        modify(work, key, first_query);
                    }
                    settled = weigh_exactly(factor, hide_band, false);
                }
                release(smem.k_slot[k.stage]);
                k.advance();
                pack_weights();
            }
            multiply_pv();
        }
        if (work.tiles > 0) {
            release(q_slot);
            q.advance();
        }
        ptx::wgmma_wait<0>();
        if (tiles > 0) {
            release(smem.v_slot[v.stage]);
            v.advance();
        }
        finish(work, first_query);
        skip(after);
    }

    /// O / l and the LSE to global memory; the lanes that share a row swap words until each has 16 neighbouring bytes.
    __device__ __forceinline__ void finish(const Item& work, int first_query) {
        const Sequence& sequence = work.sequence;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = over_quad(l[h], [](float x, float y) { return x + y; });
            const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // 0 for a row that saw no key
            const int query = first_query + row() + 8 * h;
            const bool inside = query < sequence.seqlen_q;
            if (lane % 4 == 0 && inside)
                p.lse[lse_index(p, sequence, work.tile.head, query)] =
                    sum == 0.f ? -INFINITY : (m[h] + log2f(sum)) * kLn2;
            T* const out = row_of<T>(p.o, sequence.index, work.tile.head, sequence.first_q + query);
#pragma unroll
            for (int j = 0; j < Tile::kD / 8; j += 4) {
                std::uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = packed<T>(o[4 * (j + i) + 2 * h] * inverse, o[4 * (j + i) + 2 * h + 1] * inverse);
                transpose_in_quad(words, lane % 4);
                const int col = 8 * (j + lane % 4);
                if (inside && col < p.head_dim_v)
                    *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};

/// General: also packed sequences and softcap; without, all of an item's bounds are known to be the same in every thread.
template <class Tile, bool General>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Maps maps,
            const __grid_constant__ Schedule schedule) {
    auto* base = &shared_memory<SharedMemory<Tile>>();
    asm volatile("" : "+l"(base));
    auto& smem = *base;
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4;  // of a consumer, each of which releases by itself
        for (auto& stage : smem.q_slot)
            for (Slot& slot : stage) ptx::barrier_init(&slot.full, 1), ptx::barrier_init(&slot.empty, kWarps);
        for (auto* ring : {smem.k_slot, smem.v_slot})
            for (int i = 0; i < Tile::kStages; ++i) {
                ptx::barrier_init(&ring[i].full, 1);
                ptx::barrier_init(&ring[i].empty, kWarps * Tile::kConsumers);
            }
        ptx::barrier_init(&smem.patch, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < Tile::kGroupThreads) {
        ptx::release_registers<Tile::kProducerRegisters>();
        if (threadIdx.x < 32) Producer<Tile, General>{p, maps, smem}.run(schedule);
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        Consumer<Tile, General>(p, smem).run(schedule);
    }
}

/// The map of rows (B, H, N, columns), or of packed ones (total, H, columns), for boxes of box_rows rows.
inline TensorMap map_rows(const ForwardParams& p, const Rows& rows, std::int64_t columns, std::int64_t n,
                          std::int64_t heads, int box_rows) {
    return make_tensor_map(rows.data, p.dtype, {columns, n, heads, p.sequences.cu_seqlens_q ? 1 : p.batch},
                           {rows.row, rows.head, rows.batch}, {64, box_rows, 1, 1});
}

/// Where a Q tile's work depends on its place, the tiles of many heads are mixed, so that no block ends late.
inline int heads_at_once(const ForwardParams& p) {
    const bool uneven = p.band.right < kUnbounded && p.band.left >= kUnbounded;
    const char*e=getenv("HOP_S"); if(uneven&&e&&atoi(e)){ auto per=2*2*p.seqlen_k*p.head_dim; int n=(int)(atoi(e)*1000000ll/per); return std::max(1,std::min(n,(int)(p.batch*p.heads_q))); }
    return uneven ? static_cast<int>(p.batch * p.heads_q) : 1;
}

template <class Tile, bool General>
void launch_tile(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Sequences& s = p.sequences;
    const std::int64_t rows_q = s.cu_seqlens_q ? s.total_q : p.seqlen_q,
                       rows_k = s.cu_seqlens_k ? s.total_k : p.seqlen_k;
    const Maps maps{map_rows(p, p.q, p.head_dim, rows_q, p.heads_q, Tile::kGroupRows),
                    map_rows(p, p.k, p.head_dim, rows_k, p.heads_k, Tile::kBc),
                    map_rows(p, p.v, p.head_dim_v, rows_k, p.heads_k, Tile::kBc)};
    const Schedule schedule{static_cast<int>(assignment_grid(p, Tile::kBr).x), heads_at_once(p)};
    const LaunchConfig config{dim3(static_cast<unsigned>(std::min(schedule.items, device.sm_count))),
                              dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)};
    launch(forward<Tile, General>, config, stream, p, maps, schedule);
}

template <class Tile, bool General>
Shape shape() {
    return {{Element<typename Tile::T>::kDType, 90, Tile::kD, Tile::kBr, Tile::kBc, Tile::kThreads / 32, Tile::kStages,
             sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(forward<Tile, General>)},
            General,
            launch_tile<Tile, General>};
}

/// The shapes that ship (docs/tuning/hopper.md). Arguments: d, consumers, Bc, stages.
template <class T, bool General>
std::vector<Shape> shapes() {
    return {
        shape<Tile<T, 64, 3, 128, 2, 1>, General>(),
        shape<Tile<T, 128, 2, 128, 2, 1>, General>(),
        shape<Tile<T, 256, 2, 80, 2, 1>, General>(),
    };
}

}  // namespace flash_wmma::wgmma_sm90
