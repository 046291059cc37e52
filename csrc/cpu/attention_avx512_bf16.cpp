// The CPU kernel for AVX-512 with BF16: bf16 inputs by vdpbf16ps, a block of C in registers.
// x86-64: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512bf16
#include "cpu/pairs.inl"

namespace flash_wmma::cpu {
namespace {

struct Vectors {
    struct Scope {};
    static constexpr int kWidest = 3;

    template <int kM, int kN>
    static void multiply(const PairProduct& x) {
        constexpr int kRows = 8;  // by kN vectors: up to 24 of 32 registers
        for (int block = 0; block < kM; ++block)
            for (int row = 0; row < kTile; row += kRows) {
                float* c = x.c_block(block, 0) + row * x.c_row;
                __m512 sum[kRows][kN];
                for (int r = 0; r < kRows; ++r)
                    for (int n = 0; n < kN; ++n)
                        sum[r][n] = x.adds ? _mm512_loadu_ps(c + r * x.c_row + n * kTile) : _mm512_setzero_ps();
                for (int part = 0; part < x.parts; ++part)
                    for (int step = 0; step < x.steps; ++step)
                        multiply_step<kRows, kN>(x, x.a_block(block, step, part) + row * x.a_row,
                                                 x.b_block(0, step, part), sum);
                for (int r = 0; r < kRows; ++r)
                    for (int n = 0; n < kN; ++n) _mm512_storeu_ps(c + r * x.c_row + n * kTile, sum[r][n]);
            }
    }

  private:
    template <int kRows, int kN>
    static void multiply_step(const PairProduct& x, const std::uint16_t* a, const std::uint32_t* b,
                              __m512 (&sum)[kRows][kN]) {
        for (int pair = 0; pair < kTileDepth / 2; ++pair, a += 2, b += x.b_row) {
            __m512i right[kN];
            for (int n = 0; n < kN; ++n) right[n] = load_words(b + n * kTile);
            for (int r = 0; r < kRows; ++r) {
                std::int32_t both;
                __builtin_memcpy(&both, a + r * x.a_row, sizeof both);
                const __m512i left = _mm512_set1_epi32(both);
                for (int n = 0; n < kN; ++n)
                    sum[r][n] = _mm512_dpbf16_ps(sum[r][n], reinterpret_cast<__m512bh>(left),
                                                 reinterpret_cast<__m512bh>(right[n]));
            }
        }
    }
};

bool supported() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

/// On Zen 4 forward and backward are 1.1 to 1.2 times as fast as by FMAs. On a Xeon with AMX they
/// take 2.4 to 2.7 times as long: there this unit runs by name alone.
int rank() {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") ? 3 : -1;
}

const IsaKernel kKernel = isa_kernel<WithPairs<Vectors>>("avx512_bf16", rank(), supported);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
