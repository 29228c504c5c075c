"""Reading the realized length of a sample whose type is the user's."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

_FIELDS = ("input_ids", "length")


def realized_length(sample: Any) -> int:
    """Length of a sample in tokens.

    Read from its `input_ids` (a mapping's key or an attribute), else from a number called `length`, else
    from the sample itself where it is a tensor, an array or a sequence of numbers, else from the first
    element of a tuple. The length of an array is its last dimension where it has two (`[1, tokens]`, as tokenizers
    return), its first otherwise; of one with three or more it cannot be read.

    Raises:
        TypeError: if none of these applies; the message says how to give `length_fn`.
    """
    for field in _FIELDS:
        value = sample.get(field) if isinstance(sample, Mapping) else getattr(sample, field, None)
        if value is not None and not callable(value):
            return int(value) if field == "length" else _extent(value, sample)
    if isinstance(sample, tuple) and sample and not isinstance(sample[0], Real):
        return _extent(sample[0], sample)
    return _extent(sample, sample)


def _extent(value: Any, sample: Any) -> int:
    shape = getattr(value, "shape", None)
    if shape is not None and 0 < len(shape) < 3:
        return int(shape[-1] if len(shape) == 2 and shape[0] == 1 else shape[0])
    if isinstance(value, (list, tuple)) and (not value or isinstance(value[0], Real)):
        return len(value)
    fields = f" with keys {sorted(map(str, sample))}" if isinstance(sample, Mapping) else ""
    raise TypeError(
        f"the length of a {type(sample).__name__}{fields} cannot be read: "
        "pass length_fn, for example length_fn=lambda sample: len(sample['tokens'])"
    )
