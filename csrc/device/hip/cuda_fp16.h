// __half and __half2 under HIP, which calls them the same.
#pragma once

#include <cuda_runtime.h>
#include <hip/hip_fp16.h>
