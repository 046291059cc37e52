// A first kernel: attention of one head in fp32, one warp a query. Three versions of it for three lessons
// (docs/emulator.md): Sync = false forgets a barrier, Pad = 0 has bank conflicts, Pad = 1 has none.
//
// Algorithm (online softmax): the warp walks over tiles of 32 keys. Lane j has the score of key j of the tile; the
// maximum and the sum of the weights come by shuffles. Lane c has the columns c and c + 32 of the output.
#include <entry.h>
#include <launch.h>
#include <shared_memory.cuh>

namespace {

constexpr int kD = 64, kKeys = 32;  // head dim; keys of a tile, one a lane
constexpr unsigned kWarp = 0xffffffff;

template <int Pad>
struct SharedMemory {
    float q[kD];
    float k[kKeys][kD + Pad];
};

template <int Pad, bool Sync>
__global__ void attend(const float* q, const float* k, const float* v, float* o, int n, float scale) {
    auto& smem = flash_wmma::shared_memory<SharedMemory<Pad>>();
    const int lane = static_cast<int>(threadIdx.x);
    for (int c = lane; c < kD; c += 32) smem.q[c] = q[blockIdx.x * kD + c] * scale;

    float m = -INFINITY, l = 0.f, o0 = 0.f, o1 = 0.f;
    for (int first = 0; first < n; first += kKeys) {
        for (int i = lane; i < kKeys * kD; i += 32) {
            const int row = i / kD, column = i % kD;
            smem.k[row][column] = first + row < n ? k[(first + row) * kD + column] : 0.f;
        }
        __syncwarp();

        float score = 0.f;
        for (int c = 0; c < kD; ++c) score += smem.q[c] * smem.k[lane][c];  // lanes read a column of K
        if (first + lane >= n) score = -INFINITY;
        if (Sync) __syncwarp();  // all have read the tile before the next one overwrites it

        float top = fmaxf(m, score);
        for (int i = 16; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(kWarp, top, i));
        const float weight = expf(score - top), rescale = expf(m - top);
        float sum = weight;
        for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(kWarp, sum, i);
        m = top;
        l = l * rescale + sum;

        o0 *= rescale, o1 *= rescale;
        for (int j = 0; j < kKeys && first + j < n; ++j) {
            const float w = __shfl_sync(kWarp, weight, j);
            o0 += w * v[(first + j) * kD + lane];
            o1 += w * v[(first + j) * kD + lane + 32];
        }
    }
    o[blockIdx.x * kD + lane] = o0 / l;
    o[blockIdx.x * kD + lane + 32] = o1 / l;
}

template <int Pad, bool Sync>
void run(const float* q, const float* k, const float* v, float* o, int n, float scale) {
    const flash_wmma::LaunchConfig config{dim3(static_cast<unsigned>(n)), dim3(32), sizeof(SharedMemory<Pad>)};
    flash_wmma::launch(attend<Pad, Sync>, config, nullptr, q, k, v, o, n, scale);
}

const flash_wmma::Entry kForgotten("forgotten", run<0, false>), kConflicts("conflicts", run<0, true>),
    kPadded("padded", run<1, true>);

}  // namespace
