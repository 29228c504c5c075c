"""Ranks that run out of data together: a pure rule on the number of views.

Alignment makes the *numbers of groups* equal, not what they hold. If each rank simply fills its buffer, ranks
drift apart by what their groups hold, and those that are through first end the epoch in zero-weight steps.
Drawing an even part of its views in each round keeps them together; a rank whose samples are short then takes
smaller batches, which costs nothing, since the rank with most work sets the time of a step.
"""

from __future__ import annotations


def views_due(round_number: int, *, views: int, rounds: int) -> int:
    """Views that a rank has drawn by the time it groups in a round.

    Its views are spread evenly over the same number of rounds as those of every other rank, so that all draw their
    last view in the same round.

    Args:
        round_number: number of the round, from 0.
        views: views that the rank has to draw.
        rounds: rounds to draw them in, the same on every rank: the fewest in which the largest share of a rank passes
            through its buffer.

    Returns:
        A total that reaches `views` in round `rounds - 1` and stays there.
    """
    return min(-(-(round_number + 1) * views // max(rounds, 1)), views)
