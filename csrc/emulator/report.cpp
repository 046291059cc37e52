// Turns addresses of code into source lines and names, by addr2line, which comes with g++. It runs only when something
// is reported; every answer is kept.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/machine.h"

namespace flash_wmma::emulator {
namespace {

struct Place {
    std::vector<std::string> functions;  ///< the function, and those that it is inlined into, outwards
    std::string line;
};

/// A path relative to the repository, from csrc on, without detours and addr2line's additions.
std::string tidy(std::string path) {
    if (const std::size_t at = path.find(" (discriminator"); at != std::string::npos) path.erase(at);
    if (const std::size_t at = path.rfind("csrc/"); at != std::string::npos) path.erase(0, at);
    return std::filesystem::path(path).lexically_normal().string();
}

/// Whether the file is one of the emulator's own, or a header of the compiler or the system, wherever g++ is installed.
bool is_brick(const std::string& path) {
    for (const char* part : {"csrc/emulator/", "/include/c++/", "/lib/gcc/"})
        if (path.find(part) != std::string::npos) return true;
    return path.rfind("/usr/include/", 0) == 0;
}

/// The text quoted as one word of the shell.
std::string quoted(const std::string& text) {
    std::string word = "'";
    for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return word + "'";
}

/// For addresses in one library, finds the innermost function that is no brick of the emulator or the standard library.
void look_up(const std::string& library, std::uintptr_t base, const std::vector<const void*>& addresses,
             std::map<const void*, Place>& places) {
    constexpr std::size_t kAtOnce = 2000;  // a command line holds this many
    for (std::size_t first = 0; first < addresses.size(); first += kAtOnce) {
        const std::size_t last = std::min(addresses.size(), first + kAtOnce);
        std::string command = "addr2line -a -C -f -i -e " + quoted(library);
        for (std::size_t i = first; i < last; ++i) {
            char number[32];
            std::snprintf(number, sizeof number, " 0x%zx", reinterpret_cast<std::uintptr_t>(addresses[i]) - base);
            command += number;
        }
        FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
        if (!pipe) return;
        // For each address: a line "0x...", then pairs of lines (function, place) from the innermost outwards
        std::size_t next = first;
        Place* place = nullptr;
        std::string line, function;
        for (int c; (c = std::fgetc(pipe)) != EOF;) {
            if (c != '\n') {
                line += static_cast<char>(c);
                continue;
            }
            if (line.rfind("0x", 0) == 0 && next < last) {
                place = &places[addresses[next++]];
                if (!place->line.empty()) place = nullptr;  // asked for twice
                function.clear();
            } else if (function.empty()) {
                function = line;
            } else {
                if (place && place->line.empty() && !is_brick(line)) place->line = tidy(line);
                if (place && !place->line.empty()) place->functions.push_back(function);
                function.clear();
            }
            line.clear();
        }
        pclose(pipe);
    }
}

std::mutex g_places_mutex;
std::map<const void*, Place> g_places;

Place place_of(const void* address) {
    const std::lock_guard lock(g_places_mutex);
    if (const auto found = g_places.find(address); found != g_places.end()) return found->second;
    Dl_info info{};
    if (dladdr(address, &info) && info.dli_fname)
        look_up(info.dli_fname, reinterpret_cast<std::uintptr_t>(info.dli_fbase), {address}, g_places);
    Place& place = g_places[address];
    if (place.line.empty()) place = {{"?"}, "?"};
    return place;
}

}  // namespace

std::string source_line(const void* pc) {
    return pc ? place_of(static_cast<const char*>(pc) - 1).line
              : "an unknown place";  // pc is where the call returns to
}

void prepare_source_lines(const std::vector<const void*>& pcs) {
    const std::lock_guard lock(g_places_mutex);
    std::map<std::pair<std::string, std::uintptr_t>, std::vector<const void*>> by_library;
    for (const void* pc : pcs) {
        const void* address = static_cast<const char*>(pc) - 1;
        Dl_info info{};
        if (pc && !g_places.count(address) && dladdr(address, &info) && info.dli_fname)
            by_library[{info.dli_fname, reinterpret_cast<std::uintptr_t>(info.dli_fbase)}].push_back(address);
    }
    for (const auto& [library, addresses] : by_library) look_up(library.first, library.second, addresses, g_places);
}

std::string source_line(Site site) { return tidy(site.file) + ":" + std::to_string(site.line); }

std::vector<std::string> inlined_calls(const void* pc) {
    return pc ? place_of(static_cast<const char*>(pc) - 1).functions : std::vector<std::string>{};
}

std::string function_name(const void* function) {
    std::string name = place_of(function).functions.front();
    int depth = 0;  // of parentheses, from the end: the arguments may have some of their own
    for (std::size_t i = name.size(); i-- > 0;) {
        depth += (name[i] == ')') - (name[i] == '(');
        if (depth == 0 && name[i] == '(') {
            name.erase(i);
            break;
        }
    }
    if (name.rfind("void ", 0) == 0) name.erase(0, 5);  // a template's name begins with its return type
    return name;
}

}  // namespace flash_wmma::emulator
