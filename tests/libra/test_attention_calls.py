"""When `libra_attention` calls its kernel and its transport, and when it refuses to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from odb_libra_lightning.libra.attention import libra_attention
from odb_libra_lightning.libra.kernels import kernel_for
from odb_libra_lightning.libra.prepared_plan import prepare_plan
from odb_libra_lightning.libra.segments import Segments
from odb_libra_lightning.libra.thread_transport import ThreadTransport, run_workers
from odb_libra_lightning.libra.transport import Handle, Transport
from tests.libra.attention_of_pools import (
    POOL,
    Results,
    assert_close,
    by_libra,
    dense,
    rows_of,
    starts_of,
)
from tests.libra.oracles import Pool
from tests.libra.plans import plan_of


class Counted:
    """The kernel of the CPU, counting what it is called on."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._inner = kernel_for(torch.device("cpu"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, **mask: Any) -> tuple[Tensor, Tensor]:
        self.calls.append(tuple(q.shape))
        return self._inner.forward(q, k, v, segments, **mask)

    def backward(self, *args: Any, **mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(tuple(args[1].shape))
        return self._inner.backward(*args, **mask)


class Silent:
    """A transport that must not be used."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.size = inner.rank, inner.size

    def all_to_all(self, *_: Any) -> Handle:
        raise AssertionError("nothing travels in this pool")


@pytest.mark.parametrize("documents", [((9, 1, 14),), ((9, 1, 14), (24,), (4,))])
def test_where_nothing_travels_there_is_one_call_of_the_kernel_and_no_transfer(
    documents: tuple[tuple[int, ...], ...],
) -> None:
    for window in (None, 1, 4):
        pool = dataclasses.replace(
            POOL, documents=documents, context_parallel=1, sequence_length=25, tau=100.0, window=window
        )
        plan, rows = plan_of(pool), rows_of(pool)
        kernel = Counted()
        ours = by_libra(pool, plan, rows, wrap=Silent, kernel=kernel)
        assert_close(ours, dense(pool, rows), 1e-10)
        assert sorted(kernel.calls) == sorted((sum(each), 8, 4) for each in documents for _ in "fb")


def test_one_worker_needs_no_process_group() -> None:
    pool = dataclasses.replace(POOL, documents=((9, 1, 14),), context_parallel=1, sequence_length=None)
    rows = rows_of(pool)
    q, k, v = (each.requires_grad_() for each in rows[:3])
    out = libra_attention(q, k, v, plan_of(pool))
    ours = Results(out.detach(), *torch.autograd.grad(out, (q, k, v), rows.grad))
    assert_close(ours, dense(pool, rows), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_autocast_casts_as_for_the_attention_of_pytorch(dtype: torch.dtype) -> None:
    pool = dataclasses.replace(POOL, documents=((9, 1, 14),), context_parallel=1, sequence_length=None)
    plan, (q, k, v, grad) = plan_of(pool), rows_of(pool, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        peer = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, q, q)))
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        out = libra_attention(*inputs, plan)
    assert out.dtype == peer.dtype
    assert torch.equal(out, libra_attention(*(each.to(peer.dtype) for each in (q, k, v)), plan))
    gradients = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    assert all(each.dtype == dtype for each in gradients)


def test_a_compiled_module_calls_it_as_it_is() -> None:
    pool = dataclasses.replace(POOL, documents=((9, 1, 14),), context_parallel=1, sequence_length=None)
    plan, (q, k, v, grad) = plan_of(pool), rows_of(pool)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * libra_attention(q + 1, k, v, plan)

    results = []
    for call in (block, torch.compile(block, backend="eager")):
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        out = call(*leaves)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)


ALONE = Pool(documents=((12, 4),), context_parallel=1, num_heads=4, num_kv_heads=2, head_dim=3)
ROWS = rows_of(ALONE, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"q": ROWS.q[:15]}, ValueError, r"q has shape \[15, 4, 3\], and the plan has \[16, 4, 3\] at worker 0"),
        ({"q": ROWS.k}, ValueError, r"q has shape \[16, 2, 3\], and the plan has \[16, 4, 3\]"),
        ({"k": ROWS.q}, ValueError, r"k has shape \[16, 4, 3\], and the plan has \[16, 2, 3\]"),
        ({"v": ROWS.v[..., :2]}, ValueError, r"v has shape \[16, 2, 2\], and the plan has \[16, 2, 3\]"),
        ({"v": ROWS.v[None]}, ValueError, r"v has shape \[1, 16, 2, 3\]"),
        ({"v": ROWS.v.bfloat16()}, ValueError, "one dtype and device: got .*float32 on cpu and torch.bfloat16 on cpu"),
        ({"k": ROWS.k.to("meta")}, ValueError, "one dtype and device: .* on meta"),
        ({name: getattr(ROWS, name).to("meta") for name in "qkv"}, ValueError, "no attention kernel is known for meta"),
        ({name: getattr(ROWS, name).int() for name in "qkv"}, ValueError, "torch.int32: expected a floating-point"),
        ({"remember": "forget"}, ValueError, "remember='forget': choose one of keep, refetch"),
        ({"kernel": "fastest"}, ValueError, "no attention kernel is called 'fastest'; there are"),
        ({"kernel": 3}, TypeError, "kernel is a int: expected a name or an AttentionKernel"),
        ({"scale": float("nan")}, ValueError, "scale=nan: expected a finite number above 0"),
        ({"scale": -0.5}, ValueError, "scale=-0.5: expected a finite number above 0"),
        ({"scale": float("inf")}, ValueError, "scale=inf: expected a finite number above 0"),
        ({"scale": torch.ones(())}, ValueError, r"scale=tensor\(1.\): expected a finite number"),
        ({"plan": None}, TypeError, "plan is a NoneType: expected a PoolPlan or a PreparedPlan"),
        ({"transport": 4}, TypeError, r"transport is a int: expected a Transport, such as GroupTransport"),
        ({"dropout": 0.1}, TypeError, "unexpected keyword argument 'dropout'"),
        ({"window": 4}, TypeError, "unexpected keyword argument 'window'"),
        ({"softcap": 30.0}, TypeError, "unexpected keyword argument 'softcap'"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {"q": ROWS.q, "k": ROWS.k, "v": ROWS.v, "plan": plan_of(ALONE), **changed}
    with pytest.raises(error, match=words) as refusal:
        libra_attention(*(arguments.pop(name) for name in "qkv"), arguments.pop("plan"), **arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_plan_for_another_number_of_workers_is_refused_by_all_before_anything_is_sent(size: int) -> None:
    plan, rows, starts = plan_of(POOL), rows_of(POOL), starts_of(POOL)

    def work(transport: ThreadTransport) -> str:
        start, stop = starts[transport.rank : transport.rank + 2]
        with pytest.raises(ValueError, match="plan is for 6 workers") as refusal:
            libra_attention(*(each[start:stop] for each in rows[:3]), plan, transport=Silent(transport))
        return str(refusal.value)

    assert all(f"this transport has {size}: give the pool's" in each for each in run_workers(work, size))


def test_a_plan_prepared_for_another_worker_is_refused() -> None:
    plan, rows = plan_of(POOL), rows_of(POOL)

    def work(transport: ThreadTransport) -> None:
        prepared = prepare_plan(plan, (transport.rank + 1) % 6)
        with pytest.raises(ValueError, match=r"plan is for worker \d of 6 .* this is rank \d of 6"):
            libra_attention(*(each[:22] for each in rows[:3]), prepared, transport=Silent(transport))

    run_workers(work, 6)
