// The switch between fibers, and their stacks.
#include "emulator/fiber.h"

#include <sys/mman.h>

#include <new>

namespace flash_wmma::emulator {

#if defined(__x86_64__)

// Saves the registers that a function must keep, swaps stacks, restores. rdi: where to save the stack pointer; rsi: the
// stack pointer to take.
extern "C" void flash_wmma_switch(void** save, void* load);
asm(R"(
.text
.hidden flash_wmma_switch
.globl flash_wmma_switch
.type flash_wmma_switch, @function
flash_wmma_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size flash_wmma_switch, .-flash_wmma_switch
)");

void start(Fiber& fiber, char*, char* top, void (*entry)()) {
    auto** sp = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{15});
    *--sp = nullptr;                         // entry's return address, never used; keeps the stack aligned
    *--sp = reinterpret_cast<void*>(entry);  // where the switch returns to
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    fiber.stack_pointer = sp;
}

void switch_fiber(Fiber& from, Fiber& to) { flash_wmma_switch(&from.stack_pointer, to.stack_pointer); }

#else

void start(Fiber& fiber, char* bottom, char* top, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = bottom;
    fiber.context.uc_stack.ss_size = static_cast<std::size_t>(top - bottom);
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

Stacks::~Stacks() {
    if (base_) munmap(base_, count_ * kBytes);
}

void Stacks::reserve(std::size_t count) {
    if (count <= count_) return;
    if (base_) munmap(base_, count_ * kBytes);
    void* base =
        mmap(nullptr, count * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = nullptr, count_ = 0;
    if (base == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(base), count_ = count;
    for (std::size_t i = 0; i < count; ++i) {
        if (mprotect(base_ + i * kBytes, kGuard, PROT_NONE) == 0) continue;
        munmap(base_, count_ * kBytes);
        base_ = nullptr, count_ = 0;
        throw std::bad_alloc();
    }
}

}  // namespace flash_wmma::emulator
