// The tasks of a grid of bwd_sm90, one after the other (csrc/backward/wgmma/tasks.cuh).
#include <entry.h>
#include <launch.h>

#include "backward/wgmma/tasks.cuh"

namespace tasks {
namespace {

using namespace flash_wmma;
using backward::wgmma::Schedule;
using backward::wgmma::Task;

/// Of each task: its kind, its unit, its index, its count, and what its unit waits for: runs and items.
__global__ void list(int* out, const __grid_constant__ Schedule schedule) {
    for (unsigned place = threadIdx.x; place < schedule.tasks; place += blockDim.x) {
        const Task task = schedule.at(place);
        const unsigned row[] = {
            static_cast<unsigned>(task.kind), task.unit, task.index, task.count, schedule.runs_of(task.unit),
            schedule.items_of(task.unit)};
        for (unsigned i = 0; i < 6; ++i) out[6 * place + i] = static_cast<int>(row[i]);
    }
}

/// `out` has room for 6 * `room` numbers; behind the last task it stays as it is.
void run(int* out, int room, int queries, int keys, int batch, int heads_q, int heads_k, int causal, int tile,
         int ordered, int blocks) {
    ForwardParams p{};
    p.seqlen_q = queries, p.seqlen_k = keys, p.batch = batch, p.heads_q = heads_q, p.heads_k = heads_k;
    p.band.left = kUnbounded, p.band.right = causal ? 0 : kUnbounded;
    const Schedule schedule = backward::wgmma::schedule_of(p, tile, ordered != 0, static_cast<unsigned>(blocks));
    if (schedule.tasks > static_cast<unsigned>(room)) throw std::runtime_error("more tasks than room");
    launch(list, {dim3(1), dim3(32)}, nullptr, out, schedule);
}
const Entry kList("list", run);

}  // namespace
}  // namespace tasks
