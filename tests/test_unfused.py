"""What is particular to `unfused`; the tests of all kernels run it too."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator

import pytest
import torch
from conftest import on_gpu
from reference import Mask, attention, head_error
from torch import Tensor

import flash_wmma

DEVICE = "cuda" if on_gpu() else "cpu"
WARP_SIZES = {"warp32": 32} if on_gpu() else {"warp32": 32, "wavefront64": 64}


@pytest.fixture(autouse=True, params=WARP_SIZES.values(), ids=WARP_SIZES)
def emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checked, with warps of 32 lanes and of 64; a GPU has what it has."""
    with flash_wmma.emulator.settings(mode="checked", warp_size=request.param):
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


# A warp a row, up to 1024 keys; a block a row; scores that stay in global memory, from 11265 keys on.
@pytest.mark.parametrize("nk", [1, 127, 1024, 1025, 11264, 11265])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_and_short_rows(dtype: torch.dtype, causal: bool | str, nk: int) -> None:
    q, k, v = (normal(1, 2, n, 16, dtype=dtype) for n in (3, nk, nk))
    out, lse = flash_wmma.forward(q, k, v, causal=causal, kernel="unfused", return_lse=True)
    expected, expected_lse = attention(q.double(), k.double(), v.double(), Mask(causal))
    plain, _ = attention(q, k, v, Mask(causal))
    assert head_error(out, expected) <= 2 * head_error(plain, expected) + 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_float32_is_float32() -> None:
    """No product is rounded to half on the way."""
    q, k, v = (normal(2, 2, 60, 64) for _ in range(3))
    expected, _ = attention(q.double(), k.double(), v.double())
    assert head_error(flash_wmma.forward(q, k, v, kernel="unfused"), expected) < 2e-6


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1)])
@pytest.mark.parametrize("bnhd", [False, True])
def test_groups_and_strides(heads: tuple[int, int], bnhd: bool) -> None:
    """Products go over whole batches where the strides allow, one batch entry at a time where not."""
    q, k, v = normal(2, heads[0], 20, 24), normal(2, heads[1], 33, 24), normal(2, heads[1], 33, 8)
    expected, _ = attention(q, k, v)
    if bnhd:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    torch.testing.assert_close(flash_wmma.forward(q, k, v, kernel="unfused"), expected, rtol=0, atol=3e-6)
    part = flash_wmma.forward(q[:, :, ::2], k[:, :, 8:], v[:, :, 8:], kernel="unfused")
    expected, _ = attention(q[:, :, ::2], k[:, :, 8:], v[:, :, 8:])
    torch.testing.assert_close(part, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_overlap(dtype: torch.dtype) -> None:
    """cuBLAS refuses rows nearer to each other than they are long; expanded ones are copied."""
    q, k, v = (normal(2, 2, 1, 16, dtype=dtype).expand(2, 2, n, 16) for n in (9, 11, 11))
    expected, _ = attention(q.double(), k.double(), v.double())
    out = flash_wmma.forward(q, k, v, kernel="unfused")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3 if dtype == torch.float16 else 1e-6)


def test_the_same_to_the_bit() -> None:
    q, k, v = (normal(1, 2, 40, 16, dtype=torch.float16) for _ in range(3))
    first = flash_wmma.forward(q, k, v, causal=True, kernel="unfused")
    with flash_wmma.emulator.settings(seed=7, threads=2):
        assert torch.equal(flash_wmma.forward(q, k, v, causal=True, kernel="unfused"), first)


def test_gradients() -> None:
    """Forward by name, backward by the usual kernels: the LSE is what they need."""
    given = [normal(1, 2, 30, 16).requires_grad_() for _ in range(3)]
    dout = normal(1, 2, 30, 16)
    for t in given:
        t.data += 0.1
    grads = torch.autograd.grad(flash_wmma.forward(*given, causal=True, kernel="unfused"), given, dout)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = torch.autograd.grad(attention(*exact, Mask(True))[0], exact, dout.double())
    for found, right in zip(grads, expected, strict=True):
        assert head_error(found, right) < (2e-3 if DEVICE == "cuda" else 1e-5)


# ------------------------------------------------------------------------------------------------ cuBLAS, without a GPU

CUBLAS = """
#include "device/blas.h"
namespace {
int g_status = 0;  // that the next call reports
template <class T> T at(const void* p, long long i) { return static_cast<const T*>(p)[i]; }
}
extern "C" int torch_get_current_cuda_blas_handle(void** handle) { return *handle = &g_status, g_status == -1; }
// cuBLAS as its documentation has it: column-major, c = op(a) op(b), fp32.
extern "C" int cublasGemmStridedBatchedEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
        const void* a, int, int row_a, long long batch_a, const void* b, int, int row_b, long long batch_b,
        const void* beta, void* c, int, int row_c, long long batch_c, int count, int compute, int) {
    if (handle != &g_status || g_status || compute != 68 || at<float>(alpha, 0) != 1 || at<float>(beta, 0) != 0)
        return g_status;
    if (row_c < m || row_a < (op_a ? k : m) || row_b < (op_b ? n : k)) return 7;
    for (int i = 0; i < count; ++i)
        for (int x = 0; x < m; ++x)
            for (int y = 0; y < n; ++y) {
                float sum = 0;
                for (int z = 0; z < k; ++z)
                    sum += at<float>(a, i * batch_a + (op_a ? x * 1ll * row_a + z : z * 1ll * row_a + x)) *
                           at<float>(b, i * batch_b + (op_b ? z * 1ll * row_b + y : y * 1ll * row_b + z));
                static_cast<float*>(c)[i * batch_c + y * 1ll * row_c + x] = sum;
            }
    return 0;
}
extern "C" const char* multiply(int status, float* a, float* b, float* c, const long long* sizes) {
    static std::string error;
    g_status = status;
    const auto f32 = flash_wmma::DType::kFloat32;
    try {
        flash_wmma::multiply({{a, f32, sizes[0], sizes[1]}, {b, f32, sizes[2], sizes[3]}, {c, f32, sizes[4], sizes[5]},
                              sizes[6] != 0, sizes[7], sizes[8], sizes[9], sizes[10]}, nullptr);
        return "";
    } catch (const std::exception& e) {
        return (error = e.what()).c_str();
    }
}
"""


@pytest.fixture(scope="module")
def cublas(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """csrc/device/blas.h on top of a cuBLAS of a few lines, which fails when it is told to."""
    source = tmp_path_factory.mktemp("cublas") / "cublas.cpp"
    source.write_text(CUBLAS)
    library = source.with_suffix(".so")
    csrc = flash_wmma.emulator._compile.CSRC
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{csrc}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.multiply.restype = ctypes.c_char_p
    return loaded


def multiplied(cublas: ctypes.CDLL, a: Tensor, b: Tensor, c: Tensor, transposed: bool, status: int = 0) -> str:
    """What went wrong in c = a b, by cuBLAS; nothing: an empty string. (count, rows, columns)."""
    n = b.shape[1] if transposed else b.shape[2]
    strides = [stride for t in (a, b, c) for stride in (t.stride(1), t.stride(0))]
    sizes = (ctypes.c_longlong * 11)(*strides, transposed, a.shape[1], n, a.shape[2], a.shape[0])
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
    said: bytes = cublas.multiply(status, *pointers, sizes)
    return said.decode()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_cublas(cublas: ctypes.CDLL, transposed: bool) -> None:
    """Row-major matrices, with gaps between rows and batch entries, by a column-major library."""
    a, c = torch.randn(3, 6, 9)[:, 1:5, 2:7], torch.full((3, 5, 12), torch.nan)[:, :4, :8]
    b = torch.randn(3, 20, 11)[:, :8, :5] if transposed else torch.randn(3, 20, 11)[:, :5, :8]
    assert multiplied(cublas, a, b, c, transposed) == ""
    torch.testing.assert_close(c, a @ (b.transpose(1, 2) if transposed else b))
    assert c._base is not None
    assert int(c._base.isfinite().sum()) == c.numel()


def test_errors_of_cublas_are_exceptions(cublas: ctypes.CDLL) -> None:
    a, c = torch.randn(1, 4, 4), torch.zeros(1, 4, 4)
    assert "cublasGemmStridedBatchedEx: execution failed (status 13)" in multiplied(cublas, a, a, c, False, 13)
    assert "not supported (status 15)" in multiplied(cublas, a, a, c, False, 15)
    assert "invalid value (status 7)" in multiplied(cublas, a, a[:, :1].expand(1, 4, 4), c, False)
    assert "torch gives no cuBLAS handle" in multiplied(cublas, a, a, c, False, -1)
    far = torch.empty(2**33, device="meta").as_strided((1, 4, 4), (0, 2**31, 1))
    assert "a row stride beyond int" in multiplied(cublas, far, a, c, False)
    assert (c == 0).all()
