"""Plans of the coming micro-batches, made by a thread beside data loading.

A plan needs document lengths alone, which are known before the data is. So it is ready when its micro-batch is, and the
step does not wait for it. Source: Libra (arXiv:2607.23250), section 5.4.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan
from odb_libra_lightning.libra.worker_plan import plan_worker

# Of each packed sequence of a pool, the lengths of its documents.
PoolLengths: TypeAlias = Sequence[Sequence[int]]
_Lengths: TypeAlias = tuple[tuple[int, ...], ...]

# How long closing waits for a source of lengths that does not answer.
_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """A plan and what it cost.

    Attributes:
        plan: the plan of this worker, for all layers; the same object as before where the lengths are the same.
        micro_batch: its number, from 0.
        planning_s: seconds that the thread took for it; 0 where the plan was there already.
        waited_s: seconds that the caller waited for it.
    """

    plan: PreparedPlan
    micro_batch: int
    planning_s: float
    waited_s: float


class Planner:
    """Makes the plans of one worker, `depth` ahead, in a thread of its own.

    The thread ends with `close()`, with the `with` block, when nobody holds the planner any longer, and after an error.

    Example:
        >>> layout = PoolLayout(context_parallel=1, block_size=8, head_shards=1, num_heads=4, num_kv_heads=4,
        ...                     head_dim=8, bytes_per_element=2)
        >>> with Planner(layout, worker=1, lengths=[[[8, 8], [16]], [[4, 12], [16]]]) as planner:
        ...     [planner.next_plan().plan.work.rows for _ in range(2)]
        [16, 16]

    Args:
        layout: settings of the plans.
        worker: number of this worker in its pool.
        lengths: document lengths of every micro-batch to come, in order; read in the thread, and so it should hold no
            reference to the planner and never wait for ever. None: they come by `feed`.
        depth: plans that are made ahead, and with `feed` micro-batches that may be fed ahead.
        device: where the indices of the plans are copied to, on the stream that is current here; None: on first use.

    Every micro-batch must suit the layout: a block size that no home of a short one reaches is an error, as in
    `plan_pool`.

    Raises:
        ValueError: a depth below 1.
    """

    def __init__(
        self,
        layout: PoolLayout,
        worker: int,
        *,
        lengths: Iterable[PoolLengths] | None = None,
        depth: int = 2,
        device: torch.device | None = None,
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth={depth!r}: expected a whole number of plans to make ahead, at least 1")
        if device is not None and str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
        self.waited_s = 0.0
        self.planning_s = 0.0
        self._taken = 0
        self._fed = 0
        self._is_fed = lengths is None
        self._process = os.getpid()
        stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
        self._shared = _Shared(depth=depth)
        make = _Maker(layout=layout, worker=worker, device=device, stream=stream)
        source = _fed(self._shared) if lengths is None else lengths
        # The thread holds what it shares with the planner, not the planner: nobody else may keep that alive.
        thread = threading.Thread(
            target=_plan_ahead, args=(self._shared, source, make), name="odb-libra-planner", daemon=True
        )
        self._close = weakref.finalize(self, _end, self._shared, thread, os.getpid())
        thread.start()

    def feed(self, lengths: PoolLengths) -> None:
        """Name the lengths of the next micro-batch to plan.

        Raises:
            TypeError: lengths that are no lists of numbers.
            RuntimeError: more than `depth` micro-batches fed whose plans have not been taken, or a planner that was
                given all lengths when it was made, or is closed.
        """
        if not self._is_fed:
            raise RuntimeError("this planner reads its lengths from what it was given: make one without, to feed it")
        self._check_open()
        if self._fed - self._taken >= self._shared.depth:
            raise RuntimeError(
                f"{self._fed - self._taken} micro-batches are fed and their plans not taken: feed no more than "
                f"depth={self._shared.depth} ahead, or pass a larger depth"
            )
        with self._shared.changed:
            self._shared.fed.append(_as_tuples(lengths))  # a copy: the caller may use the list again
            self._shared.changed.notify_all()
        self._fed += 1

    def next_plan(self, lengths: PoolLengths | None = None) -> PlannedBatch:
        """The plan of the next micro-batch, waited for where it is not made yet.

        Args:
            lengths: document lengths that the micro-batch turned out to have; compared with those planned for.

        Raises:
            ValueError: other lengths than were planned for. The plan stays the next one.
            RuntimeError: planning this micro-batch failed, the cause says how and where; no lengths for it; or a closed
                planner.
        """
        self._check_open()
        if self._is_fed and self._fed == self._taken:
            raise RuntimeError(f"micro-batch {self._taken}: its lengths have not been fed")
        shared, number = self._shared, self._taken
        begin = time.perf_counter()
        with shared.changed:
            shared.changed.wait_for(lambda: shared.made or shared.ended)
            made = shared.made[0] if shared.made else None
        waited = time.perf_counter() - begin
        if made is None:
            raise RuntimeError(f"micro-batch {number}: the lengths that the planner was given end before it")
        if isinstance(made, BaseException):
            raise RuntimeError(f"micro-batch {number}: no plan, {type(made).__name__}: {made}") from made
        if lengths is not None:
            _check_same(number, _as_tuples(lengths), made.lengths)
        with shared.changed:
            shared.made.popleft()
            shared.changed.notify_all()
        self._taken += 1
        self.waited_s += waited
        self.planning_s += made.seconds
        return PlannedBatch(plan=made.plan, micro_batch=number, planning_s=made.seconds, waited_s=waited)

    def close(self) -> None:
        """End the thread; again does nothing."""
        self._close()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("the planner is closed")
        if os.getpid() != self._process:
            raise RuntimeError(
                "the planner's thread is in the process that made it; a forked one makes its own planner"
            )


@dataclass(frozen=True, kw_only=True)
class _Made:
    plan: PreparedPlan
    lengths: _Lengths
    seconds: float


@dataclass(kw_only=True)
class _Shared:
    """What the thread and the planner both hold; `changed` guards it."""

    depth: int
    fed: deque[PoolLengths] = field(default_factory=deque)
    made: deque[_Made | BaseException] = field(default_factory=deque)
    closing: bool = False
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass(kw_only=True)
class _Maker:
    """Makes plans; remembers the last."""

    layout: PoolLayout
    worker: int
    device: torch.device | None
    stream: torch.cuda.Stream | None
    last: _Made | None = None

    def make(self, lengths: PoolLengths) -> _Made:
        begin = time.perf_counter()
        wanted = _as_tuples(lengths)
        if self.last is not None and self.last.lengths == wanted:
            return _Made(plan=self.last.plan, lengths=wanted, seconds=0.0)
        pool = layout_plan(wanted, self.layout)
        plan = PreparedPlan(plan=pool, worker=self.worker, work=plan_worker(pool, self.worker))
        segments = plan.segments
        if self.device is not None:
            # On the stream that computes with them: so they are complete when it comes to them, and their memory is
            # not given to a later plan before it has read them.
            with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
                plan.index(self.device)
                segments.cu_seqlens(self.device)
        self.last = _Made(plan=plan, lengths=wanted, seconds=time.perf_counter() - begin)
        return self.last


def _plan_ahead(shared: _Shared, source: Iterable[PoolLengths], maker: _Maker) -> None:
    """The thread: plans until the lengths end, an error, or closing."""
    made: _Made | BaseException
    try:
        for lengths in source:
            made = maker.make(lengths)
            with shared.changed:
                shared.made.append(made)
                shared.changed.notify_all()
                shared.changed.wait_for(lambda: shared.closing or len(shared.made) < shared.depth)
                if shared.closing:
                    return
    except BaseException as error:
        with shared.changed:
            shared.made.append(error)
    finally:
        with shared.changed:
            shared.ended = True
            shared.changed.notify_all()


def _fed(shared: _Shared) -> Iterator[PoolLengths]:
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.closing or shared.fed)
            if shared.closing:
                return
            lengths = shared.fed.popleft()
        yield lengths


def _end(shared: _Shared, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # a forked process, in which the thread is not
    with shared.changed:
        shared.closing = True
        shared.changed.notify_all()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_CLOSE_S)


def _as_tuples(lengths: PoolLengths) -> _Lengths:
    return tuple(tuple(map(int, sequence)) for sequence in lengths)


def _check_same(number: int, asked: _Lengths, planned: _Lengths) -> None:
    if asked == planned:
        return
    problem = f"micro-batch {number} has other documents than its plan was made for"
    if len(asked) != len(planned):
        raise ValueError(f"{problem}: {len(asked)} packed sequences, planned {len(planned)}")
    sequence = next(at for at, (a, p) in enumerate(zip(asked, planned, strict=True)) if a != p)
    a, p = asked[sequence], planned[sequence]
    same = next((at for at, (x, y) in enumerate(zip(a, p, strict=False)) if x != y), min(len(a), len(p)))
    raise ValueError(
        f"{problem}: packed sequence {sequence} differs from document {same} on, it has {len(a)} documents of "
        f"{sum(a)} tokens and {len(p)} of {sum(p)} were planned; give the planner the lengths in the order of the data"
    )
