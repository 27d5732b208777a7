"""Hidden checks of lab 3, second half: packing, the kernel, the checkpoint's layout.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Failed, Remote, hidden_check, require
from labkit.checks import compare
from labkit.checks.lab3_int4_quantization import matmul, packing

LAB = packing.LAB


def as_arrays(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Tensors as what can be sent."""
    return [t.cpu().numpy() for t in tensors]


def on_device(function: str, *arguments):
    """Driver: call a function of the notebook, arrays as tensors."""
    import numpy
    import torch

    where = labkit.device.name()
    sent = (torch.from_numpy(x).to(where) if isinstance(x, numpy.ndarray) else x for x in arguments)
    return globals()[function](*sent)


def multiplied(*arrays):
    """Driver: w4a16, which must launch a kernel and may leave no product to torch."""
    import torch

    from labkit.checks.values import run_kernel

    return run_kernel(w4a16, *(torch.from_numpy(x).to(labkit.device.name()) for x in arrays))


@hidden_check(LAB, "pack_awq")
def random_words(remote: Remote) -> None:
    for rows, columns, seed in ((1, 16, 21), (33, 8, 22), (4, 128, 23)):
        codes = packing.random_codes(rows, columns, seed)
        got = remote.call(on_device, "pack_awq", *as_arrays(codes))
        compare.equal(got, packing.packed(codes), f"words of random codes [{rows}, {columns}]")


@hidden_check(LAB, "pack_awq")
def extremes(remote: Remote) -> None:
    for code in (0, 7, 8, 15):
        codes = torch.full((3, 24), code, dtype=torch.uint8)
        got = remote.call(on_device, "pack_awq", *as_arrays(codes))
        compare.equal(got, packing.packed(codes), f"words of codes that are all {code}")


@hidden_check(LAB, "fixed_dequantize")
def random_matrices(remote: Remote) -> None:
    for rows, columns, group, seed in ((96, 8, 32, 31), (128, 24, 128, 32), (10, 16, 5, 33)):
        *tensors, weight = packing.awq_tensors(rows, columns, group, seed)
        got = remote.call(on_device, "fixed_dequantize", *as_arrays(*tensors), group)
        compare.equal(got, weight.float(), f"weights [{rows}, {columns}] in groups of {group}")


@hidden_check(LAB, "w4a16")
def random_products(remote: Remote) -> None:
    cases = ((2, 96, 160, 32, torch.float16), (19, 8, 256, 128, torch.float16), (5, 72, 24, 24, torch.float32))
    for m, n, k, group, dtype in cases:
        *tensors, weight = packing.awq_tensors(k, n, group, seed=m)
        x = matmul.activations(m, k, dtype, seed=n)
        got = remote.call(multiplied, *as_arrays(x.contiguous(), *tensors))
        exact, peer = (matmul.product(x, weight, d) for d in (torch.float64, dtype))
        compare.close(got, exact, peer, f"{m} rows times [{k}, {n}] in groups of {group}")


def laid_out(group: int, tied: bool) -> list:
    """Driver: names, dtypes and shapes of a layout, its configuration, and a sum over what its linears hold."""
    import torch

    g = torch.Generator().manual_seed(5)
    state = {
        "model.embed_tokens.weight": torch.randn(40, 64, generator=g),
        "a.q.weight": torch.randn(16, 64, generator=g),
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * (1 if tied else 2)
    groups = 1 if group == -1 else 64 // group
    codes = torch.randint(0, 16, (16, 64), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (16, groups), generator=g, dtype=torch.uint8)
    scales = torch.rand(16, groups, generator=g).half()

    def pack(t):
        return t[:, ::8].int().contiguous() * 3 + t[:, 1::8].int()

    tensors, config = awq_layout(state, {"tie_word_embeddings": tied, "x": 1}, {"a.q": (codes, scales, zeros)}, pack)
    sound = torch.equal(tensors["a.q.qweight"], pack(codes.T)) and torch.equal(tensors["a.q.qzeros"], pack(zeros.T))
    sound = sound and torch.equal(tensors["a.q.scales"], scales.T)
    return [sorted([n, str(t.dtype), list(t.shape)] for n, t in tensors.items()), config, bool(sound)]


@hidden_check(LAB, "awq_layout")
def another_model(remote: Remote) -> None:
    for group, tied in ((16, True), (-1, False)):
        tensors, config, sound = remote.call(laid_out, group, tied)
        groups = 1 if group == -1 else 64 // group
        want = [["a.q.qweight", "torch.int32", [64, 2]], ["a.q.qzeros", "torch.int32", [groups, 2]],
                ["a.q.scales", "torch.float16", [groups, 16]]]  # fmt: skip
        want += [] if tied else [["lm_head.weight", "torch.float16", [40, 64]]]
        want += [["model.embed_tokens.weight", "torch.float16", [40, 64]]]
        require(tensors == want, f"groups of {group}, tied {tied}: the tensors are {tensors}, {want} expected")
        require(sound, f"groups of {group}: a tensor of the linear holds other numbers than was expected")
        require((config.get("x"), config.get("dtype")) == (1, "float16"), f"config.json: {config}")
        asked = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True,
                 "modules_to_not_convert": None}  # fmt: skip
        if config.get("quantization_config") != asked:
            raise Failed(f"quantization_config is {config.get('quantization_config')}, {asked} expected")
