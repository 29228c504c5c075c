"""Seconds of kernels, of exchanges, and of the pipeline that lays one beside the other: pure functions.

A model, not a measurement: workers that exchange start together, links are not shared with other traffic, and a
segment costs the same whatever else is in the call. Source: Libra (arXiv:2607.23250), sections 6.2 and 6.3, for the
pipeline; the paper gives no latency model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odb_libra_lightning.libra.calibration import Calibration

Seconds = NDArray[np.float64]


def kernel_seconds(
    pairs: ArrayLike, rows: ArrayLike, *, heads: int, head_dim: int, calibration: Calibration
) -> Seconds:
    """Forward seconds of each segment of a varlen attention call, the launch not included.

    `4 * head_dim * pairs * heads / (peak_flops * efficiency(rows, heads))`: two matrix products of 2 FLOPs an element.

    Example:
        >>> from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION
        >>> one, two = (kernel_seconds([10**9], [4096], heads=heads, head_dim=128, calibration=DEFAULT_CALIBRATION)
        ...             for heads in (8, 16))
        >>> 1.9 < float(two[0] / one[0]) < 2  # more heads a call are a little more efficient
        True

    Args:
        pairs: query-key pairs of one head in each segment.
        rows: query rows of each segment, above 0.
        heads: query heads of the call.
        head_dim: elements of a head.
        calibration: of the workers.
    """
    speed = calibration.peak_flops * calibration.efficiency_at(rows, heads)
    seconds: Seconds = 4.0 * head_dim * heads * np.asarray(pairs, dtype=np.float64) / speed
    return seconds


def exchange_seconds(bytes_between: NDArray[np.int64], *, first_worker: int, calibration: Calibration) -> Seconds:
    """Seconds that each worker needs for its part of an all-to-all: float64 `[W]`.

    Within the node and across nodes `alpha + max(sent, received) / beta`, both at once, so the larger of the two; 0
    where a worker sends and receives nothing. A collective ends with its slowest worker: take the maximum.

    Args:
        bytes_between: bytes from each worker to each, `[source, destination]`; the diagonal does not travel.
        first_worker: number in the cluster of the first; nodes hold `calibration.workers_per_node` consecutive ones.
        calibration: of the links.

    Complexity: O(W^2).
    """
    workers = len(bytes_between)
    node = (first_worker + np.arange(workers)) // calibration.workers_per_node
    within = node[:, None] == node
    inside = np.where(within, bytes_between, 0)
    np.fill_diagonal(inside, 0)
    outside = np.where(within, 0, bytes_between)
    intra = _link_seconds(inside, calibration.intra_node_alpha, calibration.intra_node_beta)
    inter = _link_seconds(outside, calibration.inter_node_alpha, calibration.inter_node_beta)
    seconds: Seconds = np.maximum(intra, inter)
    return seconds


def _link_seconds(bytes_between: NDArray[np.int64], alpha: float, beta: float) -> Seconds:
    larger = np.maximum(bytes_between.sum(axis=0), bytes_between.sum(axis=1))
    seconds: Seconds = np.where(larger > 0, alpha + larger / beta, 0.0)
    return seconds


def pipeline_seconds(compute: ArrayLike, dispatch: ArrayLike, returned: ArrayLike) -> float:
    """Seconds until all workers have the last result, with `M` chunks transferred beside the computation of others.

    Chunk 0 is dispatched. When the slowest worker starts to compute chunk `m`, the exchange of chunk `m + 1` is issued
    and behind it the return of chunk `m - 1`. Exchanges are collectives and run one at a time, in the order of
    issue; a worker computes chunk `m` when it is there and chunk `m - 1` is done; the last return stands alone.
    With `D`, `C` and `R` for dispatch, computation and return, `S_m` the start of chunk `m`, `d_m` and `r_m` the ends
    of its exchanges:

        S_m[w] = max(S_(m-1)[w] + C_(m-1)[w], d_m)
        d_0 = D_0;  d_(m+1) = max(max_w S_m[w], r_(m-2)) + D_(m+1)
        r_(m-1) = max(max_w S_m[w], d_(m+1)) + R_(m-1)
        total = max(max_w (S_(M-1)[w] + C_(M-1)[w]), r_(M-2)) + R_(M-1)

    For equal chunks on equal workers whose computation covers `D + R` that is `D + M * C + R`: the first dispatch and
    the last return are what cannot be hidden (Libra, section 6.3). With one chunk nothing is hidden.

    Example:
        >>> pipeline_seconds([[8.0], [8.0]], [1.0, 1.0], [2.0, 2.0])
        19.0

    Args:
        compute: seconds of each chunk on each worker, `[M, W]`.
        dispatch: seconds of the exchange before each chunk, `[M]`.
        returned: seconds of the exchange behind each chunk, `[M]`.

    Complexity: O(M W).
    """
    chunks = np.asarray(compute, dtype=np.float64)
    dispatches, returns = np.asarray(dispatch, dtype=np.float64), np.asarray(returned, dtype=np.float64)
    count = len(chunks)
    arrived = exchanges_done = float(dispatches[0])
    done = np.zeros(chunks.shape[1])
    for m in range(count):
        start = np.maximum(done, arrived)
        issued = float(start.max())
        if m + 1 < count:
            arrived = exchanges_done = max(issued, exchanges_done) + float(dispatches[m + 1])
        if m > 0:
            exchanges_done = max(issued, exchanges_done) + float(returns[m - 1])
        done = start + chunks[m]
    return max(float(done.max()), exchanges_done) + float(returns[-1])
