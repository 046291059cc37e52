// One row per kernel. A kernel's file states its facts in a KernelInfo (or BackwardKernelInfo) and registers it with a
// static Registration; everything that asks "which kernels are there, what can they do, which one runs" asks here.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "attention.h"

namespace flash_wmma {

/// What a kernel's choice may depend on. arch is 10 * major + minor (90 for sm_90); 0 stands for the CPU.
struct DeviceFacts {
    int arch = 0;
    int sm_count = 0;
    int smem_optin = 0;  ///< bytes of shared memory a block may opt in to
    int warp_size = 0;
    int memory_bus = 0;  ///< bits; 0: not known
};

/// Features beyond dense attention with any Nq, Nk and Hq a multiple of Hk. Bits of KernelFacts::features.
enum Feature : unsigned {
    kCausal = 1u << 0,
    kWindow = 1u << 1,
    kBias = 1u << 2,
    kAlibi = 1u << 3,
    kSoftcap = 1u << 4,
    kVarlen = 1u << 5,
    kValueDim = 1u << 6,  ///< d_v != d
    kDropout = 1u << 7,
    kSinks = 1u << 8,
    kCache = 1u << 9,  ///< a key/value cache, paged or not
    kSplitKv = 1u << 10,
    kDeterministic = 1u << 11,              ///< backward: BackwardParams::deterministic
    kBiasGradient = 1u << 12,               ///< backward: dbias, summed over the bias's broadcast dimensions
    kDeterministicBiasGradient = 1u << 13,  ///< backward: kBiasGradient of a broadcast bias, with kDeterministic
    kKeyRanges = 1u << 14,
    kStatistics = 1u << 15,          ///< backward: BackwardParams::statistics
    kStatisticsGradient = 1u << 16,  ///< backward: dentropy and dcolumn_sum
    kSlopesGradient = 1u << 17,      ///< backward: dslopes
};

/// One compiled instance of a kernel template.
struct Instance {
    DType dtype;           ///< of q, k and v as the instance reads them (after a conversion, if the kernel has one)
    int min_arch;          ///< least arch it is compiled for
    int head_dim;          ///< the largest d it takes
    int br, bc;            ///< rows of the Q tile and of the K/V tile
    int warps, stages;     ///< warps per block; K/V tiles in flight
    int smem_bytes;        ///< dynamic shared memory per block
    const void* function;  ///< the __global__ function; null on the CPU
};

/// Facts of a forward or backward kernel.
struct KernelFacts {
    const char* name;  ///< unique among all kernels, forward and backward
    const char* summary;
    int min_arch = 0;               ///< 0: a CPU kernel
    int max_arch = 1 << 30;         ///< the last arch that it has code for, if that is for one architecture (sm_90a)
    int bf16_min_arch = 0;          ///< least arch with bfloat16 inputs; 0: never (CPU kernels: 1 = yes)
    bool float32 = false;           ///< input types it takes
    bool float16 = false;           //
    bool rounds_float32 = false;    ///< its instances that read fp32 round it to half on the way into the products
    int min_head_dim = 1;           ///< of d and d_v
    int max_head_dim = 0;           ///< with enough shared memory. 0 in with_instances: that of the largest instance
    int max_cached_head_dim = 256;  ///< of a key/value cache, if it takes one
    unsigned features = 0;          ///< Feature bits
    int auto_rank = 0;              ///< `auto` takes the highest rank that fits and does not yield; 0: only by name
    std::vector<Instance> instances = {};
};

/// What a forward kernel has for tangents: a launch of its own, which computes all results in one pass over the keys.
struct TangentKernel {
    /// Whether it takes these params.
    bool (*takes)(const ForwardParams&, const DeviceFacts&);
    std::int64_t (*workspace_bytes)(const TangentParams&, const DeviceFacts&);
    /// Asynchronous on the stream. Throws std::runtime_error if the launch fails.
    void (*launch)(const TangentParams&, const DeviceFacts&, Stream);
};

/// A kernel's row: its facts and what is called. A row is written as
///     {{.name = ..., .summary = ..., ...}, choose, workspace_bytes, launch}
template <class Params>
struct Kernel : KernelFacts {
    /// The instance that runs these params on that device; null on the CPU.
    const Instance& (*choose)(const Params&, const DeviceFacts&);
    /// Bytes of Params::workspace that launch needs.
    std::int64_t (*workspace_bytes)(const Params&, const DeviceFacts&);
    /// Asynchronous on the stream. Throws std::runtime_error if the launch fails.
    void (*launch)(const Params&, const DeviceFacts&, Stream);
    /// Whether `auto` leaves these params to a kernel of lower rank, which is faster for them; null: never.
    bool (*yields)(const Params&, const DeviceFacts&) = nullptr;
    /// Forward: whether launch stores ForwardParams::row_max and entropy, if they are given with these params; null:
    /// never.
    bool (*tells)(const Params&, const DeviceFacts&) = nullptr;
    /// Forward: null, if it has nothing for tangents.
    const TangentKernel* tangents = nullptr;
    /// Forward: whether these params may have ForwardParams::merges, or an o of float32 and an lse of any strides;
    /// null: never.
    bool (*merges)(const Params&, const DeviceFacts&) = nullptr;
    /// Backward: bytes of SharedQueries::memory of launches that begin with these params, 0 if they are better not in
    /// stages; null: never. Params of kAdd have the dtype, d, d_v and scale of kBegin's and a band at most.
    std::int64_t (*shared_bytes)(const Params&, const DeviceFacts&) = nullptr;
};
/// Kernel::workspace_bytes of a kernel without a workspace.
template <class Params>
std::int64_t no_workspace(const Params&, const DeviceFacts&) {
    return 0;
}

using KernelInfo = Kernel<ForwardParams>;
using BackwardKernelInfo = Kernel<BackwardParams>;

/// Kernels by name.
template <class Params>
using Kernels = std::vector<const Kernel<Params>*>;

/// The kernels of a build, or of a library of the emulator.
struct KernelTable {
    Kernels<ForwardParams> forward;
    Kernels<BackwardParams> backward;

    /// The kernels for these params.
    const Kernels<ForwardParams>& of(const ForwardParams&) const { return forward; }
    const Kernels<BackwardParams>& of(const BackwardParams&) const { return backward; }
    /// The kernels of a direction, "forward" or "backward".
    std::vector<const KernelFacts*> facts(const std::string& direction) const;
    /// Adds a kernel, unless one of that name is there.
    void add(const KernelInfo& kernel);
    void add(const BackwardKernelInfo& kernel);
};

struct Registration {
    explicit Registration(const KernelInfo& kernel);
    explicit Registration(const BackwardKernelInfo& kernel);
};

/// The driver's facts about one compiled function on the present device.
struct FunctionFacts {
    int binary_version, ptx_version;  ///< 10 * major + minor; they differ when PTX was compiled at load
    int registers, local_bytes, static_smem_bytes, max_threads;
};

/// The CUDA runtime, as the rest of the library sees it; no function is null. Absent from a CPU-only build.
struct DeviceRuntime {
    DeviceFacts (*facts)(int device);
    FunctionFacts (*function_facts)(const void* function);
    int toolkit_version;        ///< CUDART_VERSION of the build
    const char* architectures;  ///< as built, e.g. "7.5;8.0;9.0;8.0+PTX"
};

struct RuntimeRegistration {
    explicit RuntimeRegistration(const DeviceRuntime& runtime);
};

namespace registry {

/// The CUDA runtime of this build, or null.
const DeviceRuntime* device_runtime();

/// The kernels of this build.
const KernelTable& kernels();

/// Whether this build has a CPU kernel of that name.
bool is_cpu_kernel(const std::string& name);

/// "float32" and so on.
const char* dtype_name(DType dtype);

/// The names of the set Feature bits: the Python argument's name where there is one.
std::vector<std::string> feature_names(unsigned features);

/// The features that these params use, as Feature bits.
unsigned features_of(const ForwardParams& params);
unsigned features_of(const BackwardParams& params);

/// Whether the forward kernel of that name (for "auto": the kernel that it takes) multiplies fp32 inputs unconverted.
bool is_exact(const std::string& name, const ForwardParams& params, const DeviceFacts& device,
              const KernelTable& kernels = registry::kernels());

/// Throws std::invalid_argument: `name` is neither among these kernels nor among the names in `others`.
[[noreturn]] void unknown(const std::string& name, const std::vector<const KernelFacts*>& kernels,
                          const std::string& others = "");

/// Why `kernel` cannot run `params` (with the dtype the user passed) on that device; empty if it can.
template <class Params>
std::string refusal(const Kernel<Params>& kernel, const Params& params, const DeviceFacts& device);

/// The kernel for `name` ("auto" or a kernel's name) among those given. A named kernel never falls back.
/// Throws std::invalid_argument that says what is allowed.
template <class Params>
const Kernel<Params>& select(const std::string& name, const Params& params, const DeviceFacts& device,
                             const KernelTable& kernels = registry::kernels());

}  // namespace registry
}  // namespace flash_wmma
