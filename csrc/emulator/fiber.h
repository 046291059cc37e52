// Fibers: stacks of their own and a switch between them. A lane is a fiber; fibers never move between OS threads.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace flash_wmma::emulator {

/// The place where a fiber, or the scheduler, has stopped.
struct Fiber {
#if defined(__x86_64__)
    void* stack_pointer;
#else
    ucontext_t context;
#endif
};

/// Makes `fiber` start in entry() on the stack [bottom, top) at its first switch. entry must not return.
void start(Fiber& fiber, char* bottom, char* top, void (*entry)());

/// Stops in `from` and goes on in `to`.
void switch_fiber(Fiber& from, Fiber& to);

/// Stacks in one stretch of address space, each with a guard page below. Tops are staggered, so that lanes that run in
/// step do not fight for the same cache sets.
class Stacks {
  public:
    ~Stacks();
    void reserve(std::size_t count);
    char* bottom(std::size_t i) const { return base_ + i * kBytes + kGuard; }
    char* top(std::size_t i) const { return base_ + (i + 1) * kBytes - 64 - i % 32 * 576; }
    bool contain(std::uintptr_t address) const {
        return address - reinterpret_cast<std::uintptr_t>(base_) < count_ * kBytes;
    }

    std::size_t bytes() const { return count_ * kBytes; }
    std::size_t offset(std::uintptr_t address) const { return address - reinterpret_cast<std::uintptr_t>(base_); }

  private:
    static constexpr std::size_t kGuard = 4096, kBytes = (1 << 20) + kGuard;  // odd in pages: sets of the TLB differ
    char* base_ = nullptr;
    std::size_t count_ = 0;
};

}  // namespace flash_wmma::emulator
