"""What packages/ makes for others: code for older C libraries, and the layout of the kernels hub, which is loaded and
used, by itself and by transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"
if not PACKAGES.is_dir():
    pytest.skip("no checkout", allow_module_level=True)
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Of manylinux_2_28."""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, cwd=ROOT, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version that is needed of each library."""
    needed = re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+) ", run("readelf", "-V", "-W", library))
    newest: dict[str, tuple[int, ...]] = {}
    for prefix, numbers in needed:
        newest[prefix] = max(newest.get(prefix, ()), tuple(map(int, numbers.split("."))))
    return newest


def needed(library: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library)))


@pytest.fixture(scope="module")
def old_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old ones")
    run(sys.executable, PACKAGES / "old_libraries.py", folder)
    return folder


PROGRAM = """
#include <dlfcn.h>

#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {
std::exception_ptr caught;
std::once_flag once;
}  // namespace

// A thread, an exception that travels between threads, call_once, an array that is too long, a function of math whose
// version glibc 2.29 changed, and one of libdl.
extern "C" int run(double x) {
    auto shared = std::make_shared<std::string>("thrown");
    std::thread thread([shared] {
        try {
            throw std::runtime_error(*shared);
        } catch (...) {
            caught = std::current_exception();
        }
    });
    thread.join();
    int sum = 0;
    std::call_once(once, [&] { sum += 1; });
    try {
        std::rethrow_exception(caught);
    } catch (const std::runtime_error& error) {
        sum += 10 * (std::string(error.what()) == "thrown");
    }
    volatile long many = -1;
    try {
        delete[] new long[many];
    } catch (const std::bad_array_new_length&) {
        sum += 100;
    }
    sum += 1000 * (std::exp(x) == 1.0 && std::pow(2.0, x) == 1.0);
    return sum + 10000 * (dlsym(nullptr, "malloc") != nullptr) + 100000 * std::uncaught_exceptions();
}
"""


def test_old_libraries(old_libraries: Path, tmp_path: Path) -> None:
    """A program linked with the stand-ins needs nothing newer than they have, and runs."""
    source, library = tmp_path / "program.cpp", tmp_path / "program.so"
    source.write_text("#include <stdexcept>\n" + PROGRAM)
    run("g++", "-std=c++20", "-O2", "-shared", "-fPIC", source, "-o", library, f"@{old_libraries}/flags")
    newest = versions(library)
    assert {"GLIBC", "GLIBCXX"} <= set(newest)
    assert all(newest[prefix] <= NEWEST[prefix] for prefix in newest), newest
    assert {"libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6"} <= needed(library)
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).run(ctypes.c_double(0.0)))"
    assert run(sys.executable, "-c", code) == "11111\n"


# What a user of the hub does, beside the installed package.
USE = """
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_wmma

hub = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert hub.__name__.startswith("_flash_wmma_cpu_")
assert get_local_kernel(Path(sys.argv[1]), backend="cpu") is hub
torch.manual_seed(0)
q, k, v = (torch.randn(2, 40, 4, 64, requires_grad=True) for _ in range(3))
rows = [t.transpose(1, 2) for t in (q, k, v)]
expected = scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))


def close(got, wanted):
    error = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1)
    assert error < 1e-5, error


for module in (hub, flash_wmma):
    out = module.flash_attn_func(q, k, v, causal=True)
    close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
        close(got, wanted)
ends = torch.tensor([0, 40, 80], dtype=torch.int32)
packed = [t.flatten(0, 1) for t in (q, k, v)]
close(hub.flash_attn_varlen_func(*packed, ends, ends, 40, 40, causal=True).view_as(expected), expected)
with torch.autocast("cpu", torch.bfloat16):
    assert hub.forward(*rows, causal=True).dtype == torch.bfloat16
    assert getattr(torch.ops, hub.__name__).forward(*(t.detach() for t in rows))[0].dtype == torch.bfloat16
with torch.no_grad():
    compiled = torch.compile(lambda *t: hub.forward(*t, causal=True), fullgraph=True, backend="aot_eager")
    close(compiled(*rows).transpose(1, 2), expected)

with torch.profiler.profile() as profile:
    hub.forward(*rows)
    hub.scaled_dot_product_attention(*rows)
ran = {event.key for event in profile.key_averages() if "flash_wmma" in event.key}
assert ran == {f"{hub.__name__}::forward"}, ran
assert {"flash_wmma", hub.__name__} <= set(torch.nn.attention.list_flash_attention_impls())
matrix = torch.randn(5, 30)
close(hub.reductions.row_sum(matrix), matrix.sum(1))
assert hub.distributed.__name__ == hub.__name__ + ".distributed"
try:
    hub.kernels()
except ImportError as error:
    assert "_C" in str(error)
else:
    raise AssertionError("the hub's copy has no _C")
assert flash_wmma.kernels()
"""

TRANSFORMERS = """
import copy
import inspect
import sys

import torch
from transformers.utils import import_utils

# Whatever version of the kernels package there is: transformers asks for one of its own time.
inspect.unwrap(import_utils.is_kernels_available).__defaults__ = ("0", "999")
# transformers asks for no backend, and under a torch with CUDA the variant for CUDA would be looked for.
torch.version.cuda = None

from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, initializer_range=0.3, pad_token_id=0,
)


def model(attention):
    return LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)


eager, ours = model("eager"), model("hub/flash-wmma")
ours.load_state_dict(eager.state_dict())
ids = torch.randint(1, 64, (2, 12))
every = torch.ones_like(ids)
left, right = every.clone(), every.clone()
left[1, :5], right[1, 7:] = 0, 0
numbers = torch.cat([torch.arange(5), torch.arange(7)])[None]


def compare(what, seen, **arguments):
    results = []
    for each in (eager, ours):
        each.zero_grad()
        with torch.profiler.profile() as profile:
            logits = each(**arguments).logits * seen[..., None]
        ran = any(event.key.startswith("_flash_wmma_cpu_") for event in profile.key_averages())
        assert ran == (each is ours), what
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in each.parameters())])
    for wanted, got in zip(*results, strict=True):
        error = (got - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, (what, float(error))


compare("dense", every, input_ids=ids)
compare("padded left", left, input_ids=ids, attention_mask=left)
compare("padded right", right, input_ids=ids, attention_mask=right)
compare("packed", every[:1], input_ids=ids[:1], position_ids=numbers, use_cache=False)
tokens = [each.generate(ids, attention_mask=left, max_new_tokens=6, do_sample=False) for each in (eager, ours)]
assert torch.equal(*tokens)
"""


def test_hub(old_libraries: Path, tmp_path: Path) -> None:
    """For CPUs. One test, for all of it uses one build."""
    before = set((ROOT / "build").glob("*/lib_flash_wmma_*.so"))
    build = {"FLASH_WMMA_CUDA": "0", "FLASH_WMMA_OLD_LIBRARIES": str(old_libraries)}
    variant = Path(run(sys.executable, PACKAGES / "hub.py", tmp_path, **build).strip().splitlines()[-1])
    assert variant.parent == tmp_path / "build"
    assert re.fullmatch(r"torch-stable-abi210-cpu-\w+-linux", variant.name)
    metadata = json.loads((variant / "metadata.json").read_text())
    (library,) = variant.glob("*.so")
    assert library.name == f"lib{metadata['id']}.so"
    assert len(set((ROOT / "build").glob("*/lib_flash_wmma_*.so")) - before) <= 1, "earlier builds stay"
    newest = versions(library)
    assert all(newest[prefix] <= NEWEST[prefix] for prefix in newest), newest
    written = {str(p.relative_to(variant)) for p in variant.rglob("*.py")}
    assert written == {str(p.relative_to(ROOT / "flash_wmma")) for p in (ROOT / "flash_wmma").rglob("*.py")}

    offline = {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"hub/flash-wmma={tmp_path}"}
    run(sys.executable, "-c", USE, tmp_path, **offline)
    if sys.version_info >= (3, 11):  # transformers is for these alone
        run(sys.executable, "-c", TRANSFORMERS, **offline)
