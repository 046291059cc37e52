#include "emulation.h"

#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace flash_wmma {
namespace {

EmulatorResolver g_resolver = nullptr;
std::mutex g_run_mutex;  // the emulator knows the buffers of one launch at a time

/// The function `name` of a library that is loaded, and stays so.
template <class Function>
Function symbol(void* library, const char* name) {
    void* address = dlsym(library, name);
    if (!address) throw std::runtime_error(std::string("flash_wmma: emulator library: ") + dlerror());
    return reinterpret_cast<Function>(address);
}

}  // namespace

Emulation::Emulation(const std::string& kernel) {
    if (!g_resolver) return;
    const auto target = std::make_unique<EmulatorTarget>();
    const int answer = g_resolver(kernel.c_str(), target.get());
    if (answer == 0) return;
    if (answer < 0) throw std::runtime_error(target->error);
    void* library = dlopen(target->library, RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("flash_wmma: emulator library: ") + dlerror());
    kernels_ = symbol<const std::vector<const KernelInfo*>* (*)()>(library, "flash_wmma_emulated_kernels")();
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
    set_buffers_(buffers.data(), buffers.size());
    kernel.launch(params, device_, nullptr);
}

}  // namespace flash_wmma

void flash_wmma_set_emulator_resolver(flash_wmma::EmulatorResolver resolver) { flash_wmma::g_resolver = resolver; }
