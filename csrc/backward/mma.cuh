// The kernel of bwd_sm80 and bwd_sm75: FlashAttention-2 backward on mma.sync and ldmatrix.
//
// Algorithm (FlashAttention-2, Algorithm 2), with L the forward's log-sum-exp and D = rowsum(O dO) - dL (rows.cuh):
//     S = Q K^T;  P = exp2(S * scale - L);  dP = dO V^T;  dS = P (dP - D)
//     dV = P^T dO;  dK = scale * dS^T Q;  dQ = scale * dS K.
// A block owns the rows of a tile of one side and streams over the tiles of the other side that see it:
//     Pass::kFused    owns keys, streams queries (of all heads that share the keys): dK and dV stay in registers,
//                     dQ goes to an fp32 buffer by atomics. Five products, every tile of S once.
//     Pass::kKeys     the same without dQ, and
//     Pass::kQueries  owns queries, streams keys: dQ stays in registers. Both together: seven products, no atomics,
//                     and so the same result in every run.
// In any pass "first" is the operand of S (K of keys, Q of queries), "second" that of dP (V, dO), and the block
// computes S with its own rows as rows: S^T where it owns keys.
//
// Who owns what: own tiles stay in swizzled shared memory (`Resident` ones in registers), streamed tiles go through a
// ring of `stages`. Own warp w has rows [w * kWarpRows, + kWarpRows) of the own tile. With one stream warp it sees all
// streamed rows, so P and dS go from the accumulators of one product to the operand of the next without shared memory.
// Otherwise `stream_warps` warps share own rows: each computes S for its part of the streamed rows, P and dS are
// exchanged through shared memory (they meet at a named barrier), and each owns its part of the columns of the
// gradients. dQ takes dS from shared memory in any case. The fused pass has one stage: dQ's products need no streamed
// tile and hide the next one's copy.
//
// Bound: tensor cores, and close to them shared memory: an ldmatrix.x4 takes an SM 4 cycles, an HMMA 1.5, so that every
// fragment must serve three of them. With kWarpRows = 32, one of streamed rows serves four. A tile of 64 queries and
// 128 keys at d = 64 is 1,920 cycles of HMMA and, as the emulator counts, about 2,350 of shared memory; no access has a
// bank conflict. Eight warps an SM, all that registers allow, do not hide every latency, so what is issued between the
// products counts too (docs/tuning/backward.md). The additions to dQ are 0.4 / Bc bytes a FLOP in L2, so Bc = 128 where
// it fits.
#pragma once

#include "../device/element.cuh"
#include "../device/mask.cuh"
#include "../device/owned_tile.cuh"
#include "../device/score_mod.cuh"
#include "../device/swizzle.cuh"
#include "../forward/mma_sm75.cuh"
#include "../forward/mma_sm80.cuh"
#include "mma_shapes.h"
#include "rows.cuh"
#include "scales.cuh"

namespace flash_wmma::backward {

/// Shape of a block's work. Scalar is half or bf16; HeadDim is the largest d (and d_v) that the instance holds. Roles:
/// how often there are OwnWarps * StreamWarps warps (pairs.cuh).
template <class Architecture, class Scalar, int HeadDim, int OwnWarps, int StreamWarps, int RowTiles, int StreamTile,
          int Step, int Stages, int Resident, int BlocksPerSm, int Roles = 1>
struct Tile {
    using Machine = Architecture;
    using T = Scalar;
    static constexpr int kD = HeadDim, kOwnWarps = OwnWarps, kStreamWarps = StreamWarps, kRowTiles = RowTiles;
    static constexpr int kStream = StreamTile;  // rows of a streamed tile
    static constexpr int kStep = Step;          // of those, what a warp has of S at a time
    static constexpr int kStages = Stages;
    static constexpr bool kSecondInRegisters = Resident >= 1, kFirstInRegisters = Resident == 2;
    static constexpr int kBlocksPerSm = BlocksPerSm;  // resident blocks to keep registers for

    // dP follows S in parts where that repeats no load of its operand
    static constexpr int kPart = kSecondInRegisters ? 16 : kStep;

    static constexpr int kRoleWarps = kOwnWarps * kStreamWarps, kWarps = kRoleWarps * Roles, kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kWarpRows * kOwnWarps;
    static constexpr int kWarpStream = kStream / kStreamWarps, kWarpColumns = kD / kStreamWarps;
    static_assert(kWarpStream % kStep == 0 && kStep % 16 == 0 && kWarpColumns % 16 == 0);
    static_assert(kRowGroup % kStream == 0 && kScaleRows % kStream == 0);

    // dQ's tile of kStream x kD among the warps: 32 rows each where the columns can be shared out
    static constexpr bool kWide = kStream >= 32 && kWarps * 32 % kStream == 0 && kD * kStream % (kWarps * 512) == 0;
    static constexpr int kQueryRows = kWide ? 32 : 16, kQueryWarps = kStream / kQueryRows;
    static constexpr int kQueryColumns = kD * kQueryWarps / kWarps;
};

struct Nothing {};

/// The own tiles and the ring of streamed ones in shared memory.
template <class Tile>
struct TileMemory {
    using T = typename Tile::T;
    using OwnRows = SwizzledTile<T, Tile::kOwn, Tile::kD>;
    using StreamRows = SwizzledTile<T, Tile::kStream, Tile::kD>;
    using Weights = SwizzledTile<T, Tile::kOwn, Tile::kStream>;

    struct Stage {
        StreamRows first, second;
    };
    OwnRows first;  // at the end the gradients on their way out
    union {
        Stage ring[Tile::kStages];
        std::conditional_t<Tile::kSecondInRegisters, OwnRows, Nothing> passing;  // on its way to registers
    };
    std::conditional_t<Tile::kSecondInRegisters, Nothing, OwnRows> staying;

    __device__ OwnRows& second() {
        if constexpr (Tile::kSecondInRegisters) return this->passing;
        else return this->staying;
    }
};

/// Map of a block's shared memory.
template <class Tile, Pass kPass>
struct SharedMemory : TileMemory<Tile> {
    using typename TileMemory<Tile>::Weights;
    static constexpr bool kExchangesP = Tile::kStreamWarps > 1 && kPass != Pass::kQueries;
    static constexpr bool kExchangesDs = Tile::kStreamWarps > 1 || kPass == Pass::kFused;

    std::conditional_t<kExchangesDs, Weights, Nothing> ds;
    std::conditional_t<kExchangesP, Weights, Nothing> p;
    RowPair facts[Tile::kStages][kPass == Pass::kQueries ? 1 : Tile::kStream / 2];  // of streamed queries
};

/// Which of a block's rows and columns are this thread's. Accumulators are 16x8 tiles: a lane has rows row() and
/// row() + 8, columns column() and column() + 1 of each (ptx.cuh).
template <class Tile>
struct Thread {
    int lane, own_warp, stream_warp, warp, role;
    __device__ explicit Thread(int tid) {
        lane = tid % 32;
        warp = __shfl_sync(0xffffffffu, tid / 32, 0);  // so that the compiler knows it is the same in all lanes
        role = warp / Tile::kRoleWarps;
        own_warp = warp % Tile::kRoleWarps / Tile::kStreamWarps;
        stream_warp = warp % Tile::kStreamWarps;
    }
    __device__ int warp_row() const { return own_warp * Tile::kWarpRows; }
    __device__ int warp_stream() const { return stream_warp * Tile::kWarpStream; }
    __device__ int warp_column() const { return stream_warp * Tile::kWarpColumns; }
    __device__ int row() const { return lane / 4; }
    __device__ int column() const { return lane % 4 * 2; }
};

/// Reads 16x16 fragments of a swizzled tile. kA: the rows of A (16x16). kB: the columns of two B (16x8) that are stored
/// one a row. kBAcross: the rows of two B stored as they are; kAAcross: A stored with its columns as rows.
enum class Fragment { kA, kB, kAAcross, kBAcross };
template <Fragment kFragment, class Rows>
class Reader {
  public:
    /// (row, column): where this thread's warp begins.
    __device__ __forceinline__ Reader(int lane, int row, int column)
        : lane_(row + (kByRows ? lane % 16 : lane / 16 * 8 + lane % 8),
                column + (kByRows ? lane / 16 : lane / 8 % 2) * 8) {}
    /// The fragment at (row, column) from there, multiples of 16; the column is known at compile time.
    __device__ __forceinline__ void operator()(std::uint32_t (&fragment)[4], const Rows& rows, int row,
                                               int column) const {
        if constexpr (kFragment == Fragment::kA || kFragment == Fragment::kB)
            ptx::ldmatrix_x4(fragment, lane_.of(rows, row, column));
        else ptx::ldmatrix_x4_trans(fragment, lane_.of(rows, row, column));
    }

  private:
    static constexpr bool kByRows = kFragment == Fragment::kA || kFragment == Fragment::kBAcross;
    typename Rows::Lane lane_;
};

/// The warp's own rows as an operand: fragments in registers, or loaded from shared memory at each use.
template <class Tile, bool InRegisters>
struct OwnOperand {
    std::uint32_t fragments[InRegisters ? Tile::kRowTiles : 1][InRegisters ? Tile::kD / 16 : 1][4];

    template <class Rows>
    __device__ __forceinline__ void load(const Rows& rows, const Thread<Tile>& thread) {
        const Reader<Fragment::kA, Rows> read(thread.lane, thread.warp_row(), 0);
        if constexpr (InRegisters)
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
                for (int c = 0; c < Tile::kD / 16; ++c) read(fragments[r][c], rows, 16 * r, 16 * c);
    }
    template <class Rows>
    __device__ __forceinline__ void get(std::uint32_t (&a)[4], const Rows& rows, const Thread<Tile>& thread, int r,
                                        int c) const {
        if constexpr (InRegisters)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[r][c][i];
        else Reader<Fragment::kA, Rows>(thread.lane, thread.warp_row(), 0)(a, rows, 16 * r, 16 * c);
    }
};

/// Accumulators of the warp: S of its rows and a step of streamed rows, dP of a part of it; a gradient of its rows and
/// columns.
template <class Tile>
using Scores = float[Tile::kRowTiles][Tile::kStep / 8][4];
template <class Tile>
using ScoresPart = float[Tile::kRowTiles][Tile::kPart / 8][4];
template <class Tile>
using Gradient = float[Tile::kRowTiles][Tile::kWarpColumns / 8][4];

template <int Rows, int Tiles>
__device__ __forceinline__ void clear(float (&accumulators)[Rows][Tiles][4]) {
#pragma unroll
    for (auto& row : accumulators)
#pragma unroll
        for (auto& tile : row) tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
}

/// D += A B for 16 columns.
template <class Tile>
__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[4]) {
    Tile::Machine::template multiply<typename Tile::T>(left, a, b[0], b[1]);
    Tile::Machine::template multiply<typename Tile::T>(right, a, b[2], b[3]);
}

/// S += own rows times streamed rows [first, first + 8 * Tiles), both along d.
template <class Tile, int Tiles, bool InRegisters, class OwnRows, class StreamRows>
__device__ __forceinline__ void multiply_rows(float (&s)[Tile::kRowTiles][Tiles][4],
                                              const OwnOperand<Tile, InRegisters>& own, const OwnRows& rows,
                                              const StreamRows& stream, int first, const Thread<Tile>& thread) {
    const Reader<Fragment::kB, StreamRows> read(thread.lane, 0, 0);
    // One or two tiles of S do not hide the latency of their own products, so that every other one goes to a second sum
    constexpr bool kTwoSums = Tile::kRowTiles * Tiles <= 2;
    [[maybe_unused]] float second[Tile::kRowTiles][Tiles][4];
    clear(second);
#pragma unroll
    for (int c = 0; c < Tile::kD / 16; ++c) {
        auto& sum = kTwoSums && c % 2 ? second : s;
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) own.get(a[r], rows, thread, r, c);
#pragma unroll
        for (int j = 0; j < Tiles / 2; ++j) {
            std::uint32_t b[4];
            read(b, stream, first + 16 * j, 16 * c);
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) multiply<Tile>(sum[r][2 * j], sum[r][2 * j + 1], a[r], b);
        }
    }
    if constexpr (kTwoSums)
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < Tiles; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[r][j][i] += second[r][j][i];
}

/// Gradient += weights of the warp's rows and 16 streamed rows, times the warp's columns of those rows.
template <class Tile, class StreamRows>
__device__ __forceinline__ void multiply_weights(Gradient<Tile>& gradient,
                                                 const std::uint32_t (&weights)[Tile::kRowTiles][4],
                                                 const StreamRows& stream, int first, const Thread<Tile>& thread) {
    const Reader<Fragment::kBAcross, StreamRows> read(thread.lane, 0, thread.warp_column());
#pragma unroll
    for (int c = 0; c < Tile::kWarpColumns / 16; ++c) {
        std::uint32_t b[4];
        read(b, stream, first, 16 * c);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
            multiply<Tile>(gradient[r][2 * c], gradient[r][2 * c + 1], weights[r], b);
    }
}

/// 16 columns of accumulators, from 8 * j on, as an operand with 16 columns: two 16x8 tiles are one, element for
/// element.
template <class Tile, int Tiles>
__device__ __forceinline__ void hand_over(std::uint32_t (&weights)[Tile::kRowTiles][4],
                                          const float (&s)[Tile::kRowTiles][Tiles][4], int j) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            weights[r][i] = packed<typename Tile::T>(s[r][j + i / 2][i % 2 * 2], s[r][j + i / 2][i % 2 * 2 + 1]);
}

/// Where a lane's accumulators of columns [first, first + 8) of the warp's rows go in shared memory: those of the row
/// tile r and its half h (16 * r + 8 * h) * kStream further, as rows 8 apart are swizzled alike. Computed anew at each
/// use, which takes fewer registers.
template <class Tile, class Weights>
__device__ __forceinline__ typename Tile::T* weights_at(Weights& weights, int first, const Thread<Tile>& thread) {
    return weights.at(ptx::opaque(thread.warp_row() + thread.row()), first) + thread.column();
}

/// A step of weights to shared memory, for the other warps.
template <class Tile, int Tiles, class Weights>
__device__ __forceinline__ void exchange(Weights& to, const float (&s)[Tile::kRowTiles][Tiles][4], int first,
                                         const Thread<Tile>& thread) {
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
        auto* const at = weights_at<Tile>(to, first + 8 * j, thread);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<std::uint32_t*>(at + (16 * r + 8 * h) * Tile::kStream) =
                    packed<typename Tile::T>(s[r][j][2 * h], s[r][j][2 * h + 1]);
    }
}

/// No exponents: inputs that are stored as they are.
struct AsStored {
    static constexpr bool kConverted = false;
};

/// dQ of the streamed queries from all own keys, added to the buffer that begins with the tile's first row; many columns
/// of a warp in two parts. Exponent: AsStored, or exponent_of(row) of the products with own keys' group of that row.
template <class Tile, class Weights, class OwnRows, class Exponent = AsStored>
__device__ __forceinline__ void add_to_dq(float* dq_rows, int head_dim, const Weights& ds, const OwnRows& keys,
                                          const Thread<Tile>& thread, [[maybe_unused]] Exponent exponent_of = {}) {
    constexpr int kRowTiles = Tile::kQueryRows / 16;
    constexpr int kColumns = Tile::kQueryColumns <= 48 ? Tile::kQueryColumns : Tile::kQueryColumns / 2;
    static_assert(kColumns % 16 == 0);
    const int row = thread.warp % Tile::kQueryWarps * Tile::kQueryRows;
    const Reader<Fragment::kAAcross, Weights> read_ds(thread.lane, 0, row);
    int column = thread.warp / Tile::kQueryWarps * Tile::kQueryColumns;
    const Reader<Fragment::kBAcross, OwnRows> read_keys(thread.lane, 0, column);
#pragma unroll
    for (int part = 0; part < Tile::kQueryColumns; part += kColumns, column += kColumns) {
        float dq[kRowTiles][kColumns / 8][4];
        clear(dq);
        [[maybe_unused]] Unit unit;
#pragma unroll
        for (int k = 0; k < Tile::kOwn / 16; ++k) {
            if constexpr (Exponent::kConverted)
                if (16 * k % kScaleRows == 0) unit.follow(dq, exponent_of(16 * k));
            std::uint32_t a[kRowTiles][4];
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) read_ds(a[r], ds, 16 * k, 16 * r);
#pragma unroll
            for (int c = 0; c < kColumns / 16; ++c) {
                std::uint32_t b[4];
                read_keys(b, keys, 16 * k, part + 16 * c);
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) multiply<Tile>(dq[r][2 * c], dq[r][2 * c + 1], a[r], b);
            }
        }
        if constexpr (Exponent::kConverted) multiply_by_power(dq, unit.exponent);
        const bool all = column + kColumns <= head_dim;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            float* to = dq_rows + DqFragment::offset(row + 16 * r, column, head_dim);
            if (all)
#pragma unroll
                for (int c = 0; c < kColumns / 8; ++c)
                    DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq[r][c], thread.lane);
            else
#pragma unroll
                for (int c = 0; c < kColumns / 8; ++c)
                    if (column + 8 * c < head_dim)
                        DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq[r][c], thread.lane);
        }
    }
}

/// A gradient, times `factor`, to the rows [0, rows) of global memory; the warp's part of `staging` belongs to it.
template <class Tile, class OwnRows>
__device__ __forceinline__ void store(typename Tile::T* out, std::int64_t pitch, int rows, int columns,
                                      const Gradient<Tile>& gradient, float factor, OwnRows& staging,
                                      const Thread<Tile>& thread) {
    using T = typename Tile::T;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < Tile::kWarpColumns / 8; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<std::uint32_t*>(
                    staging.at(thread.warp_row() + 16 * r + 8 * h + thread.row(), thread.warp_column() + 8 * c) +
                    thread.column()) = packed<T>(gradient[r][c][2 * h] * factor, gradient[r][c][2 * h + 1] * factor);
    __syncwarp();
    constexpr int kVectors = Tile::kWarpColumns / 8;
    for (int i = thread.lane; i < Tile::kWarpRows * kVectors; i += 32) {
        const int row = thread.warp_row() + i / kVectors, column = thread.warp_column() + i % kVectors * 8;
        if (row < rows && column < columns)
            *reinterpret_cast<uint4*>(out + row * pitch + column) =
                *reinterpret_cast<const uint4*>(staging.at(row, column));
    }
}

/// The same in another type than the products', straight from the registers.
template <class Tile, class Out>
__device__ __forceinline__ void store_as(Out* out, std::int64_t pitch, int rows, int columns,
                                         const Gradient<Tile>& gradient, float factor, const Thread<Tile>& thread) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < Tile::kWarpColumns / 8; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = thread.warp_row() + 16 * r + 8 * h + thread.row();
                const int column = thread.warp_column() + 8 * c;
                if (row < rows && column < columns)
                    *reinterpret_cast<typename Element<Out>::Pair*>(out + row * pitch + column + thread.column()) =
                        Element<Out>::pair(gradient[r][c][2 * h] * factor, gradient[r][c][2 * h + 1] * factor);
            }
}

/// The streamed tiles of one head after the other, each head's from the last to the first.
struct Cursor {
    int head;         // query head
    int row;          // first of the tile
    int first, last;  // rows at which the first and the last tile of a head begin
    int step;

    /// Whether a new head begins.
    __device__ bool advance() {
        row -= step;
        if (row >= first) return false;
        row = last;
        ++head;
        return true;
    }
};

/// The streamed tiles that see an own row, or that an own row sees, and how many they are.
struct StreamedRange {
    Cursor at;
    int left;
};
template <class Tile, Pass kPass>
__device__ StreamedRange streamed_range(const ForwardParams& p, const OwnedTile& own, const BandMask& mask) {
    constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    const Sequence& s = own.sequence;
    const int end_row = min(own.first_row + Tile::kOwn, kOwnsKeys ? s.seqlen_k : s.seqlen_q);
    const int begin = kOwnsKeys ? mask.first_query(own.first_row) : mask.begin(own.first_row);
    const int end = kOwnsKeys ? min(s.seqlen_q - 1, mask.last_query(end_row - 1)) + 1 : mask.end(end_row - 1);
    const int first = begin / Tile::kStream * Tile::kStream, last = (end - 1) / Tile::kStream * Tile::kStream;
    const int heads = kOwnsKeys ? static_cast<int>(p.heads_q / p.heads_k) : 1;
    const bool any = end_row > own.first_row && end > begin;
    return {{own.head, last, first, last, Tile::kStream}, any ? heads * ((last - first) / Tile::kStream + 1) : 0};
}

/// The own tiles on their way to shared memory.
template <class Tile, Pass kPass>
__device__ __forceinline__ void copy_own(TileMemory<Tile>& smem, const Problem& problem, const OwnedTile& own) {
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kOwn>;
    constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    const ForwardParams& p = problem.forward;
    const Sequence& s = own.sequence;
    const int head = kOwnsKeys ? own.head_k : own.head, left = (kOwnsKeys ? s.seqlen_k : s.seqlen_q) - own.first_row;
    const auto copy = [&](auto& to, const Rows& rows, int d) {
        const int first = (kOwnsKeys ? s.first_k : s.first_q) + own.first_row;
        Copy vectors(row_of<const typename Tile::T>(rows, s.index, head, first), rows.row, d);
        vectors.start(to, rows.row, left);
        vectors.finish(to);
    };
    copy(smem.first, kOwnsKeys ? p.k : p.q, p.head_dim);
    copy(smem.second(), kOwnsKeys ? p.v : problem.dout, p.head_dim_v);
}

/// The copies of streamed tiles to the ring, in the order of a Cursor.
template <class Tile, Pass kPass>
class StreamedTiles {
  public:
    using T = typename Tile::T;
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kStream>;
    static constexpr bool kOfQueries = kPass != Pass::kQueries;
    /// Whether a tile can wait in registers while products are computed.
    static constexpr bool kWaitsInRegisters = Tile::Machine::kThroughRegisters && Copy::kCount <= 4;

    __device__ StreamedTiles(const Problem& problem, const OwnedTile& own, const Cursor& cursor)
        : p_(problem),
          own_(own),
          at_(cursor),
          first_(rows(true), pitch(true), p_.forward.head_dim),
          second_(rows(false), pitch(false), p_.forward.head_dim_v) {}

    template <class Map>
    __device__ __forceinline__ void start(Map& smem, int slot) {
        if (new_head_) {
            first_ = Copy(rows(true), pitch(true), p_.forward.head_dim);
            second_ = Copy(rows(false), pitch(false), p_.forward.head_dim_v);
        }
        const int left = (kOfQueries ? own_.sequence.seqlen_q : own_.sequence.seqlen_k) - at_.row;
        if (left >= Tile::kStream) {
            first_.start(smem.ring[slot].first, pitch(true));
            second_.start(smem.ring[slot].second, pitch(false));
        } else {
            first_.start(smem.ring[slot].first, pitch(true), left);
            second_.start(smem.ring[slot].second, pitch(false), left);
        }
        if constexpr (kOfQueries)
            if (threadIdx.x < Tile::kStream / 2) {
                const RowPair* from = facts_of(p_, own_.sequence, at_.head) + at_.row / 2 + threadIdx.x;
                if constexpr (Tile::Machine::kThroughRegisters) pair_ = *reinterpret_cast<const uint4*>(from);
                else ptx::cp_async_16(&smem.facts[slot][threadIdx.x], from, 16);
            }
        new_head_ = at_.advance();
    }
    /// Where copies go through registers: the tile that was started last to shared memory.
    template <class Map>
    __device__ __forceinline__ void finish(Map& smem, int slot) {
        first_.finish(smem.ring[slot].first);
        second_.finish(smem.ring[slot].second);
        if constexpr (kOfQueries && Tile::Machine::kThroughRegisters)
            if (threadIdx.x < Tile::kStream / 2) *reinterpret_cast<uint4*>(&smem.facts[slot][threadIdx.x]) = pair_;
    }

  private:
    __device__ std::int64_t pitch(bool first) const {
        return first ? (kOfQueries ? p_.forward.q.row : p_.forward.k.row)
                     : (kOfQueries ? p_.dout.row : p_.forward.v.row);
    }
    __device__ const T* rows(bool first) const {
        const Sequence& s = own_.sequence;
        if constexpr (kOfQueries)
            return row_of<const T>(first ? p_.forward.q : p_.dout, s.index, at_.head, s.first_q + at_.row);
        else return row_of<const T>(first ? p_.forward.k : p_.forward.v, s.index, own_.head_k, s.first_k + at_.row);
    }

    const Problem& p_;
    const OwnedTile& own_;
    Cursor at_;              // of the next copy
    bool new_head_ = false;  // whether it is a head's first
    Copy first_, second_;
    uint4 pair_;
};

/// Exponents of dQ's products, for add_to_dq: -inf for keys that no row of the streamed tile of `stream` rows sees.
struct DqExponent {
    static constexpr bool kConverted = true;
    const Problem& problem;
    const OwnedTile& own;
    const BandMask& mask;
    const Cursor& at;
    int stream;

    __device__ float operator()(int row) const {
        const Sequence& s = own.sequence;
        const int first = own.first_row + row, last = min(first + kScaleRows, s.seqlen_k) - 1;
        if (first > last || mask.first_query(first) >= at.row + stream || mask.last_query(last) < at.row)
            return -INFINITY;
        const KeyScales keys = key_scales(problem, s, own.head_k, first);
        return ds_exponent(query_scales(problem, s, at.head, at.row), keys) + keys.k;
    }
};

/// Of plain problems all of a block's bounds are known to be the same in every thread, which saves registers. Converted
/// inputs (scales.cuh) have instances of their own, so that no other has registers for exponents.
// spills: sm_75 sm_80 sm_90: tiles at the register limit keep loop-invariant values (bounds, addresses) in local
// memory, as a rule 10 to 40 loads a streamed tile, dQ at d = 256 100, against some thousand instructions.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward(const __grid_constant__ Problem problem) {
    using T = typename Tile::T;
    using Map = SharedMemory<Tile, kPass>;
    constexpr bool kOwnsKeys = kPass != Pass::kQueries, kThroughRegisters = Tile::Machine::kThroughRegisters;
    constexpr bool kGeneral = kProblems != Problems::kPlain, kConverted = kProblems == Problems::kConverted;
    static_assert(!kConverted || (std::is_same_v<T, half> && kScaleRows % Tile::kWarpRows == 0 &&
                                  (kScaleRows % Tile::kOwn == 0 || Tile::kOwn % kScaleRows == 0)));
    constexpr int kRowTiles = Tile::kRowTiles, kStep = Tile::kStep, kStages = Tile::kStages;
    static_assert(kStages == 1 || !(kThroughRegisters || kPass == Pass::kFused));
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<Map>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));
    const OwnedTile own = kOwnsKeys ? owned_keys<Tile::kOwn, kGeneral>(p) : owned_queries<Tile::kOwn, kGeneral>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    const BandMask mask(p.band, sequence.seqlen_q, sequence.seqlen_k);

    StreamedRange range = streamed_range<Tile, kPass>(p, own, mask);
    Cursor& at = range.at;
    int& left = range.left;

    Gradient<Tile> d_first, d_second;  // dK and dV, or dQ alone
    clear(d_first);
    clear(d_second);
    [[maybe_unused]] Unit first_unit, second_unit;  // of d_first and d_second
    if (left > 0) {
        OwnOperand<Tile, Tile::kFirstInRegisters> own_first;
        OwnOperand<Tile, Tile::kSecondInRegisters> own_second;
        copy_own<Tile, kPass>(smem, problem, own);
        ptx::cp_async_commit();
        if constexpr (Tile::kSecondInRegisters) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            own_first.load(smem.first, thread);
            own_second.load(smem.second(), thread);
            __syncthreads();  // the ring takes its place
        }
        float minus_lse[kRowTiles][2], minus_delta[kRowTiles][2];  // of own queries
        if constexpr (!kOwnsKeys)
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = own.first_row + thread.warp_row() + 16 * r + 8 * h + thread.row();
                    const bool exists = row < sequence.seqlen_q;
                    const RowPair& pair = facts_of(problem, sequence, own.head)[exists ? row / 2 : 0];
                    minus_lse[r][h] = exists ? pair.minus_lse[row % 2] : -INFINITY;
                    minus_delta[r][h] = pair.minus_delta[row % 2];
                }

        StreamedTiles<Tile, kPass> stream(problem, own, at);
        stream.start(smem, 0);
        stream.finish(smem, 0);
        ptx::cp_async_commit();

        const float scale = p.scale * kLog2e;
        int slot = 0;
        for (; left > 0; --left, at.advance()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has landed, the one before and its weights have been used
            if constexpr (kStages > 1) {
                if (left > 1) stream.start(smem, slot ^ 1);
                ptx::cp_async_commit();
            }
            auto& tile = smem.ring[slot];
            PairScales scales(scale);
            if constexpr (kConverted) {
                const int own_base = own.first_row + thread.warp_row();
                const int own_last =
                    min(own_base + Tile::kWarpRows, kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q) - 1;
                const int own_row = min(own_base, own_last);
                const QueryScales of_q = query_scales(problem, sequence, at.head, kOwnsKeys ? at.row : own_row);
                const KeyScales of_k = key_scales(problem, sequence, own.head_k, kOwnsKeys ? own_row : at.row);
                scales = PairScales(scale, of_q, of_k);
                // Accumulators take no notice of a tile that none of their rows sees
                const int begin = kOwnsKeys ? mask.first_query(own_row) : mask.begin(own_row);
                const int end = kOwnsKeys ? mask.last_query(own_last) + 1 : mask.end(own_last);
                if (begin < at.row + Tile::kStream && at.row < end) {
                    const float exponent = ds_exponent(of_q, of_k) + (kOwnsKeys ? of_q.q : of_k.k);
                    first_unit.follow(d_first, exponent);
                    if constexpr (kOwnsKeys) second_unit.follow(d_second, of_q.dout);
                }
            }
#pragma unroll 1
            for (int step = 0; step < Tile::kWarpStream; step += kStep) {
                const int first = thread.warp_stream() + step;  // of the tile's rows
                const int own_base = own.first_row + thread.warp_row(), stream_base = at.row + first;
                const auto query = [&](int r, int j, int i) {
                    return kOwnsKeys ? stream_base + 8 * j + thread.column() + i % 2
                                     : own_base + 16 * r + 8 * (i / 2) + thread.row();
                };
                const auto key = [&](int r, int j, int i) {
                    return kOwnsKeys ? own_base + 16 * r + 8 * (i / 2) + thread.row()
                                     : stream_base + 8 * j + thread.column() + i % 2;
                };
                const auto each = [&](auto f) {
#pragma unroll
                    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                        for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
                            for (int i = 0; i < 4; ++i) f(r, j, i);
                };

                // P
                Scores<Tile> s;
                clear(s);
                multiply_rows<Tile>(s, own_first, smem.first, tile.first, first, thread);
                float factor = scales.score;  // from s to log2 units
                [[maybe_unused]] Scores<Tile> slope;
                if constexpr (kGeneral)
                    if (ScoreMod<true>::active(p)) {
                        const ScoreMod<true> mod(p, sequence, QTile{sequence.index, at.head, own.head_k, 0});
                        mod.apply_each(
                            each, [&](int r, int j, int i) -> float& { return s[r][j][i]; },
                            [&](int r, int j, int i) -> float& { return slope[r][j][i]; }, scales.score, query, key);
                        factor = 1.f;
                    }
                const RowPair* pairs = &smem.facts[kOwnsKeys ? slot : 0][kOwnsKeys ? (first + thread.column()) / 2 : 0];
                each([&](int r, int j, int i) {
                    const float offset = kOwnsKeys ? pairs[4 * j].minus_lse[i % 2] : minus_lse[r][i / 2];
                    s[r][j][i] = ptx::ex2(fmaf(s[r][j][i], factor, offset));
                });
                const bool all_visible = kOwnsKeys ? mask.all_visible(stream_base, stream_base + kStep - 1, own_base,
                                                                      own_base + Tile::kWarpRows - 1)
                                                   : mask.all_visible(own_base, own_base + Tile::kWarpRows - 1,
                                                                      stream_base, stream_base + kStep - 1);
                if (!all_visible)
                    each([&](int r, int j, int i) {
                        const int q = query(r, j, i), k = key(r, j, i);
                        if (k < mask.begin(q) || k >= mask.end(q)) s[r][j][i] = 0.f;
                    });

                if constexpr (Map::kExchangesP) exchange<Tile>(smem.p, s, first, thread);

                // dS
                ScoresPart<Tile> ds;
#pragma unroll
                for (int part = 0; part < kStep / 8; part += Tile::kPart / 8) {
                    const auto each_of_part = [&](auto f) {
#pragma unroll
                        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                            for (int j = 0; j < Tile::kPart / 8; ++j)
#pragma unroll
                                for (int i = 0; i < 4; ++i) f(ds[r][j][i], r, part + j, i);
                    };
                    const auto minus_d = [&](int r, int j, int i) {
                        return kOwnsKeys ? pairs[4 * j].minus_delta[i % 2] : minus_delta[r][i / 2];
                    };
                    each_of_part([&](float& x, int r, int j, int i) { x = kConverted ? 0.f : minus_d(r, j, i); });
                    multiply_rows<Tile>(ds, own_second, smem.second(), tile.second, first + 8 * part, thread);
                    if constexpr (kConverted)
                        each_of_part([&](float& x, int r, int j, int i) {
                            x = fmaf(x, scales.dp, minus_d(r, j, i) * scales.delta);
                        });
                    each_of_part([&](float& x, int r, int j, int i) { x *= s[r][j][i]; });
                    if constexpr (kGeneral)
                        if (ScoreMod<true>::active(p)) {
                            if (const BiasGradient& b = problem.dbias; kOwnsKeys && b.data) {
                                float* dbias = b.data + sequence.index * b.batch + at.head * b.head;
                                const int queries = min(sequence.seqlen_q, static_cast<int>(p.seqlen_q));
                                const int keys = min(sequence.seqlen_k, static_cast<int>(p.seqlen_k));
                                each_of_part([&](float& x, int r, int j, int i) {
                                    const std::int64_t q = query(r, j, i), k = key(r, j, i);
                                    if (s[r][j][i] != 0.f && q < queries && k < keys)  // NaN is not 0, whatever its row
                                        ptx::red_add(dbias + q * b.query + k * b.key, x * scales.ds());
                                });
                            }
                            if (p.softcap != 0.f)
                                each_of_part([&](float& x, int r, int j, int i) { x *= slope[r][j][i]; });
                        }

                    if constexpr (Map::kExchangesDs) exchange<Tile>(smem.ds, ds, first + 8 * part, thread);
                    if constexpr (Tile::kStreamWarps == 1)
#pragma unroll
                        for (int k = 0; k < Tile::kPart; k += 16) {
                            const int row = step + 8 * part + k;
                            std::uint32_t weights[kRowTiles][4];
                            if constexpr (kOwnsKeys) {
                                hand_over<Tile>(weights, s, part + k / 8);
                                multiply_weights<Tile>(d_second, weights, tile.second, row, thread);
                            }
                            hand_over<Tile>(weights, ds, k / 8);
                            multiply_weights<Tile>(d_first, weights, tile.first, row, thread);
                        }
                }
            }
            if constexpr (Tile::kStreamWarps > 1) {
                ptx::named_barrier_sync(1 + thread.own_warp, 32 * Tile::kStreamWarps);
                // Computed anew, so that the addresses of these products take no registers in the others
                const Thread<Tile> again(ptx::opaque(static_cast<int>(threadIdx.x)));
                const Reader<Fragment::kA, typename Map::Weights> read(again.lane, again.warp_row(), 0);
#pragma unroll
                for (int k = 0; k < Tile::kStream; k += 16) {
                    std::uint32_t weights[kRowTiles][4];
                    if constexpr (kOwnsKeys) {
#pragma unroll
                        for (int r = 0; r < kRowTiles; ++r) read(weights[r], smem.p, 16 * r, k);
                        multiply_weights<Tile>(d_second, weights, tile.second, k, again);
                    }
#pragma unroll
                    for (int r = 0; r < kRowTiles; ++r) read(weights[r], smem.ds, 16 * r, k);
                    multiply_weights<Tile>(d_first, weights, tile.first, k, again);
                }
            }

            if constexpr (kStages > 1) slot ^= 1;
            else {
                if constexpr (stream.kWaitsInRegisters)
                    if (left > 1) stream.start(smem, 0);
                __syncthreads();  // this tile has been used, dS is complete; dQ's products hide the next copy
                if constexpr (!stream.kWaitsInRegisters)
                    if (left > 1) {
                        stream.start(smem, 0);
                        stream.finish(smem, 0);
                    }
                ptx::cp_async_commit();
            }
            if constexpr (kPass == Pass::kFused) {
                const Thread<Tile> again(ptx::opaque(static_cast<int>(threadIdx.x)));
                float* dq_rows = dq_of(problem, sequence, at.head, at.row);
                if constexpr (kConverted)
                    add_to_dq<Tile>(dq_rows, p.head_dim, smem.ds, smem.first, again,
                                    DqExponent{problem, own, mask, at, Tile::kStream});
                else add_to_dq<Tile>(dq_rows, p.head_dim, smem.ds, smem.first, again);
            }
            if constexpr (kStages == 1 && stream.kWaitsInRegisters)
                if (left > 1) stream.finish(smem, 0);
        }
    }

    __syncthreads();  // own rows have been used; the gradients take their place on the way out
    const Rows& first_out = kOwnsKeys ? problem.dk : problem.dq;
    const int head = kOwnsKeys ? own.head_k : own.head;
    const int row = (kOwnsKeys ? sequence.first_k : sequence.first_q) + own.first_row;
    if constexpr (kConverted) {
        multiply_by_power(d_first, first_unit.exponent);
        multiply_by_power(d_second, second_unit.exponent);
        const auto store_both = [&](auto type) {
            using Out = decltype(type);
            store_as<Tile>(row_of<Out>(first_out, sequence.index, head, row), first_out.row, own.rows, p.head_dim,
                           d_first, p.scale, thread);
            if constexpr (kOwnsKeys)
                store_as<Tile>(row_of<Out>(problem.dv, sequence.index, head, row), problem.dv.row, own.rows,
                               p.head_dim_v, d_second, 1.f, thread);
        };
        if constexpr (Tile::Machine::kMultipliesBf16) store_both(float{});
        else if (p.out_dtype == DType::kFloat32) store_both(float{});
        else store_both(bf16{});
    } else {
        store<Tile>(row_of<T>(first_out, sequence.index, head, row), first_out.row, own.rows, p.head_dim, d_first,
                    p.scale, smem.first, thread);
        if constexpr (kOwnsKeys)
            store<Tile>(row_of<T>(problem.dv, sequence.index, head, row), problem.dv.row, own.rows, p.head_dim_v,
                        d_second, 1.f, smem.first, thread);
    }
}

template <class Tile, Problems kProblems, Pass kPass>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = kPass == Pass::kQueries ? assignment_grid(p, Tile::kOwn) : owned_keys_grid(p, Tile::kOwn);
    if (grid.x == 0) return;
    launch(backward<Tile, kProblems, kPass>, {grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile, kPass>)}, stream,
           problem);
}

template <class Tile, Problems kProblems, Pass kPass>
Shape shape(int min_arch, int resident = 1) {
    constexpr bool kQueries = kPass == Pass::kQueries;
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, kQueries ? Tile::kOwn : Tile::kStream,
             kQueries ? Tile::kStream : Tile::kOwn, Tile::kWarps, Tile::kStages,
             static_cast<int>(sizeof(SharedMemory<Tile, kPass>)),
             reinterpret_cast<const void*>(backward<Tile, kProblems, kPass>)},
            kProblems,
            kPass,
            resident,
            launch_tile<Tile, kProblems, kPass>};
}

}  // namespace flash_wmma::backward
