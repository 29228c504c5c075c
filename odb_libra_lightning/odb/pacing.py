"""Ranks that run out of data together: a pure rule on the number of views.

Alignment makes the *numbers of groups* equal, not what they hold. If each rank simply fills its buffer, ranks
drift apart by what their groups hold, and those that are through first end the epoch in zero-weight steps.
Drawing the same number of views in each round keeps them together; a rank whose samples are short then takes
smaller batches, which costs nothing, since the rank with most work sets the time of a step.
"""

from __future__ import annotations


def views_due(round_number: int, *, views: int, buffer_size: int) -> int:
    """Views that every rank has drawn by the time it groups in a round.

    The epoch's views are spread evenly over the fewest rounds that the buffer allows, so that all ranks draw
    their last view in the same round.

    Args:
        round_number: number of the round, from 0.
        views: views of a rank in the epoch, the same on every rank.
        buffer_size: most views to draw in one round.

    Returns:
        A total that reaches `views` in round `ceil(views / buffer_size) - 1` and stays there.
    """
    rounds = -(-views // buffer_size)
    return min(-(-(round_number + 1) * views // rounds), views)
