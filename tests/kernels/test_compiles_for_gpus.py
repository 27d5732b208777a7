"""The kernels compile for GPUs that are not here, and what they use fits the launch that was planned.

A child process compiles them, since a kernel decorated under TRITON_INTERPRET can only be interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMEM_PER_SM = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
REGISTERS_PER_SM = 65536

CHILD = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.kv_cache import _write_kv_kernel
from kernels.paged_attention import _paged_attention_kernel, plan_for

def compiled(fn, arch, constexprs, pointers, others, **options):
    types = {name: "*" + dtype for name, dtype in pointers.items()} | others
    signature, attrs, values = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constexprs:
            signature[name], values[(i,)] = "constexpr", constexprs[name]
            continue
        signature[name] = types.get(name, "i32")
        if name in pointers or (name.startswith("stride") and name not in ("stride_table", "stride_ls", "stride_lh")):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, values, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

def usage(kernel):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = (int(re.search(name + r":(\\d+)", text.stdout).group(1)) for name in ("REG", "STACK"))
    ptx = kernel.asm["ptx"]
    return {"shared": kernel.metadata.shared, "registers": registers, "stack": stack,
            "mma": ptx.count("mma.sync"), "async16": len(re.findall(r"cp.async.cg.shared.global .*0x10", ptx))}

arch, dtype, head_dim, group, block_size = json.loads(sys.argv[1])
plan = plan_for(head_dim, 2)
block_p = triton.next_power_of_2(group)
attention = compiled(
    _paged_attention_kernel, arch,
    dict(HEAD_DIM=head_dim, GROUP=group, BLOCK_G=max(16, block_p), BLOCK_P=block_p, BLOCK_SIZE=block_size,
         BLOCK_N=plan.block_n, BLOCK_S=256, BLOCK_C=max(4, plan.combined_elements // (block_p * head_dim)),
         SAME_STRIDES=True, k_scales_ptr=None, v_scales_ptr=None, KIND=None, ASM=False, WARPS=1,
         EARLY=arch >= 90),
    dict(q_ptr=dtype, k_ptr=dtype, v_ptr=dtype, o_ptr=dtype, table_ptr="i32", seq_lens_ptr="i32", arrivals_ptr="i32",
         lse_ptr="fp32", part_o_ptr="fp32", part_lse_ptr="fp32"),
    dict(qk_scale="fp32"), num_warps=plan.num_warps, num_stages=plan.num_stages,
)
write = compiled(
    _write_kv_kernel, arch, dict(HEAD_DIM=head_dim, BLOCK_D=head_dim, BLOCK_H=8, BLOCK_SIZE=block_size),
    dict(k_ptr=dtype, v_ptr=dtype, k_cache_ptr=dtype, v_cache_ptr=dtype, slot_ptr="i64"), {}, num_warps=4,
)
print(json.dumps({"attention": usage(attention), "write": usage(write),
                  "warps": plan.num_warps, "ctas_per_sm": plan.ctas_per_sm}))
"""


@pytest.mark.parametrize(
    "arch, dtype, head_dim, group, block_size",
    [(90, "bf16", 128, 4, 16), (90, "fp16", 64, 1, 8), (90, "bf16", 256, 8, 128), (80, "bf16", 128, 8, 16),
     (100, "bf16", 128, 4, 16)],
)  # fmt: skip
def test_kernels_compile_and_fit_the_planned_launch(arch, dtype, head_dim, group, block_size):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    arguments = json.dumps([arch, dtype, head_dim, group, block_size])
    child = subprocess.run(
        [sys.executable, "-c", CHILD, arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    attention = found["attention"]
    assert attention["mma"] > 0, "the dots did not become tensor-core instructions"
    assert attention["async16"] > 0, "K and V are not copied 16 bytes at a time"
    assert attention["stack"] == 0, f"registers spill to {attention['stack']} bytes of local memory"
    programs = found["ctas_per_sm"] if arch != 80 else 1  # the plan is tuned for 90; elsewhere one has to fit
    shared = programs * (attention["shared"] + 1024)  # 1 KB of each program is the driver's
    assert shared <= SMEM_PER_SM[arch], f"{programs} programs need {shared} bytes of shared memory an SM"
    registers = programs * found["warps"] * 32 * attention["registers"]
    assert registers <= REGISTERS_PER_SM, f"{programs} programs need {registers} registers an SM"
    assert found["write"]["stack"] == 0
