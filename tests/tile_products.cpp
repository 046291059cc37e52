// Checks csrc/cpu/tile_products.inl with tile registers in memory in place of AMX's. Exit status 1: a product is wrong.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/tile_products.inl"

using namespace flash_wmma::cpu;

namespace flash_wmma::cpu {
IsaRegistration::IsaRegistration(const IsaKernel&) {}
}  // namespace flash_wmma::cpu

namespace {

float number(std::uint32_t high) {
    float x;
    std::memcpy(&x, &high, sizeof x);
    return x;
}

struct Registers {
    struct Scope {};
    static inline std::uint32_t tile[8][kTile][kTile];

    template <int kRegister>
    static void load(const void* rows, std::int64_t bytes) {
        for (int r = 0; r < kTile; ++r)
            std::memcpy(tile[kRegister][r], static_cast<const char*>(rows) + r * bytes, sizeof tile[0][0]);
    }
    template <int kRegister>
    static void store(void* rows, std::int64_t bytes) {
        for (int r = 0; r < kTile; ++r)
            std::memcpy(static_cast<char*>(rows) + r * bytes, tile[kRegister][r], sizeof tile[0][0]);
    }
    template <int kRegister>
    static void clear() {
        std::memset(tile[kRegister], 0, sizeof tile[0]);
    }
    template <int kC, int kA, int kB>
    static void multiply() {
        for (int m = 0; m < kTile; ++m)
            for (int n = 0; n < kTile; ++n) {
                float sum = number(tile[kC][m][n]);
                for (int k = 0; k < kTile; ++k)
                    sum += number(tile[kA][m][k] << 16) * number(tile[kB][k][n] << 16) +
                           number(tile[kA][m][k] & 0xffff0000) * number(tile[kB][k][n] & 0xffff0000);
                std::memcpy(&tile[kC][m][n], &sum, sizeof sum);
            }
    }
};

std::uint16_t small(std::uint32_t& state) {  // -4 to 3 as bf16: sums are exact
    state = state * 1664525 + 1013904223;
    const float x = static_cast<float>(static_cast<int>(state >> 29) - 4);
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<std::uint16_t>(bits >> 16);
}
float of_half(std::uint16_t x) { return number(std::uint32_t{x} << 16); }

/// m x n blocks, `steps` of k, whose A or B has two parts, or none.
bool check(int m, int n, int steps, bool a_parts, bool b_parts, bool adds) {
    const int rows = kTile * m, columns = kTile * n, depth = kTileDepth * steps, parts = a_parts || b_parts ? 2 : 1;
    const std::int64_t a_row = depth + 32, b_row = columns + 16, c_row = columns + 32;
    std::uint32_t state = static_cast<std::uint32_t>(m * 100 + n * 10 + steps);
    std::vector<std::uint16_t> a(2 * rows * a_row), b(2 * depth * b_row);
    for (auto& x : a) x = small(state);
    for (auto& x : b) x = small(state);
    std::vector<float> c(rows * c_row, 7.f), expected = c;
    const std::int64_t a_part = a_parts ? rows * a_row : 0, b_part = b_parts ? depth / 2 * b_row : 0;
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) {
            float sum = adds ? 7.f : 0.f;
            for (int part = 0; part < parts; ++part)
                for (int k = 0; k < depth; ++k)
                    sum += of_half(a[part * a_part + i * a_row + k]) *
                           of_half(b[2 * (part * b_part + k / 2 * b_row + j) + k % 2]);
            expected[i * c_row + j] = sum;
        }
    std::vector<std::uint32_t> words(b.size() / 2);
    std::memcpy(words.data(), b.data(), b.size() * sizeof b[0]);
    const PairProduct product{.c = c.data(),
                              .c_row = c_row,
                              .c_down = kTile * c_row,
                              .c_right = kTile,
                              .a = a.data(),
                              .a_row = a_row,
                              .a_down = kTile * a_row,
                              .a_step = kTileDepth,
                              .a_part = a_part,
                              .b = words.data(),
                              .b_row = b_row,
                              .b_right = kTile,
                              .b_step = kTileDepth / 2 * b_row,
                              .b_part = b_part,
                              .steps = steps,
                              .parts = parts,
                              .adds = adds};
    multiply_pairs<TileProducts<Registers>>(product, m, n);
    if (c == expected) return true;
    std::printf("wrong: %d x %d blocks, %d steps, parts of a %d, of b %d, adds %d\n", m, n, steps, a_parts, b_parts,
                adds);
    return false;
}

}  // namespace

int main() {
    bool right = true;
    for (int m = 1; m <= 5; ++m)
        for (int n = 1; n <= 5; ++n)
            for (int steps = 1; steps <= 3; ++steps)
                for (int kind = 0; kind < 6; ++kind)
                    right &= check(m, n, steps, kind / 2 == 1, kind / 2 == 2, kind % 2);
    return right ? 0 : 1;
}
