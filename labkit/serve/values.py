"""What counts as a number where arguments are checked."""

from __future__ import annotations

import numbers


def is_whole(value: object, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a number, whole or not; True and False are none, and neither is NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value
