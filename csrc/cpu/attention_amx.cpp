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

    /// C is in registers 0 to 5, a block of A in 6, one of B in 7.
    template <int kM, int kN>
    static void multiply(const PairProduct& x) {
        static_assert(kM * kN <= 6);
        constexpr int kA = 6, kB = 7;
        const auto c = [&](int i) { return x.c + i / kN * x.c_down + i % kN * x.c_right; };
        each<kM * kN>([&]<int kC>() {
            if (x.adds) load_tile_rows<kC>(c(kC), x.c_row * 4);
            else clear_tile<kC>();
        });
        for (int part = 0; part < x.parts; ++part)
            for (int step = 0; step < x.steps; ++step) {
                const std::uint16_t* a = x.a + part * x.a_part + step * x.a_step;
                const std::uint32_t* b = x.b + part * x.b_part + step * x.b_step;
                each<kM>([&]<int m>() {
                    load_tile_rows<kA>(a + m * x.a_down, x.a_row * 2);
                    each<kN>([&]<int n>() {
                        load_tile_rows<kB>(b + n * x.b_right, x.b_row * 4);
                        multiply_tiles<m * kN + n, kA, kB>();
                    });
                });
            }
        each<kM * kN>([&]<int kC>() { store_tile_rows<kC>(c(kC), x.c_row * 4); });
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
