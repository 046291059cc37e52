// Loading a kernel's library for the emulator, once, and running a kernel in it.
#include "emulation.h"

#include <dlfcn.h>

#include <algorithm>
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

const std::vector<const KernelInfo*>& kernels_in(void* library) {
    return *symbol<const std::vector<const KernelInfo*>* (*)()>(library, "flash_wmma_emulated_kernels")();
}

std::vector<const KernelInfo*>& known() {
    static std::vector<const KernelInfo*> all = registry::kernels();
    return all;
}

}  // namespace

Emulation::Emulation(const std::string& kernel) {
    if (!g_resolver) registry::unknown(kernel, registry::kernels());
    const auto target = std::make_unique<EmulatorTarget>();
    const int answer = g_resolver(kernel.c_str(), target.get());
    if (answer == 2) registry::unknown(kernel, registry::kernels(), target->error);
    if (answer != 1 || !target->library[0])
        throw std::runtime_error(target->error[0] ? target->error : "emulator: Python gave no library of " + kernel);
    void* library = load(target->library);
    kernels_ = &kernels_in(library);
    configure_ = symbol<void (*)(const emulator::Config*)>(library, "flash_wmma_emulator_configure");
    set_buffers_ = symbol<void (*)(const emulator::Buffer*, std::size_t)>(library, "flash_wmma_emulator_buffers");
    config_ = target->config;
    device_.arch = target->arch;
    device_.sm_count = target->sm_count;
    device_.smem_optin = target->smem_optin;
    device_.warp_size = config_.warp_size;
}

void Emulation::run(const KernelInfo& kernel, const ForwardParams& params,
                    const std::vector<emulator::Buffer>& buffers) const {
    const std::lock_guard lock(g_run_mutex);
    configure_(&config_);
    struct Known {
        decltype(set_buffers_) set;
        ~Known() { set(nullptr, 0); }
    } const known{set_buffers_};
    set_buffers_(buffers.data(), buffers.size());
    kernel.launch(params, device_, nullptr);
}

namespace emulation {

const std::vector<const KernelInfo*>& kernels() { return known(); }

void add_library(const std::string& path) {
    const auto by_name = [](const KernelInfo* a, const KernelInfo* b) { return std::string(a->name) < b->name; };
    for (const KernelInfo* kernel : kernels_in(load(path)))
        if (!std::binary_search(known().begin(), known().end(), kernel, by_name))
            known().insert(std::lower_bound(known().begin(), known().end(), kernel, by_name), kernel);
}

}  // namespace emulation
}  // namespace flash_wmma

void flash_wmma_set_emulator_resolver(flash_wmma::EmulatorResolver resolver) { flash_wmma::g_resolver = resolver; }
void flash_wmma_lock_emulator() { flash_wmma::g_run_mutex.lock(); }
void flash_wmma_unlock_emulator() { flash_wmma::g_run_mutex.unlock(); }
