// Rotary embedding of a row (cache/append.h, Rotary).
#pragma once

#include "cpu/attention.inl"

namespace flash_wmma::cpu {
namespace {

/// Elements that every unit converts without a rest.
constexpr int kConverted = 16;

/// load_row and store_row of any number of elements. The fp32 row has room for a multiple of kConverted.
template <class Isa>
void load_any(const char* src, DType dtype, float* dst, int n) {
    const int whole = n / kConverted * kConverted;
    load_row<Isa>(src, dtype, dst, whole);
    if (whole == n) return;
    char rest[kConverted * sizeof(float)] = {};
    __builtin_memcpy(rest, src + whole * element_size(dtype),
                     static_cast<std::size_t>((n - whole) * element_size(dtype)));
    load_row<Isa>(rest, dtype, dst + whole, kConverted);
}
template <class Isa>
void store_any(const float* src, char* dst, DType dtype, int n) {
    const int whole = n / kConverted * kConverted;
    store_row<Isa>(src, dst, dtype, whole);
    if (whole == n) return;
    char rest[kConverted * sizeof(float)];
    store_row<Isa>(src + whole, rest, dtype, kConverted);
    __builtin_memcpy(dst + whole * element_size(dtype), rest,
                     static_cast<std::size_t>((n - whole) * element_size(dtype)));
}

/// Writes `half` rotated pairs of a row.
template <class Isa>
void rotate(const void* from, void* to, DType dtype, const void* cos, const void* sin, int half, bool interleaved) {
    constexpr int kPairs = 64;  // at a time
    const auto at = [&](const void* row, int element) {
        return static_cast<const char*>(row) + element * element_size(dtype);
    };
    alignas(64) float c[kPairs], s[kPairs], x[2 * kPairs];
    for (int first = 0; first < half; first += kPairs) {
        const int n = half - first < kPairs ? half - first : kPairs;
        load_any<Isa>(at(cos, first), dtype, c, n);
        load_any<Isa>(at(sin, first), dtype, s, n);
        const auto turn = [&](float& a, float& b, int i) {
            const float left = a, right = b;
            a = left * c[i] - right * s[i], b = left * s[i] + right * c[i];
        };
        if (interleaved) {
            load_any<Isa>(at(from, 2 * first), dtype, x, 2 * n);
            for (int i = 0; i < n; ++i) turn(x[2 * i], x[2 * i + 1], i);
            store_any<Isa>(x, const_cast<char*>(at(to, 2 * first)), dtype, 2 * n);
        } else {
            for (int part = 0; part < 2; ++part)
                load_any<Isa>(at(from, part * half + first), dtype, x + part * kPairs, n);
            for (int i = 0; i < n; ++i) turn(x[i], x[kPairs + i], i);
            for (int part = 0; part < 2; ++part)
                store_any<Isa>(x + part * kPairs, const_cast<char*>(at(to, part * half + first)), dtype, n);
        }
    }
}

}  // namespace
}  // namespace flash_wmma::cpu
