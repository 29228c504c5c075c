"""What one attention layer costs, forward and backward, under Libra and under what it is compared with. Pure.

Each function prices one group of workers that exchange with one another: a replica for Ulysses and the ring, a pool for
a plan. Bytes are those of a forward pass; backward moves as many again under Ulysses and in a plan, the same way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_libra_lightning.libra.calibration import Calibration
from odb_libra_lightning.libra.latency import Seconds, exchange_seconds, kernel_seconds, pipeline_seconds
from odb_libra_lightning.libra.load import causal_pairs
from odb_libra_lightning.libra.pool_plan import Phase, PoolPlan
from odb_libra_lightning.libra.whole_numbers import checked_count

_SUM_BYTES = 4  # of an element that partial results are added up in: float32


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """An attention layer and the workers of a replica that share it.

    Attributes:
        context_parallel: workers of a replica, `CP`.
        num_heads: query heads, `h_q`.
        num_kv_heads: KV heads, `h_kv`; divides `num_heads`.
        head_dim: elements of a head.
        bytes_per_element: 2 for bf16.
        window: keys that a query sees at the most, its own included; None: all before it.

    Raises:
        ValueError: a number that is no whole number of at least 1, or far too large for a layer.
    """

    context_parallel: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    window: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name != "window":
                object.__setattr__(self, field.name, checked_count(field.name, value))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return self.head_dim * self.bytes_per_element


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """One layer's attention on one group of workers.

    Attributes:
        seconds: forward and backward, until the last worker of the group is done.
        bytes_moved: what all its workers send in forward.
        busiest_bytes: the larger of what a worker sends and receives in forward, at the worker where that is most.
    """

    seconds: float
    bytes_moved: int
    busiest_bytes: int


def check_ulysses(shape: AttentionShape) -> None:
    """Check that the query heads can be dealt to the replica's workers.

    Raises:
        ValueError: they cannot.
    """
    if shape.num_heads % shape.context_parallel:
        raise ValueError(
            f"context_parallel={shape.context_parallel} does not divide num_heads={shape.num_heads}, which `ulysses` "
            "and `wlb` need: leave them out of the methods, or change one of the two"
        )


def ulysses_cost(
    document_lengths: Sequence[int], rows: int, shape: AttentionShape, *, first_worker: int, calibration: Calibration
) -> AttentionCost:
    """DeepSpeed Ulysses: an all-to-all from rows to heads, whole documents on each worker, an all-to-all back.

    A worker computes `h_q / CP` query heads and receives the KV heads that they read, so with fewer KV heads than
    workers a KV head goes to several. Nothing is overlapped. Source: Jacobs et al., arXiv:2309.14509.

    Args:
        document_lengths: documents of the packed sequence, tokens, each at least 1; none: it has padding only.
        rows: rows of the packed sequence, padding included; they all travel.
        shape: of the layer.
        first_worker: number of the replica's first worker in the cluster.
        calibration: of the cluster.
    """
    check_ulysses(shape)
    workers, width = shape.context_parallel, shape.num_heads // shape.context_parallel
    home = np.diff(np.arange(workers + 1) * rows // workers)
    first = np.arange(workers) * width
    group = shape.num_heads // shape.num_kv_heads
    kv_heads = -(-(first + width) // group) - first // group
    queries = home[:, None] * np.full(workers, width) * shape.row_bytes
    dispatched = queries + 2 * home[:, None] * kv_heads * shape.row_bytes
    for bytes_between in (queries, dispatched):
        np.fill_diagonal(bytes_between, 0)
    one_way, with_keys = (
        float(exchange_seconds(between, first_worker=first_worker, calibration=calibration).max())
        for between in (queries, dispatched)
    )
    lengths = np.asarray(document_lengths, dtype=np.int64)
    forward = 0.0
    if lengths.size:
        pairs = causal_pairs(np.zeros_like(lengths), lengths, window=shape.window)
        seconds = kernel_seconds(pairs, lengths, heads=width, head_dim=shape.head_dim, calibration=calibration)
        forward = float(seconds.sum())
    compute = 2 * calibration.launch_seconds + forward * (1 + calibration.backward_ratio)
    sent = dispatched.sum(axis=1) + queries.sum(axis=0)
    received = dispatched.sum(axis=0) + queries.sum(axis=1)
    return AttentionCost(
        seconds=compute + 2 * (with_keys + one_way),
        bytes_moved=int(sent.sum()),
        busiest_bytes=int(max(sent.max(), received.max())),
    )


def ring_cost(
    document_lengths: Sequence[int], rows: int, shape: AttentionShape, *, first_worker: int, calibration: Calibration
) -> AttentionCost:
    """Zigzag ring attention on packed documents: K and V go round the replica beside the computation.

    Every document is cut in `2 CP` equal parts and a worker holds the parts `c` and `2 CP - 1 - c`, so that work is
    even; that holds for full causal attention and is taken for granted under a window. The price is in the segments,
    which have `length / (2 CP)` rows. Forward passes K and V on `CP - 1` times; backward does so again and passes
    their gradients on `CP` times, in float32 where K and V have fewer bytes, since every worker adds to them. Rows are
    taken to stand in zigzag order from the start, as a trainer shards them: moving them into it and home again, which
    a ring behind any other shards must do, is not priced. Source: Liu et al., arXiv:2310.01889; zigzag: Brandon et
    al., arXiv:2311.09431.

    Args:
        document_lengths: as in `ulysses_cost`.
        rows: rows of the packed sequence, padding included.
        shape: of the layer.
        first_worker: number of the replica's first worker in the cluster.
        calibration: of the cluster.
    """
    workers = shape.context_parallel
    lengths = np.asarray(document_lengths, dtype=np.int64)
    forward = 0.0
    if lengths.size:
        pairs = causal_pairs(np.zeros_like(lengths), lengths, window=shape.window) / workers
        seconds = kernel_seconds(
            pairs, lengths / (2 * workers), heads=shape.num_heads, head_dim=shape.head_dim, calibration=calibration
        )
        forward = float(seconds.sum())
    passed = -(-rows // workers) * 2 * shape.num_kv_heads * shape.row_bytes
    gradients = passed // shape.bytes_per_element * max(shape.bytes_per_element, _SUM_BYTES)
    neighbours = np.zeros((workers, workers), dtype=np.int64)
    hops = []
    for handed_on in (passed, gradients):
        neighbours[np.arange(workers), (np.arange(workers) + 1) % workers] = handed_on
        hops.append(float(exchange_seconds(neighbours, first_worker=first_worker, calibration=calibration).max()))
    keys = np.full(workers, hops[0])
    keys[0] = 0  # the worker's own are there
    step = np.full((workers, 1), calibration.launch_seconds)
    ahead = pipeline_seconds(step + forward / workers, keys, np.zeros(workers))
    back = pipeline_seconds(step + forward * calibration.backward_ratio / workers, keys, np.full(workers, hops[1]))
    return AttentionCost(
        seconds=ahead + back,
        bytes_moved=workers * (workers - 1) * passed,
        busiest_bytes=(workers - 1) * passed,
    )


def pool_cost(plan: PoolPlan, *, chunks: int, first_worker: int, calibration: Calibration) -> AttentionCost:
    """A plan, its heads in `chunks` slices of which one is transferred beside the computation of another.

    Args:
        plan: of the pool; its own number of chunks does not matter.
        chunks: slices of a tile's query heads, `M`; 1: nothing is overlapped.
        first_worker: number of the pool's first worker in the cluster.
        calibration: of the cluster.

    Raises:
        ValueError: `chunks` does not divide the query heads of a tile.

    Complexity: O(segments + tiles + M (transfers + W^2)).
    """
    plan = plan.with_chunks(chunks)
    forward = pool_kernel_seconds(plan, calibration)
    launch = np.where(forward > 0, calibration.launch_seconds, 0.0)

    def exchanges(*phases: Phase) -> list[float]:
        """Seconds of the exchanges of each chunk, one after the other."""
        seconds = []
        for chunk in range(chunks):
            between = (plan.elements(phase, chunk) * plan.layout.bytes_per_element for phase in phases)
            each = (exchange_seconds(b, first_worker=first_worker, calibration=calibration).max() for b in between)
            seconds.append(float(sum(each)))
        return seconds

    def pass_seconds(each: Seconds, dispatch: list[float], returned: list[float]) -> float:
        return pipeline_seconds(np.tile(each + launch, (chunks, 1)), dispatch, returned)

    queries, outputs = exchanges("queries"), exchanges("outputs")
    return AttentionCost(
        seconds=pass_seconds(forward, exchanges("queries", "keys"), outputs)
        + pass_seconds(forward * calibration.backward_ratio, queries, exchanges("outputs", "key_gradients")),
        bytes_moved=plan.bytes_moved,
        busiest_bytes=plan.busiest_bytes,
    )


def pool_kernel_seconds(plan: PoolPlan, calibration: Calibration) -> Seconds:
    """Forward seconds of one chunk's kernel call on each worker, the launch not included: float64 `[W]`.

    A segment is priced by its own rows and by the heads of the call, `h_q / (H M)`.
    """
    layout, segments = plan.layout, plan.kernel_segments
    start, stop = segments.start - segments.key_start, segments.stop - segments.key_start
    seconds = kernel_seconds(
        causal_pairs(start, stop, window=layout.window),
        stop - start,
        heads=layout.shard_heads // layout.chunks,
        head_dim=layout.head_dim,
        calibration=calibration,
    )
    return np.bincount(segments.worker, seconds, plan.num_workers).astype(np.float64)
