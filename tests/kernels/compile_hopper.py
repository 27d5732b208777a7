"""Compiles the Hopper kernel for sm_90 with no GPU and prints what it is made of, as JSON: HEAD_DIM BLOCK_N GROUPS."""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels.flash_attention_hopper import ROWS, _hopper_kernel


def main(head_dim: int, block_n: int, groups: int) -> None:
    """Compile for bfloat16 with a causal mask and print the counts."""
    fixed = dict.fromkeys(("CAUSAL", "PING_PONG"), True) | {
        "lse_ptr": None, "HEAD_DIM": head_dim, "HEADS_PER_KV": 1, "GROUPS": groups, "STAGES": 2, "HAS_LSE": False,
    }  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(_hopper_kernel.arg_names):
        if name in fixed:
            signature[name], constants[(place,)] = "constexpr", fixed[name]
        elif name.endswith("_desc"):
            block = [1, ROWS.value if name == "q_desc" else block_n, 1, head_dim]
            layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
            signature[name] = f"tensordesc<bf16{block},{layout!r}>"
        else:
            signature[name] = {"o_ptr": "*bf16", "qk_scale": "fp32"}.get(name, "i32")
            if name == "o_ptr" or name.startswith("stride_o"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(_hopper_kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = made.asm["ptx"]
    counts = {name: ptx.count(text) for name, text in (("wgmma", "wgmma.mma_async"), ("tma", "cp.async.bulk.tensor"))}
    print(json.dumps(counts | {"setmaxnreg": ptx.count("setmaxnreg"), "shared": made.metadata.shared}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
