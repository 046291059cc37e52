// Attention of bf16 inputs by an instruction that multiplies bf16 in pairs: c += a[0] b[0] + a[1] b[1], products exact
// and sums in fp32. On AMX it works on tiles (attention_amx.cpp), on AVX512-BF16 on vectors
// (attention_avx512_bf16.cpp). The algorithms are those of attention.inl and backward.inl, with other products:
//
//     forward, a tile of Bc keys:     S^T = K Q^T         O^T += V^T P^T
//     backward, a tile of Bc keys:    S = Q K^T           dP = dO V^T
//                                     dV^T += dO^T P      dK^T += Q^T dS      dQ += dS K
//
// In C[m][n] += A[m][k] B[k][n] the rows of A lie as they are, bf16 with k along the row, and B lies in pairs: word n
// of row k / 2 has B[k][n] and B[k + 1][n]. So K, Q and dO are A as they lie, but for zeros behind them. V^T, Q^T and
// dO^T are transposed, and pairs of K and V are made, once for each tile. P^T, P and dS are B, whose pairs are of
// neighbouring rows of what was computed.
//
// Weights and dS are fp32 and go in as two numbers, the nearest bf16 and that of what is left: 16 bits, and two
// products. So results are as near to the truth as those of fp32 arithmetic, whose last rounding to bf16 is a hundred
// times as large, but that the instruction takes subnormal numbers for 0.
//
// Where V has a NaN or inf, weights of 0 have to hide it: such a key's value is 0 in V^T, and its product with the
// weights is added by itself. So rows that do not see it keep their bits.
//
// A lagged maximum: O keeps its scale while scores rise by less than a factor of 2^4, so that it is seldom rescaled in
// a pass of its own. It may overflow as early as with 16 times as many keys.
//
// Bound: with AMX, loads and stores of tiles, some 1.3 for each product of 16 cycles (docs/benchmarks.md); with
// vectors, the products.
#pragma once

#include "cpu/avx512.inl"

namespace flash_wmma::cpu {
namespace {

constexpr int kTile = 16;       // rows of A and C, and words of a row of B and C
constexpr int kTileDepth = 32;  // k of a step

/// C += A B for blocks of kTile x kTile, `steps` times kTileDepth of k, for each of `parts` of A or B. Blocks lie side
/// by side. From a row to the next, and from a part to the next, distances count elements: fp32, bf16, and words of a
/// pair.
///
/// What is split lies in A or in B; the other one's `part` is 0.
struct PairProduct {
    float* c;
    std::int64_t c_row;
    const std::uint16_t* a;
    std::int64_t a_row, a_part;
    const std::uint32_t* b;
    std::int64_t b_row, b_part;
    int steps, parts;
    bool adds;  ///< else C = A B

    float* c_block(int m, int n) const { return c + kTile * (m * c_row + n); }
    const std::uint16_t* a_block(int m, int step, int part) const {
        return a + kTile * m * a_row + kTileDepth * step + part * a_part;
    }
    const std::uint32_t* b_block(int n, int step, int part) const {
        return b + kTileDepth / 2 * step * b_row + kTile * n + part * b_part;
    }
};

template <class Tiles, int kM>
void multiply_columns(PairProduct product, int n) {
    while (n > 0) {
        const int wide = static_cast<int>(min64(n, Tiles::kWidest));
        if (wide == 1) Tiles::template multiply<kM, 1>(product);
        else if (wide == 2) Tiles::template multiply<kM, 2>(product);
        else if constexpr (Tiles::kWidest > 2) Tiles::template multiply<kM, 3>(product);
        product.c += wide * kTile;
        product.b += wide * kTile;
        n -= wide;
    }
}
/// m x n blocks.
template <class Tiles>
void multiply_pairs(PairProduct product, int m, int n) {
    for (; m > 0; m -= 2) {
        if (m > 1) multiply_columns<Tiles, 2>(product, n);
        else multiply_columns<Tiles, 1>(product, n);
        product.c += 2 * kTile * product.c_row;
        product.a += 2 * kTile * product.a_row;
    }
}

inline __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, __m512i x) { _mm512_storeu_si512(p, x); }

/// Two numbers as high parts of words: the nearest bf16, a tie going away from 0, and what is left, rounded to 0.
struct Split {
    __m512i high, low;
    explicit Split(__m512 x) {
        const __m512i upper = _mm512_set1_epi32(-0x10000);
        high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)), upper);
        const __m512 nearest = _mm512_castsi512_ps(high);
        const __mmask16 finite = _knot_mask16(_mm512_fpclass_ps_mask(nearest, 0x99));  // neither NaN nor inf
        low = _mm512_and_si512(_mm512_castps_si512(_mm512_maskz_sub_ps(finite, x, nearest)), upper);
    }
};
/// Words of the pairs (x, y), both high parts.
inline __m512i paired(__m512i x, __m512i y) { return _mm512_or_si512(_mm512_srli_epi32(x, 16), y); }

/// Makes of each two rows of fp32 a row of their high numbers in pairs, and behind it one of their low ones: `rows`
/// rows of `vectors` vectors, and zeros up to a multiple of kTileDepth rows.
inline void split_into_pairs(float* x, int rows, int vectors) {
    const std::int64_t width = vectors * kTile;
    for (int r = 0; r < rows; r += 2)
        for (int v = 0; v < vectors; ++v) {
            float *const first = x + r * width + v * kTile, *const second = first + width;
            const Split of_first(_mm512_load_ps(first)),
                of_second(r + 1 < rows ? _mm512_load_ps(second) : _mm512_setzero_ps());
            store_words(first, paired(of_first.high, of_second.high));
            store_words(second, paired(of_first.low, of_second.low));
        }
    const std::int64_t end = round_up(rows, 2) * width;
    clear(x + end, round_up(rows, kTileDepth) * width - end);
}
/// Rows of fp32 as two rows of bf16; the width is a multiple of kTile.
inline void split(const float* x, std::int64_t count, std::uint16_t* high, std::uint16_t* low) {
    for (std::int64_t i = 0; i < count; i += kTile) {
        const Split both(_mm512_loadu_ps(x + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(both.high, 16)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(both.low, 16)));
    }
}
/// dst[r / 2][c] = (src[r][c], src[r + 1][c]); columns are a multiple of kTile.
inline void pair_rows(const std::uint16_t* src, std::int64_t rows, std::int64_t columns, std::uint32_t* dst) {
    const auto words = [](const std::uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    for (std::int64_t r = 0; r < rows; r += 2, dst += columns)
        for (std::int64_t c = 0; c < columns; c += kTile)
            store_words(dst + c, _mm512_or_si512(words(src + r * columns + c),
                                                 _mm512_slli_epi32(words(src + (r + 1) * columns + c), 16)));
}
/// Rows of bf16.
struct HalfRows {
    const std::uint16_t* data;
    std::int64_t stride;
};
/// dst[c][r] = src[r][c]; both dimensions are multiples of kTileDepth, and rows of dst lie dst_row apart.
inline void transpose_pairs(HalfRows src, std::int64_t rows, std::int64_t columns, std::uint16_t* dst,
                            std::int64_t dst_row) {
    for (std::int64_t r = 0; r < rows; r += kTileDepth)
        for (std::int64_t c = 0; c < columns; c += kTileDepth) {
            // Of each 128 bits of a row the first and the last four columns: pairs of neighbouring rows
            __m512 part[2][kTile];
            for (int i = 0; i < kTile; ++i) {
                const std::uint16_t* row = src.data + (r + 2 * i) * src.stride + c;
                const __m512i x = load_words(row), y = load_words(row + src.stride);
                part[0][i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
                part[1][i] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
            }
            for (int h = 0; h < 2; ++h) {
                Avx512::transpose(part[h]);
                for (int i = 0; i < kTile; ++i)
                    store_words(dst + (c + i / 4 * 8 + 4 * h + i % 4) * dst_row + r, _mm512_castps_si512(part[h][i]));
            }
        }
}
/// dst[c / 2][r] = (src[r][c], src[r][c + 1]): src has kTileKeys rows, and its columns are a multiple of kTileDepth.
inline void pair_columns(const std::uint16_t* src, std::int64_t columns, std::uint32_t* dst) {
    transpose<Avx512>(reinterpret_cast<const float*>(src), kTileKeys, columns / 2, reinterpret_cast<float*>(dst));
}

inline std::uint16_t* take_halves(Scratch& scratch, std::int64_t n) {
    return reinterpret_cast<std::uint16_t*>(scratch.take((n + 1) / 2));
}
inline std::uint32_t* take_words(Scratch& scratch, std::int64_t n) {
    return reinterpret_cast<std::uint32_t*>(scratch.take(n));
}

/// A row of `columns` elements with zeros up to `width`, a multiple of kTileDepth.
inline void copy_row(const char* src, int columns, std::int64_t width, std::uint16_t* dst) {
    for (int c = 0; c < width; c += kTileDepth) {
        const int left = columns - c;
        const __mmask32 some = left >= kTileDepth ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0;
        store_words(dst + c, _mm512_maskz_loadu_epi16(some, src + std::int64_t{2} * c));
    }
}
inline void clear_halves(std::uint16_t* dst, std::int64_t n) {
    __builtin_memset(dst, 0, static_cast<std::size_t>(n) * sizeof *dst);
}
/// The `n` rows of a tile that row_of(0), row_of(1), ... give, as copy_row copies them, and zeros up to kTileKeys rows.
template <class RowOf>
void copy_rows(const RowOf& row_of, std::int64_t n, int columns, std::int64_t width, std::uint16_t* dst) {
    for (std::int64_t j = 0; j < n; ++j) copy_row(row_of(j), columns, width, dst + j * width);
    clear_halves(dst + n * width, (kTileKeys - n) * width);
}
/// Whether no element has all bits of its exponent set; columns are a multiple of kTileDepth.
inline bool are_finite(const std::uint16_t* x, std::int64_t columns) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 found = 0;
    for (std::int64_t c = 0; c < columns; c += kTileDepth)
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(load_words(x + c), exponent), exponent);
    return found == 0;
}

/// The K/V tile that a task works on, as bf16.
template <class Isa>
class PairKeys {
    using Tiles = typename Isa::Tiles;
    using Vec = typename Isa::Vec;
    static constexpr std::int64_t kMore = kTileDepth;  // rows and columns behind a tile that are read, but not used
    static constexpr std::int64_t kValueRow = kTileKeys + kMore;  // of V^T

    struct Memory {
        std::uint16_t *k, *v, *v_transposed;
        Memory(const ForwardParams& p, Scratch& scratch)
            : k(take_halves(scratch, (kTileKeys + kMore) * round_up(p.head_dim, kTileDepth))),
              v(take_halves(scratch, kTileKeys * round_up(p.head_dim_v, kTileDepth))),
              v_transposed(take_halves(scratch, kValueRow * round_up(p.head_dim_v, kTileDepth))) {}
    };

  public:
    static constexpr bool kLagsMaximum = true;

    PairKeys(const ForwardParams& params, const Task& task, Scratch& scratch)
        : p_(params),
          floats_(params, task, scratch),
          k_rows_(params.k, params, task),
          v_rows_(params.v, params, task),
          d_(round_up(params.head_dim, kTileDepth)),
          dv_(round_up(params.head_dim_v, kTileDepth)),
          memory_(params, scratch) {
        clear_halves(memory_.v_transposed, kValueRow * dv_);
    }
    static std::int64_t scratch_floats(const ForwardParams& p) {
        Scratch scratch{nullptr};
        Memory(p, scratch);
        return FloatKeys<Isa>::scratch_floats(p) + scratch.floats;
    }

    /// Q^T as pairs, in place: row c / 2 is written behind the last use of rows c and c + 1.
    void take(const QTile& tile) const {
        const int vectors = tile.vectors;
        for (std::int64_t c = 0; c < d_; c += 2)
            for (int v = 0; v < vectors; ++v) {
                __m512i words = _mm512_setzero_si512();
                if (c < p_.head_dim) {
                    const float* column = tile.q + (c * vectors + v) * kTile;
                    const __m512i upper = _mm512_set1_epi32(-0x10000);
                    words = paired(load_words(column), _mm512_and_si512(load_words(column + vectors * kTile), upper));
                }
                store_words(tile.q + (c / 2 * vectors + v) * kTile, words);
            }
    }
    void load(std::int64_t first, std::int64_t n) {
        first_ = first, n_ = n;
        has_floats_ = false;
        k_ = rows_of(k_rows_, p_.head_dim, d_, memory_.k);
        HalfRows v = rows_of(v_rows_, p_.head_dim_v, dv_, memory_.v);
        infinite_ = 0;
        for (std::int64_t j = 0; j < n; ++j) infinite_ |= std::uint64_t{!are_finite(v.data + j * v.stride, dv_)} << j;
        if (infinite_) {
            v = copied(v_rows_, p_.head_dim_v, dv_, memory_.v);
            for (std::int64_t j = 0; j < n; ++j)
                if (infinite_ >> j & 1) clear_halves(memory_.v + j * dv_, dv_);
        }
        transpose_pairs(v, kTileKeys, dv_, memory_.v_transposed, kValueRow);
    }
    KeyRows k(std::int64_t key) { return floats().k(key); }
    KeyRows v(std::int64_t key) { return floats().v(key); }

    template <int kVectors, bool kMasked, bool kRaw>
    void multiply_qk(const QTile& tile, std::int32_t first, int n, float* s, Vec (&maximum)[kVectors]) {
        constexpr std::int64_t kRow = kVectors * kTile;
        if (first - first_ + round_up(n, kTile) > kTileKeys && k_.data != memory_.k)  // whole blocks are read
            k_ = copied(k_rows_, p_.head_dim, d_, memory_.k);
        const PairProduct product{.c = s,
                                  .c_row = kRow,
                                  .a = k_.data + (first - first_) * k_.stride,
                                  .a_row = k_.stride,
                                  .a_part = 0,
                                  .b = reinterpret_cast<const std::uint32_t*>(tile.q),
                                  .b_row = kRow,
                                  .b_part = 0,
                                  .steps = static_cast<int>(d_ / kTileDepth),
                                  .parts = 1,
                                  .adds = false};
        multiply_pairs<Tiles>(product, (n + kTile - 1) / kTile, kVectors);
        if constexpr (kRaw) return;
        for (int v = 0; v < kVectors; ++v) {
            using Int = typename Isa::Int;
            const Int lo = Isa::load_int(tile.lo + v * kTile), hi = Isa::load_int(tile.hi + v * kTile);
            Vec most = maximum[v];
            for (int j = 0; j < n; ++j) {
                float* at = s + j * kRow + v * kTile;
                Vec x = Isa::load(at);
                if constexpr (kMasked) {
                    const Int index = Int{} + (first + j);
                    x = ((lo <= index) & (index <= hi)) ? x : Isa::broadcast(-kInfinity);
                    Isa::store(at, x);
                }
                most = Isa::max(x, most);
            }
            maximum[v] = most;
        }
    }

    template <int kVectors, bool kSkipZeros>
    void multiply_pv(const QTile& tile, std::int32_t first, int n, float* weights, const Vec (&alpha)[kVectors]) {
        constexpr std::int64_t kRow = kVectors * kTile;
        const std::int64_t columns = padded<Isa>(p_.head_dim_v);
        for (int v = 0; v < kVectors; ++v) {
            if (_mm512_cmp_ps_mask(alpha[v], Isa::broadcast(1.f), _CMP_EQ_OQ) == 0xffff) continue;
            for (float* o = tile.o + v * kTile; o < tile.o + columns * kRow; o += kRow)
                Isa::store(o, Isa::load(o) * alpha[v]);
        }
        for (std::uint64_t left = infinite(first, n); left; left &= left - 1)
            add_infinite<kVectors, kSkipZeros>(tile, first + __builtin_ctzll(left),
                                               weights + __builtin_ctzll(left) * kRow);
        split_into_pairs(weights, n, kVectors);
        const PairProduct product{.c = tile.o,
                                  .c_row = kRow,
                                  .a = memory_.v_transposed + (first - first_),
                                  .a_row = kValueRow,
                                  .a_part = 0,
                                  .b = reinterpret_cast<const std::uint32_t*>(weights),
                                  .b_row = 2 * kRow,
                                  .b_part = kRow,
                                  .steps = (n + kTileDepth - 1) / kTileDepth,
                                  .parts = 2,
                                  .adds = true};
        multiply_pairs<Tiles>(product, static_cast<int>(columns / kTile), kVectors);
    }
    bool all_finite(std::int32_t first, int n) const { return infinite(first, n) == 0; }

  private:
    /// Which of these keys have a value that is NaN or inf. In V^T they are zeros.
    std::uint64_t infinite(std::int32_t first, int n) const {
        return infinite_ >> (first - first_) & ~std::uint64_t{0} >> (kTileKeys - n);
    }
    /// O^T += V^T P^T of such a key.
    template <int kVectors, bool kSkipZeros>
    void add_infinite(const QTile& tile, std::int32_t key, const float* weights) const {
        const char* row = v_rows_.row(key);
        float* o = tile.o;
        for (int c = 0; c < p_.head_dim_v; ++c) {
            std::uint16_t element;
            __builtin_memcpy(&element, row + 2 * c, sizeof element);
            float value;
            bfloat16_to_float(&element, &value, 1);
            for (int v = 0; v < kVectors; ++v, o += kTile) {
                const Vec weight = Isa::load(weights + v * kTile), before = Isa::load(o),
                          after = Isa::fma(Isa::broadcast(value), weight, before);
                if constexpr (kSkipZeros) Isa::store(o, weight == Isa::broadcast(0.f) ? before : after);
                else Isa::store(o, after);
            }
        }
    }
    /// The tile's rows with zeros behind them.
    HalfRows copied(const HeadRows& rows, int columns, std::int64_t width, std::uint16_t* memory) const {
        copy_rows([&](std::int64_t j) { return rows.row(first_ + j); }, n_, columns, width, memory);
        return {memory, width};
    }
    /// The same as they lie, where no row has to be added and no column.
    HalfRows rows_of(const HeadRows& rows, int columns, std::int64_t width, std::uint16_t* memory) const {
        if (n_ < kTileKeys || columns < width || p_.sequences.page_size) return copied(rows, columns, width, memory);
        return {reinterpret_cast<const std::uint16_t*>(rows.row(first_)), rows.stride()};
    }
    /// The tile in fp32, for few queries.
    FloatKeys<Isa>& floats() {
        if (!has_floats_) floats_.load(first_, n_);
        has_floats_ = true;
        return floats_;
    }

    const ForwardParams& p_;
    FloatKeys<Isa> floats_;
    HeadRows k_rows_, v_rows_;
    std::int64_t d_, dv_;  // padded
    Memory memory_;
    HalfRows k_{};
    std::int64_t first_ = 0, n_ = 0;
    std::uint64_t infinite_ = 0;  // a bit for each key
    bool has_floats_ = false;
    typename Tiles::Scope scope_;
};

/// The products of a K/V tile with tiles of queries.
template <class Isa>
class PairProducts {
    using Tiles = typename Isa::Tiles;

  public:
    using Scope = typename Tiles::Scope;  ///< exists while products are computed
    static constexpr int kRows = 64;      ///< of a Q tile
    static_assert(kRows == kTileKeys);    // both are loaded alike
    static constexpr int kKeyTiles = 4;   ///< for which a Q tile is transposed once

    PairProducts(const ForwardParams& params, Scratch& scratch)
        : p_(params),
          d_(round_up(params.head_dim, kTileDepth)),
          dv_(round_up(params.head_dim_v, kTileDepth)),
          rows_(take_halves(scratch, kTileKeys * max64(d_, dv_))),
          sum_rows_(scratch.take(kTileKeys * max64(d_, dv_))),
          q_(take_halves(scratch, kRows * d_)),
          dout_(take_halves(scratch, kRows * dv_)),
          q_transposed_(take_halves(scratch, kRows * d_)),
          dout_transposed_(take_halves(scratch, kRows * dv_)),
          split_(take_halves(scratch, 2 * kRows * kTileKeys)) {
        for (KeyTile& tile : tiles_)
            tile = {take_words(scratch, kTileKeys * d_ / 2), take_words(scratch, kTileKeys * dv_ / 2),
                    take_words(scratch, kTileKeys * d_ / 2), scratch.take(kTileKeys * d_),
                    scratch.take(kTileKeys * dv_)};
    }

    void take_values(int tile, std::int64_t head, std::int64_t first, int keys) {
        load(p_.v, head, first, keys, p_.head_dim_v, dv_, rows_);
        pair_columns(rows_, dv_, tiles_[tile].v_columns);
        clear(tiles_[tile].dv, kTileKeys * dv_);
    }
    void take_keys(int tile, std::int64_t head, std::int64_t first, int keys) {
        load(p_.k, head, first, keys, p_.head_dim, d_, rows_);
        pair_columns(rows_, d_, tiles_[tile].k_columns);
        pair_rows(rows_, kTileKeys, d_, tiles_[tile].k_pairs);
        clear(tiles_[tile].dk, kTileKeys * d_);
    }
    void take_queries(const Rows* dout, std::int64_t head, std::int64_t row, int rows) {
        count_ = rows;
        load(p_.q, head, row, rows, p_.head_dim, d_, q_);
        load(*dout, head, row, rows, p_.head_dim_v, dv_, dout_);
        transpose_pairs({q_, d_}, kRows, d_, q_transposed_, kRows);
        transpose_pairs({dout_, dv_}, kRows, dv_, dout_transposed_, kRows);
    }
    void multiply_qk(int tile, float* s) const { multiply_scores(q_, d_, tiles_[tile].k_columns, s); }
    void multiply_dout_v(int tile, float* dp) const { multiply_scores(dout_, dv_, tiles_[tile].v_columns, dp); }
    void add(int tile, float* weights, float* ds, float* dq) {
        const std::int64_t behind = (kRows - count_) * kTileKeys;  // rows that do not exist
        clear(weights + count_ * kTileKeys, behind);
        clear(ds + count_ * kTileKeys, behind);
        add_to_queries(tiles_[tile].k_pairs, ds, dq);
        add_to_keys(dout_transposed_, dv_, weights, tiles_[tile].dv);
        add_to_keys(q_transposed_, d_, ds, tiles_[tile].dk);
    }
    float* dk(int tile) { return rows_of(tiles_[tile].dk, padded<Isa>(p_.head_dim)); }
    float* dv(int tile) { return rows_of(tiles_[tile].dv, padded<Isa>(p_.head_dim_v)); }

  private:
    struct KeyTile {
        std::uint32_t *k_columns, *v_columns, *k_pairs;
        float *dk, *dv;  // transposed
    };

    void load(const Rows& t, std::int64_t head, std::int64_t first, int n, int columns, std::int64_t width,
              std::uint16_t* dst) const {
        const auto row_of = [&](std::int64_t j) { return row_pointer(t, DType::kBFloat16, 0, head, first + j); };
        copy_rows(row_of, n, columns, width, dst);
    }
    /// [row][key] = rows times columns.
    static void multiply_scores(const std::uint16_t* rows, std::int64_t width, const std::uint32_t* columns, float* s) {
        const PairProduct product{.c = s,
                                  .c_row = kTileKeys,
                                  .a = rows,
                                  .a_row = width,
                                  .a_part = 0,
                                  .b = columns,
                                  .b_row = kTileKeys,
                                  .b_part = 0,
                                  .steps = static_cast<int>(width / kTileDepth),
                                  .parts = 1,
                                  .adds = false};
        multiply_pairs<Tiles>(product, kRows / kTile, kTileKeys / kTile);
    }
    /// sum[column][key] += columns times x[row][key]; overwrites x.
    void add_to_keys(const std::uint16_t* columns, std::int64_t width, float* x, float* sum) const {
        split_into_pairs(x, kRows, kTileKeys / kTile);
        const PairProduct product{.c = sum,
                                  .c_row = kTileKeys,
                                  .a = columns,
                                  .a_row = kRows,
                                  .a_part = 0,
                                  .b = reinterpret_cast<const std::uint32_t*>(x),
                                  .b_row = 2 * kTileKeys,
                                  .b_part = kTileKeys,
                                  .steps = kRows / kTileDepth,
                                  .parts = 2,
                                  .adds = true};
        multiply_pairs<Tiles>(product, static_cast<int>(width / kTile), kTileKeys / kTile);
    }
    /// dq[row][column] += ds[row][key] K[key][column].
    void add_to_queries(const std::uint32_t* k_pairs, const float* ds, float* dq) const {
        split(ds, kRows * kTileKeys, split_, split_ + kRows * kTileKeys);
        const std::int64_t stride = padded<Isa>(p_.head_dim);
        PairProduct product{.c = dq,
                            .c_row = stride,
                            .a = split_,
                            .a_row = kTileKeys,
                            .a_part = kRows * kTileKeys,
                            .b = k_pairs,
                            .b_row = d_,
                            .b_part = 0,
                            .steps = kTileKeys / kTileDepth,
                            .parts = 2,
                            .adds = true};
        // Blocks of rows that exist, and then the last one, part of whose rows do
        const int whole = count_ / kTile, columns = static_cast<int>(stride / kTile), rest = count_ % kTile;
        multiply_pairs<Tiles>(product, whole, columns);
        if (rest == 0) return;
        product.a += whole * kTile * product.a_row;
        product.c = sum_rows_, product.adds = false;
        multiply_pairs<Tiles>(product, 1, columns);
        dq += whole * kTile * stride;
        for (std::int64_t i = 0; i < rest * stride; i += kTile)
            Isa::store(dq + i, Isa::load(dq + i) + Isa::load(sum_rows_ + i));
    }
    /// A sum [column][key] as rows of the keys, `stride` columns of them.
    float* rows_of(const float* sum, std::int64_t stride) const {
        transpose<Isa>(sum, stride, kTileKeys, sum_rows_);
        return sum_rows_;
    }

    const ForwardParams& p_;
    std::int64_t d_, dv_;                                          // padded
    std::uint16_t* rows_;                                          // of K or V
    float* sum_rows_;                                              // of dK, dV or dQ
    std::uint16_t *q_, *dout_, *q_transposed_, *dout_transposed_;  // of a Q tile
    std::uint16_t* split_;                                         // dS
    KeyTile tiles_[kKeyTiles];
    int count_ = 0;
};

/// AVX-512 with products of pairs by `AnyTiles`.
template <class AnyTiles>
struct WithPairs : Avx512 {
    static constexpr bool kPairs = true;
    using Tiles = AnyTiles;
    using PairKeys = cpu::PairKeys<WithPairs>;
    using PairProducts = cpu::PairProducts<WithPairs>;
};

}  // namespace
}  // namespace flash_wmma::cpu
