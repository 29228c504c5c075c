"""The time of kernel calls, on a device played by a clock: what counts, and that nobody waits for it early."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from odb_libra_lightning.libra import libra_attention, plan_pool
from odb_libra_lightning.libra.cpu_kernel import CpuKernel
from odb_libra_lightning.libra.device_mark import DeviceMark
from odb_libra_lightning.libra.kernel_times import KernelTimes, kernel_mark, timed
from odb_libra_lightning.libra.segments import Segments

SEGMENTS = Segments(query_lengths=(3, 2), key_lengths=(3, 4))
MASK: dict[str, Any] = {"causal": True, "scale": 0.5, "window": None}


class Device:
    """A device that is behind the host: marks are made at `queued`, and passed once `done` is there."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.done = 0.0
        self.waits = 0

    def mark(self, device: torch.device) -> DeviceMark:
        assert device == torch.device("cpu"), "a mark is made where the queries are"
        return PlayedMark(self)


class PlayedMark(DeviceMark):
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, device.queued

    @property
    def passed(self) -> bool:
        return self.device.done >= self.at

    def seconds_to(self, later: DeviceMark) -> float:
        assert isinstance(later, PlayedMark)
        if not later.passed:
            self.device.waits += 1
            self.device.done = later.at
        return later.at - self.at


class SlowKernel:
    """Takes 2 s of the device forward and 5 s backward, and remembers what it was called with."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *arguments: Any, **mask: Any) -> Any:
        self.calls.append((*arguments, mask))
        self.device.queued += 2.0
        return "out", "lse"

    def backward(self, *arguments: Any, **mask: Any) -> Any:
        self.calls.append((*arguments, mask))
        self.device.queued += 5.0
        return "dq", "dk", "dv"


def played() -> tuple[Device, SlowKernel, KernelTimes, Any]:
    device = Device()
    kernel, times = SlowKernel(device), KernelTimes(device.mark)
    return device, kernel, times, timed(kernel, times)


def test_forward_and_backward_count_and_what_lies_between_does_not() -> None:
    device, inner, times, kernel = played()
    q, k, v = torch.zeros(5, 2, 4), torch.zeros(7, 1, 4), torch.zeros(7, 1, 4)
    assert times.seconds() == 0.0
    device.queued += 100.0
    assert kernel.forward(q, k, v, SEGMENTS, **MASK) == ("out", "lse")
    device.queued += 100.0
    assert kernel.backward(q, q, k, v, "out", "lse", SEGMENTS, **MASK) == ("dq", "dk", "dv")
    assert times.seconds() == 7.0
    kernel.forward(q, k, v, SEGMENTS, **MASK)  # recomputed
    assert times.seconds() == 9.0
    assert [len(call) for call in inner.calls] == [5, 8, 5]
    assert all(call[-1] == MASK and call[-2] is SEGMENTS for call in inner.calls)
    assert inner.calls[1][0] is q
    assert inner.calls[1][5] == "lse"


def test_the_device_is_waited_for_only_when_seconds_are_asked_for() -> None:
    device, _, times, kernel = played()
    q = torch.zeros(1, 1, 1)
    for _ in range(500):
        kernel.forward(q, q, q, SEGMENTS, **MASK)
        times.settle()
    assert device.waits == 0
    assert times.seconds() == 1000.0
    assert device.waits == 500


def test_marks_of_a_device_that_keeps_up_do_not_pile_up() -> None:
    device, _, times, kernel = played()
    q = torch.zeros(1, 1, 1)
    for _ in range(500):
        kernel.forward(q, q, q, SEGMENTS, **MASK)
        device.done = device.queued
    assert len(times._calls) <= 64
    times.settle()
    assert not times._calls
    assert (times.seconds(), device.waits) == (1000.0, 0)


def test_a_call_half_done_is_not_waited_for() -> None:
    device, _, times, kernel = played()
    q = torch.zeros(1, 1, 1)
    kernel.forward(q, q, q, SEGMENTS, **MASK)
    device.done = 1.0
    times.settle()
    assert device.waits == 0
    assert times.seconds() == 2.0


def test_a_kernel_that_fails_is_not_counted() -> None:
    times = KernelTimes()
    q, short = torch.zeros(5, 2, 4), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="5 queries and 7 keys"):
        timed(CpuKernel(), times).forward(q, short, short, SEGMENTS, **MASK)
    assert times.seconds() == 0.0


@pytest.mark.parametrize(("threads", "seconds"), [(1, 3.0), (2, 40.0)])
def test_the_cpu_clock_counts_the_caller_where_it_computes_alone(
    threads: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, wall = iter([1.0, 4.0]), iter([10.0, 50.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(own))
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    begin = kernel_mark(torch.device("cpu"))
    measured = begin.seconds_to(kernel_mark(torch.device("cpu")))
    monkeypatch.undo()
    assert measured == seconds


def test_a_recomputed_layer_counts_again() -> None:
    plan = plan_pool(
        [[5, 3]],
        context_parallel=1,
        block_size=4,
        head_shards=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        bytes_per_element=4,
        chunks=1,
    )
    rows = torch.randn(8, 2, 8, requires_grad=True)

    def seconds(*, recomputed: bool) -> float:
        device = Device()
        times = KernelTimes(device.mark)
        real = CpuKernel()

        class Counting(CpuKernel):
            def forward(self, *arguments: Any, **mask: Any) -> Any:
                device.queued += 2.0
                return real.forward(*arguments, **mask)

            def backward(self, *arguments: Any, **mask: Any) -> Any:
                device.queued += 5.0
                return real.backward(*arguments, **mask)

        def layer(q: torch.Tensor) -> torch.Tensor:
            return libra_attention(q, q[:, :1], q[:, :1], plan, kernel=timed(Counting(), times))

        out = checkpoint(layer, rows, use_reentrant=False) if recomputed else layer(rows)
        out.sum().backward()
        return times.seconds()

    assert seconds(recomputed=False) == 2.0 + 5.0
    assert seconds(recomputed=True) == 2.0 + 2.0 + 5.0
