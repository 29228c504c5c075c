"""Moments on the clock of the device that does the work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class DeviceMark:
    """A moment: on a GPU an event in its current stream, which the host does not wait for; else the clock's time.

    Args:
        device: where the work is done.
        clock: seconds, where the device is no GPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._time = clock()

    @property
    def passed(self) -> bool:
        """Whether the device has come here."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_to(self, later: DeviceMark) -> float:
        """Seconds from here to a later moment of the same device, which is waited for."""
        if self._event is None or later._event is None:
            return later._time - self._time
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000
