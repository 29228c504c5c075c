"""A run's pools at work: from a pack to this process's shard of it, its plan, and the attention that follows the plan.

One session serves one `fit`, `validate` or `test` of a strategy. It is what `core_attention` attends by.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from odb_libra_lightning.baselines.attentions import attention_for
from odb_libra_lightning.libra.attention import computed_dtype
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.kernel_times import KernelTimes, timed
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.layout import PoolLayout
from odb_libra_lightning.libra.load import attention_load
from odb_libra_lightning.libra.packs import Pack, Shard, read_pack, shard_pack
from odb_libra_lightning.libra.planner import PoolLengths, make_plan
from odb_libra_lightning.libra.prepared_plan import PreparedPlan
from odb_libra_lightning.libra.process_groups import PoolGroups, RankLayout, new_pool_groups
from odb_libra_lightning.strategies.libra_options import LibraOptions
from odb_libra_lightning.strategies.micro_batch_facts import MicroBatchFacts
from odb_libra_lightning.strategies.plans_ahead import PlansAhead

_FACTS_KEPT = 4096


@dataclass(kw_only=True)
class _MicroBatch:
    """The pack that is computed on: its shard, and what attention needs."""

    shard: Shard
    groups: PoolGroups
    worker: int
    lengths: PoolLengths
    plans: dict[PoolLayout, PreparedPlan]
    kernel: AttentionKernel
    times: KernelTimes | None = None  # None in evaluation
    planning_s: float = 0.0
    waited_s: float = 0.0
    attended: bool = False


@dataclass(kw_only=True, eq=False)
class PoolSession:
    """The pools of a run. Making one, and closing it, are collectives of all processes.

    Attributes:
        options: the settings.
        layout: pools and replicas.
        rank: global rank of this process.
        device: where it computes.
        facts: facts about the training micro-batches so far, the latest last.
        position_ids: positions of the current shard, `[1, rows]`, as the module was given them.
    """

    options: LibraOptions
    layout: RankLayout
    rank: int
    device: torch.device
    facts: deque[MicroBatchFacts] = field(default_factory=lambda: deque(maxlen=_FACTS_KEPT))
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        limit = self.options.pool_timeout
        groups = new_pool_groups(
            context_parallel=self.layout.context_parallel, pool_size=self.layout.pool_size, timeout=limit
        )
        self._training_groups = groups
        # Replicas may evaluate on different numbers of packs, so there each attends for itself.
        self._evaluation_groups = PoolGroups(
            layout=replace(self.layout, pool_size=1), rank=self.rank, pool=groups.replica, replica=groups.replica
        )
        layout = self.layout
        pools = [layout.pool_ranks(pool) for pool in range(layout.num_pools)]
        self._pool_control = _control_group(pools, self.rank, limit)
        # A broadcast, and the exchange of lengths in its thread, must not meet in one group.
        replicas = [layout.replica_ranks(replica) for replica in range(layout.num_replicas)]
        self._replica_control = _control_group(replicas, self.rank, limit)
        self._layouts: dict[tuple[int, int, int, int, int | None], PoolLayout] = {}
        self._kernel = kernel_for(self.device, self.options.kernel)
        self._plans = PlansAhead(
            layout, self.rank, self._pool_control, device=None if self.device.type == "cpu" else self.device
        )
        self._trained = 0  # micro-batches
        self._unsettled: deque[KernelTimes] = deque()
        self._current: _MicroBatch | None = None

    @property
    def loss_share(self) -> float:
        """Factor for the local loss of the current micro-batch, see `Shard`."""
        return (
            1.0 if self._current is None or self._current.shard.loss_share is None else self._current.shard.loss_share
        )

    @property
    def attended(self) -> bool:
        """Whether the model has called `core_attention` on the current micro-batch."""
        return self._current is not None and self._current.attended

    def begin_pass(self) -> None:
        """A loader begins anew, see `PlansAhead.begin_pass`."""
        self._plans.begin_pass()

    def announce(self, batch: Any) -> None:
        """A training batch is drawn, and will be taken after those announced before: its plan can be made."""
        self._plans.announce(read_pack(batch))

    def take(self, batch: Any, *, training: bool, shared: bool) -> dict[str, Any]:
        """This process's shard of a batch, which is computed on from now on.

        Args:
            batch: the pack.
            training: whether it is trained on, in step with the other replicas of the pool.
            shared: whether all processes of the replica are known to hold the same batch. Otherwise they get the
                first one's.

        Raises:
            TypeError, ValueError: it is no pack.
            RuntimeError: no plan, or a process of the pool that does not answer.
        """
        if not shared:
            batch = self._of_the_leader(batch)
        pack = read_pack(batch)
        shard = shard_pack(
            batch,
            pack,
            context_parallel=self.layout.context_parallel,
            cp_rank=self.layout.cp_rank_of(self.rank),
            causal_shift=self.options.causal_shift,
            ignore_index=self.options.ignore_index,
        )
        self._current = self._to_train(pack, shard) if training else self._to_evaluate(pack, shard)
        return shard.batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> Tensor:
        """Attention over the current micro-batch, see `core_attention`.

        Raises:
            RuntimeError: outside a step.
            ValueError: rows that are not those of the shard, or heads that the options do not fit.
        """
        current = self._current
        if current is None:
            raise RuntimeError(
                f"rank {self.rank}: attention is called before the first batch, and under context parallelism its "
                "documents are those of a batch"
            )
        rows = current.shard.tokens
        if len(q) != rows + current.shard.blank_rows:
            raise ValueError(
                f"rank {self.rank}: attention is called on {len(q)} rows, and this process holds {rows} of the pack "
                f"and {current.shard.blank_rows} blank: keep the batch's rows as they are between batch and attention"
            )
        plan = self._plan(current, self._pool_layout(q, k, window))
        current.attended = True
        # Where a replica attends for itself, a pool is no longer all of them.
        pooled = current.groups is self._training_groups or self.options.attention != "distca"
        out = attention_for(self.options.attention if pooled else "libra")(
            q[:rows],
            k[:rows],
            v[:rows],
            plan,
            groups=current.groups,
            kernel=current.kernel,
            scale=scale,
            remember=self.options.remember,
        )
        return pad(out, (0, 0, 0, 0, 0, current.shard.blank_rows)) if current.shard.blank_rows else out

    def close(self, *, failed: bool = False) -> None:
        """End the planner's thread, and give back the process groups.

        Args:
            failed: another process may be gone: its groups are left to the end of this one where closing would wait.
        """
        self._current = self.position_ids = None
        self._plans.close()
        # These first: a thread that still waits in one is free then, and holds up nothing below.
        for group in (self._pool_control, self._replica_control):
            if group is not None:
                dist.destroy_process_group(group)
        self._pool_control = self._replica_control = None
        if not (failed and self.device.type == "cuda"):
            self._training_groups.close()

    def _to_train(self, pack: Pack, shard: Shard) -> _MicroBatch:
        if shard.loss_share is None:
            raise ValueError(
                f"rank {self.rank}: the batch has no labels, so nobody knows how many rows of each process bear loss: "
                "give it labels [1, tokens], those of the last rows included, and have the loss be the mean over them"
            )
        planned = self._plans.take(pack)
        while self._unsettled and self._unsettled[0].settle():  # gives its marks back, whether or not they are read
            self._unsettled.popleft()
        times = KernelTimes()
        self._unsettled.append(times)
        return _MicroBatch(
            shard=shard,
            groups=self._training_groups,
            worker=self.layout.worker_of(self.rank),
            lengths=planned.lengths,
            plans=dict(planned.plans),
            kernel=timed(self._kernel, times),
            times=times,
            planning_s=planned.planning_s,
            waited_s=planned.waited_s,
        )

    def _to_evaluate(self, pack: Pack, shard: Shard) -> _MicroBatch:
        return _MicroBatch(
            shard=shard,
            groups=self._evaluation_groups,
            worker=self.layout.cp_rank_of(self.rank),
            lengths=[pack.documents],
            plans={},
            kernel=self._kernel,
        )

    def _pool_layout(self, q: Tensor, k: Tensor, window: int | None) -> PoolLayout:
        heads = (q.shape[1], k.shape[1], q.shape[2], computed_dtype(q).itemsize, window)
        if heads not in self._layouts:
            num_heads, num_kv_heads, head_dim, element_bytes, _ = heads
            self._layouts[heads] = self.options.pool_layout(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                bytes_per_element=element_bytes,
                window=window,
            )
            self._plans.expect([self._layouts[heads]])
        return self._layouts[heads]

    def _plan(self, current: _MicroBatch, layout: PoolLayout) -> PreparedPlan:
        """The plan of a layer, made on the spot where its settings were not known when the others were made."""
        if layout not in current.plans:
            begin = time.perf_counter()
            current.plans[layout] = make_plan(current.lengths, layout, current.worker)
            took = time.perf_counter() - begin
            current.planning_s += took
            current.waited_s += took
            if current.times is not None and current.attended:
                self.facts[-1] = replace(self.facts[-1], planning_s=current.planning_s, waited_s=current.waited_s)
        plan = current.plans[layout]
        if current.times is not None and not current.attended:
            self.facts.append(self._facts_of(current, current.times, plan))
            self._trained += 1
        return plan

    def _facts_of(self, current: _MicroBatch, times: KernelTimes, plan: PreparedPlan) -> MicroBatchFacts:
        by_plan = self.options.follows_plan
        return MicroBatchFacts(
            micro_batch=self._trained,
            pool_load=sum(attention_load(documents) for documents in current.lengths),
            imbalance=plan.plan.imbalance if by_plan else None,
            bytes_moved=plan.plan.bytes_moved if by_plan else None,
            planning_s=current.planning_s,
            waited_s=current.waited_s,
            kernel=times,
        )

    def _of_the_leader(self, batch: Any) -> Any:
        """The batch that the first process of the replica read: augmentation may have made others different."""
        if self._replica_control is None:
            return batch
        leader = self.layout.replica_ranks(self.layout.replica_of(self.rank))[0]
        mine = [dict(batch) if isinstance(batch, Mapping) else batch] if self.rank == leader else [None]
        dist.broadcast_object_list(mine, src=leader, group=self._replica_control)
        return mine[0]


def _control_group(groups: list[range], rank: int, timeout: float) -> dist.ProcessGroup | None:
    """A Gloo group of this process's among groups that all processes make together; None where it is alone."""
    mine = None
    for ranks in groups:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")
            if rank in ranks:
                mine = group
    return mine
