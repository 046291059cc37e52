// One function per PTX instruction that Hopper added (sm_90a), on CUDA: transaction barriers, tensor copies (TMA),
// clusters of blocks and warpgroup products (wgmma). Kernel files include <ptx_sm90.cuh>; the emulator has its own
// definition of each. Operands are pointers and values, never raw shared-memory addresses; a wait includes its loop.
#pragma once

#include <launch.h>
#include <ptx.cuh>

#include <cstdint>
#include <type_traits>

namespace flash_wmma::ptx {

namespace detail {
__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}
}  // namespace detail

// ---- Barriers -------------------------------------------------------------------------------------------------------

/// An mbarrier in shared memory. A phase completes when all its arrivals and the bytes that they announced have come.
/// The next phase then begins, with the same number of arrivals. Phases have the parities 0, 1, 0, ...
struct alignas(8) Barrier {
    std::uint64_t state;
};

/// Prepares a barrier for phases of `arrivals` arrivals (mbarrier.init). One thread; the others see it after
/// barrier_init_fence and a barrier of the block.
__device__ __forceinline__ void barrier_init(Barrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
/// Makes this thread's barrier_inits visible to tensor copies (fence.mbarrier_init).
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives without waiting; this thread's earlier reads and writes are done for threads that wait (mbarrier.arrive).
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(barrier)) : "memory");
}
/// The same, and the phase waits for `bytes` more bytes of tensor copies (mbarrier.arrive.expect_tx).
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/// Waits until the phase of this parity has completed: returns at once if the phase under way has the other parity, as
/// at parity 1 on a fresh barrier (mbarrier.try_wait.parity).
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(detail::shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---- Writes to shared memory ----------------------------------------------------------------------------------------

/// Stores four 8x8 matrices of 16-bit elements, r[i] as ldmatrix_x4 would get it; lane l names row l % 8 of matrix
/// l / 8, 16-byte aligned (stmatrix.x4).
__device__ __forceinline__ void stmatrix_x4(void* shared_row, const std::uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(detail::shared_address(shared_row)),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/// Makes this thread's earlier writes to shared memory visible to wgmma and tensor copies that are ordered after the
/// fence (fence.proxy.async).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The same of global memory: what this thread wrote there, or knows that others wrote, comes before what copies read
/// that it then asks for.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Tensor copies --------------------------------------------------------------------------------------------------

/// Fetches a tensor map that is a kernel parameter ahead of its use (prefetch.tensormap).
__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box whose first element has these coordinates (innermost first) to shared memory, 1024-byte aligned, in
/// the map's swizzle, with zeros outside the tensor. All the box's bytes count for the barrier's phase. One thread
/// (cp.async.bulk.tensor.4d).
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap* map, Barrier* barrier,
                                            const int (&coordinates)[4]) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(detail::shared_address(shared)),
        "l"(map), "r"(detail::shared_address(barrier)), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]),
        "r"(coordinates[3])
        : "memory");
}

/// Asks the L2 cache for what tensor_load would copy. One thread (cp.async.bulk.prefetch.tensor.4d).
__device__ __forceinline__ void tensor_prefetch(const TensorMap* map, const int (&coordinates)[4]) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
                 : "memory");
}

/// Copies `bytes` adjacent bytes, a multiple of 16, to shared memory; both addresses are 16-byte aligned. They count
/// for the barrier's phase. One thread (cp.async.bulk).
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     detail::shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(detail::shared_address(barrier))
                 : "memory");
}

/// Copies the box from shared memory (in the map's swizzle, aligned as tensor_load's target) to where its first element
/// has these coordinates, none of them negative; what lies outside the tensor is not written. One thread; reads shared
/// memory, and writes, asynchronously (cp.async.bulk.tensor.4d, bulk_group).
__device__ __forceinline__ void tensor_store(const TensorMap* map, const void* shared, const int (&coordinates)[4]) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(detail::shared_address(shared)), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]),
                 "r"(coordinates[3])
                 : "memory");
}
/// This thread's stores so far become a group (cp.async.bulk.commit_group).
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the newest `Pending` groups of this thread have read shared memory
/// (cp.async.bulk.wait_group.read). A thread waits for all its stores before it ends.
template <int Pending>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// ---- Clusters -------------------------------------------------------------------------------------------------------

/// This block's number in its cluster (%cluster_ctarank).
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/// Waits until every thread of every block of the cluster is here: what they did before is done for what comes behind,
/// barrier_init among it (barrier.cluster.arrive.release, .wait.acquire).
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

namespace detail {
/// Where in the shared memory of block `rank` of the cluster lies what lies here in this block's (mapa).
__device__ __forceinline__ std::uint32_t shared_address_in(const void* shared, unsigned rank) {
    std::uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
    return there;
}
}  // namespace detail

/// Arrives at the barrier of block `rank` that lies where `barrier` lies in this block, in a launch with clusters: who
/// waits there may overwrite what products that this thread has waited for have read, and loads whose values it has
/// used. The arrival may overtake a load that was merely issued. Writes are not ordered: a release in the cluster waits
/// for all of them, those to global memory too. That block has not ended (mapa, mbarrier.arrive).
__device__ __forceinline__ void barrier_arrive_at(Barrier* barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(detail::shared_address_in(barrier, rank))
                 : "memory");
}
/// Copies `bytes` adjacent bytes, a multiple of 16, of this block's shared memory to where `to` lies in block `rank`,
/// which has not ended; both addresses are 16-byte aligned. They count for the phase of that block's barrier that lies
/// where `barrier` lies in this block. One thread; reads asynchronously, and has read when that phase is over
/// (cp.async.bulk.shared::cluster.shared::cta).
__device__ __forceinline__ void bulk_send(void* to, const void* from, unsigned bytes, Barrier* barrier, unsigned rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     detail::shared_address_in(to, rank)),
                 "r"(detail::shared_address(from)), "r"(bytes), "r"(detail::shared_address_in(barrier, rank))
                 : "memory");
}

// ---- Warpgroup products ---------------------------------------------------------------------------------------------

/// How a matrix of 16-bit elements lies in shared memory: as panels of 128-byte rows (64 elements), 1024-byte aligned,
/// which the 128-byte swizzle permutes: byte b of a panel lies at b ^ (b / 128 % 8) * 16, as a tensor copy writes it.
///     K: a panel's rows are the matrix's rows or columns (m or n), and run along k. One panel.
///     N: a panel's rows are k, and run along n (or m); panels of 64 n follow each other at a distance.
/// Or as wgmma's B without panels and swizzle:
///     K8: rows of 8 elements along k; groups of 8 adjacent rows follow each other at a distance. A product's k 8 to 15
///     read the same elements as its k 0 to 7.
enum class Major { K, N, K8 };

/// A matrix in shared memory as wgmma's operand (a matrix descriptor).
template <Major kMajor>
class SharedMatrix {
  public:
    /// From the first row of a panel, or of a group, on. `distance`: between panels (Major::N) or groups (Major::K8),
    /// in bytes.
    __device__ __forceinline__ explicit SharedMatrix(const void* first, int distance = 16)
        : low_((detail::shared_address(first) & kAddress) >> 4 |
               (kMajor == Major::K8 ? 0 : static_cast<unsigned>(distance) >> 4 << 16)),
          high_(kMajor == Major::K8 ? static_cast<unsigned>(distance) >> 4 : kGroupBytes >> 4 | kSwizzle128 << 30) {}

    /// The matrix that begins `bytes` further on, counted before the swizzle: 32 bytes (below 128 in all) for every 16
    /// k along the rows (Major::K), 1024 for every 8 rows.
    __device__ __forceinline__ SharedMatrix operator+(int bytes) const {
        SharedMatrix moved = *this;
        moved.low_ += static_cast<unsigned>(bytes) >> 4;
        return moved;
    }

    __device__ __forceinline__ std::uint64_t bits() const { return low_ | std::uint64_t{high_} << 32; }

  private:
    static constexpr unsigned kGroupBytes = 1024, kSwizzle128 = 1;  // of 8 rows of a panel
    static constexpr unsigned kAddress = 0x3ffff;  // above these bits an address names the block of the cluster
    std::uint32_t low_, high_;
};

/// Orders this warpgroup's accesses to registers, and its shared memory reads, before its next products that use them
/// (wgmma.fence). Needed before the first product, and after other instructions write registers of a product.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes the group of the products since the last commit (wgmma.commit_group).
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most `Pending` of the newest groups are still under way (wgmma.wait_group). Until a product's group
/// has completed, its accumulators and the registers of its A must not be touched.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// wgmma<T, N>(d, a, b, accumulate): D = A B + (accumulate ? D : 0), asynchronously, of half or bf16
// (wgmma.mma_async.m64nNk16): A 64x16 from shared memory (either way) or registers (rows along k), B 16xN. All four
// warps of a warpgroup; warp w owns rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4 a lane holds
//     d[4 j + i]: D[16 w + g + 8 (i / 2)][8 j + 2 t + i % 2]
// and, where A comes from registers, in pairs along k
//     a[i]: A[16 w + g + 8 (i % 2)][8 (i / 2) + 2 t, + 1].
// The operands of an asm statement are written out one by one, which no template can do: macros count them in tens.
#define FLASH_WMMA_TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define FLASH_WMMA_TEXT_20 FLASH_WMMA_TEN() ", " FLASH_WMMA_TEN(1)
#define FLASH_WMMA_TEXT_30 FLASH_WMMA_TEXT_20 ", " FLASH_WMMA_TEN(2)
#define FLASH_WMMA_TEXT_40 FLASH_WMMA_TEXT_30 ", " FLASH_WMMA_TEN(3)
#define FLASH_WMMA_TEXT_60 FLASH_WMMA_TEXT_40 ", " FLASH_WMMA_TEN(4) ", " FLASH_WMMA_TEN(5)
#define FLASH_WMMA_TEXT_80 FLASH_WMMA_TEXT_60 ", " FLASH_WMMA_TEN(6) ", " FLASH_WMMA_TEN(7)
#define FLASH_WMMA_TEXT_90 FLASH_WMMA_TEXT_80 ", " FLASH_WMMA_TEN(8)
#define FLASH_WMMA_TEXT_120 FLASH_WMMA_TEXT_90 ", " FLASH_WMMA_TEN(9) ", " FLASH_WMMA_TEN(10) ", " FLASH_WMMA_TEN(11)
#define FLASH_WMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASH_WMMA_16(i) FLASH_WMMA_FOUR(i), FLASH_WMMA_FOUR(i + 4), FLASH_WMMA_FOUR(i + 8), FLASH_WMMA_FOUR(i + 12)
#define FLASH_WMMA_D_16() FLASH_WMMA_16(0)
#define FLASH_WMMA_D_32() FLASH_WMMA_16(0), FLASH_WMMA_16(16)
#define FLASH_WMMA_D_36() FLASH_WMMA_D_32(), FLASH_WMMA_FOUR(32)
#define FLASH_WMMA_D_40() FLASH_WMMA_D_32(), FLASH_WMMA_FOUR(32), FLASH_WMMA_FOUR(36)
#define FLASH_WMMA_D_48() FLASH_WMMA_D_32(), FLASH_WMMA_16(32)
#define FLASH_WMMA_D_64() FLASH_WMMA_D_48(), FLASH_WMMA_16(48)
#define FLASH_WMMA_D_80() FLASH_WMMA_D_64(), FLASH_WMMA_16(64)
#define FLASH_WMMA_D_88() FLASH_WMMA_D_80(), FLASH_WMMA_FOUR(80), FLASH_WMMA_FOUR(84)
#define FLASH_WMMA_D_96() FLASH_WMMA_D_80(), FLASH_WMMA_16(80)
#define FLASH_WMMA_D_128() FLASH_WMMA_D_96(), FLASH_WMMA_16(96), FLASH_WMMA_16(112)

#define FLASH_WMMA_ASM(COLUMNS, TYPE, TEXT, D, A, B, SCALE, TRANSPOSE_A, TRANSPOSE_B, ...)                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #SCALE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #COLUMNS        \
                 "k16.f32." TYPE "." TYPE " {" TEXT "}, " A ", %" #B ", p, 1, 1" TRANSPOSE_A ", %" #TRANSPOSE_B ";\n}" \
                 : D()                                                                                                 \
                 : __VA_ARGS__, "l"(b.bits()), "r"(static_cast<int>(accumulate)), "n"(kMajor == Major::N),             \
                   "n"(kMajorA == Major::N))

/// The products with this many columns. R0 to R6: the numbers of the operands behind D's registers.
#define FLASH_WMMA_WGMMA(COLUMNS, TEXT, D, R0, R1, R2, R3, R4, R5, R6)                                            \
    template <class T, int N, Major kMajorA, Major kMajor, std::enable_if_t<N == COLUMNS, int> = 0>               \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], SharedMatrix<kMajorA> a, SharedMatrix<kMajor> b,     \
                                          bool accumulate) {                                                      \
        if constexpr (std::is_same_v<T, __half>)                                                                  \
            FLASH_WMMA_ASM(COLUMNS, "f16", TEXT, D, "%" #R0, R1, R2, ", %" #R4, R3, "l"(a.bits()));               \
        else FLASH_WMMA_ASM(COLUMNS, "bf16", TEXT, D, "%" #R0, R1, R2, ", %" #R4, R3, "l"(a.bits()));             \
    }                                                                                                             \
    template <class T, int N, Major kMajor, std::enable_if_t<N == COLUMNS, int> = 0>                              \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], const std::uint32_t (&a)[4], SharedMatrix<kMajor> b, \
                                          bool accumulate) {                                                      \
        constexpr Major kMajorA = Major::K;                                                                       \
        if constexpr (std::is_same_v<T, __half>)                                                                  \
            FLASH_WMMA_ASM(COLUMNS, "f16", TEXT, D, "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}", R4, R5, "", R6,   \
                           "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                                           \
        else                                                                                                      \
            FLASH_WMMA_ASM(COLUMNS, "bf16", TEXT, D, "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}", R4, R5, "", R6,  \
                           "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));                                           \
    }
FLASH_WMMA_WGMMA(32, FLASH_WMMA_TEN() ", %10, %11, %12, %13, %14, %15", FLASH_WMMA_D_16, 16, 17, 18, 19, 20, 21, 22)
FLASH_WMMA_WGMMA(64, FLASH_WMMA_TEXT_30 ", %30, %31", FLASH_WMMA_D_32, 32, 33, 34, 35, 36, 37, 38)
FLASH_WMMA_WGMMA(72, FLASH_WMMA_TEXT_30 ", %30, %31, %32, %33, %34, %35", FLASH_WMMA_D_36,  //
                 36, 37, 38, 39, 40, 41, 42)
FLASH_WMMA_WGMMA(80, FLASH_WMMA_TEXT_40, FLASH_WMMA_D_40, 40, 41, 42, 43, 44, 45, 46)
FLASH_WMMA_WGMMA(96, FLASH_WMMA_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47", FLASH_WMMA_D_48,  //
                 48, 49, 50, 51, 52, 53, 54)
FLASH_WMMA_WGMMA(128, FLASH_WMMA_TEXT_60 ", %60, %61, %62, %63", FLASH_WMMA_D_64, 64, 65, 66, 67, 68, 69, 70)
FLASH_WMMA_WGMMA(160, FLASH_WMMA_TEXT_80, FLASH_WMMA_D_80, 80, 81, 82, 83, 84, 85, 86)
FLASH_WMMA_WGMMA(176, FLASH_WMMA_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87", FLASH_WMMA_D_88,  //
                 88, 89, 90, 91, 92, 93, 94)
FLASH_WMMA_WGMMA(192, FLASH_WMMA_TEXT_90 ", %90, %91, %92, %93, %94, %95", FLASH_WMMA_D_96,  //
                 96, 97, 98, 99, 100, 101, 102)
FLASH_WMMA_WGMMA(256, FLASH_WMMA_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127", FLASH_WMMA_D_128,  //
                 128, 129, 130, 131, 132, 133, 134)

// ---- Order among blocks ---------------------------------------------------------------------------------------------

/// *p; what was written before the add_release that wrote it is visible behind this (ld.acquire.gpu).
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
/// *p += x, after all that this thread wrote, or that it knows other threads of its block wrote (red.release.gpu).
__device__ __forceinline__ void add_release(unsigned* p, unsigned x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// ---- Registers and launches -----------------------------------------------------------------------------------------

/// This warpgroup's registers a thread: gives up those above `Count` (setmaxnreg.dec), or waits until it has `Count`
/// (setmaxnreg.inc). Every warp of the warpgroup.
template <int Count>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

/// Waits until the grids before a programmatic launch are complete and their writes visible (griddepcontrol.wait).
__device__ __forceinline__ void wait_for_previous_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Lets programmatic launches behind this grid start once all its blocks have called this or ended
/// (griddepcontrol.launch_dependents).
__device__ __forceinline__ void let_next_grid_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash_wmma::ptx
