// Gradients by FlashAttention-2's algorithm 2 (https://arxiv.org/abs/2307.08691), templated on an instruction set, like
// attention.inl, and on the products: those in fp32 are here, others in pairs.inl.
//
// A task owns a run of the keys of a key/value head. It walks over K/V tiles of Bc = kTileKeys keys and, for each, over
// all query rows that see the tile, in tiles of Br rows: dK and dV of the tile stay in scratch, dQ is added up
// in memory that no other task touches. Nothing is atomic and every sum has one order, so the result is bitwise the
// same from run to run, whatever the number of threads.
//
// In fp32 five products per tile, all of one form, C[m][n] += A[m][k] * B[k][n] with n along the vectors:
//     S = Q K^T        dP = dO V^T        dV += P^T dO        dK += dS^T Q        dQ += dS K
// so K and V are transposed once per K/V tile, and P and dS are read by columns as they lie.
//
// The weights are recomputed from lse: P = exp(x - lse). Where a key is hidden, P and dS are 0, whatever dP is. A NaN
// or inf of Q, K or dO still spreads to the products with it (0 * inf), as in torch.
//
// Bound: the FMA units, as in attention.inl.
#pragma once

#include "cpu/attention.inl"
#include "cpu/rotary.inl"

namespace flash_wmma::cpu {
namespace {

/// Br: query rows of a tile, whole blocks of kProductRows.
constexpr int kProductRows = 6, kQueryRows = 60;

/// A[m][k] is data[m * row + k * column].
struct Factor {
    const float* data;
    std::int64_t row, column;
};

/// A block of C[m][n] += A[m][k] B[k][n], kProductRows x kVectors vectors; rows beyond m repeat the last one.
template <class Isa, int kVectors>
void multiply_block(float* c, std::int64_t c_stride, Factor a, const float* b, std::int64_t b_stride, int m, int k) {
    using Vec = typename Isa::Vec;
    const float* left[kProductRows];
    float* out[kProductRows];
    Vec acc[kProductRows][kVectors];
    for (int r = 0; r < kProductRows; ++r) {
        const std::int64_t row = min64(r, m - 1);
        left[r] = a.data + row * a.row;
        out[r] = c + row * c_stride;
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Isa::load(out[r] + v * Isa::kLanes);
    }
    for (int i = 0; i < k; ++i, b += b_stride) {
        Vec right[kVectors];
        for (int v = 0; v < kVectors; ++v) right[v] = Isa::load(b + v * Isa::kLanes);
        for (int r = 0; r < kProductRows; ++r) {
            const Vec element = Isa::broadcast(left[r][i * a.column]);
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Isa::fma(element, right[v], acc[r][v]);
        }
    }
    for (int r = 0; r < kProductRows; ++r)
        for (int v = 0; v < kVectors; ++v) Isa::store(out[r] + v * Isa::kLanes, acc[r][v]);
}

/// C[m][n] += A[m][k] B[k][n]; n is a multiple of the lanes, rows of B and C are aligned.
template <class Isa>
void multiply(float* c, std::int64_t c_stride, Factor a, const float* b, std::int64_t b_stride, int m, int n, int k) {
    constexpr int kVectors = Isa::kLanes == 16 ? 4 : 2, kWide = kVectors * Isa::kLanes;
    for (int column = 0; column < n;) {
        const bool wide = n - column >= kWide;
        for (int row = 0; row < m; row += kProductRows) {
            const Factor rows{a.data + row * a.row, a.row, a.column};
            float* out = c + row * c_stride + column;
            if (wide) multiply_block<Isa, kVectors>(out, c_stride, rows, b + column, b_stride, m - row, k);
            else multiply_block<Isa, 1>(out, c_stride, rows, b + column, b_stride, m - row, k);
        }
        column += wide ? kWide : Isa::kLanes;
    }
}

/// dst[c][r] = src[r][c]; both dimensions are multiples of the lanes.
template <class Isa>
void transpose(const float* src, std::int64_t rows, std::int64_t columns, float* dst) {
    constexpr int kLanes = Isa::kLanes;
    for (std::int64_t r = 0; r < rows; r += kLanes)
        for (std::int64_t c = 0; c < columns; c += kLanes) {
            typename Isa::Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i) block[i] = Isa::load(src + (r + i) * columns + c);
            Isa::transpose(block);
            for (int i = 0; i < kLanes; ++i) Isa::store(dst + (c + i) * rows + r, block[i]);
        }
}

inline void clear(float* dst, std::int64_t floats) {
    __builtin_memset(dst, 0, static_cast<std::size_t>(floats) * sizeof(float));
}

/// `n` rows as fp32, padded with zeros to whole vectors.
template <class Isa>
void load_rows(const Rows& t, DType dtype, std::int64_t head, std::int64_t first, std::int64_t n, int columns,
               float* dst) {
    const std::int64_t stride = padded<Isa>(columns);
    for (std::int64_t i = 0; i < n; ++i, dst += stride) {
        load_row<Isa>(row_pointer(t, dtype, 0, head, first + i), dtype, dst, columns);
        clear(dst + columns, stride - columns);
    }
}

template <class Isa>
void store_scaled(float* row, float factor, const Rows& t, DType dtype, std::int64_t head, std::int64_t i,
                  int columns) {
    for (int c = 0; c < columns; ++c) row[c] *= factor;
    store_row<Isa>(row, const_cast<char*>(row_pointer(t, dtype, 0, head, i)), dtype, columns);
}

/// One query row and a tile of keys.
struct TileRow {
    float lse, slope;
    std::int32_t place;   ///< i + Nk - Nq
    std::int32_t lo, hi;  ///< the row sees the keys [lo, hi]
    std::int32_t first;   ///< key of the tile
    const float* bias;    ///< of the tile's keys, or null
};

/// Scores and weights of some keys of a TileRow.
template <class Isa>
struct WeighedKeys {
    using Vec = typename Isa::Vec;
    Vec distance, x, factor;  ///< of ALiBi; the score, of hidden keys too; its derivative by the scaled product
    Vec log_weight, weight;   ///< weight: 0 if the key is hidden or the row sees none

    /// From the products of the keys `j` and on of the tile.
    WeighedKeys(const ForwardParams& p, const TileRow& row, const float* products, int j) {
        using Int = typename Isa::Int;
        const Int index = lane_numbers<Isa>() + (row.first + j);
        x = Isa::load(products + j) * Isa::broadcast(p.scale);
        factor = Isa::broadcast(1.f);
        if (p.softcap != 0.f) {
            const Vec t = tanh<Isa>(x * Isa::broadcast(1.f / p.softcap));
            x = t * Isa::broadcast(p.softcap);
            factor = factor - t * t;
        }
        if (row.bias) {
            const Vec bias = Isa::load(row.bias + j), hidden = Isa::broadcast(-kInfinity);
            x = bias == hidden ? hidden : x + bias;  // also if x is NaN
        }
        distance = Isa::broadcast(0.f);
        if (p.alibi_slopes) {
            const Int away = row.place - index;
            distance = __builtin_convertvector(away < 0 ? -away : away, Vec);
            x -= Isa::broadcast(row.slope) * distance;
        }
        log_weight = x - Isa::broadcast(row.lse == -kInfinity ? kInfinity : row.lse);
        const Vec some = exp2<Isa>(log_weight * Isa::broadcast(static_cast<float>(kLog2E)));
        const Vec zero = Isa::broadcast(0.f);
        weight = ((row.lo <= index) & (index <= row.hi)) ? some : zero;
    }
};

/// For one query row and a tile of keys: turns the products in `s` into P and those in `dp` into dS', in place.
/// `kept`: what dropout multiplies weights by, or null. dS without softcap's factor is added to `dbias`, whose elements
/// lie `dbias_step` apart, and to `dslopes`, times minus the distance, unless they are null.
template <class Isa>
void weigh_row(const ForwardParams& p, const TileRow& row, float delta, float dentropy, const float* dcolumn_sum, int n,
               const float* kept, float* dbias, std::int64_t dbias_step, float* dslopes, float* s, float* dp) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes;
    const Vec zero = Isa::broadcast(0.f), one = Isa::broadcast(1.f);
    for (int j = 0; j < kTileKeys; j += kLanes) {
        const WeighedKeys<Isa> keys(p, row, s, j);
        const Vec keep = kept ? Isa::load(kept + j) : one;
        Vec dweight = keep * Isa::load(dp + j) - Isa::broadcast(delta);
        if (dentropy != 0.f) dweight -= Isa::broadcast(dentropy) * keys.log_weight;
        if (dcolumn_sum)
            for (int i = 0; i < kLanes && j + i < n; ++i) dweight[i] += dcolumn_sum[j + i];
        const Vec gradient = keys.weight == zero ? zero : keys.weight * dweight;
        Isa::store(s + j, keys.weight * keep);
        Isa::store(dp + j, gradient);
        for (int i = 0; dbias && i < kLanes && j + i < n; ++i) dbias[(j + i) * dbias_step] += gradient[i];
        for (int i = 0; dslopes && i < kLanes && j + i < n; ++i) dslopes[j + i] -= gradient[i] * keys.distance[i];
        if (p.softcap != 0.f) Isa::store(dp + j, gradient * keys.factor);
    }
}

template <class Isa>
std::int64_t query_stride(const ForwardParams& p) {
    return padded<Isa>(p.head_dim);
}

/// The products of a K/V tile with tiles of queries, in fp32, and what they read.
template <class Isa>
class FloatProducts {
  public:
    struct Scope {};                          ///< exists while products are computed
    static constexpr int kRows = kQueryRows;  ///< of a Q tile
    static constexpr int kKeyTiles = 1;       ///< K/V tiles that meet a Q tile one after the other, numbered

    FloatProducts(const ForwardParams& params, Scratch& scratch)
        : p_(params),
          d_(padded<Isa>(params.head_dim)),
          dv_(padded<Isa>(params.head_dim_v)),
          k_(scratch.take(kTileKeys * max64(d_, dv_))),  // first holds V, to be transposed
          k_transposed_(scratch.take(kTileKeys * d_)),
          v_transposed_(scratch.take(kTileKeys * dv_)),
          dk_(scratch.take(kTileKeys * d_)),
          dv_sum_(scratch.take(kTileKeys * dv_)),
          q_(scratch.take(kQueryRows * d_)),
          dout_(scratch.take(kQueryRows * dv_)) {}

    /// From now on K/V tile `tile` has these values, whose gradients are 0.
    void take_values(int /*tile*/, std::int64_t head, std::int64_t first, int keys) {
        clear(k_, kTileKeys * dv_);
        load_rows<Isa>(p_.v, p_.dtype, head, first, keys, p_.head_dim_v, k_);
        transpose<Isa>(k_, kTileKeys, dv_, v_transposed_);
        clear(dv_sum_, kTileKeys * dv_);
    }
    /// Behind their values, if those are needed: these keys, whose gradients are 0.
    void take_keys(int /*tile*/, std::int64_t head, std::int64_t first, int keys) {
        keys_ = keys;
        clear(k_, kTileKeys * d_);
        load_rows<Isa>(p_.k, p_.dtype, head, first, keys, p_.head_dim, k_);
        transpose<Isa>(k_, kTileKeys, d_, k_transposed_);
        clear(dk_, kTileKeys * d_);
    }
    /// From now on: these queries, and their dO if it is needed.
    void take_queries(const Rows* dout, std::int64_t head, std::int64_t row, int rows) {
        rows_ = rows;
        load_rows<Isa>(p_.q, p_.dtype, head, row, rows, p_.head_dim, q_);
        if (dout) load_rows<Isa>(*dout, p_.out_dtype, head, row, rows, p_.head_dim_v, dout_);
    }
    /// S = Q K^T: [row][key], kTileKeys keys.
    void multiply_qk(int /*tile*/, float* s) {
        clear(s, kQueryRows * kTileKeys);
        multiply<Isa>(s, kTileKeys, {q_, d_, 1}, k_transposed_, kTileKeys, rows_, kTileKeys, p_.head_dim);
    }
    /// dP = dO V^T.
    void multiply_dout_v(int /*tile*/, float* dp) {
        clear(dp, kQueryRows * kTileKeys);
        multiply<Isa>(dp, kTileKeys, {dout_, dv_, 1}, v_transposed_, kTileKeys, rows_, kTileKeys, p_.head_dim_v);
    }
    /// dV += P^T dO, dK += dS^T Q, dQ += dS K.
    void add(int /*tile*/, float* weights, float* ds, float* dq) {
        const int dn = static_cast<int>(d_), dvn = static_cast<int>(dv_);
        multiply<Isa>(dv_sum_, dv_, {weights, 1, kTileKeys}, dout_, dv_, keys_, dvn, rows_);
        multiply<Isa>(dk_, d_, {ds, 1, kTileKeys}, q_, d_, keys_, dn, rows_);
        multiply<Isa>(dq, d_, {ds, kTileKeys, 1}, k_, d_, rows_, dn, keys_);
    }
    /// Rows of the keys' gradients, padded, which may be written to. One call may overwrite what the other gave.
    float* dk(int /*tile*/) { return dk_; }
    float* dv(int /*tile*/) { return dv_sum_; }

  private:
    const ForwardParams& p_;
    std::int64_t d_, dv_;
    float *k_, *k_transposed_, *v_transposed_, *dk_, *dv_sum_;  // of a K/V tile
    float *q_, *dout_;                                          // of a Q tile
    int keys_ = 0, rows_ = 0;
};

/// Scratch of a task, beside that of its products.
struct BackwardScratch {
    float *s, *dp, *bias, *kept;
    template <int kRows>
    static BackwardScratch of(Scratch& scratch) {
        return {scratch.take(kRows * kTileKeys), scratch.take(kRows * kTileKeys), scratch.take(kTileKeys),
                scratch.take(kTileKeys)};
    }
};

template <class Products>
std::int64_t backward_scratch_with(const ForwardParams& p) {
    Scratch scratch{nullptr};
    Products products(p, scratch);
    BackwardScratch::of<Products::kRows>(scratch);
    return scratch.floats;
}

template <class Isa>
void row_deltas(const BackwardParams& params, std::int64_t head, std::int64_t row_begin, std::int64_t row_end,
                float* delta, float* scratch) {
    const ForwardParams& p = params.forward;
    float *o = scratch, *dout = scratch + padded<Isa>(p.head_dim_v);
    for (std::int64_t i = row_begin; i < row_end; ++i) {
        load_rows<Isa>(p.o, p.out_dtype, head, i, 1, p.head_dim_v, o);
        load_rows<Isa>(params.dout, p.out_dtype, head, i, 1, p.head_dim_v, dout);
        auto sums = Isa::broadcast(0.f);
        for (int c = 0; c < p.head_dim_v; c += Isa::kLanes)
            sums = Isa::fma(Isa::load(o + c), Isa::load(dout + c), sums);
        float sum = 0.f;
        for (int c = 0; c < Isa::kLanes; ++c) sum += sums[c];
        delta[head * p.seqlen_q + i] = sum - (params.dlse ? params.dlse[head * p.lse_head + i] : 0.f);
    }
}

/// The numbers of a head's keys from `first` on; null if there are none.
template <class T>
T* of_keys(const BackwardParams& params, T* numbers, std::int64_t head, std::int64_t first) {
    return numbers ? numbers + head * params.key_head + first : nullptr;
}

/// A row and the tile of keys from `first` on; `bias` is memory for theirs.
template <class Isa>
TileRow tile_row(const ForwardParams& p, const PackedRow& at, std::int64_t first, int keys, float* bias) {
    TileRow row{};
    row.lse = p.lse[at.head * p.lse_head + at.query];
    row.slope = p.alibi_slopes ? p.alibi_slopes[at.head] : 0.f;
    row.place = static_cast<std::int32_t>(at.query + p.seqlen_k - p.seqlen_q);
    visible_keys(p, 0, at, row.lo, row.hi);
    row.first = static_cast<std::int32_t>(first);
    if (p.bias.data) {
        load_bias<Isa>(p, 0, at, first, keys, bias);
        row.bias = bias;
    }
    return row;
}

/// The products and weights of the queries that `products` has with its K/V tile `tile`.
template <class Isa, class Products>
void backward_tile(const BackwardParams& params, const BackwardTask& task, const BackwardScratch& memory,
                   Products& products, int tile, std::int64_t head, std::int64_t row, int rows, std::int64_t first,
                   int keys) {
    const ForwardParams& p = params.forward;
    products.multiply_qk(tile, memory.s);
    products.multiply_dout_v(tile, memory.dp);
    for (int r = 0; r < rows; ++r) {
        const std::int64_t i = row + r;
        const bool drops = p.dropout.rng_state;
        if (drops) {
            keep_row(p, 0, {i, head}, static_cast<std::int32_t>(first), kTileKeys, memory.kept);
            for (int j = 0; j < kTileKeys; ++j) memory.kept[j] *= kept_scale(p.dropout);
        }
        const BiasGradient& b = params.dbias;
        weigh_row<Isa>(p, tile_row<Isa>(p, {i, head}, first, keys, memory.bias), task.delta[head * p.seqlen_q + i],
                       params.dentropy ? params.dentropy[head * p.lse_head + i] : 0.f,
                       of_keys(params, params.dcolumn_sum, head, first), keys, drops ? memory.kept : nullptr,
                       b.data ? b.data + head * b.head + i * b.query + first * b.key : nullptr, b.key,
                       of_keys(params, params.dslopes, head, first), memory.s + r * kTileKeys,
                       memory.dp + r * kTileKeys);
    }
    const std::int64_t of_head = (head - task.head_k * (p.heads_q / p.heads_k)) * p.seqlen_q + row;
    products.add(tile, memory.s, memory.dp, task.dq + of_head * query_stride<Isa>(p));
}

/// Whether some row of [row, row + rows) of a head sees a key of [first, first + keys).
inline bool sees_keys(const ForwardParams& p, std::int64_t head, std::int64_t row, int rows, std::int64_t first,
                      int keys) {
    const auto sees = [&](std::int64_t from, std::int64_t to) {
        std::int32_t lo, hi, other;
        visible_keys(p, 0, {from, head}, lo, other);
        visible_keys(p, 0, {to, head}, other, hi);
        return lo <= hi && lo < first + keys && hi >= first;
    };
    if (!p.key_ranges.data) return sees(row, row + rows - 1);  // a band's bounds grow with the row
    for (std::int64_t i = row; i < row + rows; ++i)
        if (sees(i, i)) return true;
    return false;
}

template <class Isa, class Products>
void backward_with(const BackwardParams& params, const BackwardTask& task, float* memory) {
    const ForwardParams& p = params.forward;
    Scratch all{memory};
    Products products(p, all);
    [[maybe_unused]] const typename Products::Scope scope;
    const BackwardScratch scratch = BackwardScratch::of<Products::kRows>(all);
    const std::int64_t d = padded<Isa>(p.head_dim), dv = padded<Isa>(p.head_dim_v), group = p.heads_q / p.heads_k;
    clear(task.dq, group * p.seqlen_q * d);
    clear(scratch.bias, kTileKeys);
    const auto keys_from = [&](std::int64_t first) { return static_cast<int>(min64(kTileKeys, task.key_end - first)); };
    for (std::int64_t begin = task.key_begin; begin < task.key_end; begin += Products::kKeyTiles * kTileKeys) {
        const std::int64_t end = min64(begin + Products::kKeyTiles * kTileKeys, task.key_end);
        int tile = 0;
        for (std::int64_t first = begin; first < end; first += kTileKeys, ++tile) {
            products.take_values(tile, task.head_k, first, keys_from(first));
            products.take_keys(tile, task.head_k, first, keys_from(first));
        }
        for (std::int64_t head = task.head_k * group; head < (task.head_k + 1) * group; ++head)
            for (std::int64_t row = 0; row < p.seqlen_q; row += Products::kRows) {
                const int rows = static_cast<int>(min64(Products::kRows, p.seqlen_q - row));
                bool taken = false;
                tile = 0;
                for (std::int64_t first = begin; first < end; first += kTileKeys, ++tile) {
                    const int keys = keys_from(first);
                    if (!sees_keys(p, head, row, rows, first, keys)) continue;
                    if (!taken) products.take_queries(&params.dout, head, row, rows);
                    taken = true;
                    backward_tile<Isa>(params, task, scratch, products, tile, head, row, rows, first, keys);
                }
            }
        tile = 0;
        for (std::int64_t first = begin; first < end; first += kTileKeys, ++tile) {
            float* dk = products.dk(tile);
            for (int j = 0; j < keys_from(first); ++j, dk += d)
                store_scaled<Isa>(dk, p.scale, params.dk, p.out_dtype, task.head_k, first + j, p.head_dim);
            float* dv_rows = products.dv(tile);
            for (int j = 0; j < keys_from(first); ++j, dv_rows += dv)
                store_scaled<Isa>(dv_rows, 1.f, params.dv, p.out_dtype, task.head_k, first + j, p.head_dim_v);
        }
    }
}

/// What Statistics says of one row and the tile of keys from `first` on, added to the row's and the keys' numbers.
template <class Isa>
void count_row(const BackwardParams& params, const PackedRow& at, std::int64_t first, int keys, float* bias,
               const float* products) {
    using Vec = typename Isa::Vec;
    constexpr int kLanes = Isa::kLanes;
    const ForwardParams& p = params.forward;
    const Statistics& asked = params.statistics;
    const TileRow row = tile_row<Isa>(p, at, first, keys, bias);
    const std::int64_t index = at.head * p.lse_head + at.query;
    const float* const key_weights = of_keys(params, asked.key_weights, at.head, first);
    float* const column_sum = of_keys(params, asked.column_sum, at.head, first);
    float maximum = -kInfinity, entropy = 0.f, row_sum = 0.f;
    for (int j = 0; j < kTileKeys; j += kLanes) {
        const WeighedKeys<Isa> weighed(p, row, products, j);
        const Vec zero = Isa::broadcast(0.f);
        const Vec terms = weighed.weight == zero ? zero : weighed.weight * weighed.log_weight;
        for (int i = 0; i < kLanes && j + i < keys; ++i) {
            const std::int32_t key = row.first + j + i;
            const float x = weighed.x[i];
            if (row.lo <= key && key <= row.hi && (x > maximum || x != x)) maximum = x;
            entropy -= terms[i];
            if (key_weights) row_sum += weighed.weight[i] * key_weights[j + i];
            if (column_sum) column_sum[j + i] += weighed.weight[i];
        }
    }
    if (float* const all = p.row_max; all && (maximum > all[index] || maximum != maximum)) all[index] = maximum;
    if (p.entropy) p.entropy[index] += entropy;
    if (asked.row_sum) asked.row_sum[index] += row_sum;
}

template <class Isa>
void statistics(const BackwardParams& params, std::int64_t head, float* memory) {
    using Products = FloatProducts<Isa>;
    const ForwardParams& p = params.forward;
    Scratch all{memory};
    Products products(p, all);
    const BackwardScratch scratch = BackwardScratch::of<Products::kRows>(all);
    const std::int64_t head_k = head / (p.heads_q / p.heads_k);
    clear(scratch.bias, kTileKeys);
    for (std::int64_t first = 0; first < p.seqlen_k; first += kTileKeys) {
        const int keys = static_cast<int>(min64(kTileKeys, p.seqlen_k - first));
        products.take_keys(0, head_k, first, keys);
        for (std::int64_t row = 0; row < p.seqlen_q; row += Products::kRows) {
            const int rows = static_cast<int>(min64(Products::kRows, p.seqlen_q - row));
            if (!sees_keys(p, head, row, rows, first, keys)) continue;
            products.take_queries(nullptr, head, row, rows);
            products.multiply_qk(0, scratch.s);
            for (int r = 0; r < rows; ++r)
                count_row<Isa>(params, {row + r, head}, first, keys, scratch.bias, scratch.s + r * kTileKeys);
        }
    }
}

template <class Isa>
void finish_query(const BackwardParams& params, std::int64_t head, std::int64_t row, const float* first, int parts,
                  std::int64_t part_stride, float* scratch) {
    const ForwardParams& p = params.forward;
    clear(scratch, p.head_dim);
    for (int s = 0; s < parts; ++s, first += part_stride)
        for (int c = 0; c < p.head_dim; ++c) scratch[c] += first[c];
    store_scaled<Isa>(scratch, p.scale, params.dq, p.out_dtype, head, row, p.head_dim);
}

// ---- A compute unit -------------------------------------------------------------------------------------------------

// Isa::kPairs: bf16 is multiplied as bf16 (pairs.inl). All else is multiplied as fp32.

template <class Isa>
bool multiplies_pairs(const ForwardParams& p) {
    return Isa::kPairs && p.dtype == DType::kBFloat16;
}

template <class Isa>
std::int64_t scratch_floats(const ForwardParams& p, std::int64_t tiles) {
    if constexpr (Isa::kPairs)
        if (multiplies_pairs<Isa>(p)) return scratch_floats_with<Isa, typename Isa::PairKeys>(p, tiles);
    return scratch_floats_with<Isa, FloatKeys<Isa>>(p, tiles);
}
template <class Isa>
void attend(const ForwardParams& p, const Task& task, float* scratch) {
    if constexpr (Isa::kPairs)
        if (multiplies_pairs<Isa>(p)) return attend_with<Isa, typename Isa::PairKeys>(p, task, scratch);
    attend_with<Isa, FloatKeys<Isa>>(p, task, scratch);
}

/// Statistics are always of products in fp32.
template <class Isa>
std::int64_t backward_scratch(const ForwardParams& p) {
    std::int64_t floats = backward_scratch_with<FloatProducts<Isa>>(p);
    if constexpr (Isa::kPairs) floats = max64(floats, backward_scratch_with<typename Isa::PairProducts>(p));
    return floats;
}
template <class Isa>
void backward(const BackwardParams& params, const BackwardTask& task, float* scratch) {
    if constexpr (Isa::kPairs)
        if (multiplies_pairs<Isa>(params.forward) && params.forward.out_dtype == DType::kBFloat16)
            return backward_with<Isa, typename Isa::PairProducts>(params, task, scratch);
    backward_with<Isa, FloatProducts<Isa>>(params, task, scratch);
}

template <class Isa>
constexpr IsaKernel isa_kernel(const char* name, int rank, bool (*supported)()) {
    return {name,
            rank,
            tile_rows<Isa>(),
            supported,
            scratch_floats<Isa>,
            attend<Isa>,
            combine<Isa>,
            query_stride<Isa>,
            backward_scratch<Isa>,
            row_deltas<Isa>,
            backward<Isa>,
            statistics<Isa>,
            finish_query<Isa>,
            rotate<Isa>};
}

}  // namespace
}  // namespace flash_wmma::cpu
