"""Which ranks form a pool and which a replica, and their process groups.

Ranks are replica-major: global rank `replica * CP + cp_rank`, and a pool is `P` replicas in a row. So worker `w` of a
plan is rank `w` of its pool's group. Source: Libra (arXiv:2607.23250), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from odb_libra_lightning.libra.layout import divisors_near
from odb_libra_lightning.libra.transport import GroupTransport, LocalTransport, Transport
from odb_libra_lightning.libra.whole_numbers import checked_count


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Pools and replicas of a run.

    Example:
        >>> layout = RankLayout(world_size=8, context_parallel=2, pool_size=2)
        >>> layout.pool_ranks(1), layout.replica_ranks(3)
        (range(4, 8), range(6, 8))

    Attributes:
        world_size: processes of the run.
        context_parallel: workers of a replica, `CP`.
        pool_size: replicas of a pool, `P`.

    Raises:
        ValueError: degrees that do not divide each other; the sentence says which would.
    """

    world_size: int
    context_parallel: int
    pool_size: int

    def __post_init__(self) -> None:
        for name in ("world_size", "context_parallel", "pool_size"):
            checked_count(name, getattr(self, name))
        if self.world_size % self.context_parallel:
            raise ValueError(
                f"context_parallel={self.context_parallel} does not divide world_size={self.world_size}; "
                f"{divisors_near(self.world_size, self.context_parallel)} would fit"
            )
        if self.num_replicas % self.pool_size:
            raise ValueError(
                f"pool_size={self.pool_size} does not divide the {self.num_replicas} replicas "
                f"(world_size={self.world_size}, context_parallel={self.context_parallel}); "
                f"{divisors_near(self.num_replicas, self.pool_size)} would fit"
            )

    @property
    def num_replicas(self) -> int:
        """Data-parallel degree, `DP`."""
        return self.world_size // self.context_parallel

    @property
    def num_pools(self) -> int:
        """Pools of the run, `DP / P`."""
        return self.num_replicas // self.pool_size

    @property
    def num_workers(self) -> int:
        """Workers of a pool, `W = P * CP`."""
        return self.pool_size * self.context_parallel

    def pool_ranks(self, pool: int) -> range:
        """Global ranks of a pool, in order of its workers."""
        return _run("pool", pool, self.num_pools, self.num_workers)

    def replica_ranks(self, replica: int) -> range:
        """Global ranks of a replica's context-parallel group, in order of their rows."""
        return _run("replica", replica, self.num_replicas, self.context_parallel)

    def pool_of(self, rank: int) -> int:
        """Pool of a global rank."""
        return self._checked(rank) // self.num_workers

    def replica_of(self, rank: int) -> int:
        """Replica of a global rank."""
        return self._checked(rank) // self.context_parallel

    def worker_of(self, rank: int) -> int:
        """Number of a global rank in its pool."""
        return self._checked(rank) % self.num_workers

    def cp_rank_of(self, rank: int) -> int:
        """Number of a global rank in its replica."""
        return self._checked(rank) % self.context_parallel

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank}: there are {self.world_size}, numbered from 0")
        return rank


@dataclass(frozen=True, kw_only=True)
class PoolGroups:
    """What carries rows between this process and others.

    Attributes:
        layout: all pools and replicas.
        rank: global rank of this process.
        pool: its pool; worker `w` of a plan is rank `w`.
        replica: its context-parallel group. Where a pool is one replica, the same transport as `pool`.
    """

    layout: RankLayout
    rank: int
    pool: Transport
    replica: Transport

    def close(self) -> None:
        """Give back the process groups; the transports are of no use after it. All of a group call it together."""
        for transport in {id(each): each for each in (self.pool, self.replica)}.values():
            if isinstance(transport, GroupTransport):
                dist.destroy_process_group(transport.group)


def new_pool_groups(
    *, context_parallel: int, pool_size: int, timeout: float | None = None, backend: str | None = None
) -> PoolGroups:
    """Make the process groups of all pools and replicas. A collective of all processes.

    Groups of one process are none: their transport copies.

    Args:
        context_parallel: workers of a replica, `CP`.
        pool_size: replicas of a pool, `P`.
        timeout: seconds that making a group and each of its transfers may take; None: torch's default for
            the backend.
        backend: as in `torch.distributed.new_group`.

    Raises:
        ValueError: degrees that do not fit the world size.
        RuntimeError: no default group, or processes that do not come in time.
    """
    if not dist.is_initialized():
        raise RuntimeError("pools need the default process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank()
    layout = RankLayout(world_size=dist.get_world_size(), context_parallel=context_parallel, pool_size=pool_size)
    limit = None if timeout is None else timedelta(seconds=timeout)

    def transport(what: str, groups: list[range]) -> Transport:
        mine: Transport = LocalTransport()
        # Every process makes every group, in the same order, also those it is no member of: the calls are collective.
        for number, ranks in enumerate(groups):
            if len(ranks) > 1:
                group = dist.new_group(list(ranks), timeout=limit, backend=backend, group_desc=f"{what} {number}")
                if rank in ranks:
                    mine = GroupTransport(group)
        return mine

    pool = transport("libra pool", [layout.pool_ranks(pool) for pool in range(layout.num_pools)])
    if pool_size == 1:
        return PoolGroups(layout=layout, rank=rank, pool=pool, replica=pool)
    replicas = [layout.replica_ranks(replica) for replica in range(layout.num_replicas)]
    return PoolGroups(layout=layout, rank=rank, pool=pool, replica=transport("libra replica", replicas))


def _run(name: str, number: int, count: int, size: int) -> range:
    if not 0 <= number < count:
        raise ValueError(f"{name}={number}: there are {count}, numbered from 0")
    return range(number * size, (number + 1) * size)
