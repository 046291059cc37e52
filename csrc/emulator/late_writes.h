// What the grid before a launch has yet to write when the launch begins: a programmatic launch may see it only once it
// has waited for that grid. A kernel that reads too early computes with what was there before, in every block (or
// cluster), as far as it reads before any lane of the block has waited. The launch itself writes nothing there.
#pragma once

#include <cstddef>
#include <vector>

namespace flash_wmma::emulator {

class LateWrites {
  public:
    /// `bytes` bytes of `from`, which are copied now, to `to`.
    void add(void* to, const void* from, std::size_t bytes);
    bool empty() const { return writes_.empty(); }
    /// A block begins: what was there before is there again.
    void withhold();
    bool withheld() const { return withheld_; }
    /// The grid before is complete.
    void land();
    void clear() { writes_.clear(); }

  private:
    struct Write {
        void* to;
        std::vector<char> before, after;
    };
    std::vector<Write> writes_;
    bool withheld_ = false;
};

extern LateWrites g_late_writes;

}  // namespace flash_wmma::emulator
