// Checks csrc/cpu/tile_products.inl with tile registers in memory in place of AMX's: products by themselves, and
// attention with its gradients against fp32 arithmetic. Exit status 1: a result is wrong.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/tile_products.inl"

using namespace flash_wmma;
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
                              .a = a.data(),
                              .a_row = a_row,
                              .a_part = a_part,
                              .b = words.data(),
                              .b_row = b_row,
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

/// A problem of one head, and memory for its results.
struct Attention {
    std::int64_t queries, keys;
    int d, d_v;
    std::vector<std::uint16_t> q, k, v, dout, o, dq, dk, dv;
    std::vector<float> lse, delta, dq_sum;
    BackwardParams params{};

    Attention(std::int64_t nq, std::int64_t nk, int columns, int columns_v)
        : queries(nq), keys(nk), d(columns), d_v(columns_v), lse(nq), delta(nq), dq_sum(nq * padded<Avx512>(columns)) {
        std::uint32_t state = static_cast<std::uint32_t>(nq + nk);
        const auto fill = [&](std::vector<std::uint16_t>& x, std::int64_t n) {
            x.resize(n);
            for (auto& e : x) e = small(state);
        };
        fill(q, nq * d), fill(k, nk * d), fill(v, nk * d_v), fill(dout, nq * d_v);
        o.resize(nq * d_v), dq.resize(nq * d), dk.resize(nk * d), dv.resize(nk * d_v);
        ForwardParams& p = params.forward;
        const auto rows = [](std::vector<std::uint16_t>& x, int columns_of_row) {
            flash_wmma::Rows r{};
            r.data = x.data(), r.row = columns_of_row;
            return r;
        };
        p.dtype = p.out_dtype = DType::kBFloat16;
        p.batch = p.heads_q = p.heads_k = 1;
        p.seqlen_q = nq, p.seqlen_k = nk, p.head_dim = d, p.head_dim_v = d_v, p.scale = 0.02f;
        p.band.left = flash_wmma::kUnbounded, p.band.right = 0, p.band.bottom_right = true;
        p.q = rows(q, d), p.k = rows(k, d), p.v = rows(v, d_v), p.o = rows(o, d_v), p.lse = lse.data();
        params.dout = rows(dout, d_v), params.dq = rows(dq, d), params.dk = rows(dk, d), params.dv = rows(dv, d_v);
    }

    /// o, lse, dk, dv and the sum of dq, by a compute unit.
    template <class Isa>
    std::vector<float> run() {
        const auto scratch = [](std::int64_t floats) { return std::vector<float>(floats + 16); };
        const auto aligned = [](std::vector<float>& x) {
            return reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(x.data()) + 63) / 64 * 64);
        };
        constexpr int kTiles = kMaxTaskTiles;
        auto memory = scratch(scratch_floats<Isa>(params.forward, kTiles) + backward_scratch<Isa>(params.forward));
        auto sum = scratch(static_cast<std::int64_t>(dq_sum.size()));
        for (std::int64_t row = 0; row < queries; row += kTiles * tile_rows<Isa>()) {
            Task task{};
            task.row_begin = row, task.row_end = min64(row + kTiles * tile_rows<Isa>(), queries), task.key_end = keys;
            attend<Isa>(params.forward, task, aligned(memory));
        }
        row_deltas<Isa>(params, 0, 0, queries, delta.data(), aligned(memory));
        BackwardTask task{};
        task.key_end = keys, task.delta = delta.data(), task.dq = aligned(sum);
        backward<Isa>(params, task, aligned(memory));
        std::vector<float> results(lse);
        for (const auto* x : {&o, &dk, &dv})
            for (const std::uint16_t e : *x) results.push_back(of_half(e));
        for (std::int64_t i = 0; i < queries; ++i)
            for (int c = 0; c < d; ++c) results.push_back(task.dq[i * padded<Isa>(d) + c]);
        return results;
    }
};

bool check_attention(std::int64_t queries, std::int64_t keys, int d, int d_v) {
    Attention problem(queries, keys, d, d_v);
    const auto expected = problem.run<Avx512>(), got = problem.run<WithPairs<TileProducts<Registers>>>();
    for (std::size_t i = 0; i < got.size(); ++i)
        if (!(std::fabs(got[i] - expected[i]) <= 0.01f * std::fabs(expected[i]) + 0.1f)) {
            std::printf("wrong: %ld x %ld, d %d, %d: number %zu is %g, not %g\n", static_cast<long>(queries),
                        static_cast<long>(keys), d, d_v, i, got[i], expected[i]);
            return false;
        }
    return true;
}

}  // namespace

int main() {
    bool right = true;
    for (int m = 1; m <= 5; ++m)
        for (int n = 1; n <= 5; ++n)
            for (int steps = 1; steps <= 3; ++steps)
                for (int kind = 0; kind < 6; ++kind)
                    right &= check(m, n, steps, kind / 2 == 1, kind / 2 == 2, kind % 2);
    right &= check_attention(70, 150, 40, 72) && check_attention(3, 64, 64, 64) && check_attention(260, 300, 128, 64);
    return right ? 0 : 1;
}
