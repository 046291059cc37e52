// What kernel code asks of the emulator's runtime, through the headers in include/. Only plain functions of pointers
// and values: kernel files may be compiled with instrumentation and the runtime never is, so they share no inline
// function.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)  // the one library that exports its functions to others

namespace flash_wmma::emulator {

using LaneMask = std::uint64_t;  ///< lanes of a warp of up to 64

struct Index {
    unsigned x, y, z;
};

/// A line of source, taken where a brick is called.
struct Site {
    const char* file;
    int line;
    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

/// Classes of warp instructions that are counted.
enum class Instruction : std::uint8_t {
    kMma,
    kLdmatrix,
    kLoadShared,
    kStoreShared,
    kLoadGlobal,
    kStoreGlobal,
    kAtomic,
    kAsyncLoad,  ///< the read of an asynchronous copy
    kAsyncCopy,  ///< its write
    kShuffle,
    kVote,
    kSyncWarp,
    kBarrier,
    kExponential,
    kTransactionBarrier,  ///< arrivals and waits
    kTensorCopy,
    kTensorStore,
    kWgmma,
    kBasicBlock,  ///< not an instruction: a stretch of code without a branch
    kCount
};

// --- where a lane is: functions of the running lane ---------------------------------------------------------------
Index thread_index() __attribute__((const));
Index block_index() __attribute__((const));
Index block_size() __attribute__((const));
Index grid_size() __attribute__((const));
int warp_size() __attribute__((const));
int lane_index() __attribute__((const));
unsigned cluster_rank() __attribute__((const));

// --- collectives --------------------------------------------------------------------------------------------------
/// An operation that lanes perform together. Each lane parks with a pointer to its arguments; the last to arrive runs
/// the operation once, on all of them.
struct Collective {
    const char* name;
    Instruction instruction;
    int instructions;    ///< warp instructions that hardware spends on it; 0: its accesses are counted instead
    int width;           ///< 0: the lanes of the mask; else: this many consecutive lanes, all of them (32, 128)
    bool orders_memory;  ///< its lanes' earlier accesses are visible to all its lanes afterwards
    void (*run)(void* const* arguments, LaneMask lanes);
};
void collective(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc);

/// Arrives at barrier `id` of the block for `threads` threads (0: all that have not exited) and, if `wait`, stays until
/// they have arrived. Returns the sum of the predicates.
int barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc);

/// The same of all threads of the cluster that have not exited.
void cluster_sync(Site site, const void* pc);

/// Parks the lane until ready(argument).
void wait_until(bool (*ready)(void*), void* argument, const char* name, Site site);

/// Happens-before through an object (an mbarrier, a flag): what the releasing lane did, and what others of its warp did
/// before they last synchronised with it, is visible to each lane that acquires the object later.
void release(const void* object);
void acquire(const void* object);

/// The same among the blocks of a grid, through a counter in global memory: *counter += x, and *counter, which is in
/// order behind the additions that it shows.
void add_release(unsigned* counter, unsigned x, const void* pc);
unsigned load_acquire(const unsigned* counter, const void* pc);

// --- memory -------------------------------------------------------------------------------------------------------
/// The block's shared memory. Reports a finding if the map is larger than the launch asked for.
void* shared_memory(std::size_t map_bytes, const void* pc);
bool in_shared_memory(const void* address);

enum class Access : std::uint8_t { kLoad, kStore, kLdmatrix, kStmatrix, kAtomic, kAsyncLoad, kAsyncStore };

/// An access of the whole warp, from within Collective::run: lane i touches `bytes` bytes at address[i].
void warp_access(Access access, const void* const* address, LaneMask lanes, int bytes);

/// An atomic access of the running lane.
void atomic_access(const void* address, int bytes, const void* pc);

/// cp.async: copies `bytes` bytes to shared memory, of which `source_bytes` are read and the rest are zeros. They land
/// in async_wait, the last legal moment.
void async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc);
void async_commit();
void async_wait(int pending_groups);

/// prefetch.global.L2. A lane of the cluster accesses what it asks for, or a tensor copy reads it.
void fetch_line(const void* address, const void* pc);

// --- asynchronous units of sm_90 -------------------------------------------------------------------------------------
/// mbarrier.init, .arrive (announcing `bytes` bytes, if not 0) and .try_wait.parity, repeated until it holds.
void transaction_barrier_init(void* barrier, unsigned arrivals, Site site, const void* pc);
void transaction_barrier_init_fence();
void transaction_barrier_arrive(void* barrier, unsigned bytes, Site site, const void* pc);
/// At the barrier of block `rank` of the cluster that lies where `barrier` lies in this block. Orders what the lane has
/// read, not what it wrote.
void transaction_barrier_arrive_at(void* barrier, unsigned rank, Site site, const void* pc);
void transaction_barrier_wait(void* barrier, unsigned parity, Site site, const void* pc);
void fence_proxy_async();

/// A tensor in global memory and the boxes in which it is copied; the innermost dimension comes first.
struct TensorMap {
    static constexpr int kMostRank = 5;
    const void* data;
    int rank, element_bytes;
    std::int64_t size[kMostRank], stride[kMostRank];  ///< elements, bytes
    int box[kMostRank];                               ///< elements
    int swizzle;                                      ///< units of 16 bytes that change places: 1 (none), 2, 4 or 8
};
/// Null, or why such a map is not allowed.
const char* refuse_tensor_map(const TensorMap& map);
/// Copies the box at these coordinates. The copy lands when a wait for the barrier's phase needs it, the last legal
/// moment.
void tensor_load(void* shared, const TensorMap& map, void* barrier, const int* coordinates, Site site, const void* pc);
/// The same of adjacent bytes.
void bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, Site site, const void* pc);
/// The same from this block's shared memory to where `to` lies in block `rank` of the cluster, for the barrier there.
/// Reads when it lands.
void bulk_send(void* to, const void* from, unsigned bytes, void* barrier, unsigned rank, Site site, const void* pc);

/// Copies the box from shared memory to these coordinates. Its group reads and writes when a wait lets it pass, the
/// last legal moment.
void tensor_store(const TensorMap& map, const void* shared, const int* coordinates, Site site, const void* pc);
void store_commit();
void store_wait_read(int pending_groups);

/// The descriptor of a matrix that starts at `shared` (bits 0 to 13), without its swizzle and its distances.
std::uint64_t matrix_start(const void* shared, const void* pc);
/// One lane's part in D = A B + (accumulate ? D : 0), of 16-bit elements: A 64x16, B 16 x columns.
struct WarpgroupProduct {
    float* d;                ///< columns / 2 registers
    const std::uint32_t* a;  ///< 4 registers, or null: the matrix that a_matrix describes
    std::uint64_t a_matrix, b_matrix;
    int columns;
    bool a_along_m;  ///< A's rows in shared memory run along m, not along k
    bool b_along_n;  ///< B's rows in shared memory run along n, not along k
    bool accumulate;
    bool bf16;
};
/// The product is computed at its wait, which also reads the operands in shared memory. Until then D is NaN.
void wgmma(WarpgroupProduct& product, Site site, const void* pc);
void wgmma_fence(Site site, const void* pc);
void wgmma_commit(Site site, const void* pc);
void wgmma_wait(int pending_groups, Site site, const void* pc);
/// setmaxnreg.
void set_registers(int count, Site site, const void* pc);

/// griddepcontrol.wait.
void wait_for_previous_grids();

/// Counts an instruction that touches no memory.
void note(Instruction instruction);

/// Ends the launch with an error, from within Collective::run, about a lane of the warp or, if -1, all its lanes.
[[noreturn]] void fail_collective(const char* what, int lane = -1);

/// c += a b, of 16 x depth, depth x columns and 16 x columns floats, row-major and dense.
void multiply(float* c, const float* a, const float* b, int depth, int columns);

// --- launch -------------------------------------------------------------------------------------------------------
struct Launch {
    Index grid, block;
    std::size_t smem_bytes;
    int cluster;
    bool programmatic;              ///< may begin before the grid before is complete
    const void* kernel;             ///< its address, for its name
    void (*body)(void* arguments);  ///< one lane's run of the kernel
    void* arguments;
};
/// Runs the grid. Throws std::runtime_error with the finding, if there is one.
void launch(const Launch& launch);

}  // namespace flash_wmma::emulator

#pragma GCC visibility pop
