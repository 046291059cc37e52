// The contract between the ops (csrc/torch) and the kernels: plain structs, no torch, no CUDA.
//
// Shapes, as a kernel sees them: q (B, Hq, Nq, d), k (B, Hk, Nk, d), v (B, Hk, Nk, d_v), o (B, Hq, Nq, d_v),
// lse (B, Hq, Nq). Query head h reads key/value head h / (Hq / Hk). The last dimension of q, k, v and o is contiguous,
// every row of q, k and v starts on a 16-byte boundary and d and d_v are multiples of 8: the ops pad or copy other
// tensors. Strides count elements. A pointer that a kernel does not need is null.
//
// The score of query i and key j, in flash-attn's order (its softcap comes before its ALiBi) and SDPA's (its mask is
// added to the scaled scores):
//     x = scale * q_i k_j
//     x = softcap * tanh(x / softcap)                 if softcap is not 0
//     x = x + bias[b][h][i][j]                        if there is an additive bias; false or -inf hides the key
//     x = x - slope[b][h] * |i + Nk - Nq - j|         if there are ALiBi slopes, whatever the band's alignment
//     x = -inf                                        if the band or the query's key range hides the key
// and lse is the logarithm of the sum of exp(x). With sinks the sum of head h has exp(sinks[h]) as well: a key that has
// this logit and no value, and that every query sees. With packed sequences i, j, Nq and Nk are those of the sequence.
//
// A key/value cache: k (pages, Hk, page_size, d), v (pages, Hk, page_size, d_v), Rows::batch the distance of pages; q,
// o and lse dense or packed. seqlen_k bounds the keys of a sequence. Struct Sequences says which rows are a sequence's.
//
// Packed sequences (varlen): q (total_q, Hq, d), k (total_k, Hk, d), v (total_k, Hk, d_v), o (total_q, Hq, d_v), lse
// (Hq, total_q). Rows::batch and lse_batch are 0, batch is the number of sequences, seqlen_q and seqlen_k bound their
// lengths, and struct Sequences says where they lie.
#pragma once

#include <cstdint>

namespace flash_wmma {

/// Element types of q, k, v, o and bias.
enum class DType : std::int32_t { kFloat32, kFloat16, kBFloat16, kBool };

/// A stream of the device the tensors live on (cudaStream_t); null on the CPU.
using Stream = void*;

/// A bound of the band that excludes nothing. Half of the largest value, so that bounds can be added.
inline constexpr std::int64_t kUnbounded = std::int64_t{1} << 61;

/// The longest Nq and Nk: row indices and their sums with band bounds fit an int. Element offsets are 64-bit.
inline constexpr std::int64_t kMaxSeqlen = std::int64_t{1} << 30;

/// A 4-d tensor with contiguous rows: element (b, h, i, c) is data[b * batch + h * head + i * row + c].
struct Rows {
    void* data;
    std::int64_t batch, head, row;
};

/// The visible band of keys: query i sees the keys j with
///     i + offset - left <= j <= i + offset + right,   offset = bottom_right ? Nk - Nq : 0.
/// No mask is {kUnbounded, kUnbounded}; causal is {kUnbounded, 0}; a sliding window bounds both sides.
struct Band {
    std::int64_t left, right;
    bool bottom_right;
};

/// Additive (float32 or the inputs' type) or boolean (true = visible) mask (B, Hq, Nq, Nk), broadcast where a stride is
/// 0; with packed sequences (B, Hq, seqlen_q, seqlen_k). Any strides, any alignment.
struct Bias {
    const void* data;
    DType dtype;
    std::int64_t batch, head, query, key;
};

/// A range of keys for each query, which sees the keys of the band from `data[at]` up to but not including
/// `data[at + end]`, at = b * batch + h * head + i * query. Any numbers: keys below 0 and from Nk on do not exist, and
/// a range that ends where it begins, or before, has no key. With packed sequences `batch` is 0, i counts the rows of
/// the packed q, and the keys are those of the sequence. Null: no ranges.
struct KeyRanges {
    const std::int32_t* data;
    std::int64_t batch, head, query, end;  ///< strides; 0 where the ranges are broadcast
};

/// Rows of a tile that shares one power-of-two scale when the inputs were converted. Every kernel's Bc divides this
/// number, or is twice as large.
inline constexpr int kScaleRows = 64;

/// Exponents of converted inputs: true value = stored value * 2^e, one e per kScaleRows rows of a head,
/// at [(b * H + h) * ceil(N / kScaleRows) + i / kScaleRows]; packed sequences: tile.cuh, q_scale_index. Null: the
/// inputs were not converted. A V tile of zeros has the exponent +inf: it adds nothing to O, whatever its weights are
/// multiplied by.
/// A kernel that converts its inputs does so in its workspace, before its own launch.
struct Exponents {
    const float *q, *k, *v;
};

/// More facts of converted inputs for backward, at the same indices as Exponents: dout's exponents, and log2 of an
/// upper bound on the Euclidean norms of the rows of dout and of v. A tile of zeros has -inf here and in backward's
/// Exponents.
struct BackwardExponents {
    const float *dout, *dout_norm, *v_norm;
};

/// Packed sequences (varlen), and sequences in a key/value cache. Null: one sequence of Nq and Nk per batch entry.
///
/// Only the device knows the contents of cu_seqlens. A kernel therefore clamps them and, whatever they are, reads and
/// writes nothing out of bounds: sequence b is the rows [begin, end) with begin = clamp(cu_seqlens[b], 0, total), end =
/// clamp(cu_seqlens[b + 1], begin, total), and only its first max(seqused_k[b], 0) keys are used. Rows behind the last
/// sequence get o = 0 and lse = -inf (the sink), like the rows of a sequence without keys. If cu_seqlens begin above 0
/// or decrease, or a sequence is longer than seqlen_q or seqlen_k, the values of the rows concerned are unspecified; a
/// bias is still read within its bounds.
///
/// In a cache (page_size > 0) sequence b has the rows [leftpad[b], seqused_k[b]), its key 0 first. cached_rows.h says
/// where they lie. Nothing that is not in use has influence: no kernel looks at other rows, or at the table's entries
/// behind the sequence's last row.
struct Sequences {
    const std::int32_t *cu_seqlens_q, *cu_seqlens_k;  ///< (B + 1), first rows of each sequence
    std::int64_t total_q, total_k;                    ///< rows of the packed q and k, at most kMaxSeqlen
    const std::int32_t* seqused_k;                    ///< (B), keys in use
    const std::int32_t* leftpad;                      ///< (B), of a cache: rows before the first key; null: none
    const std::int32_t* page_table;  ///< (B, n), of a cache: page of each run of page_size rows; null: b is page b
    std::int64_t page_table_stride;
    std::int32_t page_size, num_pages;  ///< rows of a page, and pages of the cache; page_size 0: no cache
};

/// Where the first weight of a call lies in the whole whose mask it has part of. The queries and keys before it are
/// multiples of 16, so that the eight weights of a call of Philox are those of the whole (dropout.h).
struct DropoutOrigin {
    std::int64_t entry, head;  ///< batch entry or sequence
    std::uint32_t query, key;
};

/// Dropout on the attention weights: O = (P M / (1 - p)) V with a mask M of zeros and ones (dropout.h), and l and lse
/// of all weights. The state is a tensor of two numbers, so that graphs can replay a call. Null: none.
struct Dropout {
    const std::uint64_t* rng_state;
    float probability;    ///< p, below 1
    std::uint32_t limit;  ///< of the numbers, and below it which are kept: dropout.h, make_dropout
    std::uint32_t turn;
    DropoutOrigin origin;
};

/// Partial results of a split over the keys, fp32: o (splits, B, Hq, Nq, d_v) unnormalised, lse (splits, B, Hq, Nq).
struct Partials {
    float *o, *lse;
    std::int32_t num_splits;  ///< with a cache: about so many parts; 1: none, 0: the kernel decides
};

struct ForwardParams {
    DType dtype;      ///< of q, k and v as the kernel reads them
    DType out_dtype;  ///< of o
    std::int64_t batch, heads_q, heads_k;
    std::int64_t seqlen_q, seqlen_k;  ///< Nq and Nk; the longest of packed sequences
    std::int32_t head_dim, head_dim_v;

    Rows q, k, v, o;
    float* lse;  ///< natural log; -inf, or the sink, for a row that sees no key. (B, Hq, Nq) or (Hq, total_q)
    std::int64_t lse_batch, lse_head;  ///< strides of lse; a head's rows are adjacent
    float scale;
    Band band;

    Exponents exponents;
    Sequences sequences;
    Bias bias;
    const float* alibi_slopes;  ///< (B, Hq) or (Hq) with alibi_batch_stride 0; a batch entry's slopes are adjacent
    std::int64_t alibi_batch_stride;
    const float* sinks;  ///< (Hq) logits of a key without value; null: none. Backward finds them in lse
    float softcap;       ///< 0: none
    Dropout dropout;
    /// With lse's strides; null: not asked for. Backward: of BackwardParams::statistics. Forward: given to a kernel
    /// that tells them (Kernel::tells), which then stores every row, -inf and 0 where it sees no key.
    float *entropy, *row_max;
    Partials partials;
    bool batch_invariant;  ///< tiles and splits from (Nq, Nk, d, device) alone
    /// o and lse hold attention over other keys, and become that over all:
    ///     lse' = log(exp(lse) + exp(its own)),   o' = o exp(lse - lse') + its own exp(its own lse - lse').
    /// A row without another key has lse -inf, and what o holds there is not read. Only for a kernel that merges
    /// (Kernel::merges).
    bool merges;
    void* workspace;  ///< KernelInfo::workspace_bytes, 256-byte aligned, uninitialised
    KeyRanges key_ranges;
};

/// Forward with tangents: out and lse, and by what they move if q, k and v move by dq, dk and dv. With x and
/// P = exp(x - lse) as above
///     T = scale * (dQ K^T + Q dK^T)    dlse_i = sum_j P T    dO = P dV + (P * (T - dlse_i)) V
/// Where the band hides the key, T counts as 0. A row without a visible key gets 0. The sinks do not move, but have
/// their share of lse. Dense, without changes of the scores.
struct TangentParams {
    ForwardParams forward;  ///< as the ops give them to a forward kernel; its workspace is null
    /// In the shapes and the type of q, k, v, readable like them. Null data: the tensor does not move. None is null, or
    /// all but one of dq and dk.
    Rows dq, dk, dv;
    Rows dout;        ///< in the shape and the type of o
    float* dlse;      ///< with lse's strides
    void* workspace;  ///< TangentKernel::workspace_bytes, 256-byte aligned, uninitialised
};

/// The gradient of an additive bias, fp32, one element per element of the bias: a stride is 0 where the bias is
/// broadcast.
struct BiasGradient {
    float* data;
    std::int64_t batch, head, query, key;
};

/// What is told of the weights P = exp(x - lse), without dropout. If `wanted`, a kernel of backward computes this in
/// place of gradients, from q, k and lse alone: the row's largest score, ForwardParams::row_max; -sum_j P ln P,
/// ForwardParams::entropy; sum_j P key_weights; sum_i P. The ops have filled all of them with what they are where no
/// query sees a key: -inf, 0, 0, 0.
struct Statistics {
    bool wanted;
    const float* key_weights;  ///< with row_sum alone; a number for each key, as BackwardParams::dcolumn_sum
    float* row_sum;            ///< with lse's strides; null: not asked for
    float* column_sum;         ///< a number for each key; null: not asked for
};

/// What a launch does of several with the same queries and different keys, whose dq is one sum: kBegin finds what is to
/// be known of the queries, each kAdd computes the gradients of its keys and adds to the sum, kEnd brings the sum to
/// dq.
enum class BackwardStage { kAll, kBegin, kAdd, kEnd };

/// The queries of such launches.
struct SharedQueries {
    BackwardStage stage;  ///< kAll: there are no others
    void* memory;         ///< Kernel::shared_bytes, 256-byte aligned: kBegin writes it all; L and D, and an fp32 dq
    std::int64_t first;   ///< kAdd: of its queries the first, a multiple of 64, among those of kBegin
    std::int64_t rows;    ///< kAdd: how many queries kBegin was given
};

/// The gradients of forward (FlashAttention-2, algorithm 2). With x and lse as above and x' the score before bias and
/// ALiBi, a kernel recomputes the weights and writes
///     P = exp(x - lse), and 0 where the band, the range or the bias hides the key, or lse is -inf
///     dV = P^T dO      dP = dO V^T      (with dropout: dV = (P M / (1 - p))^T dO, dP = M / (1 - p) dO V^T)
///     delta_i = o_i dO_i - dlse_i      dS = P * (dP - delta)
///     dbias += dS      dS' = dS * (1 - (x' / softcap)^2)      dQ = scale * dS' K      dK = scale * dS'^T Q
/// dk and dv have Hk heads: each sums over the Hq / Hk query heads that read it. Rows without a visible key get 0.
/// The gradient of sinks[h] is the sum of -exp(sinks[h] - lse) * delta, which no kernel computes (_autograd.py).
/// With the gradients of the entropy and of the column sums, dS = P * (dP - dentropy_i ln P + dcolumn_sum_j - delta);
/// what they add to delta is in dlse. The gradient of slope[b][h] is the sum of -dS * |i + Nk - Nq - j|.
///
/// Dense: dq, dk and dv are uninitialised, and a kernel writes every row. Packed sequences: the ops have zeroed them,
/// and a kernel writes only the rows of the sequences (in dk and dv: of the keys in use).
struct BackwardParams {
    /// The params of forward, as the ops give them to a forward kernel, except that o and lse are inputs. Rows of o are
    /// aligned like those of dout. exponents, partials and workspace are null.
    ForwardParams forward;
    BackwardExponents exponents;  ///< null, unless a kernel has converted its inputs
    Rows dout;                    ///< (B, Hq, Nq, d_v) in forward.out_dtype, readable like q, k and v
    Rows dq, dk, dv;              ///< in the shapes of q, k, v and in forward.out_dtype; dense, 16-byte aligned
    const float* dlse;            ///< with lse's shape and strides, or null: zeros
    BiasGradient dbias;           ///< zeroed by the ops; null data: not asked for
    bool deterministic;           ///< bitwise the same from run to run: no order of a sum's additions is left to chance
    bool exact;                   ///< only a kernel that multiplies forward.dtype unconverted may run
    void* workspace;  ///< BackwardKernelInfo::workspace_bytes, 256-byte aligned, uninitialised: delta, an fp32 dq, ...
    const float* dentropy;             ///< with lse's strides, or null: zeros
    const float* dcolumn_sum;          ///< a number for each key, or null: zeros
    float* dslopes;                    ///< for each key the sum over queries; zeroed by the ops; null: not asked for
    std::int64_t key_batch, key_head;  ///< strides of numbers for each key, (B, Hq, Nk) or packed (Hq, total_k), fp32
    Statistics statistics;
    /// What a stage neither reads nor writes may be null: in kBegin q, k, v, dq, dk, dv; in kAdd o, lse, dlse, dq; in
    /// kEnd all but dq.
    SharedQueries shared;
};

}  // namespace flash_wmma
