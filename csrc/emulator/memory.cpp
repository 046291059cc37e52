// The records of shared and global memory, and the rules by which two accesses are in order or in conflict.
#include "emulator/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace flash_wmma::emulator {

GlobalMemory g_memory;

// --- clocks -------------------------------------------------------------------------------------------------------

void Epochs::raise(int agent, std::uint32_t epoch) {
    const auto i = static_cast<std::size_t>(agent);
    if (all_.size() <= i) all_.resize(i + 1);
    all_[i] = std::max(all_[i], epoch);
}

void Epochs::raise(int agent, int lane, std::uint32_t epoch) {
    const OfLane now{agent, lane, epoch};
    lanes_.insert(std::lower_bound(lanes_.begin(), lanes_.end(), now), now);
    tidy();
}

std::uint32_t Epochs::of(int agent, int lane) const {
    const auto found = std::lower_bound(lanes_.begin(), lanes_.end(), OfLane{agent, lane, 0});
    const bool own = found != lanes_.end() && found->agent == agent && found->lane == lane;
    return own ? std::max(found->epoch, of(agent)) : of(agent);
}

bool Epochs::cover_lane(int agent, int lane, std::uint32_t epoch) const {
    return std::any_of(lanes_.begin(), lanes_.end(), [&](const OfLane& x) {
        return x.agent == agent && (x.lane == lane || lane == kSeveral) && epoch <= x.epoch;
    });
}

void Epochs::add_to(Epochs& to, int begin, int end, int shift) const {
    for (int agent = begin; agent < std::min(end, static_cast<int>(all_.size())); ++agent)
        if (const std::uint32_t epoch = of(agent)) to.raise(shift + agent, epoch);
    for (const OfLane& x : lanes_)
        if (x.agent >= begin && x.agent < end) to.raise(shift + x.agent, x.lane, x.epoch);
}

std::vector<Epochs::OfLane> Epochs::lanes_with(const Epochs& others) const {
    std::vector<OfLane> both(lanes_.size() + others.lanes_.size());
    std::merge(lanes_.begin(), lanes_.end(), others.lanes_.begin(), others.lanes_.end(), both.begin());
    return both;
}

void Epochs::join(const Epochs& others) {
    if (all_.size() < others.all_.size()) all_.resize(others.all_.size());
    for (std::size_t i = 0; i < others.all_.size(); ++i) all_[i] = std::max(all_[i], others.all_[i]);
    if (!others.lanes_.empty()) lanes_ = lanes_with(others);
    if (!lanes_.empty()) tidy();
}

void Epochs::meet(const Epochs& others) {
    std::vector<OfLane> both = lanes_with(others);
    for (OfLane& x : both) x.epoch = std::min(of(x.agent, x.lane), others.of(x.agent, x.lane));
    all_.resize(std::min(all_.size(), others.all_.size()));
    for (std::size_t i = 0; i < all_.size(); ++i) all_[i] = std::min(all_[i], others.all_[i]);
    lanes_ = std::move(both);
    if (!lanes_.empty()) tidy();
}

/// Keeps one entry per lane, and none that says no more than its warp's. Entries of all lanes of a warp become one of
/// the warp.
void Epochs::tidy() {
    constexpr std::size_t kLanes = 32;
    std::size_t kept = 0, first = 0;  // entries, those before the agent's
    for (const OfLane x : lanes_) {
        if (x.epoch <= of(x.agent)) continue;
        if (kept > first && lanes_[kept - 1].agent != x.agent) first = kept;
        if (kept > first && lanes_[kept - 1].lane == x.lane) {
            lanes_[kept - 1].epoch = std::max(lanes_[kept - 1].epoch, x.epoch);
            continue;
        }
        lanes_[kept++] = x;
        if (kept - first < kLanes) continue;
        const auto begin = lanes_.begin() + static_cast<std::ptrdiff_t>(first), end = begin + kLanes;
        const std::uint32_t least =
            std::min_element(begin, end, [](const OfLane& a, const OfLane& b) { return a.epoch < b.epoch; })->epoch;
        raise(x.agent, least);
        kept = static_cast<std::size_t>(std::remove_if(begin, end, [&](const OfLane& a) { return a.epoch <= least; }) -
                                        lanes_.begin());
    }
    lanes_.resize(kept);
}

bool ordered(const Accessor& who, int warp, int lane, std::uint32_t epoch) {
    if (warp != who.warp) return who.clock->known.cover(warp, lane, epoch);
    if (epoch <= who.floor || (lane >= 0 && lane == who.lane) || who.clock->known.cover(warp, lane, epoch)) return true;
    // For several lanes this lane's own entry is taken, since they may have synchronised with it. A race may be missed,
    // none is made up.
    return who.seen && epoch <= who.seen[lane >= 0 ? lane : who.self];
}

// --- pages --------------------------------------------------------------------------------------------------------

void* map(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return p;
}

void unmap(void* pages, std::size_t bytes) {
    if (pages) munmap(pages, bytes);
}

// --- shared memory ------------------------------------------------------------------------------------------------

void SharedArena::begin(int blocks, std::size_t bytes, int warps, bool checks) {
    const std::size_t size = static_cast<std::size_t>(blocks) * kBytesPerBlock;
    if (size > size_) {
        memory_ = Pages<char>(size + kBase);
        const auto address = reinterpret_cast<std::uintptr_t>(&memory_[0]);
        base_ = &memory_[0] + (kBase - address % kBase) % kBase;
        size_ = size;
    }
    bytes_ = bytes, warps_ = warps;
    for (int i = 0; i < blocks; ++i) std::memset(of_block(i), 0xff, bytes);  // NaN in every floating type
    if (!checks) return;
    const std::size_t granules = size_ / kGranule;
    constexpr std::uint32_t kLastStart = 1u << 23;  // leaves a run as many epochs again before 24 bits are full
    if (granules != granules_ || first_epoch_ > kLastStart) {
        granules_ = granules, first_epoch_ = 1;
        writers_ = Pages<Writer>(granules);
        writer_pcs_ = Pages<const void*>(granules);
        others_ = Pages<Other>(granules);
        readers_.clear();
    }
    reading_.clear(), row_of_.clear();
}

Pages<SharedArena::Reader>& SharedArena::readers_of(int agent) {
    const auto i = static_cast<std::size_t>(agent);
    if (row_of_.size() <= i) row_of_.resize(i + 1, -1);
    if (row_of_[i] < 0) {
        row_of_[i] = static_cast<int>(reading_.size());
        reading_.push_back(agent);
        // Rows of earlier runs are used again: their records are of the past
        if (readers_.size() < reading_.size()) readers_.emplace_back(granules_);
    }
    return readers_[static_cast<std::size_t>(row_of_[i])];
}

Conflict SharedArena::unfenced_writer(std::size_t g, const Accessor& who) const {
    const Writer& w = writers_[g];
    if (!who.async_proxy || w.warp >= warps_ || who.clock->published.cover(w.warp, w.lane, w.epoch)) return {};
    return {"missing fence.proxy.async", 0, w.warp, w.lane, writer_pcs_[g]};
}

Conflict SharedArena::unordered_writer(std::size_t g, const Accessor& who, const char* kind) const {
    const Writer& w = writers_[g];
    if (!ordered(who, w.warp, w.lane, w.epoch)) return {kind, 0, w.warp, w.lane, writer_pcs_[g]};
    if (!w.several) return {};
    const auto& [o, pc] = others_[g];
    return ordered(who, o.warp, o.lane, o.epoch) ? Conflict{} : Conflict{kind, 0, o.warp, o.lane, pc};
}

Conflict SharedArena::read(std::uintptr_t address, int bytes, const Accessor& who, const void* pc) {
    const std::size_t end = granule(address + static_cast<std::uintptr_t>(bytes) - 1) + 1;
    const Pages<Reader>& mine = readers_of(who.warp);
    for (std::size_t g = granule(address); g < end; ++g) {
        const Writer& w = writers_[g];
        if (w.epoch < first_epoch_) return {"read of uninitialised shared memory", who.block, -1, -1, nullptr};
        if (w.pending)
            return {"read of an asynchronous copy's target before its wait", 0, w.warp, w.lane, writer_pcs_[g]};
        if (w.barrier) return {"access to a barrier as to ordinary memory", 0, w.warp, w.lane, writer_pcs_[g]};
        if (const Conflict conflict = unordered_writer(g, who, "read after write")) return conflict;
        if (const Conflict conflict = unfenced_writer(g, who)) return conflict;
        Reader& r = mine[g];
        // A lane that has synchronised with the earlier readers stands for them
        const bool replaces = who.lane == kTogether || r.epoch <= who.floor || ordered(who, who.warp, r.lane, r.epoch);
        r = {pc, who.epoch & 0xffffff, static_cast<std::int8_t>(replaces ? who.lane : kSeveral)};
    }
    return {};
}

Conflict SharedArena::write(std::uintptr_t address, int bytes, const Accessor& who, const void* pc, bool atomic) {
    const std::size_t end = granule(address + static_cast<std::uintptr_t>(bytes) - 1) + 1;
    for (std::size_t g = granule(address); g < end; ++g) {
        Writer& w = writers_[g];
        Writer now{who.epoch, static_cast<std::uint16_t>(who.warp), static_cast<std::int8_t>(who.lane), atomic, 0, 0,
                   0};
        if (w.epoch >= first_epoch_) {
            if (w.pending)
                return {"write to an asynchronous copy's target before its wait", 0, w.warp, w.lane, writer_pcs_[g]};
            if (w.barrier) return {"access to a barrier as to ordinary memory", 0, w.warp, w.lane, writer_pcs_[g]};
            if (!(atomic && w.atomic)) {
                if (const Conflict conflict = unordered_writer(g, who, "write after write")) return conflict;
                if (const Conflict conflict = unfenced_writer(g, who)) return conflict;
            } else {
                now.several = w.several;
                if (!ordered(who, w.warp, w.lane, w.epoch)) {
                    if (w.warp == who.warp) now.lane = kSeveral;
                    else others_[g] = {w, writer_pcs_[g]}, now.several = 1;
                }
            }
        } else if (atomic) {
            return {"read of uninitialised shared memory", who.block, -1, -1, nullptr};
        }
        for (std::size_t i = 0; i < reading_.size(); ++i) {
            const Reader& r = readers_[i][g];
            if (r.epoch < first_epoch_ || read_before(who, reading_[i], r.lane, r.epoch)) continue;
            return {"write after read", 0, reading_[i], r.lane, r.pc};
        }
        w = now;
        writer_pcs_[g] = pc;
    }
    return {};
}

Conflict SharedArena::begin_async(std::uintptr_t address, int bytes, const Accessor& who, const void* pc) {
    const Conflict conflict = write(address, bytes, who, pc, false);
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g].pending = 1;
    return conflict;
}

void SharedArena::landed(std::uintptr_t address, int bytes, const Accessor& who) {
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g].pending = 0, writers_[g].epoch = who.epoch;
}

Conflict SharedArena::begin_async(std::uintptr_t address, int bytes, const Accessor& who, int agent,
                                  std::uint32_t epoch, const void* pc) {
    const Conflict conflict = write(address, bytes, who, pc, false);
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g] = {epoch, static_cast<std::uint16_t>(agent), kTogether, 0, 1, 0, 0};
    return conflict;
}

void SharedArena::landed(std::uintptr_t address, int bytes) {
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g].pending = 0;
}

Conflict SharedArena::make_barrier(std::uintptr_t address, int bytes, const Accessor& who, const void* pc) {
    const Conflict conflict = write(address, bytes, who, pc, false);
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g].barrier = 1;
    return conflict;
}

// --- global memory ------------------------------------------------------------------------------------------------

namespace {

// A record of an access, in 64 bits. For readers and for atomic writers, two records are kept, and whether several
// clusters have accessed.
struct Record {
    std::uint32_t block;  // + 1; 0: no access
    int warp, lane;       // lane, kTogether or kSeveral
    bool flag;            // of a writer: atomic; of readers: of several clusters
    std::uint32_t epoch;

    static constexpr int kLanes = 64, kPacked = 128;  // negative lanes are at the top of 7 bits
    static Record unpack(std::uint64_t r) {
        const auto lane = static_cast<int>(r >> 25 & (kPacked - 1));
        return {static_cast<std::uint32_t>(r >> 40), static_cast<int>(r >> 32 & 255),
                lane < kLanes ? lane : lane - kPacked, (r >> 24 & 1) != 0, static_cast<std::uint32_t>(r & 0xffffff)};
    }
    std::uint64_t pack() const {
        return std::uint64_t{block} << 40 | static_cast<std::uint64_t>(warp & 255) << 32 |
               static_cast<std::uint64_t>(lane & (kPacked - 1)) << 25 | std::uint64_t{flag} << 24 | (epoch & 0xffffff);
    }
    /// `read`: whether this is the record of a read.
    bool before(const Accessor& who, bool read) const {
        if (block == 0) return true;
        const auto in_order = [&] {
            return read ? read_before(who, warp, lane, epoch) : ordered(who, warp, lane, epoch);
        };
        if (block == who.block + 1) return in_order();
        if (g_memory.same_cluster(block - 1, who.block) && in_order()) return true;
        return who.clock->counted.cover(g_memory.first_warp(block - 1) + warp, lane, epoch);
    }
};

using Accesses = GlobalMemory::Watched::Accesses;

/// Makes `who` the last accessor, and returns the previous one. If the previous one is not in order with `who` and this
/// is no finding (both read or, with `atomic`, both are atomic), it is kept as `other`.
std::pair<Record, const void*> put(Accesses& a, std::size_t g, const Accessor& who, bool readers, bool atomic,
                                   const void* pc) {
    std::uint64_t before = __atomic_load_n(&a.last[g], __ATOMIC_RELAXED), after;
    Record was, now;
    bool keep;
    do {
        was = Record::unpack(before);
        now = {who.block + 1, who.warp, who.lane, atomic, who.epoch};
        if (readers)
            now.flag = was.block != 0 &&
                       (was.flag || (was.block != now.block && !g_memory.same_cluster(was.block - 1, who.block)));
        keep = (readers || (atomic && was.flag)) && !was.before(who, readers);
        if (keep && was.block == now.block && was.warp == now.warp) {
            if (now.lane != kTogether) now.lane = kSeveral;
            keep = false;
        }
        after = now.pack();
    } while (before != after &&
             !__atomic_compare_exchange_n(&a.last[g], &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    const void* was_pc = __atomic_exchange_n(&a.last_pcs[g], pc, __ATOMIC_RELAXED);
    const Record other = Record::unpack(__atomic_load_n(&a.other[g], __ATOMIC_RELAXED));
    // Little orders accesses of different blocks, so a record of another block stays
    if (keep && (was.block != now.block || other.block == 0 || other.block == now.block)) {
        __atomic_store_n(&a.other[g], before, __ATOMIC_RELAXED);
        __atomic_store_n(&a.other_pcs[g], was_pc, __ATOMIC_RELAXED);
    }
    return {was, was_pc};
}

Conflict conflict(const char* kind, const Record& r, const void* pc) { return {kind, r.block - 1, r.warp, r.lane, pc}; }

/// The conflict of `who` with the `other` record, if the two are not in order.
Conflict with_other(const Accesses& a, std::size_t g, const Accessor& who, bool readers, const char* kind) {
    const Record r = Record::unpack(__atomic_load_n(&a.other[g], __ATOMIC_RELAXED));
    if (r.before(who, readers)) return {};
    return conflict(kind, r, __atomic_load_n(&a.other_pcs[g], __ATOMIC_RELAXED));
}

}  // namespace

void GlobalMemory::set(const Buffer* buffers, std::size_t count) {
    buffers_.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const auto begin = reinterpret_cast<std::uintptr_t>(buffers[i].data);
        buffers_.emplace_back();
        Watched& b = buffers_.back();
        b.name = buffers[i].name, b.begin = begin, b.end = begin + buffers[i].bytes, b.writable = buffers[i].writable;
    }
}

void GlobalMemory::begin_launch(bool checks, int blocks, int warps) {
    blocks_ = static_cast<std::uint32_t>(blocks), warps_ = warps;
    counters.clocks.clear();
    for (Watched& b : buffers_) {
        if (!checks || !b.writable) continue;
        const std::size_t granules = (b.end - b.begin) / kGranule + 2;
        b.writers = Watched::Accesses(granules), b.readers = Watched::Accesses(granules);
    }
}

GlobalMemory::Watched* GlobalMemory::find(std::uintptr_t address, int bytes) {
    // Prefers a writable buffer: tensors may overlap, as the views of a packed tensor do
    Watched* found = nullptr;
    for (Watched& b : buffers_)
        if (address >= b.begin && address + static_cast<std::uintptr_t>(bytes) <= b.end && (!found || b.writable))
            found = &b;
    return found;
}

std::string GlobalMemory::nearest(std::uintptr_t address) const {
    std::uintptr_t least = ~std::uintptr_t{0};
    std::string text = "far from every argument";
    for (const Watched& b : buffers_) {
        const bool before = address < b.begin;
        const std::uintptr_t distance = before ? b.begin - address : address >= b.end ? address - b.end : 0;
        if (distance >= least || distance > (1u << 20)) continue;
        least = distance;
        text = !before && address < b.end ? "across the end of " + b.name
                                          : std::to_string(distance) + " bytes " +
                                                (before ? "before the start of " : "past the end of ") + b.name;
    }
    return text;
}

Conflict GlobalMemory::read(Watched& b, std::uintptr_t address, int bytes, const Accessor& who, const void* pc) {
    const std::size_t end = (address + static_cast<std::uintptr_t>(bytes) - 1 - b.begin) / kGranule + 1;
    for (std::size_t g = (address - b.begin) / kGranule; g < end; ++g) {
        // Records first, then checks, as in write(): of a simultaneous reader and writer, at least one sees the other
        put(b.readers, g, who, true, false, pc);
        constexpr const char* kKind = "read after write";
        const Record w = Record::unpack(__atomic_load_n(&b.writers.last[g], __ATOMIC_SEQ_CST));
        if (!w.before(who, false)) return conflict(kKind, w, __atomic_load_n(&b.writers.last_pcs[g], __ATOMIC_RELAXED));
        if (!w.flag) continue;
        if (const Conflict other = with_other(b.writers, g, who, false, kKind)) return other;
    }
    return {};
}

Conflict GlobalMemory::write(Watched& b, std::uintptr_t address, int bytes, const Accessor& who, const void* pc,
                             bool atomic) {
    const std::size_t end = (address + static_cast<std::uintptr_t>(bytes) - 1 - b.begin) / kGranule + 1;
    for (std::size_t g = (address - b.begin) / kGranule; g < end; ++g) {
        const auto [w, w_pc] = put(b.writers, g, who, false, atomic, pc);
        if (!(atomic && w.flag)) {
            constexpr const char* kKind = "write after write";
            if (!w.before(who, false)) return conflict(kKind, w, w_pc);
            if (w.flag)
                if (const Conflict other = with_other(b.writers, g, who, false, kKind)) return other;
        }
        constexpr const char* kKind = "write after read";
        const Record r = Record::unpack(__atomic_load_n(&b.readers.last[g], __ATOMIC_SEQ_CST));
        if (r.flag || !r.before(who, true))
            return conflict(kKind, r, __atomic_load_n(&b.readers.last_pcs[g], __ATOMIC_RELAXED));
        if (const Conflict other = with_other(b.readers, g, who, true, kKind)) return other;
    }
    return {};
}

}  // namespace flash_wmma::emulator
