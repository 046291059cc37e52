// Merges lane logs into requests, counts what a request costs, and writes the profile as JSON.
#include "emulator/counters.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <sstream>

#include "emulator/api.h"
#include "emulator/machine.h"

namespace flash_wmma::emulator {

CallNode* CallNode::enter(const void* call) {
    for (const auto& callee : callees)
        if (callee->pc == call) return callee.get();
    callees.emplace_back(new CallNode{this, call, depth + 1, {}});
    return callees.back().get();
}

void Count::add(const Count& o) {
    instructions += o.instructions, lanes += o.lanes, bytes += o.bytes;
    wavefronts += o.wavefronts, ideal_wavefronts += o.ideal_wavefronts;
    sectors += o.sectors, ideal_sectors += o.ideal_sectors, divergent += o.divergent;
    if (o.worst <= worst) return;
    worst = o.worst, worst_lanes = o.worst_lanes, worst_bytes = o.worst_bytes, worst_addresses = o.worst_addresses;
}

namespace {

constexpr int kMaxLanes = 64, kBanks = 32;

/// The order of two records in the program: first by their call paths from the outermost call, then by their own place.
int compare(const Record& a, const Record& b) {
    if (a.node == b.node && a.pc == b.pc) return a.what < b.what ? -1 : a.what > b.what;
    if (a.node == b.node) return a.pc < b.pc ? -1 : 1;
    const CallNode *x = a.node, *y = b.node;
    const void *pc_a = a.pc, *pc_b = b.pc;  // what is called in x and in y
    while (x->depth > y->depth) pc_a = x->pc, x = x->caller;
    while (y->depth > x->depth) pc_b = y->pc, y = y->caller;
    while (x != y) pc_a = x->pc, x = x->caller, pc_b = y->pc, y = y->caller;
    if (pc_a != pc_b) return pc_a < pc_b ? -1 : 1;
    return a.node->depth < b.node->depth ? 1 : -1;
}

/// Whether lanes l and l ^ distance want the same address, for every l.
bool in_pairs(const std::uintptr_t* address, LaneMask lanes, int distance) {
    for (int l = 0; l < kMaxLanes; ++l)
        if ((lanes >> l & 1) && (lanes >> (l ^ distance) & 1) && address[l] != address[l ^ distance]) return false;
    return true;
}

/// The part of a request to shared memory that serves lane l, if `at_once` lanes are served together. A 16-byte load of
/// a wavefront of 64 has parts that are not neighbours: lanes 0-3 and 20-23, 4-7 and 16-19, 8-11 and 28-31, 12-15 and
/// 24-27.
int part_of(int l, int at_once, bool amd_wide_load) {
    if (!amd_wide_load) return l / at_once;
    const int quad = l % 32 / 4;
    return l / 32 * 4 + (quad < 4 ? quad : (quad - 4) ^ 1);
}

/// Wavefronts of a shared-memory request, and the fewest possible. A warp of 32 is served at once, a wavefront of 64 in
/// two halves. If lanes access 8 or 16 bytes, there are two or four times as many parts, but only half as many for a
/// load in a warp of 32 whose lanes read the same addresses in pairs. In each part a bank gives one word per wavefront,
/// to every lane that wants this word. Warps of 32 are modelled on NVIDIA's GPUs, wavefronts of 64 on AMD's
/// (docs/hip.md).
std::pair<std::uint64_t, std::uint64_t> wavefronts(const std::uintptr_t* address, LaneMask lanes, int bytes, bool load,
                                                   int warp_size) {
    int at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    const bool amd = warp_size == 64;
    if (!amd && load && bytes > 4 && (in_pairs(address, lanes, 1) || in_pairs(address, lanes, 2))) at_once *= 2;
    std::array<LaneMask, kMaxLanes / 8> parts{};
    for (LaneMask rest = lanes; rest; rest &= rest - 1) {
        const int l = __builtin_ctzll(rest);
        parts[static_cast<std::size_t>(part_of(l, at_once, amd && load && bytes == 16))] |= LaneMask{1} << l;
    }
    std::uint64_t total = 0, ideal = 0;
    for (const LaneMask part : parts) {
        if (!part) continue;
        std::array<std::uintptr_t, 64> words;
        std::array<std::uint8_t, kBanks> uses{};
        int count = 0;
        std::uint8_t most = 0;
        for (LaneMask rest = part; rest; rest &= rest - 1) {
            const int l = __builtin_ctzll(rest);
            const std::uintptr_t last = (address[l] + static_cast<std::uintptr_t>(bytes) - 1) / 4;
            for (std::uintptr_t word = address[l] / 4; word <= last; ++word) {
                const auto end = words.begin() + count;
                if (std::find(words.begin(), end, word) != end) continue;
                words[static_cast<std::size_t>(count++)] = word;
                most = std::max(most, ++uses[word % kBanks]);
            }
        }
        ++ideal;
        total += most;
    }
    return {total, ideal};
}

/// 32-byte sectors of a global request, and the fewest that hold its distinct bytes.
std::pair<std::uint64_t, std::uint64_t> sectors(const std::uintptr_t* address, LaneMask lanes, int bytes) {
    constexpr std::uintptr_t kSector = 32;
    std::array<std::uintptr_t, 2 * kMaxLanes> seen, starts;
    std::size_t count = 0, distinct = 0;
    for (int l = 0; l < kMaxLanes; ++l) {
        if (!(lanes >> l & 1)) continue;
        if (std::find(starts.begin(), starts.begin() + distinct, address[l]) == starts.begin() + distinct)
            starts[distinct++] = address[l];
        const std::uintptr_t last = (address[l] + static_cast<std::uintptr_t>(bytes) - 1) / kSector;
        for (std::uintptr_t s = address[l] / kSector; s <= last; ++s)
            if (std::find(seen.begin(), seen.begin() + count, s) == seen.begin() + count && count < seen.size())
                seen[count++] = s;
    }
    return {count, (distinct * static_cast<std::size_t>(bytes) + kSector - 1) / kSector};
}

bool is_shared(Instruction what) {
    return what == Instruction::kLdmatrix || what == Instruction::kLoadShared || what == Instruction::kStoreShared;
}

}  // namespace

void Counters::add(const void* pc, Instruction what, int instructions) {
    counts[{pc, what}].instructions += static_cast<std::uint64_t>(instructions);
}

void Counters::add_copy(const void* pc, Instruction what, std::uint64_t bytes, std::uint64_t sectors,
                        std::uint64_t ideal_sectors) {
    Count& c = counts[{pc, what}];
    ++c.instructions, ++c.lanes;
    c.bytes += bytes, c.sectors += sectors, c.ideal_sectors += ideal_sectors;
}

std::uint64_t Counters::request(const void* pc, Instruction what, const std::uintptr_t* address, LaneMask lanes,
                                int bytes) {
    Count& c = counts[{pc, what}];
    const auto first = static_cast<std::size_t>(__builtin_ctzll(lanes));
    const bool shared = address[first] - shared_base < shared_size;
    const auto active = static_cast<std::uint64_t>(__builtin_popcountll(lanes));
    ++c.instructions;
    c.lanes += active;
    c.bytes += active * static_cast<std::uint64_t>(bytes);
    const auto [cost, ideal] = shared ? wavefronts(address, lanes, bytes, what == Instruction::kLoadShared, warp_size)
                                      : sectors(address, lanes, bytes);
    (shared ? c.wavefronts : c.sectors) += cost;
    (shared ? c.ideal_wavefronts : c.ideal_sectors) += ideal;
    if (cost > c.worst) {
        c.worst = cost, c.worst_lanes = lanes, c.worst_bytes = static_cast<std::uint32_t>(bytes);
        c.worst_addresses.assign(static_cast<std::size_t>(warp_size), 0);
        for (std::size_t l = 0; l < c.worst_addresses.size(); ++l)
            if (lanes >> l & 1) c.worst_addresses[l] = shared ? (address[l] - shared_base) % shared_block : address[l];
    }
    return is_shared(what) ? cost : 1;
}

std::uint64_t Counters::merge(LaneLog* const* logs, int count) {
    std::array<const Record*, kMaxLanes> next, end;
    LaneMask pending = 0;
    for (int l = 0; l < count; ++l) {
        const auto i = static_cast<std::size_t>(l);
        next[i] = logs[l]->records.data();
        end[i] = next[i] + logs[l]->records.size();
        if (next[i] < end[i]) pending |= LaneMask{1} << l;
    }
    std::uint64_t time = 0;
    LaneMask together = pending;   // the lanes of the previous step
    const void* before = nullptr;  // the basic block that they are in
    while (pending) {
        // The lowest place, and the lanes at it
        const auto first = static_cast<std::size_t>(__builtin_ctzll(pending));
        std::size_t lead = first;
        LaneMask at = LaneMask{1} << first;
        for (LaneMask rest = pending & (pending - 1); rest; rest &= rest - 1) {
            const auto l = static_cast<std::size_t>(__builtin_ctzll(rest));
            const Record &a = *next[l], &b = *next[lead];
            const int order = a.pc == b.pc && a.node == b.node && a.what == b.what ? 0 : compare(a, b);
            if (order < 0) lead = l, at = LaneMask{1} << l;
            else if (order == 0) at |= LaneMask{1} << l;
        }
        const Record r = *next[lead];
        if (before && (at & together) && (at & together) != together && (together & ~at & pending))
            ++counts[{before, Instruction::kBasicBlock}].divergent;
        std::array<std::uintptr_t, kMaxLanes> address;
        for (LaneMask rest = at; rest; rest &= rest - 1) {
            const auto l = static_cast<std::size_t>(__builtin_ctzll(rest));
            address[l] = next[l]->address;
            if (++next[l] == end[l]) pending &= ~(LaneMask{1} << l);
        }
        if (r.what == Instruction::kBasicBlock || r.what == Instruction::kExponential ||
            r.what == Instruction::kTransactionBarrier) {
            add(r.pc, r.what, 1);
            ++time;
        } else {
            time += request(r.pc, r.what, address.data(), at, static_cast<int>(r.bytes));
        }
        if (r.what == Instruction::kBasicBlock) before = r.pc;
        else if (at != together) before = nullptr;
        together = at;
    }
    for (int l = 0; l < count; ++l) logs[l]->records.clear();
    return time;
}

// --- the profile as JSON --------------------------------------------------------------------------------------------

namespace {

std::mutex g_profile_mutex;
std::vector<LaunchProfile> g_profiles;

const char* name(Instruction what) {
    static constexpr const char* kNames[] = {
        "mma",          "ldmatrix",     "shared_load", "shared_store", "global_load",
        "global_store", "atomic",       "async_load",  "async_copy",   "shuffle",
        "vote",         "syncwarp",     "barrier",     "exp2",         "transaction_barrier",
        "tensor_copy",  "tensor_store", "wgmma",       "basic_block"};
    static_assert(std::size(kNames) == static_cast<std::size_t>(Instruction::kCount));
    return kNames[static_cast<std::size_t>(what)];
}

const char* name(Event::Kind kind) {
    static constexpr const char* kNames[] = {"barrier", "transaction_barrier", "tensor_copy", "product"};
    return kNames[static_cast<std::size_t>(kind)];
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += c;
    }
    return out + '"';
}

void print(std::ostream& out, const Count& c) {
    out << "\"instructions\":" << c.instructions << ",\"lanes\":" << c.lanes << ",\"bytes\":" << c.bytes
        << ",\"wavefronts\":" << c.wavefronts << ",\"ideal_wavefronts\":" << c.ideal_wavefronts
        << ",\"sectors\":" << c.sectors << ",\"ideal_sectors\":" << c.ideal_sectors << ",\"divergent\":" << c.divergent;
    if (!c.worst) return;
    out << ",\"worst\":{\"bytes\":" << c.worst_bytes << ",\"addresses\":[";
    for (std::size_t l = 0; l < c.worst_addresses.size(); ++l) {
        out << (l ? "," : "");
        if (c.worst_lanes >> l & 1) out << c.worst_addresses[l];
        else out << "null";
    }
    out << "]}";
}

}  // namespace

void add_profile(LaunchProfile profile) {
    const std::lock_guard lock(g_profile_mutex);
    g_profiles.push_back(std::move(profile));
}

}  // namespace flash_wmma::emulator

extern "C" const char* flash_wmma_emulator_take_profile() {
    using namespace flash_wmma::emulator;
    static std::string text;
    const std::lock_guard lock(g_profile_mutex);
    std::ostringstream out;
    out << "[";
    for (std::size_t i = 0; i < g_profiles.size(); ++i) {
        const LaunchProfile& p = g_profiles[i];
        const auto triple = [](Index v) {
            return "[" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + "]";
        };
        out << (i ? ",\n" : "") << "{\"kernel\":" << quoted(p.kernel) << ",\"grid\":" << triple(p.grid)
            << ",\"block\":" << triple(p.block) << ",\"smem_bytes\":" << p.smem_bytes << ",\"warps\":" << p.warps
            << ",\"counts\":[";
        std::vector<const void*> places;
        for (const auto& [place, count] : p.counts) places.push_back(place.first);
        prepare_source_lines(places);
        // Several places of code may belong to one line
        std::map<std::pair<std::string, Instruction>, Count> by_line;
        for (const auto& [place, count] : p.counts) by_line[{source_line(place.first), place.second}].add(count);
        bool first = true;
        for (const auto& [place, count] : by_line) {
            out << (first ? "\n" : ",\n") << "{\"line\":" << quoted(place.first) << ",\"what\":\"" << name(place.second)
                << "\",";
            print(out, count);
            out << "}";
            first = false;
        }
        out << "],\"timeline\":[";
        for (std::size_t w = 0; w < p.timeline.size(); ++w) {
            const Event& event = p.timeline[w];
            out << (w ? ",\n" : "") << "{\"kind\":\"" << name(event.kind) << "\",\"warp\":" << event.warp
                << ",\"arrived\":" << event.arrived << ",\"released\":" << event.released
                << ",\"line\":" << quoted(source_line(event.pc)) << ",\"calls\":[";
            const std::vector<std::string> calls = inlined_calls(event.pc);
            for (std::size_t c = 0; c < calls.size(); ++c) out << (c ? "," : "") << quoted(calls[c]);
            out << "]}";
        }
        out << "]}";
    }
    out << "]";
    g_profiles.clear();
    text = out.str();
    return text.c_str();
}
