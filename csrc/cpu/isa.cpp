// The choice of the compute unit.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/tasks.h"

namespace flash_wmma::cpu {
namespace {

std::vector<const IsaKernel*>& isa_kernels() {
    static std::vector<const IsaKernel*> kernels;
    return kernels;
}

}  // namespace

IsaRegistration::IsaRegistration(const IsaKernel& kernel) { isa_kernels().push_back(&kernel); }

const IsaKernel& select_isa() {
    const char* wanted = std::getenv("FLASH_WMMA_CPU_ISA");
    const IsaKernel* best = nullptr;
    std::string names;
    for (const IsaKernel* kernel : isa_kernels()) {
        const bool named = wanted && std::strcmp(wanted, kernel->name) == 0;
        if (!kernel->supported()) {
            if (named) throw std::invalid_argument(std::string("FLASH_WMMA_CPU_ISA: this processor has no ") + wanted);
            continue;
        }
        if (named) return *kernel;
        names += std::string(names.empty() ? "'" : ", '") + kernel->name + "'";
        if (!best || kernel->rank > best->rank) best = kernel;
    }
    if (wanted)
        throw std::invalid_argument(std::string("FLASH_WMMA_CPU_ISA: got '") + wanted + "', allowed here: " + names);
    return *best;
}

}  // namespace flash_wmma::cpu
