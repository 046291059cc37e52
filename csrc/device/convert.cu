// The conversion of convert.cuh for kernels of any architecture.
#include "device/convert.cuh"

namespace flash_wmma {

using namespace conversion;

std::int64_t converted_bytes(const ForwardParams& params) { return Layout(params).bytes; }
std::int64_t converted_bytes(const BackwardParams& params) { return Layout(params).bytes; }

ForwardParams convert_to_half(const ForwardParams& params, Stream stream) {
    const Conversion conversion = Layout(params).conversion;
    const auto launch_it =
        params.sequences.page_size ? launch_convert<false, true, Alone> : launch_convert<false, false, Alone>;
    launch_it(params.dtype, conversion, stream);
    return converted_params(conversion, params);
}

BackwardParams convert_to_half(const BackwardParams& params, Stream stream) {
    const Layout layout(params);
    const Operand &v = layout.conversion.operand[2], &dout = layout.conversion.operand[3];
    launch_convert<true, false, Alone>(params.forward.dtype, layout.conversion, stream);
    BackwardParams p = params;
    p.forward = converted_params(layout.conversion, params.forward);
    p.dout = converted_rows(dout);
    p.exponents = {dout.exponents, dout.norms, v.norms};
    p.workspace = static_cast<char*>(params.workspace) + layout.bytes;
    return p;
}

}  // namespace flash_wmma
