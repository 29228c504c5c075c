"""The exchange of document lengths in a pool: everyone's, in order, and a sentence where ranks differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from odb_libra_lightning.libra.process_groups import RankLayout
from odb_libra_lightning.strategies.pool_lengths import PoolLengthExchange
from tests.launch import run_ranks

LAYOUT = RankLayout(world_size=4, context_parallel=2, pool_size=2)
# Of each replica its packs, one after another.
PACKS = [[(3, 4), (7,)], [(1, 1, 1), (2, 9)]]


def exchange(packs: list[list[list[int]]]) -> Any:
    """What this rank hears."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lengths = PoolLengthExchange(LAYOUT, rank, dist.group.WORLD)
    heard: list[Any] = []
    try:
        for documents in packs[rank]:
            lengths.put(tuple(documents))
        lengths.close()
        heard.extend([list(documents) for documents in pool] for pool in lengths)
    except RuntimeError as error:
        heard.append(str(error))
    dist.barrier()
    dist.destroy_process_group()
    return heard


def test_everyone_hears_of_every_replica_and_of_different_packs_in_one(tmp_path: Path) -> None:
    packs = [PACKS[0], PACKS[0], PACKS[1], [(1, 1, 1), (2, 8)]]
    for heard in run_ranks(exchange, 4, tmp_path, packs=packs):
        assert heard == [
            [[3, 4], [1, 1, 1]],
            "micro-batch 1: ranks 2 and 3 share a replica and hold different packs; the loader must give all of them "
            "the same batch",
        ]


def test_a_pool_of_one_process_asks_nobody() -> None:
    lengths = PoolLengthExchange(RankLayout(world_size=1, context_parallel=1, pool_size=1), 0, None)
    lengths.put((3, 4))
    lengths.put((5,))
    lengths.close()
    assert list(lengths) == [[(3, 4)], [(5,)]]
