// The ring of K/V tiles in the shared memory of a group of warps: its copies, its waits, and the place of the current
// tile.
#pragma once

#include <ptx.cuh>

#include "forward/mma/block.cuh"

namespace flash_wmma::mma {

/// This thread's part of the copies of K and V, from the tile at `key` on back to the first.
template <class Tile, bool kCached = Tile::kCached>
struct KeyValueCopies {
    template <int Columns>
    using Copy =
        typename Tile::Machine::template Copy<Tile, Tile::kGroupKeys, CopyMap<Tile, Tile::kGroupKeys, Columns>>;
    Copy<Tile::kD> k;
    Copy<Tile::kColumns> v;

    __device__ __forceinline__ KeyValueCopies(const Work<Tile>& work, int key)
        : k(work.key_rows(work.p.k, key), work.p.k.row, work.p.head_dim),
          v(work.key_rows(work.p.v, key) + work.first_column(), work.p.v.row, work.columns()) {}

    __device__ __forceinline__ void begin() {}
    template <class Stage>
    __device__ __forceinline__ void start(Stage& stage, std::int64_t k_pitch, std::int64_t v_pitch) {
        k.start(stage.k, k_pitch);
        v.start(stage.v, v_pitch);
    }
    /// Of a tile with so many rows, or more than it holds.
    template <class Stage>
    __device__ __forceinline__ void start(Stage& stage, std::int64_t k_pitch, std::int64_t v_pitch, int rows) {
        k.start(stage.k, k_pitch, rows);
        v.start(stage.v, v_pitch, rows);
    }
    template <class Stage>
    __device__ __forceinline__ void finish(Stage& stage) {
        k.finish(stage.k);
        v.finish(stage.v);
    }
};

/// The same from a key/value cache. Rows are looked up a tile ahead, so that no copy waits for the table of pages.
template <class Tile>
struct KeyValueCopies<Tile, true> {
    using Map = CachedCopyMap<Tile, Tile::kGroupKeys>;
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kGroupKeys, Map>;
    static_assert(!Tile::kAlternates);

    __device__ __forceinline__ KeyValueCopies(const Work<Tile>& work, int first_key)
        : work_(work),
          rows_(work.p.sequences, work.sequence.index, work.sequence.first_k, work.sequence.seqlen_k),
          key_(first_key),
          k_(row_of<const typename Tile::T>(work.p.k, 0, work.tile.head_k, 0), work.p.head_dim, passes_by(work.p)),
          v_(row_of<const typename Tile::T>(work.p.v, 0, work.tile.head_k, 0), work.p.head_dim_v, passes_by(work.p)) {
        look_up();
    }

    /// Asks the L2 cache for the rows that the first copies bring, beside the grids before: what these still write is
    /// in L2 too. Nothing is asked for if L2 may hold K and V as it is.
    __device__ __forceinline__ void fetch_ahead() const {
        constexpr int kLines = (Tile::kD * kBytes + kLine - 1) / kLine;
        const int tiles = k_.passes_by ? min(Tile::kAhead, work_.tiles) : 0, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
            for (int at = lane; at < Map::kWarpRows * kLines; at += 32) {
                const int row = Map::first_row() + at / kLines, line = at % kLines, j = key_ - tile * Tile::kBc + row;
                if (row >= Tile::kGroupKeys || j < 0 || j >= rows_.count) continue;
                const CachedRows::Place place = rows_.place(j);
                const int page = rows_.pages ? read_early(rows_.pages + place.run) : rows_.page;
                fetch(k_.head + rows_.offset(work_.p.k, page, place.row), line, k_.d);
                fetch(v_.head + rows_.offset(work_.p.v, page, place.row), line, v_.d);
            }
    }
    /// Before the first start().
    __device__ __forceinline__ void begin() { read_page(); }

    template <class Stage>
    __device__ __forceinline__ void start(Stage& stage, std::int64_t k_pitch, std::int64_t v_pitch) {
        const bool exists = place_.row >= 0;
        const std::int64_t k = exists ? rows_.offset(work_.p.k, page_, place_.row) : Map::kNowhere;
        const std::int64_t v = exists ? rows_.offset(work_.p.v, page_, place_.row) : Map::kNowhere;
        if (in_runs_) {
            if constexpr (Tile::Machine::kThroughRegisters) {
                // ptxas may copy code up to the next shuffle. Loads of two copies have registers of their own, and the
                // warp waits for what they bring. So all shuffles come first
                const auto k_runs = k_.runs(k), v_runs = v_.runs(v);
                k_.start_runs(stage.k, k_runs, k_pitch, rows_.count - key_);
                v_.start_runs(stage.v, v_runs, v_pitch, rows_.count - key_);
            } else {
                k_.start_runs(stage.k, k, k_pitch, rows_.count - key_);
                v_.start_runs(stage.v, v, v_pitch, rows_.count - key_);
            }
        } else {
            k_.start(stage.k, k);
            v_.start(stage.v, v);
        }
        key_ -= Tile::kBc;
        look_up();
        read_page();
    }
    template <class Stage>
    __device__ __forceinline__ void start(Stage& stage, std::int64_t k_pitch, std::int64_t v_pitch, int) {
        start(stage, k_pitch, v_pitch);  // rows behind the sequence are found not to exist
    }
    template <class Stage>
    __device__ __forceinline__ void finish(Stage& stage) {
        k_.finish(stage.k);
        v_.finish(stage.v);
    }

  private:
    /// Whether K and V may be more than an L2 cache holds: then no line serves the next call, and all may go first.
    __device__ __forceinline__ static bool passes_by(const ForwardParams& p) {
        constexpr std::int64_t kBytes = 64 << 20;
        const std::int64_t row = (p.head_dim + p.head_dim_v) * static_cast<int>(sizeof(typename Tile::T));
        return p.batch * p.heads_k * p.seqlen_k * row > kBytes;
    }
    __device__ __forceinline__ void look_up() {
        const int row = Map::lane_row(), j = key_ + row;
        place_.row = -1;
        if (row < Tile::kGroupKeys && j >= 0 && j < rows_.count) place_ = rows_.place(j);
        const bool begins = static_cast<int>(threadIdx.x) % 32 % Map::kRun == 0 && place_.row >= 0;
        const int last = place_.row + min(Map::kRun, rows_.count - j) - 1;
        in_runs_ = Map::kHasRuns && __all_sync(kWarpMask, !begins || last < rows_.page_size);
    }
    __device__ __forceinline__ void read_page() {
        if (place_.row >= 0) page_ = rows_.page_of(place_.run);
    }
    /// Asks for a line of a row, if it has columns there. Rows that begin within a line may have one more.
    __device__ __forceinline__ static void fetch(const typename Tile::T* row, int line, int columns) {
        if (line * kLine < columns * kBytes) ptx::prefetch_line(row + line * kLine / kBytes);
    }

    static constexpr int kLine = kLineBytes, kBytes = static_cast<int>(sizeof(typename Tile::T));  // of an element

    const Work<Tile>& work_;
    CachedRows rows_;
    CachedRows::Place place_{0, -1};  // of this lane's row of the next tile
    int page_ = 0;                    // that it is in
    bool in_runs_ = false;            // whether the warp's rows of it lie in runs (CachedCopyMap)
    int key_;                         // the first of the next tile
    Copy k_, v_;
};

/// Goes from the last visible tile back to the first, and copies kAhead tiles ahead. With one stage whose copies are
/// asynchronous, K and V alternate: V comes while S is computed, the next K while O is. The kernel holds the copies and
/// the number of tiles left: as members they would cost registers (docs/tuning/structure.md).
template <class Tile>
class KeyValueRing {
  public:
    using Copies = KeyValueCopies<Tile>;

    __device__ __forceinline__ KeyValueRing(Smem<Tile>& smem, const Work<Tile>& work) : work_(work), smem_(smem) {}

    /// Starts the copies of the first tile, which may reach beyond the sequence's end.
    __device__ __forceinline__ void start(Copies& copies, int key) {
        if (work_.tiles > 0) {
            copies.start(smem_.ring[0], k_pitch(), v_pitch(), work_.sequence.seqlen_k - key);
        }
    }
    /// Finishes the copies of the first tile, and starts those of the other tiles that are copied ahead.
    __device__ __forceinline__ void run_ahead(Copies& copies) {
        if (work_.tiles > 0) finish(smem_.ring[0], copies);
#pragma unroll
        for (int i = 1; i < Tile::kAhead; ++i) {
            if (i < work_.tiles) start(smem_.ring[i], copies);
            ptx::cp_async_commit();
        }
    }

    __device__ __forceinline__ const KeyRows<Tile>& k() const { return smem_.ring[slot_].k; }
    __device__ __forceinline__ const ValueRows<Tile>& v() const { return smem_.ring[slot_].v; }

    /// Waits until the tile (if K and V alternate, its K) has landed; starts the next copy. `left` counts the tiles
    /// left, this one included.
    __device__ __forceinline__ void begin_tile(Copies& copies, int left) {
        ptx::cp_async_wait<Tile::kAhead - 1>();
        meet_group<Tile>();  // the tile has landed, the one before has been used
        if constexpr (Tile::kAlternates) {
            if (left < work_.tiles) copies.v.start(smem_.ring[previous_].v, v_pitch());
        } else if (left > Tile::kAhead) {
            start(smem_.ring[previous_], copies);
        }
        ptx::cp_async_commit();
    }
    /// Between the two products. If K and V alternate: waits until V has landed, and starts the copy of the next K.
    __device__ __forceinline__ void between_products(Copies& copies, int left) {
        if constexpr (Tile::kAlternates) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // V has landed, K has been used
            if (left > Tile::kAhead) copies.k.start(smem_.ring[previous_].k, k_pitch());
            ptx::cp_async_commit();
        }
    }
    /// The tile has been used: on to the one before it.
    __device__ __forceinline__ void end_tile(Copies& copies, int left) {
        if constexpr (Tile::Machine::kThroughRegisters) {
            if constexpr (Tile::kStages == 1) meet_group<Tile>();
            if (left > Tile::kAhead) finish(smem_.ring[previous_], copies);
        }
        previous_ = slot_;
        slot_ = slot_ + 1 == Tile::kStages ? 0 : slot_ + 1;
    }

  private:
    __device__ __forceinline__ std::int64_t k_pitch() const { return work_.p.k.row; }
    __device__ __forceinline__ std::int64_t v_pitch() const { return work_.p.v.row; }
    template <class Stage>
    __device__ __forceinline__ void start(Stage& stage, Copies& copies) {
        copies.start(stage, k_pitch(), v_pitch());
    }
    template <class Stage>
    __device__ __forceinline__ void finish(Stage& stage, Copies& copies) {
        copies.finish(stage);
    }

    const Work<Tile>& work_;
    Smem<Tile>& smem_;
    int slot_ = 0, previous_ = Tile::kStages - 1;  // of this tile and of the one before
};

}  // namespace flash_wmma::mma
