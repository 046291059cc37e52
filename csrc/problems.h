// What a compiled instance is for, and what a problem asks of one.
#pragma once

#include "attention.h"

namespace flash_wmma {

/// What an instance takes beyond plain attention: a set. An instance that takes less keeps less in registers.
enum class Problems : unsigned {
    kPlain = 0,         ///< dense q, k and v, with any band: a block's bounds are the same in every thread
    kPacked = 1,        ///< packed sequences
    kModified = 2,      ///< a bias, ALiBi or a softcap (ScoreMod), or key ranges (KeyMask)
    kConverted = 4,     ///< inputs with exponents (device/convert.h)
    kCached = 8,        ///< a key/value cache, with dense or packed queries
    kChanged = 16,      ///< wgmma_sm90 only, whose kModified is a softcap alone: the rest of kModified
    kMasked = 32,       ///< of kChanged boolean masks alone
    kBiased = 64,       ///< of kChanged additive biases of q's type alone, which the copy engine can bring
    kSloped = 128,      ///< of kChanged ALiBi alone
    kRanged = 256,      ///< of kChanged key ranges alone
    kCapped = 1024,     ///< of kModified a softcap alone, without packed sequences
    kDropped = 512,     ///< dropout. An instance that takes it, and not kModified, is for problems with dropout alone
    kMaxima = 2048,     ///< wgmma_sm90 only, of plain problems: the rows' largest scores besides (RowStatistics)
    kEntropies = 4096,  ///< likewise: the rows' entropies
    kMerged = 16384,    ///< likewise: O and LSE are merged with those of other keys
    kTerms = 8192,      ///< backward: the gradients of statistics (WeightTerms) and of ALiBi's slopes besides
    kMaximaEntropies = kMaxima | kEntropies,
    kPackedDropped = kPacked | kDropped,
    kGeneral = kPackedDropped | kModified,
    kGeneralChanged = kGeneral | kChanged,
    kGeneralCached = kGeneral | kCached,
    kConvertedChanged = kGeneralChanged | kConverted,
    kAny = kGeneral | kConverted,  ///< but no cache
    kGeneralTerms = kGeneral | kTerms,
    kAnyTerms = kAny | kTerms,
    kUndropped = kPacked | kModified | kConverted,  ///< of kAny what has no dropout (nvcc wants a name for each set)
    kAll = kAny | kCached,
};

constexpr Problems operator|(Problems a, Problems b) {
    return static_cast<Problems>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
/// Whether `set` has all that is in `part`.
constexpr bool includes(Problems set, Problems part) {
    return (static_cast<unsigned>(part) & ~static_cast<unsigned>(set)) == 0;
}

/// What p asks of an instance. `converted`: the instance reads p's inputs after a conversion, which brings the rows of
/// a cache together.
inline Problems problems_of(const ForwardParams& p, bool converted) {
    const Sequences& s = p.sequences;
    Problems problems = converted ? Problems::kConverted : Problems::kPlain;
    if (s.cu_seqlens_q || s.cu_seqlens_k || s.seqused_k) problems = problems | Problems::kPacked;
    if (s.page_size && !converted) problems = problems | Problems::kCached;
    if (p.bias.data || p.alibi_slopes || p.softcap != 0.f || p.key_ranges.data)
        problems = problems | Problems::kModified;
    if (p.dropout.rng_state) problems = problems | Problems::kDropped;
    return problems;
}
inline Problems problems_of(const BackwardParams& p, bool converted) {
    const Problems problems = problems_of(p.forward, converted);
    return p.dentropy || p.dcolumn_sum || p.dslopes ? problems | Problems::kTerms : problems;
}

}  // namespace flash_wmma
