#pragma once

namespace flash_wmma {

/// In place of a member that an instance of a template does not have (std::conditional_t).
struct Nothing {
    Nothing() = default;
    template <class... Args>
    __device__ __forceinline__ explicit Nothing(Args&&...) {}
};

}  // namespace flash_wmma
