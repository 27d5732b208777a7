"""What counts as a number where arguments are checked."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def is_whole(value: object, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a number, whole or not; True and False are none, and neither is NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def whole(name: str, value: Any, least: int = 1) -> int:
    """The argument `name` as an int, also where it is one of numpy's. ValueError if it is none, or under `least`."""
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, and is {value!r}")
    return found
