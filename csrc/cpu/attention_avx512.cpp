// The CPU kernel for AVX-512 (F, BW, DQ, VL).
// x86-64: avx2 fma f16c avx512f avx512bw avx512dq avx512vl
#include "cpu/avx512.inl"

namespace flash_wmma::cpu {
namespace {

constexpr IsaKernel kKernel = isa_kernel<Avx512>("avx512", 2, has_avx512);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
