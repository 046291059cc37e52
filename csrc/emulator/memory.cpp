// The records of shared and global memory, and the rules by which two accesses are in order or in conflict.
#include "emulator/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace flash_wmma::emulator {

GlobalMemory g_memory;

namespace {
constexpr std::size_t kMaxLanes = 64;
}

void Clock::raise(Epochs& epochs, int agent, std::uint32_t epoch) {
    const auto i = static_cast<std::size_t>(agent);
    if (epochs.size() <= i) epochs.resize(i + 1);
    epochs[i] = std::max(epochs[i], epoch);
}

void Clock::raise(Epochs& epochs, const Epochs& others) {
    if (epochs.size() < others.size()) epochs.resize(others.size());
    for (std::size_t i = 0; i < others.size(); ++i) epochs[i] = std::max(epochs[i], others[i]);
}

void Clock::lower(Epochs& epochs, const Epochs& others) {
    epochs.resize(std::min(epochs.size(), others.size()));
    for (std::size_t i = 0; i < epochs.size(); ++i) epochs[i] = std::min(epochs[i], others[i]);
}

void* map(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return p;
}

void unmap(void* pages, std::size_t bytes) {
    if (pages) munmap(pages, bytes);
}

bool ordered(const Accessor& who, int warp, int lane, std::uint32_t epoch) {
    if (warp != who.warp) return epoch <= who.clock->known(warp);
    if (epoch <= who.floor || (lane >= 0 && lane == who.lane)) return true;
    // Of several lanes: since they and this one may have synchronised. A race may so be missed, none is made up.
    return who.seen && epoch <= who.seen[lane >= 0 ? lane : who.lane];
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
    fenced_.assign(static_cast<std::size_t>(warps) * kMaxLanes, 0);
}

Pages<SharedArena::Reader>& SharedArena::readers_of(int agent) {
    const auto i = static_cast<std::size_t>(agent);
    if (row_of_.size() <= i) row_of_.resize(i + 1, -1);
    if (row_of_[i] < 0) {
        row_of_[i] = static_cast<int>(reading_.size());
        reading_.push_back(agent);
        // Rows of runs before are used again: what they say is of the past
        if (readers_.size() < reading_.size()) readers_.emplace_back(granules_);
    }
    return readers_[static_cast<std::size_t>(row_of_[i])];
}

void SharedArena::fence(const Accessor& who) {
    fenced_[static_cast<std::size_t>(who.warp) * kMaxLanes + static_cast<std::size_t>(who.lane)] = who.epoch();
}

Conflict SharedArena::unfenced_writer(std::size_t g, const Accessor& who) const {
    const Writer& w = writers_[g];
    if (!who.async_proxy || w.warp >= warps_) return {};
    bool fenced = w.epoch <= who.clock->published(w.warp);
    constexpr int kLanes = 32;
    for (int l = std::max<int>(w.lane, 0); l < (w.lane < 0 ? kLanes : w.lane + 1); ++l)
        fenced = fenced && w.epoch <= fenced_[w.warp * kMaxLanes + static_cast<std::size_t>(l)];
    if (fenced) return {};
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
        // A lane that has synchronised with the readers before stands for them
        const bool replaces = r.epoch <= who.floor || ordered(who, who.warp, r.who(), r.epoch);
        r.many = replaces ? who.lane < 0 : 1;
        r.lane = who.lane & 63;
        r.epoch = who.epoch() & 0xffffff;
        r.pc = pc;
    }
    return {};
}

Conflict SharedArena::write(std::uintptr_t address, int bytes, const Accessor& who, const void* pc, bool atomic) {
    const std::size_t end = granule(address + static_cast<std::uintptr_t>(bytes) - 1) + 1;
    for (std::size_t g = granule(address); g < end; ++g) {
        Writer& w = writers_[g];
        Writer now{
            who.epoch(), static_cast<std::uint16_t>(who.warp), static_cast<std::int8_t>(who.lane), atomic, 0, 0, 0};
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
                    if (w.warp == who.warp) now.lane = -1;
                    else others_[g] = {w, writer_pcs_[g]}, now.several = 1;
                }
            }
        } else if (atomic) {
            return {"read of uninitialised shared memory", who.block, -1, -1, nullptr};
        }
        for (std::size_t i = 0; i < reading_.size(); ++i) {
            const Reader& r = readers_[i][g];
            if (r.epoch < first_epoch_ || ordered(who, reading_[i], r.who(), r.epoch)) continue;
            return {"write after read", 0, reading_[i], r.who(), r.pc};
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
        writers_[g].pending = 0, writers_[g].epoch = who.epoch();
}

Conflict SharedArena::begin_async(std::uintptr_t address, int bytes, const Accessor& who, int agent,
                                  std::uint32_t epoch, const void* pc) {
    const Conflict conflict = write(address, bytes, who, pc, false);
    for (std::size_t g = granule(address); g < granule(address) + static_cast<std::size_t>(bytes / kGranule); ++g)
        writers_[g] = {epoch, static_cast<std::uint16_t>(agent), -1, 0, 1, 0, 0};
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

// A record of an access, in 64 bits. Of readers and of atomic writers two are kept, and whether several blocks have
// been.
struct Record {
    std::uint32_t block;  // + 1; 0: no access
    int warp, lane;       // lane -1: several of the warp
    bool flag;            // of a writer: atomic; of readers: of several blocks
    std::uint32_t epoch;

    static constexpr std::uint32_t kSeveral = 127;
    static Record unpack(std::uint64_t r) {
        const auto lane = static_cast<std::uint32_t>(r >> 25 & 127);
        return {static_cast<std::uint32_t>(r >> 40), static_cast<int>(r >> 32 & 255),
                lane == kSeveral ? -1 : static_cast<int>(lane), (r >> 24 & 1) != 0,
                static_cast<std::uint32_t>(r & 0xffffff)};
    }
    std::uint64_t pack() const {
        return std::uint64_t{block} << 40 | static_cast<std::uint64_t>(warp & 255) << 32 |
               static_cast<std::uint64_t>(static_cast<std::uint32_t>(lane) & 127) << 25 | std::uint64_t{flag} << 24 |
               (epoch & 0xffffff);
    }
    bool before(const Accessor& who) const {
        return block == 0 || (block == who.block + 1 && ordered(who, warp, lane, epoch));
    }
};

using Accesses = GlobalMemory::Watched::Accesses;

/// Makes `who` the last, and returns the one before it. One that is not in order with `who` is kept too, if this is no
/// finding: if both read or, `atomic`, both are atomic.
std::pair<Record, const void*> put(Accesses& a, std::size_t g, const Accessor& who, bool readers, bool atomic,
                                   const void* pc) {
    std::uint64_t before = __atomic_load_n(&a.last[g], __ATOMIC_RELAXED), after;
    Record was, now;
    bool keep;
    do {
        was = Record::unpack(before);
        now = {who.block + 1, who.warp, who.lane, atomic, who.epoch()};
        if (readers) now.flag = was.block != 0 && (was.flag || was.block != now.block);
        keep = (readers || (atomic && was.flag)) && !was.before(who);
        if (keep && was.block == now.block && was.warp == now.warp) now.lane = -1, keep = false;
        after = now.pack();
    } while (before != after &&
             !__atomic_compare_exchange_n(&a.last[g], &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    const void* was_pc = __atomic_exchange_n(&a.last_pcs[g], pc, __ATOMIC_RELAXED);
    const Record other = Record::unpack(__atomic_load_n(&a.other[g], __ATOMIC_RELAXED));
    // Nothing orders other blocks: such a one stays
    if (keep && (was.block != now.block || other.block == 0 || other.block == now.block)) {
        __atomic_store_n(&a.other[g], before, __ATOMIC_RELAXED);
        __atomic_store_n(&a.other_pcs[g], was_pc, __ATOMIC_RELAXED);
    }
    return {was, was_pc};
}

Conflict conflict(const char* kind, const Record& r, const void* pc) { return {kind, r.block - 1, r.warp, r.lane, pc}; }

/// Of the one before the last the conflict with `who`, if they are not in order.
Conflict with_other(const Accesses& a, std::size_t g, const Accessor& who, const char* kind) {
    const Record r = Record::unpack(__atomic_load_n(&a.other[g], __ATOMIC_RELAXED));
    if (r.before(who)) return {};
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

void GlobalMemory::begin_launch(bool checks) {
    for (Watched& b : buffers_) {
        if (!checks || !b.writable) continue;
        const std::size_t granules = (b.end - b.begin) / kGranule + 2;
        b.writers = Watched::Accesses(granules), b.readers = Watched::Accesses(granules);
    }
}

GlobalMemory::Watched* GlobalMemory::find(std::uintptr_t address, int bytes) {
    // A writable buffer first: tensors may overlap, as the views of a packed tensor do
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
        // Recorded first, then checked, as in write(): of a reader and a writer at the same time one sees the other
        put(b.readers, g, who, true, false, pc);
        constexpr const char* kKind = "read after write";
        const Record w = Record::unpack(__atomic_load_n(&b.writers.last[g], __ATOMIC_SEQ_CST));
        if (!w.before(who)) return conflict(kKind, w, __atomic_load_n(&b.writers.last_pcs[g], __ATOMIC_RELAXED));
        if (!w.flag) continue;
        if (const Conflict other = with_other(b.writers, g, who, kKind)) return other;
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
            if (!w.before(who)) return conflict(kKind, w, w_pc);
            if (w.flag)
                if (const Conflict other = with_other(b.writers, g, who, kKind)) return other;
        }
        constexpr const char* kKind = "write after read";
        const Record r = Record::unpack(__atomic_load_n(&b.readers.last[g], __ATOMIC_SEQ_CST));
        if (r.flag || !r.before(who))
            return conflict(kKind, r, __atomic_load_n(&b.readers.last_pcs[g], __ATOMIC_RELAXED));
        if (const Conflict other = with_other(b.readers, g, who, kKind)) return other;
    }
    return {};
}

}  // namespace flash_wmma::emulator
