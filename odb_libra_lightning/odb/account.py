"""What an epoch has covered, in the terms of the method.

Source: ODB, section 5 (quota closure, logical remainder, identity coverage).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpochAccount:
    """Coverage of one epoch so far, over all ranks.

    Attributes:
        epoch: number of the epoch, from 0.
        samples: samples that the epoch draws, `N`.
        emitted: views trained on or dropped, `S_emit`.
        dropped: views among them that a policy dropped.
        identities: samples of which at least one view is among them.
        deals: how often samples were dealt out to the ranks, at least 1.
        largest_remainder: most views that were left when a deal ended for another.
    """

    epoch: int
    samples: int
    emitted: int
    dropped: int
    identities: int
    deals: int
    largest_remainder: int

    @property
    def eta_quota(self) -> float:
        """Share of the sample quota that is not emitted: `max(0, 1 - S_emit / N)`."""
        return max(0.0, 1 - self.emitted / self.samples)

    @property
    def eta_logical(self) -> float:
        """Largest share of the epoch that a deal left to the next.

        At most `W * D / N` where no rank holds more than `D` views when the first of them is through.
        """
        return self.largest_remainder / self.samples

    @property
    def eta_identity(self) -> float:
        """Share of the samples that are not covered."""
        return 1 - self.identities / self.samples
