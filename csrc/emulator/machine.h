// The emulated machine: lanes, warps, blocks and the cluster of blocks that one OS thread runs at a time.
#pragma once

#include <array>
#include <deque>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator/api.h"
#include "emulator/counters.h"
#include "emulator/fiber.h"
#include "emulator/memory.h"
#include "emulator/runtime.h"

namespace flash_wmma::emulator {

/// A copy under way that lands at its wait.
struct AsyncCopy {
    void* to;
    const void* from;
    int bytes, source_bytes, group;
    const void* pc;
    bool has_read = false;  ///< before its wait, and written: see read_async_copies
};

/// A tensor copy under way, or a store.
struct TensorCopy {
    void* shared;  ///< its target; a store's source
    TensorMap map;
    std::array<int, TensorMap::kMostRank> at;
    int bytes;
    std::uint32_t epoch;  ///< of its barrier's agent; of its lane's, for a store
    Clock clock;          ///< of the warp that asked for it
    Site site;
    Event event;
    int group = 0;      ///< a store's
    bool send = false;  ///< from shared memory: a bulk_send
};

/// A barrier in shared memory. Phases are counted from 0; a phase ends when no arrival and no byte is outstanding.
struct TransactionBarrier {
    unsigned arrivals, outstanding;
    std::int64_t bytes = 0;  ///< announced and not landed
    std::uint64_t phase = 0;
    std::deque<TensorCopy> copies;  ///< oldest first
    int agent;                      ///< the agent of its copies, as writers
    Clock arrived, completed;       ///< clocks of the current phase; of the earlier phases
    int warp, lane;                 ///< the lane that initialised it, in its epoch
    std::uint32_t epoch;
    bool fenced = false;  ///< copies see that it is initialised
    Site site;
    std::uint64_t time = 0, completed_at = 0;  ///< the latest time in the current phase; the end of the previous one
};

/// Registers of a lane that a product under way uses.
struct RegisterRange {
    std::uintptr_t begin, end;
    bool accumulator;
    std::uint64_t group;
    Site site;
};

/// A product of a warpgroup under way.
struct Product {
    WarpgroupProduct what;
    std::uint64_t group;
    std::array<const std::uint32_t*, 128> a;  ///< each lane's registers, if A is there, and their values
    std::array<std::uint32_t, 512> a_values;
    Site site;
};

/// The accumulator of products under way: its true value, while the registers are NaN.
struct Accumulator {
    std::array<float*, 128> registers;
    int columns;
    std::vector<float> tile;  ///< 64 x columns
    std::vector<Product> products;
};

/// Four warps, and the products that they compute.
struct Warpgroup {
    int agent = -1;            ///< its products as readers of shared memory; group i in the epoch first_epoch + i
    std::uint64_t groups = 0;  ///< committed
    std::vector<Accumulator> accumulators;
    std::deque<std::pair<std::uint64_t, Event>> events;  ///< a group's number, and its products as one event
    int registers = 0;                                   ///< number that it asked for
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
    std::vector<TensorCopy> stores;  ///< oldest first
    int store_group;
    int store_agent;                       ///< the agent of its stores, as readers of shared memory; -1: none yet
    const TransactionBarrier* barrier_at;  ///< the barrier that the lane waits for, until its phase of this parity ends
    unsigned parity;
    std::vector<RegisterRange> registers;
    std::uint32_t register_fence;  ///< its newest wgmma.fence; 0: none
    LaneLog log;
    std::uint64_t waited;  ///< logical time, at transaction barriers, since the log was merged
    Clock clock;           ///< what the warp knows, and what this lane knows beyond that; see Worker::clock_of
    std::uint64_t clock_version;
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

/// A visit to a barrier: by the lanes of a warp, which come together, or by the warps of a block.
struct Visit {
    int id, threads, predicates;  ///< threads 0: all that have not exited
    bool wait;
    const char* name;
    Site site;
    const void* pc;
};

/// What some lanes of a warp have learnt from an object, such as a barrier at one of its phases.
struct News {
    const void* from;
    std::uint64_t phase;
    LaneMask lanes;
    Clock clock;
};

struct Warp {
    int block, first_lane;  ///< index into the worker's lanes
    LaneMask exists, exited;
    std::vector<Gathering> gatherings;
    Visit visit;
    LaneMask visiting;                ///< lanes that have come to the barrier while others have not
    Clock clock;                      ///< what all its lanes know
    std::uint64_t clock_version;      ///< grows with the clock
    std::vector<News> news;           ///< what some of its lanes know beyond the clock
    LaneMask informed;                ///< the lanes with news
    std::vector<std::uint32_t> seen;  ///< Accessor::seen of lane l, from l * 64 on; empty if the clock says all
    WarpLog log;
};

struct Barrier {
    Visit first;  ///< the visit of the warp that came first
    int arrived = 0, predicates = 0;
    Clock clock;
    std::uint64_t time = 0;  ///< the latest of the warps that have come
};

inline constexpr int kBarriers = 16, kClusterBarrier = kBarriers;  ///< of a block; the number of the cluster's

/// What is done to a block's shared memory from outside, before the block may end.
struct RemoteUse {
    int agent, lane;
    std::uint32_t epoch;  ///< its newest
    const Lane* by;
    std::string name;
    Site site;
};

struct Block {
    Index index;
    int first_lane, first_warp, threads, live;
    std::array<Barrier, kBarriers> barriers;
    std::vector<RemoteUse> uses;  ///< those that no lane knew of that has exited
};

/// Thrown by a block that stops because another has a finding.
struct Abandoned {};

/// A finding, thrown out of a launch. Fibers never throw: they stop, and the scheduler throws in their place.
struct Finding {
    std::string what;
};

/// The worker of this OS thread, and the lane that runs; null outside a launch.
extern thread_local class Worker* t_worker __attribute__((tls_model("initial-exec")));
extern thread_local Lane* t_lane __attribute__((tls_model("initial-exec")));

/// One OS thread's share of a launch: it runs one cluster of blocks after the other.
class Worker {
  public:
    void begin(const Launch& launch, const Config& config);
    /// Runs the blocks [first, first + count) of the grid together. Throws Finding.
    void run(std::uint64_t first_block, int count);

    // Called by the running lane
    void enter(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc);
    int barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc);
    void cluster_sync(Site site, const void* pc);
    void wait_until(bool (*ready)(void*), void* argument, const char* name, Site site);
    void async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc);
    void async_wait(int pending);
    void fetch_line(const void* address, const void* pc);
    /// Global memory is accessed.
    void touch_lines(std::uintptr_t address, std::size_t bytes);
    /// Performs all lanes' asynchronous copies under way; that they have landed is still known at their waits alone.
    void read_async_copies();
    void release(const void* object);
    void acquire(const void* object);
    unsigned add_release(unsigned* counter, unsigned x);
    unsigned load_acquire(const unsigned* counter);
    TransactionBarrier& transaction_barrier(const void* address, const char* use, Site site);
    void barrier_init(void* address, unsigned arrivals, Site site, const void* pc);
    void barrier_arrive(void* address, unsigned bytes, Site site, const void* pc);
    void barrier_arrive_at(void* address, unsigned rank, Site site, const void* pc);
    void barrier_wait(void* address, unsigned parity, Site site, const void* pc);
    void barrier_init_fence();
    void fence_proxy_async();
    void tensor_load(void* shared, const TensorMap& map, void* barrier, const int* coordinates, Site site,
                     const void* pc);
    void bulk_send(void* to, const void* from, unsigned bytes, void* barrier, unsigned rank, Site site, const void* pc);
    void tensor_store(const TensorMap& map, const void* shared, const int* coordinates, Site site, const void* pc);
    void store_wait_read(int pending);
    void multiply(void* const* arguments);
    void fence_registers();
    void commit_products();
    void wait_for_products(int pending);
    void set_registers(int count);
    /// An access to the lane's own stack, which holds the arrays that products use as registers.
    void touch_registers(std::uintptr_t address, int bytes, Access kind, const void* pc);
    void access(std::uintptr_t address, int bytes, Access kind, const void* pc);
    void log(const void* pc, std::uintptr_t address, int bytes, Instruction what) {
        LaneLog& log = t_lane->log;
        log.records.push_back({pc, log.node, address, static_cast<std::uint32_t>(bytes), what});
        if (log.records.size() >= kLongLog) give_way(pc);
    }
    void warp_access(Access access, const void* const* address, LaneMask lanes, int bytes);
    [[noreturn]] void stop(std::string what);

    std::string describe(const Block& block) const;
    std::string describe(const Warp& warp) const;
    std::string describe(const Lane& lane) const;
    Accessor accessor(Lane& lane);
    /// A lane of the warpgroup that performs the running collective.
    Lane& lane_of_warpgroup(int place) {
        const Warp& warp = warps[static_cast<std::size_t>(running_leader + place / 32)];
        return lanes[static_cast<std::size_t>(warp.first_lane + place % 32)];
    }
    /// The lane's place in logical time. Each of its records since the last merge counts as one.
    std::uint64_t time_of(const Lane& lane) const {
        return warps[static_cast<std::size_t>(lane.warp)].log.time + lane.log.records.size() + lane.waited;
    }
    Warp& warp_of(const Lane& lane) { return warps[static_cast<std::size_t>(lane.warp)]; }

    Launch launch;
    Config config;
    Stacks stacks;
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    std::unordered_map<const void*, TransactionBarrier> barriers;
    std::unordered_map<int, Warpgroup> warpgroups;  ///< by their first warp
    SharedArena arena;
    Counters counters;
    const Gathering* running = nullptr;  ///< the collective that is being performed
    int running_leader = 0;              ///< the first of the warps that perform it

  private:
    Fiber scheduler_;
    struct SyncObject {
        Clock clock;
        std::uint64_t releases = 0;
    };
    std::unordered_map<const void*, SyncObject> sync_objects_;
    Barrier cluster_barrier_;
    std::vector<std::uint32_t> epochs_;  // each agent's newest epoch
    std::uint32_t register_fences_ = 0;
    std::size_t touched_bytes_ = 0;
    Pages<std::uint32_t> touched_;  // per word of the stacks: the fence after which it was last touched
    std::unordered_map<std::uintptr_t, std::pair<int, const void*>> fetched_;  // lines not touched since: by which lane
    std::mt19937_64 random_;
    std::string error_;
    bool failed_ = false;
    int live_ = 0;
    std::uint64_t turn_ = 0, atomics_ = 0, idle_ = 0;  // see give_way()
    std::uintptr_t last_address_ = 0;

    static constexpr std::size_t kLongLog = 1 << 17;  // at this length the warp's lanes go in step, and are merged
    void give_way(const void* pc);
    int new_agent();
    const Clock& clock_of(Lane& lane);
    /// From now on the lane knows what is in `clock`, the clock of the object `from` in this phase.
    void learn(Lane& lane, const void* from, std::uint64_t phase, const Clock& clock);
    /// Moves to the warp's clock what each of its lanes knows.
    void share_news(Warp& warp);
    /// The lane arrives somewhere: adds to `to` what it did before and what it knows.
    void hand_on(Lane& lane, Clock& to);
    /// The same of what lanes read before, not of what they wrote; what agents did is done.
    void hand_on_reads(Lane& lane, Clock& to);
    /// Whether the phase is done. Called for the lane that waits for it; lands the phase's copies.
    bool phase_done(TransactionBarrier& barrier, unsigned parity, const Lane& lane);
    /// Adds an event to the timeline if the warp (the worker's number) is in block 0 of the grid.
    void record(Event event, int warp);
    /// `writes`: whether the arrival orders them.
    void arrive_at(TransactionBarrier& barrier, const void* address, unsigned bytes, bool writes, const char* name,
                   Site site, const void* pc);
    void end_phase(TransactionBarrier& barrier);
    /// The block of that rank, for an operation by `name` of the running lane. It has not ended.
    Block& remote_block(unsigned rank, const char* name, Site site);
    /// Where `address`, of the running lane's block, lies in that block.
    char* address_in(const Block& block, const void* address, const std::string& name, Site site);
    /// From now on the block may not end before what that lane of an agent does.
    void use(Block& block, const RemoteUse& use);
    /// A copy or store that the running lane asks for by `name`, to or from shared memory as `what` says.
    TensorCopy new_copy(const void* shared, const TensorMap& map, const int* coordinates, const char* name,
                        const char* what, Site site, const void* pc);
    std::string name_of(const TensorCopy& copy) const;
    void begin_copy(TensorCopy copy, TransactionBarrier& barrier, const void* pc);
    void land(const TensorCopy& copy);
    void check_copy(const TensorCopy& copy, const TransactionBarrier& barrier, const void* pc);
    void check_source(const TensorCopy& copy, const void* pc);
    void check_send(const TensorCopy& copy, const TransactionBarrier& barrier, const void* pc);
    /// An agent that reads shared memory later, and knows what the lane knows now, in `clock`.
    Accessor later_reader(Lane& lane, int agent, std::uint32_t epoch, Clock& clock);
    void check_tensor_store(TensorCopy& store, const void* pc);
    /// Copies to global memory what lies inside the tensor.
    void land_store(const TensorCopy& store);
    std::string describe_warpgroup() const;
    void check_registers(const WarpgroupProduct& what, int place);
    void check_matrix(const WarpgroupProduct& what, bool a, const Accessor& who);
    void compute(const Product& product, float* tile) const;
    std::string name_of_agent(int agent) const;
    /// Reports an access of `who` at `line`, and the conflict that it ran into.
    [[noreturn]] void stop_conflict(Access kind, const std::string& who, std::uintptr_t address, int bytes,
                                    const std::string& line, const Conflict& conflict, std::uint32_t block);
    void check(Lane& lane, bool collective, std::uintptr_t address, int bytes, Access kind, const void* pc);
    static void lane_main();
    void set_up(std::uint64_t first_block, int count);
    void park(Lane& lane);
    void fire(Warp& warp, std::size_t gathering);
    void synchronise(Warp& warp, LaneMask lanes);
    int visit(const Visit& visit, int predicate);
    void arrive(Warp& warp);
    Barrier& barrier_of(Block& block, int id) {
        return id == kClusterBarrier ? cluster_barrier_ : block.barriers[static_cast<std::size_t>(id)];
    }
    void complete(Block& block, int id);
    static LaneMask live(const Warp& warp) { return warp.exists & ~warp.exited; }
    void merge_logs(Warp& warp);
    void exit(Lane& lane);
    bool run_warp(Warp& warp);
    std::string deadlock() const;
    /// What a lane's wait for a barrier in shared memory still needs.
    std::string state_of_barrier(const Lane& lane) const;
};

/// Where a swizzle of that many units of 16 bytes puts the byte that would lie at `p`: bits 7 to 9 of an address change
/// bits 4 to 6.
inline char* swizzled(char* p, int units) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    return reinterpret_cast<char*>(address ^ (address >> 7 & static_cast<std::uintptr_t>(units - 1)) << 4);
}

/// The text of a finding: what, who, where, and where the others are.
std::string finding(const std::string& kind, const std::string& who, const std::string& line,
                    const std::string& others = "");
/// "csrc/forward/wmma/wmma_v2.cu:123" of an instruction before `pc`, and the name of the function at `pc`.
std::string source_line(const void* pc);
std::string function_name(const void* function);
/// The function of the instruction before `pc`, and the functions that it is inlined into, outwards.
std::vector<std::string> inlined_calls(const void* pc);
std::string source_line(Site site);
/// Finds the lines of many places at once, which is much faster than one by one.
void prepare_source_lines(const std::vector<const void*>& pcs);

}  // namespace flash_wmma::emulator
