// Barriers in shared memory that count arrivals and bytes, and the tensor copies whose bytes they count.
//
// A copy lands when a lane waits for a phase that lacks only bytes: the last legal moment. Until then its target is
// pending, and a phase for which no lane announced the bytes completes without them, as it may on hardware. A store
// reads its source, and writes, when its lane's wait lets it pass.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "emulator/machine.h"

namespace flash_wmma::emulator {
namespace {

constexpr std::int64_t kMostBytes = (1 << 20) - 1;  // the most that a phase can wait for
constexpr unsigned kMostArrivals = (1 << 20) - 1;
constexpr int kUnit = 16;  // bytes that swizzles move together

/// Calls row(bytes from the start of the box, first byte of the tensor or null, elements before those inside the
/// tensor, elements inside it) for each row of the box.
template <class Row>
void for_each_row(const TensorCopy& copy, Row row) {
    const TensorMap& map = copy.map;
    int rows = 1;
    for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
    const std::int64_t first = copy.at[0], last = std::min<std::int64_t>(first + map.box[0], map.size[0]);
    const int before = static_cast<int>(std::clamp<std::int64_t>(-first, 0, map.box[0]));
    const int inside = static_cast<int>(std::max<std::int64_t>(last - first - before, 0));
    for (int r = 0; r < rows; ++r) {
        const char* from = static_cast<const char*>(map.data) + (first + before) * map.element_bytes;
        bool outside = inside == 0;
        for (int d = 1, rest = r; d < map.rank; rest /= map.box[d++]) {
            const std::int64_t i = std::int64_t{copy.at[static_cast<std::size_t>(d)]} + rest % map.box[d];
            outside = outside || i < 0 || i >= map.size[d];
            from += i * map.stride[d];
        }
        row(r * map.box[0] * map.element_bytes, outside ? nullptr : from, before, outside ? 0 : inside);
    }
}

/// Calls piece(its place in shared memory, bytes before it, its bytes) for each unit, or part of one, of `bytes` bytes
/// from `offset` on, counted from the start of the box before the swizzle.
template <class Piece>
void for_each_piece(const TensorCopy& copy, int offset, int bytes, Piece piece) {
    for (int i = 0, size; i < bytes; i += size) {
        size = std::min(bytes - i, kUnit - (offset + i) % kUnit);
        piece(swizzled(static_cast<char*>(copy.shared) + offset + i, copy.map.swizzle), i, size);
    }
}

void count(Counters& counters, const TensorCopy& copy, Instruction what) {
    std::uint64_t sectors = 0, bytes = 0;
    constexpr std::uintptr_t kSector = 32;
    for_each_row(copy, [&](int, const char* row, int, int inside) {
        if (!row) return;
        const auto first = reinterpret_cast<std::uintptr_t>(row);
        const auto size = static_cast<std::uintptr_t>(inside * copy.map.element_bytes);
        sectors += (first + size - 1) / kSector - first / kSector + 1;
        bytes += size;
    });
    counters.add_copy(copy.event.pc, what, static_cast<std::uint64_t>(copy.bytes), sectors,
                      (bytes + kSector - 1) / kSector);
}

/// The brick. Copies of bytes in order are taken as tensors of one dimension.
const char* name_of(const TensorMap& map) { return map.rank == 1 ? "bulk_load" : "tensor_load"; }

}  // namespace

const char* refuse_tensor_map(const TensorMap& map) {
    const std::int64_t row_bytes = std::int64_t{map.box[0]} * map.element_bytes;
    if (reinterpret_cast<std::uintptr_t>(map.data) % 16) return "the data are not 16-byte aligned";
    if (row_bytes % 16) return "rows of the box are no multiple of 16 bytes";
    if (map.swizzle > 1 && row_bytes > 16 * map.swizzle) return "rows of the box are wider than the swizzle";
    for (int d = 0; d < map.rank; ++d) {
        if (map.size[d] < 1 || map.size[d] > std::int64_t{1} << 32) return "a size is not in 1 to 2^32";
        if (map.box[d] < 1 || map.box[d] > 256) return "a size of the box is not in 1 to 256";
        if (d > 0 && (map.stride[d] < 0 || map.stride[d] % 16 || map.stride[d] >= std::int64_t{1} << 40))
            return "a stride is no multiple of 16 bytes below 2^40";
    }
    return nullptr;
}

// --- barriers --------------------------------------------------------------------------------------------------------

TransactionBarrier& Worker::transaction_barrier(const void* address, const char* use, Site site) {
    const auto found = barriers.find(address);
    if (found == barriers.end())
        stop(finding("a barrier that is not initialised", describe(*t_lane) + " in " + use, source_line(site)));
    TransactionBarrier& b = found->second;
    if (config.checks && !warp_of(*t_lane).clock.known.cover(b.warp, b.lane, b.epoch) &&
        !ordered(accessor(*t_lane), b.warp, b.lane, b.epoch))
        stop(finding("a barrier that may not be initialised yet", describe(*t_lane) + " in " + use, source_line(site),
                     describe(warps[static_cast<std::size_t>(b.warp)]) + ", at " + source_line(b.site) +
                         ": nothing orders the two"));
    return b;
}

void Worker::barrier_init(void* address, unsigned arrivals, Site site, const void* pc) {
    Lane& lane = *t_lane;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const auto refuse_init = [&](const std::string& why) {
        stop(finding(why, describe(lane) + " in barrier_init", source_line(site)));
    };
    if (!arena.contains(at) || arena.offset(at) + 8 > arena.bytes_per_block() || at % 8)
        refuse_init("a barrier is 8 aligned bytes of shared memory");
    if (arrivals < 1 || arrivals > kMostArrivals) refuse_init("a barrier of " + std::to_string(arrivals) + " arrivals");
    if (const auto old = barriers.find(address); old != barriers.end())
        stop(finding(
            "a barrier is initialised twice", describe(lane) + " in barrier_init", source_line(site),
            describe(warps[static_cast<std::size_t>(old->second.warp)]) + ", at " + source_line(old->second.site)));
    const Accessor who = accessor(lane);
    if (config.checks)
        if (const Conflict conflict = arena.make_barrier(at, 8, who, pc))
            stop_conflict(Access::kStore, describe(lane), at, 8, source_line(site), conflict, who.block);
    TransactionBarrier& b = barriers[address];
    b.arrivals = b.outstanding = arrivals;
    b.agent = new_agent();
    b.warp = lane.warp, b.lane = lane.lane, b.epoch = who.epoch, b.site = site;
}

void Worker::barrier_init_fence() {
    for (auto& [address, b] : barriers) b.fenced = b.fenced || (b.warp == t_lane->warp && b.lane == t_lane->lane);
}

void Worker::fence_proxy_async() {
    barrier_init_fence();
    if (!config.checks) return;
    // Publishes what this lane wrote, to this lane's knowledge alone; writes of other lanes stay unpublished, even if
    // they are in order with it
    Lane& lane = *t_lane;
    const std::uint32_t epoch = epochs_[static_cast<std::size_t>(lane.warp)]++;
    Clock clock;
    clock.published.raise(lane.warp, lane.lane, epoch);
    learn(lane, &lane, epoch, clock);
}

void Worker::end_phase(TransactionBarrier& b) {
    b.completed.join(b.arrived);
    b.outstanding = b.arrivals;
    b.completed_at = std::exchange(b.time, 0);
    ++b.phase;
}

void Worker::barrier_arrive(void* address, unsigned bytes, Site site, const void* pc) {
    constexpr const char* kName = "barrier_arrive";
    TransactionBarrier& b = transaction_barrier(address, kName, site);
    if (config.counters) log(pc, 0, 0, Instruction::kTransactionBarrier);
    b.time = std::max(b.time, time_of(*t_lane));
    if (!b.outstanding)
        stop(finding("more arrivals than a barrier's phase has",
                     describe(*t_lane) + " in " + kName + " of the barrier at byte " +
                         std::to_string(arena.offset(reinterpret_cast<std::uintptr_t>(address))) + ", " +
                         std::to_string(b.arrivals) + " have come to its phase " + std::to_string(b.phase),
                     source_line(site)));
    b.bytes += bytes;
    if (b.bytes > kMostBytes)
        stop(finding("a phase of more bytes than a barrier counts",
                     describe(*t_lane) + " in " + kName + ", " + std::to_string(b.bytes) + " bytes in all",
                     source_line(site)));
    if (config.checks) hand_on(*t_lane, b.arrived);
    if (--b.outstanding == 0 && b.bytes == 0) end_phase(b);
}

bool Worker::phase_done(TransactionBarrier& b, unsigned parity, const Lane& lane) {
    while (b.phase % 2 == parity && b.outstanding == 0 && !b.copies.empty()) {
        land(b.copies.front());
        if (config.counters) {
            Event& event = b.copies.front().event;
            event.released = std::max(event.arrived, time_of(lane));
            record(event, event.warp);
        }
        b.bytes -= b.copies.front().bytes;
        if (config.checks) {
            b.arrived.join(b.copies.front().clock);
            b.arrived.known.raise(b.agent, b.copies.front().epoch);
        }
        b.copies.pop_front();
        if (b.bytes == 0) end_phase(b);
    }
    return b.phase % 2 != parity;
}

void Worker::barrier_wait(void* address, unsigned parity, Site site, const void* pc) {
    TransactionBarrier& b = transaction_barrier(address, "barrier_wait", site);
    Lane& lane = *t_lane;
    if (config.counters) log(pc, 0, 0, Instruction::kTransactionBarrier);
    if (parity > 1) stop(finding("a parity that is neither 0 nor 1", describe(lane), source_line(site)));
    if (!phase_done(b, parity, lane)) {
        lane.barrier_at = &b, lane.parity = parity;
        wait_until(
            [](void* p) {
                const Lane& waiting = *static_cast<Lane*>(p);
                return t_worker->phase_done(const_cast<TransactionBarrier&>(*waiting.barrier_at), waiting.parity,
                                            waiting);
            },
            &lane, "barrier_wait", site);
        lane.barrier_at = nullptr;
    }
    if (const std::uint64_t arrived = time_of(lane); config.counters && arrived < b.completed_at) {
        lane.waited += b.completed_at - arrived;
        // The warp's wait is the wait of its first lane
        std::uint64_t& until = warp_of(lane).log.waited_until;
        if (until < b.completed_at)
            record({Event::Kind::kTransactionBarrier, 0, arrived, b.completed_at, pc}, lane.warp);
        until = std::max(until, b.completed_at);
    }
    if (config.checks) learn(lane, &b, b.phase, b.completed);
}

std::string Worker::state_of_barrier(const Lane& lane) const {
    if (!lane.barrier_at) return "";
    const TransactionBarrier& b = *lane.barrier_at;
    std::uintptr_t at = 0;
    for (const auto& [address, barrier] : barriers)
        if (&barrier == &b) at = reinterpret_cast<std::uintptr_t>(address);
    return ", for parity " + std::to_string(lane.parity) + " of the barrier at byte " +
           std::to_string(arena.offset(at)) + ": its phase " + std::to_string(b.phase) + " lacks " +
           std::to_string(b.outstanding) + " of " + std::to_string(b.arrivals) + " arrivals and " +
           std::to_string(b.bytes) + " bytes";
}

// --- copies ----------------------------------------------------------------------------------------------------------

TensorCopy Worker::new_copy(const void* shared, const TensorMap& map, const int* coordinates, const char* name,
                            const char* what, Site site, const void* pc) {
    const Lane& lane = *t_lane;
    const auto address = reinterpret_cast<std::uintptr_t>(shared);
    const std::uint64_t now = time_of(lane);
    TensorCopy copy{const_cast<void*>(shared),
                    map,
                    {},
                    map.element_bytes,
                    0,
                    {},
                    site,
                    {Event::Kind::kTensorCopy, lane.warp, now, now, pc}};
    for (int d = 0; d < map.rank; ++d) {
        copy.at[static_cast<std::size_t>(d)] = coordinates[d];
        copy.bytes *= map.box[d];
    }
    const auto refuse_copy = [&](const std::string& why) {
        stop(finding(why, describe(lane) + " in " + name, source_line(site)));
    };
    const int alignment = map.rank == 1 ? kUnit : 128 * map.swizzle;  // of the swizzle's pattern
    if (!arena.contains(address)) refuse_copy(what + std::string(" an address outside shared memory"));
    if (address % static_cast<std::uintptr_t>(alignment))
        refuse_copy(what + (" a place that is not " + std::to_string(alignment)) + "-byte aligned");
    if (arena.offset(address) + static_cast<std::size_t>(copy.bytes) > arena.bytes_per_block())
        refuse_copy("out of bounds of shared memory (" + std::to_string(arena.bytes_per_block()) + " bytes)");
    return copy;
}

void Worker::tensor_load(void* shared, const TensorMap& map, void* barrier, const int* coordinates, Site site,
                         const void* pc) {
    const char* const name = name_of(map);
    TransactionBarrier& b = transaction_barrier(barrier, name, site);
    TensorCopy copy = new_copy(shared, map, coordinates, name, "a tensor copy to", site, pc);
    b.time = std::max(b.time, copy.event.arrived);
    if (config.checks) {
        copy.epoch = ++epochs_[static_cast<std::size_t>(b.agent)];
        check_tensor_load(copy, b, pc);
        hand_on(*t_lane, copy.clock);
    }
    if (config.counters) count(counters, copy, Instruction::kTensorCopy);
    b.copies.push_back(std::move(copy));
}

void Worker::check_tensor_load(const TensorCopy& copy, const TransactionBarrier& b, const void* pc) {
    Lane& lane = *t_lane;
    const auto to = reinterpret_cast<std::uintptr_t>(copy.shared);
    const std::string line = source_line(copy.site), name = name_of(copy.map);
    Accessor who = accessor(lane);
    if (!b.fenced)
        stop(finding("a tensor copy may not see that its barrier is initialised",
                     describe(lane) + " in " + name + ", without barrier_init_fence", line,
                     describe(warps[static_cast<std::size_t>(b.warp)]) + ", at " + source_line(b.site)));
    for_each_row(copy, [&](int, const char* from, int, int inside) {
        if (!from || !g_memory.known()) return;
        const auto address = reinterpret_cast<std::uintptr_t>(from);
        const int bytes = inside * copy.map.element_bytes;
        GlobalMemory::Watched* buffer = g_memory.find(address, bytes);
        if (!buffer)
            stop(finding("out of bounds of global memory, " + g_memory.nearest(address),
                         describe(lane) + " in " + name + " reads " + std::to_string(bytes) + " bytes", line));
        if (!buffer->writable) return;
        if (const Conflict conflict = g_memory.read(*buffer, address, bytes, who, pc))
            stop_conflict(Access::kAsyncLoad, describe(lane) + ", in " + name + ",", address, bytes, line, conflict,
                          who.block);
    });
    who.async_proxy = true;
    if (const Conflict conflict = arena.begin_async(to, copy.bytes, who, b.agent, copy.epoch, pc))
        stop_conflict(Access::kAsyncStore, describe(lane) + ", in " + name + ",", to, copy.bytes, line, conflict,
                      who.block);
}

void Worker::land(const TensorCopy& copy) {
    const int row_bytes = copy.map.box[0] * copy.map.element_bytes;
    std::vector<char> row(static_cast<std::size_t>(row_bytes));
    for_each_row(copy, [&](int offset, const char* from, int before, int inside) {
        std::fill(row.begin(), row.end(), 0);
        const int bytes = copy.map.element_bytes;
        if (from)
            std::memcpy(&row[static_cast<std::size_t>(before * bytes)], from, static_cast<std::size_t>(inside * bytes));
        for_each_piece(copy, offset, row_bytes, [&](char* to, int i, int size) {
            std::memcpy(to, &row[static_cast<std::size_t>(i)], static_cast<std::size_t>(size));
        });
    });
    if (config.checks) arena.landed(reinterpret_cast<std::uintptr_t>(copy.shared), copy.bytes);
}

// --- stores ----------------------------------------------------------------------------------------------------------

void Worker::tensor_store(const TensorMap& map, const void* shared, const int* coordinates, Site site, const void* pc) {
    constexpr int kRank = 4;  // of the instruction
    Lane& lane = *t_lane;
    if (map.rank != kRank)
        stop(finding(
            "a tensor store by a map of " + std::to_string(map.rank) + " dimensions, not " + std::to_string(kRank),
            describe(lane) + " in tensor_store", source_line(site)));
    // On an H100 an illegal instruction
    if (std::any_of(coordinates, coordinates + kRank, [](int x) { return x < 0; }))
        stop(finding("a tensor store from negative coordinates", describe(lane) + " in tensor_store",
                     source_line(site)));
    TensorCopy store = new_copy(shared, map, coordinates, "tensor_store", "a tensor store from", site, pc);
    store.group = lane.store_group;
    if (config.checks) check_tensor_store(store, pc);
    if (config.counters) count(counters, store, Instruction::kTensorStore);
    lane.stores.push_back(std::move(store));
}

/// The store reads its source from now on, as an agent that knows what its lane knows now. The lane learns at its wait
/// that the agent is done.
void Worker::check_tensor_store(TensorCopy& store, const void* pc) {
    Lane& lane = *t_lane;
    if (lane.store_agent < 0) lane.store_agent = new_agent();
    store.epoch = ++epochs_[static_cast<std::size_t>(lane.store_agent)];
    Clock clock;
    hand_on(lane, clock);
    const Accessor who{
        accessor(lane).block, lane.store_agent, kTogether, store.epoch, &clock, 0, nullptr, kTogether, true};
    const int element = store.map.element_bytes;
    for_each_row(store, [&](int offset, const char*, int before, int inside) {
        for_each_piece(store, offset + before * element, inside * element, [&](char* from, int, int bytes) {
            const auto address = reinterpret_cast<std::uintptr_t>(from);
            if (const Conflict conflict = arena.read(address, bytes, who, pc))
                stop_conflict(Access::kAsyncLoad, describe(lane) + ", in tensor_store,", address, bytes,
                              source_line(store.site), conflict, who.block);
        });
    });
}

void Worker::land_store(const TensorCopy& store) {
    Lane& lane = *t_lane;
    const int element = store.map.element_bytes;
    for_each_row(store, [&](int offset, const char* row, int before, int inside) {
        if (!row) return;
        const auto address = reinterpret_cast<std::uintptr_t>(row);
        const int bytes = inside * element;
        if (config.checks && g_memory.known()) {
            const auto refuse_row = [&](const std::string& why) {
                stop(finding(why, describe(lane) + " in tensor_store writes " + std::to_string(bytes) + " bytes",
                             source_line(store.site)));
            };
            GlobalMemory::Watched* buffer = g_memory.find(address, bytes);
            if (!buffer) refuse_row("out of bounds of global memory, " + g_memory.nearest(address));
            if (!buffer->writable) refuse_row("write to an input");
            const Accessor who = accessor(lane);
            if (const Conflict conflict = g_memory.write(*buffer, address, bytes, who, store.event.pc, false))
                stop_conflict(Access::kAsyncStore, describe(lane) + ", in tensor_store,", address, bytes,
                              source_line(store.site), conflict, who.block);
        }
        for_each_piece(store, offset + before * element, bytes, [&](const char* from, int i, int size) {
            std::memcpy(const_cast<char*>(row) + i, from, static_cast<std::size_t>(size));
        });
    });
}

void Worker::store_wait_read(int pending) {
    Lane& lane = *t_lane;
    const auto end = std::find_if(lane.stores.begin(), lane.stores.end(),
                                  [&](const TensorCopy& store) { return store.group >= lane.store_group - pending; });
    if (end == lane.stores.begin()) return;
    for (auto store = lane.stores.begin(); store != end; ++store) {
        land_store(*store);
        if (!config.counters) continue;
        store->event.released = std::max(store->event.arrived, time_of(lane));
        record(store->event, lane.warp);
    }
    if (config.checks) {
        const std::uint32_t epoch = std::prev(end)->epoch;
        Clock clock;
        clock.known.raise(lane.store_agent, epoch);
        learn(lane, &lane.stores, epoch, clock);
    }
    lane.stores.erase(lane.stores.begin(), end);
}

// --- the interface of runtime.h --------------------------------------------------------------------------------------

void transaction_barrier_init(void* barrier, unsigned arrivals, Site site, const void* pc) {
    t_worker->barrier_init(barrier, arrivals, site, pc);
}
void transaction_barrier_init_fence() { t_worker->barrier_init_fence(); }
void transaction_barrier_arrive(void* barrier, unsigned bytes, Site site, const void* pc) {
    t_worker->barrier_arrive(barrier, bytes, site, pc);
}
void transaction_barrier_wait(void* barrier, unsigned parity, Site site, const void* pc) {
    t_worker->barrier_wait(barrier, parity, site, pc);
}
void fence_proxy_async() { t_worker->fence_proxy_async(); }
void tensor_load(void* shared, const TensorMap& map, void* barrier, const int* coordinates, Site site, const void* pc) {
    t_worker->tensor_load(shared, map, barrier, coordinates, site, pc);
}
void bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, Site site, const void* pc) {
    if (!bytes || bytes % kUnit || reinterpret_cast<std::uintptr_t>(global) % kUnit)
        t_worker->stop(finding("a bulk copy of bytes or from an address that is no multiple of 16",
                               t_worker->describe(*t_lane) + " in bulk_load", source_line(site)));
    const int units = static_cast<int>(bytes / kUnit), first = 0;
    const TensorMap map{global, 1, kUnit, {units}, {}, {units}, 1};
    t_worker->tensor_load(shared, map, barrier, &first, site, pc);
}
void tensor_store(const TensorMap& map, const void* shared, const int* coordinates, Site site, const void* pc) {
    t_worker->tensor_store(map, shared, coordinates, site, pc);
}
void store_commit() { ++t_lane->store_group; }
void store_wait_read(int pending_groups) { t_worker->store_wait_read(pending_groups); }

}  // namespace flash_wmma::emulator
