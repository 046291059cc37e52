// Checks every access of kernel code: whose memory it touches, whether it is in bounds and aligned, whether it races.
// Accesses arrive as the callbacks that g++'s -fsanitize=thread puts beside loads and stores (this file replaces
// libtsan), as basic blocks from -fsanitize-coverage=trace-pc, and from the bricks.
#include <link.h>

#include <algorithm>
#include <cstring>

#include "emulator/interrupt.h"
#include "emulator/machine.h"

namespace flash_wmma::emulator {
namespace {

const char* verb(Access a) {
    switch (a) {
        case Access::kStore:
        case Access::kStmatrix:
        case Access::kAsyncStore: return "writes";
        case Access::kAtomic: return "updates";
        default: return "reads";
    }
}

bool writes(Access a) {
    return a == Access::kStore || a == Access::kStmatrix || a == Access::kAtomic || a == Access::kAsyncStore;
}

Instruction instruction_of(Access access, bool shared) {
    switch (access) {
        case Access::kLdmatrix: return Instruction::kLdmatrix;
        case Access::kStmatrix: return Instruction::kStoreShared;
        case Access::kAtomic: return Instruction::kAtomic;
        case Access::kAsyncLoad: return Instruction::kAsyncLoad;
        case Access::kAsyncStore: return Instruction::kAsyncCopy;
        case Access::kLoad: return shared ? Instruction::kLoadShared : Instruction::kLoadGlobal;
        case Access::kStore: return shared ? Instruction::kStoreShared : Instruction::kStoreGlobal;
    }
    return Instruction::kCount;
}

/// Whether the address is in a library of this process, where a kernel may read the compiler's constants and tables.
bool in_a_library(std::uintptr_t address) {
    struct Search {
        std::uintptr_t address;
        bool found;
    } search{address, false};
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* data) {
            auto& s = *static_cast<Search*>(data);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& segment = info->dlpi_phdr[i];
                if (segment.p_type == PT_LOAD && s.address - (info->dlpi_addr + segment.p_vaddr) < segment.p_memsz)
                    s.found = true;
            }
            return s.found ? 1 : 0;
        },
        &search);
    return search.found;
}

std::string where(const Worker& worker, std::uintptr_t address, bool shared) {
    if (shared) return "shared memory at byte " + std::to_string(worker.arena.offset(address));
    GlobalMemory::Watched* buffer = g_memory.find(address, 1);
    return buffer ? buffer->name + " at byte " + std::to_string(address - buffer->begin) : "global memory";
}

}  // namespace

static constexpr std::uintptr_t kLine = 128;  // bytes of the L2 cache

void Worker::check(Lane& lane, bool collective, std::uintptr_t address, int bytes, Access kind, const void* pc) {
    const bool shared = arena.contains(address);
    const auto text = [&](const std::string& what) {
        return what + ": " + describe(lane) + " " + verb(kind) + " " + std::to_string(bytes) + " bytes of " +
               where(*this, address, shared) + "\n  at " + source_line(pc);
    };
    Accessor who = accessor(lane);
    if (collective) who.lane = kTogether;
    Conflict conflict;
    const bool aligned = address % static_cast<std::uintptr_t>(bytes) == 0;
    if (shared) {
        if (arena.offset(address) + static_cast<std::size_t>(bytes) > arena.bytes_per_block())
            stop(text("out of bounds of shared memory (" + std::to_string(arena.bytes_per_block()) + " bytes)"));
        if (!aligned) stop(text("misaligned access"));
        if (kind == Access::kAsyncStore) conflict = arena.begin_async(address, bytes, who, pc);
        else if (writes(kind)) conflict = arena.write(address, bytes, who, pc, kind == Access::kAtomic);
        else conflict = arena.read(address, bytes, who, pc);
    } else if (g_memory.known()) {
        GlobalMemory::Watched* buffer = g_memory.find(address, bytes);
        if (!buffer) {
            if (!writes(kind) && in_a_library(address)) return;
            stop(text("out of bounds of global memory, " + g_memory.nearest(address)));
        }
        if (!aligned) stop(text("misaligned access"));
        touch_lines(address, static_cast<std::size_t>(bytes));
        if (writes(kind) && !buffer->writable) stop(text("write to an input"));
        if (buffer->writable)
            conflict = writes(kind) ? g_memory.write(*buffer, address, bytes, who, pc, kind == Access::kAtomic)
                                    : g_memory.read(*buffer, address, bytes, who, pc);
    }
    if (conflict) stop_conflict(kind, describe(lane), address, bytes, source_line(pc), conflict, who.block);
}

void Worker::stop_conflict(Access kind, const std::string& who, std::uintptr_t address, int bytes,
                           const std::string& line, const Conflict& conflict, std::uint32_t block) {
    const bool shared = arena.contains(address), race = std::strstr(conflict.kind, " after ");
    std::string message = conflict.kind + std::string(race ? shared ? ", shared memory" : ", global memory" : "") +
                          ": " + who + " " + verb(kind) + " " + std::to_string(bytes) + " bytes of " +
                          where(*this, address, shared) + "\n  at " + line;
    if (conflict.pc) {
        const int warps_a_block = static_cast<int>(warps.size() / blocks.size());
        std::string other = conflict.lane < 0 ? "lanes" : "lane " + std::to_string(conflict.lane);
        other += " of warp " + std::to_string(conflict.warp % warps_a_block);
        if (conflict.warp >= static_cast<int>(warps.size())) other = name_of_agent(conflict.warp);
        else if (shared && conflict.warp / warps_a_block != t_lane->block)
            other += ", " + describe(blocks[static_cast<std::size_t>(conflict.warp / warps_a_block)]);
        if (!shared && conflict.block != block) other += " of block " + std::to_string(conflict.block);
        message += "\n  and " + other + ", at " + source_line(conflict.pc) + ": nothing orders the two";
    }
    stop(message);
}

void Worker::access(std::uintptr_t address, int bytes, Access kind, const void* pc) {
    Lane& lane = *t_lane;
    // A lane may wait for another lane's write: let others run, after fewer accesses if it looks like waiting
    constexpr std::uint64_t kTurn = 1 << 26, kAtomics = 1 << 10, kRepeated = 16;
    turn_ += kind == Access::kAtomic || address == last_address_ ? kRepeated : 1;
    last_address_ = address;
    if (turn_ >= kTurn || (kind == Access::kAtomic && ++atomics_ >= kAtomics)) give_way(pc);
    if (config.checks) check(lane, false, address, bytes, kind, pc);
    if (config.counters) log(pc, address, bytes, instruction_of(kind, arena.contains(address)));
}

void Worker::warp_access(Access kind, const void* const* address, LaneMask mask, int bytes) {
    Warp& warp = warp_of(*t_lane);
    const void* pc = running->pc;
    std::uintptr_t at[64] = {};
    for (LaneMask rest = mask; rest; rest &= rest - 1) {
        const auto l = static_cast<std::size_t>(__builtin_ctzll(rest));
        at[l] = reinterpret_cast<std::uintptr_t>(address[l]);
        if ((kind == Access::kLdmatrix || kind == Access::kStmatrix) && !arena.contains(at[l]))
            stop(std::string(kind == Access::kLdmatrix ? "ldmatrix" : "stmatrix") +
                 " of an address outside shared memory: " +
                 describe(lanes[static_cast<std::size_t>(warp.first_lane) + l]) + "\n  at " + source_line(pc));
        if (stacks.contain(at[l])) return;  // a local array: no request of the memory system
        if (config.checks) check(lanes[static_cast<std::size_t>(warp.first_lane) + l], true, at[l], bytes, kind, pc);
    }
    if (!config.counters) return;
    const bool shared = arena.contains(at[__builtin_ctzll(mask)]);
    warp.log.time += counters.request(pc, instruction_of(kind, shared), at, mask, bytes);
}

void Worker::async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc) {
    Lane& lane = *t_lane;
    const auto to = reinterpret_cast<std::uintptr_t>(shared);
    if (!arena.contains(to))
        stop("asynchronous copy to an address outside shared memory: " + describe(lane) + "\n  at " + source_line(pc));
    const auto from = reinterpret_cast<std::uintptr_t>(global);
    if (source_bytes && (arena.contains(from) || stacks.contain(from)))
        stop("asynchronous copy from an address outside global memory: " + describe(lane) + "\n  at " +
             source_line(pc));
    if (source_bytes) access(from, source_bytes, Access::kAsyncLoad, pc);
    access(to, bytes, Access::kAsyncStore, pc);
    lane.copies.push_back({shared, global, bytes, source_bytes, lane.copy_group, pc});
}

void Worker::fetch_line(const void* address, const void* pc) {
    if (!config.checks || !g_memory.known()) return;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (!g_memory.find(at, 1))
        stop("line fetched out of bounds of global memory, " + g_memory.nearest(at) + ": " + describe(*t_lane) +
             "\n  at " + source_line(pc));
    fetched_.try_emplace(at / kLine, static_cast<int>(t_lane - lanes.data()), pc);
}

void Worker::touch_lines(std::uintptr_t address, std::size_t bytes) {
    for (std::uintptr_t line = address / kLine; !fetched_.empty() && line * kLine < address + bytes; ++line)
        fetched_.erase(line);
}

static void read(const AsyncCopy& copy) {
    std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.source_bytes));
    std::memset(static_cast<char*>(copy.to) + copy.source_bytes, 0,
                static_cast<std::size_t>(copy.bytes - copy.source_bytes));
}

void Worker::read_async_copies() {
    for (Lane& lane : lanes)
        for (AsyncCopy& copy : lane.copies)
            if (!std::exchange(copy.has_read, true)) read(copy);
}

void Worker::async_wait(int pending) {
    Lane& lane = *t_lane;
    const int landing = lane.copy_group - pending;
    std::size_t kept = 0;
    for (const AsyncCopy& copy : lane.copies) {
        if (copy.group >= landing) {
            lane.copies[kept++] = copy;
            continue;
        }
        if (!copy.has_read) read(copy);
        if (config.checks) arena.landed(reinterpret_cast<std::uintptr_t>(copy.to), copy.bytes, accessor(lane));
    }
    lane.copies.resize(kept);
}

// --- the interface of runtime.h --------------------------------------------------------------------------------------

Index thread_index() { return t_lane->index; }
Index block_index() { return t_worker->blocks[static_cast<std::size_t>(t_lane->block)].index; }
Index block_size() { return t_worker->launch.block; }
Index grid_size() { return t_worker->launch.grid; }
int warp_size() { return t_worker->config.warp_size; }
int lane_index() { return t_lane->lane; }
unsigned cluster_rank() { return static_cast<unsigned>(t_lane->block); }

void collective(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc) {
    t_worker->enter(what, mask, arguments, site, pc);
}
int barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc) {
    return t_worker->barrier(id, threads, predicate, wait, name, site, pc);
}
void cluster_sync(Site site, const void* pc) { t_worker->cluster_sync(site, pc); }
void wait_until(bool (*ready)(void*), void* argument, const char* name, Site site) {
    t_worker->wait_until(ready, argument, name, site);
}
void release(const void* object) { t_worker->release(object); }
void acquire(const void* object) { t_worker->acquire(object); }
void add_release(unsigned* counter, unsigned x, const void* pc) {
    t_worker->access(reinterpret_cast<std::uintptr_t>(counter), sizeof(x), Access::kAtomic, pc);
    t_worker->add_release(counter, x);
}
unsigned load_acquire(const unsigned* counter, const void* pc) {
    t_worker->access(reinterpret_cast<std::uintptr_t>(counter), sizeof(*counter), Access::kAtomic, pc);
    return t_worker->load_acquire(counter);
}

void* shared_memory(std::size_t map_bytes, const void* pc) {
    if (map_bytes > t_worker->launch.smem_bytes)
        t_worker->stop("a map of shared memory of " + std::to_string(map_bytes) + " bytes, but the launch asked for " +
                       std::to_string(t_worker->launch.smem_bytes) + ": " + t_worker->describe(*t_lane) + "\n  at " +
                       source_line(pc));
    return t_worker->arena.of_block(t_lane->block);
}

bool in_shared_memory(const void* address) {
    return t_worker->arena.contains(reinterpret_cast<std::uintptr_t>(address));
}

void warp_access(Access kind, const void* const* address, LaneMask lanes, int bytes) {
    if (t_worker->config.checks || t_worker->config.counters) t_worker->warp_access(kind, address, lanes, bytes);
}
void atomic_access(const void* address, int bytes, const void* pc) {
    t_worker->access(reinterpret_cast<std::uintptr_t>(address), bytes, Access::kAtomic, pc);
}
void async_copy(void* shared, const void* global, int bytes, int source_bytes, const void* pc) {
    t_worker->async_copy(shared, global, bytes, source_bytes, pc);
}
void fetch_line(const void* address, const void* pc) { t_worker->fetch_line(address, pc); }
void async_commit() { ++t_lane->copy_group; }
void async_wait(int pending_groups) { t_worker->async_wait(pending_groups); }

void note(Instruction instruction) {
    if (t_worker->config.counters) t_worker->log(__builtin_return_address(0), 0, 0, instruction);
}

void fail_collective(const char* what, int lane) {
    const Gathering& g = *t_worker->running;
    const Warp& warp = t_worker->warp_of(*t_lane);
    const std::string who = lane < 0
                                ? t_worker->describe(warp)
                                : t_worker->describe(t_worker->lanes[static_cast<std::size_t>(warp.first_lane + lane)]);
    t_worker->stop(std::string(what) + ": " + who + " in " + g.what->name + "\n  at " + source_line(g.site));
}

void multiply(float* __restrict__ c, const float* __restrict__ a, const float* __restrict__ b, int depth, int columns) {
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < depth; ++k) {
            const float x = a[i * depth + k];
            for (int j = 0; j < columns; ++j) c[i * columns + j] += x * b[k * columns + j];
        }
}

}  // namespace flash_wmma::emulator

// --- callbacks of the instrumented code ------------------------------------------------------------------------------

namespace {
using namespace flash_wmma::emulator;

inline void touched(const void* p, int bytes, Access kind, const void* pc) {
    if (!t_lane) return;  // host code of the kernel's file
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    if (!t_worker->stacks.contain(address)) t_worker->access(address, bytes, kind, pc);
    else if (t_lane->register_fence) t_worker->touch_registers(address, bytes, kind, pc);
}

/// Many bytes, in the largest pieces of up to 4 bytes that the alignment allows, as the compiler copies a struct of
/// floats.
inline void touched_range(const void* p, unsigned long bytes, Access kind, const void* pc) {
    const unsigned long whole = reinterpret_cast<std::uintptr_t>(p) | bytes, piece = whole % 2 ? 1 : whole % 4 ? 2 : 4;
    for (unsigned long i = 0; i < bytes; i += piece)
        touched(static_cast<const char*>(p) + i, static_cast<int>(piece), kind, pc);
}
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
// g++ names the size in bytes; an access that it cannot prove aligned has a name of its own.
void __tsan_read1(void* p) { touched(p, 1, Access::kLoad, __builtin_return_address(0)); }
void __tsan_read2(void* p) { touched(p, 2, Access::kLoad, __builtin_return_address(0)); }
void __tsan_read4(void* p) { touched(p, 4, Access::kLoad, __builtin_return_address(0)); }
void __tsan_read8(void* p) { touched(p, 8, Access::kLoad, __builtin_return_address(0)); }
void __tsan_read16(void* p) { touched(p, 16, Access::kLoad, __builtin_return_address(0)); }
void __tsan_write1(void* p) { touched(p, 1, Access::kStore, __builtin_return_address(0)); }
void __tsan_write2(void* p) { touched(p, 2, Access::kStore, __builtin_return_address(0)); }
void __tsan_write4(void* p) { touched(p, 4, Access::kStore, __builtin_return_address(0)); }
void __tsan_write8(void* p) { touched(p, 8, Access::kStore, __builtin_return_address(0)); }
void __tsan_write16(void* p) { touched(p, 16, Access::kStore, __builtin_return_address(0)); }
void __tsan_unaligned_read2(void* p) { touched(p, 2, Access::kLoad, __builtin_return_address(0)); }
void __tsan_unaligned_read4(void* p) { touched(p, 4, Access::kLoad, __builtin_return_address(0)); }
void __tsan_unaligned_read8(void* p) { touched(p, 8, Access::kLoad, __builtin_return_address(0)); }
void __tsan_unaligned_read16(void* p) { touched(p, 16, Access::kLoad, __builtin_return_address(0)); }
void __tsan_unaligned_write2(void* p) { touched(p, 2, Access::kStore, __builtin_return_address(0)); }
void __tsan_unaligned_write4(void* p) { touched(p, 4, Access::kStore, __builtin_return_address(0)); }
void __tsan_unaligned_write8(void* p) { touched(p, 8, Access::kStore, __builtin_return_address(0)); }
void __tsan_unaligned_write16(void* p) { touched(p, 16, Access::kStore, __builtin_return_address(0)); }
void __tsan_init() {}
// The guard of a function's static variable, in host code.
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
// A struct
void __tsan_read_range(void* p, unsigned long bytes) {
    touched_range(p, bytes, Access::kLoad, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    touched_range(p, bytes, Access::kStore, __builtin_return_address(0));
}
// cuda_runtime.h turns memcpy, memmove and memset of many bytes into these
void* flash_wmma_emulator_memmove(void* to, const void* from, unsigned long bytes) {
    touched_range(from, bytes, Access::kLoad, __builtin_return_address(0));
    touched_range(to, bytes, Access::kStore, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
void* flash_wmma_emulator_memset(void* to, int value, unsigned long bytes) {
    touched_range(to, bytes, Access::kStore, __builtin_return_address(0));
    return std::memset(to, value, bytes);
}
void __tsan_func_entry(void* pc) {
    if (t_lane && t_worker->config.counters) t_lane->log.node = t_lane->log.node->enter(pc);
}
void __tsan_func_exit() {
    if (t_lane && t_worker->config.counters && t_lane->log.node->caller) t_lane->log.node = t_lane->log.node->caller;
}
void __sanitizer_cov_trace_pc() {
    if (!t_lane) return;
    if (g_interrupted.load(std::memory_order_relaxed)) t_worker->stop("interrupted");
    if (t_worker->config.counters) t_worker->log(__builtin_return_address(0), 0, 0, Instruction::kBasicBlock);
}
}
#pragma GCC visibility pop
