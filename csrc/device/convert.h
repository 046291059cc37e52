// Conversion of fp32 (and, where the tensor cores lack it, bf16) inputs to half with power-of-two scales, so that no
// range is lost: every kScaleRows rows of a head share one exponent e, stored value = true value * 2^-e. The kernels
// take the exponents back (attention.h, Exponents).
#pragma once

#include <cstdint>

#include "attention.h"

namespace flash_wmma {

/// Bytes of workspace for the converted q, k and v (backward: and dout) of `params` and their exponents.
std::int64_t converted_bytes(const ForwardParams& params);
std::int64_t converted_bytes(const BackwardParams& params);

/// Converts q, k and v, fp32 or bf16, into params.workspace, asynchronously, in one launch. Returns the params of the
/// half problem: dtype, q, k, v (contiguous) and exponents replaced, everything else as it was. Of a key/value cache
/// the rows in use are brought together: the half problem has dense k and v with seqused_k.
ForwardParams convert_to_half(const ForwardParams& params, Stream stream);

/// convert_to_half on sm_90 as a programmatic launch, without a cache: the grid starts and ends beside its neighbours,
/// which wait for each other by themselves. Replaces the workspace too (by the rest of it).
ForwardParams convert_to_half_chained(const ForwardParams& params, Stream stream);

/// convert_to_half for q, k, v and dout. Replaces forward's dtype, q, k, v and exponents, dout and its exponents, and
/// the workspace (by the rest of it). o and the gradients' type stay.
BackwardParams convert_to_half(const BackwardParams& params, Stream stream);

}  // namespace flash_wmma
