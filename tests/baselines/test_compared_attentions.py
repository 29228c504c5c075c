"""What holds for every compared attention: it is dense attention inside documents, and the ranks stay in step."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from odb_libra_lightning.baselines import ring_attention, ulysses_attention
from odb_libra_lightning.libra.thread_transport import DelayedTransport, Hub, run_workers
from odb_libra_lightning.libra.transport import GroupTransport, Transport
from tests.baselines.compared import Attention, Replica
from tests.launch import run_ranks
from tests.libra.dense import DenseKernel
from tests.libra.poisoned_transport import PoisonedTransport

both = pytest.mark.parametrize("attention", [ulysses_attention, ring_attention])

# Documents across the edges of shards, of 1, 2 and 3 rows, odd ones, and padding that leaves a rank without any.
AWKWARD = [
    [1],
    [3],
    [2, 1, 1],
    [1] * 9,
    [17, 1, 2, 3, 9],
    [64],
    [5, 40, 7],
    [1, 30, 1, 30, 1],
]


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    length = st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 40))
    return Replica(
        lengths=draw(st.lists(length, min_size=1, max_size=7)),
        ranks=draw(st.sampled_from([1, 2, 4])),
        kv_heads=draw(st.sampled_from([1, 2, 8])),
        window=draw(st.sampled_from([None, None, 1, 2, 7, 30])),
        padding=draw(st.sampled_from([0, 0, 1, 6, 70])),
        scale=draw(st.sampled_from([None, 0.3])),
        seed=draw(st.integers(0, 99)),
    )


@both
@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.full)])
def test_equals_dense_attention_on_any_packing(attention: Attention, examples: int) -> None:
    @settings(max_examples=examples)
    @given(replica=replicas())
    def equal(replica: Replica) -> None:
        assert max(replica.errors(replica.on_threads(attention, kernel=DenseKernel()))) < 1e-10

    equal()


@both
@pytest.mark.parametrize("lengths", AWKWARD, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("window", "padding"), [(None, 0), (5, 0), (None, 90)])
def test_awkward_lengths(attention: Attention, lengths: list[int], ranks: int, window: int, padding: int) -> None:
    replica = Replica(lengths=lengths, ranks=ranks, window=window, padding=padding)
    results = replica.on_threads(attention)
    assert max(replica.errors(results)) < 1e-10
    assert all(not each[sum(lengths) :].any() for each in results)


@both
@pytest.mark.parametrize("ranks", [3, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_other_degrees(attention: Attention, ranks: int, kv_heads: int, window: int | None) -> None:
    heads = 24 if ranks == 3 else 8
    replica = Replica(lengths=[50, 3, 31, 90, 1], ranks=ranks, heads=heads, kv_heads=kv_heads, window=window, padding=7)
    assert max(replica.errors(replica.on_threads(attention))) < 1e-10


@both
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_float32(attention: Attention, kv_heads: int) -> None:
    replica = Replica(lengths=[90, 3, 120, 41], ranks=4, kv_heads=kv_heads, dtype=torch.float32)
    assert max(replica.errors(replica.on_threads(attention))) < 1e-5


@both
@pytest.mark.parametrize("kernel", [None, DenseKernel()], ids=["cpu", "dense"])
def test_bf16_is_as_good_as_on_one_worker(attention: Attention, kernel: DenseKernel | None) -> None:
    whole = Replica(lengths=[200, 3, 153], ranks=1, kv_heads=1, dtype=torch.bfloat16, head_dim=16)
    right = whole.dense()

    def error(results: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([(ours - exact).square().mean().sqrt() for ours, exact in zip(results, right, strict=True)])

    dense, alone = error(whole.dense(torch.bfloat16)), error(whole.on_threads(attention, kernel=kernel))
    for ranks in (2, 4):
        results = dataclasses.replace(whole, ranks=ranks).on_threads(attention, kernel=kernel)
        assert all(each.dtype == torch.bfloat16 for each in results)
        assert (error(results) <= 1.5 * dense).all()
        assert (error(results) <= 1.5 * alone).all()


@both
def test_sharp_scores(attention: Attention) -> None:
    replica = Replica(lengths=[60, 3, 50, 30], ranks=4, sharpness=100)
    assert max(replica.errors(replica.on_threads(attention))) < 1e-10


@both
def test_sharp_scores_in_float32_are_as_good_as_on_one_worker(attention: Attention) -> None:
    """Where scores are large, so is what a log-sum-exp is rounded by, and parts are merged by it."""
    alone = Replica(lengths=[200, 3, 153], ranks=1, dtype=torch.float32, head_dim=16, sharpness=100)
    right = alone.dense()

    def error(results: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([(ours - exact).square().mean().sqrt() for ours, exact in zip(results, right, strict=True)])

    results = dataclasses.replace(alone, ranks=4).on_threads(attention)
    assert (error(results) <= 1.5 * error(alone.on_threads(attention))).all()


@both
@pytest.mark.parametrize("window", [None, 9])
def test_documents_do_not_touch_each_other(attention: Attention, window: int | None) -> None:
    lengths = [20, 50, 3, 71]
    replica = Replica(lengths=lengths, ranks=4, window=window)
    before = replica.on_threads(attention)
    row = 45  # in the second document, which the first edge between shards cuts

    class Changed(Replica):
        def tensors(self) -> tuple[Tensor, ...]:
            changed = super().tensors()
            for each in changed[:3]:
                each[row] += 1
            return changed

    after = Changed(lengths=lengths, ranks=4, window=window).on_threads(attention)
    others = torch.cat([torch.arange(20), torch.arange(70, 144)])
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[others], new[others])
        assert not torch.equal(old, new)


@both
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("lengths", "padding"), [([40, 9, 30], 0), ([9], 60)])
def test_under_a_checkpoint_all_ranks_make_as_many_transfers(
    attention: Attention, reentrant: bool, lengths: list[int], padding: int
) -> None:
    replica = Replica(lengths=lengths, ranks=4, padding=padding)
    plain: list[DelayedTransport] = []
    again: list[DelayedTransport] = []

    def counted(into: list[DelayedTransport], transport: Transport) -> DelayedTransport:
        into.append(DelayedTransport(transport))
        return into[-1]

    before = replica.on_threads(attention, wrapped=lambda transport: counted(plain, transport))
    after = replica.on_threads(attention, wrapped=lambda transport: counted(again, transport), reentrant=reentrant)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    once = {len(each.events) for each in plain}
    forward = 2 if attention is ulysses_attention else 1 + 3 + 1
    backward = 2 if attention is ulysses_attention else 1 + 3 + 4 + 1
    assert once == {forward + backward}
    assert {len(each.events) for each in again} == {2 * forward + backward}


@both
def test_one_rank_has_nothing_to_say_to_itself(attention: Attention) -> None:
    class Silent:  # has no `all_to_all`
        rank, size = 0, 1

    replica = Replica(lengths=[9, 30, 2], ranks=1, padding=3)
    assert max(replica.errors(replica.on_rank(attention, Silent()))) < 1e-10


@both
@pytest.mark.parametrize("window", [None, 12])
def test_no_buffer_is_used_too_early(attention: Attention, window: int | None) -> None:
    replica = Replica(lengths=[40, 9, 70, 30], ranks=4, window=window, padding=3)
    chance = random.Random(5)
    delays = [chance.uniform(0, 0.004) for _ in range(replica.ranks)]
    delays[2] = 0.02  # one rank is slow

    def poisoned(transport: Transport) -> Transport:
        return PoisonedTransport(DelayedTransport(transport, delays[transport.rank]))

    before = replica.on_threads(attention)
    after = replica.on_threads(attention, wrapped=poisoned)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@both
def test_each_replica_of_a_pool_by_its_own_group(attention: Attention) -> None:
    replica = Replica(lengths=[30, 2, 41], ranks=2, padding=3)
    plan = replica.plan(replicas=3)
    for number in range(3):
        assert max(replica.errors(replica.on_threads(attention, plan=plan, replica=number))) < 1e-10
    with pytest.raises(ValueError, match="pool of 3 replicas"):
        replica.on_threads(attention, plan=plan)
    with pytest.raises(ValueError, match="replica=3: this plan has 3"):
        replica.on_threads(attention, plan=plan, replica=3)


@both
def test_refuses_what_does_not_fit_the_plan(attention: Attention) -> None:
    replica = Replica(lengths=[8, 8], ranks=2)
    transport = Hub(2).transport(1)
    q, k, v, _ = (each[8:] for each in replica.tensors())
    plan = replica.plan()
    refused = {
        r"q of rank 1 has shape \(7, 8, 4\).*\(8, 8, 4\) would fit": (q[1:], k, v),
        r"k of rank 1 has shape \(8, 8, 4\).*\(8, 2, 4\) would fit": (q, q, v),
        r"v of rank 1 has shape \(8, 2, 3\)": (q, k, v[..., :3]),
        "dtype torch.float64, torch.float64, torch.bfloat16": (q, k, v.bfloat16()),
        "device cpu, meta, cpu": (q, k.to("meta"), v),
    }
    for message, inputs in refused.items():
        with pytest.raises(ValueError, match=message):
            attention(*inputs, plan, transport=transport)
    with pytest.raises(ValueError, match=r"transport has 2 workers.*context_parallel=1"):
        attention(q, k, v, Replica(lengths=[16], ranks=1).plan(), transport=transport)


@both
def test_refuses_kernels_and_scales_that_are_none(attention: Attention) -> None:
    replica = Replica(lengths=[8], ranks=1)
    q, k, v, _ = replica.tensors()
    given = (q, k, v, replica.plan())
    for scale in (0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=f"scale={scale!r}: expected a finite number above 0"):
            attention(*given, transport=Hub(1).transport(0), scale=scale)
    with pytest.raises(TypeError, match="kernel is a int"):
        attention(*given, transport=Hub(1).transport(0), kernel=3)
    with pytest.raises(ValueError, match="no attention kernel is called 'flesh'"):
        attention(*given, transport=Hub(1).transport(0), kernel="flesh")


@both
def test_only_some_inputs_need_a_gradient(attention: Attention) -> None:
    replica = Replica(lengths=[9, 20], ranks=2)
    right = replica.dense()[2]

    def work(transport: Transport) -> Tensor:
        half = slice(0, 14) if transport.rank == 0 else slice(14, 29)
        q, k, v, grad = (each[half] for each in replica.tensors())
        attention(q, k.requires_grad_(), v, replica.plan(), transport=transport).backward(grad)
        assert k.grad is not None
        return k.grad

    torch.testing.assert_close(torch.cat(run_workers(work, 2)), right)


def on_process(ranks: int) -> list[float]:
    """Largest errors of a rank's own rows."""
    dist.init_process_group("gloo")
    try:
        worst = []
        for attention in (ring_attention, ulysses_attention):
            for window, padding in ((None, 0), (11, 50)):
                replica = Replica(lengths=[33, 2, 41, 1, 20], ranks=ranks, window=window, padding=padding)
                results = replica.on_rank(attention, PoisonedTransport(GroupTransport()), reentrant=False)
                rows = slice(*(at * replica.rows // ranks for at in (dist.get_rank(), dist.get_rank() + 1)))
                right = replica.dense()
                worst += [(ours - exact[rows]).abs().max().item() for ours, exact in zip(results, right, strict=True)]
        return worst
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes(ranks: int, tmp_path: Path) -> None:
    for worst in run_ranks(on_process, ranks, tmp_path, ranks=ranks):
        assert len(worst) == 16
        assert max(worst) < 1e-10
