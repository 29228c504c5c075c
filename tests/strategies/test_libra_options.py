"""Options of a run with Libra: what is chosen where nothing is said, and sentences that say what would fit."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from odb_libra_lightning.strategies import LibraDeepSpeedStrategy, LibraFSDPStrategy, LibraStrategy
from odb_libra_lightning.strategies.libra_options import LibraOptions

HEADS: dict[str, Any] = {"num_heads": 28, "num_kv_heads": 7, "head_dim": 64, "bytes_per_element": 2, "window": None}


@pytest.mark.parametrize(
    ("options", "world_size", "pool_size"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({}, 64, 8),
        ({}, 22, 2),  # 11 is too many
        ({"context_parallel": 4}, 64, 8),
        ({"context_parallel": 4, "pool_size": 2}, 64, 2),
        ({"attention": "distca"}, 64, 64),
    ],
)
def test_the_pool_size_that_is_taken(options: dict[str, Any], world_size: int, pool_size: int) -> None:
    layout = LibraOptions(**options).rank_layout(world_size)
    assert (layout.world_size, layout.pool_size) == (world_size, pool_size)
    assert layout.num_pools * pool_size * layout.context_parallel == world_size


@pytest.mark.parametrize(
    ("heads", "shards", "chunks"),
    [((8, 8), 4, 2), ((8, 1), 1, 4), ((8, 2), 2, 4), ((28, 7), 1, 4), ((6, 3), 3, 2), ((1, 1), 1, 1), ((64, 8), 4, 4)],
)
def test_head_shards_and_chunks_that_are_taken(heads: tuple[int, int], shards: int, chunks: int) -> None:
    layout = LibraOptions().pool_layout(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=8, bytes_per_element=2, window=None
    )
    assert (layout.head_shards, layout.chunks, layout.block_size) == (shards, chunks, 2048)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_parallel": 0}, "context_parallel=0"),
        ({"pool_size": 1.5}, "pool_size=1.5"),
        ({"attention": "flash"}, "attention='flash': choose one of distca, libra, ring, ulysses"),
        ({"placement": "vrsp"}, "placement='vrsp': choose one of home_first, paper"),
        ({"sequence_placement": "best"}, "sequence_placement='best': choose one of .*vrsp"),
        ({"remember": "all"}, "remember='all': choose one of keep, refetch"),
        ({"remember": "refetch", "attention": "ring"}, "remember='refetch' is for attention='libra' or 'distca'"),
        ({"kernel": "fast"}, "kernel='fast': choose one of cpu, flash_attn, torch_flash, or None"),
        ({"ignore_index": None}, "ignore_index=None: expected a whole number"),
        ({"pool_timeout": "long"}, "pool_timeout='long': expected seconds"),
        ({"refine": 1}, "refine=1: expected True or False"),
        ({"pool_timeout": 0}, "pool_timeout=0: expected seconds"),
    ],
)
@pytest.mark.parametrize("make", [LibraOptions, LibraStrategy, LibraFSDPStrategy])
def test_an_option_that_cannot_work(make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make(**options)


@pytest.mark.parametrize(
    ("options", "world_size", "says"),
    [
        ({"context_parallel": 4}, 6, "context_parallel=4 does not divide world_size=6; 1, 2, 3 or 6 would fit"),
        ({"context_parallel": 2, "pool_size": 2}, 6, "pool_size=2 does not divide the 3 replicas .*; 1 or 3 would fit"),
        ({"attention": "distca", "pool_size": 2}, 4, "one pool of all 4 replicas, and pool_size=2 makes 2 of them"),
    ],
)
def test_options_that_do_not_fit_the_processes(options: dict[str, Any], world_size: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LibraOptions(**options).rank_layout(world_size)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"head_shards": 8}, "head_shards=8 does not divide num_heads=28; 1, 2, 4, 7, 14 or 28 would fit"),
        ({"head_shards": 7, "chunks": 3}, "chunks=3 does not divide the 4 query heads of a shard .*; 1, 2 or 4 would"),
        ({"attention": "ulysses", "context_parallel": 8}, "context_parallel=8 does not divide num_heads=28; .*7, 14"),
    ],
)
def test_options_that_do_not_fit_the_heads(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LibraOptions(**options).pool_layout(**HEADS)


def test_strategies_are_registered_by_name() -> None:
    for name, strategy in (
        ("libra_ddp", LibraStrategy),
        ("libra_fsdp2", LibraFSDPStrategy),
        ("libra_deepspeed", LibraDeepSpeedStrategy),
    ):
        assert StrategyRegistry[name]["strategy"] is strategy


@pytest.mark.parametrize("strategy", [LibraStrategy, LibraFSDPStrategy])
def test_a_misspelt_option_is_named(strategy: Any) -> None:
    with pytest.raises(TypeError, match="has no option 'context_paralel', did you mean 'context_parallel'"):
        strategy(context_paralel=2)


def test_fsdp_degrees_are_not_to_be_set() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size is not to be set"):
        LibraFSDPStrategy(tensor_parallel_size=2)
