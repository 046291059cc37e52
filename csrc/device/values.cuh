// Elements as numbers to compute with, one by one or 16 bytes at once.
#pragma once

#include "device/element.cuh"

namespace flash_wmma {

/// Elements of type T: Wide, the type to compute in, and 16 bytes of T.
template <class T>
struct Values;

template <>
struct Values<float> {
    using Wide = float;
    static constexpr int kCount = 4;
    __device__ static float widen(float x) { return x; }
    __device__ static float narrow(float x) { return x; }
    __device__ static void unpack(const uint4& v, float (&x)[kCount]) {
        x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
        x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
    }
    __device__ static uint4 pack(const float (&x)[kCount]) {
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
};

template <>
struct Values<std::int32_t> {
    using Wide = std::int32_t;
    static constexpr int kCount = 4;
    __device__ static std::int32_t widen(std::int32_t x) { return x; }
    __device__ static std::int32_t narrow(std::int32_t x) { return x; }
    __device__ static void unpack(const uint4& v, std::int32_t (&x)[kCount]) {
        x[0] = static_cast<std::int32_t>(v.x), x[1] = static_cast<std::int32_t>(v.y);
        x[2] = static_cast<std::int32_t>(v.z), x[3] = static_cast<std::int32_t>(v.w);
    }
};

/// half and bf16.
template <class T>
struct Values {
    using Wide = float;
    static constexpr int kCount = 8;
    __device__ static float widen(T x) { return static_cast<float>(x); }
    __device__ static T narrow(float x) { return Element<T>::from(x); }
    __device__ static void unpack(const uint4& v, float (&x)[kCount]) {
        const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float2 two = Element<T>::floats(pairs[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
    }
    __device__ static uint4 pack(const float (&x)[kCount]) {
        typename Element<T>::Pair pairs[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) pairs[i] = Element<T>::pair(x[2 * i], x[2 * i + 1]);
        return *reinterpret_cast<const uint4*>(pairs);
    }
};

}  // namespace flash_wmma
