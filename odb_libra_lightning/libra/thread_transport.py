"""Workers that are threads of one process: a `Transport` for tests and for benchmarks on one device.

`run_workers` runs a function on as many workers. `DelayedTransport` goes around any transport, makes it slow and writes
down what was under way when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from odb_libra_lightning.libra.transport import Handle, Transport

Result = TypeVar("Result")


class Hub:
    """Where the workers of one process meet.

    Args:
        size: workers.
        timeout: seconds that a worker waits in `wait()` for the others.
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a hub has at least 1 worker")
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._exchanges: dict[int, _Exchange] = {}
        self._closed: str | None = None

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of one worker; it may be asked for once."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank={rank}: this hub has {self.size} workers, numbered from 0")
        return ThreadTransport(self, rank)

    def close(self, reason: str) -> None:
        """End every wait for a transfer that is not complete, now and later, with a RuntimeError."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def _join(self, number: int, rank: int, part: _Part) -> _Exchange:
        with self._changed:
            exchange = self._exchanges.setdefault(number, _Exchange(number=number))
            exchange.parts[rank] = part
            if len(exchange.parts) < self.size:
                return exchange
            del self._exchanges[number]
        # The last one to come does the copying, so that nobody's progress depends on another's being in `wait()`.
        exchange.complete()
        with self._changed:
            exchange.done = True
            exchange.parts.clear()  # a handle that is kept shall not keep the buffers
            self._changed.notify_all()
        return exchange

    def _wait(self, exchange: _Exchange, rank: int, device: torch.device) -> None:
        with self._changed:
            self._changed.wait_for(lambda: exchange.done or self._closed is not None, self.timeout)
            missing = sorted(set(range(self.size)) - set(exchange.parts))
        if not exchange.done:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            raise TimeoutError(
                f"worker {rank} has waited {self.timeout:g} s in exchange {exchange.number}: of {self.size} workers, "
                f"numbers {', '.join(map(str, missing))} did not come"
            )
        if exchange.error is not None:
            raise ValueError(exchange.error)
        if exchange.copied is not None:
            torch.cuda.current_stream(device).wait_event(exchange.copied)


class ThreadTransport:
    """One worker's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._calls = 0

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """See `Transport.all_to_all`.

        Raises:
            ValueError: splits that are not those of the tensor; and from `wait()`, where two workers do not agree.
        """
        for name, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
            if len(splits) != self.size or min(splits) < 0 or sum(splits) != tensor.shape[0]:
                raise ValueError(
                    f"{name}_splits={list(splits)} of worker {self.rank}: {self.size} numbers of at least 0 would fit "
                    f"that make up the {tensor.shape[0]} rows of `{name}`"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"`{name}` of worker {self.rank} is not contiguous, shape {tuple(tensor.shape)}")
        part = _Part(
            output=output,
            input=input,
            output_splits=list(output_splits),
            input_splits=list(input_splits),
            ready=_event(input.device),
        )
        exchange = self._hub._join(self._calls, self.rank, part)
        self._calls += 1
        return _ThreadHandle(self._hub, exchange, self.rank, input.device)


@dataclass(frozen=True)
class _ThreadHandle:
    hub: Hub
    exchange: _Exchange
    rank: int
    device: torch.device

    def wait(self) -> None:
        self.hub._wait(self.exchange, self.rank, self.device)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one worker brings to an exchange."""

    output: torch.Tensor
    input: torch.Tensor
    output_splits: list[int]
    input_splits: list[int]
    ready: torch.cuda.Event | None


@dataclass(kw_only=True)
class _Exchange:
    """One all-to-all; `parts` by rank."""

    number: int
    parts: dict[int, _Part] = field(default_factory=dict)
    done: bool = False
    error: str | None = None
    copied: torch.cuda.Event | None = None

    def complete(self) -> None:
        """Compare what the workers expect, and copy."""
        self.error = self._disagreement()
        if self.error is not None:
            return
        for part in self.parts.values():
            if part.ready is not None:
                torch.cuda.current_stream(part.input.device).wait_event(part.ready)
        with torch.no_grad():
            sent = {rank: torch.split(part.input, part.input_splits) for rank, part in self.parts.items()}
            for receiver, part in self.parts.items():
                for sender, piece in enumerate(torch.split(part.output, part.output_splits)):
                    piece.copy_(sent[sender][receiver])
        self.copied = _event(self.parts[0].input.device)

    def _disagreement(self) -> str | None:
        for sender, sent in sorted(self.parts.items()):
            for receiver, received in sorted(self.parts.items()):
                rows, expected = sent.input_splits[receiver], received.output_splits[sender]
                if rows != expected:
                    return (
                        f"exchange {self.number}: worker {sender} sends {rows} rows to worker {receiver}, "
                        f"which expects {expected}"
                    )
                kind, awaited = _kind(sent.input), _kind(received.output)
                if rows and kind != awaited:
                    return (
                        f"exchange {self.number}: worker {sender} sends rows of {kind} to worker {receiver}, "
                        f"which expects {awaited}"
                    )
        return None


def _kind(rows: torch.Tensor) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])}"


def _event(device: torch.device) -> torch.cuda.Event | None:
    """What has been queued on the current stream until now; None on the CPU, where all is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def run_workers(function: Callable[[ThreadTransport], Result], size: int, *, timeout: float = 60.0) -> list[Result]:
    """Results of `function(transport)` on each of `size` threads, in order of their ranks.

    Autograd stays in the thread that calls `backward()`. On CUDA it would use one thread a device for everybody, and a
    worker that waits there for another would wait for ever.

    Raises:
        Exception: the first that a worker raised. The others' waits end at once.
        TimeoutError: workers that have not returned after `timeout` seconds; their threads are left alone.
    """
    hub = Hub(size, timeout=timeout)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(hub.transport(rank))
        except BaseException as failure:
            failures.append(failure)
            hub.close(f"worker {rank} has failed: {failure}")

    threads = [threading.Thread(target=work, args=[rank], name=f"worker {rank}", daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if not failures and (late := [str(rank) for rank, thread in enumerate(threads) if thread.is_alive()]):
        reason = f"after {timeout:g} s workers {', '.join(late)} of {size} have not returned"
        hub.close(reason)
        raise TimeoutError(reason)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


@dataclass(frozen=True, kw_only=True)
class TransferEvent:
    """A transfer that was waited for. Seconds of `time.monotonic`.

    Attributes:
        kind: `all_to_all`; those who add events of their own to the list name them otherwise.
        begin: when it was called.
        end: when the first `wait()` returned.
        sent_bytes: what went to other workers.
    """

    kind: str
    begin: float
    end: float
    sent_bytes: int = 0


class DelayedTransport:
    """A transport whose transfers take no less than so many seconds from the call, and are written down.

    The call returns at once; the time passes while the caller computes, or in `wait()`.

    Args:
        inner: what carries the rows.
        seconds: the least a transfer takes.
        events: list that transfers are added to, in order in which they were waited for.
    """

    def __init__(self, inner: Transport, seconds: float = 0.0, *, events: list[TransferEvent] | None = None) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.seconds = seconds
        self.events: list[TransferEvent] = [] if events is None else events
        self._inner = inner

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """See `Transport.all_to_all`."""
        begin = time.monotonic()
        handle = self._inner.all_to_all(output, input, output_splits, input_splits)
        row_bytes = input[:1].nbytes if len(input) else 0
        others = sum(input_splits) - input_splits[self.rank]

        def complete() -> None:
            handle.wait()
            time.sleep(max(begin + self.seconds - time.monotonic(), 0))
            self.events.append(
                TransferEvent(kind="all_to_all", begin=begin, end=time.monotonic(), sent_bytes=others * row_bytes)
            )

        return _Once(complete)


class _Once:
    """A handle whose first `wait()` does something."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete: Callable[[], None] | None = complete

    def wait(self) -> None:
        if self._complete is not None:
            self._complete()
            self._complete = None
