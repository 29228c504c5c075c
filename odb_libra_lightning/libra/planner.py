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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.pool_plan import layout_plan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan
from odb_libra_lightning.libra.worker_plan import plan_worker

# Of each packed sequence of a pool, the lengths of its documents.
PoolLengths: TypeAlias = Sequence[Sequence[int]]
_Lengths: TypeAlias = tuple[tuple[int, ...], ...]
PlansByLayout: TypeAlias = Mapping[PoolLayout, PreparedPlan]

# How long closing waits for a source of lengths that does not answer.
_CLOSE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """The plans of a micro-batch and what they cost.

    Attributes:
        plans: the plans of this worker by their settings; the same objects as before where the lengths are the same.
        lengths: document lengths that they were made for.
        micro_batch: its number, from 0.
        planning_s: seconds that the thread took for them; 0 where they were there already.
        waited_s: seconds that the caller waited for them.
    """

    plans: PlansByLayout
    lengths: PoolLengths
    micro_batch: int
    planning_s: float
    waited_s: float

    @property
    def plan(self) -> PreparedPlan:
        """The plan for all layers of a model whose layers have the same settings.

        Raises:
            LookupError: there are several, or none.
        """
        if len(self.plans) != 1:
            raise LookupError(f"micro-batch {self.micro_batch} has {len(self.plans)} plans: ask for one by its layout")
        return next(iter(self.plans.values()))


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
        layout: settings of the plans; several for a model whose layers differ, as in their sliding window; none where
            they are not known yet (`expect`).
        worker: number of this worker in its pool.
        lengths: document lengths of every micro-batch to come, in order; read in the thread, and so it should hold no
            reference to the planner and never wait for ever. None: they come by `feed`.
        depth: plans that are made ahead, and with `feed` micro-batches that may be fed ahead.
        device: where the indices of the plans are copied to, on the stream that is current here; None: on first use.

    Blocks of a micro-batch in which no home has `block_size` rows are as large as its largest home.

    Raises:
        ValueError: a depth below 1.
    """

    def __init__(
        self,
        layout: PoolLayout | Sequence[PoolLayout],
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
        self._layouts = [layout] if isinstance(layout, PoolLayout) else list(layout)
        make = _Maker(layouts=self._layouts, worker=worker, device=device, stream=stream)
        source = _fed(self._shared) if lengths is None else lengths
        # The thread holds what it shares with the planner, not the planner: nobody else may keep that alive.
        thread = threading.Thread(
            target=_plan_ahead, args=(self._shared, source, make), name="odb-libra-planner", daemon=True
        )
        self._close = weakref.finalize(self, _end, self._shared, thread, os.getpid())
        thread.start()

    def expect(self, layout: PoolLayout) -> None:
        """Make a plan of these settings too, for micro-batches whose planning has not begun."""
        if layout not in self._layouts:
            self._layouts.append(layout)

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
        return PlannedBatch(
            plans=made.plans, lengths=made.lengths, micro_batch=number, planning_s=made.seconds, waited_s=waited
        )

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
    plans: PlansByLayout
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

    layouts: list[PoolLayout]  # the planner's own, which grows
    worker: int
    device: torch.device | None
    stream: torch.cuda.Stream | None
    last: _Made | None = None

    def make(self, lengths: PoolLengths) -> _Made:
        begin = time.perf_counter()
        wanted = _as_tuples(lengths)
        layouts = tuple(self.layouts)
        if self.last is not None and self.last.lengths == wanted and len(self.last.plans) == len(layouts):
            return _Made(plans=self.last.plans, lengths=wanted, seconds=0.0)
        # On the stream that computes with them: so they are complete when it comes to them, and their memory is not
        # given to a later plan before it has read them.
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            plans = {layout: make_plan(wanted, layout, self.worker, device=self.device) for layout in layouts}
        self.last = _Made(plans=plans, lengths=wanted, seconds=time.perf_counter() - begin)
        return self.last


def make_plan(
    lengths: PoolLengths, layout: PoolLayout, worker: int, *, device: torch.device | None = None
) -> PreparedPlan:
    """One worker's plan for a micro-batch of any lengths, its indices on a device.

    Blocks are `layout.block_size` rows, or as many as the largest home has where none has so many.

    Args:
        lengths: document lengths of every packed sequence of the pool.
        layout: the settings.
        worker: number of the worker in its pool.
        device: where the indices are copied to; None: on first use.
    """
    largest_home = max(-(-sum(sequence) // layout.context_parallel) for sequence in lengths)
    if 0 < largest_home < layout.block_size:
        layout = replace(layout, block_size=largest_home)
    pool = layout_plan(lengths, layout)
    plan = PreparedPlan(plan=pool, worker=worker, work=plan_worker(pool, worker))
    segments = plan.segments
    if device is not None:
        plan.index(device)
        segments.cu_seqlens(device)
    return plan


def _plan_ahead(shared: _Shared, source: Iterable[PoolLengths], maker: _Maker) -> None:
    """The thread: plans until the lengths end, an error, or closing."""
    made: _Made | BaseException
    try:
        if maker.device is not None and maker.device.type == "cuda":
            torch.cuda.set_device(maker.device)  # of this thread: on leaving a stream it would open GPU 0
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
