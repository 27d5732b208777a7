"""Registers and occupancy are those of the kernel that a GPU's driver loaded. Collected only where there is a GPU.

Run as a script it launches the kernel once a configuration, for the profiler to look at.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from labkit.compiled import ARCHITECTURES, compile_kernel


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        a = tl.load(a_ptr + i[:, None] * n + start + i[None, :])
        b = tl.load(b_ptr + (start + i)[:, None] * BLOCK + i[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + i[:, None] * BLOCK + i[None, :], acc)


def active_blocks(function: int, threads: int, shared: int) -> int:
    """Blocks of a loaded kernel that an SM holds, by the driver's own calculation, which the profiler shows."""
    blocks = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), ctypes.c_void_p(function), threads, ctypes.c_size_t(shared)
    )
    assert code == 0, f"CUDA error {code}"
    return blocks.value


def launch(block: int, num_warps: int, num_stages: int):
    """The kernel as the driver loaded it."""
    a, b = (torch.zeros(block * 1024, dtype=torch.float16, device="cuda") for _ in range(2))
    c = torch.zeros(block * block, device="cuda")
    return product_kernel[(1,)](a, b, c, 1024, BLOCK=block, num_warps=num_warps, num_stages=num_stages)


def compiled(block: int, num_warps: int, num_stages: int):
    """The same, compiled as for a machine with no GPU."""
    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "n": "i32:16"}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile_kernel(product_kernel, types, {"BLOCK": block}, arch=ARCH, **options)


PROFILED = ((16, 1, 1), (64, 4, 3), (128, 8, 3), (64, 8, 1))

if torch.cuda.is_available():
    ARCH = "sm_{}{}".format(*torch.cuda.get_device_capability())

    @pytest.mark.parametrize("block", [16, 64, 128])
    @pytest.mark.parametrize("num_warps", [1, 4, 8])
    @pytest.mark.parametrize("num_stages", [1, 3])
    def test_registers_and_occupancy_are_the_drivers(block, num_warps, num_stages):
        assert ARCH in ARCHITECTURES, f"{ARCH} is not in the table"
        loaded, made = launch(block, num_warps, num_stages), compiled(block, num_warps, num_stages)
        assert (made.registers, made.shared_dynamic) == (loaded.n_regs, loaded.metadata.shared)
        assert made.occupancy.blocks == active_blocks(loaded.function, made.threads, made.shared_dynamic)

    def test_occupancy_is_the_profilers():
        if shutil.which("ncu") is None:
            pytest.skip("the profiler ncu is not installed")
        command = ["ncu", "--clock-control", "none", "--section", "Occupancy", "-k", "product_kernel"]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command += [sys.executable, __file__]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        found = [float(n) for n in re.findall(r"Theoretical Occupancy +% +([0-9.]+)", done.stdout)]
        if not found:
            pytest.skip(f"ncu cannot profile here: {(done.stdout + done.stderr)[-200:]}")
        expected = [compiled(*configuration).occupancy.percent for configuration in PROFILED]
        assert found == pytest.approx(expected, abs=0.01)


if __name__ == "__main__":
    for configuration in PROFILED:
        launch(*configuration)
    torch.cuda.synchronize()
