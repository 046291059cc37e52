// Linked into every kernel's library: returns the kernels that its files have registered.
#include "registry.h"

extern "C" __attribute__((visibility("default"))) const flash_wmma::KernelTable* flash_wmma_emulated_kernels() {
    return &flash_wmma::registry::kernels();
}
