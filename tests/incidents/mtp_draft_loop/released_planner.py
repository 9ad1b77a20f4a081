"""The planner of a FlashInfer release, compiled for the CPU: functions of its header, CUDA's calls stubbed.

The rule for the query tile is restated here for head sizes up to 256; all else is the release's. Some releases
after 0.6.16.post3 (0.7.2.post1 is one) are lean: no mask in plans that are not padded, less float workspace.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

FIELDS = {
    "request_indices": 4,
    "qo_tile_indices": 5,
    "kv_tile_indices": 6,
    "merge_indptr": 7,
    "o_indptr": 8,
    "kv_chunk_size": 9,
    "block_valid_mask": 12,
    "total_num_rows": 2,
}
STUBS = r"""
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>
typedef int cudaError_t;
typedef void* cudaStream_t;
enum { cudaSuccess = 0, cudaDevAttrMultiProcessorCount, cudaMemcpyHostToDevice };
int sms;
size_t copied;
int cudaGetDevice(int*) { return 0; }
int cudaDeviceGetAttribute(int* value, int, int) { *value = sms; return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int, cudaStream_t) {
  memcpy(to, from, n);
  copied = n;
  return 0;
}
#define FLASHINFER_CUDA_CALL(call) do { if (call) return 1; } while (0)
#define FLASHINFER_ERROR(message) do { std::cerr << message << std::endl; abort(); } while (0)
#define FLASHINFER_CHECK(fine, ...) do { if (!(fine)) FLASHINFER_ERROR("check failed"); } while (0)
template <class A, class B> auto ceil_div(A a, B b) { return (a + b - 1) / b; }
template <class... Rest> uint32_t FA2DetermineCtaTileQ(int64_t length, uint32_t head_dim, Rest...) {
  if (length > 64 && head_dim < 256) return 128;
  return length > 16 ? 64 : 16;
}
"""
MAIN = r"""
int main() {
  std::vector<char> device(1 << 20), host(1 << 20);
  int heads, kv_heads, head_dim, page, graph, batch;
  while (std::cin >> sms >> heads >> kv_heads >> head_dim >> page >> graph >> batch) {
    std::vector<int32_t> qo{0}, kv{0};
    for (int i = 0; i < batch; i++) {
      int pages;
      std::cin >> pages;
      qo.push_back(i + 1);
      kv.push_back(kv.back() + pages);
    }
    std::fill(host.begin(), host.end(), 0);
    PrefillPlanInfo info;
    PrefillPlan<int32_t>(device.data(), size_t(1) << 40, device.data(), host.data(), host.size(), info,
                         qo.data(), kv.data(), batch, batch, heads, kv_heads, head_dim, head_dim, page, graph, 2, -1,
                         -1, false, 0, TAIL nullptr);
    for (auto value : info.ToVector()) printf("%ld ", (long)value);
    printf("|");
    for (size_t i = 0; i < copied; i++) printf(" %d", (unsigned char)device[i]);
    printf("\n");
  }
}
"""


def include() -> Path:
    """The release's headers: an unpacked wheel at SPECMORTEM_FLASHINFER, or the installed package."""
    if folder := os.environ.get("SPECMORTEM_FLASHINFER"):
        return Path(folder) / "flashinfer/data/include/flashinfer"
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip(
            "no FlashInfer: install flashinfer-python, or name its unpacked wheel SPECMORTEM_FLASHINFER"
        )
    return Path(spec.origin).parent / "data/include/flashinfer"


def build(folder: Path) -> tuple[Path, bool]:
    """The compiled planner, and whether it is a lean one."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to compile the released planner with")
    headers = include()
    scheduler = (headers / "attention/scheduler.cuh").read_text()
    allocator = (headers / "allocator.h").read_text()
    search = _between(scheduler, "inline auto PrefillBinarySearchKVChunkSize", "/*!")
    plan = _between(
        scheduler,
        "template <typename IdType>\ninline auto PrefillSplitQOKVIndptr",
        "inline float cost_function",
    )
    memory = _between(allocator, "// create a function", "}  // namespace flashinfer")
    tail = "0," if "uniform_q_len" in plan else ""
    source = folder / "planner.cpp"
    source.write_text(STUBS + memory + search + plan + MAIN.replace("TAIL", tail))
    program = folder / "planner"
    subprocess.run(["g++", "-std=c++17", "-O1", str(source), "-o", str(program)], check=True, timeout=120)
    return program, "max_partial_rows" in plan


def _between(text: str, start: str, stop: str) -> str:
    at = text.index(start)
    return text[at : text.index(stop, at)]


def run(program: Path, plans) -> list[tuple[list[int], np.ndarray]]:
    """Plan info (15 numbers) and copied bytes for the geometry and page counts of each plan."""
    lines = []
    for plan in plans:
        g = plan.geometry
        numbers = (g.num_sms, g.num_qo_heads, g.num_kv_heads, g.head_dim, g.page_size, int(g.constant))
        lines.append(" ".join(map(str, (*numbers, plan.num_reqs, *plan.page_counts))))
    done = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=120
    )
    found = [line.split("|") for line in done.stdout.splitlines()]
    return [([int(n) for n in info.split()], np.array(block.split(), np.uint8)) for info, block in found]
