"""Compiles a Hopper kernel for sm_90 with no GPU and prints what it is made of, as JSON.

dense HEAD_DIM BLOCK_N GROUPS, or paged HEAD_DIM BLOCK_N GROUP_SIZE BLOCK_SIZE.
"""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels.flash_attention_hopper import ROWS, _hopper_kernel
from kernels.flash_attention_paged_hopper import PANEL, _paged_hopper_kernel

FIXED = {"lse_ptr": None, "STAGES": 2}
TYPES = {"o_ptr": "*bf16", "qk_scale": "fp32", "table_ptr": "*i32", "seq_lens_ptr": "*i32", "cu_q_ptr": "*i32"}


def dense(head_dim: int, block_n: int, groups: int) -> None:
    """With a causal mask."""
    fixed = dict.fromkeys(("CAUSAL", "PING_PONG"), True) | {"HAS_LSE": False, "HEADS_PER_KV": 1}
    tile = [1, block_n, 1, head_dim]
    boxes = {"q_desc": [1, ROWS.value, 1, head_dim], "k_desc": tile, "v_desc": tile}
    report(_hopper_kernel, fixed | {"HEAD_DIM": head_dim, "GROUPS": groups}, boxes)


def paged(head_dim: int, block_n: int, group_size: int, block_size: int) -> None:
    """Over a paged cache."""
    box = [1, min(block_size, block_n), 1, PANEL.value]
    boxes = {"q_desc": [ROWS.value // group_size, group_size, head_dim], "k_desc": box, "v_desc": box}
    fixed = {"BLOCK_SIZE": block_size, "BOX": box[1], "GROUP_SIZE": group_size, "BLOCK_N": block_n}
    report(_paged_hopper_kernel, fixed | {"HEAD_DIM": head_dim, "PING_PONG": False}, boxes)


def report(kernel, fixed: dict, boxes: dict[str, list[int]]) -> None:
    """Compile for bfloat16 and print the counts."""
    fixed = FIXED | fixed
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], constants[(place,)] = "constexpr", fixed[name]
        elif name in boxes:
            layout = gl.NVMMASharedLayout.get_default_for(boxes[name], gl.bfloat16)
            signature[name] = f"tensordesc<bf16{boxes[name]},{layout!r}>"
        else:
            signature[name] = TYPES.get(name, "i32")
            if name == "o_ptr" or name.startswith("stride_o"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = made.asm["ptx"]
    counts = {name: ptx.count(text) for name, text in (("wgmma", "wgmma.mma_async"), ("tma", "cp.async.bulk.tensor"))}
    print(json.dumps(counts | {"setmaxnreg": ptx.count("setmaxnreg"), "shared": made.metadata.shared}))


if __name__ == "__main__":
    {"dense": dense, "paged": paged}[sys.argv[1]](*map(int, sys.argv[2:]))
