"""Settings that are whole numbers, checked in one way."""

from __future__ import annotations

from numbers import Integral

LARGEST_SETTING = 2**31 - 1


def checked_count(name: str, value: object, *, most: int = LARGEST_SETTING) -> int:
    """The value as an int.

    Args:
        name: of the setting, for the error.
        value: anything; a bool is no number here, an integer of NumPy is.
        most: the largest that is allowed.

    Raises:
        ValueError: it is no whole number from 1 to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        raise ValueError(f"{name}={value!r}: expected a whole number from 1 to {most}")
    return int(value)
