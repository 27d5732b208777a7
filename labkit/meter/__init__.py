"""What a Triton kernel asks for, counted in the interpreter, the same on every machine.

    count = measure(copy, x, out)
    count.bytes_loaded, count.launches, count.outside

Counted are bytes of unmasked lanes before any cache, operations, dots and launches; each access is checked against the
bounds of the tensor its pointer was derived from. The call runs on the CPU in a child process, from the function's
source, so it works the same where kernels are compiled, and a crash or a hang there costs nothing here.
"""

from labkit.meter.calls import Call, measure, measure_many
from labkit.meter.conflicts import Conflict
from labkit.meter.count import Count, Follow, Followed, Outside, Tally

__all__ = ["Call", "Conflict", "Count", "Follow", "Followed", "Outside", "Tally", "measure", "measure_many"]
