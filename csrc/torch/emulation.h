// CUDA kernels on CPU tensors: finds a kernel's library for the emulator (csrc/emulator) and runs the kernel in it.
#pragma once

#include <string>
#include <vector>

#include "device/product.h"
#include "emulator/api.h"
#include "registry.h"

namespace flash_wmma {

/// Where a kernel runs and what the emulator is told. Filled in by Python, which compiles the library at first use.
struct EmulatorTarget {
    char library[4096];  ///< path of the kernel's library
    char error[16384];   ///< why there is no library; for an unknown kernel, the known names
    std::int32_t arch, sm_count, smem_optin, memory_bus;  ///< the device that the emulator stands for
    emulator::Config config;
};

/// Fills in the target of the kernel of that name; `direction` is "forward" or "backward". Returns 1: done; 2: no
/// kernel has that name; else `error` says why there is no library (ctypes returns 0 if Python raised an exception).
using EmulatorResolver = int (*)(const char* kernel, const char* direction, EmulatorTarget* target);

/// torch's matmul on the CPU, for kernels that leave products of matrices to a library.
void multiply_by_torch(const Product& product);

/// A kernel's source, compiled for the emulator.
class Emulation {
  public:
    /// Throws std::invalid_argument if no kernel has that name, std::runtime_error if its library cannot be made.
    Emulation(const std::string& kernel, const char* direction);

    const DeviceFacts& device() const { return device_; }
    /// The kernels in the library.
    const KernelTable& kernels() const { return *kernels_; }

    /// Runs a kernel on memory that consists of these buffers. Throws std::runtime_error with the emulator's finding.
    template <class Launched, class Params>
    void run(const Launched& kernel, const Params& params, const std::vector<emulator::Buffer>& buffers) const {
        const Memory memory(*this, buffers);
        kernel.launch(params, device_, nullptr);
    }

  private:
    /// Configures the emulator and gives it the buffers. It knows the buffers of one launch at a time.
    class Memory {
      public:
        Memory(const Emulation& emulation, const std::vector<emulator::Buffer>& buffers);
        ~Memory();
        Memory(const Memory&) = delete;

      private:
        const Emulation& emulation_;
    };

    const KernelTable* kernels_ = nullptr;
    void (*configure_)(const emulator::Config*) = nullptr;
    void (*set_buffers_)(const emulator::Buffer*, std::size_t) = nullptr;
    emulator::Config config_;
    DeviceFacts device_;
};

namespace emulation {

/// All known kernels: those of this build and those of the added libraries.
__attribute__((visibility("default"))) const KernelTable& kernels();

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

/// How many products multiply_by_torch has computed. The emulator counts nothing of them.
int flash_wmma_emulated_products();
}
#pragma GCC visibility pop
