// Division by a number that the host knows and a kernel's first instructions need: a product and a shift, where a
// division takes some 20 instructions, each of which waits for the one before.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>

namespace flash_wmma {

/// Divides numbers below 2^31. With l = ceil(log2 d), the multiplier is the least integer above 2^(31 + l) / d: too
/// large by at most 1, so that the quotient's error is below n / 2^(31 + l) < 1 / d (Granlund and Montgomery 1994,
/// theorem 4.2).
class Divisor {
  public:
    Divisor() = default;
    /// `divisor` is in [1, 2^31).
    explicit Divisor(std::int64_t divisor) : divisor_(static_cast<unsigned>(divisor)) {
        if (divisor < 1 || divisor > 0x7fffffff) throw std::runtime_error("flash_wmma: a divisor is out of range");
        shift_ = 31 + static_cast<int>(std::bit_width(divisor_ - 1));
        multiplier_ = static_cast<unsigned>((std::uint64_t{1} << shift_) / divisor_ + 1);
    }

    __host__ __device__ int divisor() const { return static_cast<int>(divisor_); }
    __device__ __forceinline__ int quotient(int n) const {
        return static_cast<int>(std::uint64_t{static_cast<unsigned>(n)} * multiplier_ >> shift_);
    }
    __device__ __forceinline__ int remainder(int n) const { return n - quotient(n) * divisor(); }

  private:
    unsigned divisor_, multiplier_;
    int shift_;
};

}  // namespace flash_wmma
