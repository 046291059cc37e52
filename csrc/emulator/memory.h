// What is known of each piece of memory: whose it is, who wrote and read it last, and whether that was in order.
//
// Order is by vector clocks, one per warp. clock[u] of warp w is the newest epoch of warp u that w has synchronised
// with; a warp's own epoch grows at each of its synchronisations. An access of warp u in its epoch e is ordered before
// what w does now if e <= clock_w[u], and, within one warp, if the lane is the same or the lanes have synchronised
// since e.
//
// What runs beside the warps is an agent as they are, with epochs of its own and a number above theirs: the tensor
// copies of a barrier, the products of a warpgroup. These reach shared memory through the asynchronous proxy, which
// sees what a thread wrote only after a fence: a clock knows up to which epoch that is so, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "emulator/api.h"
#include "emulator/runtime.h"

namespace flash_wmma::emulator {

/// What is known of each agent: its newest epoch, and the newest whose writes the asynchronous proxy sees.
class Clock {
  public:
    void reset() { known_.clear(), published_.clear(); }
    std::uint32_t known(int agent) const { return at(known_, agent); }
    std::uint32_t published(int agent) const { return at(published_, agent); }
    void know(int agent, std::uint32_t epoch) { raise(known_, agent, epoch); }
    /// fence.proxy.async of one of the agent's lanes.
    void publish(int agent) { raise(published_, agent, known(agent)); }
    void join(const Clock& other) { raise(known_, other.known_), raise(published_, other.published_); }
    /// Leaves what both know.
    void meet(const Clock& other) { lower(known_, other.known_), lower(published_, other.published_); }

  private:
    using Epochs = std::vector<std::uint32_t>;
    Epochs known_, published_;
    static std::uint32_t at(const Epochs& epochs, int agent) {
        const auto i = static_cast<std::size_t>(agent);
        return i < epochs.size() ? epochs[i] : 0;
    }
    static void raise(Epochs& epochs, int agent, std::uint32_t epoch);
    static void raise(Epochs& epochs, const Epochs& others);
    static void lower(Epochs& epochs, const Epochs& others);
};

/// Who accesses.
struct Accessor {
    std::uint32_t block;        ///< in the grid
    int warp, lane;             ///< warp in the cluster, or agent; lane -1: any of the warp's, as in a collective
    const Clock* clock;         ///< the warp's
    std::uint32_t floor;        ///< newest epoch of the warp that all its lanes have synchronised since
    const std::uint32_t* seen;  ///< for each lane of the warp its newest epoch that this lane knows; null: as floor
    bool async_proxy = false;
    std::uint32_t epoch() const { return clock->known(warp); }
};

/// Whether what `warp` did in `epoch`, its lane `lane` (-1: several), comes before what `who` does now.
bool ordered(const Accessor& who, int warp, int lane, std::uint32_t epoch);

/// What an access ran into: nothing if `kind` is null.
struct Conflict {
    const char* kind = nullptr;  ///< "read after write" ...
    std::uint32_t block = 0;     ///< of the other access
    int warp = 0, lane = 0;      ///< warp or agent; lane -1: several
    const void* pc = nullptr;
    explicit operator bool() const { return kind; }
};

void* map(std::size_t bytes);
void unmap(void* pages, std::size_t bytes);
/// Zeros, of which only those take memory that are touched.
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
inline constexpr int kGranule = 2;  ///< bytes that share one record: races between single bytes are seen as on both

/// The shared memory of the blocks of a cluster, and who touched it.
class SharedArena {
  public:
    static constexpr std::size_t kBytesPerBlock = 256 << 10, kBase = 1024;

    /// Room for `blocks` blocks of `bytes` bytes, poisoned, and for the clocks of `warps` warps.
    void begin(int blocks, std::size_t bytes, int warps, bool checks);
    char* of_block(int block) const { return base_ + static_cast<std::size_t>(block) * kBytesPerBlock; }
    bool contains(std::uintptr_t a) const { return a - reinterpret_cast<std::uintptr_t>(base_) < size_; }
    /// Offset in its block's memory.
    std::size_t offset(std::uintptr_t a) const {
        return (a - reinterpret_cast<std::uintptr_t>(base_)) % kBytesPerBlock;
    }
    std::size_t bytes_per_block() const { return bytes_; }

    /// Records a read or write and says what it conflicts with. The range lies inside a block's bytes.
    Conflict read(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    Conflict write(std::uintptr_t address, int bytes, const Accessor& who, const void* pc, bool atomic);
    /// A write that is under way until landed() of the same bytes.
    Conflict begin_async(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    void landed(std::uintptr_t address, int bytes, const Accessor& who);
    /// Likewise, started by `who`, of an agent in its epoch.
    Conflict begin_async(std::uintptr_t address, int bytes, const Accessor& who, int agent, std::uint32_t epoch,
                         const void* pc);
    void landed(std::uintptr_t address, int bytes);
    /// The bytes of a barrier, written by `who`: from now on nothing but a barrier.
    Conflict make_barrier(std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    /// fence.proxy.async of a lane: what it wrote is for the asynchronous proxy to see. That of others is not, even if
    /// they are in order with it.
    void fence(const Accessor& who);

  private:
    struct Writer {
        std::uint32_t epoch;  // 0 or before first_epoch_: never written by these blocks
        std::uint16_t warp;
        std::int8_t lane;  // -1: any of the warp's, as in a collective
        std::uint8_t atomic : 1, pending : 1;
        std::uint8_t several : 1;  // atomic, and another warp's was not ordered before it: see others_
        std::uint8_t barrier : 1;
    };
    struct Other {
        Writer writer;
        const void* pc;
    };
    struct Reader {  // of one warp
        const void* pc;
        std::uint32_t epoch : 24, many : 1, lane : 6;
        int who() const { return many ? -1 : static_cast<int>(lane); }
    };
    Pages<char> memory_;
    char* base_ = nullptr;
    std::size_t size_ = 0, bytes_ = 0, granules_ = 0;
    int warps_ = 0;
    std::uint32_t first_epoch_ = 1;
    Pages<Writer> writers_;
    std::vector<Pages<Reader>> readers_;  // of each agent that has read
    std::vector<int> reading_, row_of_;   // those agents; where an agent's are, or -1
    std::vector<std::uint32_t> fenced_;   // of each lane of each warp, the epoch of its newest fence.proxy.async
    Pages<const void*> writer_pcs_;
    Pages<Other> others_;  // the last atomic writer of another warp

    std::size_t granule(std::uintptr_t a) const { return (a - reinterpret_cast<std::uintptr_t>(base_)) / kGranule; }
    /// Of the last writers the one that is not ordered before `who`.
    Conflict unordered_writer(std::size_t g, const Accessor& who, const char* kind) const;
    /// The last writer, if the asynchronous proxy, through which `who` comes, may not see what it wrote.
    Conflict unfenced_writer(std::size_t g, const Accessor& who) const;
    Pages<Reader>& readers_of(int agent);

  public:
    /// The epoch that warps of this run start with.
    std::uint32_t first_epoch() const { return first_epoch_; }
    /// Epochs up to this one are of the past: begin() follows.
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
        /// Of each granule the last to access it, and the last before that of another warp that was not in order with
        /// it
        struct Accesses {
            Pages<std::uint64_t> last, other;
            Pages<const void*> last_pcs, other_pcs;
            explicit Accesses(std::size_t granules = 0)
                : last(granules), other(granules), last_pcs(granules), other_pcs(granules) {}
        } writers, readers;
    };

    void set(const Buffer* buffers, std::size_t count);
    /// Forgets what earlier launches did: a launch waits for the ones before it.
    void begin_launch(bool checks);
    bool known() const { return !buffers_.empty(); }
    Watched* find(std::uintptr_t address, int bytes);
    /// "12 bytes past the end of k".
    std::string nearest(std::uintptr_t address) const;

    Conflict read(Watched& buffer, std::uintptr_t address, int bytes, const Accessor& who, const void* pc);
    Conflict write(Watched& buffer, std::uintptr_t address, int bytes, const Accessor& who, const void* pc,
                   bool atomic);

  private:
    std::vector<Watched> buffers_;
};

extern GlobalMemory g_memory;

}  // namespace flash_wmma::emulator
