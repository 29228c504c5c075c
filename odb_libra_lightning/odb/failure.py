"""What goes wrong on one rank, kept until the next exchange, where all ranks learn of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from odb_libra_lightning.odb.errors import SampleError

T = TypeVar("T")


class RankFailure:
    """The first failure of a rank.

    Attributes:
        text: its sentence, and a traceback where there is one; None while all is well.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.text: str | None = None

    def attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        """Do some of this rank's own work, unless it has failed already; None if it fails."""
        if self.text is None:
            try:
                return action(*args)
            except Exception as error:
                detail = error.traceback if isinstance(error, SampleError) else traceback.format_exc()
                self.text = f"rank {self._rank}: {error}"
                if detail:
                    self.text += f"\n\nOn rank {self._rank}:\n{detail}"
        return None
