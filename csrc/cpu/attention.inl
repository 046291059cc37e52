// Tiled online-softmax attention, templated on an instruction set. Included by one small unit per instruction set, each
// compiled with its own flags, so everything here has internal linkage and nothing of the standard library is used.
//
// Every lane of a vector owns one packed query row (isa.h), as a thread owns a row in the simplest GPU kernel, and a
// Q tile is Br = kVectors * kLanes rows. Scores and O are kept transposed:
//     S^T[key][row] = sum_c K[key][c] * Q^T[c][row]        O^T[c][row] += V[key][c] * P^T[key][row]
// so K and V are read as they lie in memory, one broadcast element against kVectors vectors of rows; maximum, sum and
// rescaling are plain vertical vector operations; nothing is ever summed across lanes. Q is transposed once per tile
// and O once at the end. Both products hold kBlock * kVectors accumulators in registers (24 of 32 with AVX-512, 12 of
// 16 with AVX2).
//
// Rows too few to fill lanes (decoding) are taken one by one instead, with the vectors along d.
//
// Who owns what: a task (isa.h) owns a few Q tiles and walks over the K/V tiles of Bc = kTileKeys keys. All its Q tiles
// use a K/V tile while that tile is in L1/L2. fp32 K and V are read in place, unless they lie in pages of a cache;
// other K and V are copied to scratch as fp32, once per task. Q^T, S^T and O^T of a Q tile are in scratch: 12 KiB each
// at d = 64 with AVX-512.
//
// The weight of a score s is exp2((s - max) * |scale| * log2(e)); scale's sign is folded into Q^T, so that the largest
// score has the largest weight. The difference comes first: nothing is lost when scores are large.
//
// The products are those of the keys' class: FloatKeys, in fp32, which this is about, or PairKeys (pairs.inl).
//
// Bias, ALiBi and softcap (a score modification) are a separate pass over S^T, in a second instance of the tile step.
// In that instance the scores are final, scale included. The bias of a tile is copied to scratch as fp32, transposed
// like S^T, whatever its type and strides.
//
// Masked keys get the score -inf, hence weight 0. A row that has seen only -inf has the maximum -inf; in the exponent
// alone, 0 replaces this maximum. NaN and +inf scores make their row NaN by themselves (inf - inf). A key hidden from a
// row, by the band or by a bias of -inf or false, cannot change the row even if its V is NaN or inf; a visible key of
// weight 0 can (0 * inf), as in torch.
//
// Bound: the FMA units. 2 * 32 FLOP per cycle with AVX-512: 144 GFLOP/s per core at 2.25 GHz (Cascade Lake). There, out
// of L1, the two products reach 134 to 142 and a whole tile step, softmax included, 124 at d = 64 and 130 at d = 128;
// the kernel from end to end, on one thread with B=2 H=4 N=2048 d=64, 115. The rest: 7 cycles of softmax for every 64
// (d = 64) of FMA, and K/V tiles from L2. Decoding is bound by reading K and V.
#pragma once

#include "cached_rows.h"
#include "cpu/isa.h"
#include "dropout.h"

namespace flash_wmma::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr double kLog2E = 1.44269504088896340736;

constexpr std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// ---- Elements -------------------------------------------------------------------------------------------------------

inline void bfloat16_to_float(const std::uint16_t* __restrict src, float* __restrict dst, int n) {
    for (int c = 0; c < n; ++c) {
        const std::uint32_t bits = static_cast<std::uint32_t>(src[c]) << 16;
        __builtin_memcpy(dst + c, &bits, sizeof bits);
    }
}

/// Round to nearest even; a NaN stays one.
inline void float_to_bfloat16(const float* __restrict src, std::uint16_t* __restrict dst, int n) {
    for (int c = 0; c < n; ++c) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, src + c, sizeof bits);
        const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        dst[c] = static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

constexpr std::int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline const char* row_pointer(const Rows& t, DType dtype, std::int64_t b, std::int64_t h, std::int64_t i) {
    return static_cast<const char*>(t.data) + (b * t.batch + h * t.head + i * t.row) * element_size(dtype);
}

template <class Isa>
void load_row(const void* src, DType dtype, float* dst, int n) {
    switch (dtype) {
        case DType::kFloat16: return Isa::half_to_float(static_cast<const std::uint16_t*>(src), dst, n);
        case DType::kBFloat16: return bfloat16_to_float(static_cast<const std::uint16_t*>(src), dst, n);
        default: __builtin_memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    }
}

template <class Isa>
void store_row(const float* src, void* dst, DType dtype, int n) {
    switch (dtype) {
        case DType::kFloat16: return Isa::float_to_half(src, static_cast<std::uint16_t*>(dst), n);
        case DType::kBFloat16: return float_to_bfloat16(src, static_cast<std::uint16_t*>(dst), n);
        default: __builtin_memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    }
}

// ---- Vectors --------------------------------------------------------------------------------------------------------

/// 0, 1, 2, ...
template <class Isa>
inline typename Isa::Int lane_numbers() {
    alignas(64) static constexpr std::int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static_assert(Isa::kLanes <= 16);
    return Isa::load_int(kNumbers);
}

/// x = exponent + fraction for -127 <= x <= 0 by adding 1.5 * 2^23: returns the bits of 2^exponent, and 0 for -127.
/// |fraction| <= 1/2.
template <class Isa>
inline typename Isa::Int split_by_rounding(typename Isa::Vec x, typename Isa::Vec& fraction) {
    const auto shift = Isa::broadcast(0x1.8p23f + 127.f);
    const auto shifted = x + shift;
    fraction = x - (shifted - shift);
    return reinterpret_cast<typename Isa::Int>(shifted) << 23;
}

/// Minimax polynomials of 2^f, c[0] f + c[1] f^2 + ... + 1: exact at 0, relative error 1e-7.
constexpr float kExp2Nearest[] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f,
                                  0x1.5bba14p-10f};  // |f| <= 1/2
constexpr float kExp2Floor[] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277856p-7f,
                                0x1.e974fap-10f};  // 0 <= f <= 1

/// 2^x for x <= 0, and for larger x where a maximum lags (Avx512); 0 below 2^-126 (a subnormal weight would stall the
/// FMA units); NaN for NaN.
template <class Isa>
inline typename Isa::Vec exp2(typename Isa::Vec x) {
    typename Isa::Vec fraction;
    const auto exponent = Isa::split(x, fraction);
    auto p = Isa::broadcast(Isa::kExp2[4]);
    for (int i = 3; i >= 0; --i) p = Isa::fma(p, fraction, Isa::broadcast(Isa::kExp2[i]));
    return Isa::scale(Isa::fma(p, fraction, Isa::broadcast(1.f)), exponent);
}

/// Relative error 2e-7: a polynomial (Cephes) near 0, (1 - e) / (1 + e) with e = exp(-2 |x|) beyond.
template <class Isa>
inline typename Isa::Vec tanh(typename Isa::Vec x) {
    constexpr float kNear[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                               -3.33332819422e-1f};
    const auto one = Isa::broadcast(1.f), square = x * x;
    auto p = Isa::broadcast(kNear[0]);
    for (int i = 1; i < 5; ++i) p = Isa::fma(p, square, Isa::broadcast(kNear[i]));
    const auto near = Isa::fma(p * square, x, x);
    const auto size = x < Isa::broadcast(0.f) ? -x : x;
    const auto e = exp2<Isa>(size * Isa::broadcast(static_cast<float>(-2 * kLog2E)));
    const auto far = (one - e) / (one + e);
    return size < Isa::broadcast(0.625f) ? near : x < Isa::broadcast(0.f) ? -far : far;
}

/// The scale in two factors: one for Q (0 for a zero scale: all scores are 0), one for the differences of scores.
inline float score_sign(float scale) { return scale == 0.f ? 0.f : scale < 0.f ? -1.f : 1.f; }
inline double score_scale(float scale) {
    return scale == 0.f ? 1.0 : scale < 0.f ? -static_cast<double>(scale) : scale;
}

/// Whether the scores are more than scaled products, or weights are dropped.
inline bool modified(const ForwardParams& p) {
    return p.bias.data || p.alibi_slopes || p.softcap != 0.f || p.dropout.rng_state;
}

/// The factor of the differences from a maximum: 1 for modified scores, which are scaled already.
inline double maximum_scale(const ForwardParams& p) { return modified(p) ? 1.0 : score_scale(p.scale); }

/// `maximum`, or 0 where no score above -inf has been seen, so that -inf minus it is still -inf.
template <class Isa>
inline typename Isa::Vec subtrahend(typename Isa::Vec maximum) {
    return maximum == Isa::broadcast(-kInfinity) ? Isa::broadcast(0.f) : maximum;
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

/// The state of one Q tile in scratch; with V = `vectors`, column c of row vector v is at [(c * V + v) * kLanes].
/// A tile of few rows has V = 0 and row-major q and o.
struct QTile {
    float *q, *o;           ///< Q^T times the sign of scale; O^T, unnormalised
    float *maximum, *sum;   ///< per row: maximum of the scores before scaling, or near it; sum of the weights
    std::int32_t *lo, *hi;  ///< per row, the keys [lo, hi] it sees
    float* slope;           ///< per row, of ALiBi; 0 without ALiBi
    std::int32_t* place;    ///< per row, i + Nk - Nq
    int vectors, rows;
    std::int64_t row_begin;
    std::int32_t lo_min, lo_max, hi_min, hi_max;
};

/// d or d_v in whole vectors: transposes work on square blocks.
template <class Isa>
std::int64_t padded(std::int64_t columns) {
    return round_up(columns, Isa::kLanes);
}

struct PackedRow {
    std::int64_t query, head;
};

inline PackedRow packed_row(const ForwardParams& p, std::int64_t head_k, std::int64_t row) {
    const std::int64_t group = p.heads_q / p.heads_k;
    return {row / group, head_k * group + row % group};
}

/// fp32 rows of K or V.
struct KeyRows {
    const float* data;
    std::int64_t stride;
    const float* row(std::int64_t j) const { return data + j * stride; }
};

template <class Isa, int kVectors>
constexpr int block_rows() {
    return kVectors == 1 ? 8 : Isa::kBlock;
}

/// S^T of `n` keys from key `first` on, and the rows' maximum updated with it; kRaw: only the products, for
/// modify_scores. A block that reaches past the last key repeats that key.
template <class Isa, int kVectors, bool kMasked, bool kRaw>
void multiply_qk(const QTile& tile, KeyRows k, int head_dim, std::int32_t first, int n, float* s,
                 typename Isa::Vec (&maximum)[kVectors]) {
    using Vec = typename Isa::Vec;
    using Int = typename Isa::Int;
    constexpr int kRows = block_rows<Isa, kVectors>();
    for (int j = 0; j < n; j += kRows) {
        const float* key[kRows];
        Vec acc[kRows][kVectors];
        for (int r = 0; r < kRows; ++r) {
            key[r] = k.row(min64(j + r, n - 1));
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Isa::broadcast(0.f);
        }
        const float* q = tile.q;
        for (int c = 0; c < head_dim; ++c, q += kVectors * Isa::kLanes) {
            Vec column[kVectors];
            for (int v = 0; v < kVectors; ++v) column[v] = Isa::load(q + v * Isa::kLanes);
            for (int r = 0; r < kRows; ++r) {
                const Vec element = Isa::broadcast(key[r][c]);
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Isa::fma(element, column[v], acc[r][v]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) {
                Vec x = acc[r][v];
                if constexpr (kMasked) {
                    const Int lo = Isa::load_int(tile.lo + v * Isa::kLanes),
                              hi = Isa::load_int(tile.hi + v * Isa::kLanes);
                    const Int index = Int{} + (first + static_cast<std::int32_t>(min64(j + r, n - 1)));
                    x = ((lo <= index) & (index <= hi)) ? x : Isa::broadcast(-kInfinity);
                }
                if constexpr (!kRaw) maximum[v] = Isa::max(x, maximum[v]);
                Isa::store(s + ((j + r) * kVectors + v) * Isa::kLanes, x);
            }
        }
    }
}

/// O^T = O^T * alpha + V^T P^T. kSkipZeros: a weight of 0 hides even a NaN or inf of V.
template <class Isa, int kVectors, bool kSkipZeros>
void multiply_pv(const QTile& tile, KeyRows values, int head_dim_v, int n, const float* weights,
                 const typename Isa::Vec (&alpha)[kVectors]) {
    using Vec = typename Isa::Vec;
    constexpr int kColumns = block_rows<Isa, kVectors>();
    for (int c = 0; c < head_dim_v; c += kColumns) {
        float* o = tile.o + c * kVectors * Isa::kLanes;
        Vec acc[kColumns][kVectors];
        for (int r = 0; r < kColumns; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Isa::load(o + (r * kVectors + v) * Isa::kLanes) * alpha[v];
        const float* p = weights;
        const float* value = values.data + c;
        for (int j = 0; j < n; ++j, p += kVectors * Isa::kLanes, value += values.stride) {
            Vec weight[kVectors];
            for (int v = 0; v < kVectors; ++v) weight[v] = Isa::load(p + v * Isa::kLanes);
            for (int r = 0; r < kColumns; ++r) {
                const Vec element = Isa::broadcast(value[r]);
                for (int v = 0; v < kVectors; ++v) {
                    const Vec next = Isa::fma(element, weight[v], acc[r][v]);
                    if constexpr (kSkipZeros) acc[r][v] = weight[v] == Isa::broadcast(0.f) ? acc[r][v] : next;
                    else acc[r][v] = next;
                }
            }
        }
        for (int r = 0; r < kColumns; ++r)
            for (int v = 0; v < kVectors; ++v) Isa::store(o + (r * kVectors + v) * Isa::kLanes, acc[r][v]);
    }
}

inline bool all_finite(KeyRows values, int head_dim_v, int n) {
    std::uint32_t found = 0;
    for (int j = 0; j < n; ++j) {
        const float* row = values.row(j);
        for (int c = 0; c < head_dim_v; ++c) {
            std::uint32_t bits;
            __builtin_memcpy(&bits, row + c, sizeof bits);
            found |= (bits & 0x7f800000) == 0x7f800000;
        }
    }
    return found == 0;
}

// ---- Score modification ---------------------------------------------------------------------------------------------

/// Final scores from products with Q times the sign of scale. `bias` is added to the scores; -inf hides the key.
template <class Isa>
inline typename Isa::Vec modify(typename Isa::Vec x, const ForwardParams& p, const float* bias, typename Isa::Vec slope,
                                typename Isa::Int distance) {
    using Vec = typename Isa::Vec;
    x *= Isa::broadcast(static_cast<float>(score_scale(p.scale)));
    if (p.softcap != 0.f) x = tanh<Isa>(x * Isa::broadcast(1.f / p.softcap)) * Isa::broadcast(p.softcap);
    if (bias) {
        const Vec hidden = Isa::broadcast(-kInfinity), added = Isa::load(bias);
        x = added == hidden ? hidden : x + added;
    }
    if (p.alibi_slopes) x -= slope * __builtin_convertvector(distance < 0 ? -distance : distance, Vec);
    return x;
}

/// `n` elements of the bias from key `first` on, as fp32 to add to the scores: -inf where a boolean bias is false.
template <class Isa>
void load_bias(const ForwardParams& p, std::int64_t batch, PackedRow row, std::int64_t first, int n,
               float* __restrict dst) {
    const std::int64_t size = p.bias.dtype == DType::kBool ? 1 : element_size(p.bias.dtype);
    const std::int64_t offset =
        batch * p.bias.batch + row.head * p.bias.head + row.query * p.bias.query + first * p.bias.key;
    const char* src = static_cast<const char*>(p.bias.data) + offset * size;
    const std::int64_t step = p.bias.key * size;
    if (p.bias.dtype == DType::kBool && step == size) {
        for (int j = 0; j < n; ++j) dst[j] = src[j] ? 0.f : -kInfinity;
    } else if (p.bias.dtype == DType::kBool) {
        for (int j = 0; j < n; ++j) dst[j] = src[j * step] ? 0.f : -kInfinity;
    } else if (step == size && (p.bias.dtype == DType::kFloat32 || n % 8 == 0)) {
        load_row<Isa>(src, p.bias.dtype, dst, n);
    } else if (p.bias.dtype == DType::kFloat32) {
        for (int j = 0; j < n; ++j) __builtin_memcpy(dst + j, src + j * step, sizeof *dst);
    } else {
        alignas(64) std::uint16_t elements[kTileKeys];
        for (int j = 0; j < n; ++j) __builtin_memcpy(elements + j, src + j * step, sizeof *elements);
        for (int j = n; j % 8 != 0; ++j) elements[j] = 0;
        load_row<Isa>(elements, p.bias.dtype, dst, static_cast<int>(round_up(n, 8)));
    }
}

/// The bias of the tile's rows and `n` keys from key `first` on, laid out like S^T.
template <class Isa>
void load_bias_tile(const QTile& tile, const ForwardParams& p, const Task& task, std::int64_t first, int n,
                    float* staging, float* bias) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes;
    for (int v = 0; v < tile.vectors; ++v) {
        for (int i = 0; i < kLanes; ++i) {
            const PackedRow row = packed_row(p, task.head_k, tile.row_begin + min64(v * kLanes + i, tile.rows - 1));
            load_bias<Isa>(p, task.batch, row, first, n, staging + i * kTileKeys);
        }
        for (int j = 0; j < n; j += kLanes) {
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i) block[i] = Isa::load(staging + i * kTileKeys + j);
            Isa::transpose(block);
            for (int i = 0; i < kLanes; ++i) Isa::store(bias + ((j + i) * tile.vectors + v) * kLanes, block[i]);
        }
    }
}

/// Turns the products in `s` into final scores, and updates the rows' maximum with them.
template <class Isa, int kVectors, bool kMasked>
void modify_scores(const QTile& tile, const ForwardParams& p, std::int32_t first, int n, const float* bias, float* s,
                   typename Isa::Vec (&maximum)[kVectors]) {
    using Vec = typename Isa::Vec;
    using Int = typename Isa::Int;
    for (int v = 0; v < kVectors; ++v) {
        const Vec slope = Isa::load(tile.slope + v * Isa::kLanes);
        const Int lo = Isa::load_int(tile.lo + v * Isa::kLanes), hi = Isa::load_int(tile.hi + v * Isa::kLanes);
        const Int place = Isa::load_int(tile.place + v * Isa::kLanes);
        for (int j = 0; j < n; ++j) {
            const std::int64_t at = (static_cast<std::int64_t>(j) * kVectors + v) * Isa::kLanes;
            const Int index = Int{} + (first + j);
            Vec x = modify<Isa>(Isa::load(s + at), p, bias ? bias + at : nullptr, slope, place - index);
            if constexpr (kMasked) x = ((lo <= index) & (index <= hi)) ? x : Isa::broadcast(-kInfinity);
            maximum[v] = Isa::max(x, maximum[v]);
            Isa::store(s + at, x);
        }
    }
}

/// What dropout makes of the weights of a query and `n` keys from key `first` on: factors of 1, and 0 for those
/// dropped.
inline void keep_row(const ForwardParams& p, std::int64_t batch, PackedRow row, std::int32_t first, int n,
                     float* kept) {
    const DropoutMask mask(p.dropout, batch, row.head);
    const int query = static_cast<int>(row.query);
    const DropoutRow of_query = mask.row(rows_before(p.dropout.origin) + dropout_row(query));
    for (int key = first / 16 * 16; key < first + n; key += 16)
        for (int pair = 0; pair < 8; pair += 2) {
            const DropoutNumbers numbers =
                mask.numbers(of_query, mask.column(columns_before(p.dropout.origin) + dropout_column(key + pair)));
            for (int i = 0; i < 4; ++i) {
                const int j = key + pair + i / 2 * 8 + i % 2;
                if (j >= first && j < first + n) {
                    const std::uint32_t number = numbers.pair(query / 8 % 2, i / 2) >> (i % 2 * 16) & 0xffff;
                    kept[j - first] = keeps(p.dropout, number) ? 1.f : 0.f;
                }
            }
        }
}

/// Drops weights, which have been summed.
template <class Isa, int kVectors>
void drop_weights(const QTile& tile, const ForwardParams& p, const Task& task, std::int32_t first, int n, float* s) {
    float kept[kTileKeys];
    for (int r = 0; r < tile.rows; ++r) {
        keep_row(p, task.batch, packed_row(p, task.head_k, tile.row_begin + r), first, n, kept);
        for (int j = 0; j < n; ++j) {
            float& weight = s[j * kVectors * Isa::kLanes + r];
            weight = kept[j] != 0.f ? weight : 0.f;
        }
    }
}

/// One step of the online softmax: `n` keys from key `first` on. `bias`: load_bias_tile's, or null.
template <class Isa, class Keys, int kVectors, bool kMasked, bool kModified>
void attend_tile(const QTile& tile, Keys& keys, const ForwardParams& p, const Task& task, std::int32_t first, int n,
                 const float* bias, float* s) {
    using Vec = typename Isa::Vec;
    Vec before[kVectors], maximum[kVectors];
    for (int i = 0; i < kVectors; ++i) before[i] = maximum[i] = Isa::load(tile.maximum + i * Isa::kLanes);
    keys.template multiply_qk<kVectors, kMasked && !kModified, kModified>(tile, first, n, s, maximum);
    if constexpr (kModified) modify_scores<Isa, kVectors, kMasked>(tile, p, first, n, bias, s, maximum);

    const Vec scale = Isa::broadcast(static_cast<float>((kModified ? 1.0 : score_scale(p.scale)) * kLog2E));
    Vec base[kVectors], alpha[kVectors], sum[kVectors];
    for (int i = 0; i < kVectors; ++i) {
        // Else weights are at most 2^4, and O keeps its scale
        if constexpr (Keys::kLagsMaximum)
            maximum[i] = (maximum[i] - before[i]) * scale > Isa::broadcast(4.f) ? maximum[i] : before[i];
        base[i] = subtrahend<Isa>(maximum[i]);
        alpha[i] = exp2<Isa>((before[i] - base[i]) * scale);
        sum[i] = Isa::load(tile.sum + i * Isa::kLanes) * alpha[i];
    }
    float* x = s;
    for (int j = 0; j < n; ++j, x += kVectors * Isa::kLanes)
        for (int i = 0; i < kVectors; ++i) {
            const Vec weight = exp2<Isa>((Isa::load(x + i * Isa::kLanes) - base[i]) * scale);
            sum[i] += weight;
            Isa::store(x + i * Isa::kLanes, weight);
        }
    for (int i = 0; i < kVectors; ++i) {
        Isa::store(tile.maximum + i * Isa::kLanes, maximum[i]);
        Isa::store(tile.sum + i * Isa::kLanes, sum[i]);
    }
    if (kModified && p.dropout.rng_state) drop_weights<Isa, kVectors>(tile, p, task, first, n, s);
    if ((kMasked || (kModified && bias)) && !keys.all_finite(first, n))
        keys.template multiply_pv<kVectors, true>(tile, first, n, s, alpha);
    else keys.template multiply_pv<kVectors, false>(tile, first, n, s, alpha);
}

template <class Keys>
using AttendTile = void (*)(const QTile&, Keys&, const ForwardParams&, const Task&, std::int32_t, int, const float*,
                            float*);

template <class Isa, class Keys, int kVectors = 1>
AttendTile<Keys> attend_tile_for(int vectors, bool masked, bool modified) {
    if constexpr (kVectors < Isa::kVectors)
        if (vectors > kVectors) return attend_tile_for<Isa, Keys, kVectors + 1>(vectors, masked, modified);
    if (modified)
        return masked ? attend_tile<Isa, Keys, kVectors, true, true> : attend_tile<Isa, Keys, kVectors, false, true>;
    return masked ? attend_tile<Isa, Keys, kVectors, true, false> : attend_tile<Isa, Keys, kVectors, false, false>;
}

// ---- Few rows -------------------------------------------------------------------------------------------------------

/// A tile of at most this many rows goes row by row, with vectors along d; its lanes would mostly be idle (decoding).
template <class Isa>
constexpr int few_rows() {
    return Isa::kLanes / 4;
}

/// The scores of keys [j, j + kLanes) of `n`, one per lane. Lanes past the last key repeat that key.
template <class Isa>
typename Isa::Vec dot_products(const float* q, KeyRows k, int head_dim, int j, int n) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes, kBlock = 4;
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; i += kBlock) {
        const float* key[kBlock];
        Vec acc[kBlock];
        for (int r = 0; r < kBlock; ++r) {
            key[r] = k.row(min64(j + i + r, n - 1));
            acc[r] = Isa::broadcast(0.f);
        }
        for (int c = 0; c < head_dim; c += kLanes)
            for (int r = 0; r < kBlock; ++r)
                acc[r] = Isa::fma(Isa::load_part(key[r] + c, head_dim - c), Isa::load(q + c), acc[r]);
        for (int r = 0; r < kBlock; ++r) sums[i + r] = acc[r];
    }
    Isa::transpose(sums);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
}

/// O[c, c + kVectors * kLanes) = O * alpha + P V for one row.
template <class Isa, int kVectors, bool kSkipZeros>
void accumulate_values(float* o, float alpha, const float* weights, KeyRows values, int c, int head_dim_v, int n) {
    using Vec = typename Isa::Vec;
    Vec acc[kVectors];
    for (int i = 0; i < kVectors; ++i) acc[i] = Isa::load(o + c + i * Isa::kLanes) * Isa::broadcast(alpha);
    for (int j = 0; j < n; ++j) {
        if (kSkipZeros && weights[j] == 0.f) continue;
        const float* value = values.row(j) + c;
        for (int i = 0; i < kVectors; ++i)
            acc[i] = Isa::fma(Isa::broadcast(weights[j]),
                              Isa::load_part(value + i * Isa::kLanes, head_dim_v - c - i * Isa::kLanes), acc[i]);
    }
    for (int i = 0; i < kVectors; ++i) Isa::store(o + c + i * Isa::kLanes, acc[i]);
}

template <class Isa, bool kSkipZeros>
void accumulate_row(float* o, float alpha, const float* weights, KeyRows values, int head_dim_v, int n) {
    constexpr int kColumns = 4 * Isa::kLanes;
    int c = 0;
    for (; c + kColumns <= head_dim_v; c += kColumns)
        accumulate_values<Isa, 4, kSkipZeros>(o, alpha, weights, values, c, head_dim_v, n);
    for (; c < head_dim_v; c += Isa::kLanes)
        accumulate_values<Isa, 1, kSkipZeros>(o, alpha, weights, values, c, head_dim_v, n);
}

/// One step of the online softmax for row r of the tile: `n` keys from key `first` on, all inside the row's band.
/// `bias`: load_bias's, or null.
template <class Isa, bool kModified>
void attend_row(const QTile& tile, int r, KeyRows k, KeyRows v, const ForwardParams& p, const Task& task,
                std::int32_t first, int n, const float* bias, float* s) {
    using Vec = typename Isa::Vec;
    using Int = typename Isa::Int;
    constexpr int kLanes = Isa::kLanes;
    const float* q = tile.q + r * padded<Isa>(p.head_dim);
    float* o = tile.o + r * padded<Isa>(p.head_dim_v);
    float &row_maximum = tile.maximum[r], &row_sum = tile.sum[r];
    const Int lane = lane_numbers<Isa>();
    Vec maxima = Isa::broadcast(row_maximum);
    for (int j = 0; j < n; j += kLanes) {
        Vec x = dot_products<Isa>(q, k, p.head_dim, j, n);
        if constexpr (kModified) {
            x = modify<Isa>(x, p, bias ? bias + j : nullptr, Isa::broadcast(tile.slope[r]),
                            tile.place[r] - (first + j) - lane);
            x = lane < n - j ? x : Isa::broadcast(-kInfinity);
        }
        maxima = Isa::max(x, maxima);
        Isa::store(s + j, x);
    }
    float maximum = row_maximum;
    for (int i = 0; i < kLanes; ++i) maximum = maxima[i] > maximum ? maxima[i] : maximum;
    for (int j = n; j % kLanes != 0; ++j) s[j] = -kInfinity;

    const Vec scale = Isa::broadcast(static_cast<float>((kModified ? 1.0 : score_scale(p.scale)) * kLog2E));
    const Vec base = subtrahend<Isa>(Isa::broadcast(maximum));
    const float alpha = exp2<Isa>((Isa::broadcast(row_maximum) - base) * scale)[0];
    Vec sums = Isa::broadcast(0.f);
    for (int j = 0; j < n; j += kLanes) {
        const Vec weight = exp2<Isa>((Isa::load(s + j) - base) * scale);
        sums += weight;
        Isa::store(s + j, weight);
    }
    row_maximum = maximum;
    row_sum *= alpha;
    for (int i = 0; i < kLanes; ++i) row_sum += sums[i];
    if (kModified && p.dropout.rng_state) {
        float kept[kTileKeys];
        keep_row(p, task.batch, packed_row(p, task.head_k, tile.row_begin + r), first, n, kept);
        for (int j = 0; j < n; ++j) s[j] = kept[j] != 0.f ? s[j] : 0.f;
    }
    if (kModified && bias && !all_finite(v, p.head_dim_v, n))
        accumulate_row<Isa, true>(o, alpha, s, v, p.head_dim_v, n);
    else accumulate_row<Isa, false>(o, alpha, s, v, p.head_dim_v, n);
}

// ---- Rows in and out ------------------------------------------------------------------------------------------------

template <class Isa>
constexpr std::int64_t tile_rows() {
    return Isa::kVectors * Isa::kLanes;
}

/// The keys [lo, hi] that a query sees among the Nk; lo > hi: none.
inline void visible_keys(const ForwardParams& p, std::int64_t batch, PackedRow row, std::int32_t& lo,
                         std::int32_t& hi) {
    const std::int64_t centre = row.query + (p.band.bottom_right ? p.seqlen_k - p.seqlen_q : 0);
    std::int64_t first = centre - p.band.left, last = centre + p.band.right;
    if (const KeyRanges& r = p.key_ranges; r.data) {
        const std::int32_t* range = r.data + batch * r.batch + row.head * r.head + row.query * r.query;
        first = max64(first, range[0]);
        last = min64(last, static_cast<std::int64_t>(range[r.end]) - 1);
    }
    lo = static_cast<std::int32_t>(min64(max64(first, 0), p.seqlen_k));
    hi = static_cast<std::int32_t>(max64(min64(last, p.seqlen_k - 1), -1));
}

/// Brings Q into the tile, transposed unless its rows are few, and clears its state.
template <class Isa>
void load_tile(QTile& tile, const ForwardParams& p, const Task& task, float* staging) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes;
    const int d = static_cast<int>(padded<Isa>(p.head_dim)), dv = static_cast<int>(padded<Isa>(p.head_dim_v));
    const Vec sign = Isa::broadcast(score_sign(p.scale));
    const bool few = tile.rows <= few_rows<Isa>();
    tile.vectors = few ? 0 : (tile.rows + kLanes - 1) / kLanes;
    tile.lo_min = tile.hi_min = static_cast<std::int32_t>(kMaxSeqlen);
    tile.lo_max = tile.hi_max = -1;
    for (int i = 0; i < tile_rows<Isa>(); ++i) {
        tile.maximum[i] = -kInfinity;
        tile.sum[i] = 0.f;
        const PackedRow row = packed_row(p, task.head_k, tile.row_begin + min64(i, tile.rows - 1));
        visible_keys(p, task.batch, row, tile.lo[i], tile.hi[i]);
        tile.place[i] = static_cast<std::int32_t>(row.query + p.seqlen_k - p.seqlen_q);
        tile.slope[i] = p.alibi_slopes ? p.alibi_slopes[task.batch * p.alibi_batch_stride + row.head] : 0.f;
        if (tile.lo[i] <= tile.hi[i]) {
            if (tile.lo[i] < tile.lo_min) tile.lo_min = tile.lo[i];
            if (tile.hi[i] > tile.hi_max) tile.hi_max = tile.hi[i];
        }
        if (tile.lo[i] > tile.lo_max) tile.lo_max = tile.lo[i];
        if (tile.hi[i] < tile.hi_min) tile.hi_min = tile.hi[i];
    }
    for (int v = 0; v < tile.vectors; ++v) {
        for (int i = 0; i < kLanes; ++i) {
            float* dst = staging + i * d;
            const int r = v * kLanes + i;
            if (r < tile.rows) {
                const PackedRow row = packed_row(p, task.head_k, tile.row_begin + r);
                load_row<Isa>(row_pointer(p.q, p.dtype, task.batch, row.head, row.query), p.dtype, dst, p.head_dim);
            } else {
                __builtin_memset(dst, 0, static_cast<std::size_t>(p.head_dim) * sizeof(float));
            }
        }
        for (int c = 0; c < d; c += kLanes) {
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i) block[i] = Isa::load(staging + i * d + c);
            Isa::transpose(block);
            for (int i = 0; i < kLanes; ++i)
                Isa::store(tile.q + ((c + i) * tile.vectors + v) * kLanes, block[i] * sign);
        }
    }
    for (int r = 0; few && r < tile.rows; ++r) {
        float* dst = tile.q + r * d;
        const PackedRow row = packed_row(p, task.head_k, tile.row_begin + r);
        load_row<Isa>(row_pointer(p.q, p.dtype, task.batch, row.head, row.query), p.dtype, dst, p.head_dim);
        for (int c = 0; c < d; ++c) dst[c] = c < p.head_dim ? dst[c] * score_sign(p.scale) : 0.f;
    }
    __builtin_memset(tile.o, 0,
                     static_cast<std::size_t>(dv) * (few ? tile.rows : tile.vectors * kLanes) * sizeof(float));
}

/// What normalises a row of O, and the row's LSE. A row that saw no key, or only keys of weight 0, is 0, and its LSE is
/// the head's sink, or -inf.
struct RowEnd {
    float factor, lse;
};

/// The end of a row over all its keys, with its maximum and sum. A sink is a key with a logit and no value.
inline RowEnd row_end(const ForwardParams& p, std::int64_t head, float maximum, float sum) {
    const float scale = p.dropout.rng_state ? kept_scale(p.dropout) : 1.f;
    const float normaliser = sum == 0.f ? 0.f : scale / sum;
    const double top = maximum * maximum_scale(p);
    if (!p.sinks) return {normaliser, static_cast<float>(top + static_cast<double>(__builtin_logf(sum)))};
    const double sink = p.sinks[head], most = sink > top ? sink : top;
    const double base = most == -__builtin_inf() ? 0. : most, rescale = __builtin_exp(top - base);
    const double total = sum * rescale + __builtin_exp(sink - base);
    return {sum == 0.f ? 0.f : static_cast<float>(scale * rescale / total),
            static_cast<float>(most + __builtin_log(total))};
}

/// Writes one finished row and its LSE.
template <class Isa>
void store_result(const ForwardParams& p, std::int64_t batch, PackedRow row, const float* o, float lse) {
    char* dst = const_cast<char*>(row_pointer(p.o, p.out_dtype, batch, row.head, row.query));
    store_row<Isa>(o, dst, p.out_dtype, p.head_dim_v);
    p.lse[batch * p.lse_batch + row.head * p.lse_head + row.query] = lse;
}

/// The end of row r of the tile. A split does not end rows.
inline RowEnd tile_row_end(const QTile& tile, const ForwardParams& p, const Task& task, int r) {
    if (task.partial) return {1.f, 0.f};
    return row_end(p, packed_row(p, task.head_k, tile.row_begin + r).head, tile.maximum[r], tile.sum[r]);
}

/// Writes row r of the tile: `o` and `lse` are final, unless the task is a split.
template <class Isa>
void store_tile_row(const QTile& tile, const ForwardParams& p, const Task& task, int r, const float* o, float lse) {
    if (task.partial) {
        float* row = task.partial + (tile.row_begin - task.row_begin + r) * partial_stride(p.head_dim_v);
        __builtin_memcpy(row, o, static_cast<std::size_t>(p.head_dim_v) * sizeof(float));
        row[p.head_dim_v] = tile.maximum[r];
        row[p.head_dim_v + 1] = tile.sum[r];
    } else {
        store_result<Isa>(p, task.batch, packed_row(p, task.head_k, tile.row_begin + r), o, lse);
    }
}

template <class Isa>
void store_tile(const QTile& tile, const ForwardParams& p, const Task& task, float* staging) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes;
    const int dv = static_cast<int>(padded<Isa>(p.head_dim_v));
    for (int r = 0; tile.vectors == 0 && r < tile.rows; ++r) {
        float* o = tile.o + r * dv;
        const RowEnd end = tile_row_end(tile, p, task, r);
        for (int c = 0; c < dv; ++c) o[c] *= end.factor;
        store_tile_row<Isa>(tile, p, task, r, o, end.lse);
    }
    for (int v = 0; v < tile.vectors; ++v) {
        const int rows = static_cast<int>(min64(kLanes, tile.rows - v * kLanes));
        Vec factor = Isa::broadcast(0.f), lse = factor;
        for (int i = 0; i < rows; ++i) {
            const RowEnd end = tile_row_end(tile, p, task, v * kLanes + i);
            factor[i] = end.factor;
            lse[i] = end.lse;
        }
        for (int c = 0; c < dv; c += kLanes) {
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i)
                block[i] = Isa::load(tile.o + ((c + i) * tile.vectors + v) * kLanes) * factor;
            Isa::transpose(block);
            for (int i = 0; i < kLanes; ++i) Isa::store(staging + i * dv + c, block[i]);
        }
        for (int i = 0; i < rows; ++i) store_tile_row<Isa>(tile, p, task, v * kLanes + i, staging + i * dv, lse[i]);
    }
}

// ---- Tasks ----------------------------------------------------------------------------------------------------------

/// Hands out consecutive runs of the scratch, each a whole number of 64-byte lines. Without memory it only counts.
struct Scratch {
    float* next;
    std::int64_t floats = 0;
    float* take(std::int64_t n) {
        float* run = next;
        floats += round_up(n, 16);
        if (next) next += round_up(n, 16);
        return run;
    }
};

/// The rows of K or V of a task's head, wherever they lie.
class HeadRows {
  public:
    HeadRows(const Rows& rows, const ForwardParams& params, const Task& task)
        : t_(rows), p_(params), batch_(params.sequences.page_size ? 0 : task.batch), head_(task.head_k) {}
    const char* row(std::int64_t key) const {
        const char* first = row_pointer(t_, p_.dtype, batch_, head_, 0);
        if (!p_.sequences.page_size) return first + key * t_.row * element_size(p_.dtype);
        const CachedRows rows(p_.sequences, p_.sequences.seqused_k[0], 0);
        return first + rows.offset(t_, static_cast<int>(key)) * element_size(p_.dtype);
    }
    std::int64_t stride() const { return t_.row; }

  private:
    const Rows& t_;
    const ForwardParams& p_;
    std::int64_t batch_, head_;
};

/// Whether K/V tiles are copied to scratch: to convert them, or to gather the rows of a cache's pages.
inline bool copies_keys(const ForwardParams& p) { return p.dtype != DType::kFloat32 || p.sequences.page_size; }

/// The K/V tile that a task works on, as fp32.
template <class Isa>
class FloatKeys {
  public:
    /// O is loaded and stored for each tile anyway, and rescaled meanwhile.
    static constexpr bool kLagsMaximum = false;

    FloatKeys(const ForwardParams& params, const Task& task, Scratch& scratch)
        : p_(params),
          k_rows_(params.k, params, task),
          v_rows_(params.v, params, task),
          k_memory_(copies_keys(params) ? scratch.take(kTileKeys * params.head_dim) : nullptr),
          v_memory_(copies_keys(params) ? scratch.take(kTileKeys * params.head_dim_v) : nullptr) {}
    static std::int64_t scratch_floats(const ForwardParams& p) {
        return copies_keys(p) ? round_up(kTileKeys * p.head_dim, 16) + round_up(kTileKeys * p.head_dim_v, 16) : 0;
    }

    /// The tile's queries will be multiplied.
    static void take(const QTile&) {}
    /// From now on: `n` keys from `first` on.
    void load(std::int64_t first, std::int64_t n) {
        first_ = first;
        k_ = load_rows(k_rows_, first, n, p_.head_dim, k_memory_);
        v_ = load_rows(v_rows_, first, n, p_.head_dim_v, v_memory_);
    }
    KeyRows k(std::int64_t key) const { return {k_.row(key - first_), k_.stride}; }
    KeyRows v(std::int64_t key) const { return {v_.row(key - first_), v_.stride}; }

    template <int kVectors, bool kMasked, bool kRaw>
    void multiply_qk(const QTile& tile, std::int32_t first, int n, float* s,
                     typename Isa::Vec (&maximum)[kVectors]) const {
        cpu::multiply_qk<Isa, kVectors, kMasked, kRaw>(tile, k(first), p_.head_dim, first, n, s, maximum);
    }
    /// May overwrite the weights.
    template <int kVectors, bool kSkipZeros>
    void multiply_pv(const QTile& tile, std::int32_t first, int n, float* weights,
                     const typename Isa::Vec (&alpha)[kVectors]) const {
        cpu::multiply_pv<Isa, kVectors, kSkipZeros>(tile, v(first), p_.head_dim_v, n, weights, alpha);
    }
    bool all_finite(std::int32_t first, int n) const { return cpu::all_finite(v(first), p_.head_dim_v, n); }

  private:
    KeyRows load_rows(const HeadRows& rows, std::int64_t first, std::int64_t n, int columns, float* dst) const {
        if (!copies_keys(p_)) return {reinterpret_cast<const float*>(rows.row(first)), rows.stride()};
        for (std::int64_t j = 0; j < n; ++j) load_row<Isa>(rows.row(first + j), p_.dtype, dst + j * columns, columns);
        return {dst, columns};
    }

    const ForwardParams& p_;
    HeadRows k_rows_, v_rows_;
    float *k_memory_, *v_memory_;
    KeyRows k_{}, v_{};
    std::int64_t first_ = 0;
};

template <class Isa, class Keys>
std::int64_t scratch_floats_with(const ForwardParams& p, std::int64_t tiles) {
    const std::int64_t rows = tile_rows<Isa>(), d = padded<Isa>(p.head_dim), dv = padded<Isa>(p.head_dim_v);
    const std::int64_t per_tile = rows * (d + dv) + 6 * round_up(rows, 16);
    const std::int64_t biased = p.bias.data ? kTileKeys * (rows + Isa::kLanes) : 0;
    const std::int64_t shared = kTileKeys * rows + biased + Isa::kLanes * max64(d, dv);
    return tiles * round_up(per_tile, 16) + round_up(shared, 16) + Keys::scratch_floats(p);
}

template <class Isa, class Keys>
void attend_with(const ForwardParams& p, const Task& task, float* memory) {
    constexpr std::int64_t kRows = tile_rows<Isa>();
    const bool modifies = modified(p);
    Scratch scratch{memory};
    float* s = scratch.take(kTileKeys * kRows);
    Keys keys(p, task, scratch);
    float* bias = p.bias.data ? scratch.take(kTileKeys * kRows) : nullptr;
    float* bias_rows = p.bias.data ? scratch.take(kTileKeys * Isa::kLanes) : nullptr;
    float* staging = scratch.take(Isa::kLanes * max64(padded<Isa>(p.head_dim), padded<Isa>(p.head_dim_v)));

    QTile tiles[kMaxTaskTiles];
    int count = 0;
    std::int64_t key_begin = task.key_end, key_end = task.key_begin;
    for (std::int64_t row = task.row_begin; row < task.row_end; row += kRows) {
        QTile& tile = tiles[count++];
        tile.q = scratch.take(kRows * padded<Isa>(p.head_dim));
        tile.o = scratch.take(kRows * padded<Isa>(p.head_dim_v));
        tile.maximum = scratch.take(kRows);
        tile.sum = scratch.take(kRows);
        tile.lo = reinterpret_cast<std::int32_t*>(scratch.take(kRows));
        tile.hi = reinterpret_cast<std::int32_t*>(scratch.take(kRows));
        tile.slope = scratch.take(kRows);
        tile.place = reinterpret_cast<std::int32_t*>(scratch.take(kRows));
        tile.row_begin = row;
        tile.rows = static_cast<int>(min64(kRows, task.row_end - row));
        load_tile<Isa>(tile, p, task, staging);
        keys.take(tile);
        key_begin = min64(key_begin, tile.lo_min);
        key_end = max64(key_end, tile.hi_max + 1);
    }
    key_begin = max64(key_begin, task.key_begin);
    key_end = min64(key_end, task.key_end);

    for (std::int64_t first = key_begin; first < key_end; first = (first / kTileKeys + 1) * kTileKeys) {
        const std::int64_t last = min64((first / kTileKeys + 1) * kTileKeys, key_end);
        keys.load(first, last - first);
        for (int t = 0; t < count; ++t) {
            const QTile& tile = tiles[t];
            for (int r = 0; tile.vectors == 0 && r < tile.rows; ++r) {
                const std::int64_t from = max64(first, tile.lo[r]),
                                   to = min64(last, static_cast<std::int64_t>(tile.hi[r]) + 1);
                if (from >= to) continue;
                const int n = static_cast<int>(to - from);
                if (bias) load_bias<Isa>(p, task.batch, packed_row(p, task.head_k, tile.row_begin + r), from, n, bias);
                (modifies ? attend_row<Isa, true> : attend_row<Isa, false>)(tile, r, keys.k(from), keys.v(from), p,
                                                                            task, static_cast<std::int32_t>(from), n,
                                                                            bias, s);
            }
            if (tile.vectors == 0) continue;
            const std::int64_t from = max64(first, tile.lo_min),
                               to = min64(last, static_cast<std::int64_t>(tile.hi_max) + 1);
            if (from >= to) continue;
            const bool masked = from < tile.lo_max || to - 1 > tile.hi_min;
            const int n = static_cast<int>(to - from);
            if (bias) load_bias_tile<Isa>(tile, p, task, from, n, bias_rows, bias);
            attend_tile_for<Isa, Keys>(tile.vectors, masked, modifies)(tile, keys, p, task,
                                                                       static_cast<std::int32_t>(from), n, bias, s);
        }
    }
    for (int t = 0; t < count; ++t) store_tile<Isa>(tiles[t], p, task, staging);
}

template <class Isa>
void combine(const ForwardParams& p, const Task& task, int splits, std::int64_t split_stride) {
    const int dv = p.head_dim_v;
    const float scale = static_cast<float>(maximum_scale(p) * kLog2E);
    for (std::int64_t r = task.row_begin; r < task.row_end; ++r) {
        const float* first = task.partial + (r - task.row_begin) * partial_stride(dv);
        float maximum = -kInfinity, sum = 0.f;
        for (int s = 0; s < splits; ++s) {
            const float m = first[s * split_stride + dv];
            if (m > maximum) maximum = m;
        }
        float o[kMaxHeadDim];
        for (int c = 0; c < dv; ++c) o[c] = 0.f;
        for (int s = 0; s < splits; ++s) {
            const float* part = first + s * split_stride;
            if (part[dv] == -kInfinity && part[dv + 1] == 0.f) continue;
            const float weight = __builtin_exp2f((part[dv] - (maximum == -kInfinity ? 0.f : maximum)) * scale);
            sum += weight * part[dv + 1];
            for (int c = 0; c < dv; ++c) o[c] += weight * part[c];
        }
        const PackedRow row = packed_row(p, task.head_k, r);
        const RowEnd end = row_end(p, row.head, maximum, sum);
        for (int c = 0; c < dv; ++c) o[c] *= end.factor;
        store_result<Isa>(p, task.batch, row, o, end.lse);
    }
}

}  // namespace
}  // namespace flash_wmma::cpu
