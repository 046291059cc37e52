// wmma_v3 as on hardware whose fragments are laid out otherwise than known: everything through shared memory.
#include <entry.h>

#include "forward/wmma/wmma_v3.cuh"

namespace {

using namespace flash_wmma;

template <Problems kProblems>
void attend(const ForwardParams& p) {
    using namespace wmma_v3;
    constexpr TileShape kTile = {.d = 64,
                                 .warps = 2,
                                 .row_tiles = 2,
                                 .keys = 16,
                                 .q_in_registers = kProblems == kPlain,
                                 .blocks_per_sm = 1,
                                 .handover = Handover::kShared};
    shape<Tile<half, kTile>, kProblems>(75).launch(p, DeviceFacts{}, nullptr);
}

/// Contiguous (1, H, N, d) of half and lse (1, H, N); d is 64.
ForwardParams params(half* q, half* k, half* v, half* o, float* lse, int heads_q, int heads_k, int nq, int nk) {
    ForwardParams p{};
    p.dtype = p.out_dtype = DType::kFloat16;
    p.batch = 1, p.heads_q = heads_q, p.heads_k = heads_k, p.seqlen_q = nq, p.seqlen_k = nk;
    p.head_dim = p.head_dim_v = 64;
    p.q = {q, 0, nq * 64, 64}, p.k = {k, 0, nk * 64, 64}, p.v = {v, 0, nk * 64, 64}, p.o = {o, 0, nq * 64, 64};
    p.lse = lse;
    p.scale = 0.125f;
    p.band = {kUnbounded, 0, true};
    return p;
}

void causal(half* q, half* k, half* v, half* o, float* lse, int heads_q, int heads_k, int nq, int nk) {
    attend<wmma_v3::kPlain>(params(q, k, v, o, lse, heads_q, heads_k, nq, nk));
}

/// Nq and Nk rows in all, `batch` sequences of at most longest_q and longest_k; bias (H, longest_q, longest_k).
void general(half* q, half* k, half* v, half* o, float* lse, int heads_q, int heads_k, int nq, int nk,
             std::int32_t* cu_seqlens_q, std::int32_t* cu_seqlens_k, int batch, int longest_q, int longest_k,
             half* bias, float* slopes, float softcap) {
    ForwardParams p = params(q, k, v, o, lse, heads_q, heads_k, nq, nk);
    p.batch = batch, p.seqlen_q = longest_q, p.seqlen_k = longest_k;
    p.sequences.cu_seqlens_q = cu_seqlens_q, p.sequences.total_q = nq;
    p.sequences.cu_seqlens_k = cu_seqlens_k, p.sequences.total_k = nk;
    p.bias = {bias, DType::kFloat16, 0, longest_q * longest_k, longest_k, 1};
    p.alibi_slopes = slopes;
    p.softcap = softcap;
    attend<Problems::kUndropped>(p);
}

/// Causal, with that probability; `state` is (2,) of int64.
void dropped(half* q, half* k, half* v, half* o, float* lse, int heads_q, int heads_k, int nq, int nk,
             const void* state, float probability) {
    ForwardParams p = params(q, k, v, o, lse, heads_q, heads_k, nq, nk);
    p.dropout = make_dropout(static_cast<const std::uint64_t*>(state), probability);
    attend<Problems::kAny>(p);
}

const Entry kCausal("causal", causal);
const Entry kGeneral("general", general);
const Entry kDropped("dropped", dropped);

}  // namespace
