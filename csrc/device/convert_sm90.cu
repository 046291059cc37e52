// The conversion of convert.cuh in a chain of programmatic launches.
// architectures: 9.0a
#include <ptx_sm90.cuh>

#include "device/convert.cuh"

namespace flash_wmma {
namespace {

struct Chained {
    static constexpr bool kProgrammatic = true;
    __device__ static void begin() {
        ptx::let_next_grid_start();
        ptx::wait_for_previous_grids();
    }
};

}  // namespace

ForwardParams convert_to_half_chained(const ForwardParams& params, Stream stream) {
    const conversion::Layout layout(params);
    conversion::launch_convert<false, false, Chained>(params.dtype, layout.conversion, stream);
    ForwardParams p = conversion::converted_params(layout.conversion, params);
    p.workspace = static_cast<char*>(params.workspace) + layout.bytes;
    return p;
}

}  // namespace flash_wmma
