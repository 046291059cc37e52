// Softcap, score = cap * tanh(x) with x = product * scale / cap, without tanh where products are small.
//
// Of the three instructions of the exponentials' unit that a capped weight takes, tanh takes two. For |x| <= X an odd
// polynomial of n terms, which are n + 1 instructions of the FMA pipe, serves as well:
//     tanh(x) = x p(x^2) + e,   |e| <= t X^(2n+1) / 4^n.
// p interpolates tanh(x) / x at the squares of the n positive zeros of T(x / X), where T is the Chebyshev polynomial of
// degree 2n + 1. The bound is that of interpolation at all zeros: T / 4^n has the leading coefficient 1, and t is the
// largest |tanh^(2n+1)| / (2n+1)!, which is that at 0, a coefficient of tanh's series. X is such that a score's error
// is 2^-14 in log2 units, and a weight's 4e-5 of itself, whatever the cap.
#pragma once

#include <array>
#include <cmath>

#include "attention.h"
#include "device/constants.cuh"

namespace flash_wmma {

/// A score in log2 units as an odd polynomial of the product: product * (of[0] + of[1] product^2 + ...).
template <int Terms>
struct CapPolynomial {
    float of[Terms];
    float limit;  ///< the largest |product| that it serves; negative: none

    /// For products times `to_x`, and a cap in log2 units.
    static CapPolynomial make(double to_x, double cap) {
        constexpr double kError = 1. / 16384, kPi = 3.14159265358979323846;
        constexpr std::array<double, 5> kSeries = {1., 1. / 3, 2. / 15, 17. / 315, 62. / 2835};  // of |tanh|
        static_assert(Terms < static_cast<int>(kSeries.size()));
        const double most = std::pow(std::pow(4., Terms) * kError / (kSeries[Terms] * cap), 1. / (2 * Terms + 1));
        std::array<double, Terms> at{}, value{}, sum{};
        for (int i = 0; i < Terms; ++i) {
            const double x = most * std::cos(kPi * (2 * i + 1) / (2 * (2 * Terms + 1)));
            at[i] = x * x, value[i] = std::tanh(x) / x;
        }
        // Newton's divided differences, then powers of x^2
        for (int k = 1; k < Terms; ++k)
            for (int i = Terms - 1; i >= k; --i) value[i] = (value[i] - value[i - 1]) / (at[i] - at[i - k]);
        for (int k = Terms - 1; k >= 0; --k) {
            for (int i = Terms - 1; i > 0; --i) sum[i] = sum[i - 1] - at[k] * sum[i];
            sum[0] = value[k] - at[k] * sum[0];
        }
        CapPolynomial made{{}, static_cast<float>(most / to_x)};
        for (int i = 0; i < Terms; ++i) made.of[i] = static_cast<float>(cap * std::pow(to_x, 2 * i + 1) * sum[i]);
        for (const float x : made.of)
            if (!std::isnormal(x) || !std::isnormal(made.limit)) made.limit = -1.f;
        return made;
    }

    /// p(product^2), which is to be multiplied by the product.
    __device__ __forceinline__ float operator()(float product) const {
        const float square = product * product;
        float sum = of[Terms - 1];
#pragma unroll
        for (int i = Terms - 2; i >= 0; --i) sum = fmaf(sum, square, of[i]);
        return sum;
    }
};

/// The polynomials of a problem. With a cap of 30 they serve scores up to 5.3 and 19.0, with one of 50 up to 7.9 and
/// 29.9.
struct SoftCap {
    CapPolynomial<2> near;
    CapPolynomial<4> far;

    SoftCap() = default;
    explicit SoftCap(const ForwardParams& p)
        : near(CapPolynomial<2>::make(double{p.scale} / p.softcap, double{kLog2e} * p.softcap)),
          far(CapPolynomial<4>::make(double{p.scale} / p.softcap, double{kLog2e} * p.softcap)) {}
};

}  // namespace flash_wmma
