// CUDA kernels on CPU tensors: finds a kernel's library for the emulator (csrc/emulator) and runs the kernel in it.
#pragma once

#include <string>
#include <vector>

#include "emulator/api.h"
#include "registry.h"

namespace flash_wmma {

/// Where a kernel runs and what the emulator is told. Filled in by Python, which compiles the library at first use.
struct EmulatorTarget {
    char library[4096];                       ///< path of the kernel's library
    char error[16384];                        ///< why there is none; for an unknown kernel, the names there are
    std::int32_t arch, sm_count, smem_optin;  ///< the device that the emulator stands for
    emulator::Config config;
};

/// Fills in the target of the kernel named. 1: done; 2: no kernel has that name; else the error says why there is none
/// (0 comes from ctypes, when Python failed unheard).
using EmulatorResolver = int (*)(const char* kernel, EmulatorTarget* target);

/// A kernel's source, compiled for the emulator.
class Emulation {
  public:
    /// Throws std::invalid_argument if no kernel has that name, std::runtime_error if its library cannot be made.
    explicit Emulation(const std::string& kernel);

    const DeviceFacts& device() const { return device_; }
    /// The kernels in the library.
    const std::vector<const KernelInfo*>& kernels() const { return *kernels_; }

    /// Runs a kernel on memory that consists of these buffers. Throws std::runtime_error with the emulator's finding.
    void run(const KernelInfo& kernel, const ForwardParams& params, const std::vector<emulator::Buffer>& buffers) const;

  private:
    const std::vector<const KernelInfo*>* kernels_ = nullptr;
    void (*configure_)(const emulator::Config*) = nullptr;
    void (*set_buffers_)(const emulator::Buffer*, std::size_t) = nullptr;
    emulator::Config config_;
    DeviceFacts device_;
};

namespace emulation {

/// All kernels that are known: those of this build and those of the libraries that were added, by name.
__attribute__((visibility("default"))) const std::vector<const KernelInfo*>& kernels();

/// Adds the kernels of an emulator's library, except those whose name is known. Throws std::runtime_error.
__attribute__((visibility("default"))) void add_library(const std::string& path);

}  // namespace emulation
}  // namespace flash_wmma

#pragma GCC visibility push(default)
extern "C" {
void flash_wmma_set_emulator_resolver(flash_wmma::EmulatorResolver resolver);

/// Keeps the launches of other threads out until this thread has unlocked as often as it has locked.
void flash_wmma_lock_emulator();
void flash_wmma_unlock_emulator();
}
#pragma GCC visibility pop
