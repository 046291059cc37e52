// The CPU kernel for AMX (bf16): bf16 inputs by tdpbf16ps, blocks of C in tile registers.
// x86-64: avx2 fma f16c avx512f avx512bw avx512dq avx512vl amx-tile amx-bf16
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/tile_products.inl"

namespace flash_wmma::cpu {
namespace {

/// The tile registers. The compiler's intrinsics take their numbers as text, not as a constant expression.
struct AmxRegisters {
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

    /// 16 rows of 64 bytes, `bytes` from one to the next.
    template <int kRegister>
    static void load(const void* rows, std::int64_t bytes) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(bytes), "i"(kRegister) : "memory");
    }
    template <int kRegister>
    static void store(void* rows, std::int64_t bytes) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(bytes), "i"(kRegister) : "memory");
    }
    template <int kRegister>
    static void clear() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
    }
    /// C += A B.
    template <int kC, int kA, int kB>
    static void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
    }
};

/// Whether the processor has the instructions, and Linux lets this process have the registers.
bool supported() {
    constexpr int kRequestState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool known = [] {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        const bool has =
            __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx >> 22 & 1 && edx >> 24 & 1;  // bf16, tile
        return has && has_avx512() && syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
    }();
    return known;
}

constexpr IsaKernel kKernel = isa_kernel<WithPairs<TileProducts<AmxRegisters>>>("amx", 4, supported);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
