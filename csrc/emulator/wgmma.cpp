// Products of a warpgroup. They are computed at their wait, the last legal moment, and read their operands in shared
// memory then. From issue to wait the registers of D are NaN, and those of A must not change.
#include <algorithm>
#include <cstring>

#include "emulator/machine.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace flash_wmma::emulator {
namespace {

constexpr int kRows = 64, kDepth = 16, kLanes = 128, kWarps = 4, kUnit = 8;  // a unit: 16 bytes of elements
constexpr std::uint32_t kUnderWay = 0x7fc0dead;                              // NaN: D of a product under way

float value(std::uint16_t x, bool bf16) {
    if (bf16) {
        const std::uint32_t bits = std::uint32_t{x} << 16;
        float f;
        std::memcpy(&f, &bits, sizeof f);
        return f;
    }
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    __fp16 h;
    std::memcpy(&h, &x, sizeof h);
    return h;
#endif
}

/// A matrix descriptor (PTX: "matrix descriptor format").
struct Descriptor {
    std::uint64_t bits;
    std::size_t field(int first, int width) const { return bits >> first & ((std::uint64_t{1} << width) - 1); }
    std::size_t start() const { return field(0, 14) << 4; }
    std::size_t leading() const { return field(16, 14) << 4; }
    std::size_t stride() const { return field(32, 14) << 4; }
    /// Units that change places.
    int swizzle() const {
        constexpr int kModes[] = {1, 8, 4, 2};
        return kModes[field(62, 2)];
    }
    /// The offset in the block's shared memory of unit `unit` of row `row`, before the swizzle. Rows run along k
    /// (`along_k`: unit 0 or 1, row m or n) or along m or n (row k).
    std::size_t at(int row, int unit, bool along_k) const {
        const auto r = static_cast<std::size_t>(row), u = static_cast<std::size_t>(unit);
        const auto s = static_cast<std::size_t>(swizzle());
        if (along_k) return start() + r % 8 * 16 * s + r / 8 * stride() + u * (s == 1 ? leading() : 16);
        if (s == 1) return start() + r % 8 * 16 + r / 8 * leading() + u * stride();
        return start() + r % 8 * 16 * s + r / 8 * stride() + u % s * 16 + u / s * leading();
    }
};

/// The place of element i of lane l's part of D, and of pair i of its part of A.
int row_of_d(int l, int i) { return l / 32 * 16 + l % 32 / 4 + i / 2 % 2 * 8; }
int column_of_d(int l, int i) { return i / 4 * 8 + l % 4 * 2 + i % 2; }
int row_of_a(int l, int i) { return l / 32 * 16 + l % 32 / 4 + i % 2 * 8; }
int column_of_a(int l, int i) { return i / 2 * 8 + l % 4 * 2; }

}  // namespace

std::string Worker::describe_warpgroup() const {
    const Warp& first = warps[static_cast<std::size_t>(running_leader)];
    const Block& block = blocks[static_cast<std::size_t>(first.block)];
    const int w = running_leader - block.first_warp;
    const std::string text = describe(first);
    return "warps " + std::to_string(w) + "-" + std::to_string(w + kWarps - 1) + text.substr(text.find(','));
}

std::string Worker::name_of_agent(int agent) const {
    for (const auto& [leader, group] : warpgroups)
        if (group.agent == agent) {
            const int w =
                leader - blocks[static_cast<std::size_t>(warps[static_cast<std::size_t>(leader)].block)].first_warp;
            return "wgmma of warps " + std::to_string(w) + "-" + std::to_string(w + kWarps - 1);
        }
    for (const Lane& lane : lanes)
        if (lane.store_agent == agent)
            return "tensor_store of lane " + std::to_string(lane.lane) + " of warp " +
                   std::to_string(lane.warp - blocks[static_cast<std::size_t>(lane.block)].first_warp);
    return "a tensor copy";
}

void Worker::touch_registers(std::uintptr_t address, int bytes, Access kind, const void* pc) {
    const Lane& lane = *t_lane;
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
    const bool write = kind == Access::kStore || kind == Access::kAtomic;
    for (const RegisterRange& r : lane.registers)
        if (address < r.end && end > r.begin && (r.accumulator || write))
            stop(finding(std::string(r.accumulator ? "the accumulator" : "A's registers") + " of a product under way " +
                             (write ? "written" : "read"),
                         describe(lane), source_line(pc), "the product, at " + source_line(r.site)));
    for (std::uintptr_t a = address / 4; a <= (end - 1) / 4; ++a)
        touched_[stacks.offset(a * 4) / 4] = lane.register_fence;
}

/// Checks the registers of the lane at `place` in the warpgroup.
void Worker::check_registers(const WarpgroupProduct& what, int place) {
    const Lane& lane = lane_of_warpgroup(place);
    if (!lane.register_fence)
        stop(finding("no wgmma.fence before the first product", describe(lane), source_line(running->site)));
    if (!config.checks) return;
    const auto check = [&](const void* registers, int count, const char* whose) {
        const std::size_t first = stacks.offset(reinterpret_cast<std::uintptr_t>(registers)) / 4;
        for (std::size_t i = first; i < first + static_cast<std::size_t>(count); ++i)
            if (touched_[i] == lane.register_fence)
                stop(finding(std::string("missing wgmma.fence: ") + whose + " registers were used since the last",
                             describe(lane) + " in wgmma, register " + std::to_string(i - first),
                             source_line(running->site)));
    };
    check(what.d, what.columns / 2, "D's");
    if (what.a) check(what.a, 4, "A's");
}

/// Checks that the matrix that `a_matrix` or `b_matrix` describes may be read now.
void Worker::check_matrix(const WarpgroupProduct& what, bool a, const Accessor& who) {
    const Descriptor matrix{a ? what.a_matrix : what.b_matrix};
    const bool along_k = a ? !what.a_along_m : !what.b_along_n;
    const int width = a ? kRows : what.columns;  // along m or n
    const int rows = along_k ? width : kDepth, units = (along_k ? kDepth : width) / kUnit;
    char* base = arena.of_block(warps[static_cast<std::size_t>(running_leader)].block);
    for (int r = 0; r < rows; ++r)
        for (int u = 0; u < units; ++u) {
            const std::size_t at = matrix.at(r, u, along_k);
            constexpr int kBytes = 16;
            const auto address = reinterpret_cast<std::uintptr_t>(swizzled(base + at, matrix.swizzle()));
            if (arena.offset(address) + kBytes > arena.bytes_per_block() || at >= SharedArena::kBytesPerBlock)
                stop(finding(
                    "out of bounds of shared memory (" + std::to_string(arena.bytes_per_block()) + " bytes)",
                    "wgmma of " + describe_warpgroup() + " reads " + (a ? "A" : "B") + " at byte " + std::to_string(at),
                    source_line(running->site)));
            if (!config.checks) continue;
            if (const Conflict conflict = arena.read(address, kBytes, who, running->pc))
                stop_conflict(Access::kLoad, "wgmma of " + describe_warpgroup(), address, kBytes,
                              source_line(running->site), conflict, who.block);
        }
}

void Worker::multiply(void* const* arguments) {
    const auto argument = [&](int l) -> const WarpgroupProduct& {
        return *static_cast<const WarpgroupProduct*>(arguments[l]);
    };
    const WarpgroupProduct& first = argument(0);
    const auto overlap = [](const void* x, int words_x, const void* y, int words_y) {
        return static_cast<const std::uint32_t*>(x) < static_cast<const std::uint32_t*>(y) + words_y &&
               static_cast<const std::uint32_t*>(y) < static_cast<const std::uint32_t*>(x) + words_x;
    };
    for (int l = 1; l < kLanes; ++l) {
        const WarpgroupProduct& x = argument(l);
        if (x.b_matrix != first.b_matrix || x.accumulate != first.accumulate ||
            (!first.a && x.a_matrix != first.a_matrix))
            stop(finding("lanes of a warpgroup differ in a matrix, or in whether they accumulate",
                         describe(lane_of_warpgroup(l)), source_line(running->site)));
    }
    Warpgroup& group = warpgroups[running_leader];
    if (group.agent < 0) group.agent = new_agent();
    Accumulator* accumulator = nullptr;
    for (Accumulator& a : group.accumulators) {
        if (a.registers[0] == first.d && a.columns == first.columns) accumulator = &a;
        else if (overlap(a.registers[0], a.columns / 2, first.d, first.columns / 2))
            stop(finding("the accumulator overlaps one of another shape under way", describe_warpgroup(),
                         source_line(running->site), "the other, at " + source_line(a.products.front().site)));
        if (first.a && overlap(a.registers[0], a.columns / 2, first.a, 4))
            stop(finding("A's registers are an accumulator under way", describe_warpgroup(), source_line(running->site),
                         "the other, at " + source_line(a.products.front().site)));
    }
    for (int l = 0; l < kLanes; ++l) check_registers(argument(l), l);
    if (config.counters && (group.events.empty() || group.events.back().first < group.groups)) {
        const std::uint64_t now = warps[static_cast<std::size_t>(running_leader)].log.time;
        group.events.push_back({group.groups, {Event::Kind::kProduct, 0, now, now, running->pc}});
    }

    Clock clock;
    if (config.checks) {
        clock = warps[static_cast<std::size_t>(running_leader)].clock;
        for (int w = 1; w < kWarps; ++w) clock.meet(warps[static_cast<std::size_t>(running_leader + w)].clock);
    }
    const Accessor who{accessor(*t_lane).block,
                       group.agent,
                       kTogether,
                       epochs_[static_cast<std::size_t>(group.agent)],
                       &clock,
                       0,
                       nullptr,
                       kTogether,
                       true};
    if (!first.a) check_matrix(first, true, who);
    check_matrix(first, false, who);

    if (!accumulator) {
        accumulator = &group.accumulators.emplace_back();
        accumulator->columns = first.columns;
        accumulator->tile.resize(static_cast<std::size_t>(kRows * first.columns));
        for (int l = 0; l < kLanes; ++l) {
            float* d = accumulator->registers[static_cast<std::size_t>(l)] = argument(l).d;
            for (int i = 0; i < first.columns / 2; ++i) {
                accumulator->tile[static_cast<std::size_t>(row_of_d(l, i) * first.columns + column_of_d(l, i))] = d[i];
                std::memcpy(d + i, &kUnderWay, sizeof kUnderWay);
            }
        }
    }
    accumulator->products.push_back({first, group.groups, {}, {}, running->site});
    Product& product = accumulator->products.back();
    const auto guard = [&](Lane& lane, const void* registers, int count, bool is_accumulator) {
        const auto begin = reinterpret_cast<std::uintptr_t>(registers),
                   end = begin + 4 * static_cast<std::uintptr_t>(count);
        for (RegisterRange& r : lane.registers)
            if (r.accumulator == is_accumulator && r.begin <= begin && r.end >= end) {
                r.group = std::max(r.group, product.group);
                return;
            } else if (r.accumulator == is_accumulator && r.end == begin && r.group == product.group &&
                       !is_accumulator) {
                r.end = end;
                return;
            }
        lane.registers.push_back({begin, end, is_accumulator, product.group, running->site});
    };
    for (int l = 0; l < kLanes; ++l) {
        const WarpgroupProduct& x = argument(l);
        guard(lane_of_warpgroup(l), x.d, x.columns / 2, true);
        if (!x.a) continue;
        guard(lane_of_warpgroup(l), x.a, 4, false);
        product.a[static_cast<std::size_t>(l)] = x.a;
        std::copy(x.a, x.a + 4, &product.a_values[static_cast<std::size_t>(4 * l)]);
    }
}

/// tile += A B.
void Worker::compute(const Product& product, float* tile) const {
    const WarpgroupProduct& what = product.what;
    const int n = what.columns;
    const char* base = arena.of_block(warps[static_cast<std::size_t>(running_leader)].block);
    const auto unit = [&](std::uint64_t bits, int row, int u, bool along_k) {
        const Descriptor matrix{bits};
        std::array<std::uint16_t, kUnit> x;
        std::memcpy(x.data(), swizzled(const_cast<char*>(base) + matrix.at(row, u, along_k), matrix.swizzle()),
                    sizeof x);
        return x;
    };
    std::array<float, kRows * kDepth> a;
    std::array<float, kDepth * 256> b;
    if (what.a) {
        for (int l = 0; l < kLanes; ++l)
            for (int i = 0; i < 4; ++i) {
                const std::uint32_t pair = product.a_values[static_cast<std::size_t>(4 * l + i)];
                const auto to = static_cast<std::size_t>(row_of_a(l, i) * kDepth + column_of_a(l, i));
                a[to] = value(static_cast<std::uint16_t>(pair), what.bf16);
                a[to + 1] = value(static_cast<std::uint16_t>(pair >> 16), what.bf16);
            }
    } else {
        const int rows = what.a_along_m ? kDepth : kRows, units = (what.a_along_m ? kRows : kDepth) / kUnit;
        for (int r = 0; r < rows; ++r)
            for (int u = 0; u < units; ++u) {
                const auto x = unit(what.a_matrix, r, u, !what.a_along_m);
                for (int e = 0; e < kUnit; ++e) {
                    const int i = u * kUnit + e, to = what.a_along_m ? i * kDepth + r : r * kDepth + i;
                    a[static_cast<std::size_t>(to)] = value(x[static_cast<std::size_t>(e)], what.bf16);
                }
            }
    }
    const int rows = what.b_along_n ? kDepth : n, units = (what.b_along_n ? n : kDepth) / kUnit;
    for (int r = 0; r < rows; ++r)
        for (int u = 0; u < units; ++u) {
            const auto x = unit(what.b_matrix, r, u, !what.b_along_n);
            for (int e = 0; e < kUnit; ++e) {
                const int i = u * kUnit + e, to = what.b_along_n ? r * n + i : i * n + r;
                b[static_cast<std::size_t>(to)] = value(x[static_cast<std::size_t>(e)], what.bf16);
            }
        }
    if (!what.accumulate) std::fill(tile, tile + kRows * n, 0.f);
    for (int r = 0; r < kRows; r += 16) emulator::multiply(tile + r * n, a.data() + r * kDepth, b.data(), kDepth, n);
}

void Worker::fence_registers() {
    if (touched_bytes_ != stacks.bytes()) {
        touched_bytes_ = stacks.bytes();
        touched_ = Pages<std::uint32_t>(touched_bytes_ / 4);
    }
    ++register_fences_;
    for (int l = 0; l < kLanes; ++l) lane_of_warpgroup(l).register_fence = register_fences_;
}

void Worker::commit_products() {
    Warpgroup& group = warpgroups[running_leader];
    ++group.groups;
    if (group.agent >= 0) ++epochs_[static_cast<std::size_t>(group.agent)];
}

void Worker::wait_for_products(int pending) {
    Warpgroup& group = warpgroups[running_leader];
    const std::uint64_t done =
        group.groups > static_cast<std::uint64_t>(pending) ? group.groups - static_cast<std::uint64_t>(pending) : 0;
    for (; !group.events.empty() && group.events.front().first < done; group.events.pop_front()) {
        Event& event = group.events.front().second;
        event.released = warps[static_cast<std::size_t>(running_leader)].log.time;
        record(event, running_leader);
    }
    for (Accumulator& a : group.accumulators) {
        std::size_t through = 0;
        for (; through < a.products.size() && a.products[through].group < done; ++through) {
            const Product& p = a.products[through];
            for (int l = 0; p.what.a && l < kLanes; ++l)
                if (!std::equal(&p.a_values[static_cast<std::size_t>(4 * l)],
                                &p.a_values[static_cast<std::size_t>(4 * l)] + 4, p.a[static_cast<std::size_t>(l)]))
                    stop(finding("A's registers of a product under way written", describe(lane_of_warpgroup(l)),
                                 source_line(running->site), "the product, at " + source_line(p.site)));
            compute(p, a.tile.data());
        }
        if (through < a.products.size()) {
            a.products.erase(a.products.begin(), a.products.begin() + static_cast<std::ptrdiff_t>(through));
            continue;
        }
        for (int l = 0; l < kLanes; ++l)
            for (int i = 0; i < a.columns / 2; ++i) {
                float* d = a.registers[static_cast<std::size_t>(l)] + i;
                if (std::memcmp(d, &kUnderWay, sizeof kUnderWay))
                    stop(finding("the accumulator of a product under way written", describe(lane_of_warpgroup(l)),
                                 source_line(running->site), "the product, at " + source_line(a.products.back().site)));
                *d = a.tile[static_cast<std::size_t>(row_of_d(l, i) * a.columns + column_of_d(l, i))];
            }
        a.products.clear();
    }
    group.accumulators.erase(std::remove_if(group.accumulators.begin(), group.accumulators.end(),
                                            [](const Accumulator& a) { return a.products.empty(); }),
                             group.accumulators.end());
    for (int l = 0; l < kLanes; ++l) {
        auto& ranges = lane_of_warpgroup(l).registers;
        ranges.erase(
            std::remove_if(ranges.begin(), ranges.end(), [&](const RegisterRange& r) { return r.group < done; }),
            ranges.end());
    }
    if (!config.checks || !done || group.agent < 0) return;
    for (int w = running_leader; w < running_leader + kWarps; ++w) {
        Warp& warp = warps[static_cast<std::size_t>(w)];
        warp.clock.known.raise(group.agent, epochs_[static_cast<std::size_t>(group.agent)] -
                                                static_cast<std::uint32_t>(group.groups - done) - 1);
        ++warp.clock_version;
    }
}

void Worker::set_registers(int count) {
    constexpr int kOfMultiprocessor = 65536, kUnit = 8;
    warpgroups[running_leader].registers = count;
    const Block& block = blocks[static_cast<std::size_t>(warps[static_cast<std::size_t>(running_leader)].block)];
    int sum = 0;
    for (int w = block.first_warp; w < block.first_warp + block.threads / 32; w += kWarps) {
        if (!warpgroups.count(w) || !warpgroups[w].registers) return;
        sum += kLanes * warpgroups[w].registers;
    }
    // The most that a block of one a multiprocessor is launched with: setmaxnreg only shares out what it has
    const int launched = kOfMultiprocessor / block.threads / kUnit * kUnit * block.threads;
    if (sum > launched)
        stop(finding("setmaxnreg of " + std::to_string(sum) + " registers in the block, which has at most " +
                         std::to_string(launched),
                     describe_warpgroup(), source_line(running->site)));
}

// --- the interface of runtime.h --------------------------------------------------------------------------------------

namespace {

constexpr Collective kProduct{"wgmma", Instruction::kWgmma,
                              1,       kLanes,
                              false,   [](void* const* arguments, LaneMask) { t_worker->multiply(arguments); }};
constexpr Collective kFence{
    "wgmma_fence", Instruction::kWgmma, 0, kLanes, false, [](void* const*, LaneMask) { t_worker->fence_registers(); }};
constexpr Collective kCommit{
    "wgmma_commit", Instruction::kWgmma, 0, kLanes, false, [](void* const*, LaneMask) { t_worker->commit_products(); }};
constexpr Collective kWait{"wgmma_wait", Instruction::kWgmma, 0, kLanes, false, [](void* const* arguments, LaneMask) {
                               t_worker->wait_for_products(*static_cast<const int*>(arguments[0]));
                           }};
constexpr Collective kRegisters{
    "setmaxnreg", Instruction::kWgmma, 0, kLanes, false, [](void* const* arguments, LaneMask) {
        t_worker->set_registers(*static_cast<const int*>(arguments[0]));
    }};

void enter(const Collective& what, void* arguments, Site site, const void* pc) {
    if (t_worker->config.warp_size != 32)
        t_worker->stop(finding("warpgroups are four warps of 32 lanes",
                               t_worker->describe(*t_lane) + " in " + what.name, source_line(site)));
    t_worker->enter(what, ~LaneMask{0}, arguments, site, pc);
}

}  // namespace

std::uint64_t matrix_start(const void* shared, const void* pc) {
    const auto address = reinterpret_cast<std::uintptr_t>(shared);
    if (!t_worker->arena.contains(address))
        t_worker->stop(
            finding("a product's matrix outside shared memory", t_worker->describe(*t_lane), source_line(pc)));
    if (address % 16)
        t_worker->stop(
            finding("a product's matrix is not 16-byte aligned", t_worker->describe(*t_lane), source_line(pc)));
    return t_worker->arena.offset(address) >> 4;
}

void wgmma(WarpgroupProduct& product, Site site, const void* pc) { enter(kProduct, &product, site, pc); }
void wgmma_fence(Site site, const void* pc) { enter(kFence, nullptr, site, pc); }
void wgmma_commit(Site site, const void* pc) { enter(kCommit, nullptr, site, pc); }
void wgmma_wait(int pending_groups, Site site, const void* pc) { enter(kWait, &pending_groups, site, pc); }
void set_registers(int count, Site site, const void* pc) { enter(kRegisters, &count, site, pc); }

}  // namespace flash_wmma::emulator
