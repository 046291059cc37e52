// Lanes run as fibers until they park in a collective, at a barrier or in a wait; the last lane to arrive performs the
// operation for all. One warp runs till all its lanes are parked, then another; a seed shuffles the warps.
#include "emulator/machine.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "emulator/interrupt.h"
#include "emulator/late_writes.h"

namespace flash_wmma::emulator {

thread_local Worker* t_worker;
thread_local Lane* t_lane;

namespace {

Config g_config;

Index index_of(std::uint64_t i, Index size) {
    return {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
            static_cast<unsigned>(i / size.x / size.y)};
}

std::uint64_t volume(Index size) { return std::uint64_t{size.x} * size.y * size.z; }

LaneMask first_lanes(int count) { return count >= 64 ? ~LaneMask{0} : (LaneMask{1} << count) - 1; }

std::string text(Index i) {
    return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

std::string hex(LaneMask mask) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(mask));
    return text;
}

/// "lanes 0-3 7" of a mask.
std::string named_lanes(LaneMask lanes) {
    std::string out = lanes & (lanes - 1) ? "lanes" : "lane";
    for (int first = 0; first < 64; ++first) {
        if (!(lanes >> first & 1)) continue;
        int last = first;
        while (last < 63 && lanes >> (last + 1) & 1) ++last;
        out += " " + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
        first = last;
    }
    return out;
}

}  // namespace

std::string finding(const std::string& kind, const std::string& who, const std::string& line,
                    const std::string& others) {
    return kind + ": " + who + "\n  at " + line + (others.empty() ? "" : "\n  and " + others);
}

// --- a worker's run --------------------------------------------------------------------------------------------------

void Worker::begin(const Launch& launch_, const Config& config_) {
    launch = launch_;
    config = config_;
    counters = Counters();
    counters.warp_size = config.warp_size;
}

void Worker::set_up(std::uint64_t first_block, int count) {
    // Ends the epochs of the previous run, even if it ended with a finding
    for (const std::uint32_t epoch : epochs_) arena.finish(epoch);
    const auto threads = static_cast<int>(volume(launch.block));
    const int width = config.warp_size, warps_a_block = (threads + width - 1) / width;
    const auto total_lanes = static_cast<std::size_t>(count) * static_cast<std::size_t>(threads);
    const auto total_warps = static_cast<std::size_t>(count) * static_cast<std::size_t>(warps_a_block);
    arena.begin(count, launch.smem_bytes, static_cast<int>(total_warps), config.checks);
    counters.shared_base = reinterpret_cast<std::uintptr_t>(arena.of_block(0));
    counters.shared_size = static_cast<std::uintptr_t>(count) * SharedArena::kBytesPerBlock;
    counters.shared_block = SharedArena::kBytesPerBlock;
    stacks.reserve(total_lanes);
    lanes.resize(total_lanes);
    warps.resize(total_warps);
    blocks.resize(static_cast<std::size_t>(count));
    sync_objects_.clear();
    barriers.clear();
    fetched_.clear();
    cluster_barrier_ = {};
    warpgroups.clear();
    epochs_.assign(total_warps, arena.first_epoch());
    // Seeded by cluster, so that the OS thread that runs it makes no difference
    if (config.seed) random_.seed(config.seed + (first_block + 1) * 0x9e3779b97f4a7c15u);
    error_.clear();
    idle_ = 0;
    failed_ = false;
    live_ = static_cast<int>(total_lanes);

    for (int b = 0; b < count; ++b) {
        blocks[static_cast<std::size_t>(b)] = {index_of(first_block + static_cast<std::uint64_t>(b), launch.grid),
                                               b * threads,
                                               b * warps_a_block,
                                               threads,
                                               threads,
                                               {},
                                               {}};
        for (int w = 0; w < warps_a_block; ++w) {
            Warp& warp = warps[static_cast<std::size_t>(b * warps_a_block + w)];
            warp.block = b;
            warp.first_lane = b * threads + w * width;
            warp.exists = first_lanes(std::min(width, threads - w * width));
            warp.exited = 0;
            warp.gatherings.clear();
            warp.visiting = 0;
            warp.seen.clear();
            warp.clock.clear();
            warp.clock.known.raise(b * warps_a_block + w, arena.first_epoch() - 1);
            warp.clock_version = 1;
            warp.news.clear();
            warp.informed = 0;
            warp.log = {};
        }
    }
    for (std::size_t i = 0; i < total_lanes; ++i) {
        Lane& lane = lanes[i];
        lane.block = static_cast<int>(i) / threads;
        lane.thread = static_cast<int>(i) % threads;
        lane.lane = lane.thread % width;
        lane.warp = lane.block * warps_a_block + lane.thread / width;
        lane.index = index_of(static_cast<std::uint64_t>(lane.thread), launch.block);
        lane.state = Lane::State::kReady;
        lane.at = "the start";
        lane.site = {"", 0};
        lane.barrier_at = nullptr;
        lane.copies.clear();
        lane.registers.clear();
        lane.register_fence = 0;
        lane.copy_group = 0;
        lane.stores.clear();
        lane.store_group = 0;
        lane.store_agent = -1;
        lane.log.records.clear();
        lane.waited = 0;
        lane.clock_version = 0;
        lane.log.node = &counters.root;
        start(lane.fiber, stacks.bottom(i), stacks.top(i), lane_main);
    }
}

void Worker::lane_main() {
    Worker& worker = *t_worker;
    std::string error;  // reported outside the handlers, which an exception must leave
    try {
        worker.launch.body(worker.launch.arguments);
        worker.exit(*t_lane);
    } catch (const std::exception& e) {
        error = e.what();
    } catch (...) {
        error = "of an unknown type";
    }
    if (!error.empty()) worker.stop("exception: " + error + ": " + worker.describe(*t_lane));
    switch_fiber(t_lane->fiber, worker.scheduler_);
    __builtin_unreachable();  // an exited lane is never resumed
}

/// Runs the ready lanes of a warp until all are parked. Returns whether any ran.
bool Worker::run_warp(Warp& warp) {
    const int count = __builtin_popcountll(warp.exists);
    bool ran = false;
    const auto lane_of = [&](int l) -> Lane& { return lanes[static_cast<std::size_t>(warp.first_lane + l)]; };
    for (int l = 0; l < count; ++l)
        if (lane_of(l).state == Lane::State::kGivingWay) lane_of(l).state = Lane::State::kReady;
    for (bool again = true; again;) {
        again = false;
        for (int l = 0; l < count; ++l) {
            Lane& lane = lane_of(l);
            if (lane.state == Lane::State::kWaiting && lane.ready(lane.ready_argument))
                lane.state = Lane::State::kReady;
            if (lane.state != Lane::State::kReady) continue;
            t_lane = &lane;
            turn_ = atomics_ = 0;
            switch_fiber(scheduler_, lane.fiber);
            t_lane = nullptr;
            if (failed_) throw Finding{error_};
            if (g_interrupted.load(std::memory_order_relaxed)) throw Finding{"interrupted"};
            if (g_abandoned.load(std::memory_order_relaxed)) throw Abandoned{};
            if (lane.state != Lane::State::kGivingWay) idle_ = 0;
            again = ran = true;
        }
    }
    for (int l = 0; l < count; ++l)
        if (lane_of(l).log.records.size() >= kLongLog) merge_logs(warp);
    return ran;
}

void Worker::run(std::uint64_t first_block, int count) {
    set_up(first_block, count);
    std::vector<std::size_t> order(warps.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    while (live_ > 0) {
        if (config.seed) std::shuffle(order.begin(), order.end(), random_);
        bool ran = false;
        for (const std::size_t w : order) {
            ran |= run_warp(warps[w]);
            if (config.seed && ran && random_() % 2) break;  // do not always run each warp once per round
        }
        if (!ran) throw Finding{deadlock()};
    }
    for (Warp& warp : warps) merge_logs(warp);
    for (const auto& [address, barrier] : barriers)
        if (!barrier.copies.empty())
            throw Finding{finding("tensor copy under way at exit",
                                  describe(blocks[static_cast<std::size_t>(arena.block_at(
                                      reinterpret_cast<std::uintptr_t>(barrier.copies.front().shared)))]),
                                  source_line(barrier.copies.front().site))};
    if (fetched_.empty() || !g_late_writes.empty()) return;  // what lands late may change what a block reads
    const auto& [lane, asked] =
        std::ranges::min_element(fetched_, {}, [](const auto& x) { return x.second.first; })->second;
    throw Finding{
        finding("line fetched and not read", describe(lanes[static_cast<std::size_t>(lane)]), source_line(asked))};
}

void Worker::merge_logs(Warp& warp) {
    if (!config.counters) return;
    LaneLog* logs[64];
    const int n = __builtin_popcountll(warp.exists);
    std::uint64_t waited = 0;
    for (int l = 0; l < n; ++l) {
        Lane& lane = lanes[static_cast<std::size_t>(warp.first_lane + l)];
        logs[l] = &lane.log;
        waited = std::max(waited, std::exchange(lane.waited, 0));
    }
    warp.log.time += counters.merge(logs, n) + waited;
}

void Worker::record(Event event, int warp) {
    const Block& block = blocks[static_cast<std::size_t>(warps[static_cast<std::size_t>(warp)].block)];
    event.warp = warp - block.first_warp;
    if (block.index.x + block.index.y + block.index.z == 0) counters.timeline.push_back(event);
}

void Worker::park(Lane& lane) { switch_fiber(lane.fiber, scheduler_); }

/// Lets other lanes and warps run. Reports a finding if for very long no lane has done anything but give way.
void Worker::give_way(const void* pc) {
    constexpr std::uint64_t kMostIdle = 1 << 26;  // of each lane
    idle_ += turn_;
    if (idle_ > kMostIdle * static_cast<std::uint64_t>(live_))
        stop(finding("no progress: a lane waits for what no other does", describe(*t_lane), source_line(pc)));
    t_lane->state = Lane::State::kGivingWay;
    t_lane->at = "a loop";
    park(*t_lane);
}

/// Outside the lanes, as when their waits are looked at, throws itself.
void Worker::stop(std::string what) {
    if (!t_lane) throw Finding{std::move(what)};
    error_ = std::move(what);
    failed_ = true;
    switch_fiber(t_lane->fiber, scheduler_);
    __builtin_unreachable();
}

std::string Worker::describe(const Lane& lane) const {
    return "lane " + std::to_string(lane.lane) + " of " + describe(warps[static_cast<std::size_t>(lane.warp)]);
}

std::string Worker::describe(const Warp& warp) const {
    const Block& block = blocks[static_cast<std::size_t>(warp.block)];
    return "warp " + std::to_string(&warp - warps.data() - block.first_warp) + ", " + describe(block);
}

std::string Worker::describe(const Block& block) const { return "block " + text(block.index); }

std::string Worker::deadlock() const {
    // The waiting lanes: (warp, place) -> lanes
    std::map<std::pair<int, std::string>, LaneMask> waiting;
    int exited = 0;
    for (const Lane& lane : lanes) {
        if (lane.state == Lane::State::kExited) ++exited;
        else
            waiting[{lane.warp, lane.at + (" at " + source_line(lane.site)) + state_of_barrier(lane)}] |= LaneMask{1}
                                                                                                          << lane.lane;
    }
    std::string out = "deadlock: nothing can run";
    for (const auto& [place, who] : waiting)
        out += "\n  " + named_lanes(who) + " of " + describe(warps[static_cast<std::size_t>(place.first)]) + ": in " +
               place.second;
    if (exited) out += "\n  " + std::to_string(exited) + " threads have exited";
    return out;
}

Accessor Worker::accessor(Lane& lane) {
    const Index i = blocks[static_cast<std::size_t>(lane.block)].index;
    const std::uint64_t block = i.x + std::uint64_t{launch.grid.x} * (i.y + std::uint64_t{launch.grid.y} * i.z);
    const Warp& warp = warps[static_cast<std::size_t>(lane.warp)];
    const Clock& clock = warp.informed ? clock_of(lane) : warp.clock;
    return {static_cast<std::uint32_t>(block),
            lane.warp,
            lane.lane,
            epochs_[static_cast<std::size_t>(lane.warp)],
            &clock,
            clock.known.of(lane.warp),
            warp.seen.empty() ? nullptr : &warp.seen[static_cast<std::size_t>(lane.lane) * 64]};
}

// --- collectives -----------------------------------------------------------------------------------------------------

void Worker::enter(const Collective& what, LaneMask mask, void* arguments, Site site, const void* pc) {
    Lane& me = *t_lane;
    const int per_warp = config.warp_size;
    // A collective of several warps gathers in the first of these warps.
    const int group = what.width > per_warp ? what.width / per_warp : 1;
    const Block& block = blocks[static_cast<std::size_t>(me.block)];
    const int leader = block.first_warp + (me.warp - block.first_warp) / group * group;
    Warp& warp = warps[static_cast<std::size_t>(leader)];
    if (what.width && what.width < per_warp)
        stop(finding("a collective of " + std::to_string(what.width) + " lanes",
                     describe(me) + " in " + what.name + ", but warps have " + std::to_string(per_warp),
                     source_line(site)));
    const int place = (me.warp - leader) * per_warp + me.lane;
    const LaneMask bit = LaneMask{1} << me.lane;
    if (what.width) mask = first_lanes(per_warp);
    else mask &= warp.exists;
    if (!(mask & bit))
        stop(finding("a mask leaves out its own lane", describe(me) + " in " + what.name + " with mask " + hex(mask),
                     source_line(site)));

    auto g = std::find_if(warp.gatherings.begin(), warp.gatherings.end(), [&](const Gathering& x) {
        return x.mask == mask && (x.what->width > per_warp) == (group > 1);
    });
    for (const Gathering& x : warp.gatherings)
        if (group == 1 && x.mask != mask && (x.mask & bit) && (x.arrived & mask))
            stop(finding("lanes of a warp disagree on a mask",
                         describe(me) + " in " + what.name + " with mask " + hex(mask), source_line(site),
                         named_lanes(x.arrived) + " in " + x.what->name + " with mask " + hex(x.mask) + ", at " +
                             source_line(x.site)));
    if (g == warp.gatherings.end()) g = warp.gatherings.emplace(warp.gatherings.end(), &what, mask, site);
    if (g->what != &what || g->site.line != site.line)
        stop(finding("lanes of a warp disagree on a collective", describe(me) + " in " + what.name, source_line(site),
                     named_lanes(g->arrived) + " in " + g->what->name + ", at " + source_line(g->site)));
    const LaneMask missing = mask & (what.width ? ~warp.exists | warp.exited : warp.exited);
    if (missing)
        stop(finding("a collective of lanes that have exited or do not exist",
                     describe(me) + " in " + what.name + " with " + named_lanes(missing), source_line(site)));
    ++g->arrived_count;
    if (leader == me.warp) g->arrived |= bit;
    g->arguments[static_cast<std::size_t>(place)] = arguments;
    g->pc = pc;
    me.at = what.name, me.site = site;
    if (g->arrived_count == __builtin_popcountll(mask) * group) {
        fire(warp, static_cast<std::size_t>(g - warp.gatherings.begin()));
        return;
    }
    me.state = Lane::State::kCollective;
    park(me);
}

void Worker::fire(Warp& warp, std::size_t gathering) {
    Gathering& g = warp.gatherings[gathering];
    const int group = g.what->width > config.warp_size ? g.what->width / config.warp_size : 1;
    const auto first_warp = static_cast<std::size_t>(&warp - warps.data());
    if (config.counters) {
        const std::size_t end = g.mask == live(warp) ? first_warp + static_cast<std::size_t>(group) : first_warp;
        std::uint64_t latest = 0;
        for (std::size_t w = first_warp; w < end; ++w) {
            merge_logs(warps[w]);
            latest = std::max(latest, warps[w].log.time);
        }
        for (std::size_t w = first_warp; w < end; ++w)
            warps[w].log.time = latest + static_cast<std::uint64_t>(g.what->instructions);
        if (g.what->instructions) counters.add(g.pc, g.what->instruction, g.what->instructions * group);
    }
    running = &g, running_leader = static_cast<int>(first_warp);
    g.what->run(g.arguments.data(), g.mask);
    running = nullptr;
    for (std::size_t w = first_warp; w < first_warp + static_cast<std::size_t>(group); ++w) {
        if (g.what->orders_memory) synchronise(warps[w], g.mask);
        for (LaneMask rest = g.mask; rest; rest &= rest - 1) {
            Lane& lane = lanes[static_cast<std::size_t>(warps[w].first_lane + __builtin_ctzll(rest))];
            if (lane.state == Lane::State::kCollective) lane.state = Lane::State::kReady;
        }
    }
    if (gathering + 1 != warp.gatherings.size()) std::swap(g, warp.gatherings.back());
    warp.gatherings.pop_back();
}

/// Orders what `lanes` have done so far before what they do from now on. An exit orders nothing.
void Worker::synchronise(Warp& warp, LaneMask lanes) {
    const auto self = static_cast<int>(&warp - warps.data());
    const std::uint32_t epoch = epochs_[static_cast<std::size_t>(self)]++;
    for (News& news : warp.news)
        if (news.lanes & lanes) news.lanes |= lanes;
    share_news(warp);
    ++warp.clock_version;
    if (lanes == warp.exists) {
        warp.clock.known.raise(self, epoch);
        warp.seen.clear();
        return;
    }
    constexpr std::size_t kRow = 64;
    if (warp.seen.empty()) warp.seen.resize(kRow * kRow, 0);
    std::array<std::uint32_t, kRow> newest{};
    for (std::size_t l = 0; l < kRow; ++l)
        if (lanes >> l & 1)
            for (std::size_t other = 0; other < kRow; ++other)
                newest[other] = std::max(newest[other], lanes >> other & 1 ? epoch : warp.seen[l * kRow + other]);
    for (std::size_t l = 0; l < kRow; ++l)
        if (lanes >> l & 1) std::copy(newest.begin(), newest.end(), &warp.seen[l * kRow]);
}

// --- barriers --------------------------------------------------------------------------------------------------------

int Worker::barrier(int id, int threads, int predicate, bool wait, const char* name, Site site, const void* pc) {
    if (id < 0 || id >= kBarriers || threads < 0 || threads % config.warp_size != 0)
        stop(finding("barriers 0 to 15 exist, for whole warps",
                     describe(*t_lane) + " in " + name + " of barrier " + std::to_string(id) + " for " +
                         std::to_string(threads) + " threads",
                     source_line(site)));
    return visit({id, threads, 0, wait, name, site, pc}, predicate);
}

void Worker::cluster_sync(Site site, const void* pc) {
    visit({kClusterBarrier, 0, 0, true, "cluster_sync", site, pc}, 0);
}

int Worker::visit(const Visit& visit, int predicate) {
    Lane& me = *t_lane;
    Warp& warp = warp_of(me);
    if (!warp.visiting) warp.visit = visit;
    else if (warp.visit.id != visit.id || warp.visit.threads != visit.threads ||
             warp.visit.site.line != visit.site.line)
        stop(finding("barrier divergence", describe(me) + " in " + visit.name, source_line(visit.site),
                     named_lanes(warp.visiting) + " in " + warp.visit.name + ", at " + source_line(warp.visit.site)));
    warp.visiting |= LaneMask{1} << me.lane;
    warp.visit.predicates += predicate;
    me.at = visit.name, me.site = visit.site, me.pc = visit.pc, me.barrier = visit.id;
    me.state = Lane::State::kBarrier;
    if (warp.visiting == live(warp)) arrive(warp);
    if (me.state == Lane::State::kBarrier) park(me);
    return me.barrier_result;
}

/// The warp has come to the barrier. If threads are counted, an unfinished warp counts as a whole one. Warps may come
/// to the cluster's barrier at different lines.
void Worker::arrive(Warp& warp) {
    const Visit& visit = warp.visit;
    Block& block = blocks[static_cast<std::size_t>(warp.block)];
    Barrier& b = barrier_of(block, visit.id);
    const bool cluster = visit.id == kClusterBarrier;
    if (!b.arrived) b.first = visit;
    else if (b.first.threads != visit.threads)
        stop(finding("warps disagree on a barrier's threads",
                     describe(warp) + " in " + visit.name + " of barrier " + std::to_string(visit.id) + " for " +
                         std::to_string(visit.threads),
                     source_line(visit.site),
                     "others for " + std::to_string(b.first.threads) + ", at " + source_line(b.first.site)));
    else if (!cluster && visit.threads == 0 && b.first.site.line != visit.site.line)
        stop(finding("barrier divergence", describe(warp) + " in " + visit.name, source_line(visit.site),
                     "other warps in " + std::string(b.first.name) + ", at " + source_line(b.first.site)));
    b.arrived += visit.threads ? config.warp_size : __builtin_popcountll(warp.visiting);
    b.predicates += visit.predicates;
    merge_logs(warp);
    b.time = std::max(b.time, warp.log.time);
    if (config.counters) counters.add(visit.pc, Instruction::kBarrier, 1);
    synchronise(warp, warp.exists);
    if (config.checks) b.clock.join(warp.clock);
    warp.visiting = 0;
    if (!visit.wait)
        for (LaneMask rest = live(warp); rest; rest &= rest - 1)
            lanes[static_cast<std::size_t>(warp.first_lane + __builtin_ctzll(rest))].state = Lane::State::kReady;
    if (b.arrived == (visit.threads ? visit.threads : cluster ? live_ : block.live)) complete(block, visit.id);
}

void Worker::complete(Block& block, int id) {
    Barrier& b = barrier_of(block, id);
    const int per_warp = config.warp_size, count = (block.threads + per_warp - 1) / per_warp;
    const bool cluster = id == kClusterBarrier;
    const int first = cluster ? 0 : block.first_warp, end = cluster ? static_cast<int>(warps.size()) : first + count;
    for (int w = first; w < end; ++w) {
        Warp& warp = warps[static_cast<std::size_t>(w)];
        const void* pc = nullptr;
        for (LaneMask rest = warp.visiting ? 0 : live(warp); rest; rest &= rest - 1) {
            Lane& lane = lanes[static_cast<std::size_t>(warp.first_lane + __builtin_ctzll(rest))];
            if (lane.state != Lane::State::kBarrier || lane.barrier != id) continue;
            lane.state = Lane::State::kReady;
            lane.barrier_result = b.predicates;
            pc = lane.pc;
        }
        if (!pc) continue;
        if (config.checks) warp.clock.join(b.clock), ++warp.clock_version;
        if (config.counters) record({Event::Kind::kBarrier, 0, warp.log.time, b.time, pc}, w);
        warp.log.time = b.time;
    }
    b = {};
}

void Worker::exit(Lane& lane) {
    if (!lane.copies.empty())
        stop(finding("asynchronous copy under way at exit", describe(lane), source_line(lane.copies[0].pc)));
    if (!lane.stores.empty())
        stop(finding("a lane ends while its stores still read shared memory", describe(lane),
                     source_line(lane.stores[0].site)));
    if (!lane.registers.empty())
        stop(finding("wgmma under way at exit", describe(lane), source_line(lane.registers[0].site)));
    lane.state = Lane::State::kExited;
    --live_;
    Block& block = blocks[static_cast<std::size_t>(lane.block)];
    --block.live;
    Warp& warp = warp_of(lane);
    warp.exited |= LaneMask{1} << lane.lane;
    for (const Gathering& g : warp.gatherings)
        if (g.mask >> lane.lane & 1)
            stop(finding("a collective of lanes that have exited or do not exist",
                         describe(lane) + ", which exits, in " + g.what->name, source_line(g.site)));
    if (warp.visiting && warp.visiting == live(warp)) arrive(warp);
    for (int id = 0; id < kBarriers; ++id) {
        const Barrier& all = block.barriers[static_cast<std::size_t>(id)];
        if (all.arrived && all.first.threads == 0 && all.arrived == block.live) complete(block, id);
    }
    if (cluster_barrier_.arrived && cluster_barrier_.arrived == live_) complete(block, kClusterBarrier);
    if (block.uses.empty()) return;
    const Accessor who = accessor(lane);
    std::erase_if(block.uses, [&](const RemoteUse& use) { return read_before(who, use.agent, use.lane, use.epoch); });
    if (block.live > 0 || block.uses.empty()) return;
    const RemoteUse& use = block.uses.front();
    stop(finding("a block may end while its shared memory is in use",
                 describe(block) + "; " + describe(*use.by) + " in " + use.name, source_line(use.site)));
}

Block& Worker::remote_block(unsigned rank, const char* name, Site site) {
    if (rank >= blocks.size())
        stop(finding("a cluster of " + std::to_string(blocks.size()) + " blocks has no rank " + std::to_string(rank),
                     describe(*t_lane) + " in " + name, source_line(site)));
    Block& block = blocks[rank];
    if (block.live == 0)
        stop(finding("a block that has ended", describe(*t_lane) + " in " + name + ", at " + describe(block),
                     source_line(site)));
    return block;
}

char* Worker::address_in(const Block& block, const void* address, const std::string& name, Site site) {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (!arena.contains(at) || arena.block_at(at) != t_lane->block || arena.offset(at) >= arena.bytes_per_block())
        stop(finding("an address outside the block's shared memory", describe(*t_lane) + " in " + name,
                     source_line(site)));
    return arena.of_block(static_cast<int>(&block - blocks.data())) + arena.offset(at);
}

void Worker::use(Block& block, const RemoteUse& use) {
    const auto same = [&](const RemoteUse& other) { return other.agent == use.agent && other.lane == use.lane; };
    const auto found = std::find_if(block.uses.begin(), block.uses.end(), same);
    if (found != block.uses.end()) *found = use;
    else block.uses.push_back(use);
}

void Worker::wait_until(bool (*ready)(void*), void* argument, const char* name, Site site) {
    if (ready(argument)) return;
    Lane& me = *t_lane;
    me.at = name, me.site = site, me.ready = ready, me.ready_argument = argument;
    me.state = Lane::State::kWaiting;
    park(me);
}

int Worker::new_agent() {
    epochs_.push_back(arena.first_epoch());
    return static_cast<int>(epochs_.size()) - 1;
}

const Clock& Worker::clock_of(Lane& lane) {
    const Warp& warp = warp_of(lane);
    const LaneMask bit = LaneMask{1} << lane.lane;
    if (!(warp.informed & bit)) return warp.clock;
    if (lane.clock_version != warp.clock_version) {
        lane.clock = warp.clock;
        for (const News& news : warp.news)
            if (news.lanes & bit) lane.clock.join(news.clock);
        lane.clock_version = warp.clock_version;
    }
    return lane.clock;
}

void Worker::learn(Lane& lane, const void* from, std::uint64_t phase, const Clock& clock) {
    Warp& warp = warp_of(lane);
    const LaneMask bit = LaneMask{1} << lane.lane;
    const auto is_this = [&](const News& news) { return news.from == from && news.phase == phase; };
    if (std::none_of(warp.news.begin(), warp.news.end(), is_this)) warp.news.push_back({from, phase, 0, clock});
    // News of an older phase are part of those of a newer phase
    for (News& news : warp.news)
        if (news.from == from && news.phase <= phase) news.lanes |= bit;
    const LaneMask lanes = std::find_if(warp.news.begin(), warp.news.end(), is_this)->lanes;
    const auto idle = [&](const News& news) {
        return news.from == from && news.phase < phase && !(news.lanes & ~lanes);
    };
    warp.news.erase(std::remove_if(warp.news.begin(), warp.news.end(), idle), warp.news.end());
    lane.clock_version = 0;
    share_news(warp);
}

void Worker::share_news(Warp& warp) {
    if (warp.news.empty()) return;
    warp.informed = 0;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < warp.news.size(); ++i) {
        if (live(warp) & ~warp.news[i].lanes) {
            warp.informed |= warp.news[i].lanes;
            if (i != kept) warp.news[kept] = std::move(warp.news[i]);
            ++kept;
        } else {
            warp.clock.join(warp.news[i].clock);
            ++warp.clock_version;
        }
    }
    warp.news.resize(kept);
}

void Worker::hand_on(Lane& lane, Clock& to) {
    const Warp& warp = warp_of(lane);
    to.join(clock_of(lane));
    constexpr std::size_t kRow = 64;
    for (std::size_t l = 0; !warp.seen.empty() && l < kRow; ++l)
        to.known.raise(lane.warp, static_cast<int>(l), warp.seen[static_cast<std::size_t>(lane.lane) * kRow + l]);
    to.known.raise(lane.warp, lane.lane, epochs_[static_cast<std::size_t>(lane.warp)]++);
}

void Worker::hand_on_reads(Lane& lane, Clock& to) {
    Clock now;
    hand_on(lane, now);
    const auto agents = static_cast<int>(warps.size());
    now.known.add_to(to.read, 0, agents);
    now.known.add_to(to.known, agents, static_cast<int>(epochs_.size()));
    to.read.join(now.read);
}

void Worker::release(const void* object) {
    if (!config.checks) return;
    SyncObject& o = sync_objects_[object];
    hand_on(*t_lane, o.clock);
    ++o.releases;
}

void Worker::acquire(const void* object) {
    if (!config.checks) return;
    const SyncObject& o = sync_objects_[object];
    learn(*t_lane, object, o.releases, o.clock);
}

unsigned Worker::add_release(unsigned* counter, unsigned x) {
    const std::lock_guard lock(g_memory.counters.mutex);
    if (config.checks) {
        auto& [releases, clock] = g_memory.counters.clocks[counter];
        Clock now;
        hand_on(*t_lane, now);
        now.known.add_to(clock.counted, 0, static_cast<int>(warps.size()),
                         g_memory.first_warp(accessor(*t_lane).block));
        clock.counted.join(now.counted);
        ++releases;
    }
    return __atomic_fetch_add(counter, x, __ATOMIC_RELAXED);
}

unsigned Worker::load_acquire(const unsigned* counter) {
    const std::lock_guard lock(g_memory.counters.mutex);
    const auto found = g_memory.counters.clocks.find(counter);
    if (config.checks && found != g_memory.counters.clocks.end())
        learn(*t_lane, counter, found->second.first, found->second.second);
    return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

// --- a launch --------------------------------------------------------------------------------------------------------

namespace {

/// Workers keep their stacks and arenas from launch to launch.
class WorkerPool {
  public:
    std::unique_ptr<Worker> take() {
        const std::lock_guard lock(mutex_);
        if (idle_.empty()) return std::make_unique<Worker>();
        std::unique_ptr<Worker> worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
    }
    void give_back(std::unique_ptr<Worker> worker) {
        const std::lock_guard lock(mutex_);
        idle_.push_back(std::move(worker));
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> idle_;
};
WorkerPool g_pool;

void refuse(const std::string& what, const Launch& l) {
    throw std::runtime_error("emulator: " + function_name(l.kernel) + ": " + what);
}

/// Ends what was said of the grid before a launch, however the launch ends.
struct EndOfLateWrites {
    ~EndOfLateWrites() { g_late_writes.land(), g_late_writes.clear(); }
};

}  // namespace

void launch(const Launch& l) {
    const EndOfLateWrites end;
    const std::uint64_t blocks = volume(l.grid), threads = volume(l.block);
    constexpr std::uint64_t kMostThreads = 1024;
    if (blocks == 0 || threads == 0 || threads > kMostThreads)
        refuse("launch: a grid of " + text(l.grid) + " blocks of " + text(l.block) +
                   " threads; a grid has 1 block or more, a block 1 to " + std::to_string(kMostThreads) + " threads",
               l);
    if (l.cluster < 1 || l.grid.x % static_cast<unsigned>(l.cluster))
        refuse("launch: a cluster of " + std::to_string(l.cluster) + " blocks does not divide the grid", l);
    constexpr int kMostBlocks = 16, kMostWarps = 255;  // of a cluster; the records of memory have 8 bits for a warp
    const std::uint64_t warps = (threads + static_cast<unsigned>(g_config.warp_size) - 1) /
                                static_cast<unsigned>(g_config.warp_size) * static_cast<std::uint64_t>(l.cluster);
    if (l.cluster > kMostBlocks || warps > kMostWarps)
        refuse("launch: a cluster of " + std::to_string(l.cluster) + " blocks, " + std::to_string(warps) +
                   " warps; the emulator has clusters of up to " + std::to_string(kMostBlocks) + " blocks, " +
                   std::to_string(kMostWarps) + " warps",
               l);
    constexpr std::size_t kMostSharedMemory = 227 << 10;
    if (l.smem_bytes > kMostSharedMemory)
        refuse("launch: " + std::to_string(l.smem_bytes) + " bytes of shared memory; at most " +
                   std::to_string(kMostSharedMemory) + " bytes a block",
               l);

    const InterruptWatch watch;
    g_abandoned = false;
    const Config config = g_config;
    const bool late = l.programmatic && !g_late_writes.empty();
    g_memory.begin_launch(config.checks, l.cluster, static_cast<int>(warps));
    const auto cluster = static_cast<std::uint64_t>(l.cluster), clusters = blocks / cluster;
    std::atomic<std::uint64_t> next{0};
    std::mutex mutex;
    std::string finding;  // of the first block, in the grid's order, that has one
    std::uint64_t found_at = clusters;
    std::exception_ptr error;
    LaunchProfile profile{"", l.grid, l.block, l.smem_bytes, 0, {}, {}};

    const auto work = [&] {
        std::unique_ptr<Worker> worker;
        for (std::uint64_t c; (c = next++) < clusters;) {
            try {
                if (!worker) {
                    worker = g_pool.take();
                    worker->begin(l, config);
                    t_worker = worker.get();
                }
                if (late) g_late_writes.withhold();
                worker->run(c * cluster, l.cluster);
            } catch (const Abandoned&) {
            } catch (const Finding& f) {
                g_abandoned = true;
                const std::lock_guard lock(mutex);
                if (c < found_at) found_at = c, finding = f.what;
                next = clusters;
            } catch (...) {
                const std::lock_guard lock(mutex);
                error = std::current_exception();
                next = clusters;
            }
        }
        t_worker = nullptr;
        t_lane = nullptr;
        if (!worker) return;
        if (config.counters) {
            const std::lock_guard lock(mutex);
            for (const auto& [place, count] : worker->counters.counts) profile.counts[place].add(count);
            if (profile.timeline.empty()) profile.timeline = std::move(worker->counters.timeline);
        }
        g_pool.give_back(std::move(worker));
    };
    const int threads_wanted = late ? 1 : std::max(config.threads, 1);
    const auto workers =
        static_cast<int>(std::min<std::uint64_t>(static_cast<std::uint64_t>(threads_wanted), clusters));
    if (!late) g_late_writes.land();
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < workers; ++i) others.emplace_back(work);
    } catch (const std::exception&) {  // no more threads are available: the existing ones do all the work
    }
    work();
    for (std::thread& other : others) other.join();
    if (g_interrupted) throw std::runtime_error("emulator: interrupted");
    if (error) std::rethrow_exception(error);
    if (found_at < clusters) refuse(finding, l);
    if (config.counters) {
        profile.kernel = function_name(l.kernel);
        profile.warps = blocks * ((threads + static_cast<unsigned>(config.warp_size) - 1) /
                                  static_cast<unsigned>(config.warp_size));
        add_profile(std::move(profile));
    }
}

}  // namespace flash_wmma::emulator

extern "C" void flash_wmma_emulator_configure(const flash_wmma::emulator::Config* config) {
    flash_wmma::emulator::g_config = *config;
}

extern "C" void flash_wmma_emulator_buffers(const flash_wmma::emulator::Buffer* buffers, std::size_t count) {
    flash_wmma::emulator::g_memory.set(buffers, count);
}
