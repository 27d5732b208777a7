"""What hardware is here: the tier, and what a kernel may count on. Decided in this one place."""

from __future__ import annotations

import torch

INTERPRETED = (torch.float16, torch.float32)  # Triton's interpreter computes bf16 wrongly, and fp8 casts differ
CAPABILITY_NEEDED = {torch.bfloat16: (8, 0), torch.float8_e4m3fn: (8, 9), torch.float8_e5m2: (8, 9)}
FLOATS = (torch.float16, torch.float32, *CAPABILITY_NEEDED)


class Unsupported(RuntimeError):
    """This machine cannot do what was asked for; the message says why."""


def tier() -> str:
    """ "cuda" where a CUDA device is used, else "interpreter"."""
    return "cuda" if torch.cuda.is_available() else "interpreter"


def name() -> str:
    """The device that kernels run on: "cuda" or "cpu"."""
    return "cuda" if tier() == "cuda" else "cpu"


def model() -> str:
    """What to call this machine in a table: the GPU's own name, or "CPU"."""
    return torch.cuda.get_device_name() if tier() == "cuda" else "CPU"


def capability() -> tuple[int, int] | None:
    """The GPU's compute capability, (9, 0) for Hopper; None in the interpreter, which has none."""
    return torch.cuda.get_device_capability() if tier() == "cuda" else None


def gradable_dtypes() -> tuple[torch.dtype, ...]:
    """Float dtypes whose values can be graded in this tier, the others by compilation only."""
    return tuple(dtype for dtype in FLOATS if not _dtype_refusal(dtype))


def shared_memory_per_block() -> int | None:
    """Bytes of shared memory that one block may use, opted in; None in the interpreter, which sets no limit."""
    if tier() != "cuda":
        return None
    return torch.cuda.get_device_properties().shared_memory_per_block_optin  # type: ignore[attr-defined]


def shared_memory_per_sm() -> int | None:
    """Bytes of shared memory of one multiprocessor, shared by its blocks; None in the interpreter."""
    return torch.cuda.get_device_properties().shared_memory_per_multiprocessor if tier() == "cuda" else None


def require(
    what: str,
    *,
    cuda: bool = False,
    capability: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    shared_memory: int | None = None,
) -> None:
    """Raise Unsupported, with the reason, unless this machine has what `what` needs.

    cuda: a GPU at all. capability: at least this, which implies cuda. dtype: its values can be trusted here.
    shared_memory: bytes that one block needs.
    """
    reason = (
        _gpu_refusal(cuda, capability)
        or (_dtype_refusal(dtype) if dtype is not None else "")
        or (_memory_refusal(shared_memory) if shared_memory is not None else "")
    )
    if reason:
        raise Unsupported(f"{what} cannot run here: {reason}")


def _gpu_refusal(cuda: bool, needed: tuple[int, int] | None) -> str:
    if not (cuda or needed):
        return ""
    have = capability()
    if have is None:
        return "it needs an NVIDIA GPU, and there is none"
    if needed and have < needed:
        return f"it needs compute capability {_dotted(needed)}, and {model()} has {_dotted(have)}"
    return ""


def _dtype_refusal(dtype: torch.dtype) -> str:
    short = str(dtype).removeprefix("torch.")
    have = capability()
    if have is None:
        if dtype in INTERPRETED or not dtype.is_floating_point:
            return ""
        return f"values of {short} are wrong in Triton's interpreter, it is graded there by compilation only"
    needed = CAPABILITY_NEEDED.get(dtype, (0, 0))
    return (
        f"{short} needs compute capability {_dotted(needed)}, and {model()} has {_dotted(have)}"
        if have < needed
        else ""
    )


def _memory_refusal(needed: int) -> str:
    have = shared_memory_per_block()
    if have is None or needed <= have:
        return ""
    return f"it needs {needed:,} bytes of shared memory a block, and {model()} has {have:,}: take smaller tiles"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
