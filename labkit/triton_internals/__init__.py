"""Everything that reaches into Triton's internals: written for 3.6.0 to 3.7.1, tested on both.

`interpreted` says which tier there is and what was launched; `observing` watches what kernels do in the interpreter;
`compiling` has them compiled for a GPU that is not here.
"""

from labkit.triton_internals.interpreted import interpret_library, interpreting, is_kernel, launched, plain_function
from labkit.triton_internals.observing import Recorder, Region, observe

__all__ = [
    "Recorder",
    "Region",
    "interpret_library",
    "interpreting",
    "is_kernel",
    "launched",
    "observe",
    "plain_function",
]
