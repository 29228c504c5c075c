"""What a mistyped name was meant to be."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable

from hydra.utils import get_object


def nearest_of(name: str, options: Iterable[str]) -> str | None:
    """The option that a name means: itself, or the one most like it."""
    options = set(options)
    return name if name in options else next(iter(difflib.get_close_matches(name, sorted(options), n=1)), None)


def did_you_mean(nearest: object) -> str:
    """The end of a sentence about a name that is not known."""
    return f"; did you mean {nearest}?" if nearest else ""


def nearest_target(path: str) -> str | None:
    """Correct the first part of a dotted path that its owner does not have."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        try:
            owner = get_object(".".join(parts[:depth]))
        except Exception:
            continue
        modules = (module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", [])))
        nearest = nearest_of(parts[depth], {*dir(owner), *getattr(owner, "__all__", ()), *modules})
        return ".".join([*parts[:depth], nearest, *parts[depth + 1 :]]) if nearest not in (None, parts[depth]) else None
    return None
