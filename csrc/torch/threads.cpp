// The CPU kernels' threads (cpu/threads.h) are torch's.
#include "cpu/threads.h"

#include "torch/stable.h"

namespace flash_wmma::cpu {

std::int64_t thread_count() { return torch::stable::get_num_threads(); }

void in_parallel(std::int64_t workers, const std::function<void(std::int64_t worker)>& work) {
    torch::stable::parallel_for(0, workers, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t worker = begin; worker < end; ++worker) work(worker);
    });
}

}  // namespace flash_wmma::cpu
