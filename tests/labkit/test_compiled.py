"""Kernels compiled with no GPU: the figures are the compiler's own, and what does not compile says why in one line."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from labkit import cells
from labkit.compiled import (
    ARCHITECTURES,
    CompilationFailed,
    Occupancy,
    calls,
    compile_call,
    compile_kernel,
    occupancy,
    sass,
)
from labkit.compiled.report import parse_ptxas
from labkit.meter import Call

ARCHS = ("sm_80", "sm_90", "sm_100")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d, j = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_N)
    q = tl.load(q_ptr + m[:, None] * HEAD_DIM + d[None, :])
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(0, n, BLOCK_N):
        k = tl.load(k_ptr + (start + j)[None, :] * HEAD_DIM + d[:, None])
        score = tl.dot(q, k) * scale
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(v_ptr + (start + j)[:, None] * HEAD_DIM + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        peak = new_peak
    tl.store(o_ptr + m[:, None] * HEAD_DIM + d[None, :], (acc / total[:, None]).to(tl.float16))


TYPES = {"q_ptr": "*fp16", "k_ptr": "*fp16", "v_ptr": "*fp16", "o_ptr": "*fp16", "scale": "fp32", "n": "i32"}
TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "HEAD_DIM": 64}


@pytest.fixture(scope="module", params=ARCHS)
def attention(request):
    return compile_kernel(attention_kernel, TYPES, TILES, arch=request.param)


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr = 256):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.static_print("block is", BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


SCALE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "factor": "fp32"}


def scaled(x, factor):
    out = torch.empty_like(x)
    scale_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]), 1)](x, out, x.numel(), factor, num_warps=2)
    return out


def resource_usage(cubin):
    """What cuobjdump, another of the compiler's tools, reads from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said)}


def test_registers_stack_and_shared_memory_are_those_of_the_compilers_resource_report(attention):
    usage = resource_usage(attention.asm["cubin"])
    assert attention.registers == usage["REG"]
    assert attention.resources.stack == usage["STACK"]
    # From sm_90 on, that report counts what the system reserves of each block's shared memory; ptxas -v does not.
    reserved = ARCHITECTURES[attention.arch].reserved_shared if attention.arch != "sm_80" else 0
    assert attention.resources.shared_static + reserved == usage["SHARED"]


def test_each_architecture_multiplies_with_its_own_tensor_cores(attention):
    families = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}
    for arch, family in families.items():
        assert bool(attention.instructions[family]) == (arch == attention.arch), attention.instructions
    assert attention.instructions["async_copy"] and attention.instructions["barrier"]
    assert bool(attention.tensor_memory) == (attention.arch == "sm_100")
    layout = {"sm_80": "versionMajor = 2", "sm_90": "versionMajor = 3", "sm_100": "tensor_memory_encoding"}
    assert any(layout[attention.arch] in text for text in attention.layouts.values()), attention.layouts


def test_the_listing_puts_source_lines_beside_the_machine_code(attention):
    listing = attention.listing()
    mma = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[attention.arch]
    lines = [line for line in attention.sass if line.mnemonic.startswith(mma) and line.file.endswith("<standalone>")]
    source = attention.source.splitlines()
    credited = {source[line.line - 1].strip() for line in lines}
    dots = {"score = tl.dot(q, k) * scale", "acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])"}
    assert dots <= credited, "no tensor-core instruction stands beside one of the dots"
    assert attention.arch == "sm_90" or credited == dots, (
        "on sm_90 the assembler moves them past their neighbours' lines"
    )
    assert re.search(r"MUFU.EX2.*\n", listing) and "p = tl.exp2(score - new_peak[:, None])" in listing
    assert len(listing.splitlines()) == len(attention.sass)
    exponentials = [line for line in sass.ptx_lines(attention.ptx) if "ex2.approx" in line.text]
    assert {source[line.line - 1].strip() for line in exponentials} == {
        "p = tl.exp2(score - new_peak[:, None])",
        "rescale = tl.exp2(peak - new_peak)",
    }
    shuffles = [line for line in sass.ptx_lines(attention.ptx) if line.text.startswith("shfl")]
    assert all(line.file.endswith("<standalone>") for line in shuffles), (
        "reductions belong to the line that asked for them"
    )
    assert {"new_peak = tl.maximum(peak, tl.max(score, 1))", "total = total * rescale + tl.sum(p, 1)"} <= {
        source[line.line - 1].strip() for line in shuffles
    }
    assert "p = tl.exp2(score - new_peak[:, None])" in attention.listing("ptx")
    with pytest.raises(ValueError, match='stage: "sass" or "ptx", not'):
        attention.listing("cubin")


def test_all_instructions_of_the_disassembly_are_counted_once(attention):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(attention.asm["cubin"])
        file.flush()
        dump = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True).stdout
    for name in ("LDGSTS", "BAR.SYNC", "MUFU.EX2", "STG"):
        assert sum(n for m, n in attention.mnemonics.items() if m.startswith(name)) == len(
            re.findall(rf" {re.escape(name)}\b", dump)
        ), name


def test_spilled_registers_are_reported_in_bytes_and_seen_in_local_memory():
    full = compile_kernel(attention_kernel, TYPES, TILES, arch="sm_80")
    tight = compile_kernel(attention_kernel, TYPES, TILES, arch="sm_80", maxnreg=64)
    assert (full.spills, full.instructions["local_load"], full.instructions["local_store"]) == (0, 0, 0)
    assert tight.registers <= 64 and tight.resources.spill_stores > 0 and tight.resources.stack > 0
    assert tight.instructions["local_load"] and tight.instructions["local_store"]
    assert tight.occupancy.warps > full.occupancy.warps


def test_ptxas_is_read_with_and_without_static_shared_memory():
    log = """ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    128 bytes stack frame, 172 bytes spill stores, 140 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 128 bytes cumulative stack size, {}416 bytes cmem[0]"""
    read = parse_ptxas(log.format(""))
    assert (read.registers, read.stack, read.spill_stores, read.spill_loads, read.shared_static) == (
        255,
        128,
        172,
        140,
        0,
    )
    assert parse_ptxas(log.format("2048 bytes smem, ")).shared_static == 2048
    with pytest.raises(ValueError, match="did not report"):
        parse_ptxas("")


@pytest.mark.parametrize(
    "arch, threads, registers, shared, warps, limited_by",
    [
        ("sm_80", 128, 255, 0, 8, "registers"),  # 16,384 of a scheduler / 8,192 of a warp = 2
        ("sm_80", 128, 168, 0, 12, "registers"),
        ("sm_90", 256, 128, 0, 16, "registers"),
        ("sm_90", 128, 32, 0, 64, "registers and warps"),
        ("sm_90", 128, 33, 0, 48, "registers"),  # 33 are handed out as 40
        ("sm_90", 32, 16, 0, 32, "blocks"),
        ("sm_90", 128, 32, 113 * 1024, 8, "shared memory"),  # and 1 KiB reserved: exactly two
        ("sm_90", 128, 32, 113 * 1024 + 1, 4, "shared memory"),
        ("sm_80", 128, 32, 163 * 1024, 4, "shared memory"),
        ("sm_80", 128, 32, 163 * 1024 + 1, 0, "shared memory"),
        ("sm_89", 256, 32, 0, 48, "warps"),
        ("sm_86", 64, 32, 0, 32, "blocks"),
    ],
)
def test_occupancy_follows_from_the_allocation_units(arch, threads, registers, shared, warps, limited_by):
    found = occupancy(arch, threads=threads, registers=registers, shared=shared)
    assert (found.warps, " and ".join(found.limited_by)) == (warps, limited_by), found


def test_occupancy_says_itself_in_words():
    assert str(Occupancy(2, 8, 64, ("registers",))) == "8 of 64 warps (12.5 %), limited by registers"
    assert str(Occupancy(0, 0, 64, ("shared memory",))) == "does not fit: too much shared memory for one block"
    for bad, words in (({"threads": 0}, "threads: 1 to 1024"), ({"registers": 256}, "registers: 0 to 255"),
                       ({"shared": -1}, "shared: bytes")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            occupancy("sm_90", **{"threads": 128, "registers": 32} | bad)


def test_a_call_is_compiled_as_it_would_be_launched_and_nothing_runs():
    x = torch.randn(1000)
    kept = x.clone()
    (made,) = compile_call(Call(scaled, (x, 2.0)), arch="sm_80")
    assert (made.kernel, made.grid, made.threads, made.num_warps) == ("scale_kernel", (4, 1), 64, 2)
    assert made.signature == {"x_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n": "i32", "factor": "fp32"}
    assert made.constexprs == {"BLOCK": "256"} and "block is" in made.printed
    assert torch.equal(x, kept)
    (aligned,) = compile_call(Call(scaled, (torch.randn(1024)[1:], 2.0)), arch="sm_80")
    assert aligned.signature["x_ptr"] == "*fp32", "a view that begins at element 1 is not aligned to 16 bytes"
    (one,) = compile_call(Call(scaled, (torch.randn(1), 2.0)), arch="sm_80")
    assert one.constexprs["n"] == "1", "a launch with n = 1 makes it a constant"


def test_a_signature_and_the_call_with_the_same_types_give_the_same_machine_code():
    (called,) = compile_call(Call(scaled, (torch.randn(1024), 2.0)))
    made = compile_kernel(scale_kernel, {**SCALE, "n": "i32:16"}, num_warps=2)
    assert made.mnemonics == called.mnemonics and made.registers == called.registers
    assert compile_kernel(scale_kernel, {**SCALE, "n": "i32:16"}, num_warps=2) is made, "known ones are not made again"
    other = compile_kernel(scale_kernel, SCALE, num_warps=2)
    assert other.mnemonics["LDG.E.128"] == 0 < made.mnemonics["LDG.E.128"], "16 bytes at a time need a mask of as many"


def test_a_kernel_of_notebook_cells_is_compiled_with_its_helpers():
    cell = "import triton\nimport triton.language as tl\nFACTOR = tl.constexpr(3.0)\n"
    cell += "@triton.jit\ndef triple(x):\n    return x * FACTOR\n"
    cell += "@triton.jit\ndef kernel(x_ptr, BLOCK: tl.constexpr):\n"
    cell += "    at = tl.arange(0, BLOCK)\n    tl.store(x_ptr + at, triple(tl.load(x_ptr + at)))\n"
    namespace = {"__name__": "__main__"}
    cells.run_cell(cell, namespace, "kernel")
    made = compile_kernel(namespace["kernel"], {"x_ptr": "*bf16"}, {"BLOCK": 64}, arch="sm_80")
    assert made.instructions["global_load"] == 1
    text = compile_kernel(cell, {"x_ptr": "*bf16"}, {"BLOCK": 64}, arch="sm_80", name="kernel")
    assert text.mnemonics == made.mnemonics


@triton.jit
def warp_sync_kernel(x_ptr):
    tl.warp_sync()
    tl.store(x_ptr, 1.0)


@triton.jit
def shrinking_kernel(x_ptr, n):
    acc = tl.zeros([16], tl.float32)
    for _ in range(n):
        acc = acc.to(tl.float16)
    tl.store(x_ptr + tl.arange(0, 16), acc)


@triton.jit
def asserting_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 128, "BLOCK is too large")
    tl.store(x_ptr, 1.0)


@pytest.mark.parametrize(
    "kernel, constexprs, options, words",
    [
        (warp_sync_kernel, {}, {}, r"has no attribute 'warp_sync'.* \(at `tl.warp_sync\(\)`\)"),
        (shrinking_kernel, {}, {}, r"Loop-carried variable acc .*fp32.*fp16.*\(at `for _ in range\(n\):`\)"),
        (asserting_kernel, {"BLOCK": 256}, {}, r"BLOCK is too large \(at `tl.static_assert"),
        (asserting_kernel, {"BLOCK": 16}, {"num_warps": 5}, "num_warps must be a power of 2"),
    ],
)
def test_what_does_not_compile_says_why_and_where_in_one_line(kernel, constexprs, options, words):
    types = {"x_ptr": "*fp32"} | ({"n": "i32"} if kernel is shrinking_kernel else {})
    with pytest.raises(CompilationFailed, match=words) as caught:
        compile_kernel(kernel, types, constexprs, **options)
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_named_before_anything_is_compiled():
    with pytest.raises(TypeError, match="signature: no type for argument `n` of `scale_kernel`"):
        compile_kernel(scale_kernel, {k: v for k, v in SCALE.items() if k != "n"})
    with pytest.raises(TypeError, match="constexprs: no value for argument `BLOCK` of `asserting_kernel`"):
        compile_kernel(asserting_kernel, {"x_ptr": "*fp32"})
    with pytest.raises(TypeError, match="`scale_kernel` has no argument `m`; it has x_ptr, out_ptr, n, factor, BLOCK"):
        compile_kernel(scale_kernel, {**SCALE, "m": "i32"})
    with pytest.raises(ValueError, match="arch: 'sm_70' is not one of sm_80"):
        compile_kernel(scale_kernel, SCALE, arch="sm_70")
    with pytest.raises(TypeError, match="name: needed where the kernel is given as source text"):
        compile_kernel("", SCALE)
    with pytest.raises(TypeError, match="expected a Triton kernel, a function or source text, got int"):
        compile_kernel(3, SCALE)


def unlaunched(x):
    raise KeyError("no such head")


def test_a_call_that_raises_says_what_it_raised():
    with pytest.raises(CompilationFailed, match="KeyError: 'no such head'"):
        compile_call(Call(unlaunched, (torch.zeros(1),)))


def test_every_stage_is_saved(tmp_path):
    made = compile_kernel(scale_kernel, SCALE, arch="sm_80")
    paths = made.save(tmp_path / "out")
    assert {p.suffix for p in paths} == {".ttir", ".ttgir", ".llir", ".ptx", ".cubin", ".sass"}
    assert (tmp_path / "out/scale_kernel.sm_80.ptx").read_text() == made.ptx


def test_the_process_that_compiles_is_kept_and_its_death_is_survived():
    compile_kernel(scale_kernel, SCALE, {"BLOCK": 64}, arch="sm_80")
    process = calls._compiler._process
    compile_kernel(scale_kernel, SCALE, {"BLOCK": 128}, arch="sm_80")
    assert process and calls._compiler._process is process
    process.kill()
    process.wait()
    assert compile_kernel(scale_kernel, SCALE, {"BLOCK": 512}, arch="sm_80").registers > 0


def test_a_fork_shares_the_process_that_compiles():
    compile_kernel(scale_kernel, SCALE, {"BLOCK": 64}, arch="sm_80")
    before = calls._compiler._address

    def work():
        made = compile_kernel(scale_kernel, SCALE, {"BLOCK": 32}, arch="sm_80")
        return made.registers, calls._compiler._address

    assert cells.forked(work, 60) == (pytest.approx(16, abs=16), before)


def test_a_disassembler_that_refuses_its_file_is_an_error():
    with pytest.raises(sass.DisassemblerFailed, match="nvdisasm failed"):
        sass.disassemble(b"not a cubin")


def test_families_name_what_they_count():
    counts = sass.count_families(
        sass.Counter({"UTCHMMA": 2, "UTCBAR": 1, "HMMA.16816.F32": 3, "LDGDEPBAR": 4, "LDG.E": 5})
    )
    assert (counts["tcgen05"], counts["mma"], counts["barrier"], counts["global_load"]) == (2, 3, 0, 5)
