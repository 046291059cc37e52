// The instructions of csrc/device/ptx_sm90.cuh, in the emulator: the same functions, with the layouts of the hardware.
#pragma once

#include <launch.h>
#include <ptx.cuh>

namespace flash_wmma::emulator {

struct StmatrixArgument {
    void* row;
    const std::uint32_t* r;
};
EMULATOR_UNSEEN inline void stmatrix(Arguments arguments, LaneMask) {
    const void* row[32];
    for (int l = 0; l < 32; ++l) {
        row[l] = static_cast<StmatrixArgument*>(arguments[l])->row;
        if (reinterpret_cast<std::uintptr_t>(row[l]) % 16)
            fail_collective("the address of a row is not 16-byte aligned", l);
    }
    warp_access(Access::kStmatrix, row, (LaneMask{1} << 32) - 1, 16);
    for (int m = 0; m < 4; ++m)
        for (int l = 0; l < 32; ++l) {
            auto* to = static_cast<std::uint32_t*>(static_cast<StmatrixArgument*>(arguments[8 * m + l / 4])->row);
            to[l % 4] = static_cast<StmatrixArgument*>(arguments[l])->r[m];
        }
}
inline constexpr Collective kStmatrix{"stmatrix", Instruction::kStoreShared, 0, 32, false, stmatrix};

}  // namespace flash_wmma::emulator

namespace flash_wmma::ptx {

// ---- Barriers -------------------------------------------------------------------------------------------------------

struct alignas(8) Barrier {
    std::uint64_t state;
};

EMULATOR_BRICK inline void barrier_init(Barrier* barrier, unsigned arrivals, EMULATOR_SITE) {
    emulator::transaction_barrier_init(barrier, arrivals, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void barrier_init_fence() { emulator::transaction_barrier_init_fence(); }
EMULATOR_BRICK inline void barrier_arrive(Barrier* barrier, EMULATOR_SITE) {
    emulator::transaction_barrier_arrive(barrier, 0, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void barrier_arrive_expect(Barrier* barrier, unsigned bytes, EMULATOR_SITE) {
    emulator::transaction_barrier_arrive(barrier, bytes, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void barrier_wait(Barrier* barrier, unsigned parity, EMULATOR_SITE) {
    emulator::transaction_barrier_wait(barrier, parity, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void stmatrix_x4(void* shared_row, const std::uint32_t (&r)[4], EMULATOR_SITE) {
    emulator::StmatrixArgument argument{shared_row, r};
    emulator::collective(emulator::kStmatrix, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void fence_proxy_async() { emulator::fence_proxy_async(); }
/// One grid runs at a time, and no copy reads what the same grid writes to global memory.
EMULATOR_INLINE void fence_proxy_async_global() {}

// ---- Tensor copies --------------------------------------------------------------------------------------------------

EMULATOR_INLINE void prefetch(const TensorMap*) {}
EMULATOR_INLINE void tensor_prefetch(const TensorMap*, const int (&)[4]) {}

EMULATOR_BRICK inline void tensor_load(void* shared, const TensorMap* map, Barrier* barrier,
                                       const int (&coordinates)[4], EMULATOR_SITE) {
    emulator::tensor_load(shared, *map, barrier, coordinates, site, EMULATOR_PC);
}

EMULATOR_BRICK inline void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier,
                                     EMULATOR_SITE) {
    emulator::bulk_load(shared, global, bytes, barrier, site, EMULATOR_PC);
}

EMULATOR_BRICK inline void tensor_store(const TensorMap* map, const void* shared, const int (&coordinates)[4],
                                        EMULATOR_SITE) {
    emulator::tensor_store(*map, shared, coordinates, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void store_commit() { emulator::store_commit(); }
template <int Pending>
EMULATOR_BRICK void store_wait_read() {
    static_assert(Pending >= 0);
    emulator::store_wait_read(Pending);
}

// ---- Clusters -------------------------------------------------------------------------------------------------------

EMULATOR_INLINE unsigned cluster_rank() { return emulator::cluster_rank(); }
EMULATOR_BRICK inline void cluster_sync(EMULATOR_SITE) { emulator::cluster_sync(site, EMULATOR_PC); }
EMULATOR_BRICK inline void barrier_arrive_at(Barrier* barrier, unsigned rank, EMULATOR_SITE) {
    emulator::transaction_barrier_arrive_at(barrier, rank, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void bulk_send(void* to, const void* from, unsigned bytes, Barrier* barrier, unsigned rank,
                                     EMULATOR_SITE) {
    emulator::bulk_send(to, from, bytes, barrier, rank, site, EMULATOR_PC);
}

// ---- Warpgroup products ---------------------------------------------------------------------------------------------

enum class Major { K, N, K8 };

/// Holds the bits of the hardware's matrix descriptor. The block's shared memory begins at address 0.
template <Major kMajor>
class SharedMatrix {
  public:
    EMULATOR_BRICK explicit SharedMatrix(const void* first, int distance = 16)
        : bits_(emulator::matrix_start(first, EMULATOR_PC) |
                (kMajor == Major::K8 ? static_cast<std::uint64_t>(distance >> 4) << 32
                                     : static_cast<std::uint64_t>(distance >> 4) << 16 |
                                           std::uint64_t{kGroupBytes >> 4} << 32 | std::uint64_t{1} << 62)) {}

    EMULATOR_INLINE SharedMatrix operator+(int bytes) const {
        SharedMatrix moved = *this;
        moved.bits_ += static_cast<std::uint64_t>(bytes >> 4);
        return moved;
    }

    EMULATOR_INLINE std::uint64_t bits() const { return bits_; }

  private:
    static constexpr int kGroupBytes = 1024;  // 8 rows of a panel
    std::uint64_t bits_;
};

EMULATOR_BRICK inline void wgmma_fence(EMULATOR_SITE) { emulator::wgmma_fence(site, EMULATOR_PC); }
EMULATOR_BRICK inline void wgmma_commit(EMULATOR_SITE) { emulator::wgmma_commit(site, EMULATOR_PC); }
template <int Pending>
EMULATOR_BRICK void wgmma_wait(EMULATOR_SITE) {
    emulator::wgmma_wait(Pending, site, EMULATOR_PC);
}

template <class T, int N, Major kMajorA, Major kMajor>
EMULATOR_BRICK void wgmma(float (&d)[N / 2], SharedMatrix<kMajorA> a, SharedMatrix<kMajor> b, bool accumulate,
                          EMULATOR_SITE) {
    static_assert(N % 8 == 0 && N <= 256);
    emulator::WarpgroupProduct product{d,
                                       nullptr,
                                       a.bits(),
                                       b.bits(),
                                       N,
                                       kMajorA == Major::N,
                                       kMajor == Major::N,
                                       accumulate,
                                       std::is_same_v<T, __nv_bfloat16>};
    emulator::wgmma(product, site, EMULATOR_PC);
}
template <class T, int N, Major kMajor>
EMULATOR_BRICK void wgmma(float (&d)[N / 2], const std::uint32_t (&a)[4], SharedMatrix<kMajor> b, bool accumulate,
                          EMULATOR_SITE) {
    static_assert(N % 8 == 0 && N <= 256);
    emulator::WarpgroupProduct product{
        d, a, 0, b.bits(), N, false, kMajor == Major::N, accumulate, std::is_same_v<T, __nv_bfloat16>};
    emulator::wgmma(product, site, EMULATOR_PC);
}

// ---- Order among blocks ---------------------------------------------------------------------------------------------

EMULATOR_BRICK inline unsigned load_acquire(const unsigned* p) { return emulator::load_acquire(p, EMULATOR_PC); }
EMULATOR_BRICK inline void add_release(unsigned* p, unsigned x) { emulator::add_release(p, x, EMULATOR_PC); }

// ---- Registers and launches -----------------------------------------------------------------------------------------

template <int Count>
EMULATOR_BRICK void release_registers(EMULATOR_SITE) {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    emulator::set_registers(Count, site, EMULATOR_PC);
}
template <int Count>
EMULATOR_BRICK void acquire_registers(EMULATOR_SITE) {
    static_assert(Count >= 24 && Count <= 256 && Count % 8 == 0);
    emulator::set_registers(Count, site, EMULATOR_PC);
}

EMULATOR_INLINE void wait_for_previous_grids() { emulator::wait_for_previous_grids(); }
/// One grid runs at a time.
EMULATOR_INLINE void let_next_grid_start() {}

}  // namespace flash_wmma::ptx
