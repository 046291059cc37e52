// Barriers in shared memory that count arrivals and bytes, and the tensor copies whose bytes they count.
//
// A copy lands when a lane waits for a phase that lacks only bytes: the last legal moment. Until then its target is
// pending, and a phase for which no lane announced the bytes completes without them, as it may on hardware. A store
// reads its source, and writes, when its lane's wait lets it pass. A copy to another block of the cluster reads its
// source, and writes, when it lands.
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
        if (!row || copy.send) return;
        const auto first = reinterpret_cast<std::uintptr_t>(row);
        const auto size = static_cast<std::uintptr_t>(inside * copy.map.element_bytes);
        sectors += (first + size - 1) / kSector - first / kSector + 1;
        bytes += size;
    });
    counters.add_copy(copy.event.pc, what, static_cast<std::uint64_t>(copy.bytes), sectors,
                      (bytes + kSector - 1) / kSector);
}

/// Copies of bytes in order are taken as tensors of one dimension.
const char* load_of(const TensorMap& map) { return map.rank == 1 ? "bulk_load" : "tensor_load"; }

void check_bulk(const void* from, unsigned bytes, const char* name, Site site) {
    if (!bytes || bytes % kUnit || reinterpret_cast<std::uintptr_t>(from) % kUnit)
        t_worker->stop(finding("a bulk copy of bytes or from an address that is no multiple of 16",
                               t_worker->describe(*t_lane) + " in " + name, source_line(site)));
}

TensorMap bytes_in_order(const void* from, unsigned bytes) {
    const int units = static_cast<int>(bytes / kUnit);
    return {from, 1, kUnit, {units}, {}, {units}, 1};
}

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
    // Its bytes have come without copies that may be among them
    for (const TensorCopy& copy : b.copies)
        if (copy.send)
            stop(finding("more bytes than a barrier's phase waits for",
                         name_of(copy) + ", of " + describe(warps[static_cast<std::size_t>(copy.event.warp)]),
                         source_line(copy.site)));
    b.completed.join(b.arrived);
    b.outstanding = b.arrivals;
    b.completed_at = std::exchange(b.time, 0);
    ++b.phase;
}

void Worker::barrier_arrive(void* address, unsigned bytes, Site site, const void* pc) {
    constexpr const char* kName = "barrier_arrive";
    arrive_at(transaction_barrier(address, kName, site), address, bytes, true, kName, site, pc);
}

void Worker::barrier_arrive_at(void* address, unsigned rank, Site site, const void* pc) {
    Lane& lane = *t_lane;
    Block& block = remote_block(rank, "barrier_arrive_at", site);
    const std::string name = "barrier_arrive_at " + describe(block);
    char* const there = address_in(block, address, name, site);
    TransactionBarrier& b = transaction_barrier(there, name.c_str(), site);
    if (config.checks && rank != static_cast<unsigned>(lane.block))
        use(block, {lane.warp, lane.lane, epochs_[static_cast<std::size_t>(lane.warp)], &lane, name, site});
    arrive_at(b, there, 0, false, name.c_str(), site, pc);
}

void Worker::arrive_at(TransactionBarrier& b, const void* address, unsigned bytes, bool writes, const char* name,
                       Site site, const void* pc) {
    if (config.counters) log(pc, 0, 0, Instruction::kTransactionBarrier);
    b.time = std::max(b.time, time_of(*t_lane));
    if (!b.outstanding)
        stop(finding("more arrivals than a barrier's phase has",
                     describe(*t_lane) + " in " + name + " of the barrier at byte " +
                         std::to_string(arena.offset(reinterpret_cast<std::uintptr_t>(address))) + ", " +
                         std::to_string(b.arrivals) + " have come to its phase " + std::to_string(b.phase),
                     source_line(site)));
    b.bytes += bytes;
    if (b.bytes > kMostBytes)
        stop(finding("a phase of more bytes than a barrier counts",
                     describe(*t_lane) + " in " + name + ", " + std::to_string(b.bytes) + " bytes in all",
                     source_line(site)));
    if (config.checks && writes) hand_on(*t_lane, b.arrived);
    else if (config.checks) hand_on_reads(*t_lane, b.arrived);
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
    const char* const name = load_of(map);
    TransactionBarrier& b = transaction_barrier(barrier, name, site);
    begin_copy(new_copy(shared, map, coordinates, name, "a tensor copy to", site, pc), b, pc);
}

void Worker::bulk_send(void* to, const void* from, unsigned bytes, void* barrier, unsigned rank, Site site,
                       const void* pc) {
    Lane& lane = *t_lane;
    if (blocks.size() == 1)
        stop(finding("a copy between blocks in a launch without clusters", describe(lane) + " in bulk_send",
                     source_line(site)));
    Block &here = blocks[static_cast<std::size_t>(lane.block)], &there = remote_block(rank, "bulk_send", site);
    const std::string name = "bulk_send to " + describe(there);
    check_bulk(from, bytes, name.c_str(), site);
    if (arena.offset(reinterpret_cast<std::uintptr_t>(address_in(here, from, name, site))) + bytes >
        arena.bytes_per_block())
        stop(finding("out of bounds of shared memory (" + std::to_string(arena.bytes_per_block()) + " bytes)",
                     describe(lane) + " in " + name + " reads " + std::to_string(bytes) + " bytes", source_line(site)));
    TransactionBarrier& b = transaction_barrier(address_in(there, barrier, name, site), name.c_str(), site);
    const int first = 0;
    TensorCopy copy = new_copy(address_in(there, to, name, site), bytes_in_order(from, bytes), &first, name.c_str(),
                               "a copy to", site, pc);
    copy.send = true;
    begin_copy(std::move(copy), b, pc);
    if (!config.checks) return;
    const RemoteUse now{b.agent, kTogether, epochs_[static_cast<std::size_t>(b.agent)], &lane, name, site};
    use(here, now);
    use(there, now);
}

std::string Worker::name_of(const TensorCopy& copy) const {
    if (!copy.send) return load_of(copy.map);
    const int block = arena.block_at(reinterpret_cast<std::uintptr_t>(copy.shared));
    return "bulk_send to " + describe(blocks[static_cast<std::size_t>(block)]);
}

void Worker::begin_copy(TensorCopy copy, TransactionBarrier& b, const void* pc) {
    b.time = std::max(b.time, copy.event.arrived);
    if (config.checks) {
        copy.epoch = ++epochs_[static_cast<std::size_t>(b.agent)];
        check_copy(copy, b, pc);
        hand_on(*t_lane, copy.clock);
    }
    if (config.counters) count(counters, copy, Instruction::kTensorCopy);
    b.copies.push_back(std::move(copy));
}

void Worker::check_copy(const TensorCopy& copy, const TransactionBarrier& b, const void* pc) {
    Lane& lane = *t_lane;
    const auto to = reinterpret_cast<std::uintptr_t>(copy.shared);
    if (!b.fenced)
        stop(finding("a tensor copy may not see that its barrier is initialised",
                     describe(lane) + " in " + name_of(copy) + ", without barrier_init_fence", source_line(copy.site),
                     describe(warps[static_cast<std::size_t>(b.warp)]) + ", at " + source_line(b.site)));
    if (copy.send) check_send(copy, b, pc);
    else check_source(copy, pc);
    Accessor who = accessor(lane);
    who.async_proxy = true;
    if (const Conflict conflict = arena.begin_async(to, copy.bytes, who, b.agent, copy.epoch, pc))
        stop_conflict(Access::kAsyncStore, describe(lane) + ", in " + name_of(copy) + ",", to, copy.bytes,
                      source_line(copy.site), conflict, who.block);
}

/// A load's source.
void Worker::check_source(const TensorCopy& copy, const void* pc) {
    Lane& lane = *t_lane;
    const std::string line = source_line(copy.site), name = name_of(copy);
    const Accessor who = accessor(lane);
    for_each_row(copy, [&](int, const char* from, int, int inside) {
        if (!from || !g_memory.known()) return;
        const auto address = reinterpret_cast<std::uintptr_t>(from);
        const int bytes = inside * copy.map.element_bytes;
        GlobalMemory::Watched* buffer = g_memory.find(address, bytes);
        if (!buffer)
            stop(finding("out of bounds of global memory, " + g_memory.nearest(address),
                         describe(lane) + " in " + name + " reads " + std::to_string(bytes) + " bytes", line));
        touch_lines(address, static_cast<std::size_t>(bytes));
        if (!buffer->writable) return;
        if (const Conflict conflict = g_memory.read(*buffer, address, bytes, who, pc))
            stop_conflict(Access::kAsyncLoad, describe(lane) + ", in " + name + ",", address, bytes, line, conflict,
                          who.block);
    });
}

/// What the barrier's copies did in earlier phases is done for a lane that knows that these are over. The source is
/// read from now on, by the agent of the barrier's copies: who waits for the phase learns that it is done.
void Worker::check_send(const TensorCopy& copy, const TransactionBarrier& b, const void* pc) {
    Lane& lane = *t_lane;
    if (!ordered(accessor(lane), b.agent, kTogether, b.completed.known.of(b.agent)))
        stop(finding("a copy whose bytes may count for an earlier phase of its barrier",
                     describe(lane) + " in " + name_of(copy) + ", for phase " + std::to_string(b.phase),
                     source_line(copy.site)));
    Clock clock;
    const Accessor who = later_reader(lane, b.agent, copy.epoch, clock);
    const auto from = reinterpret_cast<std::uintptr_t>(copy.map.data);
    if (const Conflict conflict = arena.read(from, copy.bytes, who, pc))
        stop_conflict(Access::kAsyncLoad, describe(lane) + ", in " + name_of(copy) + ",", from, copy.bytes,
                      source_line(copy.site), conflict, who.block);
}

Accessor Worker::later_reader(Lane& lane, int agent, std::uint32_t epoch, Clock& clock) {
    hand_on(lane, clock);
    return {accessor(lane).block, agent, kTogether, epoch, &clock, 0, nullptr, kTogether, true};
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
    const Accessor who = later_reader(lane, lane.store_agent, store.epoch, clock);
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
void transaction_barrier_arrive_at(void* barrier, unsigned rank, Site site, const void* pc) {
    t_worker->barrier_arrive_at(barrier, rank, site, pc);
}
void transaction_barrier_wait(void* barrier, unsigned parity, Site site, const void* pc) {
    t_worker->barrier_wait(barrier, parity, site, pc);
}
void fence_proxy_async() { t_worker->fence_proxy_async(); }
void tensor_load(void* shared, const TensorMap& map, void* barrier, const int* coordinates, Site site, const void* pc) {
    t_worker->tensor_load(shared, map, barrier, coordinates, site, pc);
}
void bulk_load(void* shared, const void* global, unsigned bytes, void* barrier, Site site, const void* pc) {
    check_bulk(global, bytes, "bulk_load", site);
    const int first = 0;
    t_worker->tensor_load(shared, bytes_in_order(global, bytes), barrier, &first, site, pc);
}
void bulk_send(void* to, const void* from, unsigned bytes, void* barrier, unsigned rank, Site site, const void* pc) {
    t_worker->bulk_send(to, from, bytes, barrier, rank, site, pc);
}
void tensor_store(const TensorMap& map, const void* shared, const int* coordinates, Site site, const void* pc) {
    t_worker->tensor_store(map, shared, coordinates, site, pc);
}
void store_commit() { ++t_lane->store_group; }
void store_wait_read(int pending_groups) { t_worker->store_wait_read(pending_groups); }

}  // namespace flash_wmma::emulator
