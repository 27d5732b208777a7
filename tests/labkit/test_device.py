"""What hardware is here, and refusals that say why; GPUs are played by a mock."""

from types import SimpleNamespace

import pytest
import torch

from labkit import device

T4 = ("Tesla T4", (7, 5), 65_536)
A100 = ("NVIDIA A100", (8, 0), 166_912)


@pytest.fixture
def gpu(monkeypatch):
    """Play a GPU: gpu("NVIDIA A100", (8, 0), 166_912)."""

    def play(name, capability, shared_memory):
        properties = SimpleNamespace(
            shared_memory_per_block_optin=shared_memory, shared_memory_per_multiprocessor=shared_memory + 1024
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)

    return play


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_with_no_gpu_kernels_are_interpreted_and_bf16_is_not_graded_by_value(no_gpu):
    assert (device.tier(), device.name(), device.capability()) == ("interpreter", "cpu", None)
    assert device.gradable_dtypes() == (torch.float16, torch.float32)
    assert device.shared_memory_per_block() is None and device.shared_memory_per_sm() is None
    device.require("a kernel", dtype=torch.float16, shared_memory=10**9)
    device.require("a kernel", dtype=torch.int32)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"cuda": True}, "graph capture cannot run here: it needs an NVIDIA GPU, and there is none"),
        ({"capability": (9, 0)}, "needs an NVIDIA GPU"),
        ({"dtype": torch.bfloat16}, "values of bfloat16 are wrong in Triton's interpreter"),
        ({"dtype": torch.float8_e4m3fn}, "float8_e4m3fn are wrong"),
    ],
)
def test_a_refusal_with_no_gpu_says_why(no_gpu, needs, reason):
    with pytest.raises(device.Unsupported, match=reason):
        device.require("graph capture", **needs)


def test_a_hopper_has_everything(gpu):
    gpu("NVIDIA H200", (9, 0), 232_448)
    assert (device.tier(), device.name(), device.capability()) == ("cuda", "cuda", (9, 0))
    assert set(device.gradable_dtypes()) == set(device.FLOATS)
    assert (device.shared_memory_per_block(), device.shared_memory_per_sm()) == (232_448, 233_472)
    device.require("TMA", cuda=True, capability=(9, 0), dtype=torch.bfloat16, shared_memory=232_448)


@pytest.mark.parametrize(
    ("machine", "needs", "reason"),
    [
        (T4, {"dtype": torch.bfloat16}, "bfloat16 needs compute capability 8.0, and Tesla T4 has 7.5"),
        (A100, {"capability": (9, 0)}, "needs compute capability 9.0, and NVIDIA A100 has 8.0"),
        (A100, {"dtype": torch.float8_e4m3fn}, "float8_e4m3fn needs compute capability 8.9"),
        (T4, {"shared_memory": 81_920}, "81,920 bytes of shared memory a block, and Tesla T4 has 65,536"),
    ],
)
def test_a_refusal_names_what_is_needed_and_what_is_there(gpu, machine, needs, reason):
    gpu(*machine)
    with pytest.raises(device.Unsupported, match=reason):
        device.require("this kernel", **needs)


def test_a_smaller_gpu_is_refused_only_what_it_lacks(gpu):
    gpu(*T4)
    device.require("a kernel", cuda=True, capability=(7, 5), dtype=torch.float16, shared_memory=65_536)
    assert device.gradable_dtypes() == (torch.float16, torch.float32)
