"""The simulator on corpora so small or so even that its figures can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from odb_libra_lightning.libra.pool_plan import plan_pool
from odb_libra_lightning.libra.simulation_results import (
    METHODS,
    Grid,
    GridPoint,
    MethodFigures,
    SimulatedRun,
    Simulation,
)
from odb_libra_lightning.libra.simulator import check_simulation, pack_steps, simulate
from tests.libra.simulated_runs import SHAPE, SLOW_KERNEL, grid_of, run_of, seconds


def by_method(found: Simulation) -> dict[str, MethodFigures]:
    return {one.method: one for one in found.figures}


def test_documents_of_one_length_are_even_under_every_method():
    found = simulate([8] * 32, run=run_of(16, 8, 4), grid=grid_of((1, 2, 4), 4), calibration=SLOW_KERNEL)
    assert found.steps == 2
    assert {one.method for one in found.figures} == set(METHODS)
    for one in found.figures:
        assert one.inter_pool_imbalance == 0
        # Each home holds one document: nothing needs to move, and nothing does.
        assert one.intra_pool_imbalance == one.worst_intra_pool_imbalance == 0
        assert one.mean_latency == pytest.approx(seconds(36))
        assert one.worst_latency == pytest.approx(one.mean_latency)
        if one.point is not None:
            assert one.bytes_moved == one.busiest_bytes == 0


def test_imbalance_and_latency_of_two_replicas_by_hand():
    # Documents of 8 tokens, and of 4 and 4: loads 64 and 32, pairs 36 and 20.
    found = simulate([8, 4, 4], run=run_of(8, 2, 2), grid=grid_of(2, 2), steps=1, seed=None, calibration=SLOW_KERNEL)
    figures = by_method(found)
    for method in ("ulysses", "ulysses_sorted", "ring", "wlb"):
        assert figures[method].inter_pool_imbalance == pytest.approx(64 / 48 - 1)
        assert figures[method].mean_latency == pytest.approx(seconds(36 / 2))
    for method in ("distca", "tap", "tap_vrsp", "libra"):
        one = figures[method]
        assert one.inter_pool_imbalance == 0  # one pool holds them all
        assert one.mean_latency == pytest.approx(seconds(56 / 4) * (1 + one.intra_pool_imbalance))


def test_a_latency_is_the_slowest_replica_of_each_micro_step():
    # GA 2 and DP 2: micro-step 0 has [8] and [4, 4], micro-step 1 [1] * 8 and [4, 4].
    lengths = [8, 4, 4, *[1] * 8, 4, 4]
    found = simulate(
        lengths,
        run=run_of(8, 4, 2),
        grid=grid_of(2, 2),
        methods=("ulysses",),
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    (one,) = found.figures
    assert one.worst_latency == pytest.approx(seconds(36 / 2))
    assert one.mean_latency == pytest.approx((seconds(36 / 2) + seconds(20 / 2)) / 2)


def test_order_puts_sequences_of_like_load_into_one_micro_step():
    # GA 2 and DP 2: micro-steps [8], [1] * 8 and [4, 4], [8]. By load: [8], [8] and [4, 4], [1] * 8.
    found = simulate(
        [8, *[1] * 8, 4, 4, 8],
        run=run_of(8, 4, 2),
        grid=grid_of(2, 2),
        methods=("ulysses", "ulysses_sorted"),
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    plain, ordered = found.figures
    assert plain.mean_latency == pytest.approx(seconds(36 / 2))
    assert ordered.mean_latency == pytest.approx((seconds(36 / 2) + seconds(20 / 2)) / 2)
    # Nothing else changes: replicas compute the same sequences, and one of the heaviest is the worst micro-step.
    assert ordered.worst_latency == plain.worst_latency == pytest.approx(seconds(36 / 2))
    assert ordered.bytes_moved == plain.bytes_moved
    assert ordered.inter_pool_imbalance == plain.inter_pool_imbalance == pytest.approx(64 / 42 - 1)


def test_a_sequence_is_not_moved_to_another_step():
    # GA 1 and two steps of DP 2: [8], [1] * 8 and [8], [4, 4]. There is nothing to order.
    found = simulate(
        [8, *[1] * 8, 8, 4, 4],
        run=run_of(8, 2, 2),
        grid=grid_of(2, 2),
        methods=("ulysses", "ulysses_sorted"),
        seed=None,
        calibration=SLOW_KERNEL,
    )
    plain, ordered = found.figures
    assert found.steps == 2
    assert dataclasses.replace(plain, method="ulysses_sorted") == ordered
    assert ordered.mean_latency == pytest.approx(seconds(36 / 2))


def test_order_counts_the_work_of_a_window():
    # With windows of 2, pairs are 15, 8, 13 and 14, and so [8], [4, 4] go first; by l^2 it would be [8], [6, 1, 1].
    found = simulate(
        [8, *[1] * 8, 6, 1, 1, 4, 4],
        run=run_of(8, 4, 2, window=2),
        grid=grid_of(2, 2),
        methods=("ulysses_sorted",),
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    assert found.figures[0].mean_latency == pytest.approx((seconds(15 / 2) + seconds(13 / 2)) / 2)


def test_placement_evens_out_what_the_samplers_order_does_not():
    lengths = [8, 8, *[1] * 16]  # pools of 2 in order: 64 + 64 and 8 + 8
    found = simulate(lengths, run=run_of(8, 4, 4), grid=grid_of(2, 2), steps=1, seed=None, calibration=SLOW_KERNEL)
    figures = by_method(found)
    assert figures["tap"].inter_pool_imbalance == pytest.approx(128 / 72 - 1)
    assert figures["tap_vrsp"].inter_pool_imbalance == figures["libra"].inter_pool_imbalance == 0
    assert figures["distca"].inter_pool_imbalance == 0
    assert figures["tap"].point == GridPoint(pool_size=2, head_shards=2, block_size=2, chunks=1)
    assert figures["distca"].point == GridPoint(pool_size=4, head_shards=2, block_size=2, chunks=2)


def test_wlb_packs_the_documents_of_a_step_anew():
    # In order the loads are 36 and 10. Longest first to the lighter: 4, 2 and three of 1; 4 and seven of 1; 23 each.
    found = simulate(
        [4, 4, 2, *[1] * 10],
        run=run_of(10, 2, 2),
        grid=grid_of(1, 5),
        methods=("ulysses", "wlb"),
        steps=1,
        seed=None,
        calibration=SLOW_KERNEL,
    )
    figures = by_method(found)
    assert figures["ulysses"].inter_pool_imbalance == pytest.approx(36 / 23 - 1)
    assert figures["ulysses"].mean_latency == pytest.approx(seconds((10 + 10 + 3) / 2))
    assert figures["wlb"].inter_pool_imbalance == 0
    assert figures["wlb"].mean_latency == pytest.approx(seconds((10 + 7) / 2))


def test_volume_and_imbalance_are_the_planners():
    lengths = np.random.default_rng(3).integers(1, 60, 60)
    run = run_of(64, 4, 2)
    found = simulate(lengths, run=run, grid=grid_of(2, 8), methods=("tap",), steps=2, seed=None)
    steps = pack_steps(lengths, run, steps=2, packing="sequential", seed=None)
    plans = [
        plan_pool(
            step[at : at + 2],
            context_parallel=2,
            block_size=8,
            head_shards=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=1,
            bytes_per_element=2,
            chunks=1,
            sequence_length=64,
        )
        for step in steps
        for at in (0, 2)
    ]
    (one,) = found.figures
    assert one.bytes_moved == sum(plan.bytes_moved for plan in plans) / 4 > 0
    assert one.busiest_bytes == max(plan.busiest_bytes for plan in plans)
    assert one.intra_pool_imbalance == pytest.approx(sum(plan.imbalance for plan in plans) / 4)
    assert one.worst_intra_pool_imbalance == max(plan.imbalance for plan in plans)


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_every_document_stands_in_the_steps_once(packing):
    lengths = [16] * 3 + [7] * 20 + [2] * 50 + [1] * 28
    steps = pack_steps(lengths, run_of(16, 2, 2), steps=1000, packing=packing, seed=5)
    sequences = [documents for step in steps for documents in step]
    assert all(sum(documents) <= 16 for documents in sequences)
    if packing == "sequential":
        assert all(sum(documents) == 16 for documents in sequences)
        assert len(sequences) == sum(lengths) // 16 // 2 * 2
    else:
        assert not Counter(n for documents in sequences for n in documents) - Counter(lengths)
        assert sum(lengths) - sum(map(sum, sequences)) < 2 * 16


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    settings: Any = {"run": run_of(64, 8, 4), "grid": grid_of((2, 4), 8)}
    assert simulate(lengths, **settings) == simulate(lengths, **settings)
    assert simulate(lengths, **settings).figures != simulate(lengths, **settings, seed=1).figures


def test_chunks_share_a_plan_and_change_nothing_but_latency():
    lengths = np.random.default_rng(1).integers(1, 100, 100)
    ticks: list[tuple[int, int]] = []
    both = simulate(
        lengths,
        run=run_of(64, 8, 4),
        grid=grid_of(2, 8, chunks=(1, 2)),
        methods=("libra",),
        steps=2,
        progress=lambda done, total: ticks.append((done, total)),
    )
    assert ticks == [(n, 8) for n in range(1, 9)]  # two steps of four pools
    for one, chunks in zip(both.figures, (1, 2), strict=True):
        alone = simulate(lengths, run=run_of(64, 8, 4), grid=grid_of(2, 8, chunks=chunks), methods=("libra",), steps=2)
        assert alone.figures == (one,)
    first, second = both.figures
    assert first.bytes_moved == second.bytes_moved
    assert first.mean_latency != second.mean_latency


def test_without_overlap_libra_is_tap_with_vrsp():
    lengths = np.random.default_rng(2).integers(1, 100, 100)
    found = simulate(lengths, run=run_of(64, 8, 4), grid=grid_of(2, 8, chunks=1), methods=("tap_vrsp", "libra"))
    placed, full = found.figures
    assert dataclasses.replace(placed, method="libra") == full


def test_a_thousand_replicas_are_simulated_and_too_large_a_pool_is_left_out():
    run = run_of(8, 1024, 1024, context_parallel=2)
    found = simulate([8, 4, 4] * 600, run=run, grid=grid_of(8, 4), methods=("distca", "libra"), steps=1)
    assert [one.method for one in found.figures] == ["libra"]
    assert "2048 workers" in found.notes[0]
    assert found.figures[0].inter_pool_imbalance < 0.01


@pytest.mark.parametrize("method", ["ulysses", "ring", "tap", "libra"])
def test_groups_stand_one_after_the_other_on_the_nodes(method):
    # Of three replicas of two workers on nodes of three, the middle one crosses; there links are ten times as slow.
    links = dataclasses.replace(SLOW_KERNEL, peak_flops=1e30, intra_node_beta=1.0, inter_node_beta=0.1)
    latencies = [
        simulate(
            [16] * 3,
            run=run_of(16, 3, 3),
            grid=grid_of(1, 4),
            methods=(method,),
            steps=1,
            calibration=dataclasses.replace(links, workers_per_node=workers_per_node),
        )
        .figures[0]
        .mean_latency
        for workers_per_node in (3, 6)
    ]
    assert latencies[1] > 0
    assert latencies[0] == pytest.approx(10 * latencies[1])


def test_a_window_limits_work():
    run = run_of(16, 2, 2, window=2)
    found = simulate([16] * 2, run=run, grid=grid_of(2, 4), steps=1, methods=("ulysses",), calibration=SLOW_KERNEL)
    assert found.figures[0].mean_latency == pytest.approx(seconds((1 + 15 * 2) / 2))


def test_steps_are_as_many_as_the_documents_suffice_for():
    assert simulate([8] * 7, run=run_of(8, 2, 2), grid=grid_of(2, 4), methods=("ulysses",), steps=99).steps == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"global_batch": 6}, "global_batch=6"),
        ({"pool_sizes": (2, 3)}, "pool_size=3 does not divide data_parallel=4; 1, 2 or 4 would fit"),
        ({"head_shards": (2, 3)}, "head_shards=3 does not divide num_heads=4"),
        ({"chunks": (2, 4)}, "chunks=4 does not divide the 2 query heads of a shard"),
        ({"block_sizes": (4, 3)}, "block_size=3 does not divide the 8 rows"),
        ({"pool_sizes": ()}, "pool_sizes: expected at least one number"),
        ({"context_parallel": 8}, "context_parallel=8 does not divide num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 is no multiple of num_kv_heads=3"),
        ({"methods": ("libra", "magic")}, "no method is called 'magic'"),
    ],
)
def test_what_does_not_fit_is_refused_before_lengths_are_looked_at(changes, sentence):
    run = {"sequence_length": 16, "global_batch": 8, "data_parallel": 4}
    shape = {name: changes[name] for name in ("context_parallel", "num_kv_heads") if name in changes}
    grid = {"pool_sizes": (2,), "head_shards": (2,), "block_sizes": (2,), "chunks": (2,)}
    settings: Any = {
        "run": SimulatedRun(
            **run | {n: changes[n] for n in run if n in changes}, shape=dataclasses.replace(SHAPE, **shape)
        ),
        "grid": Grid(**grid | {n: changes[n] for n in grid if n in changes}),
        "methods": changes.get("methods", METHODS),
    }
    with pytest.raises(ValueError, match=sentence):
        check_simulation(**settings)
    with pytest.raises(ValueError, match=sentence):
        simulate([-1], **settings)


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**21, 2.0, True, None])
@pytest.mark.parametrize(
    "name",
    [
        *("sequence_length", "global_batch", "data_parallel"),
        *("context_parallel", "num_heads", "num_kv_heads", "head_dim", "bytes_per_element", "window"),
    ],
)
def test_a_setting_that_is_no_count_of_a_sensible_size_is_refused(name, value):
    if (name, value) == ("window", None):
        return
    with pytest.raises(ValueError, match=f"{name}={value}: expected a whole number from 1 to 2147483647"):
        dataclasses.replace(SHAPE if hasattr(SHAPE, name) else run_of(8, 2, 2), **{name: value})


@pytest.mark.parametrize(
    ("lengths", "settings", "sentence"),
    [
        ([8, -1], {}, "-1"),
        ([], {}, "document lengths"),
        ([8], {}, "the 1 documents fill 1 packed sequences of 8 tokens, fewer than the global_batch=2"),
        ([9] * 9, {"packing": "best_fit"}, "9 tokens"),
        ([8] * 9, {"packing": "tight"}, "packing='tight'"),
        ([8] * 9, {"steps": 0}, "steps=0"),
        ([8] * 9, {"steps": 1.5}, "steps=1.5"),
        ([8] * 9, {"seed": -1}, "seed=-1: expected a whole number of at least 0"),
    ],
)
def test_documents_that_cannot_be_used_are_refused(lengths, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        simulate(lengths, run=run_of(8, 2, 2), grid=grid_of(2, 4), **settings)


def test_only_what_the_methods_look_at_is_checked():
    run = run_of(16, 6, 3)
    nothing = Grid(pool_sizes=(2,), head_shards=(3,), block_sizes=(5,), chunks=(7,))
    found = simulate([16] * 6, run=run, grid=nothing, methods=("ulysses", "ulysses_sorted", "ring", "wlb"))
    assert len(found.figures) == 4
    for method, fitting in (("distca", grid_of(2, 4)), ("tap", grid_of(3, 4, chunks=7))):
        assert len(simulate([16] * 6, run=run, grid=fitting, methods=(method,)).figures) == 1
    for method, wrong in (("tap", grid_of(2, 4)), ("libra", grid_of(3, 4, chunks=7)), ("distca", grid_of(3, 5))):
        with pytest.raises(ValueError, match="does not divide"):
            check_simulation(run, wrong, (method,))
    with pytest.raises(ValueError, match="global_batch=7"):
        check_simulation(run_of(16, 7, 3), nothing, ("ring",))
    with pytest.raises(ValueError, match="num_kv_heads=3"):
        check_simulation(run_of(16, 6, 3, num_kv_heads=3), nothing, ("ring",))


def test_bytes_that_could_not_be_counted_are_refused():
    large = run_of(2**30, 4, 2, head_dim=2**31 - 1)
    for method in METHODS:
        with pytest.raises(ValueError, match=r"could move .* bytes, above 2\*\*62"):
            check_simulation(large, grid_of(2, 2**20), (method,))


def test_of_an_absurdly_long_document_only_the_steps_asked_for_are_packed():
    steps = pack_steps([2**61], run_of(8, 4, 2), steps=3, packing="sequential", seed=0)
    assert steps == [[[8]] * 4] * 3
