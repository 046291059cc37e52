// Quotients and remainders by csrc/device/divisor.h. tests/test_divisor.py compares them with those of integers.
#include <entry.h>
#include <launch.h>

#include "device/divisor.h"

namespace {

using flash_wmma::Divisor;
using flash_wmma::Entry;
using flash_wmma::launch;

__global__ void divide(const int* numbers, int count, Divisor divisor, int* quotients, int* remainders) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32)
        quotients[i] = divisor.quotient(numbers[i]), remainders[i] = divisor.remainder(numbers[i]);
}

void run_divide(const int* numbers, int count, int divisor, int* quotients, int* remainders) {
    launch(divide, {dim3(1), dim3(32)}, nullptr, numbers, count, Divisor(divisor), quotients, remainders);
}
const Entry kDivide("divide", run_divide);

}  // namespace
