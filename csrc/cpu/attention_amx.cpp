// The CPU kernel for AMX (bf16): bf16 inputs by tdpbf16ps, blocks of C in tile registers.
// x86-64: avx2 fma f16c avx512f avx512bw avx512dq avx512vl amx-tile amx-bf16
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/pairs.inl"

namespace flash_wmma::cpu {
namespace {

// The intrinsics take registers by number as text, not as a constant expression.
template <int kRegister>
void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kRegister>
void load_tile_rows(const void* rows, std::int64_t bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(bytes), "i"(kRegister) : "memory");
}
template <int kRegister>
void store_tile_rows(void* rows, std::int64_t bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(bytes), "i"(kRegister) : "memory");
}
template <int kC, int kA, int kB>
void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

/// Calls f<0>(), ..., f<n - 1>().
template <int kCount, int kFirst = 0, class F>
inline void each(const F& f) {
    if constexpr (kFirst < kCount) {
        f.template operator()<kFirst>();
        each<kCount, kFirst + 1>(f);
    }
}

struct TileRegisters {
    /// All registers hold 16 rows of 64 bytes while one of these exists.
    struct Scope {
        Scope() {
            struct alignas(64) {
                std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
                std::uint16_t row_bytes[16] = {};
                std::uint8_t rows[16] = {};
            } config;
            for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = kTile;
            asm volatile("ldtilecfg %0" ::"m"(config));
        }
        ~Scope() { asm volatile("tilerelease"); }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
    };

    /// C is in the first registers. One block of A and one of B follow, or with kN = 2 as many as C has rows and columns.
    template <int kM, int kN>
    static void multiply(const PairProduct& x) {
        constexpr bool kKeeps = kN == 2;  // a step's A and B, for all products of the step
        constexpr int kA = kM * kN, kB = kA + (kKeeps ? kM : 1);
        static_assert(kB + (kKeeps ? kN : 1) <= 8);
        const auto c = [&](int i) { return x.c + i / kN * x.c_down + i % kN * x.c_right; };
        each<kM * kN>([&]<int i>() {
            if (x.adds) load_tile_rows<i>(c(i), x.c_row * 4);
            else clear_tile<i>();
        });
        for (int step = 0; step < x.steps; ++step) {
            const std::uint16_t* const a = x.a + step * x.a_step;
            const std::uint32_t* const b = x.b + step * x.b_step;
            const auto load_a = [&]<int to>(int m, int part) {
                load_tile_rows<to>(a + m * x.a_down + part * x.a_part, x.a_row * 2);
            };
            const auto load_b = [&]<int to>(int n, int part) {
                load_tile_rows<to>(b + n * x.b_right + part * x.b_part, x.b_row * 4);
            };
            if constexpr (kKeeps) {
                for (int part = 0; part < x.parts; ++part) {
                    if (part == 0 || x.a_part != 0)
                        each<kM>([&]<int m>() { load_a.template operator()<kA + m>(m, part); });
                    if (part == 0 || x.b_part != 0)
                        each<kN>([&]<int n>() { load_b.template operator()<kB + n>(n, part); });
                    each<kM * kN>([&]<int i>() { multiply_tiles<i, kA + i / kN, kB + i % kN>(); });
                }
            } else {
                each<kM>([&]<int m>() {
                    for (int part = 0; part < x.parts; ++part) {
                        if (part == 0 || x.a_part != 0) load_a.template operator()<kA>(m, part);
                        each<kN>([&]<int n>() {
                            load_b.template operator()<kB>(n, part);
                            multiply_tiles<m * kN + n, kA, kB>();
                        });
                    }
                });
            }
        }
        each<kM * kN>([&]<int i>() { store_tile_rows<i>(c(i), x.c_row * 4); });
    }
};

/// Whether the processor has the instructions, and Linux lets this process have the registers.
bool supported() {
    constexpr int kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
}

constexpr IsaKernel kKernel = isa_kernel<WithPairs<TileRegisters>>("amx", 4, supported);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
