// Loading a kernel's library for the emulator, once, and running a kernel in it.
#include "torch/emulation.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <stdexcept>

namespace flash_wmma {
namespace {

EmulatorResolver g_resolver = nullptr;
std::recursive_mutex g_run_mutex;  // the emulator knows the buffers of one launch at a time

[[noreturn]] void loading_failed() { throw std::runtime_error(std::string("emulator: ") + dlerror()); }

/// A library, loaded for good.
void* load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) loading_failed();
    return library;
}

template <class Function>
Function symbol(void* library, const char* name) {
    void* address = dlsym(library, name);
    if (!address) loading_failed();
    return reinterpret_cast<Function>(address);
}

const KernelTable& kernels_in(void* library) {
    return *symbol<const KernelTable* (*)()>(library, "flash_wmma_emulated_kernels")();
}

KernelTable& known() {
    static KernelTable all = registry::kernels();
    return all;
}

}  // namespace

Emulation::Emulation(const std::string& kernel, const char* direction) {
    const auto built = registry::kernels().facts(direction);
    if (!g_resolver) registry::unknown(kernel, built);
    const auto target = std::make_unique<EmulatorTarget>();
    const int answer = g_resolver(kernel.c_str(), direction, target.get());
    if (answer == 2) registry::unknown(kernel, built, target->error);
    if (answer != 1 || !target->library[0])
        throw std::runtime_error(target->error[0] ? target->error : "emulator: Python gave no library of " + kernel);
    void* library = load(target->library);
    kernels_ = &kernels_in(library);
    configure_ = symbol<void (*)(const emulator::Config*)>(library, "flash_wmma_emulator_configure");
    set_buffers_ = symbol<void (*)(const emulator::Buffer*, std::size_t)>(library, "flash_wmma_emulator_buffers");
    if (void* set = dlsym(library, "flash_wmma_set_multiply"))
        reinterpret_cast<void (*)(void (*)(const Product&))>(set)(multiply_by_torch);
    config_ = target->config;
    device_.arch = target->arch;
    device_.sm_count = target->sm_count;
    device_.smem_optin = target->smem_optin;
    device_.warp_size = config_.warp_size;
    device_.memory_bus = target->memory_bus;
}

Emulation::Memory::Memory(const Emulation& emulation, const std::vector<emulator::Buffer>& buffers)
    : emulation_(emulation) {
    g_run_mutex.lock();
    emulation_.configure_(&emulation_.config_);
    emulation_.set_buffers_(buffers.data(), buffers.size());
}

Emulation::Memory::~Memory() {
    emulation_.set_buffers_(nullptr, 0);
    g_run_mutex.unlock();
}

namespace emulation {

const KernelTable& kernels() { return known(); }

void add_library(const std::string& path) {
    const KernelTable& added = kernels_in(load(path));
    for (const KernelInfo* kernel : added.forward) known().add(*kernel);
    for (const BackwardKernelInfo* kernel : added.backward) known().add(*kernel);
}

}  // namespace emulation
}  // namespace flash_wmma

void flash_wmma_set_emulator_resolver(flash_wmma::EmulatorResolver resolver) { flash_wmma::g_resolver = resolver; }
void flash_wmma_lock_emulator() { flash_wmma::g_run_mutex.lock(); }
void flash_wmma_unlock_emulator() { flash_wmma::g_run_mutex.unlock(); }
