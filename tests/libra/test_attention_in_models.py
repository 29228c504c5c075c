"""`libra_attention` in models: layers, checkpointing, idle and slow workers, what is held, who needs gradients."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.prepared_plan import prepare_plan
from odb_libra_lightning.libra.thread_transport import ThreadTransport, run_workers
from odb_libra_lightning.libra.transport import Handle
from tests.libra.attention_of_pools import (
    LONE,
    POOL,
    Recorded,
    Rows,
    assert_close,
    assert_same_bits,
    by_libra,
    dense,
    documents_of,
    on_workers,
    rows_of,
    starts_of,
    with_placement,
)
from tests.libra.dense import dense_attention
from tests.libra.oracles import Pool
from tests.libra.plans import plan_of
from tests.libra.poisoned_transport import PoisonedTransport

REMEMBER = pytest.mark.parametrize("remember", ["keep", "refetch"])


class Model(nn.Module):
    """Layers of projections and attention, the same on every worker; how attention is computed is given."""

    def __init__(self, pool: Pool, layers: int = 2) -> None:
        super().__init__()
        self.pool = pool
        self.width = pool.num_heads * pool.head_dim
        heads = pool.num_heads + 2 * pool.num_kv_heads
        self.inward = nn.ModuleList(nn.Linear(self.width, heads * pool.head_dim) for _ in range(layers))
        self.outward = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(layers))

    def layer(self, number: int, x: Tensor, attention: Any) -> Tensor:
        pool = self.pool
        projected = self.inward[number](x).unflatten(1, (-1, pool.head_dim))
        q, k, v = projected.split([pool.num_heads, pool.num_kv_heads, pool.num_kv_heads], 1)
        return x + self.outward[number](attention(q, k, v).flatten(1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, attention: Any, checkpoint: dict[str, Any] | None = None) -> Tensor:
        for number in range(len(self.inward)):
            if checkpoint is None:
                x = self.layer(number, x, attention)
            else:
                x = torch.utils.checkpoint.checkpoint(self.layer, number, x, attention, **checkpoint)  # type: ignore
        return x

    def gradient(self) -> Tensor:
        return torch.cat([each.grad.flatten() for each in self.parameters() if each.grad is not None])


IDLE = {
    # Worker 3 of four is home to padding alone, worker 2 to all of a short document; nothing is moved.
    "padding": (dataclasses.replace(POOL, documents=((44,), (20,)), tau=100.0), None),
    # Worker 1 has rows, and computes nothing: worker 0 does all of it.
    "all_at_one": (dataclasses.replace(POOL, documents=((44,),)), [0]),
    # Of four workers two have rows and compute, and two have rows and do not.
    "all_at_two": (dataclasses.replace(POOL, documents=((20, 24), (1,) * 44)), [1, 3]),
}


@REMEMBER
@pytest.mark.parametrize("case", IDLE)
def test_workers_without_a_tile_and_activation_checkpointing(case: str, remember: str) -> None:
    """Same gradients, and the same transfers in the same order on every worker, however backward gets its inputs."""
    pool, workers = IDLE[case]
    plan, starts = plan_of(pool), starts_of(pool)
    if workers is not None:
        plan = with_placement(plan, [workers[at % len(workers)] for at in range(len(plan.tile_worker))])
    assert not all(len(prepare_plan(plan, worker).segments) for worker in range(pool.num_workers))
    torch.manual_seed(1)
    inputs = torch.randn(starts[-1], pool.num_heads * pool.head_dim, dtype=torch.float64)
    weights, untouched = torch.randn_like(inputs), Model(pool).double()

    def work(transport: ThreadTransport, checkpoint: dict[str, Any] | None) -> tuple[Tensor, list[tuple[str, int]]]:
        model, calls = copy.deepcopy(untouched), list[tuple[str, int]]()
        start, stop = starts[transport.rank : transport.rank + 2]
        recorded = Recorded(transport, calls)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return libra_attention(q, k, v, plan, transport=recorded, remember=remember)  # type: ignore[arg-type]

        x = inputs[start:stop].clone().requires_grad_()
        (model(x, attention, checkpoint) * weights[start:stop]).sum().backward()
        return model.gradient(), calls

    model = copy.deepcopy(untouched)
    documents = documents_of(pool)
    (model(inputs, lambda q, k, v: dense_attention(q, k, v, documents)) * weights).sum().backward()
    right = model.gradient()

    found = {}
    for name, checkpoint in {
        "none": None,
        "reentrant": {"use_reentrant": True},
        "early_stop": {"use_reentrant": False},
    }.items():
        results = run_workers(lambda t, checkpoint=checkpoint: work(t, checkpoint), pool.num_workers, timeout=20)
        found[name] = [gradient for gradient, _ in results]
        calls = [each for _, each in results]
        assert calls[0]
        assert all(each == calls[0] for each in calls), name
        if name == "none":
            once = len(calls[0])
        else:  # forward once more
            assert once < len(calls[0]) < 2 * once, name
        total = torch.stack(found[name]).sum(0)
        assert (total - right).abs().max() <= 1e-10 * right.abs().max(), name
        for mine, other in zip(found[name], found["none"], strict=True):
            assert torch.equal(mine, other), name


def test_layers_share_a_plan_and_its_indices() -> None:
    pool, starts = POOL, starts_of(POOL)
    plan = plan_of(pool)
    torch.manual_seed(1)
    inputs = torch.randn(starts[-1], pool.num_heads * pool.head_dim, dtype=torch.float64, requires_grad=True)
    model, documents = Model(pool, layers=3).double(), documents_of(pool)
    right = model(inputs, lambda q, k, v: dense_attention(q, k, v, documents))
    (gradient,) = torch.autograd.grad(right.square().sum(), inputs)

    def work(transport: ThreadTransport) -> tuple[Tensor, Tensor]:
        start, stop = starts[transport.rank : transport.rank + 2]
        x = inputs.detach()[start:stop].requires_grad_()
        prepared = prepare_plan(plan, transport.rank)
        out = model(x, lambda q, k, v: libra_attention(q, k, v, prepared, transport=transport))
        out.square().sum().backward()
        assert x.grad is not None
        assert len(prepared._indices) == 1
        return out.detach(), x.grad

    out, ours = (torch.cat(each) for each in zip(*run_workers(work, pool.num_workers), strict=True))
    assert torch.allclose(out, right, rtol=0, atol=1e-10)
    assert torch.allclose(ours, gradient, rtol=0, atol=1e-10 * gradient.abs().max().item())


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv", "qv"])
@pytest.mark.parametrize("pool", [POOL, LONE], ids=["travels", "stays"])
def test_only_some_inputs_need_gradients(pool: Pool, wanted: str) -> None:
    plan, rows = plan_of(pool), rows_of(pool)

    def work(transport: ThreadTransport, rows: Rows) -> list[Tensor | None]:
        for name, shard in zip("qkv", rows, strict=False):
            shard.requires_grad_(name in wanted)
        libra_attention(*rows[:3], plan, transport=transport).backward(rows.grad)
        return [shard.grad for shard in rows[:3]]

    gradients = zip(*on_workers(pool, rows, work), strict=True)
    for name, ours, right in zip("qkv", gradients, dense(pool, rows)[1:], strict=True):
        assert [each is not None for each in ours] == [name in wanted] * pool.num_workers
        if name in wanted:
            assert torch.allclose(torch.cat(ours), right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_then_with(mode: Any) -> None:
    plan, rows = plan_of(POOL), rows_of(POOL)

    def work(transport: ThreadTransport, rows: Rows) -> Tensor:
        with mode():
            out = libra_attention(*rows[:3], plan, transport=transport)
        assert not out.requires_grad
        return out.clone()

    right = dense(POOL, rows)
    assert torch.allclose(torch.cat(on_workers(POOL, rows, work)), right.out, rtol=0, atol=1e-10)
    assert_close(by_libra(POOL, plan, rows), right, 1e-10)  # indices that were made without gradients serve


def test_backward_may_run_twice_and_not_be_differentiated() -> None:
    plan = plan_of(POOL)

    def work(transport: ThreadTransport, rows: Rows) -> None:
        inputs = rows[:3]
        out = libra_attention(*inputs, plan, transport=PoisonedTransport(transport), remember="refetch")
        first = torch.autograd.grad(out, inputs, rows.grad, retain_graph=True)
        again = torch.autograd.grad(out, inputs, rows.grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        (gradient,) = torch.autograd.grad(out.square().sum(), rows.q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    on_workers(POOL, rows_of(POOL), work)


def test_refetch_holds_no_rows_of_others() -> None:
    plan, rows = plan_of(POOL), rows_of(POOL, dtype=torch.float32)

    def held(transport: ThreadTransport, rows: Rows) -> list[int]:
        found = []
        for remember in ("keep", "refetch"):
            memory: dict[int, int] = {}

            def pack(tensor: Tensor, memory: dict[int, int] = memory) -> Tensor:
                memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                libra_attention(*rows[:3], plan, transport=transport, remember=remember)  # type: ignore[arg-type]
            found.append(sum(memory.values()))
        return found

    for worker, (kept, fetched) in enumerate(on_workers(POOL, rows, held)):
        incoming = [
            plan.split_sizes(worker, phase, chunk)[1] for phase in ("queries", "keys") for chunk in range(POOL.chunks)
        ]
        assert kept - fetched == 4 * sum(map(sum, incoming))


@REMEMBER
def test_two_transfers_in_flight_a_slow_rank_and_poisoned_buffers_change_nothing(remember: str) -> None:
    """An odd-even mix: every other sequence is one long document, and its workers send to the others."""
    pool = dataclasses.replace(POOL, documents=((44,), (1,) * 44, (44,), (2,) * 22), chunks=4)
    plan, rows = plan_of(pool), rows_of(pool, dtype=torch.float32)
    assert len(plan.queries)
    most = []

    class Slow:
        """Poisons buffers, dawdles on one rank, and counts transfers that have begun and not been waited for."""

        def __init__(self, inner: ThreadTransport) -> None:
            self.rank, self.size = inner.rank, inner.size
            self._inner, self.flying = PoisonedTransport(inner), 0

        def all_to_all(
            self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
        ) -> Handle:
            if self.rank == 3:
                time.sleep(0.003)
            handle, self.flying = self._inner.all_to_all(output, input, output_splits, input_splits), self.flying + 1
            most.append(self.flying)
            return Waited(self, handle)

    class Waited:
        def __init__(self, transport: Slow, handle: Handle) -> None:
            self._transport, self._handle = transport, handle

        def wait(self) -> None:
            self._handle.wait()
            self._transport.flying -= 1

    ours = by_libra(pool, plan, rows, wrap=Slow, remember=remember)
    assert max(most) > 2
    assert_same_bits(ours, by_libra(pool, plan, rows))
    assert_close(ours, dense(pool, rows.to(torch.float64)), 1e-5)
