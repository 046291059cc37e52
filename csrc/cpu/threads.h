// The threads that the CPU kernels run on: torch's (csrc/torch/threads.cpp).
#pragma once

#include <cstdint>
#include <functional>

namespace flash_wmma::cpu {

/// The number of threads that may run at a time.
std::int64_t thread_count();

/// Calls work(worker) once for each worker in [0, workers), side by side, and returns when all of them are done.
void in_parallel(std::int64_t workers, const std::function<void(std::int64_t worker)>& work);

}  // namespace flash_wmma::cpu
