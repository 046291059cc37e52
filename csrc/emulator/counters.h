// A profiler's counters. Lanes log what they do. Where the lanes of a warp come together again, their logs are merged
// into warp-wide requests, as the hardware would issue them: among the lanes' next records, those with the lowest call
// path and code address go first, and lanes at the same place go together. Basic blocks are records too, so that lanes
// meet again where branches join.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "emulator/runtime.h"

namespace flash_wmma::emulator {

/// A node of the tree of calls that lanes are in; its path orders records across inlined and called functions.
struct CallNode {
    CallNode* caller;
    const void* pc;
    int depth;
    std::vector<std::unique_ptr<CallNode>> callees;
    CallNode* enter(const void* pc);
};

/// One lane's access, instruction or basic block.
struct Record {
    const void* pc;
    const CallNode* node;
    std::uintptr_t address;
    std::uint32_t bytes;
    Instruction what;
};
struct LaneLog {
    std::vector<Record> records;
    CallNode* node;
};

/// The place of a warp in logical time: a warp instruction counts 1, a shared-memory request 1 per wavefront.
struct WarpLog {
    std::uint64_t time = 0;
    std::uint64_t waited_until = 0;  ///< the end of its newest wait at a transaction barrier
};

/// The counts of one class of instruction at one place.
struct Count {
    std::uint64_t instructions = 0, lanes = 0, bytes = 0;  ///< bytes: each lane's, summed
    std::uint64_t wavefronts = 0, ideal_wavefronts = 0;    ///< shared memory
    std::uint64_t sectors = 0, ideal_sectors = 0;          ///< global memory, 32 bytes each
    std::uint64_t divergent = 0;                           ///< basic blocks: the warp's lanes parted after it
    // The request with most wavefronts or sectors, for plots
    std::uint64_t worst = 0;
    LaneMask worst_lanes = 0;
    std::uint32_t worst_bytes = 0;
    std::vector<std::uint64_t> worst_addresses;

    void add(const Count& other);
};

/// What a warp waited for, or what ran beside the warp at its request, in logical time.
struct Event {
    enum class Kind : std::uint8_t { kBarrier, kTransactionBarrier, kTensorCopy, kProduct };
    Kind kind;
    int warp;                         ///< in its block; for a product: the first of the warpgroup
    std::uint64_t arrived, released;  ///< a wait: its begin and end; else: asked for, first waited for
    const void* pc;
};

class Counters {
  public:
    CallNode root{nullptr, nullptr, 0, {}};
    std::map<std::pair<const void*, Instruction>, Count> counts;
    std::vector<Event> timeline;  ///< of block 0
    std::uintptr_t shared_base = 0, shared_size = 0;
    std::uint64_t shared_block = 1;  ///< addresses repeat after that many bytes
    int warp_size = 32;

    /// Turns the logs of a warp's lanes into requests and clears them. Returns the logical time that they took.
    std::uint64_t merge(LaneLog* const* lanes, int count);
    /// One warp-wide request; returns its wavefronts (global memory: 1).
    std::uint64_t request(const void* pc, Instruction what, const std::uintptr_t* address, LaneMask lanes, int bytes);
    void add(const void* pc, Instruction what, int instructions);
    /// A tensor copy or store: bytes of shared memory, sectors of global memory, and the fewest that hold its bytes.
    void add_copy(const void* pc, Instruction what, std::uint64_t bytes, std::uint64_t sectors,
                  std::uint64_t ideal_sectors);
};

/// A launch's counters, by source line, for take_profile.
struct LaunchProfile {
    std::string kernel;
    Index grid, block;
    std::size_t smem_bytes;
    std::uint64_t warps;
    std::map<std::pair<const void*, Instruction>, Count> counts;
    std::vector<Event> timeline;
};
void add_profile(LaunchProfile profile);

}  // namespace flash_wmma::emulator
