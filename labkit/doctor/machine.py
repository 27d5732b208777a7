"""What a machine is, as far as the camp cares: plain readings, which a test can record or make up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as nvidia-smi tells it. `capability` is the compute capability, "9.0" for Hopper."""

    name: str
    capability: str
    memory_mib: int


@dataclass(frozen=True)
class Machine:
    """Readings of one machine; "" and 0 mean "not there" or "not known". Sizes are in GiB."""

    system: str = "Linux"  # "Linux", "Windows" or "Darwin"
    arch: str = "x86_64"  # of the Python that runs, so "x86" in a 32-bit Python on a 64-bit system
    python: str = "3.11.7"
    python_bits: int = 64
    prefix: str = ""  # of the Python environment
    glibc: str = ""
    wsl: int = 0  # inside the Windows Subsystem for Linux: its version
    wsl2_distributions: int = 0  # on Windows: how many are installed
    cpu_flags: tuple[str, ...] = ()  # of avx2, avx512f, amx_tile
    ram_gib: float = 0.0
    shm_gib: float = 0.0
    disk_gib: float = 0.0  # free, where the camp lies
    pci_gpus: int = 0  # NVIDIA GPUs on the PCI bus, with or without a driver
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    driver_cuda: str = ""  # the CUDA version that the driver supports in full
    nvcc: str = ""
    cudart_on_library_path: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: not set
    interpret: bool = False  # TRITON_INTERPRET was set from outside
    torch_cuda: str = ""  # the CUDA version that torch is built with
    torch_archs: tuple[str, ...] = ()  # what torch holds code for: sm_90, compute_120
    cuda_available: bool = False
    cuda_error: str = ""  # why it is not
    import_errors: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)  # distribution: version
    tools: tuple[str, ...] = ()  # of cc, Python.h, bwrap, chromium

    @classmethod
    def from_json(cls, readings: dict[str, Any]) -> Machine:
        """A machine from recorded readings. Raises ValueError naming a reading that there is not."""
        unknown = set(readings) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown readings: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in readings.items()
        }
        values["gpus"] = tuple(Gpu(**gpu) for gpu in readings.get("gpus", ()))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The readings as plain dicts, lists, strings and numbers; the opposite of `from_json`."""
        return dataclasses.asdict(self)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "2.13.0+cpu" gives (2, 13, 0), "" gives ()."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
