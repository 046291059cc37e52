#include "registry.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>
#include <stdexcept>

namespace flash_wmma {
namespace {

KernelTable& table() {
    static KernelTable kernels;
    return kernels;
}

template <class Params>
void insert(Kernels<Params>& kernels, const Kernel<Params>& kernel) {
    const auto by_name = [](const KernelFacts* a, const KernelFacts* b) { return std::strcmp(a->name, b->name) < 0; };
    const auto at = std::lower_bound(kernels.begin(), kernels.end(), &kernel, by_name);
    if (at == kernels.end() || by_name(&kernel, *at)) kernels.insert(at, &kernel);
}

const DeviceRuntime* g_runtime = nullptr;

std::string arch_name(int arch) { return "sm_" + std::to_string(arch); }

struct FeatureName {
    Feature feature;
    const char* name;
};
constexpr FeatureName kFeatureNames[] = {
    {kCausal, "causal"},
    {kWindow, "window"},
    {kBias, "attn_bias"},
    {kAlibi, "alibi_slopes"},
    {kSoftcap, "softcap"},
    {kVarlen, "varlen"},
    {kValueDim, "d_v != d"},
    {kDropout, "dropout"},
    {kSinks, "sinks"},
    {kCache, "a key/value cache"},
    {kSplitKv, "num_splits"},
    {kDeterministic, "deterministic"},
    {kBiasGradient, "the gradient of attn_bias"},
    {kDeterministicBiasGradient, "the gradient of a broadcast attn_bias with deterministic"},
    {kKeyRanges, "key_ranges"},
    {kStatistics, "return_aux"},
    {kStatisticsGradient, "the gradients of entropy and column_sum"},
    {kSlopesGradient, "the gradient of alibi_slopes"},
};

/// The forward problem of params.
const ForwardParams& problem(const ForwardParams& p) { return p; }
const ForwardParams& problem(const BackwardParams& p) { return p.forward; }

/// Whether only a kernel that converts nothing may run.
bool exact(const ForwardParams&) { return false; }
bool exact(const BackwardParams& p) { return p.exact; }

}  // namespace

std::vector<const KernelFacts*> KernelTable::facts(const std::string& direction) const {
    if (direction == "backward") return {backward.begin(), backward.end()};
    return {forward.begin(), forward.end()};
}

void KernelTable::add(const KernelInfo& kernel) { insert(forward, kernel); }
void KernelTable::add(const BackwardKernelInfo& kernel) { insert(backward, kernel); }

Registration::Registration(const KernelInfo& kernel) { table().add(kernel); }
Registration::Registration(const BackwardKernelInfo& kernel) { table().add(kernel); }

RuntimeRegistration::RuntimeRegistration(const DeviceRuntime& runtime) { g_runtime = &runtime; }

namespace registry {

const DeviceRuntime* device_runtime() { return g_runtime; }

const KernelTable& kernels() { return table(); }

bool is_cpu_kernel(const std::string& name) {
    for (const char* direction : {"forward", "backward"})
        for (const KernelFacts* kernel : kernels().facts(direction))
            if (kernel->min_arch == 0 && name == kernel->name) return true;
    return false;
}

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::kFloat32: return "float32";
        case DType::kFloat16: return "float16";
        case DType::kBFloat16: return "bfloat16";
        case DType::kBool: return "bool";
    }
    return "unknown";
}

std::vector<std::string> feature_names(unsigned features) {
    std::vector<std::string> names;
    for (const auto& f : kFeatureNames)
        if (features & f.feature) names.push_back(f.name);
    return names;
}

unsigned features_of(const ForwardParams& p) {
    const bool left = p.band.left < kUnbounded, right = p.band.right < kUnbounded;
    unsigned features = 0;
    if (left || (right && p.band.right != 0)) features |= kWindow;
    if (!left && right && p.band.right == 0) features |= kCausal;
    if (p.bias.data) features |= kBias;
    if (p.alibi_slopes) features |= kAlibi;
    if (p.softcap != 0.f) features |= kSoftcap;
    const Sequences& s = p.sequences;
    if (s.cu_seqlens_q || s.cu_seqlens_k || (s.seqused_k && !s.page_size)) features |= kVarlen;
    if (p.head_dim != p.head_dim_v) features |= kValueDim;
    if (p.dropout.rng_state) features |= kDropout;
    if (p.sinks) features |= kSinks;
    if (s.page_size) features |= kCache;
    if (p.partials.num_splits > 1 && !s.page_size) features |= kSplitKv;  // with a cache it is only a hint
    if (p.key_ranges.data) features |= kKeyRanges;
    return features;
}

unsigned features_of(const BackwardParams& p) {
    unsigned features = features_of(p.forward);
    if (p.statistics.wanted) return features | kStatistics;
    if (p.dentropy || p.dcolumn_sum) features |= kStatisticsGradient;
    if (p.dslopes) features |= kSlopesGradient;
    if (p.deterministic) features |= kDeterministic;
    if (p.dbias.data) {
        const ForwardParams& f = p.forward;
        const bool broadcast = (p.dbias.batch == 0 && f.batch > 1) || (p.dbias.head == 0 && f.heads_q > 1) ||
                               (p.dbias.query == 0 && f.seqlen_q > 1) || (p.dbias.key == 0 && f.seqlen_k > 1);
        features |= kBiasGradient;
        if (p.deterministic && broadcast) features |= kDeterministicBiasGradient;
    }
    return features;
}

namespace {

/// Whether the kernel multiplies numbers of that dtype unconverted: it has no instances to choose among, or one of them
/// reads the dtype and does not round it.
template <class Params>
bool is_exact(const Kernel<Params>& kernel, DType dtype) {
    const auto reads = [&](const Instance& instance) { return instance.dtype == dtype; };
    return kernel.instances.empty() || (!(kernel.rounds_float32 && dtype == DType::kFloat32) &&
                                        std::any_of(kernel.instances.begin(), kernel.instances.end(), reads));
}

/// The largest d and d_v of the instances that the device can run.
int largest_head_dim(const KernelFacts& kernel, const DeviceFacts& device) {
    if (kernel.instances.empty()) return kernel.max_head_dim;
    int largest = 0;
    for (const Instance& instance : kernel.instances)
        if (instance.min_arch <= device.arch && instance.smem_bytes <= device.smem_optin)
            largest = std::max(largest, instance.head_dim);
    return std::min(largest, kernel.max_head_dim);
}

}  // namespace

template <class Params>
std::string refusal(const Kernel<Params>& kernel, const Params& params, const DeviceFacts& device) {
    const ForwardParams& p = problem(params);
    const bool cpu_kernel = kernel.min_arch == 0, cpu_tensors = device.arch == 0;
    if (cpu_kernel && !cpu_tensors) return "runs on cpu tensors, these are on a cuda device";
    if (!cpu_kernel && cpu_tensors) return "runs on cuda tensors, and on cpu tensors by name, in the emulator";
    if (device.arch < kernel.min_arch || device.arch > kernel.max_arch)
        return (kernel.max_arch == kernel.min_arch ? "runs on " + arch_name(kernel.min_arch) + " alone"
                                                   : "needs " + arch_name(kernel.min_arch) + " or later") +
               ", the device is " + arch_name(device.arch);

    const bool takes = p.dtype == DType::kFloat32   ? kernel.float32
                       : p.dtype == DType::kFloat16 ? kernel.float16
                                                    : kernel.bf16_min_arch > 0;
    if (!takes) {
        std::string allowed;
        if (kernel.float32) allowed += ", float32";
        if (kernel.float16) allowed += ", float16";
        if (kernel.bf16_min_arch) allowed += ", bfloat16";
        return std::string("dtype: got ") + dtype_name(p.dtype) + ", allowed:" + allowed.substr(1);
    }
    if (!cpu_kernel && p.dtype == DType::kBFloat16 && device.arch < kernel.bf16_min_arch)
        return "dtype: bfloat16 needs " + arch_name(kernel.bf16_min_arch) + " or later, the device is " +
               arch_name(device.arch);

    if (exact(params) && !is_exact(kernel, p.dtype))
        return std::string("converts ") + dtype_name(p.dtype) + ", which forward's kernel multiplied as it is";

    const int fitting = largest_head_dim(kernel, device);
    if (fitting == 0) return "no tile of this kernel fits the shared memory of this device";
    const int largest = p.sequences.page_size ? std::min(fitting, kernel.max_cached_head_dim) : fitting;
    for (const int d : {p.head_dim, p.head_dim_v}) {
        if (kernel.min_head_dim <= d && d <= largest) continue;
        const std::string low = std::to_string(kernel.min_head_dim), high = std::to_string(largest);
        return "head dim: got " + std::to_string(d) + ", allowed: " + (low == high ? low : low + " to " + high) +
               (largest < fitting               ? " with a key/value cache"
                : largest < kernel.max_head_dim ? " with the shared memory of this device"
                                                : "");
    }
    if (const unsigned missing = features_of(params) & ~kernel.features) {
        std::string names;
        for (const std::string& name : feature_names(missing)) names += (names.empty() ? "" : ", ") + name;
        return "does not support " + names;
    }
    return "";
}

void unknown(const std::string& name, const std::vector<const KernelFacts*>& kernels, const std::string& others) {
    std::istringstream words(others);
    std::set<std::string> names{std::istream_iterator<std::string>(words), {}};
    for (const KernelFacts* kernel : kernels) names.insert(kernel->name);
    std::string text;
    for (const std::string& known : names) text += ", '" + known + "'";
    throw std::invalid_argument("kernel: got '" + name + "', allowed: 'auto'" + text);
}

namespace {

/// The kernel that "auto" takes; null if none can run params.
template <class Params>
const Kernel<Params>* best(const Kernels<Params>& kernels, const Params& params, const DeviceFacts& device) {
    const Kernel<Params>* taken = nullptr;
    int taken_rank = 0;
    for (const Kernel<Params>* kernel : kernels) {
        if (kernel->auto_rank <= taken_rank) continue;
        if ((kernel->min_arch == 0) != (device.arch == 0)) continue;  // a refusal in words takes longer than a launch
        const int rank = kernel->yields && kernel->yields(params, device) ? 1 : kernel->auto_rank;  // 1: the lowest
        if (rank <= taken_rank || !refusal(*kernel, params, device).empty()) continue;
        taken = kernel;
        taken_rank = rank;
    }
    return taken;
}

}  // namespace

bool is_exact(const std::string& name, const ForwardParams& params, const DeviceFacts& device,
              const KernelTable& table) {
    if (params.dtype != DType::kFloat32) return false;
    for (const KernelInfo* kernel : table.forward)
        if (name == kernel->name) return is_exact(*kernel, params.dtype);
    const KernelInfo* taken = name == "auto" ? best(table.forward, params, device) : nullptr;
    return taken && is_exact(*taken, params.dtype);
}

template <class Params>
const Kernel<Params>& select(const std::string& name, const Params& params, const DeviceFacts& device,
                             const KernelTable& table) {
    const Kernels<Params>& kernels = table.of(params);
    if (name != "auto") {
        for (const Kernel<Params>* kernel : kernels) {
            if (name != kernel->name) continue;
            const std::string why_not = refusal(*kernel, params, device);
            if (why_not.empty()) return *kernel;
            throw std::invalid_argument("kernel '" + name + "' cannot run this: " + why_not);
        }
        unknown(name, {kernels.begin(), kernels.end()});
    }
    if (const Kernel<Params>* taken = best(kernels, params, device)) return *taken;
    std::string reasons;
    for (const Kernel<Params>* kernel : kernels)
        if (kernel->auto_rank != 0)
            reasons +=
                (reasons.empty() ? "" : "; ") + std::string(kernel->name) + ": " + refusal(*kernel, params, device);
    if (reasons.empty()) reasons = "of this build's kernels none is taken unless it is named";
    throw std::invalid_argument("kernel 'auto' cannot run this: " + reasons);
}

#define FLASH_WMMA_INSTANTIATE(Params)                                                      \
    template std::string refusal(const Kernel<Params>&, const Params&, const DeviceFacts&); \
    template const Kernel<Params>& select(const std::string&, const Params&, const DeviceFacts&, const KernelTable&)
FLASH_WMMA_INSTANTIATE(ForwardParams);
FLASH_WMMA_INSTANTIATE(BackwardParams);

}  // namespace registry
}  // namespace flash_wmma
