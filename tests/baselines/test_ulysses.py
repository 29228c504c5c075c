"""What is Ulysses' own: heads that are dealt to ranks, and KV heads that several of them read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from odb_libra_lightning.baselines import ulysses_attention
from odb_libra_lightning.libra.attention_costs import AttentionShape, ulysses_cost
from odb_libra_lightning.libra.calibration import DEFAULT_CALIBRATION
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.thread_transport import DelayedTransport, Hub
from odb_libra_lightning.libra.transport import Handle, Transport
from tests.baselines.compared import Replica
from tests.libra.dense import DenseKernel


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(28, 7, 4), (12, 4, 3), (24, 8, 4), (6, 2, 6), (10, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kv_heads_that_the_ranks_do_not_divide(heads: int, kv_heads: int, ranks: int, dtype: torch.dtype) -> None:
    replica = Replica(lengths=[20, 3, 31], ranks=ranks, heads=heads, kv_heads=kv_heads, padding=5, dtype=dtype)
    assert max(replica.errors(replica.on_threads(ulysses_attention))) < (1e-10 if dtype == torch.float64 else 0.02)


def test_refuses_heads_that_cannot_be_dealt() -> None:
    replica = Replica(lengths=[30], ranks=3, heads=8)
    q, k, v, _ = (each[:10] for each in replica.tensors())
    with pytest.raises(ValueError, match=r"context_parallel=3 does not divide num_heads=8.*of 1, 2, 4, 8 would fit"):
        ulysses_attention(q, k, v, replica.plan(), transport=Hub(3).transport(0))


class Recorded:
    """A transport that writes down what it was given to send."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.size, self.inner = inner.rank, inner.size, inner
        self.sent: list[list[int]] = []

    def all_to_all(self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int]) -> Handle:
        self.sent.append([rows * input[0].numel() for rows in sent])
        return self.inner.all_to_all(output, input, received, sent)


def test_a_kv_head_goes_to_those_who_read_it() -> None:
    transports = {}

    def recorded(transport: Transport) -> Recorded:
        return transports.setdefault(transport.rank, Recorded(transport))

    # 6 query heads and 2 KV heads on 2 ranks, then 3: the middle one of the 3 reads both KV heads.
    Replica(lengths=[12], ranks=2, heads=6, kv_heads=2, head_dim=1).on_threads(ulysses_attention, wrapped=recorded)
    assert transports[0].sent == [[6 * 5, 6 * 5], [6 * 3, 6 * 3], [6 * 3, 6 * 3], [6 * 5, 6 * 5]]
    transports.clear()
    Replica(lengths=[12], ranks=3, heads=6, kv_heads=2, head_dim=1).on_threads(ulysses_attention, wrapped=recorded)
    dispatched = [4 * (2 + 2), 4 * (2 + 4), 4 * (2 + 2)]
    for rank in range(3):
        assert transports[rank].sent == [dispatched, [8, 8, 8], [8, 8, 8], [dispatched[rank]] * 3]


@pytest.mark.parametrize(("kv_heads", "ranks"), [(1, 4), (2, 4), (8, 4), (2, 2), (1, 8)])
@pytest.mark.parametrize("padding", [0, 13])
def test_moves_the_bytes_that_the_simulator_counts(kv_heads: int, ranks: int, padding: int) -> None:
    replica = Replica(lengths=[70, 3, 41], ranks=ranks, kv_heads=kv_heads, padding=padding, dtype=torch.float32)
    transports = []

    def counted(transport: Transport) -> Transport:
        transports.append(DelayedTransport(transport))
        return transports[-1]

    replica.on_threads(ulysses_attention, wrapped=counted)
    shape = AttentionShape(
        context_parallel=ranks, num_heads=8, num_kv_heads=kv_heads, head_dim=4, bytes_per_element=4, window=None
    )
    cost = ulysses_cost(replica.lengths, replica.rows, shape, first_worker=0, calibration=DEFAULT_CALIBRATION)
    assert sum(event.sent_bytes for each in transports for event in each.events[:2]) == cost.bytes_moved
    assert sum(event.sent_bytes for each in transports for event in each.events[2:]) == cost.bytes_moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_shared_kv_head_are_added_in_float32_in_order_of_the_ranks(dtype: torch.dtype) -> None:
    replica = Replica(lengths=[50, 9], ranks=4, kv_heads=1, dtype=dtype)
    out, *_, dk, dv = replica.on_threads(ulysses_attention, kernel=DenseKernel())
    q, k, v, grad = replica.tensors()
    segments = Segments(query_lengths=(50, 9), key_lengths=(50, 9))
    options = {"causal": True, "scale": 0.5, "window": None}
    totals = [torch.zeros(59, 1, 4), torch.zeros(59, 1, 4)]
    for rank in range(4):
        heads = slice(2 * rank, 2 * rank + 2)
        part, lse = DenseKernel().forward(q[:, heads], k, v, segments, **options)
        assert torch.equal(part, out[:, heads])
        _, *parts = DenseKernel().backward(grad[:, heads], q[:, heads], k, v, part, lse, segments, **options)
        for total, each in zip(totals, parts, strict=True):
            total += each
    assert torch.equal(dk, totals[0].to(dtype))
    assert torch.equal(dv, totals[1].to(dtype))
