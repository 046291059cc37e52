// The emulated machine: lanes, warps, blocks and the cluster of blocks that one OS thread runs at a time.
#pragma once

#include <array>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "api.h"
#include "counters.h"
#include "fiber.h"
#include "memory.h"
#include "runtime.h"

namespace flash_wmma::emulator {

/// A copy under way that lands at its wait.
struct AsyncCopy {
    void* to;
    const void* from;
    int bytes, source_bytes, group;
    const void* pc;
};

struct Lane {
    enum class State : std::uint8_t { kReady, kCollective, kBarrier, kWaiting, kGivingWay, kExited };

    Fiber fiber;
    int block, warp;   ///< in the cluster
    int thread, lane;  ///< in the block, in the warp
    Index index;
    State state;
    const char* at;  ///< the operation it is parked in
    Site site;
    const void* pc;
    int barrier, barrier_result;
    bool (*ready)(void*);
    void* ready_argument;
    std::vector<AsyncCopy> copies;
    int copy_group;
    LaneLog log;
};

/// Lanes on their way into a collective.
struct Gathering {
    const Collective* what;
    LaneMask mask;
    int arrived_count;
    LaneMask arrived;  ///< of the first warp
    Site site;
    const void* pc;
    std::array<void*, 128> arguments;
    // Without an initialiser: arguments are written as lanes arrive.
    Gathering(const Collective* what_, LaneMask mask_, Site site_)
        : what(what_), mask(mask_), arrived_count(0), arrived(0), site(site_), pc(nullptr) {}
};

/// A visit to a barrier, by the lanes of a warp, which come together, or by the warps of a block.
struct Visit {
    int id, threads, predicates;  ///< threads 0: all that have not exited
    bool wait;
    const char* name;
    Site site;
    const void* pc;
};

struct Warp {
    int block, first_lane;  ///< index into the worker's lanes
    LaneMask exists, exited;
    std::vector<Gathering> gatherings;
    Visit visit;
    LaneMask visiting;  ///< lanes that have come to the barrier, while others have not
    Clock clock;
    std::uint32_t floor;              ///< newest epoch that all lanes have synchronised since
    std::vector<std::uint32_t> seen;  ///< see Accessor, of lane l from l * 64 on; empty if floor says all
    WarpLog log;
};

struct Barrier {
    Visit first;  ///< of those that have come
    int arrived = 0, predicates = 0;
    Clock clock;
};

inline constexpr int kBarriers = 16;

struct Block {
    Index index;
    int first_lane, first_warp, threads, live;
    std::array<Barrier, kBarriers> barriers;
};

/// Thrown out of a launch: a finding. Fibers never throw; they stop, and the scheduler throws in their place.
struct Finding {
    std::string what;
};

/// The worker of this OS thread, and the lane that runs; null outside a launch.
extern thread_local class Worker* t_worker __attribute__((tls_model("initial-exec")));
extern thread_local Lane* t_lane __attribute__((tls_model("initial-exec")));

/// One OS thread's share of a launch: it runs cluster after cluster of blocks.
class Worker {
  public:
    void begin(const Launch& launch, const Config& config);
    /// Runs the blocks [first, first + count) of the grid together. Throws Finding.
    void run(std::uint64_t first_block, int count);

    // Of the running lane
    void enter(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc);
    int barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc);
    void wait_until(bool (*ready)(void*), void* argument, const char* name, Site site);
    void async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc);
    void async_wait(int pending);
    void release(const void* object);
    void acquire(const void* object);
    void access(std::uintptr_t address, int bytes, Access kind, const void* pc);
    void log(const void* pc, std::uintptr_t address, int bytes, Instruction what) {
        LaneLog& log = t_lane->log;
        log.records.push_back({pc, log.node, address, static_cast<std::uint32_t>(bytes), what});
        if (log.records.size() >= kLongLog) give_way(pc);
    }
    void warp_access(Access access, const void* const* address, LaneMask lanes, int bytes);
    [[noreturn]] void stop(std::string what);

    std::string describe(const Warp& warp) const;
    std::string describe(const Lane& lane) const;
    Accessor accessor(const Lane& lane) const;
    Warp& warp_of(const Lane& lane) { return warps[static_cast<std::size_t>(lane.warp)]; }

    Launch launch;
    Config config;
    Stacks stacks;
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    SharedArena arena;
    Counters counters;
    const Gathering* running = nullptr;  ///< the collective that is being performed

  private:
    Fiber scheduler_;
    std::unordered_map<const void*, Clock> sync_objects_;
    std::mt19937_64 random_;
    std::string error_;
    bool failed_ = false;
    int live_ = 0;
    std::uint64_t turn_ = 0, atomics_ = 0, idle_ = 0;  // see give_way()
    std::uintptr_t last_address_ = 0;

    static constexpr std::size_t kLongLog = 1 << 17;  // then the warp's lanes go in step, and are merged
    void give_way(const void* pc);
    void check(const Lane& lane, bool collective, std::uintptr_t address, int bytes, Access kind, const void* pc);
    static void lane_main();
    void set_up(std::uint64_t first_block, int count);
    void park(Lane& lane);
    void fire(Warp& warp, std::size_t gathering);
    void synchronise(Warp& warp, LaneMask lanes);
    void arrive(Warp& warp);
    void complete(Block& block, int id);
    static LaneMask live(const Warp& warp) { return warp.exists & ~warp.exited; }
    void merge_logs(Warp& warp);
    void exit(Lane& lane);
    bool run_warp(Warp& warp);
    std::string deadlock() const;
};

/// "csrc/forward/wmma_v2.cu:123" of an instruction before `pc`, and the name of the function at `pc`.
std::string source_line(const void* pc);
std::string function_name(const void* function);
std::string source_line(Site site);
/// Finds the lines of many places at once, which is much faster than one by one.
void prepare_source_lines(const std::vector<const void*>& pcs);

}  // namespace flash_wmma::emulator
