// A program without a race in which racecheck reports some: warps pass different numbers of named barriers.
//
//     nvcc -arch=sm_90 -o named_barriers tests/named_barriers.cu
//     compute-sanitizer --tool racecheck ./named_barriers 4        no hazard
//     compute-sanitizer --tool racecheck ./named_barriers 3        a hazard
//
// Eight warps are four pairs. What one pair writes and another reads has a __syncthreads between; what goes on within a
// pair has the pair's own barrier between, as do mma_sm75's warps that share rows. The argument is the number of pairs
// that take part; the others pass the two __syncthreads of a round, and nothing else.
#include <cstdio>
#include <cstdlib>

__device__ __forceinline__ void pair_sync(int pair) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + pair), "r"(64) : "memory");
}

__global__ void rounds(int count, int active, int* out) {
    __shared__ int a[256], b[256], own[256];
    const int tid = static_cast<int>(threadIdx.x), pair = tid / 64;
    int sum = 0;
    pair_sync(pair);
    __syncthreads();
    a[tid] = b[tid] = tid;
#pragma unroll 1
    for (int left = count; left > 0; --left) {
        __syncthreads();  // a and b have been written
        const int next = out[tid] + left;
        if (pair < active) {
            sum += a[255 - tid];
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                own[tid] = sum + i;
                pair_sync(pair);
                sum += own[tid ^ 32];
                pair_sync(pair);
            }
            sum += b[(tid + 100) % 256];
        }
        __syncthreads();  // a and b have been read
        if (left > 1) a[tid] = next, b[tid] = sum;
    }
    out[tid] = sum;
}

int main(int, char** arguments) {
    int* out = nullptr;
    cudaMalloc(&out, 256 * sizeof(int));
    cudaMemset(out, 0, 256 * sizeof(int));
    rounds<<<1, 256>>>(20, std::atoi(arguments[1]), out);
    std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
