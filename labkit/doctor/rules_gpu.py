"""The driver, the GPU, and whether torch fits them."""

from __future__ import annotations

import re

from labkit.doctor.findings import Values, driver_cuda, driver_needed, fits, needed, rule
from labkit.doctor.machine import Gpu, Machine, release

HIDING = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that leave no GPU


@rule
def driver_missing(machine: Machine) -> Values:
    if machine.gpus or not machine.pci_gpus:
        return None
    return {"needed": driver_needed(machine.torch_cuda or "13.0")}


@rule
def driver_too_old(machine: Machine) -> Values:
    driver, cuda = driver_cuda(machine), machine.torch_cuda
    if not (driver and cuda) or release(cuda)[0] <= release(driver)[0] or machine.cuda_available:
        return None  # where cuda-compat is installed, an older driver does start
    needs = fits()["driver_of_cuda_major"].get(cuda.split(".")[0], "?")
    dashed = "-".join(cuda.split(".")[:2])
    return {"cuda": cuda, "have": machine.driver, "driver_cuda": driver, "needed": needs, "dashed": dashed}


@rule
def driver_of_older_minor(machine: Machine) -> Values:
    driver, cuda = driver_cuda(machine), machine.torch_cuda
    if not (driver and cuda) or release(cuda)[0] != release(driver)[0] or release(cuda)[:2] <= release(driver)[:2]:
        return None
    return {"cuda": cuda, "have": machine.driver, "driver_cuda": driver, "needed": driver_needed(cuda)}


@rule
def ptx_newer_than_driver(machine: Machine) -> Values:
    driver, cuda = driver_cuda(machine), machine.torch_cuda
    for gpu in machine.gpus if driver and cuda else ():
        if code_for(gpu, machine.torch_archs) == "ptx" and release(cuda)[:2] > release(driver)[:2]:
            values = {"gpu": gpu.name, "capability": gpu.capability, "cuda": cuda, "have": machine.driver}
            return {**values, "driver_cuda": driver, "needed": driver_needed(cuda)}
    return None


@rule
def gpu_without_code(machine: Machine) -> Values:
    for gpu in machine.gpus if machine.torch_archs else ():
        if code_for(gpu, machine.torch_archs) == "none":
            return {"gpu": gpu.name, "capability": gpu.capability, "archs": ", ".join(machine.torch_archs)}
    return None


def code_for(gpu: Gpu, archs: tuple[str, ...]) -> str:
    """What a build for `archs` (sm_90, compute_120) has for `gpu`: "machine code", "ptx" or "none".

    Machine code runs on its own major version from its minor version upwards, and where its name ends in a letter on
    its own capability only; PTX can be compiled for every later capability.
    """
    have, ptx = release(gpu.capability), False
    for kind, major, minor, special in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", " ".join(archs)):
        arch = (int(major), int(minor))
        if kind == "sm" and (arch == have or (arch[0] == have[0] and arch <= have and not special)):
            return "machine code"
        ptx = ptx or (kind == "compute" and arch <= have and not special)
    return "ptx" if ptx else "none"


@rule
def nvcc_newer_than_driver(machine: Machine) -> Values:
    driver = driver_cuda(machine)
    newer = bool(machine.nvcc and driver) and release(machine.nvcc)[:2] > release(driver)[:2]
    return {"have": machine.nvcc, "driver_cuda": driver} if newer else None


@rule
def older_cudart_on_library_path(machine: Machine) -> Values:
    have, cuda = release(machine.cudart_on_library_path), release(machine.torch_cuda)
    same_name = have[:1] == cuda[:1] != ()  # libcudart.so.12 is looked up by its major version
    if not same_name or have[:2] >= cuda[:2]:
        return None
    return {"have": machine.cudart_on_library_path, "cuda": machine.torch_cuda}


@rule
def gpu_hidden(machine: Machine) -> Values:
    hidden = bool(machine.gpus and machine.torch_cuda) and machine.visible_devices in HIDING
    return {"have": machine.visible_devices} if hidden else None


@rule
def interpreter_forced(machine: Machine) -> Values:
    return {} if machine.interpret and machine.cuda_available else None


@rule
def cuda_unusable(machine: Machine) -> Values:
    if not (machine.gpus and machine.torch_cuda) or machine.cuda_available:
        return None
    if driver_too_old(machine) or gpu_hidden(machine):
        return None  # the reason is known
    error = machine.cuda_error or "torch gives no reason"
    return {"have": machine.driver, "cuda": machine.torch_cuda, "error": error}


@rule
def capability_too_low(machine: Machine) -> Values:
    low = needed("capability")
    if not machine.gpus or any(release(gpu.capability) >= release(low) for gpu in machine.gpus):
        return None
    return {"gpu": machine.gpus[0].name, "capability": machine.gpus[0].capability, "needed": low}


@rule
def compiler_missing(machine: Machine) -> Values:
    missing = [name for name in ("cc", "Python.h") if name not in machine.tools]
    on_gpu = machine.system == "Linux" and machine.gpus and machine.torch_cuda
    return {"missing": " and ".join(missing)} if on_gpu and missing else None
