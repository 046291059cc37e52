// flash_wmma._C: all but the tensor ops. The kernel table, the choice of a kernel, and facts of the build, the device
// and the compiled functions. Everything here asks libflash_wmma.so; forward works without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "dropout.h"
#include "registry.h"
#include "torch/emulation.h"

namespace py = pybind11;

namespace flash_wmma {
namespace {

const KernelFacts& kernel_named(const std::string& name) {
    for (const char* direction : {"forward", "backward"})
        for (const KernelFacts* kernel : emulation::kernels().facts(direction))
            if (name == kernel->name) return *kernel;
    throw py::key_error(name);
}

py::dict instance_facts(const Instance& i) {
    return py::dict(py::arg("dtype") = registry::dtype_name(i.dtype), py::arg("min_arch") = i.min_arch,
                    py::arg("head_dim") = i.head_dim, py::arg("br") = i.br, py::arg("bc") = i.bc,
                    py::arg("warps") = i.warps, py::arg("stages") = i.stages, py::arg("smem_bytes") = i.smem_bytes);
}

py::dict kernel_facts(const KernelFacts& k) {
    std::vector<std::string> dtypes;
    if (k.float32) dtypes.emplace_back("float32");
    if (k.float16) dtypes.emplace_back("float16");
    if (k.bf16_min_arch) dtypes.emplace_back("bfloat16");
    py::list instances;
    for (const Instance& instance : k.instances) instances.append(instance_facts(instance));
    return py::dict(py::arg("name") = k.name, py::arg("device") = k.min_arch == 0 ? "cpu" : "cuda",
                    py::arg("summary") = k.summary, py::arg("min_arch") = k.min_arch,
                    py::arg("max_arch") = k.max_arch == k.min_arch ? py::object(py::int_(k.max_arch)) : py::none(),
                    py::arg("dtypes") = dtypes, py::arg("bf16_min_arch") = k.bf16_min_arch,
                    py::arg("head_dims") = py::make_tuple(k.min_head_dim, k.max_head_dim),
                    py::arg("features") = registry::feature_names(k.features), py::arg("auto_rank") = k.auto_rank,
                    py::arg("instances") = instances);
}

py::list kernels(const std::string& direction) {
    py::list all;
    for (const KernelFacts* kernel : emulation::kernels().facts(direction)) all.append(kernel_facts(*kernel));
    return all;
}

DType dtype_named(const std::string& name) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kBool})
        if (name == registry::dtype_name(dtype)) return dtype;
    throw py::value_error("dtype: got " + name + ", allowed: float32, float16, bfloat16, bool");
}

/// Params as the ops fill them, without tensors: a pointer that is only compared with null, or whose alignment counts,
/// points to a placeholder. `problem` is a Problem of flash_wmma/_registry.py.
ForwardParams params_of(const py::object& problem) {
    alignas(16) static const char present[16] = {};
    static const float number = 0.f;
    static const std::int32_t lengths = 0;
    static const std::uint64_t state[2] = {};
    const auto has = [&](const char* field) { return problem.attr(field).cast<bool>(); };
    const py::dict sizes = problem.attr("sizes");
    const auto size = [&](const char* name) { return sizes[name].cast<std::int64_t>(); };
    ForwardParams p{};
    p.dtype = p.out_dtype = dtype_named(problem.attr("dtype").cast<std::string>());
    p.batch = size("batch");
    p.heads_q = size("heads_q");
    p.heads_k = size("heads_k");
    p.seqlen_q = size("seqlen_q");
    p.seqlen_k = size("seqlen_k");
    p.head_dim = sizes["head_dim"].cast<std::int32_t>();
    p.head_dim_v = sizes["head_dim_v"].cast<std::int32_t>();
    p.scale = 1.f / std::sqrt(static_cast<float>(p.head_dim > 0 ? p.head_dim : 1));
    const py::tuple band = problem.attr("band");
    const auto left = band[0].cast<std::int64_t>(), right = band[1].cast<std::int64_t>();
    p.band = {left < 0 ? kUnbounded : left, right < 0 ? kUnbounded : right, band[2].cast<bool>()};
    if (has("packed")) {
        p.sequences.cu_seqlens_q = p.sequences.cu_seqlens_k = &lengths;
        p.sequences.total_q = size("total_q");
        p.sequences.total_k = size("total_k");
    }
    if (const py::object bias = problem.attr("attn_bias"); !bias.is_none()) {
        const auto strides = bias.attr("strides").cast<std::array<std::int64_t, 4>>();
        p.bias = {present + bias.attr("misalignment").cast<int>() % 16,
                  dtype_named(bias.attr("dtype").cast<std::string>()),
                  strides[0],
                  strides[1],
                  strides[2],
                  strides[3]};
    }
    if (has("alibi_slopes")) p.alibi_slopes = &number;
    if (has("key_ranges")) p.key_ranges.data = &lengths;
    if (has("sinks")) p.sinks = &number;
    if (has("dropout")) p.dropout = make_dropout(state, 0.5f);
    p.softcap = problem.attr("softcap").cast<float>();
    p.partials.num_splits = 1;
    p.batch_invariant = has("batch_invariant");
    return p;
}

DeviceFacts device_of(const py::tuple& facts) {
    DeviceFacts device;
    device.arch = facts[0].cast<int>();
    device.sm_count = facts[1].cast<int>();
    device.smem_optin = facts[2].cast<int>();
    device.warp_size = facts[3].cast<int>();
    device.memory_bus = facts[4].cast<int>();
    return device;
}

/// {"kernel": name or None, "instance": its facts or None, "reasons": {name: why it is not taken}, "tells": whether the
/// kernel tells statistics of the rows besides, "tangents": whether it has tangents in one pass}. `problem` is the
/// forward problem of `params`; a kernel sees its head dims rounded up to multiples of 8, and where to tell the
/// statistics of `wanted` if it tells them.
template <class Params>
py::dict answer(const std::string& name, Params& params, ForwardParams& problem, const DeviceFacts& device,
                const std::set<std::string>& wanted = {}) {
    const Kernel<Params>* taken = nullptr;
    try {
        taken = &registry::select(name, params, device, emulation::kernels());
    } catch (const std::invalid_argument&) {  // the reasons say it
    }
    std::map<std::string, std::string> reasons;
    for (const Kernel<Params>* kernel : emulation::kernels().of(params)) {
        if (kernel == taken || (name != "auto" && name != kernel->name)) continue;
        std::string why_not = registry::refusal(*kernel, params, device);
        if (why_not.empty())
            why_not = kernel->auto_rank == 0                             ? "runs by name only"
                      : kernel->yields && kernel->yields(params, device) ? "leaves such a problem to another kernel"
                                                                         : "ranks below the kernel taken";
        reasons[kernel->name] = why_not;
    }
    const bool tells = taken && taken->tells && taken->tells(params, device);
    const bool tangents = taken && taken->tangents && taken->tangents->takes(problem, device);
    py::object instance = py::none();
    if (taken) {
        static float row = 0.f;
        if (tells && wanted.contains("max")) problem.row_max = &row;
        if (tells && wanted.contains("entropy")) problem.entropy = &row;
        const auto padded = [](std::int32_t d) { return (d + 7) / 8 * 8; };
        problem.head_dim = padded(problem.head_dim);
        problem.head_dim_v = padded(problem.head_dim_v);
        try {
            if (taken->choose) instance = instance_facts(taken->choose(params, device));
        } catch (const std::runtime_error& error) {  // no tile fits
            reasons[taken->name] = error.what();
            taken = nullptr;
        }
    }
    return py::dict(py::arg("kernel") = taken ? py::object(py::str(taken->name)) : py::none(),
                    py::arg("instance") = instance, py::arg("reasons") = reasons, py::arg("tells") = tells,
                    py::arg("tangents") = tangents);
}

/// `wanted`: the statistics of the rows that the call asks for.
py::dict explain(const std::string& name, const py::object& problem, const py::tuple& device_facts,
                 const std::set<std::string>& wanted) {
    ForwardParams params = params_of(problem);
    return answer(name, params, params, device_of(device_facts), wanted);
}

/// `dbias_strides`: the strides of the bias's gradient, 0 where the bias is broadcast; None: no gradient is asked for.
/// `dslopes`: whether the gradient of the slopes is. `forward_kernel`: the kernel name that forward was given.
py::dict explain_backward(const std::string& name, const py::object& problem, const py::tuple& device_facts,
                          const std::optional<std::array<std::int64_t, 4>>& dbias_strides, bool dslopes,
                          bool deterministic, const std::string& forward_kernel) {
    static float present = 0.f;
    BackwardParams params{};
    params.forward = params_of(problem);
    if (dbias_strides) {
        const auto& s = *dbias_strides;
        params.dbias = {&present, s[0], s[1], s[2], s[3]};
    }
    if (dslopes) params.dslopes = &present;
    params.deterministic = deterministic;
    const DeviceFacts device = device_of(device_facts);
    if (name == "auto") params.exact = registry::is_exact(forward_kernel, params.forward, device, emulation::kernels());
    return answer(name, params, params.forward, device);
}

const DeviceRuntime& runtime() {
    if (const DeviceRuntime* runtime = registry::device_runtime()) return *runtime;
    throw std::runtime_error("flash_wmma was built without CUDA kernels");
}

py::tuple device_facts(int device) {
    const DeviceFacts facts = runtime().facts(device);
    return py::make_tuple(facts.arch, facts.sm_count, facts.smem_optin, facts.warp_size, facts.memory_bus);
}

/// None for a kernel that is no CUDA function.
py::object function_facts(const std::string& name, std::size_t instance) {
    const KernelFacts& kernel = kernel_named(name);
    if (instance >= kernel.instances.size()) throw py::index_error("instance");
    const void* function = kernel.instances[instance].function;
    if (!function) return py::none();
    const FunctionFacts facts = runtime().function_facts(function);
    return py::dict(py::arg("binary_version") = facts.binary_version, py::arg("ptx_version") = facts.ptx_version,
                    py::arg("registers") = facts.registers, py::arg("local_bytes") = facts.local_bytes,
                    py::arg("static_smem_bytes") = facts.static_smem_bytes, py::arg("max_threads") = facts.max_threads);
}

/// (toolkit version, architectures), or None for a build without CUDA kernels.
py::object cuda_build() {
    const DeviceRuntime* runtime = registry::device_runtime();
    if (!runtime) return py::none();
    return py::make_tuple(runtime->toolkit_version, runtime->architectures);
}

}  // namespace
}  // namespace flash_wmma

PYBIND11_MODULE(_C, m) {
    using namespace pybind11::literals;
    m.doc() = "The kernel table of libflash_wmma.so and the facts around it.";
    m.def("kernels", &flash_wmma::kernels, "direction"_a);
    m.def("add_library", &flash_wmma::emulation::add_library, "path"_a);
    m.def("explain", &flash_wmma::explain, "name"_a, "problem"_a, "device_facts"_a, "wanted"_a);
    m.def("explain_backward", &flash_wmma::explain_backward, "name"_a, "problem"_a, "device_facts"_a, "dbias_strides"_a,
          "dslopes"_a, "deterministic"_a, "forward_kernel"_a = "auto");
    m.def("device_facts", &flash_wmma::device_facts, "device"_a);
    m.def("function_facts", &flash_wmma::function_facts, "kernel"_a, "instance"_a);
    m.def("cuda_build", &flash_wmma::cuda_build);
}
