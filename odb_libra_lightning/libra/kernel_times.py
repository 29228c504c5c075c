"""How long attention kernels run, without the exchange around them and without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from odb_libra_lightning.libra.device_mark import DeviceMark
from odb_libra_lightning.libra.kernel_interface import AttentionKernel
from odb_libra_lightning.libra.segments import Segments

# Calls whose marks are kept; from then on those that the device is through with are added up at the next call.
_CALLS_KEPT = 64


def kernel_mark(device: torch.device) -> DeviceMark:
    """A moment before or after a kernel call.

    On a CPU the clock is the calling thread's own, so that other processes on the same cores do not count. Where torch
    computes with several threads, theirs would be missing from it, and the clock is the wall's.
    """
    return DeviceMark(device, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


class KernelTimes:
    """Adds up the time of kernel calls, forward, backward and recomputed: what `timed` kernels report to.

    On a GPU it is the time from a call's first to its last work in the stream, and the host never waits before
    `seconds` is asked for.

    Args:
        mark: a moment on a device; for tests.
    """

    def __init__(self, mark: Callable[[torch.device], DeviceMark] = kernel_mark) -> None:
        self.mark = mark
        self._calls: deque[tuple[DeviceMark, DeviceMark]] = deque()
        self._seconds = 0.0

    def add(self, begin: DeviceMark, end: DeviceMark) -> None:
        """Count a call."""
        self._calls.append((begin, end))
        if len(self._calls) > _CALLS_KEPT:
            self.settle()

    def settle(self) -> bool:
        """Add up the calls that the device is through with and give their marks back; nothing is waited for.

        Returns:
            Whether these are all calls so far.
        """
        while self._calls and self._calls[0][1].passed:
            begin, end = self._calls.popleft()
            self._seconds += begin.seconds_to(end)
        return not self._calls

    def seconds(self) -> float:
        """Seconds of all calls so far; waits for the device to finish them."""
        while self._calls:
            begin, end = self._calls.popleft()
            self._seconds += begin.seconds_to(end)
        return self._seconds


def timed(kernel: AttentionKernel, times: KernelTimes) -> AttentionKernel:
    """The same kernel, whose calls are counted.

    Args:
        kernel: any kernel.
        times: what its calls are added to.
    """
    return _TimedKernel(kernel, times)


class _TimedKernel:
    def __init__(self, kernel: AttentionKernel, times: KernelTimes) -> None:
        self._kernel, self._times = kernel, times

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = self._times.mark(q.device)
        result = self._kernel.forward(q, k, v, segments, causal=causal, scale=scale, window=window)
        self._times.add(begin, self._times.mark(q.device))
        return result

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        *,
        causal: bool,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        begin = self._times.mark(q.device)
        result = self._kernel.backward(grad_out, q, k, v, out, lse, segments, causal=causal, scale=scale, window=window)
        self._times.add(begin, self._times.mark(q.device))
        return result
