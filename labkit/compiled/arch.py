"""What a streaming multiprocessor holds, and how many warps of a kernel fit on it at once."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Limits:
    """Limits of one SM of a compute capability, and the portions in which it hands out what it has.

    Shared memory in bytes. reserved_shared: what the system takes of it for each block. num_sms: of `gpu`, one of this
    compute capability.
    """

    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    gpu: str
    num_sms: int
    registers: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    partitions: int = 4  # schedulers, each with its share of the registers
    register_unit: int = 256  # registers, allocated to a warp at a time
    shared_unit: int = 128
    reserved_shared: int = 1 * KIB


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; allocation units: cuda_occupancy.h.
ARCHITECTURES = {
    "sm_80": Limits(warps=64, blocks=32, shared=164 * KIB, shared_per_block=163 * KIB, gpu="A100", num_sms=108),
    "sm_86": Limits(warps=48, blocks=16, shared=100 * KIB, shared_per_block=99 * KIB, gpu="A10", num_sms=72),
    "sm_89": Limits(warps=48, blocks=24, shared=100 * KIB, shared_per_block=99 * KIB, gpu="L40S", num_sms=142),
    "sm_90": Limits(warps=64, blocks=32, shared=228 * KIB, shared_per_block=227 * KIB, gpu="H200", num_sms=132),
    "sm_100": Limits(warps=64, blocks=32, shared=228 * KIB, shared_per_block=227 * KIB, gpu="B200", num_sms=148),
}


@dataclass(frozen=True)
class Occupancy:
    """How many warps of a kernel an SM holds at once: the theoretical occupancy of NVIDIA's profiler.

    blocks: thread blocks an SM holds; 0 where the kernel cannot be launched. warps: blocks times the warps of one.
    max_warps: what the SM could hold. limited_by: which of "registers", "shared memory", "warps" and "blocks" allow no
    more; more than one if they tie.
    """

    blocks: int
    warps: int
    max_warps: int
    limited_by: tuple[str, ...]

    @property
    def percent(self) -> float:
        """warps / max_warps, in percent."""
        return 100 * self.warps / self.max_warps

    def __str__(self) -> str:
        if not self.blocks:
            return f"does not fit: too much {' and '.join(self.limited_by)} for one block"
        return (
            f"{self.warps} of {self.max_warps} warps ({self.percent:.1f} %), limited by {' and '.join(self.limited_by)}"
        )


def limits_of(arch: str) -> Limits:
    """The limits of "sm_80", "sm_86", "sm_89", "sm_90" or "sm_100". ValueError for any other name."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch: {arch!r} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def occupancy(arch: str, *, threads: int, registers: int, shared: int = 0) -> Occupancy:
    """Occupancy of a kernel with `threads` in a block, `registers` a thread, `shared` bytes of shared memory a block.

    Each scheduler has its own share of the registers, and a warp's come in units, so 255 registers leave room for 8
    warps and not for 8.03. ValueError for an unknown arch, or for numbers that no launch can have.
    """
    limits = limits_of(arch)
    if not 1 <= threads <= limits.threads_per_block:
        raise ValueError(f"threads: 1 to {limits.threads_per_block}, not {threads}")
    if not 0 <= registers <= limits.registers_per_thread:
        raise ValueError(f"registers: 0 to {limits.registers_per_thread} a thread, not {registers}")
    if shared < 0:
        raise ValueError(f"shared: bytes, not {shared}")
    warps = _up(threads, 32) // 32
    fits = {"warps": limits.warps // warps, "blocks": limits.blocks}
    if registers:
        of_a_warp = _up(registers * 32, limits.register_unit)
        fits["registers"] = limits.registers // limits.partitions // of_a_warp * limits.partitions // warps
    block = _up(shared + limits.reserved_shared, limits.shared_unit)
    fits["shared memory"] = limits.shared // block if shared <= limits.shared_per_block else 0
    blocks = min(fits.values())
    return Occupancy(blocks, blocks * warps, limits.warps, tuple(sorted(n for n, fit in fits.items() if fit == blocks)))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
