// Numbers that many kernels need.
#pragma once

namespace flash_wmma {

inline constexpr unsigned kWarpMask = 0xffffffffu;  ///< all lanes of a warp
inline constexpr int kLineBytes = 128;              ///< of the L2 cache
inline constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.44269504088896341f;

}  // namespace flash_wmma
