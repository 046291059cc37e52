// The record of each piece of memory: whose it is, who wrote and read it last, and whether these accesses were in
// order.
//
// Order is by vector clocks, one per warp. clock[u] of warp w is the newest epoch of warp u that all lanes of w have
// synchronised with; a warp's own epoch grows at each of its synchronisations. An access of warp u in its epoch e is
// ordered before what w does now if e <= clock_w[u], or if the lane is the same. A transaction barrier orders lanes,
// not warps. A lane that arrives hands on what it did itself, and what other lanes of its warp did before they last
// synchronised with it. A lane that waits learns for itself only. So a clock holds epochs of single lanes beside those
// of warps.
//
// Whatever runs beside the warps is an agent too, with epochs of its own and a number above the warps': the tensor
// copies of a barrier, the products of a warpgroup. These agents reach shared memory through the asynchronous proxy,
// which sees what a lane wrote only after a fence of that lane. So a clock also knows up to which epoch writes are
// visible to that proxy.
//
// An arrival at a barrier of another block orders what was read before it alone.
//
// Clusters of blocks are in order only where a counter in global memory says so: what a lane knows when it adds to the
// counter with release is known to each lane that reads the sum, or a later one, with acquire. For this a clock also
// has epochs of warps of other clusters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator/api.h"
#include "emulator/runtime.h"

namespace flash_wmma::emulator {

/// Values in place of a lane: all lanes of a warp at once, as in a collective; several, one after the other.
inline constexpr int kTogether = -1, kSeveral = -2;

/// Each agent's newest epoch: that of all its lanes, and those of single lanes if they are newer.
class Epochs {
  public:
    void clear() { all_.clear(), lanes_.clear(); }
    std::uint32_t of(int agent) const {
        const auto i = static_cast<std::size_t>(agent);
        return i < all_.size() ? all_[i] : 0;
    }
    /// Whether the epochs include what that lane did in `epoch`; for several lanes: whether they include that of one.
    bool cover(int agent, int lane, std::uint32_t epoch) const {
        return epoch <= of(agent) || (!lanes_.empty() && cover_lane(agent, lane, epoch));
    }
    void raise(int agent, std::uint32_t epoch);
    void raise(int agent, int lane, std::uint32_t epoch);
    void join(const Epochs& others);
    /// Keeps what both have.
    void meet(const Epochs& others);
    /// Adds those of the agents from `begin` on and below `end` to `to`, where their numbers are greater by `shift`.
    void add_to(Epochs& to, int begin, int end, int shift = 0) const;

  private:
    struct OfLane {
        int agent, lane;
        std::uint32_t epoch;
        bool operator<(const OfLane& x) const { return agent != x.agent ? agent < x.agent : lane < x.lane; }
    };
    std::vector<std::uint32_t> all_;
    std::vector<OfLane> lanes_;  // in order
    std::uint32_t of(int agent, int lane) const;
    bool cover_lane(int agent, int lane, std::uint32_t epoch) const;
    std::vector<OfLane> lanes_with(const Epochs& others) const;
    void tidy();
};

/// What an agent or lane knows: the epochs that are ordered before, and those whose writes the asynchronous proxy sees.
struct Clock {
    Epochs known, published;
    Epochs counted;  // epochs ordered before by counters, of warps numbered through the grid
    Epochs read;     // epochs of which what was read is ordered before, and may be written over
    void clear() { known.clear(), published.clear(), counted.clear(), read.clear(); }
    void join(const Clock& other) {
        known.join(other.known), published.join(other.published), counted.join(other.counted), read.join(other.read);
    }
    void meet(const Clock& other) {
        known.meet(other.known), published.meet(other.published), counted.meet(other.counted), read.meet(other.read);
    }
};

/// The accessor of a piece of memory.
struct Accessor {
    std::uint32_t block;        ///< in the grid
    int warp, lane;             ///< warp in the cluster, or agent; lane or kTogether
    std::uint32_t epoch;        ///< of the warp
    const Clock* clock;         ///< the lane's
    std::uint32_t floor;        ///< of the warp in that clock
    const std::uint32_t* seen;  ///< per lane of the warp: its newest epoch that this lane knows; null: floor
    int self = lane;            ///< the lane whose clock it is
    bool async_proxy = false;
};

/// Whether what `lane` of `warp` did in `epoch` is ordered before what `who` does now.
bool ordered(const Accessor& who, int warp, int lane, std::uint32_t epoch);
/// Whether at least what it read is.
inline bool read_before(const Accessor& who, int warp, int lane, std::uint32_t epoch) {
    return ordered(who, warp, lane, epoch) || who.clock->read.cover(warp, lane, epoch);
}

/// What an access ran into: nothing if `kind` is null.
struct Conflict {
    const char* kind = nullptr;  ///< "read after write" ...
    std::uint32_t block = 0;     ///< of the other access
    int warp = 0, lane = 0;      ///< warp or agent; lane, kTogether or kSeveral
    const void* pc = nullptr;
    explicit operator bool() const { return kind; }
};

void* map(std::size_t bytes);
void unmap(void* pages, std::size_t bytes);
/// Zeros; only touched pages take memory.
template <class T>
class Pages {
  public:
    explicit Pages(std::size_t count = 0) : bytes_(count * sizeof(T)), p_(static_cast<T*>(map(bytes_))) {}
    Pages(Pages&& other) noexcept : bytes_(other.bytes_), p_(std::exchange(other.p_, nullptr)) {}
    Pages& operator=(Pages&& other) noexcept {
        std::swap(bytes_, other.bytes_), std::swap(p_, other.p_);
        return *this;
    }
    ~Pages() { unmap(p_, bytes_); }
    T& operator[](std::size_t i) const { return p_[i]; }

  private:
    std::size_t bytes_;
    T* p_;
};
inline constexpr int kGranule = 2;  ///< bytes that share one record: an access to either counts as one to both

/// The shared memory of the blocks of a cluster, and who touched it.
class SharedArena {
  public:
    static constexpr std::size_t kBytesPerBlock = 256 << 10, kBase = 1024;

    /// Makes room for `blocks` blocks of `bytes` bytes, poisoned. Agents with numbers from `warps` on are not warps.
    void begin(int blocks, std::size_t bytes, int warps, bool checks);
    char* of_block(int block) const { return base_ + static_cast<std::size_t>(block) * kBytesPerBlock; }
    /// The block in whose memory the address lies.
    int block_at(std::uintptr_t a) const {
        return static_cast<int>((a - reinterpret_cast<std::uintptr_t>(base_)) / kBytesPerBlock);
    }
    bool contains(std::uintptr_t a) const { return a - reinterpret_cast<std::uintptr_t>(base_) < size_; }
    /// Offset in its block's memory.
    std::size_t offset(std::uintptr_t a) const {
        return (a - reinterpret_cast<std::uintptr_t>(base_)) % kBytesPerBlock;
    }
    std::size_t bytes_per_block() const { return bytes_; }

    /// Records a read or write and returns what it conflicts with. The range lies inside a block's bytes.
    Conflict read(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    Conflict write(std::uintptr_t address, int bytes, const Accessor& who, const void* pc, bool atomic);
    /// A write that is under way until landed() is called for the same bytes.
    Conflict begin_async(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    void landed(std::uintptr_t address, int bytes, const Accessor& who);
    /// The same, started by `who`, of an agent in its epoch.
    Conflict begin_async(std::uintptr_t address, int bytes, const Accessor& who, int agent, std::uint32_t epoch,
                         const void* pc);
    void landed(std::uintptr_t address, int bytes);
    /// `who` makes the bytes a barrier: from now on no other access is allowed.
    Conflict make_barrier(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);

  private:
    struct Writer {
        std::uint32_t epoch;  // 0 or before first_epoch_: never written by these blocks
        std::uint16_t warp;
        std::int8_t lane;  // or kTogether, or kSeveral
        std::uint8_t atomic : 1, pending : 1;
        std::uint8_t several : 1;  // atomic, and not ordered after another warp's atomic: see others_
        std::uint8_t barrier : 1;
    };
    struct Other {
        Writer writer;
        const void* pc;
    };
    struct Reader {  // of one warp
        const void* pc;
        std::uint32_t epoch : 24;
        std::int32_t lane : 8;  // or kTogether, or kSeveral
    };
    Pages<char> memory_;
    char* base_ = nullptr;
    std::size_t size_ = 0, bytes_ = 0, granules_ = 0;
    int warps_ = 0;
    std::uint32_t first_epoch_ = 1;
    Pages<Writer> writers_;
    std::vector<Pages<Reader>> readers_;  // one per agent that has read
    std::vector<int> reading_, row_of_;   // these agents; the row of an agent, or -1
    Pages<const void*> writer_pcs_;
    Pages<Other> others_;  // the last atomic writer of another warp

    std::size_t granule(std::uintptr_t a) const { return (a - reinterpret_cast<std::uintptr_t>(base_)) / kGranule; }
    /// The last writer, or the other one, that is not ordered before `who`.
    Conflict unordered_writer(std::size_t g, const Accessor& who, const char* kind) const;
    /// The last writer, if the asynchronous proxy, which `who` uses, may not see what it wrote.
    Conflict unfenced_writer(std::size_t g, const Accessor& who) const;
    Pages<Reader>& readers_of(int agent);

  public:
    /// The epoch that warps of this run start with.
    std::uint32_t first_epoch() const { return first_epoch_; }
    /// Epochs up to this one are of the past; begin() follows.
    void finish(std::uint32_t last_epoch) { first_epoch_ = std::max(first_epoch_, last_epoch + 1); }
};

/// The tensors of a launch. Those that may be written are watched for races between blocks and between threads, by all
/// OS threads at once.
class GlobalMemory {
  public:
    struct Watched {
        std::string name;
        std::uintptr_t begin, end;
        bool writable;
        /// For each granule the last accessor, and the last one before it that is of another warp and not in order with
        /// it
        struct Accesses {
            Pages<std::uint64_t> last, other;
            Pages<const void*> last_pcs, other_pcs;
            explicit Accesses(std::size_t granules = 0)
                : last(granules), other(granules), last_pcs(granules), other_pcs(granules) {}
        } writers, readers;
    };

    void set(const Buffer* buffers, std::size_t count);
    /// Forgets accesses of earlier launches: a launch waits for the launches before it. `blocks`, `warps`: of a
    /// cluster.
    void begin_launch(bool checks, int blocks, int warps);
    /// The number in the grid of warp 0 of a block's cluster (Clock::counted).
    int first_warp(std::uint32_t block) const { return static_cast<int>(block / blocks_) * warps_; }
    bool same_cluster(std::uint32_t a, std::uint32_t b) const { return a / blocks_ == b / blocks_; }

    /// A counter's words are read and added to while the lock is held, so that its clock is that of its value.
    struct Counters {
        std::mutex mutex;
        std::unordered_map<const void*, std::pair<std::uint64_t, Clock>> clocks;  // how many releases, and their clock
    } counters;
    bool known() const { return !buffers_.empty(); }
    Watched* find(std::uintptr_t address, int bytes);
    /// "12 bytes past the end of k".
    std::string nearest(std::uintptr_t address) const;

    Conflict read(Watched& buffer, std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    Conflict write(Watched& buffer, std::uintptr_t address, int bytes, const Accessor& who, const void* pc,
                   bool atomic);

  private:
    std::vector<Watched> buffers_;
    std::uint32_t blocks_ = 1;
    int warps_ = 0;
};

extern GlobalMemory g_memory;

}  // namespace flash_wmma::emulator
