// What kernel code, through the headers in include/, asks of the emulator's runtime. Plain functions over pointers and
// values: kernel files may be compiled with instrumentation and the runtime never is, so they share no inline function.
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

// --- collectives --------------------------------------------------------------------------------------------------
/// An operation that lanes perform together. Each lane parks with a pointer to its arguments; the last to arrive runs
/// the operation once, on all of them.
struct Collective {
    const char* name;
    Instruction instruction;
    int instructions;    ///< warp instructions that hardware spends on it; 0: its accesses are counted instead
    int width;           ///< 0: the lanes of the mask; else that many consecutive lanes, all of them (32, 128)
    bool orders_memory;  ///< what its lanes did before is visible to its lanes after
    void (*run)(void* const* arguments, LaneMask lanes);
};
void collective(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc);

/// Arrives at barrier `id` of the block for `threads` threads (0: all that have not exited) and, if `wait`, stays until
/// they have come. Returns the sum of the predicates.
int barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc);

/// Parks the lane until ready(argument).
void wait_until(bool (*ready)(void*), void* argument, const char* name, Site site);

/// Happens-before through an object (an mbarrier, a flag): what the releasing warp did before is visible to whoever
/// acquires it later.
void release(const void* object);
void acquire(const void* object);

// --- memory -------------------------------------------------------------------------------------------------------
/// The block's shared memory; finds fault with a map that is larger than the launch asked for.
void* shared_memory(std::size_t map_bytes, const void* pc);
bool in_shared_memory(const void* address);

enum class Access : std::uint8_t { kLoad, kStore, kLdmatrix, kAtomic, kAsyncLoad, kAsyncStore };

/// An access of the warp at once, from within Collective::run: lane i touches `bytes` bytes at address[i].
void warp_access(Access access, const void* const* address, LaneMask lanes, int bytes);

/// An atomic access of the running lane.
void atomic_access(const void* address, int bytes, const void* pc);

/// cp.async: `bytes` bytes to shared memory of which `source_bytes` are read, the rest are zeros. They land in
/// async_wait, the last legal moment.
void async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc);
void async_commit();
void async_wait(int pending_groups);

/// Counts an instruction that touches no memory.
void note(Instruction instruction);

/// Ends the launch with an error, from within Collective::run, about a lane of the warp or, -1, all of them.
[[noreturn]] void fail_collective(const char* what, int lane = -1);

/// c += a b, of 16 x depth, depth x columns and 16 x columns floats, row-major and dense.
void multiply(float* c, const float* a, const float* b, int depth, int columns);

// --- launch -------------------------------------------------------------------------------------------------------
struct Launch {
    Index grid, block;
    std::size_t smem_bytes;
    int cluster;
    const void* kernel;             ///< its address, for its name
    void (*body)(void* arguments);  ///< one lane's run of the kernel
    void* arguments;
};
/// Runs the grid. Throws std::runtime_error with the finding, if there is one.
void launch(const Launch& launch);

}  // namespace flash_wmma::emulator

#pragma GCC visibility pop
