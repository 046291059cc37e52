#include "registry.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>
#include <stdexcept>

namespace flash_wmma {
namespace {

std::vector<const KernelInfo*>& table() {
    static std::vector<const KernelInfo*> kernels;
    return kernels;
}

const DeviceRuntime* g_runtime = nullptr;

std::string arch_name(int arch) { return "sm_" + std::to_string(arch); }

struct FeatureName {
    Feature feature;
    const char* name;
};
constexpr FeatureName kFeatureNames[] = {
    {kCausal, "causal"},   {kWindow, "window"},      {kBias, "attn_bias"},     {kAlibi, "alibi_slopes"},
    {kSoftcap, "softcap"}, {kVarlen, "varlen"},      {kValueDim, "d_v != d"},  {kDropout, "dropout"},
    {kSinks, "sinks"},     {kPagedKv, "page_table"}, {kSplitKv, "num_splits"},
};

}  // namespace

Registration::Registration(const KernelInfo& kernel) {
    auto by_name = [](const KernelInfo* a, const KernelInfo* b) { return std::strcmp(a->name, b->name) < 0; };
    table().insert(std::lower_bound(table().begin(), table().end(), &kernel, by_name), &kernel);
}

RuntimeRegistration::RuntimeRegistration(const DeviceRuntime& runtime) { g_runtime = &runtime; }

namespace registry {

const DeviceRuntime* device_runtime() { return g_runtime; }

const std::vector<const KernelInfo*>& kernels() { return table(); }

bool is_cpu_kernel(const std::string& name) {
    return std::any_of(kernels().begin(), kernels().end(),
                       [&](const KernelInfo* kernel) { return kernel->min_arch == 0 && name == kernel->name; });
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
    if (p.sequences.cu_seqlens_q || p.sequences.cu_seqlens_k || p.sequences.seqused_k) features |= kVarlen;
    if (p.head_dim != p.head_dim_v) features |= kValueDim;
    if (p.dropout.probability != 0.f) features |= kDropout;
    if (p.sinks) features |= kSinks;
    if (p.sequences.page_table) features |= kPagedKv;
    if (p.partials.num_splits > 1) features |= kSplitKv;
    return features;
}

std::string refusal(const KernelInfo& kernel, const ForwardParams& p, const DeviceFacts& device) {
    const bool cpu_kernel = kernel.min_arch == 0, cpu_tensors = device.arch == 0;
    if (cpu_kernel && !cpu_tensors) return "runs on cpu tensors, these are on a cuda device";
    if (!cpu_kernel && cpu_tensors) return "runs on cuda tensors, and on cpu tensors by name, in the emulator";
    if (device.arch < kernel.min_arch)
        return "needs " + arch_name(kernel.min_arch) + " or later, the device is " + arch_name(device.arch);

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

    for (const int d : {p.head_dim, p.head_dim_v}) {
        if (kernel.min_head_dim <= d && d <= kernel.max_head_dim) continue;
        const std::string low = std::to_string(kernel.min_head_dim), high = std::to_string(kernel.max_head_dim);
        return "head dim: got " + std::to_string(d) + ", allowed: " + (low == high ? low : low + " to " + high);
    }
    if (const unsigned missing = features_of(p) & ~kernel.features) {
        std::string names;
        for (const std::string& name : feature_names(missing)) names += (names.empty() ? "" : ", ") + name;
        return "does not support " + names;
    }
    return "";
}

void unknown(const std::string& name, const std::vector<const KernelInfo*>& kernels, const std::string& others) {
    std::istringstream words(others);
    std::set<std::string> names{std::istream_iterator<std::string>(words), {}};
    for (const KernelInfo* kernel : kernels) names.insert(kernel->name);
    std::string text;
    for (const std::string& known : names) text += ", '" + known + "'";
    throw std::invalid_argument("kernel: got '" + name + "', allowed: 'auto'" + text);
}

const KernelInfo& select(const std::string& name, const ForwardParams& params, const DeviceFacts& device,
                         const std::vector<const KernelInfo*>& kernels) {
    if (name != "auto") {
        for (const KernelInfo* kernel : kernels) {
            if (name != kernel->name) continue;
            const std::string why_not = refusal(*kernel, params, device);
            if (why_not.empty()) return *kernel;
            throw std::invalid_argument("kernel '" + name + "' cannot run this: " + why_not);
        }
        unknown(name, kernels);
    }
    const KernelInfo* best = nullptr;
    for (const KernelInfo* kernel : kernels) {
        if (kernel->auto_rank == 0 || (best && kernel->auto_rank <= best->auto_rank)) continue;
        if ((kernel->min_arch == 0) != (device.arch == 0)) continue;  // a refusal in words takes longer than a launch
        if (refusal(*kernel, params, device).empty()) best = kernel;
    }
    if (best) return *best;
    std::string reasons;
    for (const KernelInfo* kernel : kernels)
        if (kernel->auto_rank != 0)
            reasons +=
                (reasons.empty() ? "" : "; ") + std::string(kernel->name) + ": " + refusal(*kernel, params, device);
    throw std::invalid_argument("kernel 'auto' cannot run this: " + (reasons.empty() ? "no kernel is built" : reasons));
}

}  // namespace registry
}  // namespace flash_wmma
