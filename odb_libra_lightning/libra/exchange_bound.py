"""What the busiest worker must move at the least, whatever the placement: to judge a plan by. Pure.

Two things no placement avoids as long as keys come straight from their home:

- *Surplus.* Work beyond what a worker may hold has to leave it, and its Q rows with it; the densest rows are the
  cheapest to give away.
- *Fan-out.* Queries behind a worker's home that belong to a document beginning before the home's end read its keys
  there. Each worker that computes a part of them for one KV head receives those keys, and no worker can compute more
  than it may hold.
"""

from __future__ import annotations

import numpy as np

from odb_libra_lightning.libra.load import causal_pairs
from odb_libra_lightning.libra.pool_plan import PoolPlan
from odb_libra_lightning.libra.tiles import sum_by


def busiest_floor(plan: PoolPlan) -> int:
    """Bytes below which the busiest worker's larger direction cannot come, for workers no heavier than the plan's.

    A lower bound on `PoolPlan.busiest_bytes` of every placement of the same documents and homes, however finely they
    are cut, whose heaviest worker is no heavier than that of `plan`. With a sliding window only the surplus counts.
    """
    tiles, layout = plan.tiles, plan.layout
    capacity = int(plan.worker_load.max())
    home_load = sum_by(tiles.block_home, tiles.block_pairs, plan.num_workers) * layout.num_heads
    floor = 0.0
    for worker in range(plan.num_workers):
        start, stop = tiles.home_start[worker : worker + 2]
        sent = _surplus_rows(plan, worker, int(home_load[worker]) - capacity) * layout.num_heads
        if layout.window is None:
            behind = (tiles.segment_start >= stop) & (tiles.segment_key_start < stop)
            if behind.any():
                document = tiles.segment_key_start[behind][0]
                queries = tiles.segment_start[behind][0] - document, tiles.segment_stop[behind][-1] - document
                away = causal_pairs(*map(int, queries)) * layout.num_heads - capacity  # one worker is the home itself
                sent += max(away, 0) * 2 * int(stop - max(start, document)) / capacity
        floor = max(floor, float(sent) * layout.row_bytes)
    return int(floor)


def _surplus_rows(plan: PoolPlan, worker: int, surplus: int) -> float:
    """The fewest rows of a worker's home that bear so much work."""
    if surplus <= 0:
        return 0.0
    tiles, layout = plan.tiles, plan.layout
    own = np.flatnonzero(tiles.block_home[tiles.segment_block] == worker)
    # A query at position p of its document sees p + 1 keys. Under a window the keys of a segment begin later, and its
    # last queries see a window's worth.
    seen = np.concatenate(
        [
            np.arange(start, stop) - key_start + 1
            for start, stop, key_start in zip(
                tiles.segment_start[own], tiles.segment_stop[own], tiles.segment_key_start[own], strict=True
            )
        ]
    )
    if layout.window is not None:
        seen = np.minimum(seen, layout.window)
    densest = np.cumsum(np.sort(seen)[::-1]) * layout.num_heads
    rows = int(np.searchsorted(densest, surplus))
    before = densest[rows - 1] if rows else 0
    return float(rows + (surplus - before) / (densest[rows] - before))
